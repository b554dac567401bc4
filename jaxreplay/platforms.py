"""The platform that a state's arrays are laid out for: a tree has the width that suits it, and rows lie in tiles on a TPU.

A state is of one platform for good, and says so in its layout. It never depends on which backend happens to trace a program: one that is
compiled on a CPU host for a TPU is that of the TPU.
"""

from typing import Any

from jaxreplay.memory import default_device

PLATFORMS = ("cpu", "gpu", "tpu")
_OTHER_NAMES = {"cuda": "gpu", "rocm": "gpu"}
# On one core, a find in 1 M leaves takes 17 us for 256 of them with 8 children, 19 with 4, 35 with 16. A GPU reads 32 children one after
# another in one kernel; 128 are whole registers of a TPU.
_FAN_OUTS = {"cpu": 8, "gpu": 32}
_OTHER_FAN_OUT = 128


def default() -> str:
    """That of the device that new arrays go to now."""
    return platform_of(default_device())


def platform_of(device: Any) -> str:
    """Of a `jax.Device`."""
    name = str(device.platform)
    return _OTHER_NAMES.get(name, name)


def checked(where: str, platform: str) -> str:
    """One of `PLATFORMS`, also by the name of its toolkit, or a ValueError."""
    known = _OTHER_NAMES.get(platform, platform) if isinstance(platform, str) else ""
    if known not in PLATFORMS:
        raise ValueError(f"{where}: platform must be one of {PLATFORMS}, got {platform!r}")
    return known


def fan_out(platform: str | None) -> int:
    """Children of a node of a tree."""
    assert platform is not None
    return _FAN_OUTS.get(platform, _OTHER_FAN_OUT)

"""The platform that a state's arrays are laid out for: a tree has the width that suits it, and rows
lie in tiles on a TPU.

A state is of one platform for good, and says so in its layout. It never depends on which backend
happens to trace a program: one that is compiled on a CPU host for a TPU is that of the TPU.
"""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a platform that decide between forms of a program, all with equal results.

    Args:
      fan_out: children of a node of a tree. On one core, a find in 1 M leaves takes 17 us for 256
        of them with 8 children, 19 with 4, 35 with 16. A GPU reads 32 children one after another in
        one kernel; 128 are whole registers of a TPU.
      num_ways: values that a step of a search reads. Each step is a kernel of its own on a GPU; on
        a TPU each value takes its time.
      in_line: whether small steps are written out element by element, and counted before any row is
        written: on a GPU they go into one kernel, where a reduction is one by itself.
      has_loops: whether a loop may end when the data say so: a GPU would wait for its host.
      has_branches: the same of a branch.
      has_tiles: whether rows lie in tiles.
    """

    fan_out: int
    num_ways: int = 2
    in_line: bool = False
    has_loops: bool = False
    has_branches: bool = False
    has_tiles: bool = False


TRAITS = {
    "cpu": Traits(fan_out=8, has_loops=True, has_branches=True),
    "gpu": Traits(fan_out=32, num_ways=16, in_line=True),
    "tpu": Traits(fan_out=128, has_branches=True, has_tiles=True),
}
PLATFORMS = tuple(TRAITS)
_OTHER_NAMES = {"cuda": "gpu", "rocm": "gpu"}


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


def traits_of(platform: str) -> Traits:
    """Return the traits of a platform; of an unknown one, those that are right anywhere."""
    return TRAITS.get(platform, Traits(fan_out=128))


def default_device() -> Any:
    """The `jax.Device` that new arrays go to."""
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]

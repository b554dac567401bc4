"""Platforms that a state's arrays are laid out for: they decide the width of trees, and on a TPU
rows lie in tiles.

A state keeps its platform, which is a part of its layout. The backend that traces a program does
not matter: a program that a CPU host compiles for a state of a TPU has the TPU's form.
"""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a platform. They choose between forms of a program that have equal results, but for
    uniform samples where the first four tries fail, or where a GPU tries other rows.

    Args:
      fan_out: Number of children of a tree's node. On one CPU core, 256 finds in 1 M leaves take
        17 us with 8 children, 19 us with 4 and 35 us with 16. A GPU reads 32 children one after
        another in one kernel. 128 children fill whole registers of a TPU.
      num_ways: Number of parts into which each round of `search.last_slot` divides the slots, by
        reading one value fewer. On a GPU each round is a kernel of its own; on a TPU they are read
        one after another. Default: 2.
      in_line: Write small operations out element by element, and count a write before any row is
        written. On a GPU they then go into one kernel, while a reduction is a kernel of its own.
        Default: False.
      has_loops: Allow loops whose end depends on data; a GPU would wait for its host. Default:
        False.
      has_branches: Allow branches that depend on data, likewise. Default: False.
      has_tiles: Store rows in tiles. Default: False.
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
    """Return the platform of the device that new arrays go to now."""
    return platform_of(default_device())


def platform_of(device: Any) -> str:
    """Return the platform of a `jax.Device`."""
    name = str(device.platform)
    return _OTHER_NAMES.get(name, name)


def checked(where: str, platform: str) -> str:
    """Return a platform's name in `PLATFORMS`; "cuda" and "rocm" are accepted for "gpu".

    Raises:
      ValueError: The platform is unknown.
    """
    known = _OTHER_NAMES.get(platform, platform) if isinstance(platform, str) else ""
    if known not in PLATFORMS:
        raise ValueError(f"{where}: platform must be one of {PLATFORMS}, got {platform!r}")
    return known


def traits_of(platform: str) -> Traits:
    """Return the traits of a platform; for an unknown one, traits that work anywhere."""
    return TRAITS.get(platform, Traits(fan_out=128))


def default_device() -> Any:
    """Return the `jax.Device` that new arrays go to."""
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]

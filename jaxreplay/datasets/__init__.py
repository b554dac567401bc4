"""Import of recorded episodes, from files and other libraries, an episode at a time; and export to
Minari.

    buffer = jr.uniform(capacity=2_000_000, batch_size=256, autoreset="next_step")
    state = from_npz("cube-single-play-v0.npz", buffer, final_rows=True)
"""

from typing import TYPE_CHECKING, Any

from jaxreplay.datasets.episodes import Episode, from_episodes
from jaxreplay.datasets.lerobot import from_lerobot
from jaxreplay.datasets.npz import from_npz
from jaxreplay.datasets.vault import from_vault

if TYPE_CHECKING:
    from jaxreplay.datasets.minari import from_minari, required_capacity, to_minari

__all__ = [
    "Episode",
    "from_episodes",
    "from_lerobot",
    "from_minari",
    "from_npz",
    "from_vault",
    "required_capacity",
    "to_minari",
]


def __getattr__(name: str) -> Any:
    if name in ("from_minari", "required_capacity", "to_minari"):  # these need Minari
        from jaxreplay.datasets import minari

        return getattr(minari, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Recorded data as a buffer's state, from files and other libraries, a few rows at a time; and a
buffer's episodes.

    file = open_npz("cube-single-play-v0.npz")
    names = {"reward": None}
    capacity = required_capacity(file, names=names, final_rows=True)
    buffer = jr.uniform(capacity=capacity, batch_size=256, autoreset="next_step")
    state = from_arrays(file, buffer, names=names, final_rows=True)
"""

from jaxreplay.datasets.arrays import from_arrays, required_capacity
from jaxreplay.datasets.episodes import Episode, from_episodes
from jaxreplay.datasets.export import to_episodes
from jaxreplay.datasets.files import open_npz, open_parquet
from jaxreplay.datasets.lerobot import open_lerobot

__all__ = [
    "Episode",
    "from_arrays",
    "from_episodes",
    "open_lerobot",
    "open_npz",
    "open_parquet",
    "required_capacity",
    "to_episodes",
]

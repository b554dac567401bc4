"""Import of LeRobot datasets from their Parquet files; needs `jaxreplay[lerobot]`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.datasets.episodes import Rows, episodes_of, fill
from jaxreplay.storage.state import ReplayState

_BLOCK_ROWS = 4096
_FLAGS = ("next.terminated", "next.success", "next.truncated", "next.done")


def from_lerobot(
    root: Any,
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    into: ReplayState | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of a LeRobot dataset.

    It reads the Parquet files a block at a time. Images and videos are left out. The observation is
    a dict of the columns `observation.*`, such as `{"state": ...}`. Rewards are `next.reward`, or
    0. The last frame of an episode is a termination if `next.terminated` says so, or `next.success`
    together with `next.done`. Else its next observation is unknown, since LeRobot stores none. With
    `autoreset="same_step_no_final_obs"` the frame is stored, and `jr.chunks` samples it. With
    another `autoreset` the frame's own observation is taken for the final one.

    Args:
      root: Folder of the dataset, which has the folder `data`.
      buffer: A `ReplayBuffer` of steps with any `num_envs` and `autoreset`.
      example: One env's step, as for `buffer.init`. Default: the dataset's shapes and dtypes, cut
        to 32 bits while `jax_enable_x64` is off.
      into: State of the buffer to add to, as for `from_episodes`. Donated. Default: an empty one.

    Returns:
      The state.

    Raises:
      ImportError: PyArrow is not installed.
      ValueError: There are no Parquet files, or a column is missing; or as for `from_episodes`.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError("from_lerobot needs PyArrow: pip install 'jaxreplay[lerobot]'") from error
    files = sorted((Path(root) / "data").rglob("*.parquet"))
    if not files:
        raise ValueError(f"from_lerobot: there are no Parquet files in {Path(root) / 'data'}")
    blocks = (block for file in files for block in _blocks(parquet.ParquetFile(file)))
    return fill("from_lerobot", episodes_of(blocks, buffer), buffer, example, into)


def _blocks(file: Any) -> Iterator[Rows]:
    columns = file.schema_arrow.names
    observations = [
        name
        for name in columns
        if name.startswith("observation.") and _is_numeric(file.schema_arrow.field(name).type)
    ]
    for name, there in (
        ("observation.*, of numbers", observations),
        ("action", "action" in columns),
        ("episode_index", "episode_index" in columns),
    ):
        if not there:
            raise ValueError(f"from_lerobot: there is no column {name}, but {', '.join(columns)}")
    others = [
        name for name in ("action", "episode_index", "next.reward", *_FLAGS) if name in columns
    ]
    for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=[*observations, *others]):
        read = {name: _array(batch.column(name)) for name in batch.schema.names}
        length = batch.num_rows
        none = np.zeros(length, bool)
        terminated, success, truncated, done = (
            read.get(name, none).astype(bool).reshape(length) for name in _FLAGS
        )
        is_end = done | truncated
        terminated = terminated | (success & is_end)
        yield Rows(
            obs={name.removeprefix("observation."): read[name] for name in observations},
            action=read["action"],
            reward=read.get("next.reward", np.zeros(length, np.float32)).reshape(length),
            terminated=terminated,
            truncated=is_end & ~terminated,
            part=read["episode_index"],
        )


def _is_numeric(kind: Any) -> bool:
    import pyarrow

    while pyarrow.types.is_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return (
        pyarrow.types.is_integer(kind)
        or pyarrow.types.is_floating(kind)
        or pyarrow.types.is_boolean(kind)
    )


def _array(column: Any) -> np.ndarray:
    """Return a column of numbers, or of lists of equal length, as [K, ...]."""
    import pyarrow

    shape = [len(column)]
    while pyarrow.types.is_list(column.type) or pyarrow.types.is_fixed_size_list(column.type):
        inner = column.flatten()
        shape.append(len(inner) // max(int(np.prod(shape)), 1))
        column = inner
    return column.to_numpy(zero_copy_only=False).reshape(shape)

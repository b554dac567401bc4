"""Import of `.npz` files of steps in order, such as those of D4RL and OGBench."""

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.datasets import fields
from jaxreplay.datasets.episodes import Rows, episodes_of, fill
from jaxreplay.storage.state import ReplayState

_BLOCK_BYTES = 2**24


def from_npz(
    path: Any,
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    names: Mapping[str, str] | None = None,
    final_rows: bool = False,
    into: ReplayState | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of a file of steps in order.

    The file is read a block at a time, and may be compressed. An episode ends at a termination or a
    truncation and, with next observations, where one is not the next row's observation. Without
    them, the final observation of a truncated episode is unknown: its last observation is taken,
    and its last transition is left out.

    Args:
      path: Path of the `.npz` file. Its arrays are [N, ...].
      buffer: A `ReplayBuffer` of steps with any `num_envs` and `autoreset`.
      example: One env's step, as for `buffer.init`. Default: the file's shapes and dtypes, cut to
        32 bits while `jax_enable_x64` is off.
      names: Arrays of the file by "obs", "action", "reward", "terminated", "truncated" and
        "next_obs". Default: the usual names, such as "observations", "terminals" and "timeouts".
        Without rewards, they are 0.
      final_rows: The row with a flag holds its episode's final observation and is no step, as in
        OGBench's files; each end is then a truncation, and next observations are not read.
        Default: False.
      into: State of the buffer to add to, as for `from_episodes`. Donated. Default: an empty one.

    Returns:
      The state.

    Raises:
      ValueError: An array is missing, has no rows, or has another length than the others; or as for
        `from_episodes`.

    Example:
      >>> import os, tempfile, numpy as np, jaxreplay as jr
      >>> from jaxreplay.datasets import from_npz
      >>> path = os.path.join(tempfile.mkdtemp(), "steps.npz")
      >>> ends = np.array([False, False, True, False, False, True])
      >>> np.savez(path, observations=np.arange(6.0), actions=np.zeros(6), terminals=ends)
      >>> buffer = jr.uniform(capacity=8, batch_size=2, autoreset="next_step")
      >>> state = from_npz(path, buffer, final_rows=True)
      >>> int(buffer.size(state))  # two transitions of each episode
      4
    """
    with contextlib.ExitStack() as files:
        archive = files.enter_context(zipfile.ZipFile(Path(path)))
        members = {name.removesuffix(".npy") for name in archive.namelist()}
        found = fields.found("from_npz", members, names)
        if final_rows:  # the next observation is the next row's
            found.pop("next_obs", None)
        arrays = {
            field: _Array(name, files.enter_context(archive.open(f"{name}.npy")))
            for field, name in found.items()
        }
        lengths = {
            found[field]: array.shape[0] if array.shape else 0 for field, array in arrays.items()
        }
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            text = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(
                f"from_npz: arrays need the same number of rows, at least 1, got {text}"
            )
        episodes = episodes_of(_blocks(arrays, final_rows), buffer, final_rows)
        return fill("from_npz", episodes, buffer, example, into)


class _Array:
    """An array of a `.npz` file, read row by row."""

    def __init__(self, name: str, file: Any):
        self._file = file
        version = npy.read_magic(self._file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        self.shape, is_fortran, self.dtype = read(self._file)
        if self.dtype.hasobject or (is_fortran and len(self.shape) > 1):
            raise ValueError(f"from_npz: {name}: expected an array of numbers in C order")
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:]))

    def read(self, num_rows: int) -> np.ndarray:
        content = bytearray(num_rows * self.row_bytes)
        view, place = memoryview(content), 0
        while place < len(content) and (got := self._file.readinto(view[place:])):
            place += got
        if place < len(content):
            raise ValueError("from_npz: the file ends before its last row")
        return np.frombuffer(content, self.dtype).reshape(num_rows, *self.shape[1:])


def _blocks(arrays: dict[str, _Array], final_rows: bool) -> Iterator[Rows]:
    total = arrays["obs"].shape[0]
    most = max(_BLOCK_BYTES // sum(array.row_bytes for array in arrays.values()), 1)
    for start in range(0, total, most):
        num_rows = min(most, total - start)
        read = {field: array.read(num_rows) for field, array in arrays.items()}
        none = np.zeros(num_rows, bool)
        terminated, truncated = (
            read.get(field, none).reshape(num_rows).astype(bool)
            for field in ("terminated", "truncated")
        )
        if final_rows:  # a flag says where the episode's rows end, not why
            terminated, truncated = none, terminated | truncated
        reward = read.get("reward", np.zeros(num_rows, np.float32)).reshape(num_rows)
        yield Rows(read["obs"], read["action"], reward, terminated, truncated, read.get("next_obs"))

"""Import of anything that has arrays by name: files, folders, and dicts."""

import contextlib
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import kind_of, named, spec_text
from jaxreplay.autoreset import FORMS
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.datasets.episodes import (
    BLOCK_BYTES,
    Deal,
    SourceRows,
    cut,
    episode_parts,
    fill,
    native,
    steps_of,
)
from jaxreplay.datasets.files import natural
from jaxreplay.storage.state import ReplayState

# the usual names of each field, the first that is there
_NAMES = {
    "episode_ends": ("episode_ends",),
    "episode": ("episode_index", "episode_id"),
    "obs": ("observations", "obs", "observation"),
    "action": ("actions", "action"),
    "reward": ("rewards", "reward"),
    "terminated": ("terminations", "terminated", "terminals", "dones", "done"),
    "truncated": ("truncations", "truncated", "timeouts"),
    "next_obs": ("next_observations", "next_obs"),
    "extras": (),
}
_REQUIRED = "obs", "action", "reward", "terminated"
_FLAGS = "terminated", "truncated"
_NUMBERS = "episode_ends", "episode"
_LONG = 1_000  # rows: few episodes have more, and no flag


def from_arrays(
    arrays: Any,
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    names: Mapping[str, PyTree] | None = None,
    final_rows: bool = False,
    into: ReplayState | None = None,
    progress: bool | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of some arrays, such as those of a file.

    They are read a few rows at a time, so that `arrays` may be larger than memory: whatever slices
    by rows, and has a shape and a dtype, is an array. An episode ends at a flag, before a row of
    `episode_ends`, where the number of the episode changes and, with next observations, where one
    is not the next row's observation. Without them, the final observation of a truncated episode is
    unknown: its last observation is taken, and its last transition is left out.

    Args:
      arrays: Mapping of arrays [N, ...] by name, such as an `h5py.File`, a zarr group, what
        `open_npz` returns, or a dict. Or a mapping of such mappings, one an episode, whose
        observations may have N + 1 rows, and extras too, such as Minari's infos: each row belongs
        to an observation, and the last is left out. Or a list of such mappings, one an env.
      buffer: As for `from_episodes`.
      example: One env's step, as for `buffer.init`. Default: the arrays' shapes and dtypes, cut to
        32 bits while `jax_enable_x64` is off.
      names: Names of arrays by "obs", "action", "reward", "terminated", "truncated", "next_obs",
        "episode_ends" (the number of the row after each episode), "episode" (a number of each row,
        equal within an episode) and "extras". A name may be a path, such as "data/action"; of a
        group, it means a dict of all arrays in it. Instead of a name, there may be a pytree of
        names, such as `{"obs": {"image": "img", "state": "data/state"}}`, or None if there is no
        such array: rewards are 0 then. If flags are of several agents, an episode ends where each
        has ended. Default: the usual names, such as "observations", "terminals" and "timeouts", and
        no extras.
      final_rows: The row with a flag holds its episode's final observation and is no step, as in
        OGBench's files; each end is then a truncation, and next observations are not read.
        Default: False.
      into: State of the buffer to add to, as for `from_episodes`. Donated. Default: an empty one.
      progress: If True, show a progress bar. Default: only in a terminal, if tqdm is installed.

    Returns:
      The state.

    Raises:
      ImportError: There shall be a progress bar, and tqdm is not installed.
      ValueError: An array is missing, cannot be read, has no rows, another number of them than the
        others, or no numbers; flags are not 0 or 1; or as for `from_episodes`.

    Example:
      >>> import numpy as np, jaxreplay as jr
      >>> from jaxreplay.datasets import from_arrays
      >>> ends = np.array([False, False, True, False, False, True])
      >>> arrays = {"observations": np.arange(6.0), "actions": np.zeros(6), "rewards": np.ones(6)}
      >>> arrays |= {"terminals": ends}
      >>> buffer = jr.uniform(capacity=8, batch_size=2, autoreset="next_step")
      >>> state = from_arrays(arrays, buffer, final_rows=True)
      >>> int(buffer.size(state))  # two transitions of each episode
      4
    """
    parts = _parts("from_arrays", arrays, names, final_rows)
    total = getattr(arrays, "total_steps", None)
    return fill(
        "from_arrays",
        parts,
        buffer,
        example,
        into=into,
        final_rows=final_rows,
        progress=progress,
        total=total,
    )


def required_capacity(
    source: Any,
    num_envs: int = 1,
    autoreset: str | None = "next_step",
    *,
    names: Mapping[str, PyTree] | None = None,
    final_rows: bool = False,
) -> int:
    """Return the smallest capacity of a buffer that takes all rows of a source.

    It reads the flags and the first row of each array, and the observations if the source has next
    observations.

    Args:
      source: Arrays, as for `from_arrays`, or episodes, as for `from_episodes`.
      num_envs: Number of envs of the buffer. Default: 1.
      autoreset: That of the buffer. Default: "next_step".
      names: As for `from_arrays`. Default: the usual names.
      final_rows: As for `from_arrays`. Default: False.

    Raises:
      ValueError: `num_envs` or `autoreset` is out of range, or as for `from_arrays`.

    Example:
      >>> import numpy as np
      >>> from jaxreplay.datasets import required_capacity
      >>> ends = np.array([False, False, True, False, False, True])
      >>> arrays = {"observations": np.arange(6.0), "actions": np.zeros(6), "rewards": np.ones(6)}
      >>> required_capacity(arrays | {"terminals": ends})  # six steps, two final observations
      8
    """
    checks.check_size("required_capacity", "num_envs", num_envs)
    if autoreset not in FORMS:
        raise ValueError(f"required_capacity: autoreset must be one of {FORMS}, got {autoreset!r}")
    deal = Deal(num_envs, autoreset)
    for _, blocks in _parts("required_capacity", source, names, final_rows, counts=True):
        for _, is_last in steps_of(blocks, autoreset, final_rows):
            list(deal.places(is_last))
    return num_envs * max(deal.used)


def _parts(
    called: str,
    source: Any,
    names: Mapping[str, PyTree] | None,
    final_rows: bool,
    counts: bool = False,
) -> Iterator[tuple[str, Iterable[SourceRows]]]:
    """Yield the name of each part of a source, and its rows.

    Args:
      called: Name of the called function, for errors.
      source: Arrays or episodes.
      names: As for `from_arrays`.
      final_rows: As for `from_arrays`.
      counts: Read only what tells the number of rows. Default: False.
    """
    names = names or {}
    if unknown := names.keys() - _NAMES.keys():
        raise ValueError(
            f"{called}: names has {', '.join(sorted(unknown))}; its keys are {', '.join(_NAMES)}"
        )

    def place(group: Any, *part: str) -> str:
        path = getattr(getattr(group, "file", group), "filename", None)  # of a group in h5py, too
        return ": ".join(filter(None, (called, path, *part)))

    def rows(where: str, group: Any, is_episode: bool = False) -> Iterator[SourceRows]:
        fields = _fields(where, group, names, is_episode)
        return _blocks(where, fields, final_rows, counts, is_episode)

    if not _is_group(source):
        if isinstance(source, str) or not isinstance(source, Iterable) or hasattr(source, "dtype"):
            raise ValueError(
                f"{called}: expected a mapping of arrays, or an iterable of such mappings or of "
                f"episodes, got {kind_of(source)}"
            )
        for nth, one in enumerate(source):
            if _is_group(one):
                yield f"env {nth}", rows(place(one, f"env {nth}"), one)
            else:
                yield from episode_parts(called, [one])
        return
    where = place(source)
    is_by_episode = len(source) and all(_is_group(source[key]) for key in source)
    if not is_by_episode or _first(where, source, names, "action") is not None:
        yield "an episode", rows(where, source)
        return
    for key in sorted(source, key=natural):
        yield str(key), rows(place(source, str(key)), source[key], True)


def _is_group(found: Any) -> bool:
    return isinstance(found, Mapping) or (
        hasattr(found, "keys") and hasattr(found, "__getitem__") and not hasattr(found, "shape")
    )


class _MissingError(KeyError):
    """There is no array of a name."""


def _tried(where: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _MissingError:
        raise
    except Exception as error:  # any that a library raises for a damaged file
        text = str(error) or type(error).__name__
        raise ValueError(f"{where}: cannot be read: {text}") from error


class _Array:
    """An array of a file, [N, ...]."""

    def __init__(self, where: str, name: str, array: Any):
        self._where, self.name = f"{where}: {name}", name
        is_list = isinstance(array, list)
        self._array = _tried(self._where, lambda: np.asarray(array)) if is_list else array
        self.shape, dtype = _tried(self._where, lambda: (self._array.shape, self._array.dtype))
        dtype = getattr(dtype, "numpy_dtype", dtype)  # TensorStore has dtypes of its own
        self.dtype = _tried(self._where, lambda: np.dtype(dtype))
        if not self.shape or self.dtype.kind not in "biuf":
            self.refuse(f"expected numbers [N, ...], got {self.dtype}{list(self.shape)}")
        self.row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self._where}: {why}")

    def read(self, start: int, stop: int) -> np.ndarray:
        values = _tried(self._where, lambda: native(self._array[start:stop]))
        if len(values) < stop - start:
            self.refuse(f"ends at row {start + len(values)} of {self.shape[0]}")
        return values

    def read_flags(self, start: int, stop: int) -> np.ndarray:
        """Read flags, bool[K, A]."""
        values = self.read(start, stop)
        if not (is_flag := (values == 0) | (values == 1)).all():
            self.refuse(f"flags are 0 or 1, got {values[~is_flag][0]}")
        return values.reshape(len(values), -1).astype(bool)

    def read_numbers(self, start: int, stop: int) -> np.ndarray:
        """Read whole numbers, int64[K], such as those of episodes."""
        if self.dtype.kind not in "iu" or math.prod(self.shape[1:]) != 1:
            self.refuse(f"expected whole numbers [N], got {self.dtype}{list(self.shape)}")
        return self.read(start, stop).reshape(stop - start).astype(np.int64)

    def read_ends(self, total: int) -> np.ndarray:
        """Read the numbers of the rows after each episode."""
        ends = self.read_numbers(0, self.shape[0])
        if not len(ends) or ends[-1] != total or ends[0] < 0 or (np.diff(ends) < 0).any():
            self.refuse(f"expected numbers that rise to {total}, the last are {ends[-3:]}")
        return ends


def _found(where: str, group: Any, name: PyTree) -> PyTree:
    """Return the `_Array` of a name, or a pytree of them.

    Raises:
      _MissingError: There is none.
    """
    if not isinstance(name, str):
        if jax.tree_util.all_leaves([name]):
            raise ValueError(f"{where}: names has {name!r}, which is no name")
        return jax.tree.map(lambda one: _found(where, group, one), name)
    found = group
    for key in [name] if name in group else name.split("/"):
        if not _is_group(found) or key not in found:
            raise _MissingError(name)
        found = _tried(f"{where}: {name}", lambda found=found, key=key: found[key])
    if _is_group(found):
        return {key: _found(f"{where}: {name}", found, key) for key in found}
    return _Array(where, name, found)


def _fields(
    where: str, group: Any, names: Mapping[str, Any], is_episode: bool
) -> dict[str, PyTree]:
    """Return the arrays of each field that there is.

    Args:
      where: Name of the called function and the file, for errors.
      group: Arrays by name.
      names: As for `from_arrays`.
      is_episode: They are one episode, which needs no flags.
    """
    fields = {}
    for field, usual in _NAMES.items():
        if jax.tree.leaves(found := _first(where, group, names, field)):
            if field in _NUMBERS and not isinstance(found, _Array):
                raise ValueError(f"{where}: {field}: expected one array, got a group")
            fields[field] = found
            continue
        is_needed = field in _REQUIRED and not (
            field == "terminated" and (is_episode or fields.keys() & {*_NUMBERS})
        )
        if field in names and field not in ("obs", "action"):
            is_needed = names[field] is not None
        if is_needed:
            raise ValueError(
                f"{where}: there is no array {names.get(field) or ' or '.join(usual)} for {field}; "
                f"there are {', '.join(sorted(group)) or 'none'}; pass names={{{field!r}: ...}}, "
                "or None if there is none"
            )
    return fields


def _first(where: str, group: Any, names: Mapping[str, Any], field: str) -> PyTree:
    """Return the arrays of a field, or None if there are none."""
    for name in (names[field],) if field in names else _NAMES[field]:
        with contextlib.suppress(_MissingError):
            if name is not None:
                return _found(where, group, name)
    return None


def _blocks(
    where: str, fields: dict[str, PyTree], final_rows: bool, counts: bool, is_episode: bool
) -> Iterator[SourceRows]:
    """Yield the rows of some arrays, a block at a time.

    Args:
      where: Name of the called function and the file, for errors.
      fields: The arrays of each field.
      final_rows: As for `from_arrays`.
      counts: Read only what tells the number of rows.
      is_episode: They are one episode, and may have no row.
    """
    episode_ends = fields.pop("episode_ends", None)
    if final_rows:  # the next observation is the next row's
        fields.pop("next_obs", None)
    total = jax.tree.leaves(fields["action"])[0].shape[0]
    obs, extras = (jax.tree.leaves(fields.get(field)) for field in ("obs", "extras"))
    has_one_more = lambda array: is_episode and not final_rows and array.shape[0] == total + 1
    is_longer = "next_obs" not in fields and all(map(has_one_more, obs))
    longer = [*(obs if is_longer else []), *filter(has_one_more, extras)]
    _check_alike(where, fields, longer, total, is_episode)
    ends = None if episode_ends is None else episode_ends.read_ends(total)
    if counts:
        compared = fields["obs"] if "next_obs" in fields else ()
        fields = {**fields, "obs": compared, "action": (), "reward": (), "extras": None}
    row_bytes = sum(array.row_bytes for array in jax.tree.leaves(fields))
    most = max(BLOCK_BYTES // max(row_bytes, 1), 1)
    flags = [jax.tree.leaves(fields.pop(field, None)) for field in _FLAGS]
    tells_ends = counts or is_episode or ends is not None or bool(flags[1])
    tells_ends |= not {"episode", "next_obs"}.isdisjoint(fields)
    for start in range(0, total, most):
        stop = min(start + most, total)
        terminated, truncated = _read_flags(flags, start, stop)
        if final_rows:  # a flag says where the episode's rows end, not why
            truncated |= terminated
            terminated = np.zeros_like(terminated)
        read: dict[str, Any] = {"reward": np.zeros(stop - start, np.float32)}
        for field, tree in fields.items():
            call = "read_numbers" if field == "episode" else "read"
            one_more = is_longer and field == "obs"
            read[field] = jax.tree.map(operator.methodcaller(call, start, stop + one_more), tree)
        if is_longer:
            read["next_obs"] = cut(read["obs"], 1, None)
            read["obs"] = cut(read["obs"], 0, -1)
        if ends is not None:
            read["episode"] = np.searchsorted(ends, np.arange(start, stop), side="right")
        read["reward"] = jax.tree.map(_narrow, read["reward"])
        tells_ends |= bool((terminated | truncated).any())
        yield SourceRows(**read, terminated=terminated, truncated=truncated)
    if not tells_ends and total > _LONG:
        warnings.warn(
            f"{where}: no row of {total:,} is terminated, and no array says which are truncated: "
            'they are one episode. If not, name it: names={"truncated": ...}, or "episode_ends"',
            stacklevel=2,
        )


def _check_alike(
    where: str, fields: dict[str, PyTree], longer: list[_Array], total: int, is_episode: bool
) -> None:
    """Raise a ValueError if arrays do not fit each other.

    Args:
      where: Name of the called function and the file, for the error.
      fields: The arrays of each field.
      longer: Arrays that have one row more than the others.
      total: Number of rows of the others.
      is_episode: They are one episode, and may have no row.
    """
    if "next_obs" in fields:
        here, after = (
            ", ".join(f"{name} {spec_text(one)}".strip() for name, one in named(fields[field]))
            for field in ("obs", "next_obs")
        )
        if here != after:
            raise ValueError(
                f"{where}: next observations must be like observations, {here}; they are {after}"
            )
    arrays = jax.tree.leaves(fields)
    lengths = {array.shape[0] - (array in longer) for array in arrays}
    if lengths != {total} or not (total or is_episode):
        text = ", ".join(f"{array.name} {array.shape[0]}" for array in arrays)
        raise ValueError(f"{where}: arrays need the same number of rows, at least 1, got {text}")
    each = [jax.tree.leaves(fields.get(field)) for field in _FLAGS]
    agents = {sum(math.prod(one.shape[1:]) for one in of_field) for of_field in each} - {0, 1}
    if len(agents) > 1:
        raise ValueError(f"{where}: flags are of {' and '.join(map(str, agents))} agents")


def _read_flags(flags: list[list[_Array]], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Read which rows are terminated, and which truncated, bool[K] both: where each agent has
    ended."""
    no_agent = np.zeros((stop - start, 1), bool)
    terminated, truncated = (
        np.concatenate([one.read_flags(start, stop) for one in each] or [no_agent], axis=1)
        for each in flags
    )
    is_end = (terminated | truncated).min(axis=1)
    is_terminated = terminated.min(axis=1)
    return is_terminated, truncated.min(axis=1) | (is_end & ~is_terminated)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Return numbers [K, 1] as [K]."""
    return values.reshape(len(values)) if values.size == len(values) else values

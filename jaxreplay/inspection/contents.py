"""The input of an inspection: rows of a buffer in the order in which they were added, read in
blocks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import description, named, spec_text
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_state
from jaxreplay.inspection.resets import Resets, rows_around_resets
from jaxreplay.samplers import OnlineQueue, Queue
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState

_BLOCK_BYTES = 4 * 2**20
_MOST_ROWS = 2**20  # searched for resets
_FEW_ROWS = 1024  # of a small block


@dataclasses.dataclass(frozen=True)
class Contents:
    """The R rows that a buffer holds, stream after stream, the oldest of each first; E streams."""

    buffer: str  # description of the buffer
    source: str  # path and step of a checkpoint; "" for a state
    length: int  # rows of a stream's ring
    # int64[E]: number of each stream's oldest row. All rows ever written are counted, so a row's
    # position in the ring is its number modulo `length`.
    first: np.ndarray
    end: np.ndarray  # int64[E]: number of each stream's newest row, plus 1
    leaves: dict[str, str]  # dtype and shape of a row's leaf, by its path
    flags: np.ndarray | None  # uint8[R], bits of `row_flags`; None for items
    reward: np.ndarray | None  # float64[R]; None without rewards, or if they are not scalar
    probability: np.ndarray | None  # float64[R], in one draw; None if it is not known
    resets: Resets | None  # None for items
    counters: dict[str, float]  # scalars of the sampler's state
    rows: np.ndarray  # int64[K], in [0, R): the rows whose values were read
    values: dict[str, np.ndarray]  # [K, ...] by the leaf's path

    @property
    def num_rows(self) -> int:
        """Number of rows R that are stored."""
        return int((self.end - self.first).sum())


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """The R stored rows of E streams in order, stream after stream, the oldest of each first."""

    first: np.ndarray  # int64[E], as in `Contents`
    end: np.ndarray  # int64[E]
    specs: Mapping[str, Any]  # `shape` and `dtype` of a row's leaf, by its path
    # reads leaves, each at places in [0, R), int64[...]: [..., *shape] by name
    read: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    autoreset: str | None  # None for items

    def contents(self, max_bytes: int, **others: Any) -> Contents:
        """Return the contents, with at most `max_bytes` of the steps' values.

        Args:
          max_bytes: The bound. Beyond it, the values of a subset of rows are read, spread over all.
          others: Attributes of `Contents` that are not of rows.
        """
        every = np.arange(int((self.end - self.first).sum()))
        steps = {name: one for name, one in self.specs.items() if name.startswith("steps")}
        row_bytes = sum(_leaf_bytes(one) for one in steps.values())
        rows = _spread(every, max_bytes // max(row_bytes, 1))
        wanted = dict.fromkeys(steps, rows)
        wanted |= {name: every for name in ("flags", *self._reward) if name in self.specs}
        found = self.read(wanted)
        values = {name: found[name] for name in steps}
        values |= {name: found[name][rows] for name in self._reward}
        flags = found.get("flags")
        return Contents(
            first=self.first,
            end=self.end,
            leaves={name: spec_text(one) for name, one in steps.items()},
            flags=flags,
            reward=self._reward_in(found),
            resets=self.resets(flags),
            rows=rows,
            values=values,
            **others,
        )

    def resets(self, flags: np.ndarray | None) -> Resets | None:
        """Read the rows around resets; return None for items.

        Args:
          flags: uint8[R], of all rows.
        """
        if flags is None or self.autoreset is None:
            return None
        obs = [name for name in self.specs if name.split(".")[:2] == ["steps", "obs"]]
        row_bytes = sum(_leaf_bytes(self.specs[name]) for name in obs)
        env, _ = numbers_in_order(self.first, self.end)
        around = rows_around_resets(flags, env, row_bytes)
        found = self.read(dict.fromkeys([*obs, *self._reward], around))
        of_obs = [found[name] for name in obs]
        return Resets(self.autoreset, flags[around], self._reward_in(found), of_obs)

    @property
    def _reward(self) -> list[str]:
        """Name of the rewards, if there are any and they are scalar."""
        spec = self.specs.get("steps.reward")
        return [] if spec is None or spec.shape else ["steps.reward"]

    def _reward_in(self, found: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return rewards that were read as float64[...]."""
        return next((found[name].astype(np.float64) for name in self._reward), None)


def contents_of(buffer: Any, state: Any, max_bytes: int) -> Contents:
    """Copy the contents of a state, which is not donated.

    Args:
      buffer: A `ReplayBuffer`.
      state: The buffer's state.
      max_bytes: Bound on the bytes of steps that are copied. Beyond it, a subset of rows is copied,
        spread over the whole buffer.

    Returns:
      The contents.

    Raises:
      ValueError: `buffer` is not a `ReplayBuffer`, or `state` is missing or of another buffer.
    """
    buffer = buffer_of("inspect", buffer)
    check_state("inspect", buffer, state)
    stored, rows = _rows_of(state)
    size = max(1, min(_BLOCK_BYTES // 8, len(rows)))
    drawn = [
        np.asarray(_probability(buffer, state, np.resize(rows[start : start + size], size)))
        for start in range(0, len(rows), size)
    ]
    return stored.contents(
        max_bytes,
        buffer=description(buffer),
        source="",
        length=buffer.length,
        probability=np.concatenate(drawn or [np.zeros(0)]).astype(np.float64)[: len(rows)],
        counters={
            name: float(leaf)
            for name, leaf in named(state.sampler)
            if name in COUNTERS and not leaf.shape
        }
        | _figures_of_queue(buffer, state),
    )


def resets_of(state: ReplayState) -> Resets | None:
    """Read the rows around resets, among the newest 2**20 rows; return None for items.

    The state is not donated.
    """
    if state.layout.autoreset is None:
        return None
    stored, rows = _rows_of(state, max(_MOST_ROWS // state.layout.num_envs, 1))
    return stored.resets(_read(state.rows.flags, rows))


def _rows_of(state: ReplayState, most: int = 2**31) -> tuple[StoredRows, np.ndarray]:
    """Return the newest `most` rows of each stream, and their places in the stored leaves:
    int32[R]."""
    first, end = _span(state)
    first = np.maximum(first, end - most)
    rows = rows_in_order(first, end, state.layout.length)
    held = {"steps": state.rows.steps}
    if state.rows.flags is not None:
        held["flags"] = state.rows.flags
    leaves = dict(named(held, is_leaf=stored_arrays.is_compound))
    specs = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in leaves.items()
    }
    read = lambda wanted: {name: _read(leaves[name], rows[at]) for name, at in wanted.items()}
    return StoredRows(first, end, specs, read, state.layout.autoreset), rows


def _span(state: ReplayState) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of each stream's oldest row, and of its newest row plus 1: int64[E]."""
    counters = state.counters
    position, lap, filled = (
        np.array(leaf).astype(np.int64)
        for leaf in (counters.position, counters.lap, counters.filled)
    )
    end = lap * state.layout.length + position
    return end - filled, end


COUNTERS = ("max_priority", "num_bad_priorities", "num_stale_updates")


def rows_in_order(first: np.ndarray, end: np.ndarray, length: int) -> np.ndarray:
    """Return the rows in order, stream after stream, the oldest first: int32[R]."""
    env, number = numbers_in_order(first, end)
    return (env * length + ring.position_of(number, length)).astype(np.int32)


def numbers_in_order(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the stream of each row, and its number in that stream: int64[R] both."""
    count = end - first
    env = np.repeat(np.arange(len(count)), count)
    return env, np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the rows, spread evenly from the first to the last. If there are
    rows, it returns at least one."""
    most = max(most, 1)
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _leaf_bytes(spec: Any) -> int:
    """Return the bytes of an array."""
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _read(leaf: Any, rows: np.ndarray) -> np.ndarray:
    """Read rows int32[...] of a leaf, a block at a time: `[..., *row]`. Blocks have two sizes,
    because each size is compiled. A block is read also where there are no rows, so that a later
    read compiles nothing."""
    spec = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    large = max(1, _BLOCK_BYTES // max(_leaf_bytes(spec), 1))
    found, flat = [], rows.reshape(-1)
    while len(flat) or not found:
        size = large if len(flat) >= large else min(large, _FEW_ROWS)
        block, flat = flat[:size], flat[size:]
        found.append(np.asarray(_take(leaf, np.resize(block, size)))[: len(block)])
    return np.concatenate(found).reshape(*rows.shape, *spec.shape)


@jax.jit
def _take(leaf: Any, rows: jax.Array) -> jax.Array:
    return stored_arrays.read(leaf, rows)


def _figures_of_queue(buffer: ReplayBuffer, state: ReplayState) -> dict[str, float]:
    """Return the figures of a `Queue` or an `OnlineQueue`; {} for another sampler."""
    if not isinstance(buffer.sampler, Queue | OnlineQueue):
        return {}
    found = _metrics(buffer, state)
    return {name: float(found[name]) for name in ("num_new", "num_lost")}


_metrics = jax.jit(ReplayBuffer.metrics)


@functools.partial(jax.jit, static_argnums=0)
def _probability(buffer: ReplayBuffer, state: ReplayState, rows: jax.Array) -> jax.Array:
    """Return each row's probability in one draw, 0 where it is not sampleable: float32[...]."""
    members = Sampleable.of(state)
    return jnp.where(
        members.contains(rows), buffer.sampler.probability(state.sampler, members, rows), 0
    )

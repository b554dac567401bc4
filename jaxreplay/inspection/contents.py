"""What an inspection looks at: rows of a buffer in the order in which they came, from a state or
from files, a block at a time."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import description, named, spec_text
from jaxreplay._util.pow2 import power_above
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_state
from jaxreplay.inspection.resets import Resets, rows_around_resets
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.sampleable import ReplayState, Sampleable

_BLOCK_BYTES = 4 * 2**20
_MOST_ROWS = 2**20  # in which resets are looked for


@dataclasses.dataclass(frozen=True)
class Contents:
    """The R rows that a buffer holds, stream after stream, the oldest of each first; E streams."""

    buffer: str  # its description
    source: str  # the path and the step of a checkpoint; "" of a state
    length: int  # rows of a stream
    # int64[E]: the number of each stream's oldest row; they count on, and rows lie at their
    # remainder by `length`
    first: np.ndarray
    end: np.ndarray  # int64[E]: one more than the newest one's
    leaves: dict[str, str]  # dtype and shape of a row, by name
    flags: np.ndarray | None  # uint8[R], bits of `row_flags`; None for items
    reward: np.ndarray | None  # float64[R]; None where there is none, or it is no scalar
    probability: np.ndarray | None  # float64[R], of one draw; None where it is not known
    resets: Resets | None  # None for items
    counters: dict[str, float]  # of the sampler
    rows: np.ndarray  # int64[K]: which of them have their values here
    values: dict[str, np.ndarray]  # of each leaf, [K, ...]

    @property
    def num_rows(self) -> int:
        return int((self.end - self.first).sum())


def contents_of(buffer: Any, state: Any, max_bytes: int) -> Contents:
    """Of a state, which stays as it is: rows are copied, and at most `max_bytes` of their
    values."""
    if not isinstance(buffer, ReplayBuffer) or state is None:
        raise ValueError(
            f"inspect: expected a ReplayBuffer and its state, got {type(buffer).__name__} and "
            f"{type(state).__name__}"
        )
    check_state("inspect", buffer, state)
    steps = state.streams.steps
    first, end = _span(state)
    rows = rows_in_order(first, end, buffer.length)
    held = named({"steps": steps}, is_leaf=stored_arrays.is_compound)

    row_bytes = sum(leaf_bytes(leaf.shape[1:], leaf.dtype) for _, leaf in held)
    chosen = spread(np.arange(len(rows)), max_bytes // max(row_bytes, 1))
    reward = next(
        (leaf for name, leaf in held if name == "steps.reward" and len(leaf.shape) == 1), None
    )
    size = max(1, min(_BLOCK_BYTES // 8, len(rows)))
    drawn = [
        np.asarray(_probability(buffer, state, np.resize(rows[start : start + size], size)))
        for start in range(0, len(rows), size)
    ]
    return Contents(
        buffer=description(buffer),
        source="",
        length=buffer.length,
        first=first,
        end=end,
        leaves={name: spec_text(leaf, 1) for name, leaf in held},
        flags=None if state.streams.flags is None else _read(state.streams.flags, rows),
        reward=None if reward is None else _read(reward, rows).astype(np.float64),
        probability=np.concatenate(drawn or [np.zeros(0)]).astype(np.float64)[: len(rows)],
        resets=resets_of(state),
        counters={
            name: float(leaf)
            for name, leaf in named(state.sampler)
            if name in COUNTERS and not leaf.shape
        },
        rows=chosen,
        values={name: _read(leaf, rows[chosen]) for name, leaf in held},
    )


def resets_of(state: ReplayState) -> Resets | None:
    """Read the rows around resets, among the newest million rows; None for items. The state stays
    as it is."""
    layout, steps = state.layout, state.streams.steps
    if layout.autoreset is None:
        return None
    first, end = _span(state)
    first = np.maximum(first, end - max(_MOST_ROWS // layout.num_envs, 1))
    env, _ = numbers_in_order(first, end)
    rows = rows_in_order(first, end, layout.length)
    flags = _read(state.streams.flags, rows)
    obs = stored_arrays.stored_leaves(steps.obs)
    row_bytes = sum(leaf_bytes(leaf.shape[1:], leaf.dtype) for leaf in obs)
    around = rows_around_resets(flags, env, row_bytes)
    chosen = rows[around]
    has_reward = len(steps.reward.shape) == 1
    return Resets(
        layout.autoreset,
        flags[around],
        _read(steps.reward, chosen).astype(np.float64) if has_reward else None,
        [_read(leaf, chosen) for leaf in obs],
    )


def _span(state: ReplayState) -> tuple[np.ndarray, np.ndarray]:
    """The number of each stream's oldest row, and one more than the newest one's: int64[E]."""
    heads = state.streams.heads
    position, lap, filled = (
        np.array(leaf).astype(np.int64) for leaf in (heads.position, heads.lap, heads.filled)
    )
    end = lap * state.layout.length + position
    return end - filled, end


COUNTERS = ("max_priority", "num_bad_priorities", "num_stale_updates")


def rows_in_order(first: np.ndarray, end: np.ndarray, length: int) -> np.ndarray:
    """Where the rows lie, stream after stream, the oldest first: int32[R]."""
    env, number = numbers_in_order(first, end)
    return (env * length + ring.position_of(number, length)).astype(np.int32)


def numbers_in_order(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The streams of rows, and their numbers there: int64[R] each."""
    count = end - first
    env = np.repeat(np.arange(len(count)), count)
    return env, np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)


def spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most so many of them, and at least one if there is one, evenly from the first to the
    last."""
    most = max(most, 1)
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def leaf_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _read(leaf: Any, rows: np.ndarray) -> np.ndarray:
    """Read rows int32[...] of a leaf, a block at a time: `[..., *row]`. Blocks have few sizes, each
    of which is compiled."""
    most = max(1, _BLOCK_BYTES // max(leaf_bytes(leaf.shape[1:], leaf.dtype), 1))
    size, flat = min(most, power_above(rows.size)), rows.reshape(-1)
    blocks = [flat[start : start + size] for start in range(0, len(flat), size)]
    found = [np.asarray(_take(leaf, np.resize(block, size)))[: len(block)] for block in blocks]
    values = np.concatenate(found or [np.zeros((0, *leaf.shape[1:]), leaf.dtype)])
    return values.reshape(*rows.shape, *leaf.shape[1:])


@jax.jit
def _take(leaf: Any, rows: jax.Array) -> jax.Array:
    return stored_arrays.read(leaf, rows)


@functools.partial(jax.jit, static_argnums=0)
def _probability(buffer: ReplayBuffer, state: ReplayState, rows: jax.Array) -> jax.Array:
    """0 where a row is not sampleable."""
    members = Sampleable.of(state)
    return jnp.where(
        members.contains(rows), buffer.sampler.probability(state.sampler, members, rows), 0
    )

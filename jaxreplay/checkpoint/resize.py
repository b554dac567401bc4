"""Resize: convert a state to another capacity. Each stream (an env's ring of rows) keeps its newest
rows that fit, and everything that belongs to them.

A row keeps its number in its stream, and its position is the number modulo the length. So all that
counts candidates or ages is unchanged: candidate numbers, a queue's next row, pending rows. What is
kept per position is rebuilt: the episode table is written again from the rows, oldest first, and
the sampler gets back its values per row (`Sampler.put_per_row`). This happens in blocks, so that
only the new state is as large as the buffer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.storage import ring, writes
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState, Rows, of_stream
from jaxreplay.storage.writes import Writes, count_expired

NO_ROWS = Rows(None, None, None, None, None, None)
_BLOCK = 2**13  # rows that the episode table or a sampler gets at a time


def with_heads(after: Layout, state: ReplayState, num_lost: np.ndarray) -> ReplayState:
    """Move the heads of streams to another layout; the rows are moved later. This runs on the host,
    which has 64-bit integers.

    Args:
      after: The new layout.
      state: State with the old layout.
      num_lost: int64[E], number of lost rows of each stream.
    """
    before = state.counters
    end = np.asarray(before.lap).astype(np.int64) * state.layout.length + np.asarray(
        before.position
    )
    position, lap = ring.position_of(end, after.length), (end // after.length).astype(np.uint32)
    filled = np.minimum(np.asarray(before.filled) - num_lost, after.length)
    counters = before.replace(layout=after).set(position=position, filled=filled, lap=lap)
    return state.replace(layout=after, counters=counters)


def parted(before: Any, old: ReplayState) -> tuple[ReplayState, dict[str, Any]]:
    """Divide a state of the buffer `before` into what `resized` takes, and its sampler's values per
    row, by name. The leaves may be shapes."""
    per_row = before.sampler.per_row(old.sampler)
    sampler = with_fields(old.sampler, dict.fromkeys(before.sampler.PER_ROW))
    return old.replace(rows=NO_ROWS, sampler=sampler), per_row


def with_fields(state: Any, fields: dict[str, Any]) -> Any:
    """Return a sampler's state with fields replaced. Without fields, it needs no `replace`."""
    return state.replace(**fields) if fields else state


@functools.partial(jax.jit, static_argnums=0)
def resized(after: Any, old: ReplayState, streams: ReplayState) -> ReplayState:
    """Return a resized state without rows but the episode table. The sampler's values per row
    are still missing: `moved` sets them.

    Args:
      after: The buffer with the new capacity.
      old: The old state, from `parted`. Its rows are not read.
      streams: The result of `with_heads`, with the rows in their places.
    """
    fresh = after.sampler.init(streams.layout)
    sampler = with_fields(
        old.sampler, {name: getattr(fresh, name) for name in after.sampler.PER_ROW}
    )
    if jax.tree.map(jnp.shape, sampler) != jax.tree.map(jnp.shape, fresh):
        raise NotImplementedError(
            f"{type(after.sampler).__name__} keeps values per row: name these fields of its state "
            "in PER_ROW"
        )
    counters = streams.counters
    pending = counters.num_pending
    counters = counters.set(
        num_pending=None if pending is None else jnp.minimum(pending, streams.filled),
        num_expired=count_expired(streams),
    )
    counted = streams.replace(counters=counters, sampler=sampler)
    if after.has_table:
        counted = _with_episodes(counted)
    rows = counted.rows.replace(steps=None, flags=None, candidate_number=None)
    return counted.replace(rows=rows)


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def moved(
    after: Any,
    old: ReplayState,
    sampler: Any,
    state: ReplayState,
    name: str,
    start: jax.Array,
    values: jax.Array,
    holes: tuple[jax.Array, jax.Array],
) -> Any:
    """Put old values per row into a sampler's new state.

    Args:
      after: The buffer with the new capacity.
      old: The old state's heads.
      sampler: The sampler's new state. Donated.
      state: The new state, with its rows and without a sampler.
      name: Name of the values, as in `Sampler.per_row`.
      start: int32[], old place (position * E + env) of the first value.
      values: [K], old values of consecutive places.
      holes: Age of the newest row, and number of rows, of each run of lost rows: int32[E, H] each.

    Returns:
      The sampler's state.
    """
    members = Sampleable.of(state)
    size = min(_BLOCK, len(values))

    def tell(nth: jax.Array, sampler: Any) -> Any:
        # the last block begins earlier, and puts some values again
        first = jnp.minimum(nth * size, len(values) - size)
        place = jnp.minimum(start + first + ring.arange(size), old.layout.capacity)
        row = _row_now(old, state, place, holes)
        return after.sampler.put_per_row(
            sampler, members, name, row, jax.lax.dynamic_slice_in_dim(values, first, size)
        )

    return jax.lax.fori_loop(0, -(-len(values) // size), tell, sampler)


def _row_now(
    old: ReplayState, streams: ReplayState, place: jax.Array, holes: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Return the new rows of old places, int32[K]: the new capacity for a place without a row, and
    for a row that is not kept. A place is position * E + env."""
    before, after = old.layout, streams.layout
    is_place = place < before.capacity
    time, env = ring.split(jnp.where(is_place, place, 0), before.num_envs)
    row = before.row(env, time)
    was, (starts, sizes) = old.age(row), (hole[env] for hole in holes)
    is_lost = ((was[:, None] >= starts) & (was[:, None] < starts + sizes)).any(axis=1)
    age = was - jnp.where(was[:, None] >= starts + sizes, sizes, 0).sum(axis=1, dtype=jnp.int32)
    is_held = is_place & old.is_written(row) & ~is_lost & (age < of_stream(streams.filled, env))
    position = after.wrap(of_stream(streams.head, env) - 1 - jnp.minimum(age, after.length - 1))
    return jnp.where(is_held, after.row(env, position), after.capacity)


def _with_episodes(state: ReplayState) -> ReplayState:
    """Return a state with the episode table of its rows."""
    layout = state.layout
    size = max(1, min(_BLOCK // layout.num_envs, layout.length))
    num_blocks = -(-layout.length // size)

    def tell(nth: jax.Array, carry: Any) -> Any:
        rows, counters = carry
        newer = (num_blocks - 1 - nth) * size  # number of rows in later blocks
        age = jnp.broadcast_to(size - 1 - ring.arange(size)[:, None], (size, layout.num_envs))
        is_written = newer + age < state.filled
        position = layout.wrap(state.head - 1 - jnp.minimum(newer + age, layout.length - 1))
        row = layout.row(layout.envs(), position)
        flags = state.rows.flags.at[row].get(mode="promise_in_bounds")
        row = jnp.where(is_written, row, layout.capacity)
        num_rows = is_written.sum(axis=0, dtype=jnp.int32)
        counters, own = writes.noted(
            layout, counters, Writes(row, is_written, flags, age, num_rows, None)
        )
        return writes.note(rows, layout, own), counters

    none = jnp.zeros((layout.capacity,), jnp.int32)
    rows = NO_ROWS.replace(ordinal=none, end_position=none, start_position=none)
    counters = state.counters.set(ordinal=0, is_open=False)
    rows, counters = jax.lax.fori_loop(0, num_blocks, tell, (rows, counters))
    return state.replace(rows=rows, counters=counters)

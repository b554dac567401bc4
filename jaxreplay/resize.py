"""The state of a buffer for one of another capacity: the newest rows of each stream that fit, and all that belongs to them.

A row keeps its number in its stream, and lies at the remainder of the number by the length. So what counts anchors or ages stays as it
is: ranks, a queue's next row, what waits for its window. What is kept by places is made anew: the episode table is told of the rows
once more, the oldest first, and a sampler is told what it had for each of them (`Sampler.moved`). All of it goes in blocks, so that
nothing is as large as the buffer but its new state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import episode_table, ring
from jaxreplay.drawable import cut_rows
from jaxreplay.operations import ReplayState, drawable, layout_of
from jaxreplay.stream_state import StreamState, Written
from jaxreplay.streams import Streams

_BLOCK = 2**13  # rows that the episode table, or a sampler, is told of at a time


def with_heads(before: Streams, after: Streams, state: StreamState, num_lost: np.ndarray) -> StreamState:
    """A state of `before` with its heads as they are in `after`; the rows are to follow. On the host, where there are 64 bits.

    Args:
      num_lost: int64[E], rows of each stream that are not there any more; one number where one head serves all.
    """
    end = np.asarray(state.lap).astype(np.int64) * before.length + np.asarray(state.head)
    filled = np.asarray(state.filled) - (num_lost if state.filled.ndim else num_lost[:1].sum())
    position, lap = ring.position_of(end, after.length), (end // after.length).astype(np.uint32)
    return state.with_heads(position=position, filled=np.minimum(filled, after.length), lap=lap)


def parted(before: Any, old: ReplayState) -> tuple[ReplayState, dict[str, Any]]:
    """What `resized` takes of a state of `before`; and what its sampler keeps for each row by place. Both may be of shapes alone."""
    sampler, by_place = before.sampler.parted(old.sampler)
    return old.replace(sampler=sampler, episodes=None), by_place


@functools.partial(jax.jit, static_argnums=(0, 1))
def resized(before: Any, after: Any, old: ReplayState, streams: StreamState) -> ReplayState:
    """All but the rows, which are there: `None` in their place. What the sampler keeps by place is to be `moved`.

    Args:
      before: the buffer of the old state. after: the same with another capacity.
      old: its rows are not read. streams: `with_heads`, and the rows in their places.
    """
    layout = layout_of(after)
    return old.replace(
        layout=layout,
        streams=streams.replace(steps=None, flags=None, rank=None),
        pending=None if old.pending is None else jnp.minimum(old.pending, streams.filled),
        cut=cut_rows(after.window, after.streams, streams),
        episodes=_episodes(after.streams, streams) if after.has_table else None,
        sampler=after.sampler.resized(old.layout.streams, layout.streams, after.window, old.sampler),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def moved(
    before: Any,
    after: Any,
    old: StreamState,
    sampler: Any,
    state: ReplayState,
    name: str,
    start: jax.Array,
    values: jax.Array,
    holes: tuple[jax.Array, jax.Array],
) -> Any:
    """The sampler's state, which is taken over, with what it had in `before`, in its leaf of that name, at the places from `start` on.

    Args:
      old: the heads of then. state: as it is now, with its rows, and without a sampler. values: `[K]`.
      holes: the age of the newest row, and the number of rows, of runs of rows that are lost: int32[E, H] each.
    """
    members = drawable(after, state)
    size = min(_BLOCK, len(values))

    def tell(nth: jax.Array, sampler: Any) -> Any:
        first = jnp.minimum(nth * size, len(values) - size)  # the last block begins earlier, and says some of it again
        place = jnp.minimum(start + first + ring.places(size), before.capacity)
        row = _row_now(before.streams, old, after.streams, state.streams, place, holes)
        return after.sampler.moved(sampler, members, name, row, jax.lax.dynamic_slice_in_dim(values, first, size))

    return jax.lax.fori_loop(0, -(-len(values) // size), tell, sampler)


def _row_now(
    before: Streams, old: StreamState, after: Streams, state: StreamState, place: jax.Array, holes: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Which rows those at places, by time, then env, are now: int32[K]; the new capacity for those that are gone, or were none."""
    is_place = place < before.capacity
    time, env = ring.split(jnp.where(is_place, place, 0), before.num_envs)
    row = before.row(env, time)
    was, (starts, sizes) = before.age(old, row), (hole[env] for hole in holes)
    is_lost = ((was[:, None] >= starts) & (was[:, None] < starts + sizes)).any(axis=1)
    age = was - jnp.where(was[:, None] >= starts + sizes, sizes, 0).sum(axis=1, dtype=jnp.int32)
    is_held = is_place & before.is_written(old, row) & ~is_lost & (age < after.of_stream(state.filled, env))
    position = ring.wrap(after.of_stream(state.head, env) - 1 - jnp.minimum(age, after.length - 1), after.length)
    return jnp.where(is_held, after.row(env, position), after.capacity)


def _episodes(streams: Streams, state: StreamState) -> episode_table.EpisodeState:
    """The table that a buffer has which was told of the stored rows alone."""
    size = max(1, min(_BLOCK // streams.num_envs, streams.length))
    num_blocks = -(-streams.length // size)
    env = ring.places(streams.num_envs)

    def tell(nth: jax.Array, table: episode_table.EpisodeState) -> episode_table.EpisodeState:
        newer = (num_blocks - 1 - nth) * size  # rows of later blocks
        age = jnp.broadcast_to(size - 1 - ring.places(size)[:, None], (size, streams.num_envs))
        is_written = newer + age < state.filled
        position = ring.wrap(state.head - 1 - jnp.minimum(newer + age, streams.length - 1), streams.length)
        row = streams.row(env, position)
        assert state.flags is not None
        flags = state.flags.at[row].get(mode="promise_in_bounds")
        row = jnp.where(is_written, row, streams.capacity)
        written = Written(row, is_written, flags, age, is_written.sum(axis=0, dtype=jnp.int32))
        return episode_table.put(*episode_table.count(streams, state, table, written))

    return jax.lax.fori_loop(0, num_blocks, tell, episode_table.init(streams, state.steps))

"""The state of a buffer for one of another capacity: the newest rows of each stream that fit, and all that belongs to them.

A row keeps its number in its stream, and lies at the remainder of the number by the length. So what counts anchors or ages stays as it
is: ranks, a queue's next row, what waits for its window. What is kept by places is made anew: the episode table is told of the rows
once more, the oldest first, and a sampler moves what it has for each of them (`Sampler.resized`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import episode_table, ring
from jaxreplay.drawable import cut_rows
from jaxreplay.operations import ReplayState, drawable
from jaxreplay.streams import Streams, StreamState, Written

_BLOCK = 2**16  # rows that the episode table is told of at a time


def with_heads(before: Streams, after: Streams, state: StreamState) -> StreamState:
    """A state of `before` with its heads as they are in `after`; the rows are to follow. On the host, where there are 64 bits."""
    end = np.asarray(state.lap).astype(np.int64) * before.length + np.asarray(state.head)
    return state.replace(
        head=jnp.asarray(ring.position_of(end, after.length), jnp.int32),
        filled=jnp.minimum(state.filled, after.length),
        lap=jnp.asarray((end // after.length).astype(np.uint32)),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def resized(before: Any, after: Any, old: ReplayState, streams: StreamState) -> ReplayState:
    """All but the rows, which are there: `None` in their place.

    Args:
      before: the buffer of the old state. after: the same with another capacity.
      old: its rows are not read. streams: `with_heads`, and the rows in their places.
    """
    state = old.replace(
        streams=streams,
        pending=None if old.pending is None else jnp.minimum(old.pending, streams.filled),
        cut=cut_rows(after.window, after.streams, streams),
        episodes=None if old.episodes is None else _episodes(after.streams, streams),
    )
    row = _rows_before(before.streams, old.streams, after.streams, streams)
    sampler = after.sampler.resized(before.streams, old.sampler, drawable(after, state), row)
    return state.replace(sampler=sampler, streams=streams.replace(steps=None, flags=None, rank=None))


def _rows_before(before: Streams, old: StreamState, after: Streams, state: StreamState) -> jax.Array:
    """For each row, which it was: int32[N]; the old capacity for those that are not written."""
    row = ring.places(after.capacity)
    env, _ = ring.split(row, after.length)
    age = jnp.minimum(after.age(state, row), before.length - 1)
    position = ring.wrap(before.of_stream(old.head, env) - 1 - age, before.length)
    return jnp.where(after.is_written(state, row), before.row(env, position), before.capacity)


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
        return episode_table.observe(streams, state, table, Written(row, is_written, flags, age, is_written.sum(axis=0, dtype=jnp.int32)))

    return jax.lax.fori_loop(0, num_blocks, tell, episode_table.init(streams, state.steps))

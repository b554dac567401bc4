"""The state of a buffer for one of another capacity: the newest rows of each stream that fit, and
all that belongs to them.

A row keeps its number in its stream, and lies at the remainder of the number by the length. So what
counts candidates or ages stays as it is: candidate numbers, a queue's next row, what waits for its
window. What is kept by places is made anew: the episode table is told of the rows once more, the
oldest first, and a sampler is told what it had for each of them (`Sampler.put_per_row`). All of it
goes in blocks, so that nothing is as large as the buffer but its new state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.storage import episodes, ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import ReplayState, Sampleable, count_expired
from jaxreplay.storage.streams import Streams, Written, of_stream

_BLOCK = 2**13  # rows that the episode table, or a sampler, is told of at a time


def with_heads(after: Layout, streams: Streams, num_lost: np.ndarray) -> Streams:
    """Move the heads of streams to another layout; the rows are to follow. On the host, where there
    are 64 bits.

    Args:
      num_lost: int64[E], rows of each stream that are not there any more.
    """
    heads = streams.heads
    end = np.asarray(heads.lap).astype(np.int64) * streams.layout.length + np.asarray(
        heads.position
    )
    position, lap = ring.position_of(end, after.length), (end // after.length).astype(np.uint32)
    filled = np.minimum(np.asarray(heads.filled) - num_lost, after.length)
    return streams.with_heads(position=position, filled=filled, lap=lap).replace(layout=after)


def parted(before: Any, old: ReplayState) -> tuple[ReplayState, dict[str, Any]]:
    """Divide a state of `before` into what `resized` takes, and what its sampler keeps for each
    row. Both may be of shapes alone."""
    per_row = before.sampler.per_row(old.sampler)
    return old.replace(
        sampler=_with(old.sampler, dict.fromkeys(before.sampler.PER_ROW)), episodes=None
    ), per_row


def _with(state: Any, fields: dict[str, Any]) -> Any:
    return state.replace(**fields) if fields else state


@functools.partial(jax.jit, static_argnums=0)
def resized(after: Any, old: ReplayState, streams: Streams) -> ReplayState:
    """Return a resized state without its rows, which have `None` in their place. What the sampler
    keeps for each row is to be `moved`.

    Args:
      after: the buffer with another capacity.
      old: its rows are not read. streams: `with_heads`, and the rows in their places.
    """
    fresh = after.sampler.init(streams.layout)
    sampler = _with(old.sampler, {name: getattr(fresh, name) for name in after.sampler.PER_ROW})
    if jax.tree.map(jnp.shape, sampler) != jax.tree.map(jnp.shape, fresh):
        raise NotImplementedError(
            f"{type(after.sampler).__name__} keeps something for each row, which must be named in "
            "PER_ROW"
        )
    return old.replace(
        streams=streams.replace(steps=None, flags=None, candidate_number=None),
        num_pending=None
        if old.num_pending is None
        else jnp.minimum(old.num_pending, streams.filled),
        num_expired=count_expired(streams),
        episodes=_episodes(streams) if after.has_table else None,
        sampler=sampler,
    )


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def moved(
    after: Any,
    old: Streams,
    sampler: Any,
    state: ReplayState,
    name: str,
    start: jax.Array,
    values: jax.Array,
    holes: tuple[jax.Array, jax.Array],
) -> Any:
    """Put what a sampler had for some rows before into its state, which is donated: of its leaf
    `name`, the places from `start` on.

    Args:
      after: the buffer with another capacity.
      old: the heads of then. state: as it is now, with its rows, and without a sampler. values:
        `[K]`.
      holes: the age of the newest row, and the number of rows, of runs of rows that are lost:
        int32[E, H] each.
    """
    members = Sampleable.of(state)
    size = min(_BLOCK, len(values))

    def tell(nth: jax.Array, sampler: Any) -> Any:
        # the last block begins earlier, and says some of it again
        first = jnp.minimum(nth * size, len(values) - size)
        place = jnp.minimum(start + first + ring.arange(size), old.layout.capacity)
        row = _row_now(old, state.streams, place, holes)
        return after.sampler.put_per_row(
            sampler, members, name, row, jax.lax.dynamic_slice_in_dim(values, first, size)
        )

    return jax.lax.fori_loop(0, -(-len(values) // size), tell, sampler)


def _row_now(
    old: Streams, streams: Streams, place: jax.Array, holes: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Which rows those at places, by time, then env, are now: int32[K]; the new capacity for those
    that are gone, or were none."""
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


def _episodes(streams: Streams) -> episodes.EpisodeState:
    """The table that a buffer has which was told of the stored rows alone."""
    layout = streams.layout
    size = max(1, min(_BLOCK // layout.num_envs, layout.length))
    num_blocks = -(-layout.length // size)

    def tell(nth: jax.Array, table: episodes.EpisodeState) -> episodes.EpisodeState:
        newer = (num_blocks - 1 - nth) * size  # rows of later blocks
        age = jnp.broadcast_to(size - 1 - ring.arange(size)[:, None], (size, layout.num_envs))
        is_written = newer + age < streams.filled
        position = layout.wrap(streams.head - 1 - jnp.minimum(newer + age, layout.length - 1))
        row = layout.row(layout.envs(), position)
        assert streams.flags is not None
        flags = streams.flags.at[row].get(mode="promise_in_bounds")
        row = jnp.where(is_written, row, layout.capacity)
        written = Written(row, is_written, flags, age, is_written.sum(axis=0, dtype=jnp.int32))
        return episodes.write(*episodes.advance(layout, table, written))

    return jax.lax.fori_loop(0, num_blocks, tell, episodes.init(layout))

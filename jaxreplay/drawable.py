"""Which rows can be drawn: one rule for every sampler.

A row is drawable when it is a transition (no tail) and its view's whole window is known: its look-ahead is written, or its episode
ended before. So the same row always yields the same target.

Within a stream rows become drawable, and are overwritten, in the order of time. So the drawable rows of a stream are its transition
rows without the newest `pending` ones, and no list of them is kept: a row's rank (`streams.py`) says how many transitions lie before it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay import autoreset, ring
from jaxreplay.streams import Streams, StreamState, Written


class Change(NamedTuple):
    """What one write did to the set of drawable rows: all that a sampler is ever told.

    Axes: W = look-ahead + K rows in the order of time: those that may have been waiting, then those written. E streams. A row that has
    become drawable does so once, until it is overwritten; a written row takes the place of an old one, which is gone.
    """

    row: jax.Array  # int32[W, E]; capacity where there is none
    became_drawable: jax.Array  # bool[W, E]
    is_written: jax.Array  # bool[W, E]
    age: jax.Array  # int32[W, E]: rows of its stream written after it
    start: jax.Array  # int32[] or int32[E]: the ring position of `row[0]`; a scalar says that `row` is one range of every stream


def settle(streams: Streams, lookahead: int, before: StreamState, pending: jax.Array, written: Written) -> tuple[jax.Array, Change]:
    """The pending rows after a write, int32[E], and which rows became drawable by it.

    Args:
      lookahead: rows that the view reads after its anchor.
      before: the streams before the write.
      pending: int32[E], the newest rows whose window was not known then; all belong to the unfinished episode.
      written: what was written.
    """
    flags = jnp.zeros_like(written.age, jnp.uint8) if written.flags is None else written.flags
    # A termination and a tail complete every window that reaches them: rows wait only since the newest of these.
    completes = written.is_written & ((flags & (autoreset.TAIL | autoreset.TERMINATED)) != 0)
    since = jnp.min(jnp.where(completes, written.age, streams.length), axis=0)
    after = jnp.minimum(jnp.minimum(since, pending + written.num_rows), lookahead)

    is_new = written.is_written & ((flags & autoreset.TAIL) == 0) & (written.age >= after)
    start = ring.wrap(before.head - lookahead, streams.length)
    if lookahead == 0:
        return after, Change(written.row, is_new, written.is_written, written.age, start)

    waited = lookahead - 1 - ring.places(lookahead)[:, None]  # ages before the write
    was_pending = waited < pending
    age = waited + written.num_rows
    position = ring.wrap(start + ring.places(lookahead)[:, None], streams.length)
    row = jnp.where(was_pending, streams.row(ring.places(streams.num_envs), position), streams.capacity)
    return after, Change(
        row=jnp.concatenate([row, written.row]),
        became_drawable=jnp.concatenate([was_pending & (age >= after), is_new]),
        is_written=jnp.concatenate([jnp.zeros_like(was_pending), written.is_written]),
        age=jnp.concatenate([age, written.age]),
        start=start,
    )


@dataclasses.dataclass(frozen=True)
class Drawable:
    """The set of drawable rows of a buffer's state."""

    streams: Streams
    state: StreamState
    pending: jax.Array  # int32[E]

    def count(self) -> jax.Array:
        """Drawable rows of each stream: int32[E]."""
        env = ring.places(self.streams.num_envs)
        return jnp.maximum(self._transitions(env) - self.pending, 0)

    def contains(self, row: jax.Array) -> jax.Array:
        """Whether each row, in `[0, capacity)`, is drawable: bool[...]."""
        env, _ = ring.split(row, self.streams.length)
        age = self.streams.age(self.state, row)
        is_known = (age >= self._of(self.pending, env)) & (age < self._of(self.state.filled, env))
        if self.state.flags is None:
            return is_known
        return is_known & ((self._of(self.state.flags, row) & autoreset.TAIL) == 0)

    def select(self, env: jax.Array, nth: jax.Array) -> jax.Array:
        """The `nth` drawable row of each stream `env`, oldest first: int32[...]. `nth` must be below the stream's count.

        A binary search over the stream's ranks: log2(length) reads.
        """
        oldest = self._oldest(env)
        if self.state.flags is None:
            return self.streams.row(env, ring.wrap(oldest + nth, self.streams.length))
        base = self._rank(env, oldest)

        def halve(_, bounds):
            low, high = bounds  # the row sought is among the rows `low .. high - 1`, counted from the oldest
            middle = low + (high - low) // 2
            # The transitions before `middle`: the row sought lies before it if they are more than `nth`.
            is_before = self._ranked(env, oldest, base, middle) > nth
            return jnp.where(is_before, low, middle), jnp.where(is_before, middle, high)

        bounds = (jnp.zeros_like(nth), jnp.broadcast_to(self._of(self.state.filled, env), nth.shape))
        low, _ = jax.lax.fori_loop(0, self.streams.length.bit_length(), halve, bounds)
        return self.streams.row(env, ring.wrap(oldest + low, self.streams.length))

    def _transitions(self, env: jax.Array) -> jax.Array:
        """Transition rows that a stream holds: int32[...]."""
        filled = self._of(self.state.filled, env)
        if self.state.flags is None:
            return jnp.broadcast_to(filled, env.shape)
        held = ring.difference(self._of(self.state.count, env), self._rank(env, self._oldest(env)))
        return jnp.where(filled > 0, held, 0)

    def _ranked(self, env: jax.Array, oldest: jax.Array, base: jax.Array, nth_row: jax.Array) -> jax.Array:
        position = ring.wrap(oldest + nth_row, self.streams.length)
        return ring.difference(self._rank(env, position), base)

    def _oldest(self, env: jax.Array) -> jax.Array:
        return ring.wrap(self._of(self.state.head, env) - self._of(self.state.filled, env), self.streams.length)

    def _rank(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self._of(self.state.rank, self.streams.row(env, position))

    def _of(self, values: jax.Array | None, index: jax.Array) -> jax.Array:
        assert values is not None
        return self.streams.of_stream(values, index)

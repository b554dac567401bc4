"""Which rows can be drawn: one rule for every sampler.

A row is drawable when it is an anchor (a transition, and one that `stride` does not skip) and its view's whole window is known: its
look-ahead is written, or its episode ended before; its look-back is not overwritten, or its episode began after. So the same row always
yields the same target.

Within a stream rows become drawable, and cease to be, in the order of time. So the drawable rows of a stream are its anchors without
those among the newest `pending` rows and the oldest `cut` ones, and no list of them is kept: a row's rank (`streams.py`) says how many
anchors lie before it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay import autoreset, ring
from jaxreplay.episode_table import Episodes, EpisodeState
from jaxreplay.search import last_place
from jaxreplay.stream_state import StreamState, Written
from jaxreplay.streams import Streams
from jaxreplay.window import Window


class Change(NamedTuple):
    """What one write did to the set of drawable rows: all that a sampler is ever told.

    Axes: W = look-ahead + K + look-back rows in the order of time: those that may have been waiting, those written, and the oldest of
    those that stay, whose look-back may have been overwritten. E streams. A row that has become drawable does so once, until it is
    overwritten or cut; a written row takes the place of an old one, which is gone.

    With a stride, or across episodes, rows that are no anchors wait among the others. A sampler that follows rows one by one must
    remember of the written ones which are: to read their flags here would make XLA copy all flags before the next write.
    """

    row: jax.Array  # int32[W, E]; capacity where there is none
    became_drawable: jax.Array  # bool[W, E]: the window is complete
    is_written: jax.Array  # bool[K, E]: of the K rows that a stream may have got, those that it did
    is_anchor: jax.Array  # bool[K, E]: of these, those that may be drawn once their window is complete
    is_gone: jax.Array  # bool[W, E]: written, or cut
    age: jax.Array  # int32[W, E]: rows of its stream written after it
    start: jax.Array  # int32[] or int32[E]: the ring position of `row[0]`; a scalar says that `row` is one range of every stream


def still_pending(window: Window, length: int, pending: jax.Array, written: Written) -> jax.Array:
    """The newest rows of each stream whose window is not known after a write, by the look-ahead: int32[E].

    Args:
      window: with a bounded look-ahead.
      length: of a stream.
      pending: int32[E], the same before the write.
    """
    assert window.after is not None
    if window.crosses or written.flags is None:
        since = length
    else:
        # A termination and a tail complete every window that reaches them: rows wait only since the newest of these.
        ends = autoreset.TAIL if window.needs_tail else autoreset.TAIL | autoreset.TERMINATED
        completes = written.is_written & ((written.flags & ends) != 0)
        since = jnp.min(jnp.where(completes, written.age, length), axis=0)
    return jnp.minimum(jnp.minimum(since, pending + written.num_rows), window.after)


def cut_rows(window: Window, streams: Streams, state: StreamState) -> jax.Array | None:
    """The oldest rows of each stream whose look-back is overwritten: int32[E]; None where no bounded look-back is read."""
    if not window.before:
        return None
    env, place = ring.places(streams.num_envs), ring.places(window.before)[:, None]
    position = ring.wrap(state.head - state.filled + place, streams.length)
    # The next start of an episode ends what is cut.
    is_start = (_not_none(state.flags).at[streams.row(env, position)].get(mode="promise_in_bounds") & autoreset.FIRST) != 0
    return jnp.min(jnp.where(is_start & (place < state.filled), place, jnp.minimum(window.before, state.filled)), axis=0)


def change_of(before: "Drawable", after: "Drawable", written: Written) -> Change:
    """What a write did to the drawable rows, for a bounded window. `before` and `after`: these rows before and after it."""
    streams, window, length = after.streams, after.window, after.streams.length
    assert window.before is not None
    assert window.after is not None
    env = ring.places(streams.num_envs)

    def range_of(start, size):
        position = ring.wrap(start + ring.places(size)[:, None], length)
        return streams.row(env, jnp.broadcast_to(position, (size, streams.num_envs)))

    num_rows = written.num_rows[0] if after.state.together else written.num_rows
    start = ring.wrap(after.state.head - num_rows - window.after, length)
    waited = window.after - 1 - ring.places(window.after)[:, None]  # ages before the write
    waiting = range_of(start, window.after)
    is_waiting = waited < before.pending
    age = waited + written.num_rows
    became_drawable = is_waiting & (age >= after.pending)

    is_anchor = written.is_written
    if written.flags is not None:
        is_anchor = is_anchor & ((written.flags & autoreset.NO_ANCHOR) == 0)

    oldest = range_of(after.state.head, window.before)
    is_cut = (ring.places(window.before)[:, None] < after.cut) & (after.state.filled == length)
    none = functools.partial(jnp.zeros_like, dtype=bool)
    join = lambda *parts: jnp.concatenate([part for part in parts if part.shape[0]])  # noqa: E731
    return Change(
        row=join(jnp.where(is_waiting, waiting, streams.capacity), written.row, oldest),
        is_written=written.is_written,
        is_anchor=is_anchor,
        became_drawable=join(became_drawable, is_anchor & (written.age >= after.pending), none(oldest)),
        is_gone=join(none(waiting), written.is_written, is_cut),
        age=join(age, written.age, length - 1 - jnp.broadcast_to(ring.places(window.before)[:, None], oldest.shape)),
        start=start,
    )


@dataclasses.dataclass(frozen=True)
class Drawable:
    """The set of drawable rows of a buffer's state."""

    streams: Streams
    window: Window
    state: StreamState
    table: EpisodeState | None
    pending: jax.Array  # int32[E]: the newest rows of each stream whose look-ahead is not known
    cut: jax.Array  # int32[E]: the oldest rows of each stream whose look-back is overwritten

    @classmethod
    def of(
        cls,
        streams: Streams,
        window: Window,
        state: StreamState,
        table: EpisodeState | None,
        pending: jax.Array | None,
        cut: jax.Array | None,
    ) -> "Drawable":
        """`pending`: what `still_pending` gave; None for a look-ahead to the episode's end. `cut`: what `cut_rows` gave."""
        if pending is None:
            pending = Episodes(streams, state, _not_none(table)).unfinished()
        if cut is None:
            cut = jnp.zeros_like(pending) if window.before == 0 else Episodes(streams, state, _not_none(table)).beheaded()
        return cls(streams, window, state, table, pending, cut)

    @property
    def episodes(self) -> Episodes:
        return Episodes(self.streams, self.state, _not_none(self.table))

    def count(self) -> jax.Array:
        """Drawable rows of each stream: int32[E]."""
        env = ring.places(self.streams.num_envs)
        filled = jnp.broadcast_to(self.state.filled, env.shape)
        if self.state.flags is None:
            return filled - self.pending
        from_oldest = self._anchors_since(env, filled - self.cut)
        if self.window.is_bounded and not self.window.crosses and self.window.stride == 1:  # what is pending are anchors
            return jnp.maximum(from_oldest - self.pending, 0)
        return jnp.maximum(from_oldest - self._anchors_since(env, self.pending), 0)

    def contains(self, row: jax.Array) -> jax.Array:
        """Whether each row, in `[0, capacity)`, is drawable: bool[...]."""
        env, _ = ring.split(row, self.streams.length)
        age = self.streams.age(self.state, row)
        reach = self._of(self.state.filled, env)
        if self.window.before != 0:
            reach = reach - self._of(self.cut, env)
        is_known = (age >= self._of(self.pending, env)) & (age < reach)
        return is_known if self.state.flags is None else is_known & self.is_anchor(row)

    def is_anchor(self, row: jax.Array) -> jax.Array:
        """Whether each row, if it is written, may be drawn at all: bool[...]."""
        return (self._of(self.state.flags, row) & autoreset.NO_ANCHOR) == 0

    def select(self, env: jax.Array, nth: jax.Array) -> jax.Array:
        """The `nth` drawable row of each stream `env`, oldest first: int32[...]. `nth` must be below the stream's count.

        A binary search over the stream's ranks: log2(length) reads.
        """
        oldest = self._oldest(env)
        if self.window.before != 0:
            oldest = ring.wrap(oldest + self._of(self.cut, env), self.streams.length)
        if self.state.flags is None:
            return self.streams.row(env, ring.wrap(oldest + nth, self.streams.length))
        base = self._rank(env, oldest)
        if self.streams.platform != "cpu":
            return self._select_in_line(env, nth, oldest, base)

        def halve(_, bounds):
            low, high = bounds  # the row sought is among the rows `low .. high - 1`, counted from the oldest
            middle = low + (high - low) // 2
            # The anchors before `middle`: the row sought lies before it if they are more than `nth`.
            position = ring.wrap(oldest + middle, self.streams.length)
            is_before = ring.difference(self._rank(env, position), base) > nth
            return jnp.where(is_before, low, middle), jnp.where(is_before, middle, high)

        held = self._of(self.state.filled, env)
        if self.window.before != 0:
            held = held - self._of(self.cut, env)
        bounds = (jnp.zeros_like(nth), jnp.broadcast_to(held, nth.shape))
        low, _ = jax.lax.fori_loop(0, self.streams.length.bit_length(), halve, bounds)
        return self.streams.row(env, ring.wrap(oldest + low, self.streams.length))

    def _select_in_line(self, env: jax.Array, nth: jax.Array, oldest: jax.Array, base: jax.Array) -> jax.Array:
        """The last row with at most `nth` anchors before it, from the oldest on: without a loop, for accelerators."""
        held = self._of(self.state.filled, env)
        if self.window.before != 0:
            held = held - self._of(self.cut, env)
        length, end = self.streams.length, self.streams.row(env + 1, jnp.int32(0))
        first = end - length + oldest

        def passes(place):
            row = first + place
            row = jnp.where(row >= end, row - length, row)
            return (ring.difference(self._of(self.state.rank, row), base) <= nth) & (place < held)

        place = last_place(passes, nth, length, self.streams.platform)
        return self.streams.row(env, ring.wrap(oldest + place, length))

    def first_rank(self) -> jax.Array:
        """The rank of the oldest drawable row of each stream, or of the next one where there is none: uint32[E]."""
        env = ring.places(self.streams.num_envs)
        return self._rank_of_newest(env, jnp.broadcast_to(self.state.filled, env.shape) - self.cut)

    def _anchors_since(self, env: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Anchors among the newest rows of each stream: int32[E]."""
        assert self.state.count is not None
        return ring.difference(self.state.count, self._rank_of_newest(env, num_rows))

    def _rank_of_newest(self, env: jax.Array, num_rows: jax.Array) -> jax.Array:
        """The rank of the oldest of the newest `num_rows` rows; of the next row where there are none: uint32[E]."""
        assert self.state.count is not None
        position = ring.wrap(self._of(self.state.head, env) - num_rows, self.streams.length)
        return jnp.where(num_rows > 0, self._rank(env, position), self.state.count)

    def _oldest(self, env: jax.Array) -> jax.Array:
        return ring.wrap(self._of(self.state.head, env) - self._of(self.state.filled, env), self.streams.length)

    def _rank(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self._of(self.state.rank, self.streams.row(env, position))

    def _of(self, values: jax.Array | None, index: jax.Array) -> jax.Array:
        assert values is not None
        return self.streams.of_stream(values, index)


def _not_none(value: Any) -> Any:
    assert value is not None
    return value

"""Which rows can be drawn: one rule for every sampler.

A row is drawable when it is an anchor (a transition, and one that `stride` does not skip) and its view's whole window is known: its
look-ahead is written, or its episode ended before; its look-back is not overwritten, or its episode began after. So the same row always
yields the same target.

Within a stream rows become drawable, and cease to be, in the order of time. So the drawable rows of a stream are its anchors without
those among the newest `pending` rows and the oldest `cut` ones, and no list of them is kept: a row's rank (`streams.py`) says how many
anchors lie before it. Ranks go on through wraps and clears, and those of a stream's drawable rows are one run: a rank names a row for good.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util.struct import Node
from jaxreplay.storage import autoreset, ring
from jaxreplay.storage.episodes import Episodes, EpisodeState
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.search import last_place
from jaxreplay.storage.streams import Streams, Written, of_stream


class ReplayState(Node):
    """Everything that a buffer holds; E streams. What returns a new one takes the old one over: donate it."""

    streams: Streams
    pending: jax.Array | None  # int32[E]: newest rows of each stream whose window is not known yet; None if the episode table tells
    cut: jax.Array | None  # int32[E]: oldest rows of each stream whose look-back is overwritten; None without a bounded look-back
    sampler: Any
    episodes: EpisodeState | None  # None unless `keep_episodes`, or the view or the sampler looks episodes up

    @property
    def layout(self) -> Layout:
        return self.streams.layout


class Change(NamedTuple):
    """What one write did to the set of drawable rows: all that a sampler is ever told.

    Axes: W = look-ahead + K + look-back rows in the order of time: those that may have been waiting, those written, and the oldest of
    those that stay, whose look-back may have been overwritten. E streams. A row that has become drawable does so once, until it is
    overwritten or cut; a written row takes the place of an old one, which is gone.

    With a stride, or across episodes, rows that are no anchors wait among the others. A sampler that follows rows one by one must
    remember of the written ones which are: to read their flags here would make XLA copy all flags before the next write.
    """

    layout: Layout
    row: jax.Array  # int32[W, E]; capacity where there is none
    became_drawable: jax.Array  # bool[W, E]: the window is complete
    is_written: jax.Array  # bool[K, E]: of the K rows that a stream may have got, those that it did
    is_anchor: jax.Array  # bool[K, E]: of these, those that may be drawn once their window is complete
    is_gone: jax.Array  # bool[W, E]: written, or cut
    age: jax.Array  # int32[W, E]: rows of its stream written after it
    start: jax.Array  # int32[] or int32[E]: the ring position of `row[0]`; a scalar says that `row` is one range of every stream


def still_pending(layout: Layout, pending: jax.Array, written: Written) -> jax.Array:
    """Count the newest rows of each stream whose window is not known after a write, by a bounded look-ahead: int32[E].

    Args:
      pending: int32[E], the same before the write.
    """
    window = layout.window
    assert window.after is not None
    if window.crosses or written.flags is None:
        since = layout.length
    else:
        # A termination and a tail complete every window that reaches them: rows wait only since the newest of these.
        ends = autoreset.TAIL if window.needs_tail else autoreset.TAIL | autoreset.TERMINATED
        completes = written.is_written & ((written.flags & ends) != 0)
        since = jnp.min(jnp.where(completes, written.age, layout.length), axis=0)
    return jnp.minimum(jnp.minimum(since, pending + written.num_rows), window.after)


def cut_rows(streams: Streams) -> jax.Array | None:
    """The oldest rows of each stream whose look-back is overwritten: int32[E]; None where no bounded look-back is read."""
    layout, filled = streams.layout, streams.filled
    if not (before := layout.window.before):
        return None
    place = ring.places(before)[:, None]
    position = layout.wrap(streams.head - filled + place)
    # The next start of an episode ends what is cut.
    is_start = streams.has(layout.row(layout.envs(), position), autoreset.FIRST)
    return jnp.min(jnp.where(is_start & (place < filled), place, jnp.minimum(before, filled)), axis=0)


def change_of(before: "Drawable", after: "Drawable", written: Written) -> Change:
    """What a write did to the drawable rows, for a bounded window. `before` and `after`: these rows before and after it."""
    layout, window = after.layout, after.layout.window
    assert window.before is not None
    assert window.after is not None

    def range_of(start, size):
        position = layout.wrap(start + ring.places(size)[:, None])
        return layout.row(layout.envs(), jnp.broadcast_to(position, (size, layout.num_envs)))

    num_rows = written.num_rows[0] if layout.lockstep else written.num_rows
    start = layout.wrap(after.streams.head - num_rows - window.after)
    waited = window.after - 1 - ring.places(window.after)[:, None]  # ages before the write
    waiting = range_of(start, window.after)
    is_waiting = waited < before.pending
    age = waited + written.num_rows

    is_anchor = written.is_written
    if written.flags is not None:
        is_anchor = is_anchor & ((written.flags & autoreset.NO_ANCHOR) == 0)

    oldest = range_of(after.streams.head, window.before)
    place = ring.places(window.before)[:, None]
    is_cut = (place < after.cut) & (after.streams.filled == layout.length)
    none = lambda rows: jnp.zeros_like(rows, bool)  # noqa: E731
    join = lambda *parts: jnp.concatenate([part for part in parts if part.shape[0]])  # noqa: E731
    return Change(
        layout=layout,
        row=join(jnp.where(is_waiting, waiting, layout.capacity), written.row, oldest),
        is_written=written.is_written,
        is_anchor=is_anchor,
        became_drawable=join(is_waiting & (age >= after.pending), is_anchor & (written.age >= after.pending), none(oldest)),
        is_gone=join(none(waiting), written.is_written, is_cut),
        age=join(age, written.age, layout.length - 1 - jnp.broadcast_to(place, oldest.shape)),
        start=start,
    )


@dataclasses.dataclass(frozen=True)
class Drawable:
    """The set of drawable rows of a buffer's state."""

    streams: Streams
    table: EpisodeState | None
    pending: jax.Array  # int32[E]: the newest rows of each stream whose look-ahead is not known
    cut: jax.Array  # int32[E]: the oldest rows of each stream whose look-back is overwritten

    @classmethod
    def of(cls, state: ReplayState) -> "Drawable":
        """Return the set of a state."""
        pending, cut, streams = state.pending, state.cut, state.streams
        if pending is None:  # to the episode's end
            pending = _episodes(streams, state.episodes).unfinished()
        if cut is None:
            cut = jnp.zeros_like(pending) if streams.layout.window.before == 0 else _episodes(streams, state.episodes).beheaded()
        return cls(streams, state.episodes, pending, cut)

    @property
    def layout(self) -> Layout:
        return self.streams.layout

    @property
    def episodes(self) -> Episodes:
        return _episodes(self.streams, self.table)

    def count(self) -> jax.Array:
        """Drawable rows of each stream: int32[E]."""
        window, filled = self.layout.window, self.streams.heads.filled
        if self.streams.flags is None:
            return filled - self.pending
        from_oldest = self._anchors_since(filled - self.cut)
        if window.is_bounded and not window.crosses and window.stride == 1:  # what is pending are anchors
            return jnp.maximum(from_oldest - self.pending, 0)
        return jnp.maximum(from_oldest - self._anchors_since(self.pending), 0)

    def contains(self, row: jax.Array) -> jax.Array:
        """Whether each row, in `[0, capacity)`, is drawable: bool[...]."""
        env, _ = self.layout.split(row)
        age = self.streams.age(row)
        return (age >= of_stream(self.pending, env)) & (age < self._held(env)) & self.is_anchor(row)

    def is_anchor(self, row: jax.Array) -> jax.Array:
        """Whether each row, if it is written, may be drawn at all: bool[...]."""
        return ~self.streams.has(row, autoreset.NO_ANCHOR)

    def select(self, env: jax.Array, nth: jax.Array) -> jax.Array:
        """The `nth` drawable row of each stream `env`, oldest first: int32[...]. `nth` must be below the stream's count.

        A binary search over the stream's ranks, among as many rows as the stream has that are no anchors: log2 of that number of reads.
        """
        layout, held = self.layout, self._held(env)
        oldest = layout.wrap(of_stream(self.streams.head, env) - held)
        if self.streams.flags is None:
            return layout.row(env, layout.wrap(oldest + nth))
        base = self._rank(env, oldest)
        if not layout.traits.has_loops:
            return self._select_in_line(env, nth, oldest, base, held)

        def halve(_, bounds):
            low, high = bounds  # the row sought is among the rows `low .. high - 1`, counted from the oldest
            middle = low + (high - low) // 2
            # The anchors before `middle`: the row sought lies before it if they are more than `nth`.
            is_before = ring.difference(self._rank(env, layout.wrap(oldest + middle)), base) > nth
            return jnp.where(is_before, low, middle), jnp.where(is_before, middle, high)

        # Rows that are no anchors: tails, and what a stride leaves out. (Clipped, since the ranks of an empty stream mean nothing.)
        others = jnp.clip(held - ring.difference(of_stream(self.streams.next_rank, env), base), 0, held)
        least = jnp.clip(nth, 0, held)
        num_halvings = 32 - jax.lax.clz(jnp.max(others, initial=0))
        low, _ = jax.lax.fori_loop(0, num_halvings, halve, (least, jnp.minimum(least + others + 1, held)))
        return layout.row(env, layout.wrap(oldest + low))

    def _select_in_line(self, env: jax.Array, nth: jax.Array, oldest: jax.Array, base: jax.Array, held: jax.Array) -> jax.Array:
        """The last row with at most `nth` anchors before it, from the oldest on: without a loop, for accelerators."""
        length, end = self.layout.length, self.layout.row(env + 1, jnp.int32(0))
        first = end - length + oldest

        def passes(place):
            row = first + place
            row = jnp.where(row >= end, row - length, row)
            return (ring.difference(self.streams.rank_of(row), base) <= nth) & (place < held)

        place = last_place(passes, nth, length, self.layout.traits.num_ways)
        return self.layout.row(env, self.layout.wrap(oldest + place))

    def first_rank(self) -> jax.Array:
        """Return the rank of each stream's oldest drawable row, or of the next anchor whose look-back will be whole: uint32[E]."""
        return self._rank_of_newest(self.streams.heads.filled - self.cut)

    def look_back(self, row: jax.Array) -> jax.Array:
        """Count the rows before each stored row that its window reads: int32[...]."""
        before = self.layout.window.before
        if before is None:
            return self.episodes.steps_from_start(row)
        return self.streams.rows_before(row, before) if before else jnp.zeros_like(row)

    def _anchors_since(self, num_rows: jax.Array) -> jax.Array:
        """Anchors among the newest rows of each stream: int32[E]."""
        return ring.difference(self.streams.next_rank, self._rank_of_newest(num_rows))

    def _rank_of_newest(self, num_rows: jax.Array) -> jax.Array:
        """The rank of the oldest of the newest `num_rows` rows; of the next row where there are none: uint32[E]."""
        if self.streams.rank is None:
            return self.streams.next_rank - num_rows.astype(jnp.uint32)
        position = self.layout.wrap(self.streams.heads.position - num_rows)
        return jnp.where(num_rows > 0, self._rank(self.layout.envs(), position), self.streams.next_rank)

    def _held(self, env: jax.Array) -> jax.Array:
        """Count the rows of each stream that are written, and not cut: int32[...]."""
        filled = of_stream(self.streams.filled, env)
        return filled if self.layout.window.before == 0 else filled - of_stream(self.cut, env)

    def _rank(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self.streams.rank_of(self.layout.row(env, position))


def _episodes(streams: Streams, table: EpisodeState | None) -> Episodes:
    assert table is not None
    return Episodes(streams, table)

"""Which rows can be drawn: one rule for every sampler.

A row is sampleable when it is a candidate (a transition, and one that `period` does not skip) and
its view's whole window is known: its look-ahead is written, or its episode ended before; its
look-back is not overwritten, or its episode began after. So the same row always yields the same
target.

Within a stream rows become sampleable, and cease to be, in the order of time. So the sampleable
rows of a stream are its candidates without those among the newest `num_pending` rows and the oldest
`num_expired` ones, and no list of them is kept: a row's candidate number (`streams.py`) says how
many candidates lie before it. Candidate numbers go on through wraps and clears, and those of a
stream's sampleable rows are one run: a candidate number names a row for good.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util.names import has_shapes, short_bytes
from jaxreplay._util.struct import Node
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.episodes import Episodes, EpisodeState
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.search import last_slot
from jaxreplay.storage.streams import Streams, Written, of_stream


class ReplayState(Node):
    """Everything that a buffer holds; E streams. A method that returns a new one donates
    the old one."""

    streams: Streams
    # int32[E]: newest rows of each stream whose window is not known yet; None if the episode table
    # tells
    num_pending: jax.Array | None
    # int32[E]: oldest rows of each stream whose look-back is overwritten; None without a bounded
    # look-back
    num_expired: jax.Array | None
    sampler: Any
    # None unless `track_episodes`, or the view or the sampler looks episodes up
    episodes: EpisodeState | None

    @property
    def layout(self) -> Layout:
        return self.streams.layout

    def __repr__(self) -> str:
        """`ReplayState(4 envs x 250 rows, obs f32[3], 16 kB)`; of a population, how many first."""
        if not has_shapes(self):
            return super().__repr__()
        layout, steps = self.layout, self.streams.steps
        population = self.streams.heads.position.shape[:-1]
        sizes = [
            *map(str, population),
            f"{layout.num_envs} env{'s' * (layout.num_envs != 1)}",
            f"{layout.length} rows",
        ]
        name, rows = ("item", steps) if layout.autoreset is None else ("obs", steps.obs)
        row = stored_arrays.short_rows(rows, len(population) + 1)
        return f"ReplayState({' x '.join(sizes)}, {name} {row}, {short_bytes(self)})"


class WriteEffect(NamedTuple):
    """What one write did to the set of sampleable rows: all that a sampler is ever told.

    Axes: W = look-ahead + K + look-back rows in the order of time: those that may have been
    waiting, those written, and the oldest of those that stay, whose look-back may have been
    overwritten. E streams. A row that has become sampleable does so once, until it is overwritten
    or cut; a written row takes the place of an old one, which is gone.

    With a period, or across episodes, rows that are no candidates wait among the others. A sampler
    that follows rows one by one must remember of the written ones which are: to read their flags
    here would make XLA copy all flags before the next write.
    """

    layout: Layout
    row: jax.Array  # int32[W, E]; capacity where there is none
    became_sampleable: jax.Array  # bool[W, E]: the window is complete
    is_written: jax.Array  # bool[K, E]: of the K rows that a stream may have got, those that it did
    # bool[K, E]: of these, those that may be drawn once their window is complete
    is_candidate: jax.Array
    is_gone: jax.Array  # bool[W, E]: written, or cut
    age: jax.Array  # int32[W, E]: rows of its stream written after it
    # int32[] or int32[E]: the ring position of `row[0]`; a scalar says that `row` is one range of
    # every stream
    start: jax.Array


def count_pending(layout: Layout, num_pending: jax.Array, written: Written) -> jax.Array:
    """Count the newest rows of each stream whose window is not known after a write, by a bounded
    look-ahead: int32[E].

    Args:
      num_pending: int32[E], the same before the write.
    """
    window = layout.window
    assert window.after is not None
    if window.crosses_episodes or written.flags is None:
        since = layout.length
    else:
        # A termination and a final row complete every window that reaches them: rows wait only
        # since the newest of these.
        ends = row_flags.FINAL if window.needs_final_obs else row_flags.FINAL | row_flags.TERMINATED
        completes = written.is_written & ((written.flags & ends) != 0)
        since = jnp.min(jnp.where(completes, written.age, layout.length), axis=0)
    return jnp.minimum(jnp.minimum(since, num_pending + written.num_rows), window.after)


def count_expired(streams: Streams) -> jax.Array | None:
    """The oldest rows of each stream whose look-back is overwritten: int32[E]; None where no
    bounded look-back is read."""
    layout, filled = streams.layout, streams.filled
    if not (before := layout.window.before):
        return None
    place = ring.arange(before)[:, None]
    position = layout.wrap(streams.head - filled + place)
    # The next start of an episode ends what is cut.
    is_start = streams.has(layout.row(layout.envs(), position), row_flags.FIRST)
    return jnp.min(
        jnp.where(is_start & (place < filled), place, jnp.minimum(before, filled)), axis=0
    )


def effect_of(before: "Sampleable", after: "Sampleable", written: Written) -> WriteEffect:
    """What a write did to the sampleable rows, for a bounded window. `before` and `after`: these
    rows before and after it."""
    layout, window = after.layout, after.layout.window
    assert window.before is not None
    assert window.after is not None

    def range_of(start, size):
        position = layout.wrap(start + ring.arange(size)[:, None])
        return layout.row(layout.envs(), jnp.broadcast_to(position, (size, layout.num_envs)))

    num_rows = written.num_rows[0] if layout.lockstep else written.num_rows
    start = layout.wrap(after.streams.head - num_rows - window.after)
    waited = window.after - 1 - ring.arange(window.after)[:, None]  # ages before the write
    waiting = range_of(start, window.after)
    is_waiting = waited < before.num_pending
    age = waited + written.num_rows

    is_candidate = written.is_written
    if written.flags is not None:
        is_candidate = is_candidate & ((written.flags & row_flags.NO_CANDIDATE) == 0)

    oldest = range_of(after.streams.head, window.before)
    place = ring.arange(window.before)[:, None]
    is_expired = (place < after.num_expired) & (after.streams.filled == layout.length)
    none = lambda rows: jnp.zeros_like(rows, bool)
    join = lambda *parts: jnp.concatenate([part for part in parts if part.shape[0]])
    return WriteEffect(
        layout=layout,
        row=join(jnp.where(is_waiting, waiting, layout.capacity), written.row, oldest),
        is_written=written.is_written,
        is_candidate=is_candidate,
        became_sampleable=join(
            is_waiting & (age >= after.num_pending),
            is_candidate & (written.age >= after.num_pending),
            none(oldest),
        ),
        is_gone=join(none(waiting), written.is_written, is_expired),
        age=join(age, written.age, layout.length - 1 - jnp.broadcast_to(place, oldest.shape)),
        start=start,
    )


@dataclasses.dataclass(frozen=True)
class Sampleable:
    """The set of sampleable rows of a buffer's state."""

    streams: Streams
    table: EpisodeState | None
    num_pending: jax.Array  # int32[E]: the newest rows of each stream whose look-ahead is not known
    # int32[E]: the oldest rows of each stream whose look-back is overwritten
    num_expired: jax.Array

    @classmethod
    def of(cls, state: ReplayState) -> "Sampleable":
        """Return the set of a state."""
        num_pending, num_expired, streams = state.num_pending, state.num_expired, state.streams
        if num_pending is None:  # to the episode's end
            num_pending = _episodes(streams, state.episodes).num_unfinished()
        if num_expired is None:
            num_expired = (
                jnp.zeros_like(num_pending)
                if streams.layout.window.before == 0
                else _episodes(streams, state.episodes).num_headless()
            )
        return cls(streams, state.episodes, num_pending, num_expired)

    @property
    def layout(self) -> Layout:
        return self.streams.layout

    @property
    def episodes(self) -> Episodes:
        return _episodes(self.streams, self.table)

    def count(self) -> jax.Array:
        """Sampleable rows of each stream: int32[E]."""
        window, filled = self.layout.window, self.streams.heads.filled
        if self.streams.flags is None:
            return filled - self.num_pending
        from_oldest = self._candidates_since(filled - self.num_expired)
        # what is pending are candidates
        if window.is_bounded and not window.crosses_episodes and window.period == 1:
            return jnp.maximum(from_oldest - self.num_pending, 0)
        return jnp.maximum(from_oldest - self._candidates_since(self.num_pending), 0)

    def contains(self, row: jax.Array) -> jax.Array:
        """Whether each row, in `[0, capacity)`, is sampleable: bool[...]."""
        env, _ = self.layout.split(row)
        age = self.streams.age(row)
        return (
            (age >= of_stream(self.num_pending, env))
            & (age < self._num_intact(env))
            & self.is_candidate(row)
        )

    def is_candidate(self, row: jax.Array) -> jax.Array:
        """Whether each row, if it is written, may be drawn at all: bool[...]."""
        return ~self.streams.has(row, row_flags.NO_CANDIDATE)

    def select(self, env: jax.Array, nth: jax.Array) -> jax.Array:
        """The `nth` sampleable row of each stream `env`, oldest first: int32[...]. `nth` must be
        below the stream's count.

        A binary search over the stream's candidate numbers, among as many rows as the stream has
        that are no candidates: log2 of that number of reads.
        """
        layout, num_intact = self.layout, self._num_intact(env)
        oldest = layout.wrap(of_stream(self.streams.head, env) - num_intact)
        if self.streams.flags is None:
            return layout.row(env, layout.wrap(oldest + nth))
        base = self._candidate_number(env, oldest)
        if not layout.traits.has_loops:
            return self._select_in_line(env, nth, oldest, base, num_intact)

        def halve(_, bounds):
            # the row sought is among the rows `low .. high - 1`, counted from the oldest
            low, high = bounds
            middle = low + (high - low) // 2
            # The candidates before `middle`: the row sought lies before it if they are more than
            # `nth`.
            is_before = (
                ring.difference(self._candidate_number(env, layout.wrap(oldest + middle)), base)
                > nth
            )
            return jnp.where(is_before, low, middle), jnp.where(is_before, middle, high)

        # Rows that are no candidates: final rows, and what a period leaves out. (Clipped, since the
        # candidate numbers of an empty stream mean nothing.)
        others = jnp.clip(
            num_intact - ring.difference(of_stream(self.streams.next_candidate_number, env), base),
            0,
            num_intact,
        )
        least = jnp.clip(nth, 0, num_intact)
        num_halvings = 32 - jax.lax.clz(jnp.max(others, initial=0))
        low, _ = jax.lax.fori_loop(
            0, num_halvings, halve, (least, jnp.minimum(least + others + 1, num_intact))
        )
        return layout.row(env, layout.wrap(oldest + low))

    def _select_in_line(
        self,
        env: jax.Array,
        nth: jax.Array,
        oldest: jax.Array,
        base: jax.Array,
        num_intact: jax.Array,
    ) -> jax.Array:
        """The last row with at most `nth` candidates before it, from the oldest on: without a loop,
        for accelerators."""
        length, end = self.layout.length, self.layout.row(env + 1, jnp.int32(0))
        first = end - length + oldest

        def passes(place):
            row = first + place
            row = jnp.where(row >= end, row - length, row)
            return (ring.difference(self.streams.candidate_number_of(row), base) <= nth) & (
                place < num_intact
            )

        place = last_slot(passes, nth, length, self.layout.traits.num_ways)
        return self.layout.row(env, self.layout.wrap(oldest + place))

    def first_candidate_number(self) -> jax.Array:
        """Return the candidate number of each stream's oldest sampleable row, or of the next
        candidate whose look-back will be whole: uint32[E]."""
        return self._candidate_number_of_newest(self.streams.heads.filled - self.num_expired)

    def look_back(self, row: jax.Array) -> jax.Array:
        """Count the rows before each stored row that its window reads: int32[...]."""
        before = self.layout.window.before
        if before is None:
            return self.episodes.steps_from_start(row)
        return self.streams.rows_before(row, before) if before else jnp.zeros_like(row)

    def _candidates_since(self, num_rows: jax.Array) -> jax.Array:
        """Candidates among the newest rows of each stream: int32[E]."""
        return ring.difference(
            self.streams.next_candidate_number, self._candidate_number_of_newest(num_rows)
        )

    def _candidate_number_of_newest(self, num_rows: jax.Array) -> jax.Array:
        """The candidate number of the oldest of the newest `num_rows` rows; of the next row where
        there are none: uint32[E]."""
        if self.streams.candidate_number is None:
            return self.streams.next_candidate_number - num_rows.astype(jnp.uint32)
        position = self.layout.wrap(self.streams.heads.position - num_rows)
        return jnp.where(
            num_rows > 0,
            self._candidate_number(self.layout.envs(), position),
            self.streams.next_candidate_number,
        )

    def _num_intact(self, env: jax.Array) -> jax.Array:
        """Count the rows of each stream that are written, and not cut: int32[...]."""
        filled = of_stream(self.streams.filled, env)
        return (
            filled if self.layout.window.before == 0 else filled - of_stream(self.num_expired, env)
        )

    def _candidate_number(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self.streams.candidate_number_of(self.layout.row(env, position))


def _episodes(streams: Streams, table: EpisodeState | None) -> Episodes:
    assert table is not None
    return Episodes(streams, table)

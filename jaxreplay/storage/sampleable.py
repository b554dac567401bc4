"""The set of sampleable rows: one rule for every sampler.

A row is sampleable if it is a candidate (a transition that `period` does not skip) and its whole
window is known. That is, its look-ahead is written or reaches its episode's end, and its look-back
is not overwritten or reaches its episode's start. So the same row always yields the same target.

Within a stream, rows become sampleable, and stop being so, in the order of time. So the sampleable
rows of a stream are its candidates without its newest `num_pending` and its oldest `num_expired`
rows. No list of them is kept: a row's candidate number (`state.py`) counts the candidates before
it. Candidate numbers continue through wraps and clears, so that each belongs to one row only. Those
of a stream's sampleable rows are consecutive.
"""

import dataclasses
import operator
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay.storage import ring
from jaxreplay.storage.episodes import Episodes
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.search import last_slot, split_by
from jaxreplay.storage.state import ReplayState, of_stream
from jaxreplay.types import Index

_SHORT_WINDOW = 16  # rows


@dataclasses.dataclass(frozen=True)
class Sampleable:
    """The set of sampleable rows of a buffer's state; E streams, each the ring of one env.

    Attributes:
      state: The buffer's state.
      num_pending: int32[E], number of each stream's newest rows whose look-ahead is not known.
      num_expired: int32[E], number of each stream's oldest rows whose look-back is overwritten.
      is_narrowed: Whether older rows were left out, by `newest`. Default: False.
    """

    state: ReplayState
    num_pending: jax.Array
    num_expired: jax.Array
    is_narrowed: bool = False

    layout: ClassVar[Layout] = property(  # type: ignore[assignment]
        operator.attrgetter("state.layout"), doc="Sizes of the buffer."
    )

    @classmethod
    def of(cls, state: ReplayState) -> "Sampleable":
        """Return the set of sampleable rows of a state.

        Args:
          state: A buffer's state.
        """
        num_pending, num_expired = state.counters.num_pending, state.counters.num_expired
        if num_pending is None:  # the window reaches to the episode's end
            num_pending = Episodes(state).num_unfinished()
        if num_expired is None:
            num_expired = (
                jnp.zeros_like(num_pending)
                if state.layout.window.before == 0
                else Episodes(state).num_headless()
            )
        return cls(state, num_pending, num_expired)

    @property
    def episodes(self) -> Episodes:
        """Look-ups of episodes, if the sampler's window has `needs_episodes=True`."""
        return Episodes(self.state)

    def newest(self, num_rows: int) -> "Sampleable":
        """Return the set without each stream's rows that are older than its newest ones.

        Args:
          num_rows: Number of newest rows, at least 1.
        """
        others = self.state.counters.filled - num_rows
        num_expired = jnp.maximum(self.num_expired, others)
        return dataclasses.replace(self, num_expired=num_expired, is_narrowed=True)

    def count(self) -> jax.Array:
        """Return the number of sampleable rows of each stream: int32[E]."""
        window, filled = self.layout.window, self.state.counters.filled
        if self.state.rows.flags is None:
            left = filled - self.num_pending
            return jnp.maximum(left - self.num_expired, 0) if self.is_narrowed else left
        # candidates among the newest rows
        since = lambda num_rows: ring.difference(
            self.state.next_candidate_number, self._candidate_number_of_newest(num_rows)
        )
        from_oldest = since(filled - self.num_expired)
        # then every pending row is a candidate
        if window.is_bounded and not window.crosses_episodes and window.period == 1:
            return jnp.maximum(from_oldest - self.num_pending, 0)
        return jnp.maximum(from_oldest - since(self.num_pending), 0)

    def contains(self, row: jax.Array) -> jax.Array:
        """Return whether each row is sampleable: bool[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        env, _ = self.layout.split(row)
        age = self.state.age(row)
        return (
            (age >= of_stream(self.num_pending, env))
            & (age < self._num_intact(env))
            & self.is_candidate(row)
        )

    def tried_row(self, high: jax.Array, low: jax.Array) -> jax.Array:
        """Return a row that is chosen uniformly from a set with all sampleable ones: int32[...].

        If all streams step together and windows are short, these are all written rows: few of them
        are incomplete, but for a buffer's very first steps. Else they are the rows whose window is
        known. If there is none, return any row.

        Args:
          high: uint32[...], random bits.
          low: uint32[...], more random bits.
        """
        layout = self.layout
        if layout.lockstep and layout.window.is_bounded and layout.window.length <= _SHORT_WINDOW:
            return self.state.random_row(high, low)
        num_known = jnp.maximum(self.state.filled - self.num_pending - self.num_expired, 0)
        total = num_known.sum(dtype=jnp.int32)
        env, place = split_by(num_known, random.below(high, low, total), layout.traits)
        # clipped, since all rows of a stream may be pending
        age = jnp.minimum(of_stream(self.num_pending, env) + place, layout.length - 1)
        return layout.row(env, layout.wrap(of_stream(self.state.head, env) - 1 - age))

    def live(self, index: Index) -> tuple[jax.Array, jax.Array]:
        """Return the rows of an index, and whether each is live: in range, sampleable, and not
        overwritten since it was sampled.

        Args:
          index: `batch.index` of a sample, leaves [B], not checked.

        Returns:
          int32[B], the rows, 0 for those out of range; bool[B].
        """
        is_in_range = (index.row >= 0) & (index.row < self.layout.capacity)
        row = jnp.where(is_in_range, index.row, 0)
        return row, is_in_range & (self.state.index(row).lap == index.lap) & self.contains(row)

    def is_candidate(self, row: jax.Array) -> jax.Array:
        """Return whether each row, if it is written, is a candidate: bool[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        return ~self.state.has(row, self.layout.window.no_candidate)

    def age(self, row: jax.Array) -> jax.Array:
        """Return the number of rows of its stream that were written after each row: int32[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        return self.state.age(row)

    def select(self, env: jax.Array, nth: jax.Array) -> jax.Array:
        """Return the `nth` sampleable row of each stream `env`, oldest first: int32[...].

        It is a binary search over candidate numbers. With m rows in the stream that are no
        candidates, it searches m + 1 rows by about log2(m) reads.

        Args:
          env: int32[...], streams.
          nth: int32[...], in [0, count of the stream).
        """
        layout, num_intact = self.layout, self._num_intact(env)
        oldest = layout.wrap(of_stream(self.state.head, env) - num_intact)
        if self.state.rows.flags is None:
            return layout.row(env, layout.wrap(oldest + nth))
        number_at = lambda position: self.state.candidate_number_of(layout.row(env, position))
        base = number_at(oldest)
        if not layout.traits.has_loops:
            return self._select_in_line(env, nth, oldest, base, num_intact)

        def halve(_, bounds):
            # The row sought is among the rows `low .. high - 1`, counted from the oldest. If more
            # than `nth` candidates lie before `middle`, it lies before `middle`.
            low, high = bounds
            middle = low + (high - low) // 2
            is_before = ring.difference(number_at(layout.wrap(oldest + middle)), base) > nth
            return jnp.where(is_before, low, middle), jnp.where(is_before, middle, high)

        # Rows that are no candidates: final rows, and those that a period skips. Clipped, since
        # candidate numbers of an empty stream are meaningless.
        others = jnp.clip(
            num_intact - ring.difference(of_stream(self.state.next_candidate_number, env), base),
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
        """Return the last row with at most `nth` candidates between the oldest row and it.

        It has no loop, for accelerators.

        Args:
          env: int32[...], streams.
          nth: int32[...], in [0, count of the stream).
          oldest: int32[...], position of the stream's oldest intact row.
          base: uint32[...], candidate number of that row.
          num_intact: int32[...], number of the stream's intact rows.
        """
        length, end = self.layout.length, self.layout.row(env + 1, jnp.int32(0))
        first = end - length + oldest

        def passes(place):
            row = first + place
            row = jnp.where(row >= end, row - length, row)
            return (ring.difference(self.state.candidate_number_of(row), base) <= nth) & (
                place < num_intact
            )

        place = last_slot(passes, nth, length, self.layout.traits.num_ways)
        return self.layout.row(env, self.layout.wrap(oldest + place))

    def first_candidate_number(self) -> jax.Array:
        """Return the candidate number of each stream's oldest sampleable row: uint32[E].

        If there is none, return that of the next candidate whose look-back will be intact.
        """
        return self._candidate_number_of_newest(self.state.counters.filled - self.num_expired)

    def look_back(self, row: jax.Array) -> jax.Array:
        """Return the number of rows before each stored row that its window reads: int32[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        before = self.layout.window.before
        if before is None:
            return self.episodes.steps_from_start(row)
        return self.state.rows_before(row, before) if before else jnp.zeros_like(row)

    def _candidate_number_of_newest(self, num_rows: jax.Array) -> jax.Array:
        """Return the candidate number of the oldest of each stream's newest `num_rows` rows, or of
        the next row if `num_rows` is 0: uint32[E]."""
        if self.state.rows.candidate_number is None:
            return self.state.next_candidate_number - num_rows.astype(jnp.uint32)
        position = self.layout.wrap(self.state.counters.position - num_rows)
        row = self.layout.row(ring.arange(self.layout.num_envs), position)
        number = self.state.candidate_number_of(row)
        return jnp.where(num_rows > 0, number, self.state.next_candidate_number)

    def _num_intact(self, env: jax.Array) -> jax.Array:
        """Count the rows of each stream that are written and not expired: int32[...]."""
        filled = of_stream(self.state.filled, env)
        if self.layout.window.before == 0 and not self.is_narrowed:
            return filled
        return filled - of_stream(self.num_expired, env)

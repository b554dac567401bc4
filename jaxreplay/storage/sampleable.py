"""The set of sampleable rows: one rule for every sampler.

A row is sampleable if it is a candidate (a transition that `period` does not skip) and its whole
window is known. That is, its look-ahead is written or reaches its episode's end, and its look-back
is not overwritten or reaches its episode's start. So the same row always yields the same target.

Within a stream, rows become sampleable, and stop being so, in the order of time. So the sampleable
rows of a stream are its candidates without its newest `num_pending` and its oldest `num_expired`
rows. No list of them is kept: a row's candidate number (`streams.py`) counts the candidates before
it. Candidate numbers continue through wraps and clears, so that each belongs to one row only. Those
of a stream's sampleable rows are consecutive.
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
    """State of a buffer: a pytree of arrays, made by `buffer.init`.

    Methods that return a new state reuse the old one's memory: jit them with `donate_argnums=0`,
    and use the returned state instead. E is the number of envs.

    Attributes:
      streams: The stored steps, with flags and counters of each env's ring of rows.
      sampler: The sampler's own state: any pytree.
      episodes: The episode table. None unless `track_episodes` is set, or the view or the sampler
        looks episodes up.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(capacity=1000, num_envs=4, batch_size=8, autoreset="next_step")
      >>> zero, false = jnp.float32(0), jnp.bool_(False)
      >>> example = jr.Step(
      ...     obs=jnp.zeros(3), action=zero, reward=zero, terminated=false, truncated=false
      ... )
      >>> state = buffer.init(example)
      >>> state
      ReplayState(4 envs x 250 rows, obs f32[3], 25.1 kB)
      >>> state.layout.capacity
      1000
    """

    streams: Streams
    sampler: Any
    episodes: EpisodeState | None

    @property
    def layout(self) -> Layout:
        """Layout that the state was made for."""
        return self.streams.layout

    def __repr__(self) -> str:
        """Show sizes, such as `ReplayState(4 envs x 250 rows, obs f32[3], 16 kB)`. For states that
        are stacked by `vmap`, their number comes first."""
        if not has_shapes(self):
            return super().__repr__()
        layout, steps = self.layout, self.streams.steps
        counters, num_axes = self.streams.stored_counters, 1 if layout.traits.in_line else 2
        population = jax.tree.leaves(counters)[0].shape[:-num_axes]
        sizes = [
            *map(str, population),
            f"{layout.num_envs} env{'s' * (layout.num_envs != 1)}",
            f"{layout.length} rows",
        ]
        name, rows = ("item", steps) if layout.autoreset is None else ("obs", steps.obs)
        num_rows = stored_arrays.stored_leaves(rows)[0].shape[len(population)]
        if num_rows > layout.capacity:
            sizes.insert(len(population), f"{num_rows // layout.capacity} shards")
        row = stored_arrays.short_rows(rows, len(population) + 1)
        return f"ReplayState({' x '.join(sizes)}, {name} {row}, {short_bytes(self)})"


class WriteEffect(NamedTuple):
    """Effect of one write on the set of sampleable rows: all that a sampler observes of it.

    Axes: E streams; K rows that a stream may have got; W = look-ahead + K + look-back rows in the
    order of time. The W rows are those that may have been pending, those written, and the oldest
    ones, whose look-back may have been overwritten.

    A row becomes sampleable once, and stays so until it is overwritten or expires. A written row
    takes the place of an old one, which is gone.

    With a period, or across episodes, rows that are no candidates may be pending, too. A sampler
    that follows rows one by one must remember which of the written rows are candidates. If their
    flags were read here, XLA would copy all flags before the next write.

    Attributes:
      layout: Sizes of the buffer.
      row: int32[W, E], the rows; the capacity where there is none.
      became_sampleable: bool[W, E], True where the window became complete.
      is_written: bool[K, E], True where a row was written.
      is_candidate: bool[K, E], True for written rows that are sampleable once their window is
        complete.
      is_gone: bool[W, E], True for rows that were overwritten or expired.
      age: int32[W, E], number of rows of the stream that were written after the row.
      start: int32[] or int32[E], position of `row[0]` in the ring. If it is a scalar, `row` is the
        same range of every stream.
    """

    layout: Layout
    row: jax.Array
    became_sampleable: jax.Array
    is_written: jax.Array
    is_candidate: jax.Array
    is_gone: jax.Array
    age: jax.Array
    start: jax.Array


def count_pending(layout: Layout, num_pending: jax.Array, written: Written) -> jax.Array:
    """Count the newest rows of each stream whose window is not complete after a write: int32[E].

    Args:
      layout: Layout of the state, with a bounded look-ahead.
      num_pending: int32[E], their number before the write.
      written: The rows that were written.
    """
    window = layout.window
    assert window.after is not None
    if window.crosses_episodes or written.flags is None:
        since = layout.length
    else:
        # A final row completes every window that reaches it, and so does a termination if no final
        # observation is read. Only rows after the newest of these are pending.
        ends = row_flags.FINAL if window.needs_final_obs else row_flags.FINAL | row_flags.TERMINATED
        completes = written.is_written & ((written.flags & ends) != 0)
        since = jnp.min(jnp.where(completes, written.age, layout.length), axis=0)
    return jnp.minimum(jnp.minimum(since, num_pending + written.num_rows), window.after)


def count_expired(streams: Streams) -> jax.Array | None:
    """Count the oldest rows of each stream whose look-back is overwritten: int32[E], or None if the
    window has no bounded look-back."""
    layout, filled = streams.layout, streams.filled
    if not (before := layout.window.before):
        return None
    place = ring.arange(before)[:, None]
    position = layout.wrap(streams.head - filled + place)
    # Rows from the next episode start on have their whole look-back.
    is_start = streams.has(layout.row(layout.envs(), position), row_flags.FIRST)
    return jnp.min(
        jnp.where(is_start & (place < filled), place, jnp.minimum(before, filled)), axis=0
    )


def effect_of(before: "Sampleable", after: "Sampleable", written: Written) -> WriteEffect:
    """Return the effect of a write, from the sampleable rows before and after it. The window must
    be bounded."""
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
    """The set of sampleable rows of a buffer's state; E streams, each the ring of one env.

    Attributes:
      streams: The stored rows.
      table: The table behind `episodes`, or None.
      num_pending: int32[E], number of each stream's newest rows whose look-ahead is not known.
      num_expired: int32[E], number of each stream's oldest rows whose look-back is overwritten.
    """

    streams: Streams
    table: EpisodeState | None
    num_pending: jax.Array
    num_expired: jax.Array

    @classmethod
    def of(cls, state: ReplayState) -> "Sampleable":
        """Return the set of sampleable rows of a state.

        Args:
          state: A buffer's state.
        """
        streams = state.streams
        num_pending, num_expired = streams.counters.num_pending, streams.counters.num_expired
        if num_pending is None:  # the window reaches to the episode's end
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
        """Sizes of the buffer."""
        return self.streams.layout

    @property
    def episodes(self) -> Episodes:
        """Look-ups of episodes, if the sampler's window has `needs_episodes=True`."""
        return _episodes(self.streams, self.table)

    def count(self) -> jax.Array:
        """Return the number of sampleable rows of each stream: int32[E]."""
        window, filled = self.layout.window, self.streams.counters.filled
        if self.streams.flags is None:
            return filled - self.num_pending
        from_oldest = self._candidates_since(filled - self.num_expired)
        # then every pending row is a candidate
        if window.is_bounded and not window.crosses_episodes and window.period == 1:
            return jnp.maximum(from_oldest - self.num_pending, 0)
        return jnp.maximum(from_oldest - self._candidates_since(self.num_pending), 0)

    def contains(self, row: jax.Array) -> jax.Array:
        """Return whether each row is sampleable: bool[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        env, _ = self.layout.split(row)
        age = self.streams.age(row)
        return (
            (age >= of_stream(self.num_pending, env))
            & (age < self._num_intact(env))
            & self.is_candidate(row)
        )

    def is_candidate(self, row: jax.Array) -> jax.Array:
        """Return whether each row, if it is written, is a candidate: bool[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        return ~self.streams.has(row, row_flags.NO_CANDIDATE)

    def age(self, row: jax.Array) -> jax.Array:
        """Return the number of rows of its stream that were written after each row: int32[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        return self.streams.age(row)

    def select(self, env: jax.Array, nth: jax.Array) -> jax.Array:
        """Return the `nth` sampleable row of each stream `env`, oldest first: int32[...].

        It is a binary search over candidate numbers. With m rows in the stream that are no
        candidates, it searches m + 1 rows by about log2(m) reads.

        Args:
          env: int32[...], streams.
          nth: int32[...], in [0, count of the stream).
        """
        layout, num_intact = self.layout, self._num_intact(env)
        oldest = layout.wrap(of_stream(self.streams.head, env) - num_intact)
        if self.streams.flags is None:
            return layout.row(env, layout.wrap(oldest + nth))
        base = self._candidate_number(env, oldest)
        if not layout.traits.has_loops:
            return self._select_in_line(env, nth, oldest, base, num_intact)

        def halve(_, bounds):
            # The row sought is among the rows `low .. high - 1`, counted from the oldest. If more
            # than `nth` candidates lie before `middle`, it lies before `middle`.
            low, high = bounds
            middle = low + (high - low) // 2
            is_before = (
                ring.difference(self._candidate_number(env, layout.wrap(oldest + middle)), base)
                > nth
            )
            return jnp.where(is_before, low, middle), jnp.where(is_before, middle, high)

        # Rows that are no candidates: final rows, and those that a period skips. Clipped, since
        # candidate numbers of an empty stream are meaningless.
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
            return (ring.difference(self.streams.candidate_number_of(row), base) <= nth) & (
                place < num_intact
            )

        place = last_slot(passes, nth, length, self.layout.traits.num_ways)
        return self.layout.row(env, self.layout.wrap(oldest + place))

    def first_candidate_number(self) -> jax.Array:
        """Return the candidate number of each stream's oldest sampleable row: uint32[E].

        If there is none, return that of the next candidate whose look-back will be intact.
        """
        return self._candidate_number_of_newest(self.streams.counters.filled - self.num_expired)

    def look_back(self, row: jax.Array) -> jax.Array:
        """Return the number of rows before each stored row that its window reads: int32[...].

        Args:
          row: int32[...], in [0, capacity).
        """
        before = self.layout.window.before
        if before is None:
            return self.episodes.steps_from_start(row)
        return self.streams.rows_before(row, before) if before else jnp.zeros_like(row)

    def _candidates_since(self, num_rows: jax.Array) -> jax.Array:
        """Count the candidates among the newest `num_rows` rows of each stream: int32[E]."""
        return ring.difference(
            self.streams.next_candidate_number, self._candidate_number_of_newest(num_rows)
        )

    def _candidate_number_of_newest(self, num_rows: jax.Array) -> jax.Array:
        """Return the candidate number of the oldest of each stream's newest `num_rows` rows, or of
        the next row if `num_rows` is 0: uint32[E]."""
        if self.streams.candidate_number is None:
            return self.streams.next_candidate_number - num_rows.astype(jnp.uint32)
        position = self.layout.wrap(self.streams.counters.position - num_rows)
        return jnp.where(
            num_rows > 0,
            self._candidate_number(self.layout.envs(), position),
            self.streams.next_candidate_number,
        )

    def _num_intact(self, env: jax.Array) -> jax.Array:
        """Count the rows of each stream that are written and not expired: int32[...]."""
        filled = of_stream(self.streams.filled, env)
        return (
            filled if self.layout.window.before == 0 else filled - of_stream(self.num_expired, env)
        )

    def _candidate_number(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self.streams.candidate_number_of(self.layout.row(env, position))


def _episodes(streams: Streams, table: EpisodeState | None) -> Episodes:
    assert table is not None
    return Episodes(streams, table)

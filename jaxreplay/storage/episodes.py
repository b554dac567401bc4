"""Episodes: every look-up is O(1), without a scan, a sort or a bound on their number or length.

Each row has the ordinal of its episode in its stream, modulo the stream's length; a table per
stream has, for each ordinal, the position of that episode's last row, written when it ends. A
stream of `length` rows holds at most `length` episodes, so no two that are stored share an ordinal.
An entry of the table is read only for an episode that has ended and whose last row is stored.

A final row that opens an episode (the first step was truncated, and its final observation is not
known) ends none: there was no transition. It is no row of any episode. Where that can happen, a
second table has the position of each episode's first row; elsewhere that is the row after the last
one of the episode before.

Eight bytes a row, or twelve, kept only where a view, a sampler or the buffer's maker asks for them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util.struct import Node
from jaxreplay.storage import ring, row_flags
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.streams import Streams, Written, from_each_on, of_stream


class EpisodeState(Node):
    ordinal: jax.Array  # int32[N], in [0, length): each row's episode
    # int32[N], env * length + ordinal -> the position of that episode's last row
    end_position: jax.Array
    current: jax.Array  # int32[E], in [0, length): the ordinal of the next row
    is_open: jax.Array  # bool[E]: the newest row's episode has not ended
    # int32[N], as `end_position`, of its first row; None where episodes follow each other without a
    # gap
    start_position: jax.Array | None


def init(layout: Layout) -> EpisodeState:
    """Return a table without episodes."""
    positions = jnp.zeros((layout.capacity,), jnp.int32)
    return EpisodeState(
        ordinal=positions,
        end_position=jnp.zeros_like(positions),
        start_position=None if layout.termination_has_final_row else jnp.zeros_like(positions),
        current=jnp.zeros((layout.num_envs,), jnp.int32),
        is_open=jnp.zeros((layout.num_envs,), bool),
    )


def clear(state: EpisodeState) -> EpisodeState:
    """Forget every episode; an unfinished one does not go on."""
    return state.replace(
        current=jnp.zeros_like(state.current), is_open=jnp.zeros_like(state.is_open)
    )


class Entries(NamedTuple):
    """What a write puts into the table, for each row that it writes: int32[K, E] each."""

    row: jax.Array  # capacity where nothing is written
    position: jax.Array
    ordinal: jax.Array
    # the entry of `EpisodeState.end_position` that is the position; capacity for none
    end_position: jax.Array
    start_position: jax.Array | None  # the same of `EpisodeState.start_position`


def advance(layout: Layout, state: EpisodeState, written: Written) -> tuple[EpisodeState, Entries]:
    """Return the table after a write, but for what is to be `put`, which is noted."""
    assert written.flags is not None
    is_first, is_final = ((written.flags & bit) != 0 for bit in (row_flags.FIRST, row_flags.FINAL))
    closes = written.is_written & layout.closes_episode(written.flags) & ~(is_first & is_final)
    current = layout.wrap(state.current + closes.sum(axis=0, dtype=jnp.int32))
    ordinal = layout.wrap(current - from_each_on(closes).astype(jnp.int32))
    _, position = layout.split(written.row)
    is_newest = written.is_written & (written.age == 0)

    def entry(where):
        return jnp.where(where, layout.row(layout.envs(), ordinal), layout.capacity)

    start_position = (
        None if state.start_position is None else entry(written.is_written & is_first & ~is_final)
    )
    counted = state.replace(
        current=current,
        is_open=jnp.where(
            written.num_rows > 0, ~jnp.any(is_newest & closes, axis=0), state.is_open
        ),
    )
    return counted, Entries(written.row, position, ordinal, entry(closes), start_position)


def write(state: EpisodeState, entries: Entries) -> EpisodeState:
    """What was noted, into a table that was counted."""

    def at(table, entry, values):
        return table.at[entry].set(values, mode="drop", unique_indices=True)

    return state.replace(
        ordinal=at(state.ordinal, entries.row, entries.ordinal),
        end_position=at(state.end_position, entries.end_position, entries.position),
        start_position=None
        if state.start_position is None
        else at(state.start_position, entries.start_position, entries.position),
    )


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The episodes of a buffer's state. All look-ups take rows int32[...] that are stored, and are
    elementwise.

    A final row that opens an episode is in none: it is 0 rows from an end and from a start, and not
    complete; ends ahead are counted as those of the row after it.
    """

    streams: Streams
    table: EpisodeState

    @property
    def layout(self) -> Layout:
        return self.streams.layout

    def steps_to_end(self, row: jax.Array) -> jax.Array:
        """Rows from each row to the last one of its episode, or to the newest where it has not
        ended: int32[...], 0 at that row."""
        env, position, ordinal = self._locate(row)
        end = jnp.where(self._has_ended(env, ordinal), self._end(env, ordinal), self._newest(env))
        return jnp.where(
            self._is_in_none(env, position), 0, ring.forward(position, end, self.layout.length)
        )

    def steps_from_start(self, row: jax.Array) -> jax.Array:
        """Rows from the first one of its episode to each row, or from the oldest one stored where
        the first is overwritten: int32[...]."""
        env, position, ordinal = self._locate(row)
        from_start = ring.forward(self._start(env, ordinal), position, self.layout.length)
        return jnp.where(self._is_in_none(env, position), 0, from_start)

    def kth_end(self, row: jax.Array, k: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Rows from each row to the end of its k-th episode, counted from its own as 1, and whether
        that has ended.

        Returns:
          int32[...], the rows ahead, up to the newest row where there are fewer ends; bool[...],
            whether there are k ends ahead.
        """
        env, position, ordinal = self._locate(row)
        exists = (k >= 1) & (k <= self.ends_ahead(row))
        target = self.layout.wrap(ordinal + jnp.where(exists, k - 1, 0))
        end = jnp.where(exists, self._end(env, target), self._newest(env))
        return ring.forward(position, end, self.layout.length), exists

    def ends_ahead(self, row: jax.Array) -> jax.Array:
        """Episodes that have ended, from each row's own on: int32[...]."""
        env, _, ordinal = self._locate(row)
        is_open = self._of(self.table.is_open, env)
        return (
            ring.forward(ordinal, self._ordinal(env, self._newest(env)), self.layout.length)
            + ~is_open
        )

    def is_complete(self, row: jax.Array) -> jax.Array:
        """Whether each row's episode has ended and is stored from its first row on: bool[...]."""
        env, position, ordinal = self._locate(row)
        oldest = self._oldest(env)
        is_intact = (ordinal != self._ordinal(env, oldest)) | self._has(
            env, oldest, row_flags.FIRST
        )
        return (
            self.streams.is_written(row)
            & self._has_ended(env, ordinal)
            & is_intact
            & ~self._is_in_none(env, position)
        )

    def num_unfinished(self) -> jax.Array:
        """Stored rows of each stream's unfinished episode: int32[E], 0 where there is none."""
        env = self.layout.envs()
        newest = self._newest(env)
        # A final row that opens an episode is no row of it.
        is_open = (
            self.table.is_open
            & ~self._has(env, newest, row_flags.FINAL)
            & (self.streams.filled > 0)
        )
        return jnp.where(is_open, self.steps_from_start(self.layout.row(env, newest)) + 1, 0)

    def num_headless(self) -> jax.Array:
        """Stored rows of each stream's oldest episode, where its first row is stored no more:
        int32[E], else 0."""
        env = self.layout.envs()
        oldest = self._oldest(env)
        is_intact = self._has(env, oldest, row_flags.FIRST) | (self.streams.filled == 0)
        return jnp.where(is_intact, 0, self.steps_to_end(self.layout.row(env, oldest)) + 1)

    def range_of(self, env: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first and the last row of each stream's `nth` stored episode, from its oldest on,
        which is 0: int32[...] each."""
        ordinal = self.layout.wrap(self._ordinal(env, self._oldest(env)) + nth)
        end = jnp.where(self._has_ended(env, ordinal), self._end(env, ordinal), self._newest(env))
        return self.layout.row(env, self._start(env, ordinal)), self.layout.row(env, end)

    def num_episodes(self) -> jax.Array:
        """Episodes of which each stream holds a row, the unfinished and the headless ones too:
        int32[E]."""
        env = self.layout.envs()
        oldest, newest = (
            self._ordinal(env, position) for position in (self._oldest(env), self._newest(env))
        )
        # A final row that opens an episode is no row of it.
        is_one = ~self.table.is_open | ~self._has(env, self._newest(env), row_flags.FINAL)
        return jnp.where(
            self.streams.filled > 0, ring.forward(oldest, newest, self.layout.length) + is_one, 0
        )

    def _start(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        """The position of the first stored row of an episode."""
        oldest = self._oldest(env)
        # Of the oldest episode alone the start may be gone; what is stored of it begins with the
        # oldest row.
        is_oldest = ordinal == self._ordinal(env, oldest)
        if self.table.start_position is None:
            start = self.layout.wrap(self._end(env, self.layout.wrap(ordinal - 1)) + 1)
        else:
            start = self._of(self.table.start_position, self.layout.row(env, ordinal))
            is_oldest &= ~self._has(env, oldest, row_flags.FIRST)
        return jnp.where(is_oldest, oldest, start)

    def _is_in_none(self, env: jax.Array, position: jax.Array) -> Any:
        """Whether a row is a final row that opens an episode."""
        if self.table.start_position is None:
            return jnp.bool_(False)
        return self._has(env, position, row_flags.FIRST) & self._has(env, position, row_flags.FINAL)

    def _has(self, env: jax.Array, position: jax.Array, flag: int) -> jax.Array:
        return self.streams.has(self.layout.row(env, position), flag)

    def _locate(self, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        env, position = self.layout.split(row)
        return env, position, self._of(self.table.ordinal, row)

    def _has_ended(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        is_newest = ordinal == self._ordinal(env, self._newest(env))
        return ~(is_newest & self._of(self.table.is_open, env))

    def _newest(self, env: jax.Array) -> jax.Array:
        return self.layout.wrap(of_stream(self.streams.head, env) - 1)

    def _oldest(self, env: jax.Array) -> jax.Array:
        head, filled = (of_stream(x, env) for x in (self.streams.head, self.streams.filled))
        return self.layout.wrap(head - filled)

    def _ordinal(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self._of(self.table.ordinal, self.layout.row(env, position))

    def _end(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        return self._of(self.table.end_position, self.layout.row(env, ordinal))

    def _of(self, values: jax.Array, index: jax.Array) -> jax.Array:
        return values.at[index].get(mode="promise_in_bounds")

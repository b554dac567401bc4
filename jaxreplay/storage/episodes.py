"""Episode tables. Each look-up is O(1), with no scan, no sort, and no bound on the number or length
of episodes.

Each row has the ordinal of its episode in its stream, modulo the stream's length. A table per
stream maps each ordinal to the position of that episode's last row; the entry is written when the
episode ends. A stream of `length` rows holds at most `length` episodes, so stored episodes have
different ordinals. An entry is read only if its episode has ended and its last row is stored.

A final row may open an episode: if the observation after its first step is unknown. Such a row is
no transition, ends no episode and belongs to none. So a second table has the position of each
episode's first row.

The tables take 12 bytes a row. They are kept only if the view, the sampler or `track_episodes` asks
for them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay.storage import ring, row_flags
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.state import ReplayState, at, of_stream


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Look-ups of the episodes in a buffer's state, by stored rows. They are elementwise.

    A final row that opens an episode (a first step with an unknown next observation) belongs to no
    episode. It is 0 rows from a start and from an end, and is not complete.
    Its `ends_ahead` is that of the next row.

    Args:
      state: The buffer's state, with an episode table; E streams.
    """

    state: ReplayState

    @property
    def layout(self) -> Layout:
        """Layout of the state."""
        return self.state.layout

    def steps_to_end(self, row: jax.Array) -> jax.Array:
        """Count the rows from each row to its episode's last row.

        If the episode has not ended, count to the stream's newest row.

        Args:
          row: int32[...], stored rows.

        Returns:
          int32[...]; 0 for the last row itself.
        """
        env, position, ordinal = self._locate(row)
        end = self._end(env, ordinal, self._has_ended(env, ordinal))
        to_end = ring.forward(position, end, self.layout.length)
        return jnp.where(self._is_of_episode(row), to_end, 0)

    def steps_from_start(self, row: jax.Array) -> jax.Array:
        """Count the rows from each row's episode start to the row.

        If the episode's first row is overwritten, count from its oldest stored row.

        Args:
          row: int32[...], stored rows.

        Returns:
          int32[...]; 0 for the first row itself.
        """
        env, position, ordinal = self._locate(row)
        from_start = ring.forward(self._start(env, ordinal), position, self.layout.length)
        return jnp.where(self._is_of_episode(row), from_start, 0)

    def kth_end(self, row: jax.Array, k: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Count the rows from each row to the k-th episode end ahead.

        Args:
          row: int32[...], stored rows.
          k: int32[...] or int; 1 is the end of the row's own episode.

        Returns:
          Number of rows ahead: int32[...]. If fewer than k episodes have ended, it reaches to the
            stream's newest row.
          Whether k episodes have ended, from the row's own on: bool[...].
        """
        env, position, ordinal = self._locate(row)
        exists = (k >= 1) & (k <= self.ends_ahead(row))
        target = self.layout.wrap(ordinal + jnp.where(exists, k - 1, 0))
        end = self._end(env, target, exists)
        return ring.forward(position, end, self.layout.length), exists

    def ends_ahead(self, row: jax.Array) -> jax.Array:
        """Count the episodes that have ended, from each row's own on.

        Args:
          row: int32[...], stored rows.

        Returns:
          int32[...].
        """
        env, _, ordinal = self._locate(row)
        is_open = of_stream(self.state.counters.is_open, env)
        return (
            ring.forward(ordinal, self._ordinal(env, self._newest(env)), self.layout.length)
            + ~is_open
        )

    def is_complete(self, row: jax.Array) -> jax.Array:
        """Return whether each row's episode has ended and its first row is still stored.

        Args:
          row: int32[...], in [0, capacity). A row that is not written gives False.

        Returns:
          bool[...].
        """
        env, _, ordinal = self._locate(row)
        return (
            self.state.is_written(row)
            & self._has_ended(env, ordinal)
            & ~self._is_headless(env, ordinal)
            & self._is_of_episode(row)
        )

    def num_unfinished(self) -> jax.Array:
        """Count the stored rows of each stream's unfinished episode: int32[E], 0 for none."""
        env = self.layout.envs()
        newest = self.layout.row(env, self._newest(env))
        # A final row that opens an episode does not belong to it.
        is_open = (
            self.state.counters.is_open
            & ~self.state.has(newest, row_flags.FINAL)
            & (self.state.filled > 0)
        )
        return jnp.where(is_open, self.steps_from_start(newest) + 1, 0)

    def num_headless(self) -> jax.Array:
        """Count the stored rows of each stream's oldest episode if its start is overwritten:
        int32[E], else 0."""
        env = self.layout.envs()
        oldest = self.layout.row(env, self._oldest(env))
        is_intact = self.state.has(oldest, row_flags.FIRST) | (self.state.filled == 0)
        return jnp.where(is_intact, 0, self.steps_to_end(oldest) + 1)

    def range_of(self, env: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first and the last stored row of an episode.

        Args:
          env: int32[...], the episode's stream.
          nth: int32[...], number of the episode among those that its stream holds; 0 is the oldest.

        Returns:
          First row and last row: int32[...] each.
        """
        ordinal = self.layout.wrap(self._ordinal(env, self._oldest(env)) + nth)
        end = self._end(env, ordinal, self._has_ended(env, ordinal))
        return self.layout.row(env, self._start(env, ordinal)), self.layout.row(env, end)

    def num_episodes(self) -> jax.Array:
        """Count the episodes of which each stream holds a row: int32[E].

        Unfinished episodes and those whose start is overwritten count.
        """
        env = self.layout.envs()
        oldest, newest = (
            self._ordinal(env, position) for position in (self._oldest(env), self._newest(env))
        )
        # A final row that opens an episode does not belong to it.
        is_one = ~self.state.counters.is_open | ~self._has(env, self._newest(env), row_flags.FINAL)
        return jnp.where(
            self.state.filled > 0, ring.forward(oldest, newest, self.layout.length) + is_one, 0
        )

    def _start(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        """Return the position of an episode's first stored row."""
        start = at(self.state.rows.table.start_position, self.layout.row(env, ordinal))
        # The stored part of an episode without its start begins with the stream's oldest row.
        return jnp.where(self._is_headless(env, ordinal), self._oldest(env), start)

    def _end(self, env: jax.Array, ordinal: jax.Array, has_ended: jax.Array) -> jax.Array:
        """Return the position of an episode's last stored row, the stream's newest one if it has
        not ended."""
        end = at(self.state.rows.table.end_position, self.layout.row(env, ordinal))
        return jnp.where(has_ended, end, self._newest(env))

    def _is_headless(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        """Return whether an episode's start is overwritten, as only that of the oldest one may
        be."""
        oldest = self._oldest(env)
        is_oldest = ordinal == self._ordinal(env, oldest)
        return is_oldest & ~self._has(env, oldest, row_flags.FIRST)

    def _is_of_episode(self, row: jax.Array) -> jax.Array:
        return row_flags.is_of_episode(at(self.state.rows.flags, row))

    def _has(self, env: jax.Array, position: jax.Array, flag: int) -> jax.Array:
        return self.state.has(self.layout.row(env, position), flag)

    def _locate(self, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        env, position = self.layout.split(row)
        return env, position, at(self.state.rows.table.ordinal, row)

    def _has_ended(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        is_newest = ordinal == self._ordinal(env, self._newest(env))
        return ~(is_newest & of_stream(self.state.counters.is_open, env))

    def _newest(self, env: jax.Array) -> jax.Array:
        return self.layout.wrap(of_stream(self.state.head, env) - 1)

    def _oldest(self, env: jax.Array) -> jax.Array:
        head, filled = (of_stream(x, env) for x in (self.state.head, self.state.filled))
        return self.layout.wrap(head - filled)

    def _ordinal(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return at(self.state.rows.table.ordinal, self.layout.row(env, position))

"""Layout of a state: static facts that decide where each row lies, what it means, and which rows
around it are read (its window)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util.aliases import Autoreset
from jaxreplay._util.struct import Static
from jaxreplay.storage import ring, row_flags
from jaxreplay.storage.platforms import Traits, traits_of

NUM_PARTS = 16  # of a ring: `buffer.write` changes the stamp of the part that has the row


class Window(Static):
    """Rows around a candidate, in time, that must be known before it can be sampled.

    The look-back never crosses the start of the candidate's episode. If that start is fewer than
    `before` rows back, the look-back is complete with these.

    Args:
      before: Number of rows before the candidate, or None for all since its episode's start.
        Default: 0.
      after: Number of rows after the candidate, or None for all up to its episode's end. If the
        episode ends sooner, fewer are enough, unless `crosses_episodes` is set. Default: 0.
      crosses_episodes: Let the rows after the candidate continue into later episodes. Default:
        False.
      period: Make a candidate of every `period`-th transition only: of each episode or, with
        `crosses_episodes`, of the stream. Default: 1.
      needs_final_obs: The view reads the observation after a terminated step, so that its final row
        must be written first. Default: False.
      needs_episodes: The view or the sampler looks up ends of episodes, though the window is
        bounded. Default: False.
      needs_next_obs: The view reads the observation after a truncated step. If False, such a step
        is a candidate even where the episode's final observation is not stored. Default: True.
    """

    before: int | None = 0
    after: int | None = 0
    crosses_episodes: bool = False
    period: int = 1
    needs_final_obs: bool = False
    needs_episodes: bool = False
    needs_next_obs: bool = True

    @functools.cached_property
    def completed_by(self) -> int:
        """Flags of a row that completes every window which reaches it, unless these cross episodes:
        a final row, a terminated one without `needs_final_obs`, and a truncated one without
        `needs_next_obs`."""
        bits = row_flags.FINAL | (0 if self.needs_final_obs else row_flags.TERMINATED)
        return bits | (0 if self.needs_next_obs else row_flags.TRUNCATED)

    @functools.cached_property
    def no_candidate(self) -> int:
        """Flags of a row that is never sampled. Without `needs_next_obs`, final rows that have no
        action are flagged as skipped."""
        return row_flags.SKIPPED | (row_flags.FINAL if self.needs_next_obs else 0)

    @functools.cached_property
    def is_bounded(self) -> bool:
        """True if the number of rows is known beforehand, so that no episode table is needed."""
        return self.before is not None and self.after is not None

    @functools.cached_property
    def length(self) -> int:
        """Number of rows that a stream must hold, at least, for one window."""
        return (self.before or 0) + (1 if self.after is None else self.after) + 1

    def widened(self, before: int | None = 0, after: int | None = 0) -> "Window":
        """Return a window with at least as many rows before and after the candidate.

        Args:
          before: Number of rows before, or None for all since the episode's start. Default: 0.
          after: Number of rows after, or None for all up to the episode's end. Default: 0.
        """
        return dataclasses.replace(
            self, before=_larger(self.before, before), after=_larger(self.after, after)
        )


def _larger(a: int | None, b: int | None) -> int | None:
    """Return the larger number, where None means unbounded."""
    return None if a is None or b is None else max(a, b)


class Layout(Static):
    """Layout that a state was made for, and carries.

    Each of `num_envs` streams is a ring of `length` rows: row = env * length + position.

    Args:
      num_envs: Number of streams.
      length: Number of rows of each stream.
      autoreset: What the env does when an episode ends, or None if rows are items without an order.
      allow_mask: Some envs may take no step.
      allow_write: Rows may be overwritten by `write`, which leaves a stamp.
      window: Rows that must be known around a row before it can be sampled.
      platform: "cpu", "gpu" or "tpu": the arrays are laid out for it.
      has_table: The state has an episode table.
      sampler: Meaning of the sampler's state, `Sampler.identity`; None if it has no state.
    """

    num_envs: int
    length: int
    autoreset: Autoreset | None
    allow_mask: bool
    allow_write: bool
    window: Window
    platform: str
    has_table: bool
    sampler: Any

    @functools.cached_property
    def traits(self) -> Traits:
        """Traits of the platform."""
        return traits_of(self.platform)

    @functools.cached_property
    def capacity(self) -> int:
        """Number of rows of all streams."""
        return self.num_envs * self.length

    @functools.cached_property
    def rows_per_step(self) -> int:
        """Largest number of rows that a step writes."""
        return row_flags.rows_per_step(self.autoreset)

    @functools.cached_property
    def lockstep(self) -> bool:
        """True if all streams always step together: no mask leaves one out, and no episode end
        writes a second row."""
        return not self.allow_mask and self.rows_per_step == 1

    @functools.cached_property
    def streams_apart(self) -> slice | int:
        """Index of the streams whose heads differ: the first stream alone if all step together."""
        return 0 if self.lockstep else slice(None)

    @functools.cached_property
    def counter_names(self) -> tuple[str, ...]:
        """Names of the counters of each stream, in the order of `Counters.stored`."""
        has_flags, window = self.autoreset is not None, self.window
        others = {
            "last_flags": has_flags,
            "num_candidates": has_flags,
            "phase": window.period > 1,
            "num_pending": window.after is not None,
            "num_expired": bool(window.before),
            "ordinal": self.has_table,
            "is_open": self.has_table,
            **{f"write_stamp_{part}": self.allow_write for part in range(NUM_PARTS)},
            "num_ignored_writes": self.allow_write,
        }
        return ("position", "filled", "lap", *(name for name, is_kept in others.items() if is_kept))

    @functools.cached_property
    def termination_has_final_row(self) -> bool:
        """True if a final row follows a terminated row.

        After a truncated row there is always one, or it is one itself.
        """
        return self.autoreset not in (None, "same_step_no_final_obs")

    def closes_episode(self, flags: jax.Array) -> jax.Array:
        """Return which rows are the last of their episodes: bool[...].

        Args:
          flags: uint8[...], of the rows.
        """
        assert self.autoreset is not None
        return row_flags.closes_episode(flags, self.autoreset)

    def envs(self, some: jax.Array | None = None) -> jax.Array:
        """Return the number of each stream: int32[E].

        Args:
          some: int32[e], the streams that are asked for, which are returned. Default: all.
        """
        return ring.arange(self.num_envs) if some is None else some

    def row(self, env: jax.Array, position: jax.Array) -> jax.Array:
        """Return the row at a position of a stream: int32[...].

        Args:
          env: int32[...], streams.
          position: int32[...], in [0, length).
        """
        return env * self.length + position

    def split(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the stream and the position in its ring of each row: int32[...] both.

        Args:
          row: int32[...], in [0, capacity).
        """
        return ring.divide(row, self.length)

    def wrap(self, position: jax.Array) -> jax.Array:
        """Return positions in [0, length) for positions that left the ring: int32[...].

        Args:
          position: int32[...], in [-length, 2 * length).
        """
        return ring.wrap(position, self.length)

    def part(self, position: jax.Array) -> jax.Array:
        """Return the part of its ring that each position is in: int32[...], in [0, NUM_PARTS).

        Args:
          position: int32[...], in [0, length).
        """
        return ring.divide(position, -(-self.length // NUM_PARTS))[0]

    def number(self, lap: jax.Array, position: jax.Array) -> jax.Array:
        """Return the number of rows that were written before a row in its stream: uint32[...].

        Args:
          lap: uint32[...], how often the ring was filled before the row was written.
          position: int32[...], the row's position in the ring.
        """
        return lap * jnp.uint32(self.length) + position.astype(jnp.uint32)

    def ahead(self, row: jax.Array, offset: ArrayLike) -> jax.Array:
        """Return the rows that lie some rows forward in their stream: int32[...].

        Args:
          row: int32[...], in [0, capacity).
          offset: int32[...], in [-length, length).
        """
        env, position = self.split(row)
        return self.row(env, self.wrap(position + offset))

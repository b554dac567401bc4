"""Sequences for recurrent agents and world models, with a burn-in, a mask, and flags for resets of
the recurrent state."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import check_extra, check_size
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.types import SequenceBatch
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View, zeroed


class SequenceView(View[SequenceBatch]):
    """Make sequences: `length` steps from each sampled row, and up to `burn_in` steps before it.

    Losses use the `length` steps; the burn-in warms a recurrent state up. The burn-in stops at the
    episode's start, where the state needs no warm-up. So the loss covers every step of every
    episode, however short the episode.

    Args:
      length: Number of steps to learn from, at least 1.
      burn_in: Number of steps before them that warm a recurrent state up, at least 0. Default: 0.
      period: Number of transitions from one possible start to the next, at least 1. They are
        counted from each episode's start, or without a break if `cross_episodes`. Default: 1.
      cross_episodes: True: a sequence continues into the next episode, whose first step is flagged
        by `is_first`; a final row takes one step, which is masked. False: a sequence stops at the
        end of its episode, and the rest is 0 and masked. Default: False.
      recurrent_state_key: Key in `extras` of the recurrent state, which is read at a sequence's
        first step alone. Default: no recurrent state is read.

    Example:
      >>> import numpy as np
      >>> def oracle(values, start, end, t, length, burn_in):  # of one episode, steps start .. end
      ...     steps = np.arange(t - burn_in, t + length)
      ...     is_real = (start <= steps) & (steps < end)
      ...     return np.where(is_real, values[steps.clip(start, end - 1)], 0), is_real & (
      ...         steps >= t
      ...     )
      >>> values, mask = oracle(np.arange(10, 16), start=0, end=5, t=3, length=3, burn_in=2)
      >>> print(values, mask)
      [11 12 13 14  0] [False False  True  True False]

    References:
      Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning"
      (2019), sections 2.3 and 3, https://openreview.net/forum?id=r1lyTjAqYX. There, the burn-in is
      the first part of a sequence of fixed length, and the first steps of an episode are never
      learned from.
    """

    length: int
    burn_in: int = 0
    period: int = 1
    cross_episodes: bool = False
    recurrent_state_key: str | None = None

    def _check(self) -> None:
        check_size("SequenceView", "length", self.length)
        check_size("SequenceView", "period", self.period)
        if isinstance(self.burn_in, bool) or not isinstance(self.burn_in, int) or self.burn_in < 0:
            raise ValueError(
                f"SequenceView: burn_in must be an int of at least 0, got {self.burn_in!r}"
            )

    @property
    def window(self) -> Window:
        return Window(
            before=self.burn_in,
            after=self.length,
            crosses_episodes=self.cross_episodes,
            period=self.period,
        )

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        del layout
        check_extra(where, "recurrent_state_key", self.recurrent_state_key, example.extras)

    def read(self, reader: RowReader) -> SequenceBatch:
        steps = jnp.arange(-self.burn_in, self.length + 1, dtype=jnp.int32)
        is_before = ring.arange(self.burn_in)[::-1] < reader.rows_before(0, self.burn_in)
        is_here = jnp.concatenate([is_before, self._after(reader)])  # [T + 1]
        is_first = reader.is_first(steps) & is_here
        is_step = is_here & ~reader.is_final(steps) & ~self._follows_end(reader)
        steps, is_real, extras = steps[:-1], is_step[:-1], reader.extras(steps[:-1])
        recurrent_state = None
        if self.recurrent_state_key is not None:
            # A separate read: otherwise XLA would gather the states of all steps to take the first.
            recurrent_state = zeroed(reader.extras(steps[0])[self.recurrent_state_key], is_real[0])
            extras = {
                key: value for key, value in extras.items() if key != self.recurrent_state_key
            }
        index = None
        if reader.state.layout.allow_write:
            row = reader.state.layout.ahead(reader.row, steps)
            index = reader.state.index(row, is_real & reader.is_valid)
        batch = SequenceBatch(
            obs=zeroed(reader.obs(jnp.append(steps, self.length)), is_here),
            action=zeroed(reader.action(steps), is_real),
            reward=zeroed(reader.reward(steps), is_real),
            terminated=reader.is_terminated(steps) & is_real,
            truncated=reader.is_truncated(steps) & is_real,
            is_first=is_first,
            mask=is_real & (np.arange(-self.burn_in, self.length) >= 0) & reader.is_valid,
            recurrent_state=recurrent_state,
            extras=zeroed(extras, is_real),
            index=index,
        )
        if (agents := reader.agents(steps)) is not None:
            batch = batch.replace(**zeroed(agents, is_real)._asdict())
        return batch

    def _after(self, reader: RowReader) -> jax.Array:
        """Return which rows, from the sampled one on, the sequence reads: bool[length + 1]."""
        if self.cross_episodes:
            return jnp.ones(self.length + 1, bool)
        later = jnp.arange(1, self.length + 1, dtype=jnp.int32)
        # After an episode's end lies the first row of the next, or a row that is not written yet.
        goes_on = ~reader.is_first(later) & (reader.rows_after() >= later)
        # A wrapped reader, with another goal, may terminate an episode before its stored end. The
        # sequence then stops after the next row, which holds the final observation.
        goes_on &= ~self._follows_end(reader)[self.burn_in : -1]
        return jnp.concatenate(
            [jnp.ones(1, bool), jnp.cumprod(goes_on, dtype=jnp.int32).astype(bool)]
        )

    def _follows_end(self, reader: RowReader) -> jax.Array:
        """Return True for rows right after a termination, unless `cross_episodes`: bool[T + 1]."""
        ends = reader.is_terminated(jnp.arange(self.length, dtype=jnp.int32)) & (
            not self.cross_episodes
        )
        return jnp.concatenate([jnp.zeros(self.burn_in + 1, bool), ends])

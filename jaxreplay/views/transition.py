"""n-step transitions that never cross an episode's end nor the write head."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.checks import check_size
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Window
from jaxreplay.types import Transition
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View


class TransitionView(View[Transition]):
    """The n steps from a row on, or fewer where its episode ends sooner.

    A window that is cut by a termination has discount 0; one that is cut by a truncation bootstraps
    from the final observation, at its own number of steps. Source: Sutton and Barto (2018), section
    7.1; the cut at a truncation as in Pardo et al., "Time Limits in Reinforcement Learning" (2018).

    Args:
      n_step: n, at least 1.
      gamma: in [0, 1], for one step.
    """

    n_step: int = 1
    gamma: float = 0.99

    def _check(self) -> None:
        check_size("TransitionView", "n_step", self.n_step)
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"TransitionView: gamma must be in [0, 1], got {self.gamma}")

    @property
    def window(self) -> Window:
        return Window(after=self.n_step)

    def read(self, reader: RowReader) -> Transition:
        steps = ring.arange(self.n_step)
        is_terminated = reader.is_terminated(steps)
        # The window goes on past a step unless that terminated, or is followed by a final row: [n -
        # 1].
        goes_on = ~is_terminated[:-1] & ~reader.is_final(steps[1:])
        is_inside = jnp.concatenate([jnp.ones(1, bool), jnp.cumsum(~goes_on) == 0])
        num_steps = is_inside.sum(dtype=jnp.int32)
        ends = jnp.any(is_inside & is_terminated)
        # A terminated row's final row may come a step later, or never: its own observation stands
        # in for one that no target reads.
        has_next = (reader.rows_after() >= num_steps) & reader.termination_has_final_row | ~ends
        powers = self.gamma ** np.arange(self.n_step + 1)
        return Transition(
            obs=reader.obs(0),
            action=reader.action(0),
            reward=_weighted_sum(reader.reward(steps), powers[:-1], is_inside),
            discount=jnp.where(ends, 0, jnp.asarray(powers, jnp.float32)[num_steps]),
            next_obs=reader.obs(jnp.where(has_next, num_steps, num_steps - 1)),
            num_steps=num_steps,
            extras=reader.extras(0),
        )


def _weighted_sum(reward: jax.Array, weights: np.ndarray, is_inside: jax.Array) -> jax.Array:
    """Sum over the first axis in float32 or wider, in the reward's own dtype if that is a floating
    one. What lies outside is left out by a select, so that a NaN there stays there."""
    dtype = reward.dtype if jnp.issubdtype(reward.dtype, jnp.floating) else jnp.float32
    shape = (-1,) + (1,) * (reward.ndim - 1)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    terms = reward.astype(wide) * jnp.asarray(weights, wide).reshape(shape)
    return jnp.where(is_inside.reshape(shape), terms, 0).sum(axis=0).astype(dtype)

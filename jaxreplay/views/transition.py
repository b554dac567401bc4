"""n-step transitions. They never cross the end of an episode or the write position of the ring."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import check_extra, check_size
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.types import Transition
from jaxreplay.views.agents import summed
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View


class TransitionView(View[Transition]):
    """Make transitions over n steps from each sampled row, or fewer if the episode ends sooner.

    The reward is the sum over k < m of gamma^k r_(t+k), and the discount gamma^m, where m <= n is
    the number of steps. If a termination is among them, the discount is 0. If a truncation ends
    them, the target bootstraps from the final observation.

    Args:
      n_step: Number of steps n of a transition, at least 1. Default: 1.
      gamma: Discount of one step, in [0, 1]. Default: 0.99.
      discount_key: Key in `extras` of a step's own discount, float[], which multiplies gamma: of an
        option, or dm_env's. Default: none.

    Example:
      >>> def oracle(reward, terminated, truncated, t, n, gamma):  # of one env, without final rows
      ...     total = 0.0
      ...     for k in range(n):
      ...         total += gamma**k * reward[t + k]
      ...         if terminated[t + k]:
      ...             return total, 0.0, k + 1
      ...         if truncated[t + k]:
      ...             break
      ...     return total, gamma ** (k + 1), k + 1  # next_obs is that after step t + k
      >>> oracle([1, 1, 1], [0, 0, 0], [0, 1, 0], t=0, n=3, gamma=0.5)
      (1.5, 0.25, 2)

    References:
      Sutton and Barto, "Reinforcement Learning" (2018), section 7.1,
      http://incompleteideas.net/book/the-book-2nd.html
      Pardo et al., "Time Limits in Reinforcement Learning" (2018),
      https://arxiv.org/abs/1712.00378, for the bootstrap at a truncation.
    """

    n_step: int = 1
    gamma: float = 0.99
    discount_key: str | None = None
    takes = ("n_step", "gamma")
    ranges = (("gamma", 0.0, 1.0),)

    def _check(self) -> None:
        check_size("TransitionView", "n_step", self.n_step)
        self.check_given("TransitionView", {"gamma": self.gamma})

    @property
    def window(self) -> Window:
        return Window(after=self.n_step)

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        check_extra(where, "discount_key", self.discount_key, example.extras, shape=())

    def read(self, reader: RowReader) -> Transition:
        steps = ring.arange(self.n_step)
        is_terminated = reader.is_terminated(steps)
        # bool[n - 1]: the window continues past a step unless that terminated, or a final row
        # follows it.
        goes_on = ~is_terminated[:-1] & ~reader.is_final(steps[1:])
        has_agents = reader.state.rows.steps.terminated is not None
        agents = reader.agents(steps) if has_agents else None
        if agents is not None:  # all bootstrap where one is truncated
            goes_on &= ~agents.is_cut()[:-1]
        if "n_step" in self.given:
            goes_on &= steps[1:] < self.given["n_step"]
        is_inside = jnp.concatenate([jnp.ones(1, bool), jnp.cumsum(~goes_on) == 0])
        num_steps = is_inside.sum(dtype=jnp.int32)
        has_termination = jnp.any(is_inside & is_terminated)
        # A terminated row's final row may come a step later, or never. The row's own observation is
        # then a placeholder: with discount 0, no target depends on it.
        has_next = ~has_termination | (
            (reader.rows_after() >= num_steps) & reader.termination_has_final_row
        )
        powers = self.given.get("gamma", self.gamma) ** np.arange(self.n_step + 1)
        if self.discount_key is not None:
            powers *= jnp.cumprod(jnp.append(1.0, reader.extras(steps)[self.discount_key]))
        total = functools.partial(_weighted_sum, weights=powers[:-1], is_inside=is_inside)
        alive, is_over = None, has_termination
        if agents is not None:  # each agent's steps up to its own end
            acts = is_inside[:, None] & agents.acting()
            total = functools.partial(summed, total, acts)
            alive, is_over = acts[0], (acts & agents.terminated).any(axis=0) | ~acts[0]
        return Transition(
            obs=reader.obs(0),
            action=reader.action(0),
            reward=jax.tree.map(total, reader.reward(steps)),
            discount=jnp.where(is_over, 0, jnp.asarray(powers, jnp.float32)[num_steps]),
            next_obs=reader.obs(jnp.where(has_next, num_steps, num_steps - 1)),
            num_steps=num_steps,
            extras=reader.extras(0),
            alive=alive,
        )


def _weighted_sum(reward: jax.Array, weights: Any, is_inside: jax.Array) -> jax.Array:
    """Sum over the first axis in float32 or wider. The result has the reward's dtype, if floating.

    A select leaves out steps outside of the window, so that a NaN there does not reach the sum.
    """
    dtype = reward.dtype if jnp.issubdtype(reward.dtype, jnp.floating) else jnp.float32
    shape = (-1,) + (1,) * (reward.ndim - 1)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    terms = reward.astype(wide) * jnp.asarray(weights, wide).reshape(shape)
    return jnp.where(is_inside.reshape(shape), terms, 0).sum(axis=0).astype(dtype)

"""The view of the drop-in buffers: n-step transitions in Stable-Baselines3's columns."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.struct import Node
from jaxreplay.storage import ring
from jaxreplay.views import RowReader
from jaxreplay.views.transition import TransitionView


class SB3Batch(Node):
    """A batch of B transitions of at most n steps.

    Attributes:
      obs: Pytree with leaves [B, ...].
      action: [B, ...].
      reward: float32[B, 1], the sum of gamma**j * r_j over the window.
      rewards: float32[B, n], the rewards r_j, 0 past the window; None unless `has_steps`.
      done: float32[B, 1], 1 where the window reached a termination.
      next_obs: Pytree with leaves [B, ...].
      num_steps: int32[B, 1], steps in the window; None unless `has_steps`.
    """

    obs: PyTree
    action: jax.Array
    reward: jax.Array
    rewards: jax.Array | None
    done: jax.Array
    next_obs: PyTree
    num_steps: jax.Array | None


class SB3View(TransitionView):
    """n-step transitions as an `SB3Batch`. Targets use gamma**num_steps and `done` in place of
    `TransitionView`'s `discount`.

    Args:
      n_step: Most steps of a transition. Default: 1.
      gamma: Discount factor in [0, 1] of one step. Default: 0.99.
      has_steps: Return the rewards of the steps, and their number. Default: False.
    """

    n_step: int = 1
    has_steps: bool = False

    def read(self, reader: RowReader) -> Any:
        item = super().read(reader)
        steps = ring.arange(self.n_step)
        is_inside = steps < item.num_steps
        return SB3Batch(
            obs=item.obs,
            action=item.action,
            reward=item.reward[None],
            rewards=jnp.where(is_inside, reader.reward(steps), 0) if self.has_steps else None,
            done=jnp.any(is_inside & reader.is_terminated(steps)).astype(jnp.float32)[None],
            next_obs=item.next_obs,
            num_steps=item.num_steps[None] if self.has_steps else None,
        )

"""The view of the drop-in buffers: n-step transitions in the columns that Stable-Baselines3 learns
from."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.struct import Node
from jaxreplay.storage import ring
from jaxreplay.views import RowReader
from jaxreplay.views.transition import TransitionView


class SB3Batch(Node):
    """Leaves `[B, ...]`.

    Fields:
      obs, next_obs: pytree. action: [B, ...].
      reward: float32[B, 1], the sum of gamma^j r_j over the window. rewards: float32[B, n], what it
        sums, 0 past the window.
      done: float32[B, 1], 1 where the window reached a termination.
      num_steps: int32[B, 1].
    """

    obs: PyTree
    action: jax.Array
    reward: jax.Array
    rewards: jax.Array
    done: jax.Array
    next_obs: PyTree
    num_steps: jax.Array


class SB3View(TransitionView):
    """As `TransitionView`, whose `discount` is the gamma here; a target takes gamma^num_steps and
    `done` in its place."""

    n_step: int = 1

    def read(self, reader: RowReader) -> Any:
        item = super().read(reader)
        steps = ring.arange(self.n_step)
        is_inside = steps < item.num_steps
        return SB3Batch(
            obs=item.obs,
            action=item.action,
            reward=item.reward[None],
            rewards=jnp.where(is_inside, reader.reward(steps), 0),
            done=jnp.any(is_inside & reader.is_terminated(steps)).astype(jnp.float32)[None],
            next_obs=item.next_obs,
            num_steps=item.num_steps[None],
        )

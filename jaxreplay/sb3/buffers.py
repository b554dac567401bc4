"""The drop-in buffers for Stable-Baselines3: each says what is drawn, and what is read around
it."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.jitted import method, program
from jaxreplay.samplers.prioritized import Prioritized
from jaxreplay.sb3.base import DropInBuffer
from jaxreplay.sb3.batch import SB3View
from jaxreplay.torch import to_torch
from jaxreplay.types import Index, Sample


class ReplayBuffer(DropInBuffer):
    """Uniform replay of one-step transitions. See `DropInBuffer` for the arguments.

    Example:
      >>> import numpy as np
      >>> from gymnasium import spaces
      >>> from jaxreplay.sb3 import ReplayBuffer
      >>> buffer = ReplayBuffer(100, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), n_envs=1)
      >>> obs = np.zeros((2, 1, 3), np.float32)
      >>> buffer.add(
      ...     obs[0],
      ...     obs[1],
      ...     action=np.array([1]),
      ...     reward=np.array([0.5]),
      ...     done=np.array([False]),
      ...     infos=[{}],
      ... )
      >>> buffer.sample(2).rewards
      tensor([[0.5000],
              [0.5000]])
    """


class DictReplayBuffer(DropInBuffer):
    """`ReplayBuffer` for Dict observations: half the bytes of one that stores each next observation
    beside its observation."""

    def __init__(
        self, buffer_size: int, observation_space: spaces.Space, *args: Any, **kwargs: Any
    ):
        if not isinstance(observation_space, spaces.Dict):
            raise ValueError(
                f"DictReplayBuffer: the observation space is {observation_space}, not a Dict; use "
                "ReplayBuffer"
            )
        super().__init__(buffer_size, observation_space, *args, **kwargs)


class NStepReplayBuffer(DropInBuffer):
    """Uniform replay of n-step transitions; their windows end where the episode does, and at the
    newest step.

    Args:
      n_steps: the most steps of a window. gamma: the discount factor, in [0, 1], the model's own.
      further ones: see `DropInBuffer`. Dict observations too.
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any):
        self.n_steps, self.gamma = n_steps, float(gamma)
        super().__init__(*args, **kwargs)

    def _view(self) -> SB3View:
        return SB3View(n_step=self.n_steps, gamma=self.gamma)

    def _samples(self, item: PyTree, env: VecNormalize | None) -> Any:
        discounts = self.gamma ** np.asarray(item.num_steps).astype(np.float32)
        return super()._samples(item, env)._replace(discounts=self.to_torch(discounts))

    def _normalized_reward(self, item: PyTree, env: VecNormalize) -> np.ndarray:
        # Each one is normalized, and clipped, before the sum, as by Stable-Baselines3.
        steps = np.arange(self.n_steps, dtype=np.float32)
        rewards = (
            self._normalize_reward(np.asarray(item.rewards), env)
            * self.gamma**steps
            * (steps < np.asarray(item.num_steps))
        )
        return rewards.sum(axis=1, keepdims=True)


class PrioritizedSamples(NamedTuple):
    """As Stable-Baselines3's samples, and what priorities need. B transitions."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor  # float32[B, 1]
    rewards: torch.Tensor  # float32[B, 1]
    discounts: torch.Tensor  # float32[B, 1]: gamma^k, of the steps that were summed
    weights: torch.Tensor  # float32[B, 1]: importance weights, the batch's largest is 1
    indices: Index  # for update_priorities


class PrioritizedReplayBuffer(NStepReplayBuffer):
    """Replay in proportion to priority ** alpha; new transitions have the largest priority so far.

    An algorithm must use the weights and hand back priorities: `PrioritizedDQN` does.
    Stable-Baselines3's own take neither, and would learn from a biased stream.

    Source: Schaul et al., "Prioritized Experience Replay" (2016).

    Args:
      alpha: the exponent of priorities, at least 0; 0 is uniform.
      beta: the exponent of the weights, in [0, 1]; an attribute, to be raised towards 1 as learning
        goes on.
      epsilon: added to every priority that is handed back, so that none is 0.
      n_steps, gamma: see `NStepReplayBuffer`. Further ones: see `DropInBuffer`.
    """

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        epsilon: float = 1e-6,
        n_steps: int = 1,
        gamma: float = 0.99,
        **kwargs: Any,
    ):
        self.alpha, self.beta, self.epsilon = float(alpha), float(beta), float(epsilon)
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)

    def _sampler(self) -> Prioritized:
        return Prioritized(alpha=self.alpha, beta=self.beta)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:
        """Transitions in proportion to their priorities, with weights.

        Args:
          batch_size: transitions. env: normalizes observations and rewards.
        """
        self._check_not_empty()
        with defer_interrupts():
            batch = _draw(
                self._replay, self._state, *self._next_draw(), self.beta, operator.index(batch_size)
            )
        if not np.asarray(batch.is_valid).all():
            raise ValueError(
                "PrioritizedReplayBuffer: every priority is 0, so that nothing can be drawn; give "
                "a positive epsilon"
            )
        samples = self._samples(batch.experience, env)
        return PrioritizedSamples(
            *samples, weights=self._cast(to_torch(batch.weight)[:, None]), indices=batch.index
        )

    def update_priorities(self, indices: Index, priorities: Any) -> None:
        """Give drawn transitions new priorities, such as absolute TD errors. Those overwritten
        since are left out.

        Args:
          indices: the batch's. priorities: B numbers, at least 0: a tensor or an array.
        """
        if isinstance(priorities, torch.Tensor):
            priorities = priorities.detach().float().cpu().numpy()
        priorities = np.array(priorities, np.float32).reshape(-1) + np.float32(self.epsilon)
        self._check_whole()
        with self._changing():
            self._state = method("update_priorities")(
                self._replay, self._state, indices, priorities
            )


@functools.partial(program, static=("batch_size",))
def _draw(buffer: Any, state: Any, seed: Any, draw: Any, beta: Any, batch_size: int) -> Sample:
    key = jax.random.fold_in(jax.random.key(seed), draw)
    return buffer.sample(state, key, batch_size, beta=beta)

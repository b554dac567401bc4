"""The drop-in buffers for Stable-Baselines3: each chooses a sampler and a view."""

import operator
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from jaxreplay._util import transfers
from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.jitted import method
from jaxreplay.samplers.prioritized import Prioritized
from jaxreplay.sb3.base import DropInBuffer
from jaxreplay.sb3.batch import SB3View
from jaxreplay.torch import to_torch
from jaxreplay.types import Index

_PATIENCE = 1_000  # samples without an update of priorities, before a warning


class ReplayBuffer(DropInBuffer):
    """Uniform replay of one-step transitions.

    Stable-Baselines3 passes all arguments but the last three, which are options for
    `replay_buffer_kwargs`:

    - `buffer_size`: Number of transitions over all envs. Each final row that is stored takes
      the place of one.
    - `observation_space`: Observation space of one env; may be a Dict. 64-bit numbers are
      stored in 32 bits, unless `jax_enable_x64` is set, and sampled in 64 bits.
    - `action_space`: Action space of one env; 64-bit integers likewise.
    - `device`: PyTorch device of sampled batches. Default: "auto", a GPU if there is one.
    - `n_envs`: Number of parallel envs. Default: 1.
    - `optimize_memory_usage`: Must be False: observations are always stored once. Default:
      False.
    - `handle_timeout_termination`: Count a step with `TimeLimit.truncated` in its info as
      truncated, with `dones` 0; else it counts as terminated. Default: True.
    - `storage_device`: Platform whose first device stores the rows, such as "cpu" for the
      host's memory. Default: JAX's default device.
    - `rows`: Where the rows lie: "device", "host", or the path of a folder: docs/sb3.md.
      Default: "device".

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
    """Uniform replay of one-step transitions with Dict observations.

    It takes about half the memory of a buffer that stores each transition's next observation too.

    Args:
      buffer_size: Number of transitions over all envs. Each final row that is stored takes the
        place of one.
      observation_space: Observation space of one env, a Dict. 64-bit numbers are stored in 32 bits,
        unless `jax_enable_x64` is set, and sampled in 64 bits.
      *args: What Stable-Baselines3 passes by position:

        - `action_space`: Action space of one env; 64-bit integers likewise.
      **kwargs: What Stable-Baselines3 passes by name, the last three from `replay_buffer_kwargs`:

        - `device`: PyTorch device of sampled batches. Default: "auto", a GPU if there is one.
        - `n_envs`: Number of parallel envs. Default: 1.
        - `optimize_memory_usage`: Must be False: observations are always stored once. Default:
          False.
        - `handle_timeout_termination`: Count a step with `TimeLimit.truncated` in its info as
          truncated, with `dones` 0; else it counts as terminated. Default: True.
        - `storage_device`: Platform whose first device stores the rows, such as "cpu" for the
          host's memory. Default: JAX's default device.
        - `rows`: Where the rows lie: "device", "host", or the path of a folder. Default: "device".

    Raises:
      ValueError: The observation space is not a Dict, or `optimize_memory_usage` is set.
    """

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
    """Uniform replay of n-step transitions.

    A transition has fewer than n steps if its episode ends sooner, or if later steps are not there
    yet. Dict observations are supported.

    Args:
      *args: What Stable-Baselines3 passes by position:

        - `buffer_size`: Number of transitions over all envs. Each final row that is stored takes
          the place of one.
        - `observation_space`: Observation space of one env; may be a Dict. 64-bit numbers are
          stored in 32 bits, unless `jax_enable_x64` is set, and sampled in 64 bits.
        - `action_space`: Action space of one env; 64-bit integers likewise.
      n_steps: Most steps of a transition. Default: 3.
      gamma: Discount factor in [0, 1] of one step, which must be the model's: Stable-Baselines3
        does not pass it. Default: None, for one step alone; the samples' `discounts` are None then,
        and the algorithm takes its own.
      **kwargs: What Stable-Baselines3 passes by name, the last three from `replay_buffer_kwargs`:

        - `device`: PyTorch device of sampled batches. Default: "auto", a GPU if there is one.
        - `n_envs`: Number of parallel envs. Default: 1.
        - `optimize_memory_usage`: Must be False: observations are always stored once. Default:
          False.
        - `handle_timeout_termination`: Count a step with `TimeLimit.truncated` in its info as
          truncated, with `dones` 0; else it counts as terminated. Default: True.
        - `storage_device`: Platform whose first device stores the rows, such as "cpu" for the
          host's memory. Default: JAX's default device.
        - `rows`: Where the rows lie: "device", "host", or the path of a folder. Default: "device".

    Raises:
      ValueError: `n_steps` or `gamma` is out of range, `gamma` is missing with several steps, or
        `optimize_memory_usage` is set.
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float | None = None, **kwargs: Any):
        if gamma is None and n_steps != 1:
            raise ValueError(
                f"{type(self).__name__}: n_steps={n_steps} needs the model's gamma, which "
                f"Stable-Baselines3 does not pass: replay_buffer_kwargs={{'n_steps': {n_steps}, "
                "'gamma': 0.99}}"
            )
        self.n_steps, self.gamma = n_steps, gamma if gamma is None else float(gamma)
        super().__init__(*args, **kwargs)

    def _view(self) -> SB3View:
        gamma = 1.0 if self.gamma is None else self.gamma  # of one step, which needs none
        return SB3View(n_step=self.n_steps, gamma=gamma, has_steps=True)

    def _samples(self, item: PyTree, env: VecNormalize | None) -> Any:
        samples = super()._samples(item, env)
        if self.gamma is None:
            return samples
        discounts = self.gamma ** np.asarray(item.num_steps).astype(np.float32)
        return samples._replace(discounts=self.to_torch(discounts))

    def _normalized_reward(self, item: PyTree, env: VecNormalize) -> np.ndarray:
        # as in Stable-Baselines3, each reward is normalized and clipped before the sum
        steps = np.arange(self.n_steps, dtype=np.float32)
        rewards = (
            self._normalize_reward(np.asarray(item.rewards), env)
            * self._view().gamma ** steps
            * (steps < np.asarray(item.num_steps))
        )
        return rewards.sum(axis=1, keepdims=True)


class PrioritizedSamples(NamedTuple):
    """Stable-Baselines3's samples of B transitions, with weights and indices for priorities.

    Attributes:
      observations: Observations, [B, ...], or a dict of such tensors.
      actions: Actions, [B, action_dim].
      next_observations: Observations after the last step of each transition, as `observations`.
      dones: float32[B, 1], 1 where the transition ends in a termination.
      rewards: float32[B, 1], the sum of gamma**j * r_j over the steps of each transition.
      discounts: float32[B, 1], gamma**k for a transition of k steps; None if the buffer has no
        `gamma`.
      weights: float32[B, 1], importance weights; the largest of the batch is 1.
      indices: The transitions' rows, for `update_priorities`, leaves [B].
    """

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    indices: Index


class PrioritizedReplayBuffer(NStepReplayBuffer):
    """Replay of n-step transitions in proportion to priority ** alpha.

    New transitions have the largest priority so far. The algorithm must use the weights and call
    `update_priorities`, as `PrioritizedDQN` does. Stable-Baselines3's own algorithms do neither,
    and would learn from a biased distribution.

    Args:
      *args: What Stable-Baselines3 passes by position:

        - `buffer_size`: Number of transitions over all envs. Each final row that is stored takes
          the place of one.
        - `observation_space`: Observation space of one env; may be a Dict. 64-bit numbers are
          stored in 32 bits, unless `jax_enable_x64` is set, and sampled in 64 bits.
        - `action_space`: Action space of one env; 64-bit integers likewise.
      alpha: Exponent of priorities, at least 0; 0 samples uniformly. Default: 0.6.
      beta: Exponent of the weights, at least 0; 1 corrects the bias fully. An attribute, to be
        raised towards 1 while learning. Default: 0.4.
      epsilon: Added to every priority in `update_priorities`, so that none is 0. Default: 1e-6.
      n_steps: Most steps of a transition. Default: 1.
      gamma: As for `NStepReplayBuffer`; `PrioritizedDQN` passes its own. Default: None, for one
        step alone.
      **kwargs: What Stable-Baselines3 passes by name, the last three from `replay_buffer_kwargs`:

        - `device`: PyTorch device of sampled batches. Default: "auto", a GPU if there is one.
        - `n_envs`: Number of parallel envs. Default: 1.
        - `optimize_memory_usage`: Must be False: observations are always stored once. Default:
          False.
        - `handle_timeout_termination`: Count a step with `TimeLimit.truncated` in its info as
          truncated, with `dones` 0; else it counts as terminated. Default: True.
        - `storage_device`: Platform whose first device stores the rows, such as "cpu" for the
          host's memory. Default: JAX's default device.
        - `rows`: Where the rows lie: "device", "host", or the path of a folder. Default: "device".

    Raises:
      ValueError: An option is out of range, or `optimize_memory_usage` is set.

    References:
      Schaul et al., "Prioritized Experience Replay" (2016), https://arxiv.org/abs/1511.05952
    """

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        epsilon: float = 1e-6,
        n_steps: int = 1,
        gamma: float | None = None,
        **kwargs: Any,
    ):
        self.alpha, self.beta, self.epsilon = float(alpha), float(beta), float(epsilon)
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)

    _num_unanswered = 0  # samples before the first update of priorities

    def _sampler(self) -> Prioritized:
        return Prioritized(alpha=self.alpha, beta=self.beta)

    def _count_sample(self) -> None:
        """Warn once if nobody updates priorities."""
        self._num_unanswered += 1
        if self._num_unanswered == _PATIENCE:
            warnings.warn(
                f"{type(self).__name__}: {_PATIENCE:,} samples and no update of priorities: the "
                "algorithms of Stable-Baselines3 make none, so rows are sampled uniformly; use "
                "PrioritizedDQN",
                stacklevel=3,
            )

    @transfers.allows
    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:
        """Sample transitions in proportion to priority ** alpha, with their weights."""
        self._count_sample()
        with self._monitor:
            self._check_not_empty()
            batch = self._owner.draw(operator.index(batch_size), {"beta": self.beta})
        if batch is None:
            raise ValueError(
                "PrioritizedReplayBuffer: every priority is 0, so nothing can be sampled; use a "
                "positive epsilon"
            )
        samples = self._samples(batch.experience, env)
        return PrioritizedSamples(
            *samples, weights=self._cast(to_torch(batch.weight)[:, None]), indices=batch.index
        )

    def update_priorities(self, indices: Index, priorities: Any) -> None:
        """Set the priorities of sampled transitions, such as absolute TD errors.

        Transitions that were overwritten since are ignored.

        Args:
          indices: `indices` of a sample, leaves [B].
          priorities: float[B] or float[B, 1], at least 0, a tensor or an array.

        Raises:
          ValueError: `indices` or `priorities` has another type or shape.
          RuntimeError: The rows were lost in an earlier call that failed: call `reset()`.
        """
        if isinstance(priorities, torch.Tensor):
            priorities = priorities.detach().float().cpu().numpy()
        priorities = np.array(priorities, np.float32).reshape(-1) + np.float32(self.epsilon)
        with self._monitor:
            self._owner.change(method("update_priorities"), indices, priorities)
        self._num_unanswered = _PATIENCE  # never warn

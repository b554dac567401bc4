"""DQN with prioritized replay: what Stable-Baselines3's DQN leaves out, the weights and the way
back of the priorities."""

from typing import Any

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.type_aliases import Schedule
from torch.nn import functional as F

from jaxreplay.sb3.buffers import PrioritizedReplayBuffer


class PrioritizedDQN(DQN):
    """Stable-Baselines3's DQN, learning from a `PrioritizedReplayBuffer`: its losses are weighted,
    and its TD errors the new priorities.

    Source: Schaul et al., "Prioritized Experience Replay" (2016), algorithm 1; double Q-learning
    there, here SB3's own targets.

    Args:
      beta: exponent of the importance weights, a number, or a function of the remaining progress,
        from 1 at the start to 0 at the end; by default it rises from 0.4 to 1 as in the paper.
      further ones: see `stable_baselines3.DQN`. With `n_steps`, targets take as many steps. A
        `replay_buffer_class` is a `PrioritizedReplayBuffer`; it gets the model's `n_steps` and
        `gamma`, unless `replay_buffer_kwargs` has others.

    Example:
      >>> from jaxreplay.sb3 import PrioritizedDQN
      >>> model = PrioritizedDQN(
      ...     "MlpPolicy", "CartPole-v1", n_steps=3, buffer_size=1000, learning_starts=10
      ... )
      >>> model.learn(20).replay_buffer.size()
      20
    """

    def __init__(self, *args: Any, beta: float | Schedule | None = None, **kwargs: Any):
        self.beta = _rising if beta is None else beta
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        if self.replay_buffer_class is None:
            self.replay_buffer_class = PrioritizedReplayBuffer
        if not issubclass(self.replay_buffer_class, PrioritizedReplayBuffer):
            raise ValueError(
                "PrioritizedDQN: needs a PrioritizedReplayBuffer, got "
                f"{self.replay_buffer_class.__name__}"
            )
        num_steps, kwargs = self.n_steps, self.replay_buffer_kwargs
        self.replay_buffer_kwargs = {"n_steps": num_steps, "gamma": self.gamma, **kwargs}
        # else DQN warns that it leaves n-step targets to the buffer's class, as is meant here
        self.n_steps = 1
        super()._setup_model()
        self.n_steps, self.replay_buffer_kwargs = num_steps, kwargs

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        buffer = self.replay_buffer
        assert isinstance(buffer, PrioritizedReplayBuffer)
        buffer.beta = (
            self.beta(self._current_progress_remaining) if callable(self.beta) else self.beta
        )
        losses = []
        for _ in range(gradient_steps):
            batch = buffer.sample(batch_size, env=self._vec_normalize_env)
            with torch.no_grad():
                next_value = (
                    self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
                )
                target = batch.rewards + (1 - batch.dones) * batch.discounts * next_value
            value = torch.gather(self.q_net(batch.observations), dim=1, index=batch.actions.long())
            loss = (batch.weights * F.smooth_l1_loss(value, target, reduction="none")).mean()
            losses.append(loss.item())
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            buffer.update_priorities(batch.indices, (target - value).detach().abs())
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", sum(losses) / max(len(losses), 1))
        self.logger.record("train/beta", buffer.beta)


def _rising(progress_remaining: float) -> float:
    return 1 - 0.6 * progress_remaining

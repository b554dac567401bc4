"""DQN with prioritized replay: weighted losses, and new priorities after each gradient step."""

from typing import Any

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.type_aliases import Schedule
from torch.nn import functional as F

from jaxreplay.sb3.buffers import PrioritizedReplayBuffer


class PrioritizedDQN(DQN):
    """Stable-Baselines3's DQN with a `PrioritizedReplayBuffer`.

    Losses are multiplied by the importance weights, and absolute TD errors are the new priorities.
    Targets are those of Stable-Baselines3's DQN; the paper uses double Q-learning.

    Args:
      *args: What `stable_baselines3.DQN` takes by position:

        - `policy`: "MlpPolicy", "CnnPolicy", "MultiInputPolicy", or a `DQNPolicy` class.
        - `env`: The env, a `VecEnv`, or the id of a registered env.
      beta: Exponent of the importance weights: a number, or a function of the remaining progress,
        which falls from 1 to 0. Default: it rises linearly from 0.4 to 1, as in the paper.
      **kwargs: Options of `stable_baselines3.DQN`; the defaults are those of version 2.9:

        - `learning_rate`: A number, or a function of the remaining progress. Default: 1e-4.
        - `buffer_size`: Number of transitions in the buffer, over all envs. Default: 1_000_000.
        - `learning_starts`: Env steps before training starts. Default: 100.
        - `batch_size`: Transitions of a gradient step. Default: 32.
        - `tau`: Fraction by which an update moves the target network towards the network, in
          [0, 1]. Default: 1.
        - `gamma`: Discount factor of one step. Default: 0.99.
        - `train_freq`: Env steps between two trainings, or a pair such as (2, "episode").
          Default: 4.
        - `gradient_steps`: Gradient steps of a training; -1 takes as many as env steps. Default: 1.
        - `replay_buffer_class`: `PrioritizedReplayBuffer`, or a subclass. Default:
          `PrioritizedReplayBuffer`.
        - `replay_buffer_kwargs`: Options of the buffer: `alpha`, `epsilon`, `storage_device`,
          `handle_timeout_termination`, and `n_steps` and `gamma` in place of the model's. Default:
          none.
        - `optimize_memory_usage`: Must be False: observations are always stored once. Default:
          False.
        - `n_steps`: Most steps of a transition and its target. Default: 1.
        - `target_update_interval`: Steps between two updates of the target network. Default: 10000.
        - `exploration_fraction`: Fraction of the training in which exploration falls. Default: 0.1.
        - `exploration_initial_eps`: Probability of a random action at the start. Default: 1.
        - `exploration_final_eps`: Probability of a random action at the end. Default: 0.05.
        - `max_grad_norm`: Largest norm of the gradient; larger ones are clipped. Default: 10.
        - `stats_window_size`: Episodes that logged means are over. Default: 100.
        - `tensorboard_log`: Folder of the TensorBoard log. Default: none is written.
        - `policy_kwargs`: Arguments of the policy. Default: none.
        - `verbose`: 0 prints nothing, 1 infos, 2 debug messages. Default: 0.
        - `seed`: Seed of the random generators. Default: none is set.
        - `device`: PyTorch device of the networks. Default: "auto", a GPU if there is one.

    Raises:
      ValueError: `replay_buffer_class` is not a `PrioritizedReplayBuffer`.

    References:
      Schaul et al., "Prioritized Experience Replay" (2016),
      https://arxiv.org/abs/1511.05952, algorithm 1.

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
        # else DQN warns that the buffer's class must make n-step targets, as it does here
        self.n_steps = 1
        super()._setup_model()
        self.n_steps, self.replay_buffer_kwargs = num_steps, kwargs

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Take gradient steps on weighted losses, and update the priorities after each.

        Args:
          gradient_steps: Number of gradient steps.
          batch_size: Number of transitions of each. Default: 100.
        """
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
            assert batch.discounts is not None
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

"""Hindsight experience replay for Stable-Baselines3, with observations stored once."""

import copy
import dataclasses
import functools
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer as TheirHerReplayBuffer

from jaxreplay._util import checks, transfers
from jaxreplay._util.aliases import PyTree
from jaxreplay.sb3.base import DropInBuffer
from jaxreplay.sb3.batch import SB3View
from jaxreplay.sb3.buffers import PrioritizedReplayBuffer, PrioritizedSamples
from jaxreplay.stateful.places import key_of
from jaxreplay.views.hindsight import Hindsight


class HerReplayBuffer(DropInBuffer, TheirHerReplayBuffer):
    """Hindsight experience replay: a part of each batch has goals that its episodes achieved.

    The env's `compute_reward` gives the rewards for new goals. As in Stable-Baselines3's buffer,
    int(B k / (k + 1)) of B transitions have new goals, and a "future" goal may be the one that the
    transition itself achieved. There are two differences. Unfinished episodes are sampled, with the
    goals achieved so far, so learning may start before an episode has ended. Episodes whose first
    steps were overwritten are sampled, with the goals that are stored.

    Args:
      buffer_size: Number of transitions over all envs. Each final row that is stored takes the
        place of one.
      observation_space: Observation space of one env: a Dict with "observation", "achieved_goal"
        and "desired_goal". 64-bit numbers are stored in 32 bits, unless `jax_enable_x64` is set,
        and sampled in 64 bits.
      action_space: Action space of one env; 64-bit integers likewise.
      env: The `VecEnv` whose first env computes rewards by
        `compute_reward(achieved_goal, desired_goal, infos)`. Stable-Baselines3 passes it.
      device: PyTorch device of sampled batches. Default: "auto", a GPU if there is one.
      n_envs: Number of parallel envs. Default: 1.
      optimize_memory_usage: Must be False: observations are always stored once. Default: False.
      handle_timeout_termination: Count a step with `TimeLimit.truncated` in its info as truncated,
        with `dones` 0; else it counts as terminated. Default: True.
      n_sampled_goal: k, the number of transitions with new goals for each one with its own.
        Default: 4.
      goal_selection_strategy: Where a new goal was achieved: "future", by the transition or a later
        one of its episode; "final", by the last one; "episode", at any observation of the episode.
        Default: "future".
      copy_info_dict: Keep the steps' infos on the host, and pass them to `compute_reward`, which
        else gets empty dicts. Default: False.
      storage_device: Platform whose first device stores the rows, such as "cpu" for the host's
        memory. Default: JAX's default device.
      rows: Where the rows lie: "device", "host", or the path of a folder, as for `ReplayBuffer`.
        Default: "device".

    Raises:
      ValueError: The strategy is none of the three, `optimize_memory_usage` is set, or `rows` is no
        such place.

    References:
      Andrychowicz et al., "Hindsight Experience Replay" (2017), https://arxiv.org/abs/1707.01495
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        storage_device: str | None = None,
        rows: Any = "device",
    ):
        name = str(getattr(goal_selection_strategy, "name", goal_selection_strategy)).upper()
        if name not in GoalSelectionStrategy.__members__:
            names = ", ".join(GoalSelectionStrategy.__members__).lower()
            raise ValueError(
                f"HerReplayBuffer: goal_selection_strategy must be one of {names}, got "
                f"{goal_selection_strategy!r}"
            )
        self.goal_selection_strategy = GoalSelectionStrategy[name]
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - 1 / (n_sampled_goal + 1)
        self.copy_info_dict = copy_info_dict
        self.env = env
        DropInBuffer.__init__(
            self,
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
            storage_device=storage_device,
            rows=rows,
        )
        self.infos = np.full(self._replay.capacity if copy_info_dict else 0, None, object)

    def _view(self) -> Hindsight:
        strategy = self.goal_selection_strategy.name.lower()
        return Hindsight(
            inner=SB3View(gamma=1.0),
            reward_fn=_stored_reward,
            strategy=strategy,
            unfinished=True,
            relabel_fraction=1.0,
        )

    def _store_infos(self, rows: np.ndarray, infos: list[dict[str, Any]]) -> None:
        for place, info in zip(rows.tolist(), infos, strict=True):
            self.infos[place] = info

    @transfers.allows
    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Sample transitions uniformly: first those with their own goals, then those with new."""
        return self._samples(self._drawn(batch_size)[0], env)

    def _drawn(self, batch_size: int) -> tuple[PyTree, Any]:
        """Return sampled items with the env's rewards, and their index and probability if the
        sampler has priorities."""
        checks.check_size("sample", "batch_size", batch_size)
        batch_size = operator.index(batch_size)
        num_new = int(self.her_ratio * batch_size)
        with self._monitor:
            self._check_not_empty()
            owner, sizes = self._owner, (batch_size - num_new, num_new)
            draw = _draw(*sizes), sum(sizes), owner.draws.next
            item, row, others = owner.place.read(owner, *draw)
            owner.draws.count()
        if num_new:
            new = jax.tree.map(
                lambda leaf: np.asarray(leaf)[-num_new:], (item.next_obs, item.obs, row)
            )
            kept = np.asarray(item.reward)[: batch_size - num_new]
            item = item.replace(
                reward=jnp.asarray(np.concatenate([kept, self._rewards_again(*new)]))
            )
        return item, others

    def _rewards_again(self, next_obs: PyTree, obs: PyTree, row: np.ndarray) -> np.ndarray:
        """Return the env's rewards for the achieved and the new goals: float32[B, 1]."""
        if self.env is None:
            raise ValueError(
                "HerReplayBuffer: there is no env to compute rewards; call set_env(env) first"
            )
        achieved, goal = (
            array.astype(self.observation_space[key].dtype, copy=True)
            for array, key in (
                (next_obs["achieved_goal"], "achieved_goal"),
                (obs["desired_goal"], "desired_goal"),
            )
        )
        infos = copy.deepcopy(self.infos[row]) if self.copy_info_dict else [{} for _ in row]
        (rewards,) = self.env.env_method("compute_reward", achieved, goal, infos, indices=[0])
        return np.asarray(rewards, np.float32).reshape(-1, 1)

    def truncate_last_trajectory(self) -> None:
        """End the unfinished episodes, as a truncation does: the next step begins new ones.

        Stable-Baselines3 calls it after loading, unless `truncate_last_traj=False`.
        """
        record = self._recorded()
        if record.may_go_on.any():
            warnings.warn(
                "Unfinished episodes now end with the buffer's last step, as truncated ones. If "
                "the envs continue them, load the buffer with truncate_last_traj=False.",
                stacklevel=2,
            )
        record.may_go_on = np.zeros(self.n_envs, bool)
        self._columns = {}


class PrioritizedHerReplayBuffer(HerReplayBuffer, PrioritizedReplayBuffer):  # type: ignore[misc]
    """Hindsight experience replay in proportion to priority ** alpha, as `PrioritizedDQN` uses it.

    Transitions with their own and with new goals are sampled alike, and share a priority: that of
    the goal that was updated last. Samples are `PrioritizedSamples`.

    Args:
      *args: As for `HerReplayBuffer`:

        - `buffer_size`: Number of transitions over all envs.
        - `observation_space`: Observation space of one env.
        - `action_space`: Action space of one env.
      alpha: Exponent of priorities, at least 0; 0 samples uniformly. Default: 0.6.
      beta: Exponent of the weights, at least 0; 1 corrects the bias fully. An attribute, to be
        raised towards 1 while learning. Default: 0.4.
      epsilon: Added to every priority in `update_priorities`, so that none is 0. Default: 1e-6.
      n_steps: Must be 1: the env computes rewards of single steps. Default: 1.
      gamma: Discount factor in [0, 1] of one step, which must be the model's; `PrioritizedDQN`
        passes its own. Default: None: the samples' `discounts` are None then, and the algorithm
        takes its own.
      **kwargs: Options of `HerReplayBuffer`:

        - `env`: The `VecEnv` whose first env computes rewards. Stable-Baselines3 passes it.
        - `n_sampled_goal`, `goal_selection_strategy`, `copy_info_dict` and all others. Default:
          those of `HerReplayBuffer`.

    Raises:
      ValueError: `n_steps` is not 1, or an option of `HerReplayBuffer` does not fit.

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
        if n_steps != 1:
            raise ValueError(
                "PrioritizedHerReplayBuffer: the env computes the rewards of single steps; leave "
                f"out n_steps={n_steps}"
            )
        self.alpha, self.beta, self.epsilon = float(alpha), float(beta), float(epsilon)
        self.gamma = gamma if gamma is None else float(gamma)
        HerReplayBuffer.__init__(self, *args, **kwargs)

    _samples = DropInBuffer._samples
    _normalized_reward = DropInBuffer._normalized_reward

    @transfers.allows
    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:
        """Sample transitions in proportion to priority ** alpha, with their weights."""
        self._count_sample()
        item, (index, probability) = self._drawn(batch_size)
        probability = np.asarray(probability)
        if not probability.all():
            raise ValueError(
                "PrioritizedHerReplayBuffer: every priority is 0, so nothing can be sampled; use a "
                "positive epsilon"
            )
        weight = (probability.min() / probability) ** np.float32(self.beta)
        columns = self._samples(item, env)._asdict()
        if self.gamma is not None:
            columns["discounts"] = self.to_torch(np.full((len(weight), 1), self.gamma, np.float32))
        return PrioritizedSamples(**columns, weights=self.to_torch(weight[:, None]), indices=index)


def _stored_reward(achieved: Any, goal: Any, step: PyTree) -> jax.Array:
    """Return the stored reward: the env computes those for new goals on the host."""
    return step.reward


@functools.cache
def _draw(num_own: int, num_new: int) -> Any:
    """Return a function that samples items with their own goals, then items with new ones: items
    [B, ...], row int32[B], and with priorities the index and the probability of each."""

    def drawn(buffer: Any, state: Any, draw: Any) -> Any:
        has_priorities = buffer.sampler.has_priorities

        def part(ratio, size):
            view = dataclasses.replace(buffer.view, relabel_fraction=ratio)
            key = jax.random.fold_in(key_of(draw), int(ratio))
            batch = dataclasses.replace(buffer, view=view).sample(state, key, size)
            others = (batch.index, batch.probability) if has_priorities else ()
            return batch.experience, batch.index.row, others

        parts = [part(ratio, size) for ratio, size in ((0.0, num_own), (1.0, num_new)) if size]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

    return drawn

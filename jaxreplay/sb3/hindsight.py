"""Hindsight experience replay for Stable-Baselines3, over the same spaces, with observations stored
once."""

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

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.jitted import program
from jaxreplay.sb3.base import DropInBuffer
from jaxreplay.sb3.batch import SB3View
from jaxreplay.views.hindsight import Hindsight


class HerReplayBuffer(DropInBuffer, TheirHerReplayBuffer):
    """Transitions, a part of them with goals that were achieved later in their episode. Rewards
    come from the env's `compute_reward`.

    As of Stable-Baselines3's own: k of k + 1 transitions of a batch have new goals, in whole
    numbers, and the goals of "future" begin with what the transition itself achieved. Where it
    differs: of an episode that goes on, what was achieved so far can be drawn, so that learning may
    start before one has ended; and an episode whose first steps are overwritten still is, but by
    "episode".

    Source: Andrychowicz et al., "Hindsight Experience Replay" (2017).

    Args:
      buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination,
        storage_device: see `DropInBuffer`.
      env: computes rewards. n_sampled_goal: k. goal_selection_strategy: "future", "final" or
        "episode".
      copy_info_dict: whether `compute_reward` gets the steps' infos, which are then kept on the
        host; else empty ones.
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
        )
        self.infos = np.full(self._replay.capacity if copy_info_dict else 0, None, object)

    def _view(self) -> Hindsight:
        strategy = self.goal_selection_strategy.name.lower()
        return Hindsight(
            inner=SB3View(gamma=1.0),
            reward_fn=_stored_reward,
            strategy=strategy,
            relabel_fraction=1.0,
        )

    def _after_add(self, rows: jax.Array, infos: list[dict[str, Any]]) -> None:
        if self.copy_info_dict:
            for place, info in zip(np.asarray(rows).tolist(), infos, strict=True):
                self.infos[place] = info

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Transitions, the first of them with their own goals, the last with new ones.

        Args:
          batch_size: transitions. env: normalizes observations and rewards.
        """
        self._check_not_empty()
        checks.check_size("sample", "batch_size", batch_size)
        batch_size = operator.index(batch_size)
        num_new = int(self.her_ratio * batch_size)
        with defer_interrupts():
            item, row, is_valid = _draw(
                self._replay, self._state, *self._next_draw(), batch_size - num_new, num_new
            )
        if not np.asarray(is_valid).all():
            raise ValueError(
                "HerReplayBuffer: no episode is held from its first step on; its strategy needs a "
                "larger buffer_size"
            )
        if num_new:
            new = jax.tree.map(
                lambda leaf: np.asarray(leaf)[-num_new:], (item.next_obs, item.obs, row)
            )
            kept = np.asarray(item.reward)[: batch_size - num_new]
            item = item.replace(
                reward=jnp.asarray(np.concatenate([kept, self._rewards_again(*new)]))
            )
        return self._samples(item, env)

    def _rewards_again(self, next_obs: PyTree, obs: PyTree, row: np.ndarray) -> np.ndarray:
        """What the env gives for what each step achieved and the new goals: float32[B, 1]."""
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
        """The episodes that are being written end here, as by a truncation: the next step opens
        others. As after loading, by default."""
        if self._may_go_on.any():
            warnings.warn(
                "The episodes that were being written end with the buffer's last step, as "
                "truncated ones. Where the env goes on with the "
                "same ones, load with truncate_last_traj=False.",
                stacklevel=2,
            )
        self._may_go_on = np.zeros(self.n_envs, bool)


def _stored_reward(achieved: Any, goal: Any, step: PyTree) -> jax.Array:
    """The env computes the new one, outside."""
    return step.reward


@functools.partial(program, static=("num_own", "num_new"))
def _draw(buffer: Any, state: Any, seed: Any, draw: Any, num_own: int, num_new: int) -> Any:
    """Items, rows, and whether they are any: with their own goals, then with new ones."""

    def part(ratio, size):
        view = dataclasses.replace(buffer.view, relabel_fraction=ratio)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draw), int(ratio))
        batch = dataclasses.replace(buffer, view=view).sample(state, key, size)
        return batch.experience, batch.index.row, batch.is_valid

    parts = [part(ratio, size) for ratio, size in ((0.0, num_own), (1.0, num_new)) if size]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

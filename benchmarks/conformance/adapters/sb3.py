"""Stable-Baselines3's replay buffers, as its off-policy algorithms use them."""

import copy
import pathlib
import pickle
from typing import ClassVar

import gymnasium as gym
import numpy as np
import stable_baselines3
from gymnasium import spaces
from replay import Batch, NotOffered, Replay
from stable_baselines3.common import buffers
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.her import HerReplayBuffer

REQUIREMENTS = "stable-baselines3==2.9.2 torch==2.13.0 gymnasium==1.4.0 numpy==2.4.6"
PYTHON = "3.11"

GOALS = ("observation", "achieved_goal", "desired_goal")


class GoalEnv(gym.Env):
    """An env of the kind that `HerReplayBuffer` asks for the rewards of new goals."""

    def __init__(self, space):
        self.observation_space, self.action_space = space, spaces.Discrete(100)

    def compute_reward(self, achieved_goal, desired_goal, infos):
        return np.where((achieved_goal == desired_goal).all(-1), 0.0, -1.0)


def space_of(leaf):
    """Return the space of an observation. A number is an array of shape (1,), as for Discrete."""
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "iuf":
        raise NotOffered(f"Gymnasium's Box has no {leaf.dtype}")
    low, high = (
        (-np.inf, np.inf)
        if leaf.dtype.kind == "f"
        else (np.iinfo(leaf.dtype).min, np.iinfo(leaf.dtype).max)
    )
    return spaces.Box(low, high, leaf.shape or (1,), leaf.dtype.type)


def numpy_of(tree):
    if isinstance(tree, dict):
        return {key: leaf.numpy() for key, leaf in tree.items()}
    return tree.numpy()


class StableBaselines3(Replay):
    """`ReplayBuffer`, or the class for n steps, for Dict observations, or for hindsight."""

    name = f"stable-baselines3 {stable_baselines3.__version__}"
    uniform, n_step = buffers.ReplayBuffer, buffers.NStepReplayBuffer
    of_dicts, hindsight = buffers.DictReplayBuffer, HerReplayBuffer
    kwargs = ()
    arguable: ClassVar[dict[str, str]] = {
        "observations_are_stored_once": "its docs offer optimize_memory_usage for it, at a cost of "
        "more complexity"
    }

    def __init__(self, options):
        super().__init__(options)
        if options.autoreset != "same_step":
            # the docs of VecEnv: it resets in the same step, and has the final observation in infos
            raise NotOffered("a VecEnv resets in the same step, with a terminal_observation")
        obs, kwargs = options.obs, dict(self.kwargs)
        if options.kind == "goals":
            obs = dict.fromkeys(GOALS, obs)
        is_dict = isinstance(obs, dict)
        space = (
            spaces.Dict({key: space_of(leaf) for key, leaf in obs.items()})
            if is_dict
            else space_of(obs)
        )
        self.replay = self.class_of(is_dict, kwargs)(
            options.capacity,
            space,
            spaces.Discrete(100),
            device="cpu",
            n_envs=options.num_envs,
            **({"env": DummyVecEnv([lambda: GoalEnv(space)])} if options.kind == "goals" else {}),
            **kwargs,
        )
        self.num_steps = 0
        self.seed(options.seed)

    def class_of(self, is_dict, kwargs):
        """Return a buffer class as the algorithms choose it; add its arguments to `kwargs`."""
        options = self.options
        if options.kind == "goals":
            return self.hindsight
        if options.kind != "uniform":
            raise NotOffered
        if options.n_step > 1:
            if is_dict:
                raise NotOffered("NStepReplayBuffer is for Box observations")
            kwargs |= {"n_steps": options.n_step, "gamma": options.gamma}
            return self.n_step
        return self.of_dicts if is_dict else self.uniform

    def seed(self, seed):
        set_random_seed(seed)  # as the algorithms do

    def add(self, turn):
        """As `OffPolicyAlgorithm._store_transition`, with what a `VecEnv` has in its infos."""
        if turn.mask is not None:
            raise NotOffered("a VecEnv steps all envs")
        done = turn.terminated | turn.truncated
        obs, next_obs = copy.deepcopy((turn.obs, turn.next_obs))
        infos = [{"TimeLimit.truncated": bool(cut)} for cut in turn.truncated]
        for env in np.flatnonzero(done):
            if isinstance(next_obs, dict):
                infos[env]["terminal_observation"] = {k: v[env] for k, v in turn.final_obs.items()}
                for key in next_obs:
                    next_obs[key][env] = infos[env]["terminal_observation"][key]
            else:
                infos[env]["terminal_observation"] = turn.final_obs[env]
                next_obs[env] = infos[env]["terminal_observation"]
        obs, next_obs = self.with_goals(obs), self.with_goals(next_obs)
        self.replay.add(obs, next_obs, turn.action, turn.reward, done, infos)
        self.num_steps += self.options.num_envs

    def with_goals(self, obs):
        if self.options.kind == "goals":
            return dict(zip(GOALS, (obs, obs, -np.ones_like(obs)), strict=True))
        if isinstance(obs, dict):  # numbers as arrays of shape (1,)
            return {k: v[:, None] if v.ndim == 1 else v for k, v in obs.items()}
        return obs

    def sample(self, beta=None):
        data = self.replay.sample(self.options.batch_size)
        gamma = self.options.gamma if data.discounts is None else data.discounts
        discount = ((1 - data.dones) * gamma).numpy()[:, 0]  # as in the targets of DQN and SAC
        obs, action, reward = numpy_of(data.observations), data.actions, data.rewards.numpy()[:, 0]
        if self.options.kind == "goals":
            return Batch(obs["observation"], action.numpy(), reward, goal=obs["desired_goal"])
        return Batch(obs, action.numpy(), reward, discount, numpy_of(data.next_observations))

    def nbytes(self):
        arrays = list(vars(self.replay).values())
        arrays += [leaf for value in arrays if isinstance(value, dict) for leaf in value.values()]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def save(self, path):
        """As `CheckpointCallback(save_replay_buffer=True)`: each save has a file of its own.

        `model.save_replay_buffer(path)` writes over the file of an earlier save, in place.
        """
        pathlib.Path(path).mkdir(exist_ok=True)
        save_to_pkl(f"{path}/rl_model_replay_buffer_{self.num_steps}_steps.pkl", self.replay)

    def load(self, path):
        """As `model.load_replay_buffer`: the buffer of the file, with its sizes and options, takes
        the place of the new one. Of a file that was cut short, the user would take the one before.
        """
        new = self.replay
        steps = lambda file: int(file.stem.split("_")[-2])
        for file in sorted(pathlib.Path(path).glob("*.pkl"), key=steps, reverse=True):
            try:
                self.replay = load_from_pkl(file)
            except (EOFError, pickle.UnpicklingError):
                continue
            break
        self.num_steps = steps(file)
        options = ("buffer_size", "n_envs", "n_steps", "gamma")
        is_same = all(getattr(new, o, None) == getattr(self.replay, o, None) for o in options)
        if type(self.replay) is not type(new) or not is_same:
            raise NotOffered("a load replaces the buffer by the saved one")
        if hasattr(new, "env"):
            self.replay.set_env(new.env)


class MemoryOptimized(StableBaselines3):
    """`ReplayBuffer(optimize_memory_usage=True)`, which its docs allow without the handling of
    timeouts alone: episodes that were truncated count as terminated."""

    name = f"stable-baselines3 {stable_baselines3.__version__}, optimize_memory_usage"
    kwargs = (("optimize_memory_usage", True), ("handle_timeout_termination", False))
    arguable: ClassVar[dict[str, str]] = dict.fromkeys(
        ("true_final_observation_with_same_step", "terminations_do_not_bootstrap"),
        "the docs of ReplayBuffer: optimize_memory_usage cannot be used in combination with "
        "handle_timeout_termination, so that a truncation counts as a termination",
    )

    def class_of(self, is_dict, kwargs):
        chosen = super().class_of(is_dict, kwargs)
        if chosen is not self.uniform:
            raise NotOffered("the other classes don't support optimize_memory_usage")
        return chosen

"""Tianshou's vector replay buffers, as its collectors and off-policy algorithms use them."""

import pickle
from importlib.metadata import version
from typing import ClassVar

import numpy as np
import torch
from replay import Batch, NotOffered, Replay
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import (
    Batch as Data,
    HERVectorReplayBuffer,
    PrioritizedVectorReplayBuffer,
    VectorReplayBuffer,
)

REQUIREMENTS = "tianshou==2.0.1 torch==2.13.0 gymnasium==1.4.0 numpy==2.4.6"
PYTHON = "3.11"

ONCE = "its docs offer ignore_obs_next for it"
LATE = "the docs of update_weight: it takes places in the buffer; its algorithms update at once"


def reward(achieved, goal):
    return np.where((achieved == goal).all(-1), 0.0, -1.0)


def bytes_of(tree):
    if isinstance(tree, Data):
        return sum(bytes_of(leaf) for leaf in tree.values())
    return getattr(tree, "nbytes", 0)


def storable(obs):
    """Return bfloat16 as tensors, which a `Batch` holds as well as arrays that NumPy alone has."""
    if isinstance(obs, dict):
        return {key: storable(leaf) for key, leaf in obs.items()}
    if obs.dtype.name != "bfloat16":
        return obs
    return torch.from_numpy(obs.view(np.int16)).view(torch.bfloat16)


def numpy_of(obs):
    if isinstance(obs, Data):
        return {key: numpy_of(leaf) for key, leaf in obs.items()}
    if not isinstance(obs, torch.Tensor):
        return obs
    return obs.view(torch.int16).numpy().view("bfloat16")


class Tianshou(Replay):
    """`VectorReplayBuffer` and its kin; targets by `Algorithm.compute_nstep_return`.

    Sequences are stacked observations, which recurrent nets are trained on (test_drqn.py), of the
    steps alone that have as many before them (`sample_avail`).
    """

    name = f"tianshou {version('tianshou')}"
    kwargs = ()
    arguable: ClassVar[dict[str, str]] = {
        "observations_are_stored_once": ONCE,
        "late_updates_change_no_other_step": LATE,
        "a_kill_in_a_save_leaves_one": "it has no save of its own but save_hdf5; the pickle of its "
        "examples (test_c51.py) is written over the one before",
    }

    def __init__(self, options):
        super().__init__(options)
        if options.autoreset == "lost":
            raise NotOffered("a Collector resets the envs itself, after the final observation")
        sizes = (options.capacity, options.num_envs)
        kwargs = {"random_seed": options.seed, **dict(self.kwargs)}
        if options.kind == "prioritized":
            kwargs |= {"alpha": options.alpha, "beta": options.beta}
            self.buffer = PrioritizedVectorReplayBuffer(*sizes, **kwargs)
        elif options.kind == "goals":
            kwargs |= {"compute_reward_fn": reward, "horizon": 50}
            self.buffer = HERVectorReplayBuffer(*sizes, **kwargs)
        else:
            if options.kind == "sequences":
                kwargs |= {"stack_num": options.burn_in + options.length, "sample_avail": True}
            self.buffer = VectorReplayBuffer(*sizes, **kwargs)
        self.seed(options.seed)

    def seed(self, seed):
        np.random.seed(seed)  # as its examples do; the buffer's own generator is saved with it

    def add(self, turn):
        """As a `Collector`, whose envs don't reset themselves: a step that resets is no step, and
        `buffer_ids` says which envs took one."""
        options = self.options
        ids = ~turn.is_reset if turn.mask is None else turn.mask & ~turn.is_reset
        ids = np.flatnonzero(ids)
        if not len(ids):
            return
        obs, obs_next = storable(turn.obs), storable(turn.final_obs)
        if options.kind == "goals":
            goals = {"desired_goal": -np.ones_like(obs)}
            obs = {"observation": obs, "achieved_goal": obs, **goals}
            obs_next = {"observation": obs_next, "achieved_goal": obs_next, **goals}
        step = Data(
            obs=obs,
            act=turn.action,
            rew=turn.reward,
            terminated=turn.terminated,
            truncated=turn.truncated,
            obs_next=obs_next,
        )
        self.buffer.add(step[ids], buffer_ids=ids)

    def sample(self, beta=None):
        options, buffer = self.options, self.buffer
        if beta is not None:
            buffer.set_beta(beta)
        data, indices = buffer.sample(options.batch_size)
        if options.kind == "goals":
            return Batch(data.obs.observation, data.act, data.rew, goal=data.obs.desired_goal)
        if options.kind == "sequences":
            return Batch(data.obs, buffer.get(indices, "act"), buffer.get(indices, "rew"))
        last = []

        def target_q(buffer, indices_of_last_steps):  # of a next value of 0, and of 1
            last.append(indices_of_last_steps)
            return torch.tensor([[0.0, 1.0]], dtype=torch.float64).repeat(len(indices), 1)

        data = Algorithm.compute_nstep_return(
            data, buffer, indices, target_q, gamma=options.gamma, n_step=options.n_step
        )
        zero, one = data.returns.numpy().T
        return Batch(
            numpy_of(data.obs),
            data.act,
            zero,
            one - zero,
            numpy_of(buffer[last[0]].obs_next),
            index=indices,
            weight=np.asarray(data.weight) if options.kind == "prioritized" else None,
        )

    def update_priorities(self, index, priority):
        self.buffer.update_weight(index, priority)

    def nbytes(self):
        tree = self.buffer.weight._value.nbytes if self.options.kind == "prioritized" else 0
        return bytes_of(self.buffer._meta) + tree

    def save(self, path):
        """As its examples save a collector's buffer, to resume (test_c51.py): in place. They take
        the default protocol; this one makes no second copy of the rows."""
        with open(path, "wb") as file:
            pickle.dump(self.buffer, file, protocol=pickle.HIGHEST_PROTOCOL)

    def load(self, path):
        with open(path, "rb") as file:
            buffer = pickle.load(file)
        sizes = [(type(one), one.maxsize, one.buffer_num) for one in (buffer, self.buffer)]
        if sizes[0] != sizes[1]:
            raise NotOffered("a load replaces the buffer by the saved one")
        self.buffer = buffer


class InHdf5(Tianshou):
    """The same, saved by `save_hdf5`."""

    name = f"tianshou {version('tianshou')}, save_hdf5"
    arguable: ClassVar[dict[str, str]] = {
        "observations_are_stored_once": ONCE,
        "late_updates_change_no_other_step": LATE,
    }

    def save(self, path):
        self.buffer.save_hdf5(path)

    def load(self, path):
        buffer = type(self.buffer).load_hdf5(path)
        if (buffer.maxsize, buffer.buffer_num) != (self.buffer.maxsize, self.buffer.buffer_num):
            raise NotOffered("a load replaces the buffer by the saved one")
        self.buffer = buffer


class IgnoreNext(Tianshou):
    """With `ignore_obs_next=True`, as its examples of Atari and of recurrent nets: `obs_next` is
    the next row's observation."""

    name = f"tianshou {version('tianshou')}, ignore_obs_next"
    kwargs = (("ignore_obs_next", True),)
    arguable: ClassVar[dict[str, str]] = Tianshou.arguable | {
        "late_updates_leave_windows_whole": "the newest step's pair is wrong without them, too"
    }

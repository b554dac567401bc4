"""cpprb, as its site shows it: https://ymd_h.gitlab.io/cpprb/features/."""

import importlib.metadata
import tracemalloc
from typing import ClassVar

import cpprb
import numpy as np
from replay import Batch, NotOffered, Replay

REQUIREMENTS = "cpprb==11.0.0 numpy==2.4.6"
PYTHON = "3.11"
VERSION = importlib.metadata.version("cpprb")


def reward(next_obs, action, goal):
    return -1.0 * (next_obs != goal).any(axis=1)


def flat(obs, name):
    """Return an observation by the names of an `env_dict`, which has no trees."""
    if isinstance(obs, dict):
        return {f"{name}_{key}": value for key, value in obs.items()}
    return {name: obs}


def tree(sample, obs, name):
    if isinstance(obs, dict):
        return {key: sample[f"{name}_{key}"] for key in obs}
    return sample[name]


class Plain(Replay):
    """`ReplayBuffer`, `PrioritizedReplayBuffer` and `HindsightReplayBuffer`.

    `done` is the termination alone, since its targets multiply by `1 - done`, and
    `on_episode_end` is called at any end.
    """

    name = f"cpprb {VERSION}"
    next_of = None
    arguable: ClassVar = {
        "a_resume_is_identical": "its docs: 'save and load transitions (not entire buffer)', so "
        "that new steps no longer overwrite the oldest ones first",
        "late_updates_change_no_other_step": "its docs: 'traces updated indices after the last "
        "calling of sample()', so that any later sample ends the protection",
    }

    def __init__(self, options):
        super().__init__(options)
        # The user gives each transition with its next_obs; how to do that where the env loses
        # the final one, the docs don't say.
        if options.kind == "sequences" or options.autoreset == "lost":
            raise NotOffered
        self.is_goals = options.kind == "goals"
        self.rb = self.buffer()
        self.episodes = [[] for _ in range(options.num_envs)]
        self.seed(options.seed)

    def buffer(self):
        o = self.options
        one = {
            key: {"shape": np.shape(leaf) or 1, "dtype": np.asarray(leaf).dtype}
            for key, leaf in flat(o.obs, "obs").items()
        }
        nexts = {f"next_{key}": dict(value) for key, value in one.items()}
        env_dict = {**one, "act": {"dtype": np.int32}}
        if self.is_goals:  # of each episode, 4 other versions are stored
            return cpprb.HindsightReplayBuffer(
                5 * o.capacity,
                {**env_dict, **nexts},
                max_episode_len=1000,
                reward_func=reward,
                strategy="future",
                prioritized=False,
            )
        env_dict |= {"rew": {}, "done": {}}
        more = {"next_of": self.next_of} if self.next_of else {}
        env_dict |= {} if self.next_of else nexts
        if o.n_step > 1:
            names = [*nexts]
            more["Nstep"] = {"size": o.n_step, "gamma": o.gamma, "rew": "rew", "next": names}
        if o.kind == "prioritized":
            # check_for_update: against updates of steps that were overwritten
            return cpprb.PrioritizedReplayBuffer(
                o.capacity, env_dict, alpha=o.alpha, check_for_update=True, **more
            )
        return cpprb.ReplayBuffer(o.capacity, env_dict, **more)

    def add(self, turn):
        took = ~turn.is_reset if turn.mask is None else turn.mask & ~turn.is_reset
        rows = {**flat(turn.obs, "obs"), **flat(turn.final_obs, "next_obs"), "act": turn.action}
        if not self.is_goals:
            rows |= {"rew": turn.reward, "done": turn.terminated}
        ends = took & (turn.terminated | turn.truncated)
        if self.options.n_step > 1 and self.options.num_envs > 1:
            # "you must add a single episode simultaneously"
            for env in np.flatnonzero(took):
                self.episodes[env].append({key: value[env] for key, value in rows.items()})
            for env in np.flatnonzero(ends):
                episode, self.episodes[env] = self.episodes[env], []
                self.rb.add(**{key: np.stack([row[key] for row in episode]) for key in rows})
                self.rb.on_episode_end()
            return
        if took.any():
            self.rb.add(**{key: value[took] for key, value in rows.items()})
        if ends.any():
            if self.is_goals:
                self.rb.on_episode_end(-np.ones_like(turn.obs[0]))
            else:
                self.rb.on_episode_end()

    def sample(self, beta=None):
        o = self.options
        given = {"beta": o.beta if beta is None else beta} if o.kind == "prioritized" else {}
        sample = self.rb.sample(o.batch_size, **given)
        batch = Batch(
            tree(sample, o.obs, "obs"),
            sample["act"][:, 0],
            sample["rew"][:, 0],
            next_obs=tree(sample, o.obs, "next_obs"),
        )
        if self.is_goals:
            batch.goal = sample["goal"]
        else:
            batch.discount = (1 - sample["done"][:, 0]) * o.gamma**o.n_step
        if o.kind == "prioritized":
            batch.index, batch.weight = sample["indexes"].copy(), sample["weights"].copy()
        return batch

    def update_priorities(self, index, priority):
        self.rb.update_priorities(index, priority)

    def nbytes(self):
        # nothing tells the size; NumPy tells tracemalloc what another one takes
        tracemalloc.start()
        other = self.buffer()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del other
        return size

    def save(self, path):
        # "save and load transitions (not entire buffer)": priorities are not among them
        if self.is_goals or self.options.kind == "prioritized":
            raise NotOffered
        self.rb.save_transitions(path + ".npz")

    def load(self, path):
        self.rb.load_transitions(path + ".npz")

    def seed(self, seed):
        np.random.seed(seed)  # nothing seeds the sampler of priorities


class NextOf(Plain):
    """`next_of`: the next observation is that of the next row.

    Steps have to be stored in their order, so that it's for one env, and it isn't for n-step
    targets or hindsight.
    """

    name = f"cpprb {VERSION}, next_of"

    def __init__(self, options):
        self.next_of = [*flat(options.obs, "obs")]
        if options.num_envs > 1 or options.n_step > 1 or options.kind == "goals":
            raise NotOffered
        super().__init__(options)

    def save(self, path):
        if self.options.kind == "prioritized":
            raise NotOffered
        self.rb.save_transitions(path + ".npz", safe=False)  # keeps the compressed rows

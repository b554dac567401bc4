"""What the program of docs/migrating/agentlace.md takes from SERL, small: an env, a policy, and an
agent that wants its own batches, with a `utd_ratio` and a discount of its own."""

import dataclasses
import sys
from typing import Any

import jax
import numpy as np

folder = sys.argv[-1]
training_starts, steps_per_update, save_period = 300, 2, 5
GAMMA = 0.9
LENGTH = 5  # of an episode; each second one is cut off by a limit of time


class Env:
    """Its observation is [number of the episode modulo 2, time in it]."""

    episode, time = -1, 0

    def reset(self, seed=None):
        self.episode, self.time = self.episode + 1, 0
        return self.obs(), {}

    def obs(self):
        return np.array([self.episode & 1, self.time], np.float32)

    def step(self, action):
        self.time += 1
        is_last, is_cut = self.time == LENGTH, bool(self.episode & 1)
        return self.obs(), float(self.time), is_last and not is_cut, is_last and is_cut, {}


make_env = Env
example = {
    "obs": np.zeros(2, np.float32),
    "action": np.float32(0),
    "reward": np.float32(0),
    "terminated": False,
    "truncated": False,
    "final_obs": np.zeros(2, np.float32),
}


def next_key():
    return None


def sample_actions(params, obs, seed):
    return np.float32(params["num_updates"])


@dataclasses.dataclass
class State:
    params: Any


jax.tree_util.register_dataclass(State, ["params"], [])


class Enough:
    """The last step: parameters of this run have acted. It tells the numbers of updates before and
    after the run."""

    newest_action = first = last = 0

    def __eq__(self, step):
        is_last = step >= 20 and self.newest_action > self.first
        if is_last:
            sys.stdout.write(f"{self.first} {self.last}\n")
        return is_last


max_steps = Enough()


@dataclasses.dataclass
class Agent:
    state: State

    def replace(self, state):  # by that of a checkpoint
        max_steps.first = int(state.params["num_updates"])
        return Agent(state)

    def update_high_utd(self, batch, utd_ratio):
        """Check a batch: `masks` alone say whether a state has a value."""
        batch = {name: np.asarray(leaf) for name, leaf in batch.items()}
        (episode, time), time_after = batch["observations"].T, batch["next_observations"][:, 1]
        assert (time_after == time + 1).all()
        assert (batch["next_observations"][:, 0] == episode).all()
        assert (batch["rewards"] == time_after).all()
        has_ended = (time_after == LENGTH) & (episode == 0)
        assert (batch["masks"] == ~has_ended).all()
        target = batch["rewards"] + GAMMA * batch["masks"] * 100
        assert np.allclose(target, time_after + np.where(has_ended, 0, 90))
        assert len(time) == 32 * utd_ratio
        max_steps.newest_action = max(max_steps.newest_action, batch["actions"].max())
        max_steps.last = int(self.state.params["num_updates"]) + 1
        return Agent(State({"num_updates": np.int32(max_steps.last)})), {}


def make_agent():
    return Agent(State({"num_updates": np.int32(0)}))

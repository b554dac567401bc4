"""Stable-Baselines3's SAC on observations of an image and a vector, in half the memory of its own
buffer.

    python examples/sb3_dict_sac.py --seed 0  # 2 minutes on two cores; writes out/sb3_dict_sac.png

A point moves in a square, and is to come to a spot that only the image shows; the vector says where
the point is. What to look at: SAC is Stable-Baselines3's own, and `replay_buffer_class=` is all
that differs. Its `DictReplayBuffer` stores each observation twice, as what was seen and as what was
seen next, and refuses `optimize_memory_usage`. Here it is stored once, and yet the last observation
of each episode, which ends by a time limit, is the true one, and is bootstrapped from.

Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018).
"""

import argparse
import pathlib
import sys
import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from matplotlib.figure import Figure
from stable_baselines3 import SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from tqdm import tqdm

import jaxreplay.sb3

SIZE = 36  # pixels of the square's edge: the least that Stable-Baselines3's CNN takes
SPOT = 8  # pixels of the spot's edge
STEPS = 20  # of an episode
SPEED = 0.25  # of the square's edge of 2, at the most, in one step
NUM_ENVS = 4
EPISODES = 100  # of an evaluation


class Spot(gymnasium.Env):
    """The reward of a step is minus the distance to the spot."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
        position=spaces.Box(-1, 1, (2,), np.float32),
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        column, row = self.np_random.integers(0, SIZE - SPOT, 2)
        self.spot = (np.array([column, row]) + SPOT / 2) / SIZE * 2 - 1  # its middle
        self.image = np.zeros((SIZE, SIZE, 3), np.uint8)
        self.image[row : row + SPOT, column : column + SPOT] = 255
        return self._obs(), {}

    def step(self, action):
        self.position = np.clip(self.position + SPEED * action, -1, 1).astype(np.float32)
        return self._obs(), -float(np.linalg.norm(self.position - self.spot)), False, False, {}

    def _obs(self):
        return {"image": self.image, "position": self.position}


class Progress(BaseCallback):
    """A progress bar, and the mean return of the latest episodes."""

    def _on_training_start(self):
        self.bar = tqdm(total=self.locals["total_timesteps"], unit="step")
        self.returns = []

    def _on_step(self):
        self.bar.update(self.training_env.num_envs)
        if self.model.ep_info_buffer and self.n_calls % STEPS == 0:
            self.returns.append(
                (self.num_timesteps, np.mean([info["r"] for info in self.model.ep_info_buffer]))
            )
            self.bar.set_postfix({"return": f"{self.returns[-1][1]:.1f}"})
        return True

    def _on_training_end(self):
        self.bar.close()


def make_envs(num_envs, seed):
    return make_vec_env(
        lambda: gymnasium.wrappers.TimeLimit(Spot(), STEPS), n_envs=num_envs, seed=seed
    )


def evaluate(model, seed):
    """The mean return of an episode, acting without noise."""
    envs = make_envs(EPISODES, seed)
    obs, total = envs.reset(), 0.0
    for _ in range(STEPS):
        action, _ = model.predict(obs, deterministic=True)
        obs, reward, _, _ = envs.step(action)
        total += reward.mean()
    return float(total)


def bytes_of_theirs(buffer):
    """What Stable-Baselines3's own buffer of the same size takes for a transition."""
    theirs = buffers.DictReplayBuffer(
        buffer.buffer_size * buffer.n_envs,
        buffer.observation_space,
        buffer.action_space,
        n_envs=buffer.n_envs,
    )
    leaves = [
        *theirs.observations.values(),
        *theirs.next_observations.values(),
        theirs.actions,
        theirs.rewards,
        theirs.dones,
        theirs.timeouts,
    ]
    return sum(leaf.nbytes for leaf in leaves) / (theirs.buffer_size * theirs.n_envs)


def plot(returns, model, path):
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    curve, picture = figure.subplots(1, 2)
    curve.plot(*zip(*returns, strict=True))
    curve.set(
        xlabel="env steps",
        ylabel="return, mean of 100 episodes",
        title="SAC, with the image stored once",
    )
    envs = make_envs(1, 7)
    obs = envs.reset()
    path_taken = [obs["position"][0]]
    picture.imshow(obs["image"][0], extent=(-1, 1, 1, -1))
    for _ in range(STEPS - 1):
        obs, _, _, _ = envs.step(model.predict(obs, deterministic=True)[0])
        path_taken.append(obs["position"][0])
    picture.plot(*zip(*path_taken, strict=True), "r.-")
    picture.set(title="what it sees, and where it goes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12_000, help="env steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target", type=float, default=-8.0, help="mean return that counts as solved"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/sb3_dict_sac.png"))
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # for layers as small as these a second one costs more than it brings
    start = time.perf_counter()
    model = SAC(
        "MultiInputPolicy",
        make_envs(NUM_ENVS, options.seed),
        replay_buffer_class=jaxreplay.sb3.DictReplayBuffer,
        buffer_size=20_000,
        learning_starts=400,
        batch_size=64,
        learning_rate=1e-3,
        gamma=0.9,
        policy_kwargs={"net_arch": [64, 64]},
        seed=options.seed,
        device="cpu",
    )
    before = evaluate(model, options.seed + 1_000)
    progress = Progress()
    model.learn(options.steps, callback=progress)
    after = evaluate(model, options.seed + 1_000)
    plot(progress.returns, model, options.out)
    buffer = model.replay_buffer
    ours = buffer.nbytes / (buffer.buffer_size * buffer.n_envs)
    theirs = bytes_of_theirs(buffer)
    print(f"  env steps                  {options.steps:,}")
    print(f"  seconds                    {time.perf_counter() - start:.1f}")
    print(f"  return before              {before:.1f}")
    print(f"  return after               {after:.1f}")
    print(f"  bytes a transition         {ours:,.0f}")
    print(f"  bytes of SB3s              {theirs:,.0f}")
    print(f"  transitions held           {buffer.size() * buffer.n_envs:,}")
    print(f"  plot                       {options.out}")
    return {"reached": after >= options.target and ours < 0.55 * theirs, "return": after}


if __name__ == "__main__":
    sys.exit(not main()["reached"])

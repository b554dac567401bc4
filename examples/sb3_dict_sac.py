"""Stable-Baselines3's SAC on an image and a vector, in half the memory of its own buffer.

    python examples/sb3_dict_sac.py   # 3 minutes on two CPU cores; writes out/sb3_dict_sac.png

Copy `replay_buffer_class=jaxreplay.sb3.DictReplayBuffer`: the rest of SAC is Stable-Baselines3's.
Its own `DictReplayBuffer` stores each observation twice, as the current one and as the next one,
and does not accept `optimize_memory_usage`. Here each observation is stored once. The last
observation of each episode, which is cut by a time limit, is still the true one.

A point moves in a square towards a spot. Only the image shows the spot; the vector is the point's
position.

References:
  Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018).
"""

import sys
import time

import _common as common
import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from tqdm import tqdm

import jaxreplay.sb3

SIZE = 36  # pixels of the square's edge: the smallest that Stable-Baselines3's CNN accepts
SPOT = 8  # pixels of the spot's edge
STEPS = 20  # of an episode
SPEED = 0.25  # largest distance of a step; the square's edge is 2
NUM_ENVS = 4
EPISODES = 100  # in an evaluation


class Spot(gymnasium.Env):
    """An env whose reward is minus the distance to the spot."""

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
    """Show a progress bar with the mean return of the latest episodes."""

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
    """Return the mean return of an episode without noise in the actions."""
    envs = make_envs(EPISODES, seed)
    obs, total = envs.reset(), 0.0
    for _ in range(STEPS):
        action, _ = model.predict(obs, deterministic=True)
        obs, reward, _, _ = envs.step(action)
        total += reward.mean()
    return float(total)


def bytes_of_theirs(buffer):
    """Return the memory in bytes of a transition in Stable-Baselines3's own buffer."""
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


def main(argv=None):
    parser = common.parser(__doc__, out="out/sb3_dict_sac.png", steps=12_000)
    parser.add_argument("--target", type=float, default=-8.0, help="of the mean return")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # a second thread slows layers of this size down
    start = time.perf_counter()
    model = SAC(
        "MultiInputPolicy",
        make_envs(NUM_ENVS, args.seed),
        replay_buffer_class=jaxreplay.sb3.DictReplayBuffer,
        buffer_size=20_000,
        learning_starts=400,
        batch_size=64,
        learning_rate=1e-3,
        gamma=0.9,
        policy_kwargs={"net_arch": [64, 64]},
        seed=args.seed,
        device="cpu",
    )
    before = evaluate(model, args.seed + 1_000)
    progress = Progress()
    model.learn(args.steps, callback=progress)
    after = evaluate(model, args.seed + 1_000)
    buffer = model.replay_buffer
    ours = buffer.nbytes / (buffer.buffer_size * buffer.n_envs)
    theirs = bytes_of_theirs(buffer)
    curves = {"SAC": tuple(np.array(progress.returns).T)}
    common.plot(args.out, {"title": "Return, mean of 100 episodes", "curves": curves})
    return common.report(
        after >= args.target and ours < 0.55 * theirs,
        env_steps=args.steps,
        seconds=round(time.perf_counter() - start, 1),
        return_before=round(before, 1),
        return_after=round(after, 1),
        bytes_a_transition=round(ours),
        bytes_of_SB3s=round(theirs),
        transitions_held=buffer.size() * buffer.n_envs,
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: return >= the target, in half the memory")

"""A PyTorch DQN on Gymnasium's CartPole-v1, with prioritized replay: one file, no JAX to be seen.

    python examples/torch_dqn.py --seed 0  # a minute on two CPU cores; writes out/torch_dqn.png

What to look at: `jr.Replay` takes what the vector env returned, as NumPy arrays, and hands out
tensors. Gymnasium's vector envs reset an env in the step after its episode ended; told so by
`autoreset="next_step"`, the buffer gives the true last observation of each episode, and tells
`terminated`, past which there is no value, from `truncated`, past which there is. A target is
`reward + discount * value(next_obs)`, of 3 steps, or of fewer where the episode ended.

Sources: Mnih et al., "Human-level control through deep reinforcement learning" (2015); van Hasselt
et al., "Deep Reinforcement Learning with Double Q-learning" (2016); Schaul et al., "Prioritized
Experience Replay" (2016).
"""

import argparse
import copy
import pathlib
import sys
import time

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from tqdm import tqdm

import jaxreplay as jr

ENV = "CartPole-v1"
NUM_ENVS = 8
BATCH_SIZE = 128
DISCOUNT = 0.99
LEARNING_RATE = 1e-3
LEARNING_STARTS = 1_000  # env steps
# of actions are random: at first, at last, and the part of the run in which it falls
EXPLORATION = (1.0, 0.05, 0.3)
TARGET_PERIOD = 50  # gradient steps between copies of the network
EVALUATIONS = 20  # of a run: the network that did best is kept
EPISODES = 100  # of the last evaluation


def network(num_inputs, num_actions):
    layers = (
        torch.nn.Linear(num_inputs, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 128),
        torch.nn.ReLU(),
    )
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, num_actions))


def greedy(q, obs):
    with torch.no_grad():
        return q(torch.as_tensor(obs)).argmax(dim=1).numpy()


def train(steps, seed):
    """Returns the best network, its returns at each evaluation, [(env steps, mean return)], and the
    replay."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # for layers as small as these a second one costs more than it brings
    envs = gymnasium.make_vec(ENV, num_envs=NUM_ENVS)
    num_actions = int(envs.single_action_space.n)
    q = network(envs.single_observation_space.shape[0], num_actions)
    target_q, best, best_return, history = copy.deepcopy(q), q, -np.inf, []
    optimizer = torch.optim.Adam(q.parameters(), LEARNING_RATE)
    buffer = jr.prioritized(
        capacity=50_000,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        autoreset="next_step",
        n_step=3,
        gamma=DISCOUNT,
        min_size=BATCH_SIZE,
    )
    replay = jr.Replay(buffer, seed=seed, framework="torch")

    obs, _ = envs.reset(seed=seed)
    with tqdm(total=steps, unit="step", unit_scale=True) as bar:
        for done_steps in range(0, steps, NUM_ENVS):
            is_random = np.random.rand(NUM_ENVS) < exploration(done_steps / steps)
            action = np.where(
                is_random, np.random.randint(num_actions, size=NUM_ENVS), greedy(q, obs)
            )
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            replay.add(
                obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated
            )
            obs = next_obs
            if done_steps >= LEARNING_STARTS and replay.can_sample():
                learn(q, target_q, optimizer, replay, beta=0.4 + 0.6 * done_steps / steps)
                if done_steps // NUM_ENVS % TARGET_PERIOD == 0:
                    target_q.load_state_dict(q.state_dict())
            bar.update(NUM_ENVS)
            if done_steps * EVALUATIONS // steps != (done_steps + NUM_ENVS) * EVALUATIONS // steps:
                history.append((done_steps + NUM_ENVS, evaluate(q, seed + 1, episodes=10)))
                bar.set_postfix({"return": f"{history[-1][1]:.0f}"})
                if history[-1][1] >= best_return:
                    best, best_return = copy.deepcopy(q), history[-1][1]
    envs.close()
    return best, history, replay


def exploration(progress):
    first, last, part = EXPLORATION
    return max(last, first + (last - first) * progress / part)


def learn(q, target_q, optimizer, replay, beta):
    """One gradient step, and new priorities for what it learned from."""
    batch = replay.sample(beta=beta)
    item = batch.experience
    with torch.no_grad():
        action = q(item.next_obs).argmax(dim=1, keepdim=True)
        target = item.reward + item.discount * target_q(item.next_obs).gather(1, action)[:, 0]
    value = q(item.obs).gather(1, item.action[:, None].long())[:, 0]
    loss = (batch.weight * F.smooth_l1_loss(value, target, reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(q.parameters(), 10.0)
    optimizer.step()
    replay.update_priorities(batch.index, (target - value).detach().abs() + 1e-3)


def evaluate(q, seed, episodes):
    """The mean return of the first episode of so many envs."""
    envs = gymnasium.make_vec(ENV, num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    total, is_over = np.zeros(episodes), np.zeros(episodes, bool)
    while not is_over.all():
        obs, reward, terminated, truncated, _ = envs.step(greedy(q, obs))
        total += np.where(is_over, 0, reward)
        is_over |= terminated | truncated
    envs.close()
    return float(total.mean())


def plot(history, replay, path):
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    returns, priorities = figure.subplots(1, 2)
    returns.plot(*zip(*history, strict=True), marker="o")
    returns.set(xlabel="env steps", ylabel="return of an evaluation", title="DQN on CartPole-v1")
    error = (replay.sample(2_000).probability.numpy()).clip(1e-12)
    priorities.hist(np.log10(error), bins=40)
    priorities.set(
        xlabel="log10 of a drawn row's probability", ylabel="rows", title="what is replayed"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="env steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target", type=float, default=475.0, help="mean return that counts as solved"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/torch_dqn.png"))
    options = parser.parse_args(arguments)

    start = time.perf_counter()
    best, history, replay = train(options.steps, options.seed)
    seconds = time.perf_counter() - start
    score = evaluate(best, options.seed + 1_000, EPISODES)
    plot(history, replay, options.out)
    print(f"  env steps          {options.steps:,}")
    print(f"  env steps/s        {options.steps / seconds:,.0f}")
    print(f"  seconds            {seconds:.1f}")
    print(f"  evaluation return  {score:.1f}")
    print(f"  rows held          {len(replay):,}")
    print(f"  plot               {options.out}")
    return {"reached": score >= options.target, "return": score}


if __name__ == "__main__":
    sys.exit(not main()["reached"])

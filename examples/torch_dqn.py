"""A PyTorch DQN on Gymnasium's CartPole with prioritized replay; no JAX code is needed.

    python examples/torch_dqn.py   # 2 minutes on two CPU cores; writes out/torch_dqn.png

Copy `train` and `learn`. `jr.Replay` takes the NumPy arrays of the vector env and returns tensors.
Gymnasium's vector envs reset in the step after an episode has ended. With
`autoreset=jr.autoreset.of(envs)`, samples have the true last observation of each episode.
The target is `reward + discount * value(next_obs)`, over 3 steps, or fewer at the end of an
episode. The discount is 0 after a termination, and not after a time limit.

References:
  Mnih et al., "Human-level control through deep reinforcement learning" (2015).
  van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning" (2016).
  Schaul et al., "Prioritized Experience Replay" (2016).
"""

import copy
import sys
import time

import _common as common
import gymnasium
import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import jaxreplay as jr

ENV, NUM_ENVS = "CartPole-v1", 8
BATCH_SIZE, LEARNING_RATE = 128, 1e-3
LEARNING_STARTS = 1_000  # env steps
TARGET_PERIOD = 50  # gradient steps between copies of the network
EVALUATIONS = 20  # in a run: the network with the best one is kept


def network(num_inputs, num_actions):
    return torch.nn.Sequential(
        torch.nn.Linear(num_inputs, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, num_actions),
    )


def greedy(q, obs):
    with torch.no_grad():
        return q(torch.as_tensor(obs)).argmax(dim=1).numpy()


def train(steps, seed):
    """Return the best network, its evaluations [(env steps, mean return)], and the replay."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a second thread slows layers of this size down
    envs = gymnasium.make_vec(ENV, num_envs=NUM_ENVS)
    num_actions = int(envs.single_action_space.n)
    q = network(envs.single_observation_space.shape[0], num_actions)
    target_q, best, best_return, history = copy.deepcopy(q), q, -np.inf, []
    optimizer = torch.optim.Adam(q.parameters(), LEARNING_RATE)
    buffer = jr.prioritized(
        capacity=50_000,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        n_step=3,
        gamma=0.99,
        autoreset=jr.autoreset.of(envs),
    )
    replay = jr.Replay(buffer, seed=seed, framework="torch")

    obs, _ = envs.reset(seed=seed)
    with tqdm(total=steps, unit="step", unit_scale=True) as bar:
        for step in range(0, steps, NUM_ENVS):
            epsilon = max(0.05, 1 - 3 * step / steps)
            is_random = random.random(NUM_ENVS) < epsilon
            action = np.where(
                is_random, random.integers(num_actions, size=NUM_ENVS), greedy(q, obs)
            )
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            replay.add(
                obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated
            )
            obs = next_obs
            if step >= LEARNING_STARTS:
                learn(q, target_q, optimizer, replay, beta=0.4 + 0.6 * step / steps)
                if step // NUM_ENVS % TARGET_PERIOD == 0:
                    target_q.load_state_dict(q.state_dict())
            bar.update(NUM_ENVS)
            if step * EVALUATIONS // steps != (step + NUM_ENVS) * EVALUATIONS // steps:
                history.append((step + NUM_ENVS, evaluate(q, seed + 1, episodes=10)))
                bar.set_postfix({"mean return": f"{history[-1][1]:.0f}"})
                if history[-1][1] >= best_return:
                    best, best_return = copy.deepcopy(q), history[-1][1]
    envs.close()
    return best, history, replay


def learn(q, target_q, optimizer, replay, beta):
    """Take one gradient step, and set new priorities for the batch."""
    batch = replay.sample(beta=beta)
    t = batch.experience
    with torch.no_grad():
        action = q(t.next_obs).argmax(dim=1, keepdim=True)
        target = t.reward + t.discount * target_q(t.next_obs).gather(1, action)[:, 0]
    value = q(t.obs).gather(1, t.action[:, None].long())[:, 0]
    loss = (batch.weight * F.smooth_l1_loss(value, target, reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(q.parameters(), 10.0)
    optimizer.step()
    replay.update_priorities(batch.index, (target - value).detach().abs() + 1e-3)


def evaluate(q, seed, episodes):
    """Return the mean return of the first episode of each env."""
    envs = gymnasium.make_vec(ENV, num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    total, is_over = np.zeros(episodes), np.zeros(episodes, bool)
    while not is_over.all():
        obs, reward, terminated, truncated, _ = envs.step(greedy(q, obs))
        total += np.where(is_over, 0, reward)
        is_over |= terminated | truncated
    envs.close()
    return float(total.mean())


def main(argv=None):
    parser = common.parser(__doc__, out="out/torch_dqn.png", steps=100_000)
    parser.add_argument("--target", type=float, default=475.0, help="of the mean return")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    best, history, replay = train(args.steps, args.seed)
    seconds = time.perf_counter() - began
    final = round(evaluate(best, args.seed + 1_000, episodes=100), 1)
    curves = {"DQN": tuple(np.array(history).T)}
    common.plot(args.out, {"title": "Return, mean of 10 episodes", "curves": curves})
    return common.report(
        final >= args.target,
        env_steps=args.steps,
        steps_per_second=round(args.steps / seconds),
        evaluation_return=final,
        seconds=round(seconds, 1),
        rows_held=len(replay),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

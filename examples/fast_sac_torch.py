"""SAC in PyTorch on 1,024 pendulums that are simulated in PyTorch, as GPU simulators are used.

    python examples/fast_sac_torch.py   # 75 seconds on two CPU cores; writes out/fast_sac_torch.png

Copy `train` and `learn`. The critics see more than the actor, here each pendulum's length and mass.
Their observation begins with the actor's, so it alone is stored, once: no second copy for the
actor, none for `next_obs`. One `sample` has the batches of several updates. Statistics of the
observations normalize what is sampled, as they are at that time. The tensors stay on their device.

Pendulums reset within the step that is done, which returns the final observation, as ManiSkill's
envs do. They begin at random times of their episodes, so that not all end together.

References:
  Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with its automatic
  temperature.
  Seo et al., "FastTD3: Simple, Fast, and Capable Reinforcement Learning for Humanoid Control"
  (2025), https://arxiv.org/abs/2505.22642, for parallel envs, large batches and n steps.
"""

import copy
import math
import sys
import time

import _common as common
import torch
from tqdm import tqdm

import jaxreplay as jr

NUM_ENVS, LENGTH = 1_024, 200  # steps of an episode
SEEN, ALL = 3, 5  # numbers of an observation that the actor sees, and those that the critics see
BATCH_SIZE, UPDATES = 1_024, 2  # in a step of the envs
GAMMA, POLYAK, LEARNING_RATE = 0.97, 0.05, 1e-3
LEARNING_STARTS = 10  # steps of each env


class Pendulums:
    """Pendulums to swing up, of different lengths and masses."""

    def __init__(self, num_envs, device, seed):
        self.random = torch.Generator(device).manual_seed(seed)
        self.num_envs, self.device = num_envs, device
        self.state = self._new()
        self.age = self._uniform(1)[:, 0].mul(LENGTH).long()

    def _uniform(self, size):
        return torch.rand(self.num_envs, size, generator=self.random, device=self.device)

    def _new(self):
        """Return angles, speeds, lengths and masses, [E, 4]."""
        low = torch.tensor([-math.pi, -1.0, 0.8, 0.8], device=self.device)
        high = torch.tensor([math.pi, 1.0, 1.2, 1.2], device=self.device)
        return low + self._uniform(4) * (high - low)

    def obs(self):
        angle, speed, length, mass = self.state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed, length, mass], dim=1)

    def step(self, action):
        """Return obs, reward, terminated, truncated and the final obs, [E, ...]."""
        angle, speed, length, mass = self.state.unbind(1)
        force = 2 * action[:, 0]
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        reward = -(off**2 + 0.1 * speed**2 + 0.001 * force**2)
        gravity = 15 / length * angle.sin()
        speed = (speed + 0.05 * (gravity + 3 / (mass * length**2) * force)).clamp(-8, 8)
        self.state = torch.stack([angle + 0.05 * speed, speed, length, mass], dim=1)
        self.age += 1
        truncated, final_obs = self.age >= LENGTH, self.obs()
        self.state = torch.where(truncated[:, None], self._new(), self.state)
        self.age[truncated] = 0
        return self.obs(), reward, torch.zeros_like(truncated), truncated, final_obs


class Statistics:
    """Mean and variance of all observations so far."""

    def __init__(self, device):
        self.count, self.mean, self.variance = (
            1e-4,
            *(f(ALL, device=device) for f in (torch.zeros, torch.ones)),
        )

    def update(self, obs):
        variance, mean = torch.var_mean(obs, dim=0, correction=0)
        share, off = len(obs) / (self.count + len(obs)), mean - self.mean
        self.variance = self.variance.lerp(variance, share) + off**2 * share * (1 - share)
        self.mean = self.mean + share * off
        self.count += len(obs)

    def __call__(self, obs):
        return (obs - self.mean) / (self.variance + 1e-5).sqrt()


def network(num_inputs, num_outputs):
    layers, width = [], num_inputs
    for size in (128, 128):
        layers += [torch.nn.Linear(width, size), torch.nn.LayerNorm(size), torch.nn.ReLU()]
        width = size
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, num_outputs))


class Agent(torch.nn.Module):
    """An actor, two critics and their targets, and the temperature."""

    def __init__(self):
        super().__init__()
        self.actor = network(SEEN, 2)
        self.critics = torch.nn.ModuleList([network(ALL + 1, 1) for _ in range(2)])
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.nn.Parameter(torch.tensor(-2.0))

    def act(self, obs):
        """Return actions in [-1, 1], and the logarithms of their densities."""
        mean, log_std = self.actor(obs[:, :SEEN]).chunk(2, dim=1)
        policy = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
        raw = policy.rsample()
        change = 2 * (math.log(2) - raw - torch.nn.functional.softplus(-2 * raw))
        return raw.tanh(), (policy.log_prob(raw) - change).sum(dim=1)

    def value(self, critics, obs, action):
        """Return the values of both critics, [2, B]."""
        return torch.stack([critic(torch.cat([obs, action], 1))[:, 0] for critic in critics])


def train(steps, seed, device="cpu"):
    """Return the agent, its statistics, its evaluations [(env steps, return)], and the replay."""
    torch.manual_seed(seed)
    agent, statistics = Agent().to(device), Statistics(device)
    of_actor = torch.optim.Adam(agent.actor.parameters(), LEARNING_RATE)
    others = [*agent.critics.parameters(), agent.log_alpha]
    optimizers = of_actor, torch.optim.Adam(others, LEARNING_RATE)
    buffer = jr.uniform(
        capacity=NUM_ENVS * 512,
        num_envs=NUM_ENVS,
        batch_size=UPDATES * BATCH_SIZE,
        n_step=3,
        gamma=GAMMA,
        autoreset=jr.autoreset.MANISKILL,
    )
    replay = jr.Replay(buffer, framework="torch", seed=seed)
    envs, history = Pendulums(NUM_ENVS, device, seed), []
    obs = envs.obs()
    for step in tqdm(range(1, steps + 1), unit="step"):
        statistics.update(obs)
        with torch.no_grad():
            action, _ = agent.act(statistics(obs))
        next_obs, reward, terminated, truncated, final_obs = envs.step(action)
        ends = {"terminated": terminated, "truncated": truncated, "final_obs": final_obs}
        replay.add(obs=obs, action=action, reward=reward, **ends)
        obs = next_obs
        if step > LEARNING_STARTS:
            learn(agent, optimizers, statistics, replay.sample().experience)
        if step % max(steps // 10, 1) == 0 or step == steps:
            history.append((step * NUM_ENVS, evaluate(agent, statistics, seed + 1, device)))
    return agent, statistics, history, replay


def learn(agent, optimizers, statistics, batch):
    """Take `UPDATES` gradient steps, each with its part of a batch."""
    leaves = [statistics(batch.obs), statistics(batch.next_obs)]
    leaves += [batch.action, batch.reward, batch.discount]
    for obs, next_obs, action, reward, discount in zip(
        *(leaf.chunk(UPDATES) for leaf in leaves), strict=True
    ):
        alpha = agent.log_alpha.exp()
        with torch.no_grad():
            next_action, log_p = agent.act(next_obs)
            value = agent.value(agent.targets, next_obs, next_action).min(dim=0).values
            target = reward + discount * (value - alpha * log_p)
        new_action, log_p = agent.act(obs)
        losses = (
            (alpha.detach() * log_p - agent.value(agent.critics, obs, new_action).mean(0)).mean(),
            (agent.value(agent.critics, obs, action) - target).square().mean()
            - alpha * (log_p.detach() - 1).mean(),
        )
        for optimizer, loss in zip(optimizers, losses, strict=True):
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for new, old in zip(
                agent.critics.parameters(), agent.targets.parameters(), strict=True
            ):
                old.lerp_(new, POLYAK)


@torch.no_grad()
def evaluate(agent, statistics, seed, device):
    """Return the mean return of an episode of 256 pendulums, with the mean actions."""
    envs = Pendulums(256, device, seed)
    envs.age[:], total = 0, 0.0
    for _ in range(LENGTH):
        mean = agent.actor(statistics(envs.obs())[:, :SEEN])[:, :1]
        total += envs.step(mean.tanh())[1].mean().item()
    return total


def main(argv=None):
    parser = common.parser(__doc__, out="out/fast_sac_torch.png", steps=600)
    parser.add_argument("--seeds", type=int, default=3, help="runs, one after another")
    parser.add_argument("--target", type=float, default=-200.0, help="of the mean return")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a second thread slows layers of this size down
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began, curves, finals = time.perf_counter(), {}, []
    for seed in range(args.seed, args.seed + args.seeds):
        *_, history, replay = train(args.steps, seed, device)
        curves[f"seed {seed}"] = tuple(zip(*history, strict=True))
        finals.append(round(history[-1][1], 1))
    seconds = time.perf_counter() - began
    common.plot(args.out, {"title": "Return of 200 steps", "curves": curves})
    return common.report(
        min(finals) >= args.target,
        env_steps=args.steps * NUM_ENVS * args.seeds,
        steps_per_second=round(args.steps * NUM_ENVS * args.seeds / seconds),
        worst_return=min(finals),
        seconds=round(seconds, 1),
        rows_held=len(replay),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: a mean return is below the target")

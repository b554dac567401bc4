"""SAC with demonstrations, fewer as it learns, on a sparse task: in JAX, and in PyTorch.

    python examples/rlpd.py --seeds 3           # a minute on two CPU cores; writes out/rlpd.png
    python examples/rlpd.py --framework torch   # the same agent in PyTorch, one seed

Copy `iteration` and `MIXED`, or `train_torch`. `jr.mix` takes a part of each batch from the
demonstrations. Its `fractions` may change in every step, and nothing is compiled anew. A layer norm
in the critics keeps values of actions that no row has from growing.

The car gets 100 on the hill, and pays for every push. SAC without demonstrations learns not to
push. They are made here, by a policy that pushes the way that the car rolls.

References:
  Ball et al., "Efficient Online Reinforcement Learning with Offline Data" (2023): half of each
  batch, 10 critics and more updates a step; here there are two critics and one update.
"""

import copy
import functools
import sys
import time
from typing import Any

import _common as common
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxreplay as jr

NUM_ENVS, BATCH_SIZE, RATE = 8, 256, 1e-3
FIRST, LAST = 0.75, 0.25  # part of demonstrations in a batch, at first and in the end
NAME, SCALE = "MountainCarContinuous-v0", np.float32([1.0, 15.0])  # of position and velocity
ENVS, TEST_ENVS = common.gymnax_envs(NAME, NUM_ENVS), common.gymnax_envs(NAME, 100)
OPTIMIZER = optax.adam(RATE)
OBS, ACTION = jnp.zeros(2), jnp.zeros(1)
EXAMPLE = jr.Step(OBS, ACTION, 0.0, terminated=False, truncated=False, final_obs=OBS)


def buffers(autoreset):
    """Return a mixture of demonstrations and the rows of the run, and a buffer of these alone."""
    shared = {"num_envs": NUM_ENVS, "batch_size": BATCH_SIZE, "n_step": 5, "gamma": 0.99}
    demos = jr.uniform(capacity=16_384, autoreset="same_step", **shared)
    online = jr.uniform(capacity=65_536, min_size=1_000, autoreset=autoreset, **shared)
    half = BATCH_SIZE // 2
    return jr.mix(demos=(demos, half), online=(online, half)), jr.mix(online=(online, BATCH_SIZE))


MIXED, ALONE = buffers(jr.autoreset.GYMNAX)
DEMOS, ONLINE = (buffer for _, buffer, _ in MIXED.members)


class Actor(nn.Module):
    """Obs -> mean and log of the standard deviation of the action before tanh."""

    @nn.compact
    def __call__(self, obs):
        x = nn.relu(nn.Dense(64)(nn.relu(nn.Dense(64)(obs * SCALE))))
        mean, log_std = jnp.split(nn.Dense(2)(x), 2, axis=-1)
        return mean, jnp.clip(log_std, -5, 2)


class Critics(nn.Module):
    """Obs, action -> values of two critics, float32[B, 2]."""

    @nn.compact
    def __call__(self, obs, action):
        x, values = jnp.concatenate([obs * SCALE, action], axis=-1), []
        for _ in range(2):
            y = x
            for _ in range(2):
                y = nn.relu(nn.LayerNorm()(nn.Dense(64)(y)))
            values.append(nn.Dense(1)(y))
        return jnp.concatenate(values, axis=-1)


ACTOR, CRITICS = Actor(), Critics()


class Carry(flax.struct.PyTreeNode):
    params: dict[str, Any]  # of "actor", "critics" and "log_alpha"
    target_params: Any  # of the critics
    opt_state: Any
    states: dict[str, jr.ReplayState]  # of the buffers, by name
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 2]
    key: jax.Array
    number: jax.Array  # int32[], of iterations so far


def init(demos, key):
    key, reset_key, actor_key, critics_key = jax.random.split(key, 4)
    obs, env_state = ENVS.reset(reset_key)
    critics = CRITICS.init(critics_key, OBS, ACTION)
    params = {"actor": ACTOR.init(actor_key, OBS), "critics": critics, "log_alpha": jnp.zeros(())}
    states = {"online": ONLINE.init(EXAMPLE), **demos}
    opt_state, number = OPTIMIZER.init(params), jnp.int32(0)
    return Carry(params, critics, opt_state, states, env_state, obs, key, number)


def act(actor, obs, key):
    """Return random actions in [-1, 1], and the logarithms of their probability densities."""
    mean, log_std = ACTOR.apply(actor, obs)
    noise = jax.random.normal(key, mean.shape)
    before = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    log_slope = 2 * (jnp.log(2) - before - jax.nn.softplus(-2 * before))  # of tanh
    return jnp.tanh(before), (log_prob - log_slope).sum(-1)


def iteration(buffer, carry, total):
    """One step of every env, and one gradient step from a mixed batch."""
    key, act_key, env_key, sample_key, update_key = jax.random.split(carry.key, 5)
    action, _ = act(carry.params["actor"], carry.obs, act_key)
    obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
        env_key, carry.env_state, action
    )
    flags = {"terminated": terminated, "truncated": truncated}
    taken = jr.Step(carry.obs, action, reward.reshape(-1), **flags, final_obs=final_obs)
    states = carry.states | {"online": ONLINE.add(carry.states["online"], taken)}

    part = FIRST + (LAST - FIRST) * carry.number / total
    options = {"fractions": {"demos": part, "online": 1 - part}} if buffer is MIXED else {}
    batch = buffer.sample(states, sample_key, **options)
    gradient, log = jax.grad(loss, has_aux=True)(
        carry.params, carry.target_params, batch, update_key
    )
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params["critics"], carry.target_params, 0.01)
    number = carry.number + 1
    return Carry(params, target_params, opt_state, states, env_state, obs, key, number), log


def loss(params, target_params, batch, key):
    """Return the sum of three losses, float32[], each of which changes its own parameters."""
    t, (next_key, key) = batch.experience, jax.random.split(key)
    alpha, stop = jnp.exp(params["log_alpha"]), jax.lax.stop_gradient

    next_action, next_log_prob = act(params["actor"], t.next_obs, next_key)
    next_value = CRITICS.apply(target_params, t.next_obs, next_action).min(-1)
    target = stop(t.reward + t.discount * (next_value - alpha * next_log_prob))
    error = CRITICS.apply(params["critics"], t.obs, t.action) - target[:, None]

    action, log_prob = act(params["actor"], t.obs, key)
    value = CRITICS.apply(stop(params["critics"]), t.obs, action).min(-1)
    temperature = -alpha * stop(log_prob - 1.0)  # minus the number of action dimensions
    total = jnp.square(error).sum(-1) + stop(alpha) * log_prob - value + temperature
    part = jr.masked_mean((batch.source == 0).astype(jnp.float32), batch.is_valid)
    return jnp.mean(batch.weight * total), {"demos": part}


def evaluate(carry, key):
    """Return the mean return of the policy without noise, float32[]."""

    def mean_action(_, obs):
        return None, jnp.tanh(ACTOR.apply(carry.params["actor"], obs)[0])

    return common.evaluate(TEST_ENVS, mean_action, key)


def demonstrations(key, num_steps=1_000):
    """Return the state of a buffer with steps of a policy that pushes the way the car rolls."""

    def once(carry, key):
        state, obs, env_state = carry
        act_key, env_key = jax.random.split(key)
        noise = 0.3 * jax.random.normal(act_key, (NUM_ENVS, 1))
        action = jnp.clip(jnp.sign(obs[:, 1:]) + noise, -1, 1)
        next_obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
            env_key, env_state, action
        )
        flags = {"terminated": terminated, "truncated": truncated}
        step = jr.Step(obs, action, reward.reshape(-1), **flags, final_obs=final_obs)
        return (DEMOS.add(state, step), next_obs, env_state), None

    reset_key, key = jax.random.split(key)
    carry = DEMOS.init(EXAMPLE), *ENVS.reset(reset_key)
    keys = jax.random.split(key, num_steps)
    return jax.jit(lambda carry: jax.lax.scan(once, carry, keys)[0][0])(carry)


# The same agent in PyTorch.


def layers(num_inputs, num_outputs, has_norm):
    import torch

    made = []
    for size in (num_inputs, 64):
        made += [torch.nn.Linear(size, 64), *[torch.nn.LayerNorm(64)] * has_norm, torch.nn.ReLU()]
    return torch.nn.Sequential(*made, torch.nn.Linear(64, num_outputs))


class TorchAgent:
    def __init__(self, seed):
        import torch

        self.torch, self.scale = torch, torch.as_tensor(SCALE)
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # a second thread slows layers of this size down
        self.actor = layers(2, 2, has_norm=False)
        self.critics = torch.nn.ModuleList([layers(3, 1, has_norm=True) for _ in range(2)])
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros((), requires_grad=True)
        parameters = [*self.actor.parameters(), *self.critics.parameters(), self.log_alpha]
        self.optimizer = torch.optim.Adam(parameters, RATE)

    def act(self, obs):
        mean, log_std = self.actor(obs * self.scale).chunk(2, dim=-1)
        noise = self.torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        before = noise.rsample()
        log_slope = 2 * (np.log(2) - before - self.torch.nn.functional.softplus(-2 * before))
        return before.tanh(), (noise.log_prob(before) - log_slope).sum(-1)

    def values(self, critics, obs, action):
        x = self.torch.cat([obs * self.scale, action], dim=-1)
        return self.torch.cat([critic(x) for critic in critics], dim=-1)

    def learn(self, batch):
        """Take one gradient step from a batch of the replay, whose leaves are tensors."""
        t, alpha, torch = batch.experience, self.log_alpha.exp(), self.torch
        with torch.no_grad():
            action, log_prob = self.act(t.next_obs)
            next_value = self.values(self.targets, t.next_obs, action).amin(-1)
            target = t.reward + t.discount * (next_value - alpha * log_prob)
        error = self.values(self.critics, t.obs, t.action) - target[:, None]
        action, log_prob = self.act(t.obs)
        for one in self.critics.parameters():  # the actor's loss does not change them
            one.requires_grad_(False)
        value = self.values(self.critics, t.obs, action).amin(-1)
        for one in self.critics.parameters():
            one.requires_grad_(True)
        temperature = -alpha * (log_prob - 1.0).detach()
        total = error.square().sum(-1) + alpha.detach() * log_prob - value + temperature
        self.optimizer.zero_grad()
        (batch.weight * total).mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for ours, target in zip(
                self.critics.parameters(), self.targets.parameters(), strict=True
            ):
                target.lerp_(ours, 0.01)


def train_torch(steps, seed, demos):
    """Return env steps and returns of episodes, in the order in which they ended."""
    import gymnasium
    import torch
    from tqdm import tqdm

    envs, agent = gymnasium.make_vec(NAME, num_envs=NUM_ENVS), TorchAgent(seed)
    mixed, _ = buffers(jr.autoreset.of(envs))
    replay = jr.Replay(mixed, framework="torch", seed=seed)
    replay.merge(demos, member="demos")
    obs, _ = envs.reset(seed=seed)
    total, returns = np.zeros(NUM_ENVS), []
    for step in tqdm(range(0, steps, NUM_ENVS), unit="step", unit_scale=NUM_ENVS):
        with torch.no_grad():
            action = agent.act(torch.as_tensor(obs))[0].numpy()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        flags = {"terminated": terminated, "truncated": truncated}
        replay.add(jr.Step(obs, action, np.float32(reward), **flags), member="online")
        obs, total = next_obs, total + reward
        for env in np.flatnonzero(terminated | truncated):
            returns.append((step, total[env]))
            total[env] = 0
        part = FIRST + (LAST - FIRST) * step / steps
        if replay.can_sample():
            agent.learn(replay.sample(fractions={"demos": part, "online": 1 - part}))
    envs.close()
    return np.array(returns).T


def main(argv=None):
    parser = common.parser(__doc__, out="out/rlpd.png", steps=40_000, seeds=3)
    parser.add_argument("--framework", choices=["jax", "torch"], default="jax")
    args = parser.parse_args(argv)
    demos, began = demonstrations(jax.random.key(args.seed)), time.perf_counter()
    if args.framework == "torch":
        steps, returns = train_torch(args.steps, args.seed, demos)
        curves, last = {"episodes of the run": (steps, returns)}, returns[-20:].mean()
        figures = {"return_with_demos": round(float(last), 1)}
        reached = last >= 80  # its actions are random
    else:
        runs = {}
        for name, (buffer, states) in {
            "with demos": (MIXED, {"demos": demos}),
            "alone": (ALONE, {}),
        }.items():
            made = functools.partial(init, states)
            chunk = common.scanned(functools.partial(iteration, buffer))
            options = {"steps_per_iteration": NUM_ENVS, "name": name}
            runs[name] = common.train(args, made, chunk, evaluate, **options)
        curves = {name: (run["steps"], run["returns"]) for name, run in runs.items()}
        last = {name: float(run["returns"][-1].mean()) for name, run in runs.items()}
        figures = {f"return_{name}": round(value, 1) for name, value in last.items()}
        reached = last["with demos"] >= 90 and last["alone"] < 10
    common.plot(args.out, {"title": "Return", "curves": curves})
    return common.report(
        bool(reached),
        env_steps=args.steps,
        **figures,
        seconds=round(time.perf_counter() - began, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

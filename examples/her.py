"""DQN on bit-flip, with goals in hindsight and without.

    python examples/her.py --seeds 2   # 2 minutes on two CPU cores; writes out/her.png

Copy `buffers`: the two agents differ by `jr.hindsight(...)` alone. No step and no goal is stored
twice. When an item is sampled, its goal is replaced by one that its episode reached later, and
`is_reached` computes the reward and the termination again.

An env holds `--bits` bits, an action flips one of them, and the goal is one pattern out of
2 ** bits. The reward is -1 until the goal is reached. The agent without hindsight never reaches it,
and therefore learns nothing.

References:
  Andrychowicz et al., "Hindsight Experience Replay" (2017), sections 3.1 and 4.1, figure 1.
  Here an episode ends where its goal is reached, and the target network is a moving average.
"""

import functools
import sys
from typing import Any

import _common as common
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

NUM_ENVS, NUM_EPISODES, GAMMA = 16, 1_000, 0.98
OPTIMIZER = optax.adam(1e-3)


def buffers():
    """Return both buffers: the same transitions, read in two ways."""
    plain = jr.uniform(
        capacity=131_072, num_envs=NUM_ENVS, batch_size=256, gamma=GAMMA, autoreset="same_step"
    )
    hindsight = jr.hindsight(
        plain,
        reward_fn=lambda achieved, goal, step: is_reached(achieved, goal) - 1.0,
        terminated_fn=lambda achieved, goal, step: is_reached(achieved, goal),
        strategy="future",
        relabel_fraction=0.8,
    )
    return {"plain": plain, "hindsight": hindsight}


class Env(flax.struct.PyTreeNode):
    """E envs of n bits."""

    bits: jax.Array  # bool[E, n]
    goal: jax.Array  # bool[E, n]
    time: jax.Array  # int32[E]: steps of the episode so far

    @property
    def obs(self):
        return {"achieved_goal": self.bits, "desired_goal": self.goal}


class Carry(flax.struct.PyTreeNode):
    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: jr.ReplayState
    env: Env
    key: jax.Array


def reset(key, num_envs, num_bits):
    bits, goal = jax.random.bernoulli(key, shape=(2, num_envs, num_bits))
    return Env(bits, goal, jnp.zeros(num_envs, jnp.int32))


def step(env, action, key):
    """Return the next envs, new episodes where one ended, and the step to store."""
    num_envs, num_bits = env.bits.shape
    flipped = env.bits ^ jax.nn.one_hot(action, num_bits, dtype=bool)
    after = env.replace(bits=flipped, time=env.time + 1)
    terminated = is_reached(after.bits, after.goal)
    truncated = ~terminated & (after.time == num_bits)
    flags = {"terminated": terminated, "truncated": truncated}
    stored = jr.Step(env.obs, action, terminated - 1.0, **flags, final_obs=after.obs)
    new = reset(key, num_envs, num_bits)
    return common.where(terminated | truncated, new, after), stored


def is_reached(achieved, goal):
    return jnp.all(achieved == goal, axis=-1)


class Network(nn.Module):
    """Obs -> action values float32[..., n]."""

    @nn.compact
    def __call__(self, obs):
        x = jnp.concatenate([obs["achieved_goal"], obs["desired_goal"]], axis=-1) * 2.0 - 1
        return nn.Dense(obs["desired_goal"].shape[-1])(nn.relu(nn.Dense(256)(x)))


NETWORK = Network()


def init(buffer, num_bits, key):
    key, reset_key, network_key = jax.random.split(key, 3)
    env = reset(reset_key, NUM_ENVS, num_bits)
    params = NETWORK.init(network_key, env.obs)
    example = jax.tree.map(lambda x: x[0], step(env, jnp.zeros(NUM_ENVS, jnp.int32), key)[1])
    return Carry(params, params, OPTIMIZER.init(params), buffer.init(example), env, key)


def iteration(buffer, carry, total):
    """One step of every env, and one gradient step."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    num_actions = carry.env.bits.shape[-1]
    action = common.epsilon_greedy(act_key, greedy(carry.params, carry.env.obs), 0.2, num_actions)
    env, taken = step(carry.env, action, env_key)
    buffer_state = buffer.add(carry.buffer_state, taken)

    batch = buffer.sample(buffer_state, sample_key)
    gradient = jax.grad(loss)(carry.params, carry.target_params, batch)
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, 0.02)
    log = {"reached": jr.masked_mean(batch.experience.reward == 0, batch.is_valid)}
    return Carry(params, target_params, opt_state, buffer_state, env, key), log


def greedy(params, obs):
    return jnp.argmax(NETWORK.apply(params, obs), axis=-1)


def loss(params, target_params, batch):
    """Return the squared error of double Q-learning, float32[]."""
    t, pick = batch.experience, jax.vmap(lambda values, action: values[action])
    next_value = pick(NETWORK.apply(target_params, t.next_obs), greedy(params, t.next_obs))
    next_value = jnp.clip(next_value, -1 / (1 - GAMMA), 0)  # no return lies outside
    td_error = t.reward + t.discount * next_value - pick(NETWORK.apply(params, t.obs), t.action)
    return jr.masked_mean(jnp.square(td_error), batch.is_valid)


def evaluate(num_bits, carry, key):
    """Return the share of episodes in which the greedy policy reaches its goal, float32[]."""

    def act(loop, key):
        env, has_reached = loop
        env, taken = step(env, greedy(carry.params, env.obs), key)
        return (env, has_reached | taken.terminated), None

    reset_key, step_key = jax.random.split(key)
    start = reset(reset_key, NUM_EPISODES, num_bits), jnp.zeros(NUM_EPISODES, bool)
    # The longest episode has `num_bits` steps. An env that is in its second one has reached its
    # goal in the first.
    (_, has_reached), _ = jax.lax.scan(act, start, jax.random.split(step_key, num_bits))
    return has_reached.mean()


def main(argv=None):
    parser = common.parser(__doc__, out="out/her.png", steps=96_000, seeds=2)
    parser.add_argument("--bits", type=int, default=20)
    args = parser.parse_args(argv)
    runs = {}
    for name, buffer in buffers().items():
        runs[name] = common.train(
            args,
            functools.partial(init, buffer, args.bits),
            common.scanned(functools.partial(iteration, buffer)),
            functools.partial(evaluate, args.bits),
            steps_per_iteration=NUM_ENVS,
            name=name,
        )
    successes = {name: (run["steps"], run["returns"]) for name, run in runs.items()}
    shares = {name: (run["steps"], run["logs"]["reached"]) for name, run in runs.items()}
    title = f"Episodes that reach a goal of {args.bits} bits"
    panels = [{"title": title, "ylabel": "share of 1,000 episodes", "curves": successes}]
    common.plot(args.out, *panels, {"title": "Sampled steps that reach it", "curves": shares})
    final = {name: round(float(run["returns"][-1].mean()), 3) for name, run in runs.items()}
    return common.report(
        final["hindsight"] >= 0.9 and final["plain"] <= 0.1,
        env_steps=int(runs["plain"]["steps"][-1]),
        steps_per_second=runs["hindsight"]["steps_per_second"],
        plain_success=final["plain"],
        hindsight_success=final["hindsight"],
        seconds=round(sum(run["seconds"] for run in runs.values()), 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: success >= 0.9 in hindsight, <= 0.1 plain")

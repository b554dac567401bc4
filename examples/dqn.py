"""Double DQN with 3-step prioritized replay on CartPole, all of training in one compiled loop.

    python examples/dqn.py --seed 0        # half a minute on two CPU cores; writes out/dqn.png

What to look at: `train` donates its whole carry, so the buffer is changed in place, and `iteration`
acts, adds, samples, learns and updates priorities without a branch. The start needs none either:
until `min_size` rows can be drawn no sample is valid, its weights are 0, and Adam answers zero
gradients with zero steps.

What is reported is the last network, not the best one, on episodes that no other evaluation has
seen.

Source: Mnih et al., "Human-level control through deep reinforcement learning" (2015); van Hasselt
et al., "Deep Reinforcement Learning with Double Q-learning" (2016); Schaul et al., "Prioritized
Experience Replay" (2016). Where we differ: the target network is a moving average, the learning
rate decays to 0, and rewards are not clipped.
"""

import argparse
import functools
import pathlib
import sys
import time
from typing import Any

import flax.linen as nn
import flax.struct
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from tqdm import tqdm

import jaxreplay as jr

NUM_ENVS = 16
LEARNING_RATE = 1e-3  # at first; falls to 0 linearly
TARGET_RATE = 0.02  # how far the target network moves towards the online one in one step
SMALLEST_PRIORITY = 1e-3  # added to every TD error: a row of priority 0 would never be drawn again
EPISODES = 100  # of an evaluation
CHUNKS = 40  # of a run: after each an evaluation, and the progress bar moves

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
RESET, STEP = jax.vmap(ENV.reset, (0, None)), jax.vmap(ENV.step, (0, 0, 0, None))
NETWORK = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(ENV.num_actions)])
OPTIMIZER = optax.scale_by_adam()
BUFFER = jr.prioritized(
    capacity=65_536,
    num_envs=NUM_ENVS,
    batch_size=128,
    autoreset="same_step",
    n_step=3,
    gamma=0.99,
    alpha=0.6,
    min_size=1_000,
)


class Carry(flax.struct.PyTreeNode):
    """All that changes while training. E envs."""

    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: jr.ReplayState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 4]
    episode_return: jax.Array  # float32[E], of the episodes under way
    key: jax.Array
    step: jax.Array  # int32[]: env steps so far


def example_step():
    """One env's step, by shape and dtype alone."""
    obs, flag = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), bool)
    action, reward = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    return jr.Step(obs, action, reward, terminated=flag, truncated=flag, final_obs=obs)


@jax.jit
def init(key):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = RESET(jax.random.split(reset_key, NUM_ENVS), ENV_PARAMS)
    params = NETWORK.init(network_key, obs)
    buffer_state = BUFFER.init(example_step())
    return Carry(
        params,
        params,
        OPTIMIZER.init(params),
        buffer_state,
        env_state,
        obs,
        jnp.zeros(NUM_ENVS),
        key,
        jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnames="iterations", donate_argnums=0)
def train(carry, total_steps, iterations):
    """Takes the carry over; `total_steps` of the whole run is what the schedules go by.

    Returns:
      The carry, and for each of I iterations: the returns of the episodes that ended, float32[I,
        E], NaN elsewhere; and how many rows
      of its env were written after each sampled row, int32[I, B], -1 where it was not valid.
    """
    return jax.lax.scan(
        lambda carry, _: iteration(carry, carry.step / total_steps), carry, length=iterations
    )


def iteration(carry, progress):
    """One step of every env and one gradient step. `progress`: float32[], in [0, 1)."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    action = explore(
        act_key, greedy(carry.params, carry.obs), epsilon=jnp.maximum(1 - progress / 0.2, 0.02)
    )
    obs, env_state, reward, terminated, truncated, info = STEP(
        jax.random.split(env_key, NUM_ENVS), carry.env_state, action, ENV_PARAMS
    )
    step = jr.Step(
        carry.obs,
        action,
        reward,
        terminated=terminated,
        truncated=truncated,
        final_obs=info["final_observation"],
    )
    buffer_state = BUFFER.add(carry.buffer_state, step)

    batch = BUFFER.sample(buffer_state, sample_key, beta=0.4 + 0.6 * progress)
    gradient, td_error = jax.grad(loss, has_aux=True)(
        carry.params, carry.target_params, batch.experience, batch.weight
    )
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(
        carry.params, optax.tree.scale(-LEARNING_RATE * (1 - progress), updates)
    )
    target_params = optax.incremental_update(params, carry.target_params, TARGET_RATE)
    buffer_state = BUFFER.update_priorities(
        buffer_state, batch.index, jnp.abs(td_error) + SMALLEST_PRIORITY
    )

    done, so_far = terminated | truncated, carry.episode_return + reward
    age = jnp.where(batch.is_valid, BUFFER.age(buffer_state, batch.index), -1)
    new = Carry(
        params,
        target_params,
        opt_state,
        buffer_state,
        env_state,
        obs,
        jnp.where(done, 0, so_far),
        key,
        carry.step + NUM_ENVS,
    )
    return new, (jnp.where(done, so_far, jnp.nan), age)


def greedy(params, obs):
    return jnp.argmax(NETWORK.apply(params, obs), axis=-1)


def explore(key, action, epsilon):
    """Each action, or with probability `epsilon` a random one: int32[E]."""
    coin_key, action_key = jax.random.split(key)
    is_random = jax.random.bernoulli(coin_key, epsilon, action.shape)
    return jnp.where(
        is_random, jax.random.randint(action_key, action.shape, 0, ENV.num_actions), action
    )


def loss(params, target_params, items, weight):
    """The weighted Huber loss of double Q-learning, float32[], and the TD errors, float32[B]."""
    pick = jax.vmap(lambda values, action: values[action])
    next_value = pick(NETWORK.apply(target_params, items.next_obs), greedy(params, items.next_obs))
    td_error = (
        items.reward
        + items.discount * next_value
        - pick(NETWORK.apply(params, items.obs), items.action)
    )
    return jnp.mean(weight * optax.losses.huber_loss(td_error)), td_error


@jax.jit
def evaluate(params, key):
    """Mean return of the greedy policy over the first episode of each of `EPISODES` envs:
    float32[]."""
    reset_key, step_key = jax.random.split(key)

    def step(loop, key):
        obs, env_state, is_running = loop
        keys = jax.random.split(key, EPISODES)
        obs, env_state, reward, terminated, truncated, _ = STEP(
            keys, env_state, greedy(params, obs), ENV_PARAMS
        )
        return (obs, env_state, is_running & ~(terminated | truncated)), jnp.where(
            is_running, reward, 0
        )

    start = (*RESET(jax.random.split(reset_key, EPISODES), ENV_PARAMS), jnp.ones(EPISODES, bool))
    _, rewards = jax.lax.scan(
        step, start, jax.random.split(step_key, ENV_PARAMS.max_steps_in_episode)
    )
    return rewards.sum(axis=0).mean()


@jax.jit
def relative_probability(buffer_state):
    """Return the probability of each row over that of a uniform draw; 0 if the row cannot be drawn:
    float32[capacity]."""
    return BUFFER.get(buffer_state, jnp.arange(BUFFER.capacity)).probability * BUFFER.size(
        buffer_state
    )


def plot(path, steps, episodes, evaluations, ages, probability):
    """Plot what was learned, what the buffer prefers, and how old the samples were.

    Args:
      steps, evaluations: [C], env steps and the mean return at the end of each chunk. ages: C
        arrays, of the valid samples.
      episodes: [2, N], env steps and return of each training episode. probability: [capacity], see
        `relative_probability`.
    """
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.scatter(
        *episodes, s=6, color="tab:blue", alpha=0.3, linewidths=0, label="training episode"
    )
    left.plot(
        steps,
        evaluations,
        color="tab:orange",
        linewidth=2,
        label=f"greedy policy, mean of {EPISODES} episodes",
    )
    left.set(title="Returns", xlabel="env steps", ylabel="undiscounted return", ylim=(0, 650))

    probability = probability[probability > 0]
    if probability.size:
        bins = np.geomspace(probability.min() / 1.01, probability.max() * 1.01, 60)
        counts, *_ = middle.hist(
            probability,
            bins,
            color="tab:blue",
            log=True,
            label="rows (at the far right: not drawn yet)",
        )
        middle.set_ylim(top=30 * counts.max())  # room for the legend
    middle.axvline(1, ymax=0.82, color="black", linestyle="--", linewidth=1, label="uniform")
    middle.set(
        title=f"Priorities of the {probability.size:,} sampleable rows", xscale="log", ylabel="rows"
    )
    middle.set_xlabel("probability of a draw, as a multiple of uniform")

    levels = (0.1, 0.25, 0.5, 0.75, 0.9)
    low, lower, median, upper, high = np.array(
        [np.quantile(age, levels) if age.size else [np.nan] * 5 for age in ages]
    ).T
    right.fill_between(
        steps, low, high, color="tab:blue", alpha=0.2, linewidth=0, label="10 to 90 % of samples"
    )
    right.fill_between(
        steps, lower, upper, color="tab:blue", alpha=0.35, linewidth=0, label="25 to 75 %"
    )
    right.plot(steps, median, color="tab:blue", linewidth=2, label="median")
    held = np.minimum(steps, BUFFER.capacity) / NUM_ENVS
    right.plot(steps, held, color="black", linestyle="--", linewidth=1, label="oldest row held")
    right.set(
        title="Age of the samples",
        xlabel="env steps",
        ylabel="rows of the same env written since",
        ylim=(0, 1.3 * held[-1]),
    )
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", ncols=2 if axes is right else 1, frameon=False)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv=None):
    """Train, evaluate, plot and print a table; returns its figures, and whether the target was
    reached."""
    parser = argparse.ArgumentParser(
        description="Double DQN with 3-step prioritized replay on CartPole."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=320_000, help="env steps in all, rounded down to whole chunks"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=475.0,
        help="the exit status is 1 where the final mean return is below",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("out/dqn.png"), help="where the plot goes"
    )
    args = parser.parse_args(argv)
    began = time.perf_counter()
    iterations = max(1, -(-args.steps // (CHUNKS * NUM_ENVS)))  # of a chunk
    chunk_steps = iterations * NUM_ENVS
    steps = chunk_steps * np.arange(1, max(1, args.steps // chunk_steps) + 1)

    init_key, evaluation_key, final_key = jax.random.split(jax.random.key(args.seed), 3)
    carry = init(init_key)
    # ahead, so that steps/s leaves the compiler out
    train_chunk = train.lower(carry, int(steps[-1]), iterations).compile()
    training_seconds, returns, ages, evaluations = 0.0, [], [], []
    for key in (bar := tqdm(jax.random.split(evaluation_key, len(steps)), unit="chunk")):
        chunk_began = time.perf_counter()
        carry, trace = jax.block_until_ready(train_chunk(carry, int(steps[-1])))
        training_seconds += time.perf_counter() - chunk_began
        finished, age = jax.device_get(trace)
        returns.append(finished)
        ages.append(age[age >= 0])
        evaluations.append(float(evaluate(carry.params, key)))
        bar.set_postfix({"mean return": f"{evaluations[-1]:.1f}"})

    returns = np.concatenate(returns)
    when, env = np.nonzero(~np.isnan(returns))
    episodes = np.stack([NUM_ENVS * (when + 1), returns[when, env]])
    plot(
        args.out,
        steps,
        episodes,
        evaluations,
        ages,
        np.asarray(relative_probability(carry.buffer_state)),
    )
    evaluation = float(evaluate(carry.params, final_key))
    figures = {
        "env_steps": int(carry.step),
        "steps_per_second": round(int(carry.step) / training_seconds),
        "training_return": round(float(episodes[1, -EPISODES:].mean()), 1)
        if len(when)
        else float("nan"),
        "evaluation_return": round(evaluation, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "buffer_bytes": BUFFER.memory(example_step()).total,
        "plot": str(args.out),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):18}", value if isinstance(value, str) else f"{value:,}")
    return figures | {"reached": evaluation >= args.target}


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

"""PPO on CartPole with `jr.rollout`, all of training in one compiled loop.

    python examples/ppo.py --seed 0  # a quarter of a minute on two CPU cores; writes out/ppo.png

What to look at: `iteration` fills the rollout in place, one `add` a step, and learns from it in
shuffled minibatches, of which only the indices are drawn ahead. An episode that ends by its time
limit is not one that failed: its last step is worth the value of the true final observation, which
the env hands over beside the first one of the next episode.

What is reported is the last network, acting greedily, on episodes that no other evaluation has
seen.

Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), equations 7 and 9, with
the advantages of "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(2016). Where we differ: advantages are normalized over each rollout, policy and critic share no
layer, and the learning rate falls to 0.
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
LENGTH = 128  # steps of every env between two updates of the policy
NUM_EPOCHS, NUM_MINIBATCHES = 4, 4
DISCOUNT, DECAY = 0.99, 0.95
RATIO_CLIP = 0.2  # how far an update may move the probability of an action
ENTROPY_WEIGHT, VALUE_WEIGHT = 0.01, 0.5
LEARNING_RATE = 2e-3  # at first; falls to 0 linearly
EPISODES = 100  # of an evaluation
CHUNKS = 20  # of a run: after each an evaluation, and the progress bar moves

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
RESET, STEP = jax.vmap(ENV.reset, (0, None)), jax.vmap(ENV.step, (0, 0, 0, None))
POLICY = nn.Sequential(
    [
        nn.Dense(64),
        nn.tanh,
        nn.Dense(64),
        nn.tanh,
        nn.Dense(ENV.num_actions, kernel_init=nn.initializers.orthogonal(0.01)),
    ]
)
CRITIC = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(1)])
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(eps=1e-5))
ROLLOUT = jr.rollout(length=LENGTH, num_envs=NUM_ENVS, autoreset="same_step")


class Carry(flax.struct.PyTreeNode):
    """All that changes while training. E envs."""

    params: Any  # of (policy, critic)
    opt_state: Any
    rollout: jr.RolloutState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 4]
    episode_return: jax.Array  # float32[E], of the episodes under way
    key: jax.Array
    step: jax.Array  # int32[]: env steps so far


def example_step():
    """One env's step, by shape and dtype alone."""
    obs, flag, number = (
        jax.ShapeDtypeStruct((4,), jnp.float32),
        jax.ShapeDtypeStruct((), bool),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    action = jax.ShapeDtypeStruct((), jnp.int32)
    return jr.Step(
        obs,
        action,
        number,
        terminated=flag,
        truncated=flag,
        final_obs=obs,
        extras={"log_prob": number},
    )


@jax.jit
def init(key):
    key, reset_key, policy_key, critic_key = jax.random.split(key, 4)
    obs, env_state = RESET(jax.random.split(reset_key, NUM_ENVS), ENV_PARAMS)
    params = POLICY.init(policy_key, obs), CRITIC.init(critic_key, obs)
    rollout = ROLLOUT.init(example_step())
    return Carry(
        params,
        OPTIMIZER.init(params),
        rollout,
        env_state,
        obs,
        jnp.zeros(NUM_ENVS),
        key,
        jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnames="iterations", donate_argnums=0)
def train(carry, total_steps, iterations):
    """Takes the carry over; `total_steps` of the whole run is what the learning rate goes by.

    Returns:
      The carry, and for each of I iterations: the returns of the episodes that ended, float32[I, T,
        E], NaN elsewhere; and what the loss
      said of each minibatch, see there, float32[I, epochs * minibatches, 2].
    """
    return jax.lax.scan(
        lambda carry, _: iteration(carry, carry.step / total_steps), carry, length=iterations
    )


def iteration(carry, progress):
    """One rollout, and the epochs that learn from it. `progress`: float32[], in [0, 1)."""
    carry, returns = jax.lax.scan(
        act, carry.replace(rollout=ROLLOUT.clear(carry.rollout)), length=LENGTH
    )
    key, shuffle_key = jax.random.split(carry.key)

    steps = ROLLOUT.steps(carry.rollout)
    value, last_value, final_value = (
        critic(carry.params, obs) for obs in (steps.obs, carry.obs, steps.final_obs)
    )
    (advantage, target), mask = ROLLOUT.advantages(
        carry.rollout, value, last_value, final_value, gamma=DISCOUNT, lambda_=DECAY
    )
    batch = (
        steps.obs,
        steps.action,
        steps.extras["log_prob"],
        jr.targets.normalize(advantage, mask),
        target,
        mask,
    )

    def learn(learner, index):
        params, opt_state = learner
        gradient, diagnostics = jax.grad(loss, has_aux=True)(
            params, *ROLLOUT.minibatch(batch, index)
        )
        updates, opt_state = OPTIMIZER.update(gradient, opt_state)
        return (
            optax.apply_updates(params, optax.tree.scale(-LEARNING_RATE * (1 - progress), updates)),
            opt_state,
        ), diagnostics

    minibatches = ROLLOUT.minibatches(
        shuffle_key, num_epochs=NUM_EPOCHS, num_minibatches=NUM_MINIBATCHES
    )
    (params, opt_state), diagnostics = jax.lax.scan(
        learn, (carry.params, carry.opt_state), minibatches
    )
    return carry.replace(params=params, opt_state=opt_state, key=key), (returns, diagnostics)


def act(carry, _):
    """One step of every env. Returns the carry, and the returns of the episodes that ended,
    float32[E], NaN elsewhere."""
    key, act_key, env_key = jax.random.split(carry.key, 3)
    logits = policy(carry.params, carry.obs)
    action = jax.random.categorical(act_key, logits).astype(jnp.int32)
    obs, env_state, reward, terminated, truncated, info = STEP(
        jax.random.split(env_key, NUM_ENVS), carry.env_state, action, ENV_PARAMS
    )
    extras = {"log_prob": log_probability(logits, action)}
    rollout = ROLLOUT.add(
        carry.rollout,
        jr.Step(
            carry.obs,
            action,
            reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=info["final_observation"],
            extras=extras,
        ),
    )
    done, so_far = terminated | truncated, carry.episode_return + reward
    new = carry.replace(
        rollout=rollout,
        env_state=env_state,
        obs=obs,
        episode_return=jnp.where(done, 0, so_far),
        key=key,
    )
    return new.replace(step=carry.step + NUM_ENVS), jnp.where(done, so_far, jnp.nan)


def policy(params, obs):
    return POLICY.apply(params[0], obs)


def critic(params, obs):
    return CRITIC.apply(params[1], obs).squeeze(-1)


def log_probability(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1).squeeze(-1)


def loss(params, obs, action, log_prob, advantage, target, mask):
    """The clipped surrogate, the critic's squared error and the entropy of one minibatch:
    float32[].

    Beside it, float32[2]: the entropy, as a share of that of random actions, and the share of
    ratios that are clipped.
    """
    logits = policy(params, obs)
    ratio = jnp.exp(log_probability(logits, action) - log_prob)
    surrogate = jnp.minimum(
        ratio * advantage, jnp.clip(ratio, 1 - RATIO_CLIP, 1 + RATIO_CLIP) * advantage
    )
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
    error = jnp.square(target - critic(params, obs))
    is_clipped = jnp.abs(ratio - 1) > RATIO_CLIP
    diagnostics = jnp.stack(
        [jnp.mean(x, where=mask) for x in (entropy / jnp.log(ENV.num_actions), is_clipped)]
    )
    return jnp.mean(
        VALUE_WEIGHT * error - surrogate - ENTROPY_WEIGHT * entropy, where=mask
    ), diagnostics


@jax.jit
def evaluate(params, key):
    """Mean return of the greedy policy over the first episode of each of `EPISODES` envs:
    float32[]."""
    reset_key, step_key = jax.random.split(key)

    def step(loop, key):
        obs, env_state, is_running = loop
        action = jnp.argmax(policy(params, obs), axis=-1)
        obs, env_state, reward, terminated, truncated, _ = STEP(
            jax.random.split(key, EPISODES), env_state, action, ENV_PARAMS
        )
        return (obs, env_state, is_running & ~(terminated | truncated)), jnp.where(
            is_running, reward, 0
        )

    start = (*RESET(jax.random.split(reset_key, EPISODES), ENV_PARAMS), jnp.ones(EPISODES, bool))
    _, rewards = jax.lax.scan(
        step, start, jax.random.split(step_key, ENV_PARAMS.max_steps_in_episode)
    )
    return rewards.sum(axis=0).mean()


def plot(path, steps, episodes, evaluations, diagnostics):
    """What was learned, and how the policy moved.

    Args:
      steps, evaluations: [C], env steps and the mean return at the end of each chunk.
      episodes: [2, N], env steps and return of each training episode.
      diagnostics: [I, 2], see `loss`, the mean of each iteration.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
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
    left.set(title="Returns", ylabel="undiscounted return", ylim=(0, 650))
    when = np.linspace(0, steps[-1], len(diagnostics))
    right.plot(
        when,
        diagnostics[:, 0],
        color="tab:blue",
        linewidth=2,
        label="entropy, as a share of random actions'",
    )
    right.plot(
        when,
        diagnostics[:, 1],
        color="tab:orange",
        linewidth=2,
        label=f"ratios clipped at 1 ± {RATIO_CLIP}",
    )
    right.set(title="Policy", ylabel="share", ylim=(0, 1.25))
    for axes in (left, right):
        axes.set_xlabel("env steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", frameon=False)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv=None):
    """Train, evaluate, plot and print a table; returns its figures, and whether the target was
    reached."""
    parser = argparse.ArgumentParser(description="PPO with jaxreplay's rollout on CartPole.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=327_680, help="env steps in all, rounded down to whole chunks"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=475.0,
        help="the exit status is 1 where the final mean return is below",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("out/ppo.png"), help="where the plot goes"
    )
    args = parser.parse_args(argv)
    began = time.perf_counter()
    iterations = max(1, -(-args.steps // (CHUNKS * NUM_ENVS * LENGTH)))  # of a chunk
    chunk_steps = iterations * NUM_ENVS * LENGTH
    steps = chunk_steps * np.arange(1, max(1, args.steps // chunk_steps) + 1)

    init_key, evaluation_key, final_key = jax.random.split(jax.random.key(args.seed), 3)
    carry = init(init_key)
    # ahead, so that steps/s leaves the compiler out
    train_chunk = train.lower(carry, int(steps[-1]), iterations).compile()
    training_seconds, returns, diagnostics, evaluations = 0.0, [], [], []
    for key in (bar := tqdm(jax.random.split(evaluation_key, len(steps)), unit="chunk")):
        chunk_began = time.perf_counter()
        carry, trace = jax.block_until_ready(train_chunk(carry, int(steps[-1])))
        training_seconds += time.perf_counter() - chunk_began
        finished, shares = jax.device_get(trace)
        returns.append(finished.reshape(-1, NUM_ENVS))
        diagnostics.append(shares.mean(axis=1))
        evaluations.append(float(evaluate(carry.params, key)))
        bar.set_postfix({"mean return": f"{evaluations[-1]:.1f}"})

    returns = np.concatenate(returns)
    when, env = np.nonzero(~np.isnan(returns))
    episodes = np.stack([NUM_ENVS * (when + 1), returns[when, env]])
    plot(args.out, steps, episodes, evaluations, np.concatenate(diagnostics))
    evaluation = float(evaluate(carry.params, final_key))
    figures = {
        "env_steps": int(carry.step),
        "steps_per_second": round(int(carry.step) / training_seconds),
        "training_return": round(float(episodes[1, -EPISODES:].mean()), 1)
        if len(when)
        else float("nan"),
        "evaluation_return": round(evaluation, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "rollout_bytes": ROLLOUT.memory(example_step()).total,
        "plot": str(args.out),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):18}", value if isinstance(value, str) else f"{value:,}")
    return figures | {"reached": evaluation >= args.target}


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

"""Double DQN with 3-step prioritized replay on CartPole, from the first env step to the last gradient in one compiled loop.

    python examples/dqn.py --seed 0

What to look at: `train` donates its whole carry, so the buffer is changed in place, and `iteration` acts, adds, samples, learns and updates
priorities without a branch. No branch guards the start either: until `min_size` rows can be drawn a sample is not valid, its weights are
0, and Adam takes zero gradients for zero steps.

Sources: Mnih et al., "Human-level control through deep reinforcement learning" (2015); van Hasselt et al., "Deep Reinforcement Learning
with Double Q-learning" (2016); Schaul et al., "Prioritized Experience Replay" (2016). Where we differ: the target network follows by a
moving average, the step size decays to 0, and beside the loss nothing is clipped.
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
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxreplay as jr

NUM_ENVS = 16
DISCOUNT = 0.99
SMALLEST_PRIORITY = 1e-3  # added to each, so that no row is never drawn again
TARGET_RATE = 0.01
LEARNING_RATE = 1e-3
EVALUATIONS = 40  # over a run; the best parameters are kept
EPISODES = 100  # of an evaluation

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
REPLAY = jr.prioritized(
    capacity=65_536, num_envs=NUM_ENVS, batch_size=128, autoreset="same_step", n_step=3, discount=DISCOUNT, exponent=0.6, min_size=1_000
)


class QNetwork(nn.Module):
    """Observations float32[..., 4] to action values float32[..., 2]."""

    @nn.compact
    def __call__(self, obs):
        for width in (128, 128):
            obs = nn.relu(nn.Dense(width)(obs))
        return nn.Dense(ENV.num_actions)(obs)


NETWORK = QNetwork()
OPTIMIZER = optax.adam(1.0)


class Carry(flax.struct.PyTreeNode):
    """All that changes while training. E envs."""

    params: Any
    target_params: Any
    opt_state: Any
    replay: jr.ReplayState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 4]
    episode_return: jax.Array  # float32[E], of the episodes under way
    key: jax.Array
    step: jax.Array  # int32[]: env steps so far


@jax.jit
def init(key):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(ENV.reset, (0, None))(jax.random.split(reset_key, NUM_ENVS), ENV_PARAMS)
    params = NETWORK.init(network_key, obs)
    return Carry(
        params=params,
        target_params=params,
        opt_state=OPTIMIZER.init(params),
        replay=REPLAY.init(example_step()),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(NUM_ENVS),
        key=key,
        step=jnp.int32(0),
    )


def example_step():
    """One env's step, by shape and dtype alone."""
    obs, flag = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), bool)
    scalar = functools.partial(jax.ShapeDtypeStruct, ())
    return jr.Step(obs=obs, action=scalar(jnp.int32), reward=scalar(jnp.float32), terminated=flag, truncated=flag, final_obs=obs)


@functools.partial(jax.jit, static_argnames="iterations", donate_argnums=0)
def train(carry, total_steps, iterations):
    """Returns the carry and, stacked over the iterations, the returns of the episodes that ended (NaN elsewhere) and the samples' ages."""
    return jax.lax.scan(lambda carry, _: iteration(carry, carry.step / total_steps), carry, length=iterations)


def iteration(carry, progress):
    """One step of every env and one gradient step. `progress`: float32[], in [0, 1)."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    epsilon = jnp.maximum(1 - progress / 0.2, 0.02)
    action = explore(act_key, NETWORK.apply(carry.params, carry.obs), epsilon)
    step_env = jax.vmap(ENV.step, (0, 0, 0, None))
    obs, env_state, reward, terminated, truncated, info = step_env(
        jax.random.split(env_key, NUM_ENVS), carry.env_state, action, ENV_PARAMS
    )
    step = jr.Step(carry.obs, action, reward, terminated, truncated, final_obs=info["final_observation"])
    replay = REPLAY.add(carry.replay, step)

    batch = REPLAY.sample(replay, sample_key)
    weight = jr.importance_weights(batch, REPLAY.size(replay), exponent=0.4 + 0.6 * progress)
    gradient, td_error = jax.grad(loss, has_aux=True)(carry.params, carry.target_params, batch.items, weight)
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, optax.tree.scale(LEARNING_RATE * (1 - progress), updates))
    replay = REPLAY.update_priorities(replay, batch.index, jnp.abs(td_error) + SMALLEST_PRIORITY)

    done = terminated | truncated
    episode_return = carry.episode_return + reward
    new = Carry(
        params=params,
        target_params=optax.incremental_update(params, carry.target_params, TARGET_RATE),
        opt_state=opt_state,
        replay=replay,
        env_state=env_state,
        obs=obs,
        episode_return=jnp.where(done, 0, episode_return),
        key=key,
        step=carry.step + NUM_ENVS,
    )
    return new, (jnp.where(done, episode_return, jnp.nan), REPLAY.streams.age(replay.streams, batch.index.row))


def explore(key, values, epsilon):
    """Epsilon-greedy actions: int32[E]."""
    coin_key, action_key = jax.random.split(key)
    uniform = jax.random.randint(action_key, (NUM_ENVS,), 0, ENV.num_actions)
    return jnp.where(jax.random.bernoulli(coin_key, epsilon, (NUM_ENVS,)), uniform, jnp.argmax(values, axis=-1))


def loss(params, target_params, items, weight):
    """The weighted Huber loss of double Q-learning, float32[], and the TD errors, float32[B]."""
    best = jnp.argmax(NETWORK.apply(params, items.next_obs), axis=-1)
    target = items.reward + items.discount * pick(NETWORK.apply(target_params, items.next_obs), best)
    td_error = jax.lax.stop_gradient(target) - pick(NETWORK.apply(params, items.obs), items.action)
    return jnp.mean(weight * optax.losses.huber_loss(td_error)), td_error


def pick(values, action):
    return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]


@jax.jit
def evaluate(params, key):
    """Mean return of the greedy policy over the first episode of each of `EPISODES` envs: float32[]."""
    reset_key, key = jax.random.split(key)

    def step(loop, key):
        obs, env_state, is_running = loop
        action = jnp.argmax(NETWORK.apply(params, obs), axis=-1)
        obs, env_state, reward, terminated, truncated, _ = jax.vmap(ENV.step, (0, 0, 0, None))(
            jax.random.split(key, EPISODES), env_state, action, ENV_PARAMS
        )
        return (obs, env_state, is_running & ~(terminated | truncated)), jnp.where(is_running, reward, 0)

    start = jax.vmap(ENV.reset, (0, None))(jax.random.split(reset_key, EPISODES), ENV_PARAMS)
    keys = jax.random.split(key, ENV_PARAMS.max_steps_in_episode)
    _, rewards = jax.lax.scan(step, (*start, jnp.ones(EPISODES, bool)), keys)
    return rewards.sum(axis=0).mean()

"""Double DQN with 3-step prioritized replay on CartPole, several seeds in one compiled loop.

    python examples/dqn.py --seeds 3   # 2 minutes on two CPU cores; writes out/dqn.png

Copy `iteration` and `loss`: one step of every env, one gradient step, new priorities. Nothing
branches at the start: until 1,000 transitions are sampleable, `batch.weight` is 0, and gradients
are 0. `train` donates its carry, so that the buffer changes in place.

References:
  Mnih et al., "Human-level control through deep reinforcement learning" (2015).
  van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning" (2016).
  Schaul et al., "Prioritized Experience Replay" (2016).
  Here the target network is a moving average, and the learning rate decays to 0.
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

NUM_ENVS = 16
ENVS = common.gymnax_envs("CartPole-v1", NUM_ENVS)
TEST_ENVS = common.gymnax_envs("CartPole-v1", 100)
NETWORK = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(2)])
OPTIMIZER = optax.scale_by_adam()
OBS = jnp.zeros(4)
EXAMPLE = jr.Step(OBS, 0, 0.0, terminated=False, truncated=False, final_obs=OBS)  # of one env
BUFFER = jr.prioritized(
    capacity=65_536,
    num_envs=NUM_ENVS,
    batch_size=128,
    n_step=3,
    min_size=1_000,
    autoreset="same_step",
)


class Carry(flax.struct.PyTreeNode):
    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: jr.ReplayState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 4]
    key: jax.Array
    step: jax.Array  # int32[]: iterations so far


def init(key):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = ENVS.reset(reset_key)
    params, buffer_state = NETWORK.init(network_key, obs), BUFFER.init(EXAMPLE)
    opt_state = OPTIMIZER.init(params)
    return Carry(params, params, opt_state, buffer_state, env_state, obs, key, jnp.int32(0))


def iteration(carry, total):
    """One step of every env, and one gradient step. `total` iterations set the schedules."""
    progress = carry.step / total
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    epsilon = jnp.maximum(1 - 5 * progress, 0.02)
    action = common.epsilon_greedy(act_key, greedy(carry.params, carry.obs), epsilon, 2)
    obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
        env_key, carry.env_state, action
    )
    flags = {"terminated": terminated, "truncated": truncated}
    taken = jr.Step(carry.obs, action, reward, **flags, final_obs=final_obs)
    buffer_state = BUFFER.add(carry.buffer_state, taken)

    batch = BUFFER.sample(buffer_state, sample_key, beta=0.4 + 0.6 * progress)
    gradient, td_error = jax.grad(loss, has_aux=True)(carry.params, carry.target_params, batch)
    buffer_state = BUFFER.update_priorities(buffer_state, batch.index, jnp.abs(td_error) + 1e-3)
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    updates = optax.tree.scale(-1e-3 * (1 - progress), updates)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, 0.02)
    step = carry.step + 1
    return Carry(params, target_params, opt_state, buffer_state, env_state, obs, key, step)


def greedy(params, obs):
    return jnp.argmax(NETWORK.apply(params, obs), axis=-1)


def loss(params, target_params, batch):
    """Return the weighted Huber loss, float32[], and the TD errors, float32[B]."""
    t, pick = batch.experience, jax.vmap(lambda values, action: values[action])
    next_value = pick(NETWORK.apply(target_params, t.next_obs), greedy(params, t.next_obs))
    td_error = t.reward + t.discount * next_value - pick(NETWORK.apply(params, t.obs), t.action)
    return jnp.mean(batch.weight * optax.losses.huber_loss(td_error)), td_error


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
@functools.partial(jax.vmap, in_axes=(0, None, None))
def train(carry, total, iterations):
    """Return the carries of all seeds after so many iterations, and their buffers' metrics."""
    carry = jax.lax.scan(lambda c, _: (iteration(c, total), None), carry, length=iterations)[0]
    return carry, BUFFER.metrics(carry.buffer_state)


def evaluate(carry, key):
    return common.evaluate(TEST_ENVS, lambda _, obs: (None, greedy(carry.params, obs)), key)


def main(argv=None):
    return common.train_to_target(
        __doc__,
        argv,
        name="DQN",
        steps=320_000,
        target=475.0,
        logs={"title": "Mean priority", "mean_priority": "prioritized"},
        memory=BUFFER.memory(EXAMPLE),
        init=init,
        chunk=train,
        evaluation=evaluate,
        steps_per_iteration=NUM_ENVS,
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

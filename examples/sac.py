"""SAC on Pendulum with a uniform buffer, several seeds in one compiled loop.

    python examples/sac.py --seeds 3   # a minute on two CPU cores; writes out/sac.png

Copy `iteration` and `loss`. Until 1,000 transitions are sampleable, `batch.weight` is 0, and so
are all gradients: no branch is needed at the start. Pendulum has no terminations. Every episode is
cut after 200 steps, and the buffer bootstraps from the true final observation.

References:
  Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with its automatic
  temperature.
"""

import sys
from typing import Any

import _common as common
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

NUM_ENVS, LARGEST = 4, 2.0  # torque
ENVS = common.gymnax_envs("Pendulum-v1", NUM_ENVS)
TEST_ENVS = common.gymnax_envs("Pendulum-v1", 100)
OPTIMIZER = optax.adam(1e-3)
OBS, ACTION = jnp.zeros(3), jnp.zeros(1)
EXAMPLE = jr.Step(OBS, ACTION, 0.0, terminated=False, truncated=False, final_obs=OBS)
BUFFER = jr.uniform(
    capacity=65_536,
    num_envs=NUM_ENVS,
    batch_size=256,
    gamma=0.98,
    min_size=1_000,
    autoreset=jr.autoreset.GYMNAX,
)


class Actor(nn.Module):
    """Obs -> mean and log of the standard deviation of the action before tanh."""

    @nn.compact
    def __call__(self, obs):
        x = nn.relu(nn.Dense(64)(nn.relu(nn.Dense(64)(obs))))
        mean, log_std = jnp.split(nn.Dense(2)(x), 2, axis=-1)
        return mean, jnp.clip(log_std, -10, 2)


class Critics(nn.Module):
    """Obs, action -> values of two critics, float32[B, 2]."""

    @nn.compact
    def __call__(self, obs, action):
        x = jnp.concatenate([obs, action], axis=-1)
        return jnp.concatenate(
            [nn.Dense(1)(nn.relu(nn.Dense(64)(nn.relu(nn.Dense(64)(x))))) for _ in range(2)],
            axis=-1,
        )


ACTOR, CRITICS = Actor(), Critics()


class Carry(flax.struct.PyTreeNode):
    params: dict[str, Any]  # of "actor", "critics" and "log_alpha"
    target_params: Any  # of the critics
    opt_state: Any
    buffer_state: jr.ReplayState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 3]
    key: jax.Array


def init(key):
    key, reset_key, actor_key, critics_key = jax.random.split(key, 4)
    obs, env_state = ENVS.reset(reset_key)
    critics = CRITICS.init(critics_key, OBS, ACTION)
    params = {"actor": ACTOR.init(actor_key, OBS), "critics": critics, "log_alpha": jnp.zeros(())}
    opt_state, buffer_state = OPTIMIZER.init(params), BUFFER.init(EXAMPLE)
    return Carry(params, critics, opt_state, buffer_state, env_state, obs, key)


def act(actor, obs, key):
    """Return random actions in [-1, 1], and the logarithms of their probability densities."""
    mean, log_std = ACTOR.apply(actor, obs)
    noise = jax.random.normal(key, mean.shape)
    before = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    log_slope = 2 * (jnp.log(2) - before - jax.nn.softplus(-2 * before))  # of tanh
    return jnp.tanh(before), (log_prob - log_slope).sum(-1)


def iteration(carry, total):
    """One step of every env, and one gradient step."""
    key, act_key, env_key, sample_key, update_key = jax.random.split(carry.key, 5)
    action, _ = act(carry.params["actor"], carry.obs, act_key)
    obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
        env_key, carry.env_state, LARGEST * action
    )
    flags = {"terminated": terminated, "truncated": truncated}
    taken = jr.Step(carry.obs, action, reward, **flags, final_obs=final_obs)
    buffer_state = BUFFER.add(carry.buffer_state, taken)

    batch = BUFFER.sample(buffer_state, sample_key)
    gradient, log = jax.grad(loss, has_aux=True)(
        carry.params, carry.target_params, batch, update_key
    )
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params["critics"], carry.target_params, 0.01)
    return Carry(params, target_params, opt_state, buffer_state, env_state, obs, key), log


def loss(params, target_params, batch, key):
    """Return the sum of three losses, float32[], each of which changes its own parameters."""
    t, (next_key, key) = batch.experience, jax.random.split(key)
    alpha, stop = jnp.exp(params["log_alpha"]), jax.lax.stop_gradient

    next_action, next_log_prob = act(params["actor"], t.next_obs, next_key)
    next_value = CRITICS.apply(target_params, t.next_obs, next_action).min(-1)
    target = stop(t.reward + t.discount * (next_value - alpha * next_log_prob))
    error = CRITICS.apply(params["critics"], t.obs, t.action) - target[:, None]
    critics = jnp.square(error).sum(-1)

    action, log_prob = act(params["actor"], t.obs, key)
    value = CRITICS.apply(stop(params["critics"]), t.obs, action).min(-1)
    actor = stop(alpha) * log_prob - value

    wanted_entropy = -1.0  # minus the number of action dimensions
    temperature = -alpha * stop(log_prob + wanted_entropy)
    total = jnp.mean(batch.weight * (critics + actor + temperature))
    return total, {"alpha": alpha, "error": jr.masked_mean(jnp.abs(error[:, 0]), batch.is_valid)}


def evaluate(carry, key):
    """Return the mean return of the policy without noise, float32[]."""

    def mean_action(_, obs):
        return None, LARGEST * jnp.tanh(ACTOR.apply(carry.params["actor"], obs)[0])

    return common.evaluate(TEST_ENVS, mean_action, key)


def main(argv=None):
    return common.train_to_target(
        __doc__,
        argv,
        name="SAC",
        steps=24_000,
        target=-200.0,
        logs={"title": "Temperature", "alpha": "alpha"},
        memory=BUFFER.memory(EXAMPLE),
        init=init,
        chunk=common.scanned(iteration),
        evaluation=evaluate,
        steps_per_iteration=NUM_ENVS,
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

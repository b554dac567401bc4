"""PPO on CartPole with `jr.rollout`, several seeds in one compiled loop.

    python examples/ppo.py --seeds 3   # a minute on two CPU cores; writes out/ppo.png

Copy `iteration` and `loss`. `iteration` fills the rollout in place, computes advantages, and scans
over shuffled minibatches, of which only the indices are made in advance. An episode that was cut by
the time limit has not failed: its last step is bootstrapped from the true final observation.

References:
  Schulman et al., "Proximal Policy Optimization Algorithms" (2017), equations 7 and 9.
  Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
  (2016).
  Here advantages are normalized over each rollout, policy and critic share no layer, and the
  learning rate decays to 0.
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

NUM_ENVS, LENGTH = 16, 128  # the rollout: parallel envs, and steps of each
NUM_EPOCHS, NUM_MINIBATCHES = 4, 4
ENVS = common.gymnax_envs("CartPole-v1", NUM_ENVS)
TEST_ENVS = common.gymnax_envs("CartPole-v1", 100)
SMALL = nn.initializers.orthogonal(0.01)
POLICY = nn.Sequential(
    [nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(2, kernel_init=SMALL)]
)
CRITIC = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(1)])
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(eps=1e-5))
OBS = jnp.zeros(4)
EXAMPLE = jr.Step(  # of one env; extras are returned with the steps
    OBS, 0, 0.0, terminated=False, truncated=False, final_obs=OBS, extras={"log_prob": 0.0}
)
ROLLOUT = jr.rollout(length=LENGTH, num_envs=NUM_ENVS, autoreset=jr.autoreset.GYMNAX)


class Carry(flax.struct.PyTreeNode):
    params: Any  # of (policy, critic)
    opt_state: Any
    rollout: jr.RolloutState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 4]
    key: jax.Array
    step: jax.Array  # int32[]: iterations so far


def init(key):
    key, reset_key, policy_key, critic_key = jax.random.split(key, 4)
    obs, env_state = ENVS.reset(reset_key)
    params = POLICY.init(policy_key, obs), CRITIC.init(critic_key, obs)
    rollout, opt_state = ROLLOUT.init(EXAMPLE), OPTIMIZER.init(params)
    return Carry(params, opt_state, rollout, env_state, obs, key, jnp.int32(0))


def iteration(carry, total):
    """Fill the rollout, and learn from it. `total` iterations set the learning rate."""
    carry = carry.replace(rollout=ROLLOUT.clear(carry.rollout))
    carry, _ = jax.lax.scan(act, carry, length=LENGTH)
    key, shuffle_key = jax.random.split(carry.key)

    steps = ROLLOUT.steps(carry.rollout)  # leaves [T, E, ...]
    value, last_value, final_value = (
        critic(carry.params, obs) for obs in (steps.obs, carry.obs, steps.final_obs)
    )
    (advantage, target), mask = ROLLOUT.advantages(
        carry.rollout, value, last_value, final_value, gamma=0.99, lambda_=0.95
    )
    data = (steps, jr.targets.normalize(advantage, mask), target, mask)

    def learn(learner, index):
        params, opt_state = learner
        gradient, log = jax.grad(loss, has_aux=True)(params, *ROLLOUT.minibatch(data, index))
        updates, opt_state = OPTIMIZER.update(gradient, opt_state)
        updates = optax.tree.scale(-2e-3 * (1 - carry.step / total), updates)
        return (optax.apply_updates(params, updates), opt_state), log

    minibatches = ROLLOUT.minibatches(
        shuffle_key, num_epochs=NUM_EPOCHS, num_minibatches=NUM_MINIBATCHES
    )
    learner = carry.params, carry.opt_state
    (params, opt_state), log = jax.lax.scan(learn, learner, minibatches)
    carry = carry.replace(params=params, opt_state=opt_state, key=key, step=carry.step + 1)
    return carry, jax.tree.map(jnp.mean, log)


def act(carry, _):
    """One step of every env, appended to the rollout."""
    key, act_key, env_key = jax.random.split(carry.key, 3)
    logits = policy(carry.params, carry.obs)
    action = jax.random.categorical(act_key, logits).astype(jnp.int32)
    obs, env_state, reward, terminated, truncated, final_obs = ENVS.step(
        env_key, carry.env_state, action
    )
    flags = {"terminated": terminated, "truncated": truncated}
    extras = {"log_prob": log_probability(logits, action)}
    step = jr.Step(carry.obs, action, reward, **flags, final_obs=final_obs, extras=extras)
    rollout = ROLLOUT.add(carry.rollout, step)
    return carry.replace(rollout=rollout, env_state=env_state, obs=obs, key=key), None


def policy(params, obs):
    return POLICY.apply(params[0], obs)


def critic(params, obs):
    return CRITIC.apply(params[1], obs).squeeze(-1)


def log_probability(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1).squeeze(-1)


def loss(params, steps, advantage, target, mask):
    """Return the loss of a minibatch, float32[], and what is plotted, float32[] by name."""
    logits = policy(params, steps.obs)
    ratio = jnp.exp(log_probability(logits, steps.action) - steps.extras["log_prob"])
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
    error = jnp.square(target - critic(params, steps.obs))
    log = {
        "entropy": jr.masked_mean(entropy / jnp.log(2), mask),
        "clipped": jr.masked_mean(jnp.abs(ratio - 1) > 0.2, mask),
    }
    return jr.masked_mean(0.5 * error - surrogate - 0.01 * entropy, mask), log


def evaluate(carry, key):
    """Return the mean return of the greedy policy, float32[]."""

    def greedy(_, obs):
        return None, jnp.argmax(policy(carry.params, obs), axis=-1)

    return common.evaluate(TEST_ENVS, greedy, key)


def main(argv=None):
    return common.train_to_target(
        __doc__,
        argv,
        name="PPO",
        steps=327_680,
        target=475.0,
        logs={
            "title": "Policy",
            "entropy": "entropy / entropy of random actions",
            "clipped": "clipped ratios",
        },
        memory=ROLLOUT.memory(EXAMPLE),
        init=init,
        chunk=common.scanned(iteration),
        evaluation=evaluate,
        steps_per_iteration=NUM_ENVS * LENGTH,
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")

"""Recurrent PPO from shuffled chunks of a rollout, on a task that needs memory.

    python examples/recurrent_ppo.py   # a minute on two CPU cores; writes out/recurrent_ppo.png

Copy `learn_from` and `unroll`. Each step is stored with the memory that the policy had before it.
Minibatches are chunks of consecutive steps of one env, leaves [L, B, ...]: `unroll` starts a chunk
from the memory of its first step, and resets it where an episode begins.

The env is bsuite's memory chain: it shows one bit, counts `--length` steps down, and pays 1 for the
action that names the bit, -1 for the other one. The same agent without a recurrent layer gets 0.

References:
  Schulman et al., "Proximal Policy Optimization Algorithms" (2017).
  Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022), for
  recurrent policies; there, minibatches are whole envs.
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

NUM_ENVS, LENGTH, CHUNK, NUM_FEATURES = 32, 64, 32, 32
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2e-3))
OBS = jnp.zeros(3)
EXTRAS = {"log_prob": 0.0, "memory": jnp.zeros(NUM_FEATURES)}
EXAMPLE = jr.Step(OBS, 0, 0.0, terminated=False, truncated=False, final_obs=OBS, extras=EXTRAS)
ROLLOUT = jr.rollout(length=LENGTH, num_envs=NUM_ENVS, autoreset=jr.autoreset.GYMNAX)


class Network(nn.Module):
    """Memory [B, NUM_FEATURES], obs [B, 3] -> next memory, logits [B, 2], value [B]."""

    is_recurrent: bool

    @nn.compact
    def __call__(self, memory, obs):
        x = nn.tanh(nn.Dense(NUM_FEATURES)(obs))
        if self.is_recurrent:
            memory, x = nn.GRUCell(NUM_FEATURES)(memory, x)
        else:
            x = nn.tanh(nn.Dense(NUM_FEATURES)(x))
        return memory, nn.Dense(2)(x), nn.Dense(1)(x).squeeze(-1)


class Carry(flax.struct.PyTreeNode):
    params: Any
    opt_state: Any
    rollout: jr.RolloutState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 3]
    memory: jax.Array  # float32[E, NUM_FEATURES], before it sees `obs`
    key: jax.Array


def init(network, envs, key):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = envs.reset(reset_key)
    memory = jnp.zeros((NUM_ENVS, NUM_FEATURES))
    params = network.init(network_key, memory, obs)
    opt_state, rollout = OPTIMIZER.init(params), ROLLOUT.init(EXAMPLE)
    return Carry(params, opt_state, rollout, env_state, obs, memory, key)


def reset(memory, is_first):
    """Return the memory, 0 for the envs in `is_first`, bool[B]."""
    return jnp.where(is_first[:, None], 0, memory)


def act(network, envs, carry, _):
    """One step of every env, stored with the memory before it."""
    key, act_key, env_key = jax.random.split(carry.key, 3)
    memory, logits, value = network.apply(carry.params, carry.memory, carry.obs)
    action = jax.random.categorical(act_key, logits).astype(jnp.int32)
    obs, env_state, reward, terminated, truncated, final_obs = envs.step(
        env_key, carry.env_state, action
    )
    extras = {"log_prob": log_probability(logits, action), "memory": carry.memory}
    flags = {"terminated": terminated, "truncated": truncated, "final_obs": final_obs}
    rollout = ROLLOUT.add(carry.rollout, jr.Step(carry.obs, action, reward, **flags, extras=extras))
    _, _, final_value = network.apply(carry.params, memory, final_obs)
    memory = reset(memory, terminated | truncated)
    carry = carry.replace(rollout=rollout, env_state=env_state, obs=obs, memory=memory, key=key)
    return carry, (value, final_value)


def iteration(network, envs, carry, total):
    """Fill the rollout, and learn from it."""
    carry = carry.replace(rollout=ROLLOUT.clear(carry.rollout))
    carry, (value, final_value) = jax.lax.scan(
        functools.partial(act, network, envs), carry, length=LENGTH
    )
    _, _, last_value = network.apply(carry.params, carry.memory, carry.obs)
    return learn_from(network, carry, value, last_value, final_value)


def learn_from(network, carry, value, last_value, final_value):
    key, shuffle_key = jax.random.split(carry.key)
    (advantage, target), mask = ROLLOUT.advantages(
        carry.rollout, value, last_value, final_value, gamma=0.99
    )
    advantage = jr.targets.normalize(advantage, mask)
    data = ROLLOUT.steps(carry.rollout), ROLLOUT.is_first(carry.rollout), advantage, target, mask

    def learn(learner, index):
        params, opt_state = learner
        chunks = ROLLOUT.minibatch(data, index)  # leaves [L, B, ...]
        value, gradient = jax.value_and_grad(loss, argnums=1)(network, params, *chunks)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    minibatches = ROLLOUT.minibatches(
        shuffle_key, num_epochs=4, num_minibatches=4, chunk_length=CHUNK
    )
    (params, opt_state), log = jax.lax.scan(learn, (carry.params, carry.opt_state), minibatches)
    return carry.replace(params=params, opt_state=opt_state, key=key), {"loss": log.mean()}


def unroll(network, params, steps, is_first):
    """Return logits [L, B, 2] and values [L, B] of chunks, from the memory of their first steps."""

    def step(memory, x):
        obs, is_first = x
        memory, logits, value = network.apply(params, reset(memory, is_first), obs)
        return memory, (logits, value)

    return jax.lax.scan(step, steps.extras["memory"][0], (steps.obs, is_first))[1]


def log_probability(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1).squeeze(-1)


def loss(network, params, steps, is_first, advantage, target, mask):
    logits, value = unroll(network, params, steps, is_first)
    ratio = jnp.exp(log_probability(logits, steps.action) - steps.extras["log_prob"])
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
    error = jnp.square(target - value)
    return jr.masked_mean(0.5 * error - surrogate - 0.01 * entropy, mask)


def evaluate(network, envs, carry, key):
    """Return the mean return of the greedy policy, float32[]."""

    def greedy(memory, obs):
        memory, logits, _ = network.apply(carry.params, memory, obs)
        return memory, jnp.argmax(logits, axis=-1)

    return common.evaluate(envs, greedy, key, jnp.zeros((envs.num_envs, NUM_FEATURES)))


def main(argv=None):
    parser = common.parser(__doc__, out="out/recurrent_ppo.png", steps=819_200, seeds=2)
    parser.add_argument("--length", type=int, default=10, help="steps to remember the bit for")
    args = parser.parse_args(argv)
    envs, test_envs = (
        common.gymnax_envs("MemoryChain-bsuite", number, memory_length=args.length)
        for number in (NUM_ENVS, 1_000)
    )
    runs = {}
    for name in ("feed-forward", "recurrent"):
        network = Network(is_recurrent=name == "recurrent")
        runs[name] = common.train(
            args,
            functools.partial(init, network, envs),
            common.scanned(functools.partial(iteration, network, envs)),
            functools.partial(evaluate, network, test_envs),
            steps_per_iteration=NUM_ENVS * LENGTH,
            name=name,
        )
    curves = {name: (run["steps"], run["returns"]) for name, run in runs.items()}
    title = f"One bit, remembered for {args.length} steps"
    common.plot(args.out, {"title": title, "ylabel": "mean return", "curves": curves})
    final = {name: round(float(run["returns"][-1].mean()), 3) for name, run in runs.items()}
    return common.report(
        final["recurrent"] >= 0.95 and final["feed-forward"] <= 0.2,
        env_steps=int(runs["recurrent"]["steps"][-1]),
        steps_per_second=runs["recurrent"]["steps_per_second"],
        feed_forward_return=final["feed-forward"],
        recurrent_return=final["recurrent"],
        seconds=round(sum(run["seconds"] for run in runs.values()), 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the returns are not those of memory")

"""R2D2: recurrent Q-learning from prioritized sequences, on a task that needs memory.

    python examples/r2d2.py --seeds 2   # 2 minutes on two CPU cores; writes out/r2d2.png

Copy `iteration`, `loss` and `unroll`. `iteration` stores the recurrent state with each step.
`unroll` starts each sequence from the stored state, warms it up over the burn-in, and resets it
where an episode begins. `loss` counts the steps in `mask`.

The env is bsuite's memory chain: it shows one bit, counts `--length` steps down, and pays 1 for the
action that names the bit, -1 for the other one. The same agent without a recurrent layer gets 0.

References:
  Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning" (2019).
  Osband et al., "Behaviour Suite for Reinforcement Learning" (2020), for the env.
  Here targets are one-step targets of plain rewards, and the target network is a moving average.
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

NUM_ENVS, NUM_FEATURES = 16, 32  # size of the recurrent state
OPTIMIZER = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(2e-3))
OBS = jnp.zeros(3)
EXAMPLE = jr.Step(  # of one env
    OBS,
    0,
    0.0,
    terminated=False,
    truncated=False,
    final_obs=OBS,
    extras={"memory": jnp.zeros(NUM_FEATURES)},
)
BUFFER = jr.sequences(
    capacity=65_536,
    num_envs=NUM_ENVS,
    batch_size=32,
    length=24,
    burn_in=4,
    recurrent_state_key="memory",
    autoreset=jr.autoreset.GYMNAX,
    sampler=jr.Prioritized(alpha=0.6),
)


class Network(nn.Module):
    """Recurrent state [B, NUM_FEATURES], obs [B, 3] -> next state, action values [B, 2]."""

    is_recurrent: bool

    @nn.compact
    def __call__(self, memory, obs):
        x = nn.relu(nn.Dense(NUM_FEATURES)(obs))
        if self.is_recurrent:
            memory, x = nn.GRUCell(NUM_FEATURES)(memory, x)
        else:
            x = nn.tanh(nn.Dense(NUM_FEATURES)(x))
        return memory, nn.Dense(2)(x)


class Carry(flax.struct.PyTreeNode):
    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: jr.ReplayState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 3]
    memory: jax.Array  # float32[E, NUM_FEATURES]: the recurrent state before it sees `obs`
    key: jax.Array


def init(network, envs, key):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = envs.reset(reset_key)
    memory = jnp.zeros((NUM_ENVS, NUM_FEATURES))
    params = network.init(network_key, memory, obs)
    opt_state, buffer_state = OPTIMIZER.init(params), BUFFER.init(EXAMPLE)
    return Carry(params, params, opt_state, buffer_state, env_state, obs, memory, key)


def iteration(network, envs, carry, total):
    """One step of every env, and one gradient step."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    memory, value = network.apply(carry.params, carry.memory, carry.obs)
    action = common.epsilon_greedy(act_key, jnp.argmax(value, axis=-1), 0.1, 2)
    obs, env_state, reward, terminated, truncated, final_obs = envs.step(
        env_key, carry.env_state, action
    )
    flags, extras = {"terminated": terminated, "truncated": truncated}, {"memory": carry.memory}
    step = jr.Step(carry.obs, action, reward, **flags, final_obs=final_obs, extras=extras)
    buffer_state = BUFFER.add(carry.buffer_state, step)
    memory = reset(memory, terminated | truncated)

    batch = BUFFER.sample(buffer_state, sample_key, beta=0.6)
    (error, td_error), gradient = jax.value_and_grad(loss, argnums=1, has_aux=True)(
        network, carry.params, carry.target_params, batch
    )
    priority = jr.sequence_priority(td_error, batch.experience.mask) + 1e-3
    buffer_state = BUFFER.update_priorities(buffer_state, batch.index, priority)
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, 0.02)
    carry = Carry(params, target_params, opt_state, buffer_state, env_state, obs, memory, key)
    return carry, {"loss": error}


def reset(memory, is_first):
    """Return the recurrent state, 0 for the envs in `is_first`, bool[E]."""
    return jnp.where(is_first[:, None], 0, memory)


def loss(network, params, target_params, batch):
    """Return the weighted loss of double Q-learning, float32[], and TD errors, float32[B, T]."""
    s = batch.experience
    online, target = (unroll(network, p, s) for p in (params, target_params))  # [B, T + 1, 2]
    best = jnp.argmax(online[:, 1:], axis=-1)
    next_value = jnp.where(s.terminated, 0, pick(target[:, 1:], best))
    td_error = s.reward + 0.99 * jax.lax.stop_gradient(next_value) - pick(online[:, :-1], s.action)
    return jr.masked_mean(batch.weight[:, None] * jnp.square(td_error), s.mask), td_error


def unroll(network, params, sequences):
    """Return action values of each step, float32[B, T + 1, 2]. The burn-in gets no gradient."""

    def step(memory, x):
        obs, is_first, is_burn_in = x
        memory, value = network.apply(params, reset(memory, is_first), obs)
        return jnp.where(is_burn_in, jax.lax.stop_gradient(memory), memory), value

    obs, is_first = jnp.moveaxis(sequences.obs, 1, 0), sequences.is_first.T
    is_burn_in = jnp.arange(len(obs)) < BUFFER.view.burn_in
    _, value = jax.lax.scan(step, sequences.recurrent_state, (obs, is_first, is_burn_in))
    return jnp.moveaxis(value, 0, 1)


def pick(values, action):
    return jnp.take_along_axis(values, action[..., None], axis=-1).squeeze(-1)


def evaluate(network, envs, carry, key):
    """Return the mean return of the greedy policy, float32[]."""

    def greedy(memory, obs):
        memory, value = network.apply(carry.params, memory, obs)
        return memory, jnp.argmax(value, axis=-1)

    memory = jnp.zeros((envs.num_envs, NUM_FEATURES))
    return common.evaluate(envs, greedy, key, memory)


def main(argv=None):
    parser = common.parser(__doc__, out="out/r2d2.png", steps=48_000, seeds=2)
    most = BUFFER.view.length - 2
    parser.add_argument(
        "--length",
        type=int,
        default=20,
        choices=range(1, most + 1),
        metavar="STEPS",
        help=f"steps to remember the bit for, at most {most}: a sequence has {most + 2} steps",
    )
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
            steps_per_iteration=NUM_ENVS,
            name=name,
        )
    curves = {name: (run["steps"], run["returns"]) for name, run in runs.items()}
    losses = {name: (run["steps"], run["logs"]["loss"]) for name, run in runs.items()}
    title = f"One bit, remembered for {args.length} steps"
    panels = [{"title": title, "ylabel": "return, mean of 1,000 episodes", "curves": curves}]
    common.plot(args.out, *panels, {"title": "Weighted squared TD error", "curves": losses})
    final = {name: round(float(run["returns"][-1].mean()), 3) for name, run in runs.items()}
    return common.report(
        final["recurrent"] >= 0.95 and final["feed-forward"] <= 0.2,
        env_steps=int(runs["recurrent"]["steps"][-1]),
        steps_per_second=runs["recurrent"]["steps_per_second"],
        feed_forward_return=final["feed-forward"],
        recurrent_return=final["recurrent"],
        seconds=round(sum(run["seconds"] for run in runs.values()), 1),
        buffer_bytes=BUFFER.memory(EXAMPLE).total,
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: recurrent >= 0.95, feed-forward <= 0.2")

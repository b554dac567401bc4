"""Recurrent Q-learning from sequences, beside the same agent without memory, on a task that asks
for one.

    python examples/recall.py --seed 0        # a minute on two CPU cores; writes out/recall.png

The env is bsuite's memory chain: it shows one bit, counts `--length` steps down, and then pays 1
for the action that names the bit and -1 for the other one: whoever remembers nothing gets 0 on
average. What to look at: `iteration` stores the network's memory beside each step; `unroll` starts
each sequence from what was stored, warms it up over the burn-in and forgets where an episode opens;
and `loss` counts nothing that is padded.

What is reported is the last networks, acting greedily, on episodes that no other evaluation has
seen.

Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning"
(2019); the env is of Osband et al., "Behaviour Suite for Reinforcement Learning" (2020). Where we
differ: one-step targets of plain rewards, and a target network that is a moving average.
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
NUM_FEATURES = 32  # of the network's memory
DISCOUNT = 0.99
EXPLORATION = 0.1  # of actions are random while training
LEARNING_RATE = 2e-3
TARGET_RATE = 0.02  # how far the target network moves towards the online one in one step
SMALLEST_PRIORITY = 1e-3  # added to every sequence's: one of priority 0 would never be drawn again
EPISODES = 1_000  # of an evaluation
CHUNKS = 30  # of a run: after each an evaluation, and the progress bar moves

ENV, ENV_PARAMS = gymnax.make("MemoryChain-bsuite")
RESET, STEP = jax.vmap(ENV.reset, (0, None)), jax.vmap(ENV.step, (0, 0, 0, None))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(LEARNING_RATE))
BUFFER = jr.sequences(
    capacity=65_536,
    num_envs=NUM_ENVS,
    batch_size=32,
    length=24,
    burn_in=4,
    recurrent_state_key="memory",
    autoreset="same_step",
    sampler=jr.Prioritized(alpha=0.6),
)


class Network(nn.Module):
    """Values of the actions, float32[B, 2], and the memory that goes on, float32[B,
    NUM_FEATURES]."""

    is_recurrent: bool

    @nn.compact
    def __call__(self, memory, obs):
        x = nn.relu(nn.Dense(NUM_FEATURES)(obs))
        if self.is_recurrent:
            memory, x = nn.GRUCell(NUM_FEATURES)(memory, x)
        else:
            x = nn.tanh(nn.Dense(NUM_FEATURES)(x))
        return memory, nn.Dense(ENV.num_actions)(x)


class Carry(flax.struct.PyTreeNode):
    """All that changes while training. E envs."""

    params: Any
    target_params: Any
    opt_state: Any
    buffer_state: jr.ReplayState
    env_state: Any  # leaves [E, ...]
    obs: jax.Array  # float32[E, 3]
    memory: jax.Array  # float32[E, NUM_FEATURES]: the network's, before it sees `obs`
    key: jax.Array
    step: jax.Array  # int32[]: env steps so far


def example_step():
    """One env's step, by shape and dtype alone."""
    obs, flag, number = (
        jax.ShapeDtypeStruct((3,), jnp.float32),
        jax.ShapeDtypeStruct((), bool),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    action, memory = (
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((NUM_FEATURES,), jnp.float32),
    )
    return jr.Step(
        obs,
        action,
        number,
        terminated=flag,
        truncated=flag,
        final_obs=obs,
        extras={"memory": memory},
    )


@functools.partial(jax.jit, static_argnames="network")
def init(key, network, env_params):
    key, reset_key, network_key = jax.random.split(key, 3)
    obs, env_state = RESET(jax.random.split(reset_key, NUM_ENVS), env_params)
    memory = jnp.zeros((NUM_ENVS, NUM_FEATURES))
    params = network.init(network_key, memory, obs)
    return Carry(
        params,
        params,
        OPTIMIZER.init(params),
        BUFFER.init(example_step()),
        env_state,
        obs,
        memory,
        key,
        jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnames=("network", "iterations"), donate_argnums=0)
def train(carry, network, env_params, iterations):
    """Takes the carry over. Returns it, and the loss of each iteration, float32[I]."""
    return jax.lax.scan(
        lambda carry, _: iteration(carry, network, env_params), carry, length=iterations
    )


def iteration(carry, network, env_params):
    """One step of every env and one gradient step."""
    key, act_key, env_key, sample_key = jax.random.split(carry.key, 4)
    memory, value = network.apply(carry.params, carry.memory, carry.obs)
    action = explore(act_key, jnp.argmax(value, axis=-1))
    obs, env_state, reward, terminated, truncated, info = STEP(
        jax.random.split(env_key, NUM_ENVS), carry.env_state, action, env_params
    )
    step = jr.Step(
        carry.obs,
        action,
        reward,
        terminated=terminated,
        truncated=truncated,
        final_obs=info["final_observation"],
        extras={"memory": carry.memory},
    )
    buffer_state = BUFFER.add(carry.buffer_state, step)
    memory = forget(memory, terminated | truncated)

    batch = BUFFER.sample(buffer_state, sample_key, beta=0.6)
    (error, td_error), gradient = jax.value_and_grad(loss, has_aux=True)(
        carry.params, carry.target_params, network, batch.experience, batch.weight
    )
    updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
    params = optax.apply_updates(carry.params, updates)
    target_params = optax.incremental_update(params, carry.target_params, TARGET_RATE)
    buffer_state = BUFFER.update_priorities(
        buffer_state,
        batch.index,
        jr.sequence_priority(td_error, batch.experience.mask) + SMALLEST_PRIORITY,
    )
    return Carry(
        params,
        target_params,
        opt_state,
        buffer_state,
        env_state,
        obs,
        memory,
        key,
        carry.step + NUM_ENVS,
    ), error


def explore(key, action):
    coin_key, action_key = jax.random.split(key)
    is_random = jax.random.bernoulli(coin_key, EXPLORATION, action.shape)
    return jnp.where(
        is_random, jax.random.randint(action_key, action.shape, 0, ENV.num_actions), action
    )


def forget(memory, is_over):
    """The memory, and 0 for the envs where `is_over`, bool[E]."""
    return jnp.where(is_over[:, None], 0, memory)


def loss(params, target_params, network, items, weight):
    """The weighted squared error of double Q-learning, float32[], and the TD errors, float32[B,
    T]."""
    # [B, T + 1, actions]
    online, target = (unroll(network, p, items) for p in (params, target_params))
    best = jnp.argmax(online[:, 1:], axis=-1)
    next_value = jnp.where(items.terminated, 0, pick(target[:, 1:], best))
    td_error = (
        items.reward
        + DISCOUNT * jax.lax.stop_gradient(next_value)
        - pick(online[:, :-1], items.action)
    )
    td_error = jnp.where(items.mask, td_error, 0)
    return jnp.sum(weight[:, None] * jnp.square(td_error)) / jnp.maximum(
        items.mask.sum(), 1
    ), td_error


def unroll(network, params, items):
    """Values along each sequence: float32[B, T + 1, actions]. The burn-in warms the memory up, and
    gets no gradient."""

    def step(memory, x):
        obs, is_first, is_burn_in = x
        memory, value = network.apply(params, forget(memory, is_first), obs)
        return jnp.where(is_burn_in, jax.lax.stop_gradient(memory), memory), value

    is_burn_in = jnp.arange(items.obs.shape[1]) < BUFFER.view.burn_in
    _, value = jax.lax.scan(
        step, items.recurrent_state, (jnp.moveaxis(items.obs, 1, 0), items.is_first.T, is_burn_in)
    )
    return jnp.moveaxis(value, 0, 1)


def pick(values, action):
    return jnp.take_along_axis(values, action[..., None], axis=-1).squeeze(-1)


@functools.partial(jax.jit, static_argnames="network")
def evaluate(params, key, network, env_params):
    """Mean return of the greedy policy over the first episode of each of `EPISODES` envs:
    float32[]."""
    reset_key, step_key = jax.random.split(key)
    start = (
        *RESET(jax.random.split(reset_key, EPISODES), env_params),
        jnp.zeros((EPISODES, NUM_FEATURES)),
    )

    def act(loop):
        obs, env_state, memory, total, is_running, key = loop
        key, env_key = jax.random.split(key)
        memory, value = network.apply(params, memory, obs)
        action = jnp.argmax(value, axis=-1)
        keys = jax.random.split(env_key, EPISODES)
        obs, env_state, reward, terminated, truncated, _ = STEP(keys, env_state, action, env_params)
        return (
            obs,
            env_state,
            memory,
            total + jnp.where(is_running, reward, 0),
            is_running & ~(terminated | truncated),
            key,
        )

    loop = (*start, jnp.zeros(EPISODES), jnp.ones(EPISODES, bool), step_key)
    return jax.lax.while_loop(lambda loop: jnp.any(loop[4]), act, loop)[3].mean()


def run(name, network, args):
    """Trains one agent. Returns its mean return after each chunk and at last, and its losses,
    [C]."""
    env_params = ENV_PARAMS.replace(memory_length=args.length)
    init_key, evaluation_key, final_key = jax.random.split(jax.random.key(args.seed), 3)
    iterations = max(1, args.steps // (CHUNKS * NUM_ENVS))
    carry = init(init_key, network, env_params)
    returns, losses = [], []
    for key in (
        bar := tqdm(jax.random.split(evaluation_key, CHUNKS), unit="chunk", desc=f"{name:12}")
    ):
        carry, error = train(carry, network, env_params, iterations)
        losses.append(float(error.mean()))
        returns.append(float(evaluate(carry.params, key, network, env_params)))
        bar.set_postfix({"mean return": f"{returns[-1]:.2f}"})
    final = float(evaluate(carry.params, final_key, network, env_params))
    return {"env_steps": int(carry.step), "returns": returns, "losses": losses, "final": final}


def plot(path, runs, length):
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, color in (("feed-forward", "tab:gray"), ("recurrent", "tab:blue")):
        steps = np.linspace(0, runs[name]["env_steps"], CHUNKS + 1)[1:]
        left.plot(steps, runs[name]["returns"], color=color, linewidth=2, label=name)
        right.plot(steps, runs[name]["losses"], color=color, linewidth=2, label=name)
    left.set(
        title=f"One bit, remembered for {length} steps",
        ylabel=f"mean return of {EPISODES:,} episodes",
        ylim=(-1.1, 1.4),
    )
    right.set(
        title="Weighted squared TD error",
        ylabel="mean of the chunk",
        ylim=(0, 1.3 * max(runs["feed-forward"]["losses"])),
    )
    for axes in (left, right):
        axes.set_xlabel("env steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", frameon=False)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv=None):
    """Train both agents, evaluate, plot and print a table; returns its figures, and whether the
    claim holds."""
    parser = argparse.ArgumentParser(
        description="Recurrent Q-learning from sequences on a memory task."
    )
    parser.add_argument("--seed", type=int, default=0)
    most = BUFFER.view.length - 2
    help = (
        f"steps for which the bit is to be remembered, at most {most}: a sequence that is "
        f"learned from has {most + 2}"
    )
    parser.add_argument(
        "--length", type=int, default=20, choices=range(1, most + 1), metavar="STEPS", help=help
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=96_000,
        help="env steps of each agent, rounded down to whole chunks",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("out/recall.png"),
        help="where the plot goes",
    )
    args = parser.parse_args(argv)
    began = time.perf_counter()
    networks = {
        "feed-forward": Network(is_recurrent=False),
        "recurrent": Network(is_recurrent=True),
    }
    runs = {name: run(name, network, args) for name, network in networks.items()}
    plot(args.out, runs, args.length)
    figures = {
        "env_steps_of_each": runs["recurrent"]["env_steps"],
        "feed-forward_return": round(runs["feed-forward"]["final"], 3),
        "recurrent_return": round(runs["recurrent"]["final"], 3),
        "seconds": round(time.perf_counter() - began, 1),
        "buffer_bytes": BUFFER.memory(example_step()).total,
        "plot": str(args.out),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):20}", value if isinstance(value, str) else f"{value:,}")
    return figures | {
        "reached": figures["recurrent_return"] >= 0.95 and figures["feed-forward_return"] <= 0.2
    }


if __name__ == "__main__":
    sys.exit(
        0
        if main()["reached"]
        else "not reached: the recurrent agent did not recall, or the other one guessed too well; "
        "the claim is for a full run"
    )

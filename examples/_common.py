"""Shared by the examples: gymnax envs, evaluation, arguments, training by chunks, plots, tables."""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from tqdm import tqdm

COLORS = ("tab:blue", "tab:orange", "tab:gray", "tab:green")


class Envs(NamedTuple):
    """Parallel envs, which reset within the step that is done.

    Attributes:
      reset: key -> obs [E, ...], env state.
      step: key, env state, action [E, ...] -> obs, env state, reward, terminated, truncated, final
        obs, all [E, ...].
      num_envs: Number E of envs.
    """

    reset: Callable
    step: Callable
    num_envs: int


def gymnax_envs(name: str, num_envs: int, **options: Any) -> Envs:
    """Make parallel gymnax envs.

    Args:
      name: Of gymnax.
      num_envs: Number of envs.
      options: Replace parameters of the env.
    """
    import gymnax

    env, params = gymnax.make(name)
    params = params.replace(**options)

    def reset(key):
        return jax.vmap(env.reset, (0, None))(jax.random.split(key, num_envs), params)

    def step(key, env_state, action):
        obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(key, num_envs), env_state, action, params
        )
        return obs, env_state, reward, terminated, truncated, info["final_observation"]

    return Envs(reset, step, num_envs)


def evaluate(envs: Envs, policy: Callable, key: jax.Array, memory: Any = None) -> jax.Array:
    """Return the mean return of the first episode of each env, float32[].

    Args:
      envs: As many as episodes are wanted.
      policy: Memory, obs [E, ...] -> memory, action [E, ...].
      key: Random key.
      memory: The policy's at the start of an episode. Default: None, for a policy without memory.
    """
    reset_key, key = jax.random.split(key)

    def step(loop):
        obs, env_state, memory, total, is_running, key = loop
        key, env_key = jax.random.split(key)
        memory, action = policy(memory, obs)
        obs, env_state, reward, terminated, truncated, _ = envs.step(env_key, env_state, action)
        total += jnp.where(is_running, reward, 0)
        return obs, env_state, memory, total, is_running & ~(terminated | truncated), key

    zeros = jnp.zeros(envs.num_envs)
    loop = (*envs.reset(reset_key), memory, zeros, zeros == 0, key)
    return jax.lax.while_loop(lambda loop: jnp.any(loop[4]), step, loop)[3].mean()


def where(flag: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` for the envs in `flag`, bool[E], and `old` for the others, leaves [E, ...]."""
    pick = jax.vmap(lambda flag, new, old: jnp.where(flag, new, old))
    return jax.tree.map(lambda x, y: pick(flag, x, y), new, old)


def epsilon_greedy(key: jax.Array, action: jax.Array, epsilon: Any, num_actions: int) -> jax.Array:
    """Return each action, int32[E], or with probability `epsilon` a random one."""
    coin_key, action_key = jax.random.split(key)
    is_random = jax.random.bernoulli(coin_key, epsilon, action.shape)
    return jnp.where(
        is_random, jax.random.randint(action_key, action.shape, 0, num_actions), action
    )


def parser(doc: str, *, out: str, steps: int, seeds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all examples have.

    Args:
      doc: Docstring of the example.
      out: Default path of the plot.
      steps: Default number of env steps.
      seeds: Default number of seeds that are trained at once. Default: one seed.
    """
    made = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    made.add_argument("--seed", type=int, default=0, help="the first seed")
    if seeds is not None:
        made.add_argument("--seeds", type=int, default=seeds, help="trained at once, by vmap")
    made.add_argument("--steps", type=int, default=steps, help="env steps of each seed")
    made.add_argument("--out", type=pathlib.Path, default=pathlib.Path(out), help="the plot")
    return made


def scanned(iteration: Callable) -> Callable:
    """Return a `chunk` for `train`, which runs many iterations of all seeds in one program.

    Args:
      iteration: carry, total iterations of the run -> carry, scalars by name, of which the chunk
        returns the means.
    """

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def chunk(carry, total, iterations):
        carry, log = jax.lax.scan(lambda c, _: iteration(c, total), carry, length=iterations)
        return carry, jax.tree.map(jnp.mean, log)

    return chunk


def train(
    args: argparse.Namespace,
    init: Callable,
    chunk: Callable,
    evaluation: Callable,
    *,
    steps_per_iteration: int,
    num_chunks: int = 20,
    name: str = "",
) -> dict[str, Any]:
    """Train all seeds at once, with an evaluation after each chunk and a progress bar.

    Args:
      args: Of `parser`.
      init: key -> carry.
      chunk: carry, total iterations, iterations of a chunk -> carry, scalars by name. It donates
        the carry, and takes one with a leading axis of seeds [S].
      evaluation: carry, key -> float32[].
      steps_per_iteration: Env steps of an iteration.
      num_chunks: Number of chunks. Default: 20.
      name: Of the progress bar. Default: none.

    Returns:
      The carry; "steps" [C]; "returns" [C, S]; "logs", by name [C, S]; "steps_per_second" of all
      seeds; "seconds".
    """
    began = time.perf_counter()
    iterations = max(1, args.steps // (num_chunks * steps_per_iteration))
    seeds = jnp.arange(args.seed, args.seed + args.seeds)
    init_keys, keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(seeds).T
    carry = jax.jit(jax.vmap(init))(init_keys)
    evaluation = jax.jit(jax.vmap(evaluation))
    total = num_chunks * iterations
    chunk = chunk.lower(carry, total, iterations).compile()  # so that steps/s has no compilation
    returns, logs, seconds = [], [], 0.0
    for number in (bar := tqdm(range(num_chunks), unit="chunk", desc=name or None)):
        chunk_began = time.perf_counter()
        carry, log = jax.block_until_ready(chunk(carry, total))
        seconds += time.perf_counter() - chunk_began
        logs.append(jax.device_get(log))
        returns.append(
            np.asarray(evaluation(carry, jax.vmap(jax.random.fold_in, (0, None))(keys, number)))
        )
        bar.set_postfix({"mean return": f"{returns[-1].mean():.2f}"})
    steps = steps_per_iteration * iterations * np.arange(1, num_chunks + 1)
    return {
        "carry": carry,
        "steps": steps,
        "returns": np.stack(returns),
        "logs": {name: np.stack([log[name] for log in logs]) for name in logs[0]},
        "steps_per_second": round(args.seeds * int(steps[-1]) / seconds),
        "seconds": round(time.perf_counter() - began, 1),
    }


def train_to_target(
    doc: str,
    argv: Any,
    *,
    name: str,
    steps: int,
    target: float,
    logs: dict[str, Any],
    memory: Any,
    **training: Any,
) -> dict[str, Any]:
    """Parse arguments, train one agent with three seeds, plot its returns, and report.

    Args:
      doc: Docstring of the example.
      argv: Arguments of the command line, or None for the process' own.
      name: Of the agent; its plot is out/name.png.
      steps: Default number of env steps.
      target: Default mean return to be reached.
      logs: Panel beside the returns: "title", and labels by the names of what `chunk` returned.
      memory: `memory(example)` of the buffer.
      training: Arguments of `train`.
    """
    made = parser(doc, out=f"out/{name.lower()}.png", steps=steps, seeds=3)
    made.add_argument("--target", type=float, default=target, help="of the mean return")
    args = made.parse_args(argv)
    run = train(args, **training)
    curves = {logs[log]: (run["steps"], run["logs"][log]) for log in logs if log != "title"}
    returns = {name: (run["steps"], run["returns"])}
    panels = [
        {"title": "Return, mean of 100 episodes", "curves": returns},
        {"title": logs["title"], "curves": curves},
    ]
    plot(args.out, *panels)
    final = round(float(run["returns"][-1].mean()), 1)
    return report(
        final >= args.target,
        env_steps=int(run["steps"][-1]),
        steps_per_second=run["steps_per_second"],
        evaluation_return=final,
        seconds=run["seconds"],
        buffer_bytes=memory.total,
        plot=str(args.out),
    )


def plot(path: pathlib.Path, *panels: dict[str, Any]) -> None:
    """Write a figure with a panel beside the other.

    Args:
      path: Of the PNG file.
      panels: "curves", by label: x [C] and y [C] or [C, S], of which the mean over S seeds is
        drawn, and each seed thinly; others are set on the axes, such as "title" or "ylim".
    """
    figure = Figure(figsize=(5.2 * len(panels), 4), layout="constrained")
    for axes, panel in zip(np.ravel(figure.subplots(1, len(panels))), panels, strict=True):
        options = {name: value for name, value in panel.items() if name != "curves"}
        for (label, (x, y)), color in zip(panel["curves"].items(), COLORS, strict=False):
            seeds = np.reshape(y, (len(x), -1))
            axes.plot(x, seeds, color=color, linewidth=1, alpha=0.25)
            axes.plot(x, seeds.mean(axis=1), color=color, linewidth=2, label=label)
        axes.set(**{"xlabel": "env steps", **options})
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def report(reached: bool, **figures: Any) -> dict[str, Any]:
    """Print a table of figures, and return them.

    Args:
      reached: The claim of the example holds.
      figures: Numbers and texts by name.
    """
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int | float) else value
        print(f"{name.replace('_', ' '):26}{shown}")
    return figures | {"reached": reached}

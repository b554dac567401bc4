"""Look-ups in episodes by jaxreplay: times `sample` of a full buffer whose episodes have one
length."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from cases import BATCH_SIZE, Case
from steps import episode_steps
from timing import stopwatch
from workload import reading

import jaxreplay as jr

DISCOUNT = 0.99


def prepare(case: Case) -> Callable[[], float]:
    buffer = _buffer_of(case)
    steps = jax.tree.map(jnp.asarray, episode_steps(case))
    state = buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), steps))
    state = jax.block_until_ready(jax.jit(buffer.extend, donate_argnums=0)(state, steps))
    keys = jax.random.split(jax.random.key(1), case.iterations)
    return stopwatch(
        reading(case, lambda state, key: buffer.sample(state, key).experience, state, keys),
        case.iterations,
    )


def _buffer_of(case: Case) -> jr.ReplayBuffer:
    """Return the case's buffer, with a row for each step and, for next-step autoreset, a final row
    after each episode."""
    sizes: dict[str, Any] = {
        "capacity": case.capacity,
        "num_envs": case.num_envs,
        "batch_size": BATCH_SIZE,
        "autoreset": "next_step",
    }
    if case.buffer == "episodes":
        return jr.future_pairs(**sizes, gamma=DISCOUNT)
    if case.buffer == "two terminals":
        return jr.future_pairs(**sizes, gamma=DISCOUNT, max_terminals=2)
    if case.buffer == "sequences":
        return jr.sequences(**sizes, length=16, burn_in=4)
    return jr.hindsight(
        jr.uniform(**sizes),
        lambda achieved, goal, step: -jnp.any(achieved != goal).astype(jnp.float32),
    )

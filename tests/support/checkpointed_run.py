"""Run that saves regularly until it is killed, and prints "saved" and its step at each save.

Usage: `python checkpointed_run.py PATH`.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from jaxreplay.storage import stored_arrays

REPLAY = jr.items(capacity=256, num_envs=4, batch_size=8)
EXAMPLE = {
    "number": jax.ShapeDtypeStruct((), jnp.int32),
    "bytes": jax.ShapeDtypeStruct((100,), jnp.uint8),
}


def step(t, num_envs):
    """Return a step: for env e at time t, the number 1000000 * e + t, and bytes derived from it."""
    number = 1_000_000 * np.arange(num_envs, dtype=np.int32) + t
    byte = (number % 251).astype(np.uint8)
    return {"number": number, "bytes": byte[:, None] * np.ones(100, np.uint8)}


@jax.jit
def _contents(state):
    values = stored_arrays.tree_map(stored_arrays.values, state.rows.steps)
    return values, state.head, state.filled


def numbers(replay, state):
    """Return the numbers in each stream, oldest first, after a check against their bytes."""
    stored, head, filled = jax.device_get(_contents(state))
    assert (stored["bytes"] == (stored["number"] % 251)[:, None]).all()
    by_env = stored["number"].reshape(replay.num_envs, -1)
    return [np.roll(row, -head)[len(row) - filled :].tolist() for row in by_env]


def expected(replay, end):
    """Return the numbers that a run of `end` steps holds in each stream, oldest first."""
    start = max(0, end - replay.capacity // replay.num_envs)
    return [[1_000_000 * env + t for t in range(start, end)] for env in range(replay.num_envs)]


def items(capacity=64, num_envs=4, **options):
    return jr.items(capacity=capacity, num_envs=num_envs, batch_size=8, **options)


@functools.partial(jax.jit, donate_argnums=1)
def _added(replay, state, start, stop):
    add = lambda t, state: replay.add(state, step(t, replay.num_envs))
    return jax.lax.fori_loop(start, stop, add, state)


def added(replay, state, start, count):
    """Add the steps `start` to `start + count - 1` one by one, to a state that is donated."""
    return _added(replay, state, start, start + count)


def begun(replay, stop, start=0):
    """Return a new state with the steps `start` to `stop - 1`."""
    return added(replay, jr.jit(replay).init(EXAMPLE), start, stop - start)


def main(path):
    checkpointer = Checkpointer(path, REPLAY, max_to_keep=2, chunk_bytes=4096)
    state, t = REPLAY.init(EXAMPLE), 0
    if steps := checkpointer.all_steps():
        state, t = checkpointer.restore(EXAMPLE), steps[-1]
        assert numbers(REPLAY, state) == expected(REPLAY, t)
    add = jr.jit(REPLAY).add
    while True:
        state = add(state, step(t, REPLAY.num_envs))
        t += 1
        checkpointer.save(state, t)
        sys.stdout.write(f"saved {t}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run that saves regularly until it is killed, and prints "saved" and its step at each save.

Usage: `python checkpointed_run.py PATH wait|advance`.
"""

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
    return {
        "number": number,
        "bytes": np.repeat(number[:, None] % 251, 100, axis=1).astype(np.uint8),
    }


def numbers(replay, state):
    """Return the numbers in each stream, oldest first, after a check against their bytes."""
    stored = jax.device_get(
        stored_arrays.read_plain(state.streams.steps, jnp.arange(replay.capacity))
    )
    assert (stored["bytes"] == (stored["number"] % 251)[:, None]).all()
    head, filled = int(state.streams.head), int(state.streams.filled)
    by_env = stored["number"].reshape(replay.num_envs, -1)
    return [np.roll(row, -head)[len(row) - filled :].tolist() for row in by_env]


def expected(replay, end):
    """Return the numbers that a run of `end` steps holds in each stream, oldest first."""
    start = max(0, end - replay.capacity // replay.num_envs)
    return [[1_000_000 * env + t for t in range(start, end)] for env in range(replay.num_envs)]


def items(capacity=64, num_envs=4, **options):
    return jr.items(capacity=capacity, num_envs=num_envs, batch_size=8, **options)


def added(replay, state, start, count):
    buffer = jr.jit(replay)
    for t in range(start, start + count):
        state = buffer.add(state, step(t, replay.num_envs))
    return state


def main(path, how):
    checkpointer = Checkpointer(path, REPLAY, max_to_keep=2, chunk_bytes=4096)
    state, t = REPLAY.init(EXAMPLE), 0
    if steps := checkpointer.all_steps():
        state, t = checkpointer.restore(EXAMPLE), steps[-1]
        assert numbers(REPLAY, state) == expected(REPLAY, t)
    add = jr.jit(REPLAY).add
    while True:
        checkpointer.advance(state)
        state = add(state, step(t, REPLAY.num_envs))
        t += 1
        if how == "wait" or t % 20 == 0:
            checkpointer.save(state, t, blocking=how == "wait")
            sys.stdout.write(f"saved {t}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

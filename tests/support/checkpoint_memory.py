"""Print as JSON the peak memory of saves, a restore and a resize, beside the state.

Usage: `python checkpoint_memory.py PATH GIGABYTES ROW_BYTES`.
"""

import ctypes
import gc
import json
import pathlib
import sys

import jax
import jax.numpy as jnp

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer


def memory(field):
    """Return this process's resident memory in bytes: now (VmRSS), or its peak (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(function):
    """Call a function; return its peak memory in bytes beyond the memory before, and its result."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
    before = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    result = function()
    return memory("VmHWM") - before, result


def filled(replay, example, count):
    """Return a state of random rows, which do not compress; they are added in blocks."""
    block = max(count // 200, 1)
    fill = jax.jit(
        lambda state, key: replay.extend(
            state, jax.random.bits(key, (block, 1, *example.shape), jnp.uint8)
        ),
        donate_argnums=0,
    )
    state = replay.init(example)
    for number in range(-(-count // block)):
        state = fill(state, jax.random.key(number))
    return jax.block_until_ready(state)


def resized(path, count, row):
    """Return the peak memory of a save with `blocking=False` and of a restore into a larger buffer.

    The buffer has all that can be kept per row: priorities, a mask and episodes.
    """
    example = {"obs": ((row,), jnp.uint8), "action": ((), jnp.float32), "reward": ((), jnp.float32)}
    example |= {"terminated": ((), bool), "truncated": ((), bool)}
    example = jr.Step(**{name: jax.ShapeDtypeStruct(*leaf) for name, leaf in example.items()})

    def buffer(capacity):
        return jr.prioritized(
            capacity=capacity,
            num_envs=1,
            batch_size=1,
            autoreset="next_step",
            allow_mask=True,
            track_episodes=True,
        )

    replay, larger = buffer(count), buffer(count + count // 5)
    steps = jax.tree.map(lambda leaf: jnp.ones((count // 100, 1, *leaf.shape), leaf.dtype), example)
    state, extend = replay.init(example), jr.jit(replay).extend
    for _ in range(120):
        state = extend(state, steps)
    checkpointer, size = Checkpointer(path, larger, compression_level=None), int(replay.size(state))
    saver = Checkpointer(path, replay, compression_level=None)

    def save():
        saver.save(state, blocking=False)
        saver.wait_until_finished(state)

    saved, _ = peak(save)
    del state, steps, save
    extra, state = peak(lambda: jax.block_until_ready(checkpointer.restore(example, resize=True)))
    assert int(larger.size(state)) == size
    return saved, extra - sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def main(path, gigabytes, row):
    example = jax.ShapeDtypeStruct((row,), jnp.uint8)
    small = jr.items(capacity=int(0.3e9) // row if row > 1000 else 1 << 20, batch_size=1)
    # loads and compiles what later calls share
    warm = Checkpointer(f"{path}/small", small, compression_level=None)
    warm.save(filled(small, example, small.capacity))
    warm.restore(example)
    capacity = int(gigabytes * 1e9) // row
    replay = jr.items(capacity=capacity, batch_size=1)
    state, found = filled(replay, example, capacity), {"state": capacity * row}
    checkpointer = Checkpointer(f"{path}/large", replay, compression_level=None)

    def stored():
        return sum(
            file.stat().st_size
            for file in pathlib.Path(f"{path}/large").rglob("*")
            if file.is_file()
        )

    found["save"], _ = peak(lambda: checkpointer.save(state))
    found["full_bytes"] = stored()
    state = jr.jit(replay).extend(state, jnp.full((capacity // 100, 1, row), 7, jnp.uint8))
    found["save_more"], _ = peak(lambda: checkpointer.save(state))
    found["more_bytes"] = stored() - found["full_bytes"]
    total = int(jnp.sum(state.streams.steps[::97].astype(jnp.uint32)))
    del state
    extra, state = peak(lambda: jax.block_until_ready(checkpointer.restore(example)))
    found["restore"] = extra - capacity * row
    assert int(jnp.sum(state.streams.steps[::97].astype(jnp.uint32))) == total
    return found


if __name__ == "__main__":
    path, gigabytes, row = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    found = main(path, gigabytes, row)
    resized(f"{path}/resized/small", 10_000, 20)  # loads what the measured call shares
    found["save_later"], found["resize"] = resized(
        f"{path}/resized/large", 8_000_000 if row < 1000 else 1_000_000, 20
    )
    sys.stdout.write(json.dumps(found))

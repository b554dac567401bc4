"""Print as JSON the peak memory of saves and a restore, beside the state.

Usage: `python checkpoint_memory.py PATH GIGABYTES ROW_BYTES [all]`. With `all`, also that of a
restore into a larger buffer.
"""

import ctypes
import functools
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
    """Return a state whose rows are added in blocks, each of another number."""
    block = max(count // 200, 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(state, number):
        return replay.extend(state, jnp.full((block, 1, *example.shape), number, jnp.uint8))

    state = replay.init(example)
    for number in range(-(-count // block)):
        state = fill(state, number)
    return jax.block_until_ready(state)


def main(path, gigabytes, row, with_resizes):
    example = jax.ShapeDtypeStruct((row,), jnp.uint8)
    capacity, peaks = int(gigabytes * 1e9) // row, {}
    replay, larger = (
        jr.items(capacity=size, batch_size=1) for size in (capacity, capacity + capacity // 5)
    )

    def saver(name, buffer=replay):
        return Checkpointer(f"{path}/{name}", buffer, compression_level=None)

    def stored():
        files = pathlib.Path(f"{path}/large").rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())

    def measured(name, function, num_bytes=0):
        extra, state = peak(function)
        peaks[name] = min(extra - num_bytes, peaks.get(name, extra))
        return state

    # loads and compiles what later calls share
    small = jr.items(capacity=int(0.1e9) // row if row > 1000 else 1 << 20, batch_size=1)
    saver("small", small).save(filled(small, example, small.capacity))
    saver("small", small).restore(example)
    state, checkpointer = filled(replay, example, capacity), saver("large")
    measured("save", lambda: checkpointer.save(state))
    full_bytes = stored()
    state = jr.jit(replay).extend(state, jnp.full((capacity // 100, 1, row), 7, jnp.uint8))
    measured("save_more", lambda: checkpointer.save(state))
    more_bytes = stored() - full_bytes
    total = int(jnp.sum(state.rows.steps[::97].astype(jnp.uint32)))
    del state
    restore = lambda: jax.block_until_ready(checkpointer.restore(example))
    for _ in range(2):  # the allocator and the compiler take more now and then
        state = None
        state = measured("restore", restore, capacity * row)
    assert int(jnp.sum(state.rows.steps[::97].astype(jnp.uint32))) == total
    del state
    if with_resizes:
        restore = lambda: jax.block_until_ready(saver("large", larger).restore(example))
        restore()  # compiles
        state = measured("resize", restore, larger.capacity * row)
        assert int(larger.size(state)) == capacity
    return {
        "peaks": peaks,
        "state": capacity * row,
        "full_bytes": full_bytes,
        "more_bytes": more_bytes,
    }


if __name__ == "__main__":
    path, gigabytes, row, *more = sys.argv[1:]
    sys.stdout.write(json.dumps(main(path, float(gigabytes), int(row), more == ["all"])))

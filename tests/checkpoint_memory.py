"""Peak memory beside the state, of saves and of a restore, in JSON: `python checkpoint_memory.py PATH GIGABYTES`."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer

ROW = 100_000  # bytes


def memory(field):
    """Bytes that this process has (VmRSS), or had at the most (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(function):
    """Bytes beside those that there were before, and what the function returns."""
    before = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    result = function()
    return memory("VmHWM") - before, result


def filled(replay, example, count):
    """Rows that no compression makes small."""
    fill = jax.jit(
        lambda state, key: jax.lax.scan(
            lambda state, key: (replay.add(state, jax.random.bits(key, (1, *example.shape), jnp.uint8)), None),
            state,
            jax.random.split(key, count),
        )[0],
        donate_argnums=0,
    )
    return jax.block_until_ready(fill(replay.init(example), jax.random.key(0)))


def main(path, gigabytes):
    example = jax.ShapeDtypeStruct((ROW,), jnp.uint8)
    small = jr.items(capacity=3000, batch_size=1)
    warm = Checkpointer(f"{path}/small", small, level=None)  # what is loaded and compiled once
    warm.save(filled(small, example, 3000))
    warm.restore(example)
    capacity = int(float(gigabytes) * 1e9) // ROW
    replay = jr.items(capacity=capacity, batch_size=1)
    state, found = filled(replay, example, capacity), {"state": capacity * ROW}
    checkpointer = Checkpointer(f"{path}/large", replay, level=None)

    def stored():
        return sum(file.stat().st_size for file in pathlib.Path(f"{path}/large").rglob("*") if file.is_file())

    found["save"], _ = peak(lambda: checkpointer.save(state))
    found["full_bytes"] = stored()
    add = jr.jit(replay).add
    for t in range(capacity // 100):
        state = add(state, jnp.full((1, ROW), t % 251, jnp.uint8))
    found["save_more"], _ = peak(lambda: checkpointer.save(state))
    found["more_bytes"] = stored() - found["full_bytes"]
    total = int(jnp.sum(state.streams.steps[::97].astype(jnp.uint32)))
    del state
    extra, state = peak(lambda: jax.block_until_ready(checkpointer.restore(example)))
    found["restore"] = extra - capacity * ROW
    assert int(jnp.sum(state.streams.steps[::97].astype(jnp.uint32))) == total
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

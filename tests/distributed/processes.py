"""One of several processes that fill and sample one buffer, over 4 devices of all together:
`python processes.py NUMBER_OF_PROCESSES WHICH PORT FILE`. It writes a digest of each device's part
of the results."""

import functools
import hashlib
import json
import sys

import jax
import numpy as np

import jaxreplay as jr

E = 8
WHOLE = jr.prioritized(
    capacity=256, num_envs=E, batch_size=16, autoreset="next_step", allow_mask=True
)
SPEC, FLAG = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), bool)
EXAMPLE = jr.Step(SPEC, SPEC, SPEC, terminated=FLAG, truncated=FLAG)


def digests(name, tree):
    return {
        f"{name} {number} {shard.index}": hashlib.sha256(
            np.ascontiguousarray(shard.data).tobytes()
        ).hexdigest()
        for number, leaf in enumerate(jax.tree.leaves(tree))
        for shard in leaf.addressable_shards
    }


def run(main):
    """Call `main(num, which, ...)` with the program's arguments, in one of `num` processes."""
    num, which, port = map(int, sys.argv[1:4])
    if num > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num, which)
    main(num, which, *sys.argv[4:])


def part_of(step, num, which):
    """Return the step of a process's envs."""
    envs = slice(which * E // num, (which + 1) * E // num)
    return jax.tree.map(lambda leaf: leaf[envs], step)


def main(num, which, path):
    assert jax.device_count() == 4, jax.devices()
    mesh = jax.make_mesh((4,), ("data",))
    buffer = jr.sharded(WHOLE, mesh)
    state = buffer.init(EXAMPLE)

    @functools.partial(jax.jit, donate_argnums=0)
    def turn(state, step, mask, key):
        state = buffer.add(state, step, mask)
        batch = buffer.sample(state, key)
        priority = abs(batch.experience.reward) + batch.weight
        return buffer.update_priorities(state, batch.index, priority), batch

    r = np.random.default_rng(0)
    for time in range(40):
        values = r.normal(size=(3, E)).astype(np.float32)
        flags = r.random((2, E)) < 0.1
        mask = r.random(E) < np.linspace(0.3, 1, E)
        step = jr.Step(*values, terminated=flags[0], truncated=flags[1])
        step, mask = buffer.from_local(part_of((step, mask), num, which))
        state, batch = turn(state, step, mask, jax.random.key(time))
    can_sample, figures = jax.jit(lambda s: (buffer.can_sample(s), buffer.metrics(s)))(state)
    assert can_sample
    assert figures["size"] > 100
    found = digests("sampled", (state, batch, figures))
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    run(main)

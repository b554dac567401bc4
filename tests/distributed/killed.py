"""One of several processes that add to one buffer and save it, until they are killed:
`python killed.py NUMBER_OF_PROCESSES WHICH PORT PATH`. It goes on from the newest checkpoint, after
a check of its rows, and prints "saved" and the step at each save."""

import sys

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from tests.distributed.processes import part_of, run
from tests.support.checkpointed_run import EXAMPLE, expected, step

REPLAY = jr.items(capacity=512, num_envs=8, batch_size=8)


def main(num, which, path):
    buffer = jr.sharded(REPLAY, jax.make_mesh((jax.device_count(),), ("data",)))
    checkpointer = Checkpointer(path, buffer, max_to_keep=2, chunk_bytes=4096)
    state, t = buffer.init(EXAMPLE), 0
    if checkpointer.all_steps():
        state = checkpointer.restore(EXAMPLE)
        t = checkpointer.step
        for shard in state.rows.steps["number"].addressable_shards:
            rows = shard.index[0]
            own = slice((rows.start or 0) // 64, (rows.stop or 512) // 64)
            wanted = np.sort(expected(REPLAY, t)[own])
            found = np.asarray(shard.data).reshape(-1, 64)
            assert (np.sort(found)[:, 64 - len(wanted[0]) :] == wanted).all()
    add = jax.jit(buffer.add, donate_argnums=0)
    while True:
        state = add(state, buffer.from_local(part_of(step(t, 8), num, which)))
        t += 1
        if t % 3 == 0:
            checkpointer.save(state, t)
            sys.stdout.write(f"saved {t}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    run(main)

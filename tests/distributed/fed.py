"""One of several processes whose actors fill one buffer: `python fed.py NUMBER WHICH PORT KILLS`.
All make the same calls, though blocks arrive when they do, and actors are killed."""

import functools
import time

import jax
import numpy as np

import jaxreplay as jr
from tests.distributed.processes import run
from tests.support import acting

E, LENGTH = 8, 128
OPTIONS = {"autoreset": "next_step", "allow_mask": True}


def own(leaf):
    """Return this process's part of an array."""
    return np.concatenate([np.asarray(shard.data) for shard in leaf.addressable_shards])


def main(num, which, kills):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    whole = jr.uniform(capacity=E * LENGTH, num_envs=E, batch_size=64, **OPTIONS)
    buffer, part = jr.sharded(whole, mesh), E // num
    its_own = jr.uniform(capacity=part * LENGTH, num_envs=part, batch_size=64, **OPTIONS)
    feed = jr.actors.Feed(its_own, acting.EXAMPLE, block_length=8)
    actors = feed.start(acting.mortal, 2, seed=which, max_restarts=4)
    state, began, num_samples, goes_on = (
        buffer.init(jr.Step(**acting.EXAMPLE)),
        time.time(),
        0,
        True,
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def learn(state, steps, mask, ends, wants, key):
        state = buffer.extend(buffer.end_streams(state, ends), steps, mask)
        return state, buffer.sample(state, key), wants.any()

    while goes_on:
        steps, mask, ends = feed.take(timeout=0.02)
        steps, mask = buffer.from_local((steps, mask), axis=1)
        wants = actors.metrics()["lost"] < int(kills) or num_samples < 20
        ends, wants = buffer.from_local((ends, np.full(part, wants and time.time() < began + 300)))
        key = jax.random.key(num_samples)
        state, batch, goes_on = learn(state, steps, mask, ends, wants, key)
        is_valid = own(batch.is_valid)  # not of devices whose actors have not begun
        acting.check_transitions(
            jax.tree.map(lambda leaf, is_valid=is_valid: own(leaf)[is_valid], batch)
        )
        num_samples += bool(is_valid.all())
    assert num_samples >= 20
    assert actors.metrics()["lost"] >= int(kills)
    actors.stop()


if __name__ == "__main__":
    run(main)

"""What a buffer's methods return, by few programs; each is compiled once a process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.buffers import NUM_ENVS, draw
from tests.support.steps import nth

BLOCK = 37  # steps; streams of the catalog have 16 rows
PARTS = (0, 2, 16, BLOCK)  # lengths of blocks, shorter and longer than a stream
BETAS = (0.0, 0.3, 1.0)


def given(case, buffer, seed=5):
    """Return arguments of the programs: a block of steps, its mask or None, priorities or None."""
    mask = case.mask(buffer, seed, BLOCK)
    priority = np.random.default_rng(seed).choice([0.5, 3, np.nan], (BLOCK, NUM_ENVS))
    has_priorities = buffer.sampler.has_priorities
    return (
        case.step(seed, BLOCK),
        mask[0] if mask else None,
        priority.astype(np.float32) if has_priorities else None,
    )


def operations(buffer, state, block, seed):
    """Return what each method returns for a state, by name."""
    key = jax.random.key(seed)
    batch = draw(buffer, state, key)
    found = {
        "add": buffer.add(state, *nth(block, 0)),
        "draw": batch,
        "get": buffer.get(state, jnp.arange(buffer.capacity), key),
        "clear": buffer.clear(state),
        "size": buffer.size(state),
        "can_sample": buffer.can_sample(state),
        "metrics": buffer.metrics(state),
    }
    if buffer.sampler.consumes:
        found["pop"] = buffer.pop(state, key)[0]
    if buffer.sampler.has_priorities:
        priority = jnp.linspace(0.0, seed + 1.0, len(batch.probability))
        found["update"] = buffer.update_priorities(state, batch.index, priority)
        found["by beta"] = jax.vmap(lambda beta: draw(buffer, state, key, beta=beta))(
            jnp.asarray(BETAS)
        )
    return found


@functools.cache
def everything(buffer):
    """Return a program of a state, a block and a seed: `operations`."""
    return jax.jit(functools.partial(operations, buffer))


@functools.cache
def blocks(buffer):
    """Return a program of a state and a block: the states after each `add`, with an axis in front,
    and those after an `extend` of each of `PARTS`."""

    def run(state, block):
        def add(state, one):
            state = buffer.add(state, *one)
            return state, state

        _, added = jax.lax.scan(add, state, block)
        return added, [buffer.extend(state, *nth(block, slice(part))) for part in PARTS]

    return jax.jit(run)

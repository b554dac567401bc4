"""With 64-bit numbers on, states keep their dtypes, and 64-bit leaves are stored as they are."""

import os

import pytest

from tests.support.replays import output_of

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from tests.support.buffers import CATALOG, KINDS
from tests.conftest import ALL, SOAK

import jaxreplay as jr

for case in CATALOG if ALL else KINDS:
    replay = case.replay()
    state = replay.init(case.example())
    step, mask = case.step(), case.mask(replay, 0)

    def iteration(state, key):
        state = replay.extend(
            replay.add(state, step, *mask), case.step(1, 3), *case.mask(replay, 1, 3)
        )
        if replay.sampler.consumes:
            state, batch = replay.pop(state, key)
        else:
            batch = replay.sample(state, key)
        if replay.sampler.has_priorities:
            state = replay.update_priorities(state, batch.index, jnp.linspace(0.1, 1.0, 8))
        return state, (
            batch,
            replay.size(state),
            replay.get(state, jnp.arange(3), key),
            replay.age(state, batch.index),
        )

    # A loop that changed a dtype would not trace; running it as well takes a minute.
    run = jax.jit(lambda state, keys: jax.lax.scan(iteration, state, keys))
    shapes_of = run if SOAK or case is KINDS[0] else lambda *args: jax.eval_shape(run, *args)
    _, (batch, size, got, age) = shapes_of(state, jax.random.split(jax.random.key(0), 4))
    assert (batch.index.row.dtype, batch.index.lap.dtype, batch.probability.dtype) == (
        np.int32,
        np.uint32,
        np.float32,
    ), case.name
    assert (size.dtype, age.dtype, got.index.row.dtype) == (np.int32, np.int32, np.int32), case.name
    assert jax.tree.map(lambda x: x.dtype, jax.eval_shape(replay.clear, state)) == jax.tree.map(
        lambda x: x.dtype, state
    )

replay = jr.jit(jr.items(capacity=4, batch_size=1))
state = replay.add(replay.init(np.zeros((), np.int64)), np.array([2**40 + 1]))
assert replay.sample(state, jax.random.key(0)).experience.tolist() == [2**40 + 1]
"""


@pytest.mark.thorough  # a process of its own
def test_64_bit_numbers_change_no_dtype_of_a_state():
    output_of(PROGRAM, env=os.environ | {"JAX_ENABLE_X64": "1", "PYTHONWARNINGS": "error"})

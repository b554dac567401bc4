"""A state is a pytree of arrays: what saves pytrees saves it, to the last bit."""

import flax.serialization
import jax
import jax.numpy as jnp
import pytest

import jaxreplay as jr
from tests.support.buffers import CATALOG, KINDS, bits

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")


def filled(case):
    buffer = case.replay()
    state = buffer.init(case.example())
    return buffer, jr.jit(buffer).extend(state, case.step(1, time=58), *case.mask(buffer, 1, 58))


def test_no_state_has_an_array_without_elements():
    """Orbax refuses one, so what a buffer does without is None."""
    sizes = {
        case.name: {
            leaf.size
            for leaf in jax.tree.leaves(jax.eval_shape(case.replay().init, case.example()))
        }
        for case in CATALOG
    }
    assert [name for name, found in sizes.items() if 0 in found] == []


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_flax_and_orbax_bring_a_state_back(case, tmp_path):
    buffer, state = filled(case)
    empty = buffer.init(case.example())
    by_flax = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(
            tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, empty)
        )
    for restored in (by_flax, by_orbax):
        restored = jax.tree.map(jnp.asarray, restored)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state)

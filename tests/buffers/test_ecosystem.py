"""A state is a pytree of arrays: libraries that save pytrees restore it bit-identically."""

import itertools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL
from tests.support.buffers import CATALOG, FEW, KINDS, bits
from tests.support.replays import output_of
from tests.support.steps import plain_step

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")


@pytest.mark.no_xla
def test_no_state_has_an_array_without_elements():
    """Orbax refuses empty arrays, so unused parts of a state are None."""
    for case in CATALOG:
        assert all(leaf.size for leaf in jax.tree.leaves(case.shapes())), case.name


@pytest.mark.thorough  # two processes
def test_flax_knows_the_states_of_a_program_that_imports_it():
    """Before jaxreplay, or before `init`, also a class that comes later."""
    code = """
import {}, {}
from jaxreplay._util.struct import Node
class Later(Node):
    x: int
buffer = jaxreplay.items(capacity=4, batch_size=2)
state = buffer.add(buffer.init(0.0), jax.numpy.ones(1))
import flax.serialization
restored = flax.serialization.from_bytes(buffer.init(0.0), flax.serialization.to_bytes(state))
print(buffer.size(restored), flax.serialization.to_state_dict(Later(3)))
"""
    for first, second in itertools.permutations(["jaxreplay, jax", "flax.serialization"]):
        assert output_of(code.format(first, second)) == "1 {'x': 3}"


ROLLOUT = jr.rollout(length=8, num_envs=1, autoreset="next_step")
STEP = plain_step(np.float32(0), obs={"x": np.float32(0)})
SHAPES = {case.name: case.shapes()[1] for case in (*KINDS,) if ALL or case in FEW}
SHAPES["rollout"] = jax.eval_shape(ROLLOUT.init, STEP)


@pytest.mark.parametrize("name", SHAPES)
def test_flax_and_orbax_bring_a_state_back(name, tmp_path):
    r = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: r.integers(0, 100, leaf.shape).astype(leaf.dtype), SHAPES[name]
    )
    empty = jax.tree.map(np.zeros_like, state)
    by_flax = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jax.device_put(state))
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(tmp_path / "state", SHAPES[name])
    for restored in (by_flax, by_orbax):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.no_xla
def test_a_state_shows_its_sizes_in_one_line(platform):
    buffer = jr.items(capacity=100, num_envs=4, batch_size=2, platform=platform)
    example = {
        "image": jax.ShapeDtypeStruct((84, 84), jnp.uint8),
        "small": jax.ShapeDtypeStruct((3,), jnp.int4),
    }
    rows = "4 envs x 25 rows, item {image: u8[84,84], small: i4[3]}"
    assert repr(jax.eval_shape(buffer.init, example)).startswith(f"ReplayState({rows}, 7")
    population = jax.eval_shape(jax.vmap(lambda _: buffer.init(example)), np.arange(3))
    assert repr(population).startswith(f"ReplayState(3 x {rows}, 2")
    assert repr(jax.tree.map(lambda leaf: None, population)).startswith("ReplayState(rows")


@pytest.mark.no_xla
def test_configurations_samples_and_rollouts_are_shown_in_one_line():
    buffer = jr.uniform(capacity=8, batch_size=2, autoreset="next_step", n_step=3)
    assert repr(buffer) == (
        "ReplayBuffer(capacity=8, batch_size=2, sampler=Uniform(), view=TransitionView(n_step=3), "
        "autoreset='next_step')"
    )
    state = jax.eval_shape(buffer.init, STEP)
    assert repr(state) == "ReplayState(1 env x 8 rows, obs {x: f32[]}, 160 B)"
    batch = jax.eval_shape(lambda state: buffer.sample(state, jax.random.key(0)), state)
    assert repr(batch.replace(experience=None)) == (
        "Sample(index Index(row i32[2], lap u32[2]), probability f32[2], weight f32[2], "
        "is_valid bool[2])"
    )
    assert repr(SHAPES["rollout"]) == "RolloutState(1 env x 8 rows, obs {x: f32[]}, 129 B)"

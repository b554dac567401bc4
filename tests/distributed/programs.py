"""Compiled programs send only what they must, and copy nothing. On 8 devices."""

import jax
import jax.numpy as jnp
import pytest

import jaxreplay as jr
from tests.distributed import common
from tests.support.hlo import check_in_place, sent

NAMES = ["uniform masked, episodes", "prioritized same_step, 3 steps", "future_pairs"]
CAPACITY = 1 << 17
SMALL = CAPACITY // 8 // 2  # numbers: half of a leaf of one number a row, on one device


def prepared(name, draw):
    case = next(case for case in common.CASES if case.name == name)
    buffer = jr.sharded(
        common.whole(case, capacity=CAPACITY, batch_size=64), common.mesh_of(8), draw=draw
    )
    state = buffer.init(case.example())
    return buffer, state, common.steps(case, 1)


def loop(buffer, state, steps, keys):
    def iteration(carry, x):
        step, key = x
        state = buffer.add(carry[0], step)
        batch = buffer.sample(state, key)
        if hasattr(buffer.buffer.sampler, "alpha"):
            reward = jnp.abs(batch.experience.reward)
            state = buffer.update_priorities(state, batch.index, reward)
        return (state, batch), None

    batch = jax.tree.map(
        lambda spec: jnp.zeros(spec.shape, spec.dtype),
        jax.eval_shape(buffer.sample, state, keys[0]),
    )
    return jax.lax.scan(iteration, (state, batch), (steps, keys))[0]


@pytest.mark.parametrize("draw", ["even", "global"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent(name, draw):
    buffer, state, step = prepared(name, draw)
    key, is_prioritized = jax.random.key(0), name.startswith("prioritized")
    compiled = lambda function, *given: jax.jit(function).lower(*given).compile().as_text()
    assert sent(compiled(buffer.add, state, step)) == []
    batch = jax.jit(buffer.sample)(state, key)
    found = sent(compiled(buffer.sample, state, key))
    shares = ("all-gather", 12 * 8)
    if draw == "even":
        assert found == [shares]  # 12 bytes a device
    else:
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // 8
        assert found[0] == shares
        kinds = [kind for kind, _ in found[1:]]
        assert set(kinds) <= {"reduce-scatter", "all-reduce"}
        assert sum(size for kind, size in found if kind == "reduce-scatter") <= own
        assert [size for kind, size in found if kind == "all-reduce"] == [4] * is_prioritized
    if is_prioritized:
        found = sent(compiled(buffer.update_priorities, state, batch.index, batch.probability))
        gathered = [("all-gather", 64 * 4)] * 3 * (draw == "global")
        assert found in (
            [*gathered, ("all-reduce", 4)],
            [("all-gather", 64 * 12), ("all-reduce", 4)],
        )
    assert sent(compiled(buffer.can_sample, state)) in (
        [("all-reduce", 8)],
        [("all-reduce", 4)] * 2,
    )


@pytest.mark.parametrize("draw", ["even", "global"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_copied(name, draw):
    buffer, state, step = prepared(name, draw)
    keys = jax.random.split(jax.random.key(0), 4)
    steps = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), step)
    batch = jax.eval_shape(buffer.sample, state, keys[0])
    check(buffer.add, (state, step), donated=0)
    check(buffer.extend, (state, steps), donated=0)
    check(buffer.sample, (state, keys[0]))
    if name.startswith("prioritized"):
        check(buffer.update_priorities, (state, batch.index, batch.probability), donated=0)
    check(lambda *given: loop(buffer, *given)[0], (state, steps, keys), donated=0)


def check(function, arguments, donated=None):
    """As `check_in_place`, where a device reuses its part of a donated state."""
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0]))
    check_in_place(function, arguments, num_elements=SMALL, donated=donated, reused=whole // 8)

"""Compiled programs send only what they must, and copy nothing. On 8 devices."""

import jax
import pytest

import jaxreplay as jr
from tests.distributed import common
from tests.support.hlo import check_in_place, compiled, sent
from tests.support.steps import stacked

CAPACITY = 1 << 17
SMALL = CAPACITY // 8 // 2  # numbers: half of a leaf of one number a row, on one device
KEYS = jax.random.split(jax.random.key(0), 4)


def prepared(case):
    buffer = jr.sharded(common.whole(case, capacity=CAPACITY, batch_size=64), common.mesh_of(8))
    return buffer, buffer.init(case.example()), common.steps(case, 1)


def turn(buffer, state, step, key):
    state = buffer.add(state, step)
    batch = buffer.sample(state, key)
    if hasattr(buffer.buffer.sampler, "alpha"):
        state = buffer.update_priorities(state, batch.index, abs(batch.experience.reward))
    return state, batch


def check(function, arguments, donated=None):
    """As `check_in_place`, where a device reuses its part of a donated state."""
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0]))
    return check_in_place(
        function, arguments, num_elements=SMALL, donated=donated, reused=whole // 8
    )


@common.THREE
def test_a_loop_copies_nothing_and_sends_little(case):
    """A sample sends 12 bytes a device, an update the largest priority, an add nothing."""
    buffer, state, step = prepared(case)
    loop = lambda state, given: jax.lax.scan(lambda s, x: turn(buffer, s, *x), state, given)
    found = sent(check(loop, (state, (stacked([step] * 4), KEYS)), donated=0))
    largest = [("all-reduce", 4)] * hasattr(buffer.buffer.sampler, "alpha")
    assert found == [("all-gather", 12 * 8), *largest]
    found = sent(compiled(buffer.can_sample, state).as_text())
    assert found in ([("all-reduce", 8)], [("all-reduce", 4)] * 2)


@pytest.mark.thorough
@common.THREE
def test_nothing_is_copied_by_one_method_alone(case):
    buffer, state, step = prepared(case)
    batch = jax.eval_shape(buffer.sample, state, KEYS[0])
    check(buffer.add, (state, step), donated=0)
    check(buffer.extend, (state, stacked([step] * 4)), donated=0)
    check(buffer.sample, (state, KEYS[0]))
    if case is common.PRIORITIZED:
        check(buffer.update_priorities, (state, batch.index, batch.probability), donated=0)

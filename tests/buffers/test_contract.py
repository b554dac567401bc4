"""Contract that every buffer of the catalog fulfills."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL
from tests.support import programs
from tests.support.buffers import CATALOG, FEW, KINDS, draw, each, everything, jitted, jitted_draw
from tests.support.refusals import refused
from tests.support.steps import nth

MASKED = "prioritized final_obs, masked"  # and a table
catalog, cases = each(CATALOG if ALL else KINDS), each(CATALOG if ALL else FEW)


def assert_same(got, expected, name=""):
    chex.assert_trees_all_equal_structs(got, expected, custom_message=name)
    chex.assert_trees_all_equal(*jax.device_get((got, expected)), custom_message=name, strict=True)


def found_of(case, state=None):
    """Return what all methods of the case's buffer return, for a state that is filled."""
    buffer = case.replay()
    state = jax.device_get(case.filled(buffer) if state is None else state)  # one kind of array
    return jax.device_get(programs.everything(buffer)(state, programs.given(case, buffer), 3))


@catalog
@pytest.mark.no_xla
def test_an_abstract_example_is_enough(case):
    init = case.replay().init
    by_shapes = jax.eval_shape(lambda: init(case.example()))
    assert by_shapes == jax.eval_shape(lambda: init(nth(case.step(), 0)))


# Eager mode compiles each primitive by itself, which is slow.
@each(CATALOG if ALL else KINDS[:1])
def test_jit_equals_eager(case):
    buffer, key = case.replay(), jax.random.key(3)
    state, index = case.filled(buffer), jr.types.Index(row=np.arange(8), lap=np.zeros(8, np.uint32))
    calls = [("add", nth(programs.given(case, buffer), 0))]
    if buffer.sampler.has_priorities:
        calls.append(("update_priorities", (index, np.linspace(0, 4, 8, dtype=np.float32))))
    for name, given in calls:
        assert_same(jitted(buffer, name)(state, *given), getattr(buffer, name)(state, *given))
    if ALL:
        assert_same(jitted_draw(buffer)(state, key), draw(buffer, state, key))


@catalog
@pytest.mark.no_xla
def test_a_state_and_items_keep_their_structure_and_dtypes(case):
    (buffer, state), step = case.shapes(), case.step()
    found = jax.eval_shape(programs.everything(buffer), state, programs.given(case, buffer), 1)
    spec = lambda state: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
    for name in {"add", "clear", "pop", "update"} & set(found):
        assert spec(found[name]) == spec(state), name
    items, of_rows = (
        found["draw"].experience,
        lambda *trees: jax.tree.map(lambda x: (x.dtype, x.shape[1:]), trees),
    )
    if case.is_items:
        assert of_rows(items) == of_rows(step)
    elif case.is_plain:
        stored = of_rows(items.obs, items.next_obs, items.action, items.extras)
        assert stored == of_rows(step.obs, step.obs, step.action, step.extras)


@catalog
@pytest.mark.no_xla
def test_equal_configurations_share_one_trace(case):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def add(buffer, state, step, mask):
        return buffer.add(state, step, *mask)

    for seed in range(2):
        buffer, state = case.shapes()
        jax.eval_shape(add, buffer, state, case.step(seed), case.mask(buffer, seed))
    assert hash(buffer) == hash(case.replay())
    assert jax.tree.leaves(buffer) == []


@each([*KINDS[:1], *FEW])
def test_a_donated_state_is_reused_and_gone(case):
    buffer = case.replay()
    state = case.empty(buffer)
    old = jax.tree.leaves(state)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in old}
    state = jr.jit(buffer).add(state, case.step(), *case.mask(buffer, 0))
    assert all(leaf.is_deleted() for leaf in old)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)} == pointers
    with refused("deleted", RuntimeError):
        np.asarray(old[0])


@each(KINDS if ALL else [case for case in CATALOG if case.name == MASKED])
def test_extend_equals_add_for_each_step(case):
    buffer = case.replay()
    start, block = case.filled(buffer, 9), programs.given(case, buffer)
    added, extended = jax.device_get(programs.blocks(buffer)(start, block))

    def parts(state):
        # Rows by `get`, since the stored bits of a masked step mean nothing.
        found = [
            everything(buffer)(state, 1),
            state.replace(rows=state.rows.replace(steps=()), sampler=()),
        ]
        if buffer.sampler.has_priorities:
            found += [state.sampler.tree.sums[0], state.sampler.replace(tree=())]
        return found

    assert_same(extended[0], start)  # of a block without steps
    for time, got in [*zip(programs.PARTS, extended, strict=True)][1:]:
        assert_same(parts(got), parts(nth(added, time - 1)))


@cases
def test_an_empty_buffer_is_flagged(case):
    buffer = case.replay()
    found = found_of(case, case.empty(buffer))
    batch = found["draw"]
    assert (int(found["size"]), bool(found["can_sample"]), bool(batch.is_valid.any())) == (0, 0, 0)
    assert not batch.weight.any()
    for leaf in jax.tree.leaves((batch.experience, batch.probability)):
        assert np.isfinite(leaf.astype(np.float32)).all()
    assert ((batch.index.row >= 0) & (batch.index.row < buffer.capacity)).all()


@cases
def test_weights_are_those_that_the_probabilities_give(case):
    """Weights follow from the probabilities of all rows, for the sampler's beta and for the traced
    betas of a population."""
    found, sampler = found_of(case), case.replay().sampler
    if sampler.has_priorities:
        found = found_of(case, found["update"])  # rows of several priorities
        assert len({*found["draw"].probability.tolist()}) > 1
    rows, batch = found["get"], found["draw"]
    probability = rows.probability.astype(np.float64)
    if not sampler.has_priorities:
        np.testing.assert_array_equal(rows.weight, rows.is_valid)
        np.testing.assert_array_equal(batch.weight, batch.is_valid)
        return
    batches = [(getattr(sampler, "beta", 1.0), batch)]
    batches += [(beta, nth(found["by beta"], place)) for place, beta in enumerate(programs.BETAS)]
    for beta, batch in batches:
        drawn = probability[batch.index.row]
        np.testing.assert_allclose(batch.weight, (drawn.min() / drawn) ** beta, rtol=1e-4)


@cases
def test_metrics_are_there_and_finite(case):
    buffer = case.replay()
    names = {"size", "fill"}
    if buffer.sampler.has_priorities:
        names |= {"max_priority", "num_bad_priorities", "num_stale_updates"}
    if buffer.allow_write:
        names |= {"num_ignored_writes"}
    if isinstance(buffer.sampler, jr.Queue | jr.OnlineQueue):
        names |= {"num_new", "num_lost"}
    for state in (case.empty(buffer), case.filled(buffer)):
        found = found_of(case, state)
        metrics = found["metrics"]
        assert names <= set(metrics) <= names | {"mean_priority"}
        assert all(leaf.shape == () and np.isfinite(leaf) for leaf in metrics.values())
        assert metrics["size"] == found["size"]


@each(CATALOG if ALL else FEW[::2])
def test_min_size_is_waited_for(case):
    buffer = dataclasses.replace(case.replay(), min_size=12)

    def add(state, block):
        state = buffer.add(state, *block)
        key, after = jax.random.key(0), state
        if buffer.sampler.consumes:
            after, _ = buffer.pop(state, key)
        both = map(jax.tree.leaves, (after.sampler, state.sampler))
        stays = jnp.array([(a == b).all() for a, b in zip(*both, strict=True)]).all()
        valid = draw(buffer, state, key).is_valid
        return state, (buffer.size(state), stays, buffer.can_sample(state), valid)

    block = programs.given(case, buffer)
    found = jax.jit(lambda state: jax.lax.scan(add, state, block)[1])(case.empty(buffer))
    size, stays, can_sample, valid = map(np.asarray, found)
    assert stays[size < 12].all()  # nothing is consumed
    np.testing.assert_array_equal(can_sample, size >= 12)
    np.testing.assert_array_equal(valid.any(axis=1), size >= 12)
    assert (size >= 12).any()

"""The on-policy buffer: its stored steps, the three ways to end an episode, and no copies or lost
steps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.steps import nth

T, E, TIME = 6, 2, 9
FORMS = ("next_step", "same_step")
PARTS = (0, 1, T, TIME)
forms = pytest.mark.parametrize("form", FORMS)
assert_same = functools.partial(chex.assert_trees_all_equal, strict=True)


def rollout_of(form, length=T, num_envs=E):
    return jr.Rollout(length=length, num_envs=num_envs, autoreset=form)


def block_of(form, seed=0):
    """Return steps with leaves of many dtypes. Env 0 is done at rows 1, 3 and 4."""
    axes, r = (TIME, E), np.random.default_rng(seed)
    obs = {
        "vector": r.normal(size=(*axes, 3)).astype(jnp.bfloat16),
        "image": r.integers(0, 255, (*axes, 2, 2), np.uint8),
    }
    done = np.zeros(axes, bool)
    done[[1, 3, 4], 0] = True
    return jr.Step(
        obs=obs,
        action=r.integers(0, 4, axes, np.int32),
        reward=r.normal(size=(*axes, 2)).astype(np.float32),
        terminated=done,
        truncated=np.zeros(axes, bool),
        final_obs=jax.tree.map(lambda x: x + x.dtype.type(1), obs) if form == "same_step" else None,
        extras={
            "flag": r.random(axes) < 0.5,
            "half": r.normal(size=(*axes, 1)).astype(np.float16),
        },
    )


def example_of(form):
    return nth(block_of(form), (0, 0))


CHUNKS = np.array([[3 * E, 0], [4 * E, E], [5 * E, 2 * E]]) + np.array([1, 0])


def operations(rollout, state, block):
    """Return what each method returns for a state, by name."""
    value = jnp.ones((T, E))
    return {
        "state": state,
        "steps": rollout.steps(state),
        "can_add": (rollout.can_add(state), rollout.can_add(state, 3)),
        "num_steps": rollout.num_steps(state),
        "is_first": rollout.is_first(state),
        "bootstrap": rollout.bootstrap(
            state, value, value[0], value if rollout.autoreset == "same_step" else None
        ),
        "clear": rollout.clear(state),
        "extend": rollout.extend(state, nth(block, slice(4))),
        "minibatch": rollout.minibatch(rollout.steps(state), np.array([5, 0, 11])),
        "chunks": rollout.minibatch(rollout.steps(state), CHUNKS),
    }


def tell(rollout, block):
    """Return `operations` of the empty state and after each `add`, and the states of extends."""

    def add(state, step):
        state = rollout.add(state, step)
        return state, operations(rollout, state, block)

    empty = rollout.init(nth(block, (0, 0)))
    _, added = jax.lax.scan(add, empty, block)
    return (
        operations(rollout, empty, block),
        added,
        [rollout.extend(empty, nth(block, slice(part))) for part in PARTS],
    )


jitted_tell = jax.jit(tell, static_argnums=0)


@functools.cache
def told(form):
    return jax.device_get(jitted_tell(rollout_of(form), block_of(form)))


@forms
def test_steps_are_held_as_they_came_and_the_rest_is_counted(form):
    block, (_, added, _) = block_of(form), told(form)
    for time in range(TIME):
        found, held = nth(added, time), min(time + 1, T)
        assert_same(nth(found["steps"], slice(held)), nth(block, slice(held)))
        state = found["state"]
        assert (state.position, state.num_dropped) == (held, time + 1 - held)
        assert found["can_add"] == (held < T, held + 3 <= T)
        cleared = found["clear"]
        assert (cleared.position, cleared.num_dropped) == (0, state.num_dropped)
        assert not cleared.mask.any()


@forms
def test_what_is_told_of_steps(form):
    """Env 0 is done at rows 1, 3 and 4. With next_step, the row after an end is a final row."""
    empty, added, _ = told(form)
    mask, is_first = np.ones((2, T, E), bool)
    mask[[2, 4] if form == "next_step" else [], 0] = False
    is_first[:] = False
    is_first[[3, 5] if form == "next_step" else [2, 4, 5], 0] = True
    for time in range(TIME):
        found, now = nth(added, time), mask & (np.arange(T) <= time)[:, None]
        np.testing.assert_array_equal(found["state"].mask, now)
        np.testing.assert_array_equal(found["bootstrap"][1], now)
        np.testing.assert_array_equal(found["is_first"], is_first & now)
        assert found["num_steps"] == now.sum()
    assert empty["num_steps"] == 0
    assert not empty["bootstrap"][1].any()
    assert not empty["is_first"].any()


@forms
def test_extend_equals_add_for_each_step_also_beyond_the_length(form):
    block, (empty, added, extended) = block_of(form), told(form)
    for part, state in zip(PARTS, extended, strict=True):
        expected = nth(added["state"], part - 1) if part else empty["state"]
        assert_same(state, expected)
    # An extend by 4 steps after 3 adds: as 7 adds.
    again = jax.tree.map(lambda leaf: np.concatenate([leaf[:3], leaf[:6]]), block)
    _, expected, _ = jitted_tell(rollout_of(form), again)
    assert_same(nth(added["extend"], 2), nth(jax.device_get(expected["state"]), 6))


@forms
def test_vmap_equals_a_loop(form):
    added, places = told(form)[1], np.array([2, TIME - 1])
    run = jax.vmap(functools.partial(operations, rollout_of(form)), (0, None))
    together = jax.jit(run)(nth(added["state"], places), block_of(form))
    assert_same(jax.device_get(together), nth(added, places))


@forms
@pytest.mark.no_xla
def test_one_trace_serves_all_states_and_keeps_their_structure(form):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def add(rollout, state, step):
        return rollout.add(state, step)

    for seed in range(2):
        rollout = rollout_of(form)
        state = jax.eval_shape(rollout.init, example_of(form))
        assert jax.eval_shape(add, rollout, state, nth(block_of(form, seed), 0)) == state
        assert jax.eval_shape(rollout.clear, state) == state
    assert jax.tree.leaves(rollout) == []


def test_a_donated_state_is_reused_and_gone_and_takes_what_memory_says():
    rollout, block = jr.jit(rollout_of("same_step")), block_of("same_step")
    example = example_of("same_step")
    state = rollout.init(example)
    taken = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert rollout.buffer.memory(example).total == taken
    for method, steps in ((rollout.add, nth(block, 0)), (rollout.extend, block)):
        old = jax.tree.leaves(state)
        pointers = {leaf.unsafe_buffer_pointer() for leaf in old}
        state = method(state, steps)
        assert all(leaf.is_deleted() for leaf in old)
        assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)} == pointers
    assert not rollout.can_add(state, 2)
    state = state.replace(num_dropped=np.int32(2**31 - 2))
    for _ in range(2):  # the count stops at the largest number
        state = rollout.add(state, nth(block, 0))
    assert int(state.num_dropped) == 2**31 - 1


def shuffled(method, **sizes):
    return np.asarray(jax.jit(lambda: method(jax.random.key(3), **sizes))())


def test_minibatches_hold_each_row_once_an_epoch_in_a_new_order():
    """Chi-square over the 24 orders of 4 envs in 4800 epochs, with 23 degrees of freedom, reaches
    58.6 for 6 of 100 000 seeds."""
    index = shuffled(rollout_of("same_step").minibatches, num_epochs=5, num_minibatches=3)
    assert (index.shape, index.dtype) == ((15, T * E // 3), jnp.int32)
    epochs = index.reshape(5, T * E)
    assert (np.sort(epochs) == np.arange(T * E)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 5
    four = rollout_of("same_step", num_envs=4)
    by_env = shuffled(four.minibatches, num_epochs=4800, num_minibatches=2, chunk_length=T)
    assert (by_env.shape, by_env.dtype) == ((9600, T, 2), jnp.int32)
    assert (np.diff(by_env, axis=1) == 4).all()  # whole envs, of which the first step tells which
    orders, counts = np.unique(by_env[:, 0].reshape(4800, 4), axis=0, return_counts=True)
    assert (np.sort(orders) == np.arange(4)).all()
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 58.6


def test_a_minibatch_has_its_rows():
    block, found = block_of("same_step"), nth(told("same_step")[1], -1)
    assert_same(found["minibatch"], nth(block, ([2, 0, 5], [1, 0, 1])))
    times, envs = [[3, 0], [4, 1], [5, 2]], [1, 0]
    assert_same(found["chunks"], nth(block, (times, envs)))
    index = shuffled(
        rollout_of("same_step").minibatches, num_epochs=3, num_minibatches=2, chunk_length=3
    )
    assert index.shape == (6, 3, 2)
    assert (np.sort(index.reshape(3, T * E)) == np.arange(T * E)).all()
    assert (np.diff(index, axis=1) == E).all()
    assert (index[:, 0] // E % 3 == 0).all()

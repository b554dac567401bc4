"""`jaxreplay.jit`, and the warning about a call that copies the buffer."""

import copy
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import state_checks
from tests.support.compilations import count_programs
from tests.support.refusals import refused
from tests.support.steps import nth, plain_step, stacked

ONE = np.ones(2, np.float32)
STEP = plain_step(ONE, obs=np.ones((2, 3), np.float32))
BLOCK, EXAMPLE = stacked([STEP] * 5), nth(STEP, 0)
PRIORITIZED = jr.prioritized(
    capacity=64, num_envs=2, batch_size=4, autoreset="same_step_no_final_obs"
)


@pytest.fixture(autouse=True)
def _forget_warnings():
    state_checks._warned.clear()


@pytest.mark.parametrize(
    ("buffer", "example", "item"),
    [
        (jr.items(capacity=1 << 22, batch_size=2), np.float32(0), np.zeros(1, np.int32)),
        (jr.rollout(length=1 << 19, num_envs=2, autoreset="next_step"), EXAMPLE, EXAMPLE),
    ],
    ids=["items", "rollout"],
)
def test_an_eager_change_of_a_large_state_warns_once_with_the_cure(buffer, example, item):
    """The item is wrong, so that nothing is compiled: the warning comes before the error."""
    state = buffer.init(example)
    with (
        refused("add:"),
        pytest.warns(
            jr.CopyWarning,
            match=r"add was called outside of jit: it copies the whole buffer \(\d\d "
            r"MiB\).*donate_argnums=0",
        ) as caught,
    ):
        buffer.add(state, item)
    assert caught[0].filename == __file__
    with refused("add:"):
        buffer.add(state, item)
    with (
        refused("extend:"),
        pytest.warns(jr.CopyWarning, match="extend was"),
    ):
        buffer.extend(state, item)


def test_a_small_state_a_jitted_one_and_a_sample_do_not_warn():
    small, large = (jr.items(capacity=1 << size, batch_size=2) for size in (10, 22))
    with refused("add:"):
        small.add(small.init(0.0), np.zeros(1, np.int32))
    state, item = large.init(0.0), np.ones(1, np.float32)
    jax.eval_shape(lambda: large.sample(state, jax.random.key(0)))
    state = jr.jit(large).add(state, item)
    jax.jit(large.add, donate_argnums=0)(state, item)


def test_a_pop_and_a_clear_copy_no_rows_and_do_not_warn():
    queue = jr.items(capacity=1 << 22, batch_size=2, sampler=jr.Queue())
    state = queue.init(np.float32(0))
    with pytest.raises(ValueError, match="batch_size must be"):
        queue.pop(state, jax.random.key(0), 0)
    assert queue.clear(state).rows.steps is state.rows.steps


def test_an_env_that_reuses_its_array_corrupts_nothing():
    """JAX may read an unaligned NumPy argument of 100 KiB or more after the call has returned."""
    size = 40_000
    buffer = jr.jit(jr.items(capacity=64, batch_size=2))
    state = buffer.init(jax.ShapeDtypeStruct((size,), jnp.float32))
    memory = np.zeros(size + 17, np.float32)
    observation = memory[1 : size + 1][None]
    for time in range(32):
        observation[:] = time
        state = buffer.add(state, observation)
        observation[:] = -1
    stored = np.asarray(state.rows.steps)[:32]
    assert (stored == np.arange(32)[:, None]).all()


def run(buffer, state):
    """Return what the methods of a buffer, jitted or not, return."""
    state = buffer.extend(state, BLOCK)
    key, rows = jax.random.key(0), np.arange(4, dtype=np.int32)
    batch = buffer.sample(state, key, 3)
    told = buffer.size(state), buffer.can_sample(state), buffer.age(state, batch.index)
    state = buffer.update_priorities(state, batch.index, np.array([2, 3, 4], np.float32))
    read = buffer.get(state, rows), buffer.metrics(state)
    state = buffer.end_streams(buffer.add(state, STEP))
    return told, batch, read, state.rows.flags.sum(), buffer.clear(state)


def test_all_methods_agree_also_inside_of_jit_and_vmap():
    buffer, state = copy.copy(jr.jit(PRIORITIZED)), jax.device_get(PRIORITIZED.init(EXAMPLE))
    assert (buffer.capacity, buffer.autoreset) == (64, "same_step_no_final_obs")
    inner = functools.partial(run, buffer)
    expected = jax.jit(functools.partial(run, PRIORITIZED))(state)
    inside = jax.jit(jax.vmap(inner))(stacked([state]))
    for got in (inner(state), nth(inside, 0)):
        chex.assert_trees_all_equal(*jax.device_get((got, expected)))
    assert (int(got[0][0]), bool(got[0][1])) == (8, True)


def test_a_change_of_priorities_moves_the_samplers_part_alone():
    """The rows stay where they are: the new state has the old one's arrays, which live on."""
    buffer = jr.jit(PRIORITIZED)
    old = buffer.extend(buffer.init(EXAMPLE), BLOCK)
    index = buffer.sample(old, jax.random.key(0), 3).index
    new = buffer.update_priorities(old, index, np.array([2, 3, 4], np.float32))
    for before, after in zip(jax.tree.leaves(old.rows), jax.tree.leaves(new.rows), strict=True):
        assert before is after
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.sampler) if leaf.size > 1)
    with refused("this state was donated"):
        buffer.sample(old, jax.random.key(0), 3)


def test_equal_buffers_share_one_compilation():
    with count_programs("add") as added:
        for _ in range(2):
            buffer = jr.jit(jr.items(capacity=48, batch_size=2))
            buffer.add(buffer.init(np.zeros(7, np.float32)), np.ones((1, 7), np.float32))
    assert added() == 1

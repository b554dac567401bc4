"""`jaxreplay.jit`, and the warning about a call that copies the buffer."""

import copy
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import state_checks
from tests.support.compilations import count_programs


@pytest.fixture(autouse=True)
def _forget_warnings():
    state_checks._warned.clear()


def test_an_eager_add_of_a_large_state_warns_once_with_the_cure():
    replay = jr.items(capacity=1 << 22, batch_size=2)
    state, item = replay.init(jnp.zeros(())), jnp.ones(1)
    with pytest.warns(
        jr.CopyWarning,
        match=r"add was called outside of jit: it copies the whole buffer \(16 "
        r"MiB\).*donate_argnums=0",
    ) as caught:
        state = replay.add(state, item)
    assert caught[0].filename == __file__
    replay.add(state, item)
    with pytest.warns(jr.CopyWarning, match="extend was called outside"):
        replay.extend(state, item[None])


def test_a_small_state_a_jitted_one_and_a_sample_do_not_warn():
    small, large = (
        jr.items(capacity=1 << 10, batch_size=2),
        jr.items(capacity=1 << 22, batch_size=2),
    )
    small.add(small.init(jnp.zeros(())), jnp.ones(1))
    state = jr.jit(large).add(large.init(jnp.zeros(())), jnp.ones(1))
    state = jax.jit(large.add, donate_argnums=0)(state, jnp.ones(1))
    large.sample(state, jax.random.key(0))


def test_an_env_that_reuses_its_array_corrupts_nothing():
    """JAX may read an unaligned NumPy argument of 100 KiB or more after the call has returned."""
    size = 40_000
    replay = jr.items(capacity=64, batch_size=2)
    buffer = jr.jit(replay)
    state = buffer.init(jax.ShapeDtypeStruct((size,), jnp.float32))
    memory = np.zeros(size + 17, np.float32)
    observation = memory[1 : size + 1][None]
    for time in range(32):
        observation[:] = time
        state = buffer.add(state, observation)
        observation[:] = -1
    stored = np.asarray(state.streams.steps)[:32]
    np.testing.assert_array_equal(
        stored, np.broadcast_to(np.arange(32, dtype=np.float32)[:, None], stored.shape)
    )


@pytest.mark.parametrize(
    ("name", "sampler"), [("update_priorities", jr.Prioritized()), ("rerank", jr.RankBased())]
)
def test_a_change_of_priorities_moves_the_samplers_part_alone(name, sampler):
    """The rows stay where they are: the new state has the old one's arrays, which live on."""
    buffer = jr.jit(jr.items(capacity=64, num_envs=2, batch_size=4, sampler=sampler))
    old = buffer.extend(buffer.init(jnp.float32(0)), jnp.zeros((5, 2)))
    index = buffer.sample(old, jax.random.key(0)).index
    arguments = (index, jnp.arange(4.0)) if name == "update_priorities" else ()
    eager = getattr(buffer.buffer, name)(jax.tree.map(jnp.array, old), *arguments)
    new = getattr(buffer, name)(old, *arguments)
    chex.assert_trees_all_equal(new, eager)
    for before, after in zip(
        jax.tree.leaves(old.streams), jax.tree.leaves(new.streams), strict=True
    ):
        assert before is after
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.sampler) if leaf.size > 1)
    with pytest.raises(ValueError, match="this state was donated"):
        buffer.sample(old, jax.random.key(0))


def test_all_methods_are_there_and_agree():
    replay = jr.prioritized(
        capacity=64, num_envs=2, batch_size=4, autoreset="same_step_no_final_obs"
    )
    zeros = jnp.zeros((5, 2))
    steps = jr.Step(
        obs=zeros, action=zeros, reward=zeros, terminated=zeros > 0, truncated=zeros > 0
    )
    buffer = jr.jit(replay)
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
    assert (int(buffer.size(state)), bool(buffer.can_sample(state))) == (8, True)
    batch = buffer.sample(state, jax.random.key(0), 3)
    assert batch.experience.reward.shape == (3,)
    assert buffer.get(state, batch.index).is_valid.all()
    assert buffer.age(state, batch.index).tolist() == [
        4 - row % 32 for row in batch.index.row.tolist()
    ]
    state = buffer.update_priorities(state, batch.index, np.array([2.0, 2.0, 2.0]))
    assert float(buffer.metrics(state)["max_priority"]) == 2
    assert buffer.sample(state, jax.random.key(0), beta=0.0).weight.tolist() == [1] * 4
    assert copy.copy(buffer).capacity == 64
    assert (buffer.capacity, buffer.autoreset) == (64, "same_step_no_final_obs")
    assert int(buffer.size(buffer.clear(state))) == 0


def test_rollouts_and_mixtures_are_taken_too():
    steps = jr.Step(
        obs=jnp.ones(2),
        action=jnp.ones(2),
        reward=jnp.ones(2),
        terminated=jnp.zeros(2, bool),
        truncated=jnp.zeros(2, bool),
    )
    rollout = jr.jit(jr.rollout(length=3, num_envs=2, autoreset="same_step_no_final_obs"))
    state = rollout.init(jax.tree.map(lambda x: x[0], steps))
    room = []
    for _ in range(3):
        state = rollout.add(state, steps)
        room.append((bool(rollout.can_add(state)), bool(rollout.can_add(state, 2))))
    assert room == [(True, True), (True, False), (False, False)]
    items = jr.items(capacity=4, batch_size=1)
    mixture, states = (
        jr.jit(jr.mix(one=(items, 2), two=(items, 1))),
        {name: items.init(jnp.zeros(())) for name in ("one", "two")},
    )
    assert mixture.sample(states, jax.random.key(0)).is_valid.tolist() == [False] * 3


def test_equal_buffers_share_one_compilation():
    with count_programs("add") as added:
        for _ in range(2):
            buffer = jr.jit(jr.items(capacity=48, batch_size=2))
            buffer.add(buffer.init(jnp.zeros(7)), jnp.ones((1, 7)))
    assert added() == 1


def test_inside_of_jit_and_vmap_a_jitted_method_is_the_method():
    replay = jr.prioritized(capacity=64, num_envs=2, batch_size=4, autoreset="next_step")
    buffer, flags = jr.jit(replay), jnp.zeros(2, bool)
    step = jr.Step(jnp.ones((2, 3)), jnp.zeros(2), jnp.ones(2), terminated=flags, truncated=flags)

    def run(buffer, state):
        state = buffer.add(buffer.add(state, step), step)
        batch = buffer.sample(state, jax.random.key(0), 3)
        size = buffer.size(state)
        return buffer.update_priorities(state, batch.index, jnp.ones(3)), batch, size

    state = replay.init(jax.tree.map(lambda leaf: leaf[0], step))
    expected = jax.jit(run, static_argnums=0)(replay, state)
    copy = jax.tree.map(jnp.copy, state)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    for got in (
        run(buffer, copy),
        jax.jit(lambda state: run(buffer, state))(state),
        jax.jit(lambda: run(buffer, state))(),
    ):
        chex.assert_trees_all_equal(got, expected)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf[1], jax.vmap(lambda state: run(buffer, state))(states)),
        expected,
    )
    with pytest.raises(ValueError, match=r"add:\n  obs: got float32\[2, 1\]"):
        jax.jit(lambda state: buffer.add(state, step.replace(obs=jnp.ones((2, 1)))))(state)


def test_importing_costs_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        __import__("jaxreplay")

"""The on-policy buffer: its stored steps, the three ways to end an episode, and no copies or lost
steps."""

import dataclasses

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
import jaxreplay.compat.flax
from jaxreplay import Rollout
from jaxreplay.buffers import state_checks
from tests.support import hlo

T, E = 6, 2
FORMS = ("next_step", "same_step")


def rollout_of(form, length=T, num_envs=E):
    return Rollout(length=length, num_envs=num_envs, autoreset=form)


def step_of(seed=0, time=None, form=FORMS[1], num_envs=E):
    """Return a random step of every env, or a block of `time` steps, with leaves of many dtypes."""
    axes, r = (num_envs,) if time is None else (time, num_envs), np.random.default_rng(seed)
    obs = {
        "vector": jnp.asarray(r.normal(size=(*axes, 3)), jnp.bfloat16),
        "image": jnp.asarray(r.integers(0, 256, (*axes, 2, 2)), jnp.uint8),
    }
    return jr.Step(
        obs=obs,
        action=jnp.asarray(r.integers(0, 4, axes), jnp.int32),
        reward=jnp.asarray(r.normal(size=axes), jnp.float32),
        terminated=jnp.asarray(r.random(axes) < 0.2),
        truncated=jnp.asarray(r.random(axes) < 0.2),
        final_obs=jax.tree.map(lambda x: x + 1, obs) if form == FORMS[1] else None,
        extras={
            "flag": jnp.asarray(r.random(axes) < 0.5),
            "half": jnp.asarray(r.normal(size=(*axes, 1)), jnp.float16),
        },
    )


def example_of(form=FORMS[1]):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step_of(form=form))


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


@pytest.mark.parametrize("form", FORMS)
def test_what_was_added_is_held_as_it_came(form):
    rollout, block = rollout_of(form), step_of(3, T, form)
    state = jax.jit(rollout.extend)(rollout.init(example_of(form)), block)
    assert_same(rollout.steps(state), block)
    assert_same(jax.jit(rollout.steps)(state), block)


@pytest.mark.parametrize("form", FORMS)
def test_extend_equals_add_for_each_step_also_beyond_the_length(form):
    rollout = rollout_of(form)
    add, extend = jax.jit(rollout.add), jax.jit(rollout.extend)
    state = expected = add(rollout.init(example_of(form)), step_of(9, form=form))
    for seed, time in enumerate((1, 2, 9)):
        block = step_of(seed, time, form)
        state = extend(state, block)
        for t in range(time):
            expected = add(expected, jax.tree.map(lambda leaf, t=t: leaf[t], block))
        assert_same(state, expected)
    assert_same(rollout.extend(state, step_of(0, 0, form)), state)


def test_steps_without_room_are_dropped_and_counted():
    rollout = rollout_of(FORMS[1])
    state, add = rollout.init(example_of()), jax.jit(rollout.add)
    for seed in range(T + 3):
        assert bool(rollout.can_add(state)) == (seed < T)
        state = add(state, step_of(seed))
        assert (int(state.position), int(state.num_dropped)) == (
            min(seed + 1, T),
            max(seed + 1 - T, 0),
        )
    assert_same(rollout.steps(state).reward, jnp.stack([step_of(seed).reward for seed in range(T)]))
    cleared = rollout.clear(state)
    assert (int(cleared.position), int(cleared.num_dropped), bool(rollout.can_add(cleared))) == (
        0,
        3,
        True,
    )
    full = state.replace(num_dropped=jnp.int32(2**31 - 2))
    assert int(add(add(full, step_of()), step_of()).num_dropped) == 2**31 - 1


def test_an_empty_rollout_has_no_steps_and_no_reward():
    rollout = rollout_of(FORMS[0])
    state = rollout.init(example_of(FORMS[0]))
    assert (int(rollout.num_steps(state)), float(rollout.mean_reward(state))) == (0, 0.0)
    _, mask = rollout.bootstrap(state, jnp.zeros((T, E)), jnp.zeros(E))
    assert not mask.any()


def test_a_reward_of_several_numbers_has_several_means():
    rollout, zeros = Rollout(length=2, num_envs=1, autoreset="next_step"), jnp.zeros((2, 1))
    block = jr.Step(
        zeros, zeros, jnp.array([[[1, 2]], [[3, 9]]]), terminated=zeros > 0, truncated=zeros > 0
    )
    state = jax.jit(rollout.extend)(rollout.init(jax.tree.map(lambda x: x[0, 0], block)), block)
    assert rollout.mean_reward(state).tolist() == [2.0, 5.5]


@pytest.mark.parametrize("form", FORMS)
def test_jit_equals_eager_and_vmap_a_loop(form):
    rollout = rollout_of(form)
    states = [
        jax.jit(rollout.extend)(rollout.init(example_of(form)), step_of(seed, seed + 2, form))
        for seed in range(3)
    ]
    value, final_value = jnp.ones((T, E)), None if form == FORMS[0] else jnp.ones((T, E))
    operations = (
        lambda state: rollout.add(state, step_of(1, form=form)),
        lambda state: rollout.extend(state, step_of(2, 3, form)),
        rollout.clear,
        rollout.steps,
        lambda state: rollout.bootstrap(state, value, value[0], final_value),
        lambda state: (
            rollout.num_steps(state),
            rollout.mean_reward(state),
            rollout.can_add(state),
        ),
        lambda state: rollout.minibatch(rollout.steps(state), jnp.array([3, 0, 11])),
    )
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for run in operations:
        jitted = jax.jit(run)
        vmapped = jax.jit(jax.vmap(run))(together)
        assert_same(jitted(states[0]), run(states[0]))
        for which, state in enumerate(states):
            assert_same(jax.tree.map(lambda leaf, which=which: leaf[which], vmapped), jitted(state))


@pytest.mark.parametrize("form", FORMS)
def test_one_trace_serves_all_states_and_keeps_their_structure(form):
    traces = []

    @jax.jit
    def add(rollout, state, step):
        traces.append(rollout)
        return rollout.add(state, step)

    spec = lambda state: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
    for _ in range(2):
        rollout = rollout_of(form)
        state = rollout.init(example_of(form))
        before = spec(state)
        for seed in range(3):
            state = add(rollout, state, step_of(seed, form=form))
            assert spec(state) == spec(rollout.clear(state)) == before
    assert len(traces) == 1
    assert jax.tree.leaves(rollout) == []


def test_a_donated_state_is_reused_and_gone():
    rollout = rollout_of(FORMS[1], length=4096)
    state = rollout.init(example_of())
    for function, block in ((rollout.add, step_of()), (rollout.extend, step_of(0, 3))):
        old = jax.tree.leaves(state)
        pointers = {leaf.unsafe_buffer_pointer() for leaf in old}
        state = jax.jit(function, donate_argnums=0)(state, block)
        assert all(leaf.is_deleted() for leaf in old)
        assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)} == pointers


@pytest.mark.parametrize("form", FORMS)
def test_writes_are_in_place_alone_in_a_scan_and_for_a_population(form, monkeypatch):
    # The check accepts scatters. If a scatter is not in place, XLA adds a copy, which it refuses.
    length, population = 1 << 14, 8
    rollout, one, block = rollout_of(form, length), step_of(form=form), step_of(0, 5, form)
    state = rollout.init(example_of(form))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * population), state)
    for write in (
        lambda state: rollout.add(state, one),
        lambda state: rollout.extend(state, block),
    ):
        hlo.check_in_place(write, (state,), num_elements=length * E, donated=0)
        scanned = lambda state, write=write: jax.lax.scan(
            lambda s, _: (write(s), None), state, None, 3
        )
        hlo.check_in_place(scanned, (state,), num_elements=length * E, donated=0)
        hlo.check_in_place(
            lambda states, write=write: jax.vmap(write)(states),
            (states,),
            num_elements=population * length * E,
            donated=0,
        )


def test_a_state_goes_through_serialization():
    rollout = rollout_of(FORMS[0])
    state = rollout.extend(rollout.init(example_of(FORMS[0])), step_of(1, 3, FORMS[0]))
    restored = flax.serialization.from_bytes(
        rollout.init(example_of(FORMS[0])), flax.serialization.to_bytes(state)
    )
    assert_same(jax.tree.map(jnp.asarray, restored), state)


def test_what_memory_says_is_what_init_takes():
    rollout = rollout_of(FORMS[1])
    assert rollout.memory(example_of()).total == sum(
        leaf.nbytes for leaf in jax.tree.leaves(rollout.init(example_of()))
    )


def test_an_eager_add_of_a_large_rollout_warns():
    state_checks._warned.clear()
    rollout = rollout_of(FORMS[0], length=1 << 20)
    step = jr.Step(*[jnp.zeros(E)] * 3, terminated=jnp.zeros(E, bool), truncated=jnp.zeros(E, bool))
    state = rollout.init(jax.tree.map(lambda leaf: leaf[0], step))
    with pytest.warns(jr.CopyWarning, match="add was called outside of jit"):
        rollout.add(state, step)


def test_minibatches_hold_each_row_once_an_epoch_in_a_new_order():
    rollout = rollout_of(FORMS[1])
    index = rollout.minibatches(jax.random.key(0), num_epochs=5, num_minibatches=3)
    assert (index.shape, index.dtype) == ((15, T * E // 3), jnp.int32)
    epochs = np.asarray(index).reshape(5, T * E)
    assert (np.sort(epochs) == np.arange(T * E)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 5
    by_env = rollout.env_minibatches(jax.random.key(0), num_epochs=4, num_minibatches=2)
    assert (np.sort(np.asarray(by_env).reshape(4, E)) == np.arange(E)).all()


def test_any_order_of_an_epoch_is_as_likely():
    """Chi-square over the 24 orders of 4 envs in 4800 epochs, with 23 degrees of freedom, reaches
    58.6 for 6 of 100 000 seeds."""
    rollout = rollout_of(FORMS[1], num_envs=4)
    orders = rollout.env_minibatches(jax.random.key(3), num_epochs=4800, num_minibatches=1)
    _, counts = np.unique(np.asarray(orders), axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 58.6


def test_take_reads_the_rows_of_a_minibatch():
    rollout, block = rollout_of(FORMS[1]), step_of(2, T)
    index = jnp.array([5, 0, 11])
    assert_same(
        rollout.minibatch(block, index),
        jax.tree.map(lambda leaf: leaf[index // E, jnp.array([1, 0, 1])], block),
    )
    assert_same(
        rollout.env_minibatch(block, jnp.array([1])), jax.tree.map(lambda leaf: leaf[:, 1:], block)
    )
    scanned = jax.jit(
        lambda index: jax.lax.scan(lambda _, i: (None, rollout.minibatch(block, i)), None, index)[1]
    )
    epochs = rollout.minibatches(jax.random.key(1), num_epochs=2, num_minibatches=4)
    assert_same(scanned(epochs).reward, block.reward.reshape(-1)[epochs])


def test_wrong_sizes_are_refused_with_the_nearest_that_fit():
    rollout = rollout_of(FORMS[1])
    with pytest.raises(
        ValueError,
        match=r"length \* num_envs = 12 does not divide into num_minibatches=5 equal ones; .* do: "
        r"4 and 6",
    ):
        rollout.minibatches(jax.random.key(0), num_epochs=1, num_minibatches=5)
    with pytest.raises(
        ValueError,
        match=r"env_minibatches: num_envs = 2 does not divide into num_minibatches=3 .* that do: "
        r"2$",
    ):
        rollout.env_minibatches(jax.random.key(0), num_epochs=1, num_minibatches=3)
    with pytest.raises(ValueError, match="num_epochs must be an int of at least 1, got 0"):
        rollout.minibatches(jax.random.key(0), num_epochs=0, num_minibatches=1)
    with pytest.raises(
        ValueError,
        match=r"minibatch:\n  obs: got \[2, 6\]\nleaves must begin with \[time, num_envs\], "
        r"here \[6, 2\]",
    ):
        rollout.minibatch({"obs": jnp.zeros((E, T))}, jnp.arange(2))


def test_a_wrong_configuration_is_refused():
    with pytest.raises(
        ValueError, match=r"Rollout: autoreset=None, but it must say what your env does"
    ):
        Rollout(length=4, num_envs=1)
    with pytest.raises(ValueError, match="Rollout: length must be an int of at least 1, got 0"):
        Rollout(length=0, num_envs=1, autoreset="next_step")
    with pytest.raises(
        ValueError,
        match=r"length \* num_envs = 2147483648 is too large: it must be at most 1073741824",
    ):
        Rollout(length=2**30, num_envs=2, autoreset="next_step")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout_of(FORMS[0]).length = 3


def test_the_wrong_leaf_is_named():
    rollout = rollout_of(FORMS[1])
    state = rollout.init(example_of())
    with pytest.raises(
        ValueError, match=r"add:\n  obs.image: got uint8\[6, 2, 2, 2\], expected uint8\[2, 2, 2\]"
    ) as error:
        rollout.add(state, step_of(0, T))
    assert "add takes one step of every env, leaves [num_envs, ...]" in str(error.value)
    with pytest.raises(
        ValueError, match=r"extend:\n(.|\n)*final_obs.image: missing, expected uint8\[6, 2, 2, 2\]"
    ):
        rollout.extend(
            state, step_of(0, T).replace(final_obs={"vector": step_of(0, T).obs["vector"]})
        )
    with pytest.raises(
        ValueError, match="init: the step's keys are wrong: missing terminated, truncated"
    ):
        rollout.init({"obs": 0.0, "action": 0, "reward": 0.0})


def test_a_bootstrap_that_cannot_be_right_is_refused():
    value = jnp.zeros((T, E))
    kept = rollout_of(FORMS[1]).init(example_of())
    with pytest.raises(
        ValueError,
        match=r"this rollout keeps final_obs; pass "
        r"final_value=critic\(rollout\.steps\(state\)\.final_obs\)",
    ):
        rollout_of(FORMS[1]).bootstrap(kept, value, value[0])
    tails = rollout_of(FORMS[0]).init(example_of(FORMS[0]))
    with pytest.raises(
        ValueError,
        match=r'with autoreset="next_step" final observations are rows like any other; leave out '
        r"final_value",
    ):
        rollout_of(FORMS[0]).bootstrap(tails, value, value[0], value)
    with pytest.raises(
        ValueError,
        match=r"bootstrap: value: got \[6, 2, 1\], expected \[6, 2\], one value for each "
        r"observation",
    ):
        rollout_of(FORMS[0]).bootstrap(tails, value[..., None], value[0])
    with pytest.raises(ValueError, match=r"bootstrap: last_value: got \[6, 2\], expected \[2\]"):
        rollout_of(FORMS[0]).bootstrap(tails, value, value)
    with pytest.raises(ValueError, match="bootstrap: value: got int32, expected floating values"):
        rollout_of(FORMS[0]).bootstrap(tails, value.astype(jnp.int32), value[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_memory_starts_anew_where_an_episode_does(form):
    """Done flags of one env are set at rows 1, 3 and 4. With next_step, the row after an end is the
    final row."""
    rollout = rollout_of(form, num_envs=1)
    done = jnp.array([False, True, False, True, True, False])[:, None]
    block = step_of(0, T, form, num_envs=1).replace(terminated=done, truncated=done & ~done)
    state = rollout.extend(rollout.init(example_of(form)), block)
    at = [3, 5] if form == "next_step" else [2, 4, 5]
    assert np.flatnonzero(rollout.is_first(state)).tolist() == at
    assert not rollout.is_first(rollout.clear(state)).any()

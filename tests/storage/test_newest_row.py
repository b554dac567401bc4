"""Episodes that end provisionally and continue with the next step: after each add, the buffer is as
if they had ended for good."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers.jitted import program
from jaxreplay.storage import newest_row
from tests.conftest import SOAK, thorough
from tests.support import oracle_views
from tests.support.buffers import add_step
from tests.support.hlo import check_in_place
from tests.support.oracle import Oracle
from tests.support.sampling import assert_same
from tests.support.steps import nth, stacked

NUM_ENVS, LENGTH, DISCOUNT = 3, 8, 0.9
SAMPLERS = {"uniform": jr.Uniform(), "prioritized": jr.Prioritized(alpha=0.5)}
cases = pytest.mark.parametrize(
    ("sampler", "n_step"),
    [("prioritized", 3), thorough("uniform", 1), thorough("prioritized", 1)],
)


def make(sampler, n_step, length=LENGTH, num_envs=NUM_ENVS):
    return jr.transitions(
        capacity=num_envs * length,
        num_envs=num_envs,
        batch_size=8,
        autoreset="same_step",
        n_step=n_step,
        gamma=DISCOUNT,
        sampler=SAMPLERS[sampler],
        track_episodes=True,
    )


def step_of(obs, reward, terminated, truncated, final_obs):
    return jr.Step(
        np.float32(obs),
        np.zeros(len(obs), np.int32),
        np.float32(reward),
        terminated=terminated,
        truncated=truncated,
        final_obs=np.float32(final_obs),
    )


def empty(buffer):
    zero, flag = np.zeros(1), np.zeros(1, bool)
    return buffer.init(nth(step_of(zero, zero, flag, flag, zero), 0))


@functools.cache
def programs(buffer):
    """Return the queries after each add, and a priority update, compiled once for all seeds."""

    def asked(state):
        row = jnp.arange(buffer.capacity)
        found = buffer.episode_table(state)
        return buffer.get(state, row), buffer.size(state), found.is_complete(row)

    return jax.jit(asked), jax.jit(buffer.update_priorities, donate_argnums=0)


@cases
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_each_moment_is_as_if_the_episodes_ended_there(sampler, n_step, seed):
    buffer = make(sampler, n_step)
    r = np.random.default_rng(seed)
    oracle = Oracle(
        num_envs=NUM_ENVS,
        length=LENGTH,
        autoreset="same_step",
        n_step=n_step,
        gamma=DISCOUNT,
        window={"after": n_step},
    )
    state = empty(buffer)
    asked, update = programs(buffer)
    may_go_on = was_first = np.zeros(NUM_ENVS, bool)
    for t in range(60):
        goes_on = may_go_on & (r.random(NUM_ENVS) < 0.9)
        for env in np.flatnonzero(goes_on):
            assert oracle.streams[env].pop().is_final
            oracle.streams[env][-1].truncated = False
        terminated, truncated = r.random((2, NUM_ENVS)) < 0.1
        obs, reward = 10 * t + np.arange(NUM_ENVS), r.integers(0, 9, NUM_ENVS)
        columns = reward, terminated, truncated | ~terminated, obs + 5
        state = add(buffer, state, step_of(obs, *columns), goes_on, was_first)
        was_first = ~goes_on
        oracle.add(*(x.tolist() for x in (obs, obs * 0, *columns)))
        may_go_on = ~terminated & ~truncated

        expected = {oracle.number(*one): one for one in oracle.candidates()}
        got, size, is_complete = jax.device_get(asked(state))
        assert set(np.flatnonzero(got.is_valid).tolist()) == set(expected)
        assert size == len(expected)
        for number, one in expected.items():
            item, transition = nth(got.experience, number), oracle.transition(*one)
            assert (item.obs, item.next_obs, item.num_steps) == (
                transition.obs,
                transition.next_obs,
                transition.num_steps,
            )
            assert item.reward == pytest.approx(transition.reward)
            assert item.discount == pytest.approx(transition.discount)
        for env, rows in enumerate(oracle.streams):
            spans = oracle_views.spans(oracle, rows)
            for position, index in oracle.stored(env):
                is_whole = spans[index][0] >= len(rows) - LENGTH
                assert is_complete[env * LENGTH + position] == is_whole
        if sampler == "prioritized":
            probabilities = oracle.probabilities(0.5)
            np.testing.assert_allclose(
                [got.probability[n] for n in probabilities], list(probabilities.values()), rtol=1e-5
            )
            rows = r.choice(list(expected), 3)
            priority = r.integers(0, 9, 3).astype(np.float32)
            state = update(state, nth(got.index, rows), priority)
            oracle.update([oracle.row(*expected[n]) for n in rows], priority.tolist())


@pytest.mark.parametrize(
    ("sampler", "n_step", "num_envs"), [("uniform", 1, 1), ("prioritized", 3, 4)]
)
def test_an_add_is_in_place(sampler, n_step, num_envs):
    capacity = 1 << 16
    buffer = make(sampler, n_step, length=capacity // num_envs, num_envs=num_envs)
    zero, flag = np.zeros(num_envs), np.zeros(num_envs, bool)
    step = step_of(zero, zero, flag, ~flag, zero)
    state = jax.eval_shape(buffer.init, nth(step, 0))
    once = lambda state, goes_on: add_step(buffer, state, step, goes_on, goes_on)
    twice = lambda state, goes_on: once(once(state, goes_on), goes_on)
    check_in_place(twice, (state, ~flag), num_elements=capacity, donated=0)


@cases
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_a_block_is_as_one_call_for_each_step(sampler, n_step, seed):
    """Blocks of several lengths, some longer than a ring, with ends of all kinds in the middle."""
    buffer, r = make(sampler, n_step), np.random.default_rng(seed)
    state, by_step, time = empty(buffer), empty(buffer), 0
    may_go_on = was_first = np.zeros(NUM_ENVS, bool)
    for length in r.choice([1, 2, 5, 11], 40):
        steps, first = [], was_first
        for _ in range(length):
            goes_on = may_go_on & (r.random(NUM_ENVS) < 0.8)
            terminated, truncated = r.random((2, NUM_ENVS)) < 0.1
            obs = 10 * time + np.arange(NUM_ENVS)
            step = step_of(obs, obs, terminated, truncated | ~terminated, obs + 5)
            by_step = add(buffer, by_step, step, goes_on, was_first)
            steps.append((step, goes_on))
            may_go_on, was_first, time = ~terminated & ~truncated, ~goes_on, time + 1
        state = extend(buffer, state, *stacked(steps), first)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(by_step), strict=True
        ):
            name = jax.tree_util.keystr(path)
            if name != ".sampler.pending_mass":  # after a final row, no row waits for its window
                np.testing.assert_array_equal(x, y, err_msg=name)


def test_laps_go_back_with_the_head():
    buffer = make("prioritized", 1, length=4, num_envs=1)
    flag, zero = np.ones(1, bool), np.zeros(1)
    state = empty(buffer)
    for t in range(3):  # the third step's final row begins the second lap
        step = step_of(zero + t, zero, ~flag, flag, zero)
        state = add(buffer, state, step, flag & (t > 0), flag & (t == 1))
    get = jax.jit(buffer.get)
    index = get(state, np.arange(4)).index
    state = add(buffer, state, step_of(zero + 3, zero, ~flag, flag, zero), flag, ~flag)
    assert get(state, index).is_valid.tolist() == [False, True, True, False]
    assert np.asarray(get(state, np.arange(4)).experience.obs)[1:].tolist() == [1, 2, 3]


def test_flags_are_as_if_written_once():
    """Only an episode's newest step is truncated, and its first step stays the first."""
    buffer = make("uniform", 1, num_envs=1)
    flag, zero = np.ones(1, bool), np.zeros(1)
    plain, state = empty(buffer), empty(buffer)
    for t in range(5):
        step = step_of(zero + t, zero, ~flag, flag, zero + t + 1)
        state = add(buffer, state, step, flag & (t > 0), flag & (t == 1))
        plain = jr.jit(buffer).add(plain, step.replace(truncated=flag & (t == 4)))
    assert_same(state, plain)


add = program(add_step, changes=True)
extend = program(newest_row.extend, changes=True)

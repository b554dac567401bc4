"""Rows computed anew, all of them, in blocks: each step as if the function had been called on it
alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.hlo import check_in_place

E, LENGTH = 3, 20


def filled(autoreset, num_steps=31):
    """Return a buffer, its state, and the steps of each env that are stored, oldest first: of each
    its reward, its observation and the next one, or its own where that is not known."""
    buffer = jr.uniform(
        capacity=E * LENGTH, num_envs=E, batch_size=4, autoreset=autoreset, allow_write=True
    )
    run, r = jr.jit(buffer), np.random.default_rng(0)
    obs = r.normal(size=(num_steps, E)).astype(np.float32)
    ends = r.random((2, num_steps, E)) < 0.1
    final_obs = obs + 0.5 if autoreset == "same_step" else None
    reward = np.arange(num_steps * E, dtype=np.float32).reshape(num_steps, E)
    flags = {"terminated": ends[0], "truncated": ends[1] & ~ends[0]}
    steps = jr.Step(obs, obs, reward, **flags, final_obs=final_obs)
    state = run.init(jax.tree.map(lambda leaf: leaf[0, 0], steps))
    return buffer, run.extend(state, steps)


def stored(state):
    return jax.device_get((state.rows.steps, state.rows.flags, state.counters))


@pytest.mark.parametrize("block", [1, 7, 65_536])
@pytest.mark.parametrize("autoreset", jr.autoreset.FORMS)
def test_each_step_has_what_the_function_gives_for_it_alone(autoreset, block):
    buffer, state = filled(autoreset)
    relabelled = jr.relabel(buffer, lambda step, next_obs: step.reward * 2 + next_obs)
    rows = np.arange(E * LENGTH)
    before, expected = stored(state), relabelled.get(state, rows)
    factor = jnp.float32(2)  # traced below
    again = jax.jit(
        lambda state, factor: buffer.map_rows(
            state,
            lambda step, next_obs: {"reward": step.reward * factor + next_obs, "action": step.obs},
            block,
        )
    )(state, factor)
    found = buffer.get(again, rows)
    valid = np.asarray(expected.is_valid)
    assert valid.sum() > 20
    np.testing.assert_array_equal(found.is_valid, valid)
    np.testing.assert_array_equal(found.experience.reward[valid], expected.experience.reward[valid])
    np.testing.assert_array_equal(found.experience.action[valid], found.experience.obs[valid])
    after = stored(again)
    is_final = (before[1] & jr.storage.row_flags.FINAL) != 0
    for name in ("reward", "action"):  # final rows stay
        got, was = (getattr(one[0], name)[is_final] for one in (after, before))
        np.testing.assert_array_equal(got, was)
    np.testing.assert_array_equal(after[0].obs, before[0].obs)
    assert int(buffer.metrics(again)["num_ignored_writes"]) == 0


def test_rows_that_are_not_written_stay():
    buffer = jr.items(capacity=8, num_envs=2, batch_size=2, allow_write=True)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.ones(2))
    again = buffer.map_rows(state, lambda item: item + 1)
    assert np.asarray(again.rows.steps).tolist() == [2, 0, 0, 0, 2, 0, 0, 0]


def test_it_is_in_place():
    capacity = 1 << 16
    buffer = jr.uniform(
        capacity=capacity, num_envs=4, batch_size=2, autoreset="next_step", allow_write=True
    )
    zero, no = np.float32(0), np.False_
    step = jr.Step(np.zeros(3, np.float32), zero, zero, terminated=no, truncated=no)
    state = jax.eval_shape(buffer.init, step)
    check_in_place(
        lambda state: buffer.map_rows(state, lambda step, after: {"reward": after[0]}, 256),
        (state,),
        num_elements=capacity,
        donated=0,
    )

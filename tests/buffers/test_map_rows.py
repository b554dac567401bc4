"""Rows computed anew, all of them, in blocks: each step as if the function had been called on it
alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.storage import row_flags
from tests.support.compilations import count_programs
from tests.support.steps import begun, nth

E, LENGTH, TIME = 3, 20, 31


def buffer_of(autoreset):
    return jr.uniform(
        capacity=E * LENGTH, num_envs=E, batch_size=4, autoreset=autoreset, allow_write=True
    )


def steps_of(autoreset):
    r = np.random.default_rng(0)
    obs = r.normal(size=(TIME, E)).astype(np.float32)
    ends = r.random((2, TIME, E)) < 0.1
    final_obs = obs + 0.5 if autoreset == "same_step" else None
    reward = np.arange(TIME * E, dtype=np.float32).reshape(TIME, E)
    flags = {"terminated": ends[0], "truncated": ends[1] & ~ends[0]}
    return jr.Step(obs, obs, reward, **flags, final_obs=final_obs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def mapped(buffer, block, steps, factor):
    """Return the state before and after, items of rows by `jr.relabel`, and of the new rows."""
    state = begun(buffer, steps)
    rows = jnp.arange(E * LENGTH)
    relabelled = jr.relabel(buffer, lambda step, next_obs: step.reward * factor + next_obs)
    change = lambda step, next_obs, factor: {
        "reward": step.reward * factor + next_obs,
        "action": step.obs,
    }
    after = buffer.map_rows(state, change, factor, block=block)
    return state, after, relabelled.get(state, rows), buffer.get(after, rows)


@pytest.mark.parametrize(
    ("autoreset", "block"),
    [*zip(jr.autoreset.FORMS, (7, 1, 65_536), strict=True)],
)
def test_each_step_has_what_the_function_gives_for_it_alone(autoreset, block):
    before, after, expected, found = jax.device_get(
        mapped(buffer_of(autoreset), block, steps_of(autoreset), np.float32(2))
    )
    valid = expected.is_valid
    assert valid.sum() > 20
    np.testing.assert_array_equal(found.is_valid, valid)
    np.testing.assert_array_equal(found.experience.reward[valid], expected.experience.reward[valid])
    np.testing.assert_array_equal(found.experience.action[valid], found.experience.obs[valid])
    is_final = (before.rows.flags & row_flags.FINAL) != 0
    for name in ("reward", "action"):  # final rows stay
        got, was = (getattr(state.rows.steps, name)[is_final] for state in (after, before))
        np.testing.assert_array_equal(got, was)
    np.testing.assert_array_equal(after.rows.steps.obs, before.rows.steps.obs)


def test_rows_that_are_not_written_stay():
    buffer = jr.items(capacity=8, num_envs=2, batch_size=2, allow_write=True)

    @jax.jit
    def run():
        state = buffer.add(buffer.init(jnp.float32(0)), jnp.ones(2))
        return buffer.map_rows(state, lambda item: item + 1).rows.steps

    assert np.asarray(run()).tolist() == [2, 0, 0, 0, 2, 0, 0, 0]


def scaled(step, next_obs, factor):
    return {"reward": step.reward * factor + next_obs}


@pytest.mark.parametrize(("rows", "program"), [("device", "map_rows"), ("host", "_block")])
def test_a_replay_compiles_a_function_once_for_all_parameters(rows, program):
    replay, time = jr.Replay(buffer_of("next_step"), rows=rows), 15
    steps = nth(steps_of("next_step"), slice(time))
    for step in range(time):
        replay.add(nth(steps, step))
    reward, next_obs = (x.copy() for x in (steps.reward, steps.obs))
    with count_programs(program) as compiled:
        for factor in np.float32([2, 3]):
            replay.map_rows(scaled, factor, block=16)
            reward[:-1] = reward[:-1] * factor + next_obs[1:]
        assert compiled() == 1
    batch = replay.get(np.arange(E * LENGTH))
    env, place = np.divmod(np.flatnonzero(batch.is_valid), LENGTH)
    assert len(env) > 20
    got = np.asarray(batch.experience.reward)[batch.is_valid]
    is_end = steps.terminated[place, env]  # nothing comes after: the row's own observation
    np.testing.assert_allclose(got[~is_end], reward[place, env][~is_end], rtol=1e-6)

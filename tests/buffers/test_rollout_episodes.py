"""Advantages of a rollout are those of its episodes, for all three ways to end an episode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxreplay as jr
from jaxreplay import Rollout
from tests.conftest import ALL, SOAK
from tests.test_targets import DECAY, DISCOUNT, oracle

T, E = 6, 2
FORMS = (
    "next_step",
    "same_step",
    "same_step_no_final_obs with final_value",
    "same_step_no_final_obs alone",
)


def rollout_of(form):
    return Rollout(length=T, num_envs=E, autoreset=form.split()[0])


class World:
    """One env whose observation is its value, so that the critic is the identity.

    `kinds` has one letter for each transition: "." continues the episode, "T" terminates it, "C"
    truncates it, "B" does both.
    """

    def __init__(self, kinds, seed, form):
        r = np.random.default_rng(seed)
        n = len(kinds)
        self.kinds, self.form = kinds, form
        self.reward, self.start, self.final = r.normal(size=(3, n + 1)).astype(np.float32)
        self.now, self.shows_final = 0, False  # the next transition

    def obs(self):
        return self.final[self.now - 1] if self.shows_final else self.start[self.now]

    def next_value(self, n):
        return self.start[n + 1] if self.kinds[n] == "." else self.final[n]

    def step(self):
        """Return the step that the env's loop adds, and its transition number, which is None for a
        final observation."""
        obs, n = self.obs(), self.now
        if self.shows_final:
            self.shows_final = False
            return (obs, np.float32(99), True, True, np.float32(np.nan)), None
        kind = self.kinds[n]
        self.now, self.shows_final = n + 1, kind != "." and self.form == "next_step"
        return (
            obs,
            self.reward[n],
            kind in "TB",
            kind in "CB",
            self.final[n] if kind != "." else np.float32(np.nan),
        ), n


def expected_of(worlds, rows):
    """Return the mask, advantages and targets of one rollout, by sums of errors in float64."""
    found = {name: np.zeros((len(rows), E)) for name in ("reward", "value", "next_value")}
    found |= {name: np.zeros((len(rows), E), bool) for name in ("terminated", "truncated", "mask")}
    for env, world in enumerate(worlds):
        for t, n in enumerate(row[env][1] for row in rows):
            kind = None if n is None else world.kinds[n]
            if n is None or (kind == "C" and world.form == FORMS[3]):
                continue
            here = (
                world.reward[n],
                world.start[n],
                world.next_value(n),
                kind in "TB",
                kind in "CB",
                True,
            )
            for name, value in zip(found, here, strict=True):
                found[name][t, env] = value
    return found["mask"], *oracle(found)


def collect(form, state, steps, last_obs):
    rollout = rollout_of(form)
    obs, reward, terminated, truncated, final = steps
    keeps = form == FORMS[1]
    state = rollout.extend(
        rollout.clear(state),
        jr.Step(
            obs,
            obs,
            reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=final if keeps else None,
            extras=final,
        ),
    )
    stored = rollout.steps(state)
    final_value = {FORMS[1]: stored.final_obs, FORMS[2]: stored.extras}.get(form)
    got, mask = rollout.advantages(
        state, stored.obs, last_obs, final_value, gamma=DISCOUNT, lambda_=DECAY
    )
    return state, got, mask, rollout.num_steps(state)


jitted_collect = jax.jit(collect, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def jitted_init(form):
    keeps, scalar, flag = form == FORMS[1], jnp.float32(0), jnp.bool_(0)
    step = jr.Step(scalar, scalar, scalar, terminated=flag, truncated=flag, extras=scalar)
    return rollout_of(form).init(step.replace(final_obs=scalar if keeps else None))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=500 if SOAK else 20)
@given(
    kinds=st.lists(st.sampled_from("...TCB"), min_size=6 * T, max_size=6 * T),
    num_steps=st.integers(1, T) if ALL else st.just(1),  # a program for each
    seed=st.integers(0, 99),
)
def test_advantages_are_those_of_the_episodes(form, kinds, num_steps, seed):
    """In three successive rollouts, the last one not full, no target crosses an episode's end."""
    worlds = [World(kinds[env::E], seed + env, form) for env in range(E)]
    state = jitted_init(form)
    for length in (T, T, num_steps):
        rows = [[world.step() for world in worlds] for _ in range(length)]
        steps = [
            np.array([[row[env][0][part] for env in range(E)] for row in rows]) for part in range(5)
        ]
        last_obs = np.array([world.obs() for world in worlds])
        state, *found = jitted_collect(form, state, steps, last_obs)
        got, mask, found_steps = jax.device_get(found)
        right, *expected = expected_of(worlds, rows)
        np.testing.assert_array_equal(mask[: len(rows)], right)
        assert not mask[len(rows) :].any()
        for leaf, its in zip((got.advantage, got.target), expected, strict=True):
            np.testing.assert_allclose(leaf[: len(rows)][right], its[right], atol=1e-5)
        held = [row[env] for row in rows for env in range(E) if row[env][1] is not None]
        assert found_steps == len(held)

"""Several agents in an env, whose episodes end one by one. `storage/test_oracle_streams.py` has
their transitions, sequences and chunks."""

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.histories import flags_of
from tests.support.oracle import Oracle
from tests.support.steps import nth, plain_step, stacked
from tests.test_targets import DECAY, DISCOUNT, oracle as advantages

A, E = 3, 2
FORMS = jr.autoreset.FORMS


def steps_of(form, num_steps):
    """Return steps of envs whose agents end one by one, and who acted, bool[T, E, A]."""
    r, flags = np.random.default_rng(3), np.zeros((2, E, A), bool)
    oracle = Oracle(num_envs=E, length=10**6, autoreset=form, agents=A)
    steps, acted = [], []
    for time in range(num_steps):
        owes = np.array([oracle.owes_final_row(env) for env in range(E)])
        new, flags = flags_of(r, flags, owes, 0.25)
        obs, reward = np.float32(time + 1000 * np.arange(E)), r.integers(-3, 4, (E, A))
        at = [len(rows) for rows in oracle.streams]
        oracle.add(obs, obs, obs, *new, obs + 0.5)
        rows = [stream[first] for stream, first in zip(oracle.streams, at, strict=True)]
        acted.append(
            [np.zeros(A, bool) if row.agents is None else row.agents.alive for row in rows]
        )
        final_obs = obs + 0.5 if form == "same_step" else None
        fields = {"reward": np.float32(reward), "final_obs": final_obs}
        steps.append(plain_step(obs, terminated=new[0], truncated=new[1], **fields))
    return stacked(steps), np.array(acted)


@pytest.mark.parametrize("form", FORMS)
def test_a_rollout_learns_from_who_acted(form):
    """Its mask, and the advantages of each agent, across rollouts."""
    rollout = jr.rollout(length=12, num_envs=E, autoreset=form, num_agents=A)
    all_steps, acted = steps_of(form, 48)
    r = np.random.default_rng(3)

    @jax.jit
    def learn(state, steps, *given):
        state, _ = jax.lax.scan(lambda one, step: (rollout.add(one, step), None), state, steps)
        found = rollout.advantages(state, *given, gamma=DISCOUNT, lambda_=DECAY)
        return rollout.clear(state), state.mask, rollout.num_steps(state), found

    state = rollout.init(nth(all_steps, (0, 0)))
    for first in range(0, 48, 12):
        part = slice(first, first + 12)
        steps, mask = nth(all_steps, part), acted[part]
        value, final = np.float32(r.random((2, 12, E, A)))
        last = np.float32(r.random((E, A)))
        given = (value, last) if form == "next_step" else (value, last, final)
        state, *found = learn(state, steps, *given)
        its_mask, num_steps, (got, got_mask) = jax.device_get(found)
        np.testing.assert_array_equal(its_mask, mask)
        assert num_steps == mask.sum()
        np.testing.assert_array_equal(got_mask, mask)
        following = np.concatenate([value[1:], last[None]])
        if form != "next_step":
            is_over = (steps.terminated | steps.truncated).all(-1, keepdims=True)
            following = np.where(is_over, final, following)
        flags = {"terminated": steps.terminated, "truncated": steps.truncated, "mask": mask}
        fields = {"reward": steps.reward, "value": value, "next_value": following} | flags
        expected, _ = advantages({name: leaf.reshape(12, -1) for name, leaf in fields.items()})
        np.testing.assert_allclose(got.advantage.reshape(12, -1), expected, rtol=1e-4, atol=1e-5)

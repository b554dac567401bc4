"""Several agents in an env, whose episodes end one by one. `storage/test_oracle_streams.py` has
their transitions, sequences and chunks."""

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.histories import flags_of
from tests.support.oracle import Oracle
from tests.support.refusals import refused
from tests.support.steps import nth, plain_step, stacked

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
        found = rollout.advantages(state, *given, gamma=0.5)
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
        done = steps.terminated | steps.truncated
        for env, agent in np.ndindex(E, A):
            carry = 0.0
            for t in reversed(range(12)):
                if not mask[t, env, agent]:
                    carry = 0.0
                    assert got.advantage[t, env, agent] == 0
                    continue
                following = value[t + 1, env, agent] if t < 11 else last[env, agent]
                if form != "next_step" and done[t, env].all():
                    following = final[t, env, agent]
                if steps.terminated[t, env, agent]:
                    following = 0.0
                delta = steps.reward[t, env, agent] + 0.5 * following
                carry = (
                    delta - value[t, env, agent] + 0.5 * 0.95 * carry * (not done[t, env, agent])
                )
                np.testing.assert_allclose(
                    got.advantage[t, env, agent], carry, rtol=1e-4, atol=1e-5
                )


@pytest.mark.no_xla
def test_flags_of_another_number_of_agents_are_refused():
    sizes = {"capacity": 8, "batch_size": 2, "autoreset": "next_step"}
    step = nth(steps_of("next_step", 1)[0], (0, slice(0, 1)))
    with refused(
        r"terminated: got bool\[3\], expected bool\[\](?s:.)*need a buffer with num_agents"
    ):
        jax.eval_shape(lambda: jr.uniform(**sizes).init(nth(step, 0)))
    with refused(r"terminated: got bool\[3\], expected bool\[2\]"):
        jax.eval_shape(lambda: jr.uniform(**sizes, num_agents=2).init(nth(step, 0)))
    with refused("num_agents must be an int of at least 1"):
        jr.uniform(**sizes, num_agents=0)
    buffer = jr.uniform(**sizes, num_agents=A, allow_write=True)
    state = jax.eval_shape(lambda: buffer.init(nth(step, 0)))
    one = step.replace(terminated=step.terminated[:, 0])
    with refused(r"terminated: got bool\[1\], expected bool\[1, 3\]"):
        jax.eval_shape(buffer.add, state, one)
    index = jr.types.Index(np.zeros(1, np.int32), np.zeros(1, np.uint32))
    with refused("no leaf of a row is named terminated"):
        values = {"terminated": np.zeros((1, A), np.uint8)}
        jax.eval_shape(lambda state: buffer.write(state, index, values), state)
    with refused("needs a rollout of one env.*no num_agents"):
        rollout = jr.rollout(length=4, num_envs=1, autoreset="next_step", num_agents=A)
        rollout.from_trajectories(None, [])


@pytest.mark.no_xla
def test_states_of_other_numbers_of_agents_are_refused():
    sizes = {"capacity": 8, "batch_size": 2, "autoreset": "next_step"}
    three, none = jr.uniform(**sizes, num_agents=A), jr.uniform(**sizes)
    step = nth(steps_of("next_step", 1)[0], (0, 0))
    state = jax.eval_shape(lambda: three.init(step))
    message = "its steps have num_agents=3, but the buffer has num_agents=None"
    for call in (none.adopt, none.size, lambda state: none.merge(state, state)):
        with refused(message):
            jax.eval_shape(call, state)
    plain = step.replace(terminated=step.terminated[0], truncated=step.truncated[0])
    with refused("its steps have num_agents=None, but the buffer has num_agents=3"):
        jax.eval_shape(lambda: three.adopt(none.init(plain)))
    with refused("leave out autoreset, track_episodes and num_agents"):
        jr.items(capacity=8, batch_size=2, num_agents=2)
    with refused(r"discount_key='d' has the shape \[3\], expected \[\]"):
        extras = {"d": step.reward}
        own = jr.uniform(**sizes, num_agents=A, discount_key="d")
        jax.eval_shape(lambda: own.init(step.replace(extras=extras)))

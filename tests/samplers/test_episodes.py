"""The episode look-ups against their definitions, on random streams with wraps, masks, and episodes
longer than a stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import SOAK
from tests.support import oracle_views
from tests.support.oracle import Oracle

FORMS = jr.autoreset.FORMS


def check(buffer, state, oracle, look_up):
    for env, rows in enumerate(oracle.streams):
        spans = oracle_views.spans(oracle, rows)
        oldest = max(0, len(rows) - oracle.length)
        for position, index in oracle.stored(env):
            to_end, from_start, ends, exist, complete = (
                np.asarray(x)[..., env * oracle.length + position] for x in look_up(state)
            )
            if spans[index] is None:
                assert (to_end, from_start, complete) == (0, 0, False)
                continue
            first, end = spans[index]
            has_ended, last = end is not None, len(rows) - 1 if end is None else end
            assert to_end == last - index
            assert from_start == index - max(first, oldest)
            assert complete == (has_ended and first >= oldest)
            ahead = sorted({span[1] for span in spans[index:] if span and span[1] is not None})
            for k in range(4):
                assert exist[k] == (1 <= k <= len(ahead))
                assert ends[k] == (ahead[k - 1] if exist[k] else len(rows) - 1) - index


@pytest.mark.parametrize("autoreset", FORMS)
@pytest.mark.parametrize("ends", [0.03, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("allow_mask", [False, True])
def test_look_ups_agree_with_their_definitions(autoreset, ends, allow_mask):
    r = np.random.default_rng(int(ends * 100) + allow_mask)
    num_envs, length = 3, 8
    buffer = jr.uniform(
        capacity=num_envs * length,
        num_envs=num_envs,
        batch_size=1,
        autoreset=autoreset,
        allow_mask=allow_mask,
        track_episodes=True,
    )
    oracle = Oracle(
        num_envs=num_envs,
        length=length,
        autoreset=autoreset,
        n_step=1,
        gamma=1.0,
    )
    zeros = np.zeros(num_envs, np.float32)
    blank = jr.Step(
        obs=zeros,
        action=zeros,
        reward=zeros,
        terminated=zeros > 0,
        truncated=zeros > 0,
        final_obs=zeros if autoreset == "same_step" else None,
    )
    state, add = buffer.init(jax.tree.map(lambda x: x[0], blank)), jax.jit(buffer.add)
    rows = jnp.arange(buffer.capacity)

    @jax.jit
    def look_up(state):
        episodes = buffer.episode_table(state)
        ends, exist = jax.vmap(lambda k: episodes.kth_end(rows, k))(jnp.arange(4))
        return (
            episodes.steps_to_end(rows),
            episodes.steps_from_start(rows),
            ends,
            exist,
            episodes.is_complete(rows),
        )

    for _ in range(300 if SOAK else 60):
        done, kind = r.random(num_envs) < ends, r.random(num_envs) < 0.5
        mask = r.random(num_envs) < 0.7 if allow_mask else None
        if allow_mask and autoreset == "next_step":
            mask |= [oracle.owes_final_row(env) for env in range(num_envs)]
        step = blank.replace(terminated=done & kind, truncated=done & ~kind)
        oracle.add(zeros, zeros, zeros, step.terminated, step.truncated, zeros, mask)
        state = add(state, step, mask)
        check(buffer, state, oracle, look_up)


def test_rows_that_are_not_stored_are_in_no_complete_episode():
    buffer = jr.uniform(
        capacity=8,
        num_envs=1,
        batch_size=1,
        autoreset="same_step_no_final_obs",
        track_episodes=True,
    )
    one = jnp.ones(1)
    step = jr.Step(obs=one, action=one, reward=one, terminated=one > 0, truncated=one < 0)
    state = jax.jit(buffer.add)(buffer.init(jax.tree.map(lambda x: x[0], step)), step)
    assert buffer.episode_table(state).is_complete(jnp.arange(8)).tolist() == [True] + [False] * 7
    state = buffer.clear(state)
    assert not buffer.episode_table(state).is_complete(jnp.arange(8)).any()


def test_without_a_table_the_cure_is_named():
    buffer = jr.uniform(capacity=8, num_envs=1, batch_size=1, autoreset="same_step_no_final_obs")
    one = jnp.ones(())
    state = buffer.init(
        jr.Step(obs=one, action=one, reward=one, terminated=one > 0, truncated=one < 0)
    )
    with pytest.raises(ValueError, match="track_episodes=True"):
        buffer.episode_table(state)

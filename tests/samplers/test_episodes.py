"""The episode look-ups against their definitions, on random streams with wraps, masks, clears, and
episodes longer than a stream."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import SOAK
from tests.support import oracle_views
from tests.support.oracle import Oracle
from tests.support.steps import nth, plain_step

NUM_ENVS, LENGTH, NUM_STEPS, CLEAR = 3, 8, 300 if SOAK else 60, 47


def check(oracle, found):
    is_complete = found[-1].reshape(NUM_ENVS, LENGTH)
    for env, rows in enumerate(oracle.streams):
        spans = oracle_views.spans(oracle, rows)
        oldest = max(0, len(rows) - LENGTH)
        assert not is_complete[env, len(rows) :].any()  # rows that are not stored
        for position, index in oracle.stored(env):
            to_end, from_start, ends, exist, complete = (
                leaf[..., env * LENGTH + position] for leaf in found
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


@jax.jit
def look_ups(buffer, steps, masks):
    """Return the look-ups of all rows after each step; after one of the steps the buffer is
    cleared."""

    def go(state, now):
        time, step, mask = now
        state = buffer.add(state, step, mask)
        state = jax.lax.cond(time == CLEAR, buffer.clear, lambda state: state, state)
        episodes, rows = buffer.episode_table(state), jnp.arange(buffer.capacity)
        return state, (
            episodes.steps_to_end(rows),
            episodes.steps_from_start(rows),
            *jax.vmap(lambda k: episodes.kth_end(rows, k))(jnp.arange(4)),
            episodes.is_complete(rows),
        )

    state = buffer.init(nth(steps, (0, 0)))
    return jax.lax.scan(go, state, (jnp.arange(NUM_STEPS), steps, masks))[1]


@pytest.mark.parametrize("ends", [0.03, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(
    ("autoreset", "allow_mask"),
    [
        ("next_step", True),
        ("same_step", True),
        ("same_step_no_final_obs", False),
        *(
            pytest.param(form, mask, marks=pytest.mark.thorough)
            for form, mask in zip(jr.autoreset.FORMS, (False, False, True), strict=True)
        ),
    ],
)
def test_look_ups_agree_with_their_definitions(autoreset, ends, allow_mask):
    r = np.random.default_rng(int(ends * 100) + allow_mask)
    buffer = jr.uniform(
        capacity=NUM_ENVS * LENGTH,
        num_envs=NUM_ENVS,
        batch_size=1,
        autoreset=autoreset,
        allow_mask=allow_mask,
        track_episodes=True,
    )
    shape = (NUM_STEPS, NUM_ENVS)
    zeros, done = np.zeros(shape, np.float32), r.random(shape) < ends
    terminated, masks = done & (r.random(shape) < 0.5), r.random(shape) < 0.7
    truncated = done & ~terminated

    oracle = Oracle(num_envs=NUM_ENVS, length=LENGTH, autoreset=autoreset, n_step=1, gamma=1.0)
    history = []  # the oracle after each step
    for time, (zero, *flags) in enumerate(zip(zeros, terminated, truncated, strict=True)):
        if autoreset == "next_step":  # the row after a done is never masked
            masks[time] |= [oracle.owes_final_row(env) for env in range(NUM_ENVS)]
        oracle.add(zero, zero, zero, *flags, zero, masks[time] if allow_mask else None)
        if time == CLEAR:
            oracle.clear()
        history.append(copy.deepcopy(oracle))
    final_obs = zeros if autoreset == "same_step" else None
    steps = plain_step(zeros, terminated=terminated, truncated=truncated, final_obs=final_obs)
    found = jax.device_get(look_ups(buffer, steps, masks if allow_mask else None))
    for time, then in enumerate(history):
        check(then, nth(found, time))

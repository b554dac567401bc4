"""Transitions checked by hand: the stored rows and returned items of each autoreset form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

NAN = float("nan")


def run(autoreset, rows, *, n_step=1, gamma=0.5, capacity=16, extra_axis=()):
    """Add one env's rows of (obs, reward, "" | "terminated" | "truncated"[, final_obs]).

    Return a function from row number to item.
    """
    buffer = jr.uniform(
        capacity=capacity, num_envs=1, batch_size=4, autoreset=autoreset, n_step=n_step, gamma=gamma
    )
    has_final = any(len(row) == 4 for row in rows)

    def step(obs, reward, end, final=-1.0):
        one = lambda x: jnp.full((1, *extra_axis), x)
        done = {
            "terminated": jnp.array([end == "terminated"]),
            "truncated": jnp.array([end == "truncated"]),
        }
        return jr.Step(
            obs=one(obs),
            action=one(obs),
            reward=one(float(reward)),
            **done,
            final_obs=one(final) if has_final else None,
        )

    state = buffer.init(jax.tree.map(lambda x: x[0], step(*rows[0])))
    add, get = jax.jit(buffer.add), jax.jit(buffer.get)
    for row in rows:
        state = add(state, step(*row))

    def read(row):
        sample = get(state, jnp.array([row]))
        return (
            jax.tree.map(lambda x: x[0].tolist(), sample.experience) if sample.is_valid[0] else None
        )

    return read


def summary(item):
    return item and (item.obs, item.reward, item.discount, item.next_obs, item.num_steps)


def test_next_step_autoreset_turns_the_row_after_a_done_into_its_tail():
    read = run(
        "next_step",
        [
            (1.0, 1, ""),
            (2.0, 2, "terminated"),
            (3.0, NAN, "terminated"),
            (10.0, 4, ""),
            (11.0, 5, "truncated"),
            (12.0, NAN, ""),
        ],
    )
    assert summary(read(0)) == (1, 1, 0.5, 2, 1)
    assert summary(read(1)) == (2, 2, 0, 3, 1)  # the true final observation
    # the final row: its done flag is ignored, otherwise 10 would be a final row too
    assert read(2) is None
    assert summary(read(3)) == (10, 4, 0.5, 11, 1)
    # truncated: the target bootstraps from the final observation
    assert summary(read(4)) == (11, 5, 0.5, 12, 1)


def test_a_terminated_row_is_drawable_before_its_tail_is_written_and_a_truncated_one_is_not():
    assert summary(run("next_step", [(1.0, 1, ""), (2.0, 2, "terminated")])(1)) == (2, 2, 0, 2, 1)
    assert run("next_step", [(1.0, 1, ""), (2.0, 2, "truncated")])(1) is None


def test_same_step_autoreset_with_final_obs_writes_the_tail_beside_the_step():
    read = run(
        "same_step",
        [
            (1.0, 1, "", NAN),
            (2.0, 2, "terminated", 3.0),
            (10.0, 4, "truncated", 11.0),
            (20.0, 5, "", NAN),
            (21.0, 6, "", NAN),
        ],
    )
    assert [summary(read(row)) for row in range(7)] == [
        (1, 1, 0.5, 2, 1),
        (2, 2, 0, 3, 1),
        None,
        (10, 4, 0.5, 11, 1),
        None,
        (20, 5, 0.5, 21, 1),
        None,
    ]


def test_same_step_autoreset_without_final_obs_gives_up_the_truncated_transition():
    read = run(
        "same_step_no_final_obs",
        [
            (1.0, 1, ""),
            (2.0, 2, "terminated"),
            (10.0, 4, ""),
            (11.0, 5, "truncated"),
            (20.0, 6, ""),
            (21.0, 7, ""),
        ],
    )
    assert [summary(read(row)) for row in range(5)] == [
        (1, 1, 0.5, 2, 1),
        (2, 2, 0, 2, 1),  # next_obs is unknown: the own obs, finite and of the right shape
        (10, 4, 0.5, 11, 1),
        None,  # 11 is the last known observation: the final row
        (20, 6, 0.5, 21, 1),
    ]


def test_three_steps_stop_at_each_kind_of_end():
    rows = [
        (1.0, 1, ""),
        (2.0, 2, ""),
        (3.0, 4, "terminated"),
        (4.0, NAN, ""),
        (10.0, 8, ""),
        (11.0, 16, "truncated"),
        (12.0, NAN, ""),
    ]
    read = run(
        "next_step",
        [*rows, (20.0, 32, ""), (21.0, 64, ""), (22.0, 128, ""), (23.0, 256, "")],
        n_step=3,
    )
    assert summary(read(0)) == (1, 1 + 2 / 2 + 4 / 4, 0, 4, 3)
    assert summary(read(1)) == (2, 2 + 4 / 2, 0, 4, 2)
    assert summary(read(2)) == (3, 4, 0, 4, 1)
    assert summary(read(4)) == (10, 8 + 16 / 2, 0.25, 12, 2)  # bootstraps after two steps
    assert summary(read(5)) == (11, 16, 0.5, 12, 1)
    assert summary(read(7)) == (20, 32 + 64 / 2 + 128 / 4, 0.125, 23, 3)
    assert read(8) is None  # its window is not complete yet


def test_a_termination_that_is_a_truncation_too_is_a_termination():
    buffer = jr.uniform(capacity=8, num_envs=1, batch_size=1, autoreset="same_step_no_final_obs")
    one = jnp.ones(1)
    step = jr.Step(obs=one, action=one, reward=one, terminated=one > 0, truncated=one > 0)
    state = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], step)), step)
    sample = buffer.get(state, jnp.array([0]))
    assert (sample.is_valid.tolist(), sample.experience.discount.tolist()) == ([True], [0])


def test_rewards_may_have_axes_of_their_own():
    read = run(
        "same_step_no_final_obs",
        [(1.0, 1, ""), (2.0, 2, ""), (3.0, 3, "")],
        n_step=2,
        extra_axis=(2,),
    )
    assert read(0).reward == [2, 2]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (jnp.int32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    ],
)
def test_a_floating_reward_keeps_its_dtype_and_an_integer_one_becomes_float32(dtype, expected):
    buffer = jr.uniform(
        capacity=8,
        num_envs=1,
        batch_size=4,
        autoreset="same_step_no_final_obs",
        n_step=2,
        gamma=0.5,
    )
    zero = jnp.zeros((3, 1))
    steps = jr.Step(
        obs=zero,
        action=zero,
        reward=jnp.array([[3], [5], [7]], dtype),
        terminated=zero > 0,
        truncated=zero > 0,
    )
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
    reward = buffer.sample(state, jax.random.key(0)).experience.reward
    assert (reward.dtype, reward.tolist()) == (expected, [5.5] * 4)


def test_discounts_are_exact_powers():
    read = run(
        "same_step_no_final_obs", [(float(i), 0, "") for i in range(12)], n_step=10, gamma=0.99
    )
    assert read(0).discount == np.float32(0.99**10)


def test_a_scalar_observation_and_no_extras_are_enough():
    assert run("same_step_no_final_obs", [(1.0, 1, ""), (2.0, 2, "")])(0).extras is None


def test_the_smallest_stream_holds_one_window():
    read = run("same_step_no_final_obs", [(float(i), i, "") for i in range(5)], capacity=2)
    assert [summary(read(row)) for row in (0, 1)] == [None, (3, 3, 0.5, 4, 1)]


def test_clear_between_a_done_and_its_tail_makes_no_pair_across_episodes():
    """The env still returns the final observation after the clear."""
    buffer = jr.uniform(capacity=8, num_envs=1, batch_size=4, autoreset="next_step")

    def step(obs, truncated=False):
        one = jnp.ones(1)
        return jr.Step(
            obs=obs * one,
            action=one,
            reward=one,
            terminated=one < 0,
            truncated=jnp.array([truncated]),
        )

    state, add = buffer.init(jax.tree.map(lambda x: x[0], step(0.0))), jax.jit(buffer.add)
    state = buffer.clear(add(state, step(1.0, truncated=True)))
    for obs in (99.0, 200.0, 201.0):
        state = add(state, step(obs))
    got = jax.jit(buffer.get)(state, jnp.arange(8))
    assert np.flatnonzero(got.is_valid).tolist() == [1]
    assert (got.experience.obs[1], got.experience.next_obs[1]) == (200, 201)

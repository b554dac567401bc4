"""Transitions checked by hand: the stored rows and returned items of each autoreset form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.steps import begun, nth, plain_step

NAN = float("nan")


@functools.partial(jax.jit, static_argnums=0)
def items_of(buffer, *blocks):
    """Add the steps of each block and clear between blocks. Return the items of all rows after each
    step of the last block."""

    def add(state, step):
        state = buffer.add(state, step)
        return state, buffer.get(state, jnp.arange(buffer.capacity))

    state = buffer.init(nth(blocks[0], (0, 0)))
    for block in blocks:
        state, items = jax.lax.scan(add, buffer.clear(state), block)
    return items


def run(autoreset, *blocks, n_step=1, gamma=0.5, capacity=16):
    """Add one env's rows of (obs, reward, end[, final_obs]), where `end` names the done flags.

    Return a function from row number, and number of rows added, to (obs, reward, discount,
    next_obs, num_steps), or None.
    """
    buffer = jr.uniform(
        capacity=capacity, num_envs=1, batch_size=4, autoreset=autoreset, n_step=n_step, gamma=gamma
    )

    def steps(rows):
        obs, reward, end, *final = zip(*rows, strict=True)
        column = lambda values: np.float32(values)[:, None]
        fields = {"reward": column(reward), "final_obs": column(final[0]) if final else None}
        for name in ("terminated", "truncated"):
            fields[name] = np.array([[name in one] for one in end])
        return plain_step(column(obs), **fields)

    got = jax.device_get(items_of(buffer, *map(steps, blocks)))
    assert got.experience.extras is None

    def read(row, after=0):
        items = got.experience
        fields = items.obs, items.reward, items.discount, items.next_obs, items.num_steps
        is_there = got.is_valid[after - 1, row]
        return tuple(leaf[after - 1, row] for leaf in fields) if is_there else None

    return read


def test_next_step_autoreset_turns_the_row_after_a_done_into_its_tail():
    read = run(
        "next_step",
        [
            (1, 1, ""),
            (2, 2, "terminated"),
            (3, NAN, "terminated"),
            (10, 4, ""),
            (11, 5, "truncated"),
            (12, NAN, ""),
        ],
    )
    assert read(0) == (1, 1, 0.5, 2, 1)
    # a terminated row does not wait for its tail, which has the true final observation
    assert (read(1, after=2), read(1)) == ((2, 2, 0, 2, 1), (2, 2, 0, 3, 1))
    # the final row: its done flag is ignored, otherwise 10 would be a final row too
    assert read(2) is None
    assert read(3) == (10, 4, 0.5, 11, 1)
    # truncated: the target bootstraps from the final observation, which must be there
    assert (read(4, after=5), read(4)) == (None, (11, 5, 0.5, 12, 1))


def test_same_step_autoreset_with_final_obs_writes_the_tail_beside_the_step():
    read = run(
        "same_step",
        [
            (1, 1, "", NAN),
            (2, 2, "terminated", 3),
            (10, 4, "truncated", 11),
            (20, 5, "", NAN),
            (21, 6, "", NAN),
        ],
    )
    assert [read(row) for row in range(7)] == [
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
            (1, 1, ""),
            (2, 2, "terminated"),
            (10, 4, ""),
            (11, 5, "truncated"),
            (20, 6, ""),
            (21, 7, "terminated truncated"),
        ],
    )
    assert [read(row) for row in range(6)] == [
        (1, 1, 0.5, 2, 1),
        (2, 2, 0, 2, 1),  # next_obs is unknown: the own obs, finite and of the right shape
        (10, 4, 0.5, 11, 1),
        None,  # 11 is the last known observation: the final row
        (20, 6, 0.5, 21, 1),
        (21, 7, 0, 21, 1),  # a termination that is a truncation too is a termination
    ]


def test_three_steps_stop_at_each_kind_of_end():
    rows = [
        (1, 1, ""),
        (2, 2, ""),
        (3, 4, "terminated"),
        (4, NAN, ""),
        (10, 8, ""),
        (11, 16, "truncated"),
        (12, NAN, ""),
    ]
    read = run(
        "next_step", [*rows, (20, 32, ""), (21, 64, ""), (22, 128, ""), (23, 256, "")], n_step=3
    )
    assert read(0) == (1, 1 + 2 / 2 + 4 / 4, 0, 4, 3)
    assert read(1) == (2, 2 + 4 / 2, 0, 4, 2)
    assert read(2) == (3, 4, 0, 4, 1)
    assert read(4) == (10, 8 + 16 / 2, 0.25, 12, 2)  # bootstraps after two steps
    assert read(5) == (11, 16, 0.5, 12, 1)
    assert read(7) == (20, 32 + 64 / 2 + 128 / 4, 0.125, 23, 3)
    assert read(8) is None  # its window is not complete yet


def test_a_floating_reward_keeps_its_dtype_and_shape_and_an_integer_one_becomes_float32():
    buffer = jr.uniform(
        capacity=8,
        num_envs=1,
        batch_size=1,
        autoreset="same_step_no_final_obs",
        n_step=2,
        gamma=0.5,
    )

    def first(reward):
        state = begun(buffer, plain_step(np.zeros((3, 1)), reward=reward))
        return buffer.get(state, jnp.array([0])).experience.reward[0]

    narrow = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
    reward = np.arange(3, 9, 2)[:, None]
    with_axis = np.stack([reward, reward + 2], -1).astype(np.float32)
    rewards = [reward, *(reward.astype(dtype) for dtype in narrow), with_axis]
    got = jax.jit(lambda rewards: [first(reward) for reward in rewards])(rewards)
    assert [leaf.dtype for leaf in got] == [jnp.float32, *narrow, jnp.float32]
    assert [leaf.tolist() for leaf in got] == [5.5, 5.5, 5.5, 5.5, [5.5, 8.5]]


def test_discounts_are_exact_powers():
    rows = [(time, 0, "") for time in range(12)]
    discount = run("same_step_no_final_obs", rows, n_step=10, gamma=0.99)(0)[2]
    assert discount == np.float32(0.99**10)


def test_the_smallest_stream_holds_one_window():
    read = run("same_step_no_final_obs", [(time, time, "") for time in range(5)], capacity=2)
    assert [read(row) for row in (0, 1)] == [None, (3, 3, 0.5, 4, 1)]


def test_clear_between_a_done_and_its_tail_makes_no_pair_across_episodes():
    """The env still returns the final observation after the clear."""
    after = [(99, 1, ""), (200, 1, ""), (201, 1, "")]
    read = run("next_step", [(1, 1, "truncated")], after)
    assert [read(row) for row in range(16)] == [None, (200, 1, 0.5, 201, 1)] + [None] * 14


HORIZONS = np.int32([1, 3, 9])
GAMMAS = np.float32([0.0, 0.5, 1.0])


@functools.cache
def of_horizon(n_step, gamma):
    """Return a buffer, and its state after random steps of two envs. A wrapper reads through."""
    buffer = jr.frame_stack(
        jr.uniform(
            capacity=64, num_envs=2, batch_size=5, autoreset="next_step", n_step=n_step, gamma=gamma
        ),
        2,
    )
    r, shape = np.random.default_rng(0), (40, 2)
    steps = plain_step(
        r.random((*shape, 1), np.float32),
        reward=r.random(shape, np.float32),
        action=r.random(shape),
    ).replace(terminated=r.random(shape) < 0.1, truncated=r.random(shape) < 0.1)
    return buffer, jax.jit(begun)(buffer, jax.tree.map(np.asarray, steps))


def test_a_call_may_shorten_the_horizon_and_change_the_discount():
    """Traced values of a population, and of each item, give what a buffer made with them gives."""
    buffer, state = of_horizon(4, 0.7)
    rows = jnp.arange(64)
    given = lambda n_step, gamma: buffer.get(state, rows, n_step=n_step, gamma=gamma)
    found = jax.device_get(jax.jit(jax.vmap(given))(HORIZONS, GAMMAS))
    for which, (n_step, gamma) in enumerate(zip(HORIZONS, GAMMAS, strict=True)):
        other, its = of_horizon(min(int(n_step), 4), float(gamma))
        expected = jax.device_get(jax.jit(other.get)(its, rows))
        got = nth(found, which)
        both = got.is_valid & expected.is_valid  # a longer window leaves out the newest rows
        assert both.sum() > 40
        jax.tree.map(
            lambda a, b, both=both: np.testing.assert_allclose(a[both], b[both], rtol=1e-6),
            got.experience,
            expected.experience,
        )
    chosen = np.int32([3, 40, 7])
    item = jax.jit(buffer.get)(state, chosen, n_step=HORIZONS, gamma=GAMMAS)
    for which, row in enumerate(chosen):
        jax.tree.map(
            lambda a, b, at=(which, row): np.testing.assert_array_equal(a[at[0]], b[at]),
            jax.device_get(item.experience),
            found.experience,
        )


def test_a_call_refuses_values_of_another_shape_and_options_of_other_buffers():
    buffer, state = of_horizon(4, 0.7)
    for options, text in (
        (
            {"n_step": np.ones(3, np.int32)},
            r"n_step must be one number, or one for each of 2 items",
        ),
        (
            {"fractions": {"a": 1}},
            "fractions is for another buffer: with Uniform and FrameStack a call may give beta, "
            "gamma, n_step",
        ),
    ):
        error = TypeError if "fractions" in options else ValueError
        with pytest.raises(error, match=text):
            buffer.get(state, np.arange(2), **options)
    too_small = r"gamma must be in \[0, 1\], got -1"
    with pytest.raises(ValueError, match=too_small):
        buffer.get(state, np.arange(2), gamma=jnp.float32(-1))
    with pytest.raises(ValueError, match=too_small):
        jr.tiered(buffer).sample(None, None, gamma=-1)


def test_a_step_may_have_a_discount_of_its_own():
    """Options last several steps, and dm_env's steps bring a discount."""
    buffer = jr.uniform(
        capacity=64,
        num_envs=2,
        batch_size=4,
        autoreset="same_step_no_final_obs",
        n_step=3,
        gamma=0.5,
        discount_key="discount",
    )
    r, shape = np.random.default_rng(0), (30, 2)
    own = r.choice([0, 0.5, 1], shape).astype(np.float32)
    steps = plain_step(
        r.random(shape, np.float32), reward=r.integers(-3, 4, shape), extras={"discount": own}
    ).replace(terminated=r.random(shape) < 0.1)
    state = jax.jit(begun)(buffer, jax.tree.map(np.asarray, steps))
    get = jax.jit(buffer.get)
    for gamma in (None, 1.0):
        found = jax.device_get(get(state, jnp.arange(64), gamma=gamma))
        rows = np.flatnonzero(found.is_valid)
        assert len(rows) > 40
        for row in rows:
            env, time = divmod(int(row), 32)
            reward, discount = 0.0, 1.0
            for k in range(3):
                reward += discount * float(steps.reward[time + k, env])
                discount *= (0.5 if gamma is None else gamma) * float(own[time + k, env])
                if steps.terminated[time + k, env]:
                    discount = 0.0
                    break
            assert found.experience.reward[row] == reward
            assert found.experience.discount[row] == discount


def test_observations_may_be_empty():
    obs = np.zeros((3, 1, 0), np.float32)
    zero, flag = np.zeros((3, 1), np.float32), np.ones((3, 1), bool)
    steps = jr.Step(
        obs=obs, action=zero, reward=zero, terminated=flag, truncated=~flag, final_obs=obs
    )
    buffer = jr.uniform(capacity=16, num_envs=1, batch_size=4, autoreset="same_step")
    assert items_of(buffer, steps).experience.next_obs.shape == (3, 16, 0)

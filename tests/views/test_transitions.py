"""Dtypes and discounts of transitions, and what a call may change of them.
`storage/test_oracle_streams.py` has those of random streams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr
from tests.support.sampling import begin, get
from tests.support.steps import begun, nth, plain_step


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


HORIZONS = np.int32([1, 9, 3])
GAMMAS = np.float32([0.0, 0.99, 1.0])


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
    return buffer, begin(buffer, jax.tree.map(np.asarray, steps))


def test_a_call_may_shorten_the_horizon_and_change_the_discount():
    """Traced values of a population, and of each item, give what a buffer made with them gives."""
    buffer, state = of_horizon(4, 0.7)
    rows = jnp.arange(64)
    given = lambda n_step, gamma: buffer.get(state, rows, n_step=n_step, gamma=gamma)
    found = jax.device_get(jax.jit(jax.vmap(given))(HORIZONS, GAMMAS))
    for which, (n_step, gamma) in enumerate(zip(HORIZONS, GAMMAS, strict=True)):
        other, its = of_horizon(min(int(n_step), 4), float(gamma))
        expected = jax.device_get(jax.jit(other.get)(its, rows))
        discount, num_steps = expected.experience.discount, expected.experience.num_steps
        exact = np.float32(float(gamma) ** num_steps.astype(float))
        assert ((discount == exact) | (discount == 0))[expected.is_valid].all()
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
    state = begin(buffer, jax.tree.map(np.asarray, steps))
    for gamma in (None, 1.0):
        found = jax.device_get(get(buffer, state, np.arange(64), gamma=gamma))
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
    state = begin(buffer, steps)
    assert get(buffer, state, np.arange(16)).experience.next_obs.shape == (16, 0)

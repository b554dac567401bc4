"""Rewards of any structure, and rewards that are computed anew as they are sampled."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from tests.support.refusals import refused
from tests.support.sampling import assert_same
from tests.support.steps import begun, nth, plain_step

E, TIME, SIZES = 2, 24, {"capacity": 32, "num_envs": 2, "batch_size": 8}
FORMS = jr.autoreset.FORMS
KEY = jax.random.key(0)


def made_steps(form):
    """Return steps in which each env terminates and is truncated, not in the newest step."""
    time = np.arange(TIME * E, dtype=np.float32).reshape(TIME, E)
    end = time.astype(int) % 11
    flags = {"terminated": end == 3, "truncated": end == 8}
    final_obs = time + 0.5 if form == "same_step" else None
    return plain_step(time, **flags, final_obs=final_obs, extras={"id": time})


def items(buffer, steps):
    """Return the items of all rows."""
    rows = jnp.arange(buffer.capacity)
    read = jax.jit(lambda steps: buffer.get(begun(buffer, steps), rows, KEY))
    return jax.device_get(read(steps))


def by_agent(steps):
    return steps.replace(reward={"a": steps.reward, "b": (-2 * steps.reward).astype(np.int32)})


def near(achieved, goal, step):
    return jnp.abs(achieved - goal) + step.reward


def test_a_replay_takes_rewards_of_several_agents():
    """`storage/test_oracle_streams.py` has their sums."""
    replay = jr.Replay(jr.uniform(**SIZES, autoreset="next_step", n_step=3), framework="numpy")
    replay.add(by_agent(made_steps("next_step")))
    reward = replay.sample().experience.reward
    np.testing.assert_allclose(reward["b"], -2 * reward["a"])
    assert not any("reward" in line for line in replay.inspect().suspicious)


def test_new_goals_give_new_rewards_to_each_agent():
    obs = lambda x: {"achieved_goal": x, "desired_goal": -x}
    steps = made_steps("same_step")
    steps = steps.replace(obs=obs(steps.obs), final_obs=obs(steps.final_obs))
    buffer = jr.hindsight(
        jr.uniform(**SIZES, autoreset="same_step", n_step=2, gamma=0.5),
        lambda *x: {"a": near(*x[:2], x[2].replace(reward=x[2].reward["a"])), "b": 0},
    )
    batch = items(buffer, by_agent(steps))
    item = batch.experience
    here, goal = item.obs["achieved_goal"], item.obs["desired_goal"]
    after, has_two = item.next_obs["achieved_goal"], item.num_steps == 2
    middle = np.where(has_two, here + E, after)
    expected = abs(middle - goal) + here + 0.5 * has_two * (abs(after - goal) + middle)
    is_new = batch.is_valid & (goal >= 0)
    assert has_two[is_new].any()
    np.testing.assert_allclose(item.reward["a"][is_new], expected[is_new], rtol=1e-6)
    assert not item.reward["b"][is_new].any()


def test_other_ways_in_take_rewards_of_several_agents():
    time = np.arange(6, dtype=np.float32)
    reward = {"a": time[:5], "b": -time[:5]}
    end = time[:5] == 4
    trajectory = plain_step(time[:5], obs=time, reward=reward, terminated=end)
    rollout = jr.rollout(length=8, num_envs=1, autoreset="next_step")
    empty = jax.jit(lambda: rollout.init(nth(trajectory, 0)))()
    state = rollout.from_trajectories(empty, [trajectory])
    assert state.steps.reward["b"][:5, 0].tolist() == (-time[:5]).tolist()
    with refused("each needs a value of its own"):
        jax.eval_shape(
            lambda state: rollout.advantages(state, jnp.zeros((8, 1)), jnp.zeros(1), gamma=0.9),
            state,
        )
    flags = {"terminations": end, "truncations": end & False}
    episode = SimpleNamespace(id=0, observations=time, actions=time[:5], rewards=reward, **flags)
    buffer = jr.uniform(capacity=8, batch_size=2, autoreset="same_step", gamma=1.0)
    state = datasets.from_episodes([episode], buffer)
    item = jax.device_get(jr.jit(buffer).get(state, np.arange(5, dtype=np.int32))).experience
    np.testing.assert_array_equal(item.reward["a"], reward["a"])
    np.testing.assert_array_equal(item.reward["b"], reward["b"])


@pytest.mark.parametrize("form", FORMS)
def test_new_rewards_go_through_the_sums(form):
    steps = made_steps(form)
    done = steps.terminated | steps.truncated
    next_obs = np.concatenate([steps.obs[1:], steps.obs[-1:]])
    if form == "same_step":
        next_obs = np.where(done, steps.final_obs, next_obs)
    elif form == "same_step_no_final_obs":
        next_obs = np.where(steps.terminated, steps.obs, next_obs)
    expected = steps.replace(reward=3 * steps.obs + 10 * next_obs + steps.extras["id"])
    buffer = jr.uniform(**SIZES, autoreset=form, n_step=3, gamma=0.5)

    def rewards(params, steps, learned):
        reward_fn = lambda step, after: params @ jnp.stack([step.obs, after]) + step.extras["id"]
        used = jr.relabel(buffer, reward_fn) if learned else buffer
        state = begun(buffer, steps)
        batch = used.get(state, jnp.arange(buffer.capacity))
        if not learned:
            return batch
        same = used.sample(used.add(state, nth(steps, 0)), KEY)  # either may change the state
        return batch.experience.reward.sum(), (batch, same.is_valid)

    params, slopes = np.array([3, 10], np.float32), jax.grad(rewards, has_aux=True)
    with jax.checking_leaks():  # no cache keeps traced parameters
        found = jax.jit(slopes, static_argnums=2)(params, steps, True)
    slope, (got, is_valid) = jax.device_get(found)
    assert is_valid.all()
    assert (np.abs(slope) > 100).all()
    stored = jax.device_get(jax.jit(rewards, static_argnums=2)(params, expected, False))
    np.testing.assert_array_equal(got.is_valid, stored.is_valid)
    assert_same(nth(got.experience, got.is_valid), nth(stored.experience, got.is_valid))
    assert got.is_valid.sum() > 20


@pytest.mark.no_xla
def test_a_function_of_the_user_runs_once_a_trace():
    """Also if it raises an error of its own, inside of a jit."""
    calls = []

    def counted(item, key):
        calls.append(key)
        if len(calls) > 2:
            raise ValueError("an error of its own")
        return item.replace(obs=2 * item.obs)

    buffer = jr.transform(jr.uniform(**SIZES, autoreset="next_step", n_step=3), counted)
    state = jax.eval_shape(buffer.init, nth(made_steps("next_step"), (0, 0)))
    assert len(calls) == 1
    sample = lambda state: jr.jit(buffer).sample(state, jax.random.key(0))
    jax.eval_shape(sample, state)
    assert len(calls) == 2
    with refused("an error of its own"):
        jax.eval_shape(lambda state: sample(state), state)
    assert len(calls) == 3

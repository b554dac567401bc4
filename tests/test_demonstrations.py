"""Demonstrations first, then online: episodes fill a buffer of any number of envs, empty or not."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.datasets import Episode, from_episodes
from tests.conftest import ALL
from tests.support.buffers import jitted
from tests.support.steps import nth, plain_step

LENGTHS = (5, 3, 9, 1, 4, 4, 7)


def episode(number, length):
    """Return an episode whose last step is a termination, or else a truncation."""
    time = 100 * number + np.arange(length + 1, dtype=np.float32)
    last = np.arange(length) == length - 1
    is_end = number % 2 == 0
    return Episode(time, time[:-1], time[:-1], last & is_end, last & (not is_end), number)


EPISODES = [episode(number, length) for number, length in enumerate(LENGTHS, 1)]


def buffer(form, num_envs=1, **options):
    options = {"capacity": 40 * num_envs, "batch_size": 8} | options
    return jr.uniform(num_envs=num_envs, autoreset=form, **options)


def transitions(replay, state):
    """Return (observation, reward, next observation or None after a termination), sorted."""
    batch = jitted(replay, "get")(state, np.arange(replay.capacity, dtype=np.int32))
    found, valid = batch.experience, np.asarray(batch.is_valid)
    rows = zip(found.obs, found.reward, found.discount, found.next_obs, strict=True)
    return sorted(
        (float(obs), float(reward), float(after) if discount else None)
        for (obs, reward, discount, after), is_one in zip(rows, valid, strict=True)
        if is_one
    )


def expected(form, episodes=EPISODES):
    return sorted(
        (float(obs), float(obs), None if terminated else float(obs) + 1)
        for one in episodes
        for obs, terminated, truncated in zip(
            one.rewards, one.terminations, one.truncations, strict=True
        )
        if not (truncated and form == "same_step_no_final_obs")
    )


@pytest.mark.parametrize("form", jr.autoreset.FORMS)
@pytest.mark.parametrize(("num_envs", "allow_mask"), [(3, False), *[(1, False), (3, True)] * ALL])
def test_episodes_are_dealt_to_the_env_with_the_fewest_rows(form, num_envs, allow_mask):
    replay = buffer(form, num_envs, allow_mask=allow_mask)
    state = from_episodes(EPISODES, replay)
    assert transitions(replay, state) == expected(form)
    filled = np.asarray(jitted(replay, "adopt")(state).counters.filled)
    assert filled.max() - filled.min() <= max(LENGTHS) + 1


@pytest.mark.parametrize("form", jr.autoreset.FORMS)
def test_a_run_gets_demonstrations_and_goes_on(form):
    """Two envs have taken four steps; their episodes end, the demonstrations follow, then steps."""
    replay = buffer(form, 2, capacity=200)
    time = np.arange(4, dtype=np.float32)[:, None] + np.array([1000, 2000], np.float32)
    final = time + 1 if form == "same_step" else None
    block = plain_step(time).replace(final_obs=final)
    state = jitted(replay, "extend")(replay.init(nth(block, (0, 0))), block)
    both = from_episodes(EPISODES, replay, into=state)
    own = [(obs, obs, obs + 1) for env in (1000.0, 2000.0) for obs in env + np.arange(3.0)]
    assert transitions(replay, both) == sorted([*expected(form), *own])
    more = jax.tree.map(lambda leaf: leaf + 4 if leaf.dtype == np.float32 else leaf, block)
    later = jitted(replay, "extend")(both, more)
    own += [(obs, obs, obs + 1) for env in (1004.0, 2004.0) for obs in env + np.arange(3.0)]
    assert transitions(replay, later) == sorted([*expected(form), *own])


def test_more_than_fits_is_refused():
    replay = buffer("next_step", 2, capacity=2 * 12)
    with pytest.raises(
        ValueError, match="capacity=24 is too small: episode 3 reaches row 14 of 12 in each"
    ):
        from_episodes(EPISODES, replay)


def test_many_episodes_of_many_lengths():
    """More steps than one block has, for envs that always step together."""
    r = np.random.default_rng(0)
    episodes = [episode(number, int(r.integers(1, 40))) for number in range(1, 90)]
    replay = buffer("next_step", 4, capacity=4 * 700)
    state = from_episodes(iter(episodes), replay)
    assert transitions(replay, state) == expected("next_step", episodes)


def test_with_priorities_a_run_keeps_its_own():
    replay = dataclasses.replace(
        buffer("next_step", 2, allow_mask=True), sampler=jr.Prioritized(alpha=1.0)
    )
    block = plain_step(np.full((3, 2), 7, np.float32))
    priority = np.full((3, 2), 5, np.float32)
    state = jitted(replay, "extend")(replay.init(nth(block, (0, 0))), block, None, priority)
    both = from_episodes(EPISODES[:2], replay, into=state)
    assert float(both.sampler.max_priority) == 5
    batch = jitted(replay, "get")(both, np.arange(80, dtype=np.int32))
    assert len({*np.asarray(batch.probability)[np.asarray(batch.is_valid)].tolist()}) == 1

"""Distributions of horizons, goals and episodes: chi-square with independent draws; each fixed key
fails by chance once in 10^4."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay._util import random
from jaxreplay.storage.sampleable import Sampleable
from tests.conftest import PLATFORM, SOAK
from tests.support.sampling import begin
from tests.support.steps import begun, plain_step

DRAWS = 2_000_000 if SOAK else 100_000
LEAST = 1e-4


def law_of(discount, n, clip=False):
    """Return the probabilities of 1, ..., n in float64."""
    law = discount ** np.arange(float(n))
    return np.append(law[:-1] * (1 - discount), law[-1]) if clip else law / law.sum()


def check(counts, law):
    """Compare counts with a distribution by chi-square.

    Values with fewer than 10 expected draws are pooled; values of probability 0 must not occur.
    """
    expected = law * counts.sum()
    assert counts[law == 0].sum() == 0
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > LEAST


SAMPLERS = {
    "uniform": jr.Uniform(),
    "newest": jr.Newest(num_rows=9),
    "prioritized": jr.Prioritized(alpha=0.7),
    "recent": jr.Recent(decay=0.95),
    "episodes": jr.UniformEpisodes(),
    "blend": jr.blend(uniform=(jr.Uniform(), 0.3), priority=(jr.Prioritized(), 0.7)),
}
ENVS, ROWS = 3, 20


@jax.jit
def drawn_of(buffer, steps, mask, priority):
    """Return the probabilities of all rows, and independent draws."""
    state = begun(buffer, steps, mask, priority if buffer.sampler.has_priorities else None)
    keys = jax.random.split(jax.random.key(2), DRAWS // 4)
    one = lambda key: buffer.sampler.sample(state.sampler, Sampleable.of(state), key, 1)
    return buffer.get(state, jnp.arange(buffer.capacity)).probability, jax.vmap(one)(keys)


@pytest.mark.parametrize(
    ("name", "platform"),
    [(name, "cpu") for name in SAMPLERS]
    + [("uniform", "gpu"), ("prioritized", "gpu"), ("prioritized", "tpu")],
)
def test_draws_are_as_probable_as_they_say(name, platform):
    check_draws(SAMPLERS[name], platform)


def check_draws(sampler, platform=None):
    """From streams of 0, 4 and 20 rows; `storage/test_oracle_streams.py` has the probabilities."""
    buffer = jr.transitions(
        capacity=ENVS * ROWS,
        num_envs=ENVS,
        batch_size=1,
        autoreset="same_step_no_final_obs",
        allow_mask=True,
        sampler=sampler,
    )
    buffer = dataclasses.replace(buffer, platform=PLATFORM or platform)
    r, time = np.random.default_rng(0), np.arange(33)[:, None] + np.zeros(ENVS, int)
    mask = np.stack([time[:, 0] < 0, time[:, 0] < 5, time[:, 0] >= 0], axis=1)
    steps = plain_step(time, terminated=time % 7 == 3)
    priority = np.float32(r.gamma(1.0, size=time.shape)) * (time % 11 > 0)
    law, drawn = jax.device_get(drawn_of(buffer, steps, mask, priority))
    assert law.sum() == pytest.approx(1, rel=1e-5)
    drawn = jax.tree.map(np.ravel, drawn)
    is_valid = drawn.probability > 0
    # all tries of an item may fail
    only_tries = isinstance(sampler, jr.Uniform) and buffer.platform == "gpu"
    assert is_valid.mean() >= (0.99 if only_tries else 1)
    row = drawn.row[is_valid]
    np.testing.assert_allclose(drawn.probability[is_valid], law[row], rtol=1e-5)
    check(np.bincount(row, minlength=buffer.capacity), np.float64(law) / np.float64(law).sum())


def test_horizons_have_their_law():
    bounds, discounts, num = (1, 2, 7, 1000), (0.0, 0.5, 0.9, 0.99, 1.0), DRAWS // 4
    n = np.repeat(np.int32(bounds), num)

    @jax.jit
    def run():
        words = jax.random.bits(jax.random.key(1), (2, len(n)), jnp.uint32)
        return {
            (discount, clip): random.geometric(discount, n, *words, clip=clip)
            for discount in discounts
            for clip in (False, True)
        }

    for (discount, clip), k in jax.device_get(run()).items():
        for bound, own in zip(bounds, k.reshape(len(bounds), num), strict=True):
            assert own.min() >= 1
            assert own.max() <= bound
            check(np.bincount(own, minlength=bound + 1)[1:], law_of(discount, bound, clip))


def test_no_bits_lead_past_the_bound():
    edges = np.uint32([0, 1, 255, 2**31, 2**32 - 256, 2**32 - 1])
    high, low = (x.reshape(-1) for x in np.meshgrid(edges, edges))
    bounds = np.int32([0, 1, 2, 7, 1000, 2**30])[:, None]

    @jax.jit
    def run():
        return [
            random.geometric(discount, bounds + 0 * low.astype(int), high, low, clip=clip)
            for discount in (0.0, 1e-6, 0.5, 0.9, 0.99, 0.999999, 1 - 1e-9, 1.0)
            for clip in (False, True)
        ]

    for k in jax.device_get(run()):
        assert (k >= np.minimum(bounds, 1)).all()
        assert (k <= bounds).all()


def stream(lengths, **options):
    """Return a buffer and a state with episodes of these lengths in one stream.

    Each observation is (episode, place), also the final one.
    """
    num_rows = sum(lengths) + len(lengths)
    buffer = jr.future_pairs(
        capacity=num_rows + 4, num_envs=1, batch_size=DRAWS, autoreset="next_step", **options
    )
    obs = np.int32([[(e, t)] for e, n in enumerate(lengths) for t in range(n + 1)])
    ends = np.array([[t == n - 1] for n in lengths for t in range(n + 1)])
    return buffer, begin(buffer, plain_step(obs[..., 0], obs=obs, terminated=ends))


LENGTHS = (1, 2, 5, 17)


def test_pairs_have_the_law_of_their_horizon_and_never_cross_an_episode():
    """Episodes are equally probable whatever their lengths, then their steps. The test of JaxGCRL's
    rule has horizons that are not clipped."""
    buffer, state = stream(LENGTHS, gamma=0.9, beyond="clip")
    batch = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(7)))
    items, (episode, place) = batch.experience, batch.experience.obs.T
    check(np.bincount(episode, minlength=4), np.full(4, 0.25))
    for number, length in enumerate(LENGTHS):
        check(np.bincount(place[episode == number], minlength=length), np.full(length, 1 / length))
        np.testing.assert_allclose(batch.probability[episode == number], 0.25 / length, rtol=1e-6)
    assert (items.obs[:, 0] == items.future_obs[:, 0]).all()
    assert (items.future_obs[:, 1] - items.obs[:, 1] == items.num_steps).all()
    for place in (0, 10, 16):
        mine = items.num_steps[(items.obs[:, 0] == 3) & (items.obs[:, 1] == place)]
        check(np.bincount(mine, minlength=18 - place)[1:], law_of(0.9, 17 - place, clip=True))


def test_the_second_terminal_bounds_a_horizon_where_several_lie_ahead():
    """At discount 1, horizons are uniform up to the second end ahead, else the first end, else the
    newest row."""
    buffer, state = stream((2, 3, 4), gamma=1.0, max_terminals=2)
    items = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(1)).experience)
    for (episode, place), bound in {(0, 0): 6, (0, 1): 5, (1, 1): 7, (2, 0): 4, (2, 3): 1}.items():
        mine = items.num_steps[(items.obs[:, 0] == episode) & (items.obs[:, 1] == place)]
        check(np.bincount(mine, minlength=bound + 1)[1:], np.full(bound, 1 / bound))


def future_law(episode, gamma):
    """Return the probability of each step's goal, [N, N], by JaxGCRL's rule: of the steps after it
    in its episode, geometric; itself with nearly nothing, which counts where there are none."""
    step, goal = np.indices((len(episode), len(episode)))
    is_later = (goal > step) & (episode[step] == episode[goal])
    mass = np.where(is_later, gamma ** (goal - step), 1e-5 * (goal == step))
    return mass / mass.sum(axis=1, keepdims=True)


def test_pairs_of_episodes_that_go_on_have_the_law_of_jaxgcrl():
    """But the newest step, and a truncated one, whose next observation is unknown: these have no
    later step, and JaxGCRL pairs them with themselves."""
    episode, gamma = np.repeat([0, 1, 2], [4, 3, 6]), 0.8
    sizes = {"capacity": 16, "batch_size": DRAWS, "autoreset": "same_step_no_final_obs"}
    buffer = jr.future_pairs(**sizes, gamma=gamma, unfinished=True, sampler=jr.Uniform())
    time = np.arange(len(episode))[:, None]
    steps = plain_step(time, terminated=time == 3, truncated=time == 6)

    @jax.jit
    def run(steps):
        state = begun(buffer, steps)
        return buffer.can_sample(state), buffer.sample(state, jax.random.key(5)).experience

    can_sample, pairs = jax.device_get(run(steps))
    assert can_sample
    law = future_law(episode, gamma)
    law[[6, 12]] = 0
    counts = np.zeros_like(law)
    np.add.at(counts, (pairs.obs, pairs.future_obs), 1)
    check(counts.ravel(), law.ravel() / law.sum())
    assert (pairs.future_obs - pairs.obs == pairs.num_steps).all()


# Strategy; fraction of new goals; number of steps of an episode that goes on; and for two steps,
# the first and the last row whose goal they may have. Step 17 is of the episode that goes on.
GOALS = [
    ("future", 0.25, 5, {3: (4, 9), 17: (18, 20)}),
    ("final", 1.0, 5, {3: (9, 9), 17: (20, 20)}),
    ("episode", 1.0, 5, {3: (0, 9), 17: (16, 20)}),
    ("random", 1.0, 0, {3: (0, 15)}),
    ("future", 0.0, 0, {}),
]


@pytest.mark.parametrize(("strategy", "fraction", "goes_on", "allowed"), GOALS)
def test_goals_have_the_law_of_their_strategy(strategy, fraction, goes_on, allowed):
    """Of two episodes, and of one that goes on, whose goals are of its rows so far; row t achieves
    goal t."""
    sizes = {"capacity": 40, "num_envs": 1, "batch_size": DRAWS, "autoreset": "next_step"}
    buffer = jr.hindsight(
        jr.prioritized(**sizes) if goes_on else jr.uniform(**sizes),
        lambda achieved, goal, step: (achieved == goal).astype(jnp.float32),
        strategy=strategy,
        unfinished=goes_on > 0,
        relabel_fraction=fraction,
    )
    time = np.arange(16 + goes_on, dtype=np.int32)[:, None]
    obs = {"achieved_goal": time, "desired_goal": 0 * time - 1}
    ends = (time == 8) | (time == 14)
    state = begin(buffer, plain_step(time, obs=obs, reward=time * 0.0 - 1, terminated=ends))
    items = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(2)).experience)
    time, goal = items.action, items.obs["desired_goal"]
    assert (goal == items.next_obs["desired_goal"]).all()
    assert (items.reward == np.where(goal < 0, -1, goal == time + 1)).all()
    check(np.array([(goal < 0).sum(), (goal >= 0).sum()]), np.array([1 - fraction, fraction]))
    sampled = [*range(9), *range(10, 15), *range(16, 15 + goes_on)]
    law = np.isin(np.arange(22), sampled) / len(sampled)
    check(np.bincount(time, minlength=22), law)
    for step, (first, last) in allowed.items():
        law = np.zeros(22)
        law[first : last + 1] = 1 / (last + 1 - first)
        check(np.bincount(goal[(time == step) & (goal >= 0)], minlength=22), law)


def test_a_row_waits_for_the_row_that_its_goal_is_from():
    """A view that reads no later row: of an unfinished episode's newest row nothing is known."""
    number = np.arange(100, 105, dtype=np.float32)[:, None]
    obs = {"achieved_goal": number, "desired_goal": 0 * number - 1}
    buffer = jr.chunks(capacity=16, batch_size=64, obs=(0,), action=1, autoreset="next_step")
    reward = lambda achieved, goal, step: step.reward
    buffer = jr.hindsight(buffer, reward, unfinished=True, relabel_fraction=1.0)
    state = begin(buffer, plain_step(number, obs=obs))
    assert int(jax.jit(buffer.size)(state)) == 4
    items = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(0))).experience
    goal = items.obs["desired_goal"][:, 0]
    assert ((goal > items.action[:, 0]) & (goal <= 104)).all()


def test_what_nested_views_draw_is_independent():
    """Two goals and a horizon each have the same distribution for all values of the others."""
    time = np.arange(41, dtype=np.int32)[:, None]
    obs = {"one": time, "two": time, "goal": 0 * time - 1, "other goal": 0 * time - 1}
    steps = plain_step(time, obs=obs, reward=time * 0.0, terminated=time == 39)
    buffer = jr.future_pairs(
        capacity=64, num_envs=1, batch_size=DRAWS, gamma=0.9, autoreset="next_step"
    )
    for achieved, desired in (("one", "goal"), ("two", "other goal")):
        buffer = jr.hindsight(
            buffer, lambda *_: 0.0, relabel_fraction=0.5, achieved_key=achieved, desired_key=desired
        )
    state = begin(buffer, steps)
    items = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(4)).experience)
    goal, other = items.obs["goal"], items.obs["other goal"]
    are_new = (goal >= 0) + 2 * (other >= 0)
    check(np.bincount(are_new, minlength=4), np.full(4, 0.25))
    at_start = items.obs["one"] == 0
    for which in range(4):
        mine = items.num_steps[at_start & (are_new == which)]
        check(np.bincount(mine, minlength=41)[1:], law_of(0.9, 40))
    are_late = ((goal > 20) + 2 * (other > 20))[at_start & (are_new == 3)]
    check(np.bincount(are_late, minlength=4), np.full(4, 0.25))

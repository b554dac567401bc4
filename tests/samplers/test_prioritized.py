"""Prioritized sampling: strata, weights, and the effects of hostile input. Random histories with
bad priorities, duplicates and late updates are in `storage/test_oracle_streams.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.targets import importance_weights
from tests.conftest import thorough
from tests.samplers.test_laws import check as check_law
from tests.support.buffers import bits
from tests.support.sampling import (
    clear,
    get,
    metrics,
    sample,
    step_of,
    update,
)
from tests.support.steps import nth, plain_step

NUM_ENVS, LENGTH = 50, 4
ROWS = np.arange(NUM_ENVS) * LENGTH  # the first row of each stream

nothing = step_of(np.zeros(NUM_ENVS))


def padded(values, size=NUM_ENVS):
    return np.pad(np.float32(values), (0, size - len(values)))


@jax.jit
def begin(buffer, priority):
    step = step_of(np.zeros(buffer.num_envs))
    state = buffer.add(buffer.init(nth(step, 0)), step, priority=priority)
    return buffer.add(state, step, priority=jnp.ones(buffer.num_envs))


def make_buffer(priorities, **config):
    """Return a buffer and a state; each stream has one sampleable row, with its priority or 0, and
    a waiting row."""
    config = {"alpha": 1.0, "stratified": False, "batch_size": 8, "num_envs": NUM_ENVS, **config}
    num_envs = config["num_envs"]
    buffer = jr.prioritized(
        capacity=LENGTH * num_envs, autoreset="same_step_no_final_obs", **config
    )
    return buffer, begin(buffer, padded(priorities, num_envs))


def index_of(buffer, state, streams):
    return nth(jax.device_get(get(buffer, state, ROWS).index), streams)


def index_at(row, lap):
    """Return the index of four rows of a lap, or of one lap each."""
    return jr.types.Index(row=np.int32(row), lap=np.full(4, lap, np.uint32))


def changed(buffer, state, streams, priorities):
    """Return the state after an update of four rows."""
    return update(buffer, state, index_of(buffer, state, streams), np.float32(priorities))


def check_is_stale(buffer, state, index):
    """Check that four rows are read as invalid, and that an update of them is counted as stale, and
    changes nothing else."""
    assert not np.asarray(get(buffer, state, index).is_valid).any()
    before = state.sampler
    after = update(buffer, state, index, np.full(4, 100, np.float32)).sampler
    assert int(after.num_stale_updates) == int(before.num_stale_updates) + 4
    assert bits(after.replace(num_stale_updates=())) == bits(before.replace(num_stale_updates=()))


def test_a_stratified_batch_has_one_draw_in_each_part_of_the_mass_and_is_right_on_average():
    priority = np.random.default_rng(1).gamma(0.3, size=NUM_ENVS)
    priority[3] = 0
    buffer, state = make_buffer(priority, stratified=True)
    draw = lambda seed: buffer.sample(state, jax.random.key(seed), 23).index.row // LENGTH
    stream = np.asarray(jax.jit(jax.vmap(draw))(np.arange(2000)))
    law, parts = priority / priority.sum(), np.arange(23) / 23
    ends = np.cumsum(law)
    assert ((ends - law)[stream] < parts + 1 / 23 + 1e-6).all()
    assert (ends[stream] > parts - 1e-6).all()
    # strata only lower the variance of the counts
    check_law(np.bincount(stream.ravel(), minlength=NUM_ENVS), law)


@pytest.mark.parametrize(
    ("row", "lap"),
    [
        ([-1, -NUM_ENVS * LENGTH, NUM_ENVS * LENGTH, 2**31 - 1], 0),
        ([-(2**31), 1, 2, 3], 0),  # a waiting row, and two that were never written
        ([0, 0, 4, 4], 7),
    ],
)
def test_a_row_out_of_range_or_not_there_is_ignored_and_counted(row, lap):
    check_is_stale(*make_buffer([1.0, 2.0, 5.0]), index_at(row, lap))


@pytest.mark.parametrize("n_step", [1, 3])
def test_new_rows_get_the_priority_that_is_asked_for(n_step):
    """Also those that wait for their window, those with an invalid one, and adopted ones."""
    buffer = jr.prioritized(
        capacity=16, batch_size=2, autoreset="next_step", n_step=n_step, alpha=1.0, new_priority=2.0
    )
    plain = jr.uniform(capacity=16, batch_size=2, autoreset="next_step", n_step=n_step)
    step = nth(plain_step(np.zeros((1, 1))), 0)

    @jax.jit
    def run():
        state = buffer.init(nth(step, 0))
        for priority in (None, np.float32([90]), np.float32([np.nan]), None, None, None):
            state = buffer.add(state, step, priority=priority)
        uniform = plain.init(nth(step, 0))
        for _ in range(6):
            uniform = plain.add(uniform, step)
        rows = jnp.arange(6)
        found = [buffer.get(one, rows).probability for one in (state, buffer.adopt(uniform))]
        return found, state.sampler.max_priority

    (added, adopted), largest = jax.device_get(run())
    num = 6 - n_step
    expected = np.float32([2, 90, 2, 2, 2][:num])
    np.testing.assert_allclose(added[:num], expected / expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(adopted[:num], np.full(num, 1 / num), rtol=1e-6)
    assert largest == 90


def test_counters_of_what_was_ignored_stay_at_their_maximum():
    buffer, state = make_buffer([1.0])
    nearly = np.uint32(2**32 - 2)
    sampler = state.sampler.replace(num_bad_priorities=nearly, num_stale_updates=nearly)
    state = changed(buffer, state.replace(sampler=sampler), [0] * 4, [np.nan] * 4)
    sampler = update(buffer, state, index_at([-1] * 4, 0), np.ones(4, np.float32)).sampler
    counts = sampler.num_bad_priorities, sampler.num_stale_updates
    assert [*map(int, counts)] == [2**32 - 1] * 2


@pytest.mark.parametrize("num_envs", [2, thorough(127), 1023])
def test_a_buffer_full_of_huge_priorities_can_be_sampled(num_envs):
    """The total does not overflow, and its reciprocal stays positive."""
    buffer, state = make_buffer([3e38] * num_envs, num_envs=num_envs)
    batch = jax.device_get(sample(buffer, state, jax.random.key(0), 8))
    assert batch.is_valid.all()
    np.testing.assert_allclose(batch.probability, 1 / num_envs, rtol=1e-5)


WEIGHED = {"alpha": 2.0, "beta": 0.7, "stratified": True}
BETAS = np.float32([0, 0.4, 1])


@jax.jit
def weights_of(buffer, state, key):
    """Return a sample and all rows for each beta."""
    draw = lambda beta: buffer.sample(state, key, 64, beta=beta)
    read = lambda beta: buffer.get(state, jnp.asarray(ROWS), beta=beta)
    return jax.vmap(draw)(BETAS), jax.vmap(read)(BETAS)


def test_weights_of_extreme_priorities_are_finite():
    """`buffers/test_contract.py` has the weights of others."""
    buffer, _ = make_buffer([], **WEIGHED)
    huge_and_tiny, one_beside_huge = [3.4e38] * 3 + [1e-30, 1e-38, 1e-45, -0.0], [1e-19, 1e15, 1e15]
    for priorities, num_positive in ((huge_and_tiny, 6), (one_beside_huge, 3)):
        state = begin(buffer, padded(priorities))
        assert all(np.isfinite(level).all() for level in jax.device_get(state.sampler.tree.sums))
        batch, rows = jax.device_get(weights_of(buffer, state, jax.random.key(0)))
        for one in (rows.probability, rows.weight):
            assert ((one > 0) == (np.arange(NUM_ENVS) < num_positive)).all()
        assert np.isfinite(batch.weight).all()
        assert np.isfinite(rows.weight).all()


def test_the_mean_priority_by_hand():
    """The other figures are compared in `storage/test_oracle_streams.py`."""
    priority = np.array([2, 0, 2, np.sqrt(8)])
    buffer, state = make_buffer(priority, **WEIGHED)
    mean = float(metrics(buffer, state)["mean_priority"])
    assert mean == pytest.approx((np.sum(priority**2) / NUM_ENVS) ** 0.5, rel=0.02)
    empty = metrics(buffer, clear(buffer, state))
    assert float(empty["mean_priority"]) == 0
    assert "mean_priority" not in jax.eval_shape(metrics, *make_buffer([], alpha=0.0))


def hand_made(probability):
    fields = dict.fromkeys(("experience", "index", "weight", "source"))
    probability = np.float32(probability)
    return jr.Sample(**fields, probability=probability, is_valid=probability > 0)


def test_importance_weights_by_hand():
    batch, weights = hand_made([0.5, 0.25, 0.125, 0.0]), jax.jit(importance_weights)
    by_smallest = np.array([0.25, 0.5, 1])
    for beta in np.float32([0, 0.5, 1]):
        # with a reference, weights are not normalized: 1 / 4 is that of four rows
        for given, scale in (({}, 1), ({"reference": 1 / 4}, 2), ({"reference": 1 / 16}, 0.5)):
            weight = weights(batch, beta, **given)
            np.testing.assert_allclose(weight, [*(scale * by_smallest) ** beta, 0], rtol=1e-6)
    one = np.float32(1)
    assert weights(batch.replace(is_valid=np.zeros(4, bool)), one).tolist() == [0, 0, 0, 0]
    tiny = hand_made([1e-37, 1.0, 0, 0])  # does not overflow
    np.testing.assert_allclose(weights(tiny, one), [1, 1e-37, 0, 0], rtol=1e-3)

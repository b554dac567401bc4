"""Prioritized sampling: its distribution, and the effects of hostile input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay.targets import importance_weights

NAN, INF = float("nan"), float("inf")

# A buffer is a pytree without leaves, so equal buffers share their jitted methods.
add, update, get, clear, metrics = (
    jax.jit(getattr(jr.ReplayBuffer, name))
    for name in ("add", "update_priorities", "get", "clear", "metrics")
)
sample = jax.jit(jr.ReplayBuffer.sample, static_argnums=3)


def flat(values):
    """Return a step of as many envs as there are rewards."""
    values = jnp.asarray(values, jnp.float32)
    return jr.Step(
        obs=values, action=values, reward=values, terminated=values < -99, truncated=values < -99
    )


def make_buffer(priorities, *, length=4, **config):
    """Return a buffer and a state; each stream has one sampleable row, with its priority,
    and a waiting row."""
    config = {"alpha": 1.0, "stratified": False, "batch_size": 8, **config}
    buffer = jr.prioritized(
        capacity=length * len(priorities),
        num_envs=len(priorities),
        autoreset="same_step_no_final_obs",
        **config,
    )
    state = buffer.init(jax.tree.map(lambda x: x[0], flat(priorities)))
    state = add(buffer, state, flat(priorities), priority=jnp.asarray(priorities, jnp.float32))
    return buffer, add(buffer, state, flat(priorities), priority=jnp.ones(len(priorities)))


def rows_of(buffer):
    return jnp.arange(buffer.num_envs) * (buffer.capacity // buffer.num_envs)


def probabilities(buffer, state):
    return np.asarray(get(buffer, state, rows_of(buffer)).probability)


def index_of(buffer, state, streams):
    return jax.tree.map(
        lambda x: x[jnp.asarray(streams)], get(buffer, state, rows_of(buffer)).index
    )


def test_independent_draws_follow_the_law():
    priority = np.random.default_rng(0).gamma(1.0, size=40)
    buffer, state = make_buffer(priority, alpha=0.7)
    batch = sample(buffer, state, jax.random.key(0), 300_000)
    expected = priority**0.7 / (priority**0.7).sum()
    counts = np.bincount(np.asarray(batch.index.row) // 4, minlength=40)
    assert stats.chisquare(counts, expected * counts.sum()).pvalue > 1e-4
    np.testing.assert_allclose(
        batch.probability, expected[np.asarray(batch.index.row) // 4], rtol=1e-5
    )


def test_a_stratified_batch_has_one_draw_in_each_part_of_the_mass():
    priority = np.random.default_rng(1).gamma(0.3, size=50)
    buffer, state = make_buffer(priority, stratified=True)
    ends = np.cumsum(priority / priority.sum())
    starts = np.concatenate([[0], ends[:-1]])
    for seed in range(20):
        stream = np.asarray(sample(buffer, state, jax.random.key(seed), 64).index.row) // 4
        parts = np.arange(64) / 64
        assert (starts[stream] < parts + 1 / 64 + 1e-6).all()
        assert (ends[stream] > parts - 1e-6).all()


def test_stratified_draws_are_right_on_average():
    priority = np.array([1.0, 2.0, 3.0, 4.0, 0.0])
    buffer, state = make_buffer(priority, stratified=True)
    draw = jax.jit(jax.vmap(lambda key: buffer.sample(state, key, 7).index.row))
    counts = np.bincount(
        np.asarray(draw(jax.random.split(jax.random.key(0), 20_000))).ravel() // 4, minlength=5
    )
    # Strata only lower the variance: 4 standard deviations of independent draws is a wide bound,
    # which fails by chance once in 10^4.
    expected = priority / 10 * counts.sum()
    assert (np.abs(counts - expected) <= 4 * np.sqrt(np.maximum(expected, 0))).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -1.0])
def test_a_bad_priority_keeps_the_old_one_and_is_counted(bad):
    buffer, state = make_buffer([1.0, 2.0, 5.0])
    state = update(buffer, state, index_of(buffer, state, [0, 2]), jnp.array([bad, 3.0]))
    np.testing.assert_allclose(probabilities(buffer, state), np.array([1, 2, 3]) / 6, rtol=1e-6)
    assert (int(state.sampler.num_bad_priorities), int(state.sampler.num_stale_updates)) == (1, 0)
    assert float(state.sampler.max_priority) == 5


@pytest.mark.parametrize("bad", [NAN, INF, -1.0])
def test_a_bad_priority_at_add_becomes_the_largest_so_far_and_is_counted(bad):
    buffer, state = make_buffer([1.0, bad, 2.0])
    np.testing.assert_allclose(probabilities(buffer, state), np.array([1, 1, 2]) / 4, rtol=1e-6)
    assert int(state.sampler.num_bad_priorities) == 1


def test_zero_is_never_drawn_and_all_zero_cannot_be_sampled():
    buffer, state = make_buffer([0.0, 2.0, 0.0])
    assert set(np.asarray(sample(buffer, state, jax.random.key(0), 1000).index.row)) == {4}
    state = update(buffer, state, index_of(buffer, state, [1]), jnp.array([0.0]))
    assert not buffer.can_sample(state)
    batch = sample(buffer, state, jax.random.key(0))
    assert not batch.is_valid.any()
    assert not batch.probability.any()
    assert np.isfinite(np.asarray(batch.experience.reward)).all()
    state = update(buffer, state, index_of(buffer, state, [1]), jnp.array([0.5]))
    assert sample(buffer, state, jax.random.key(0)).index.row.tolist() == [4] * 8


def test_the_largest_of_duplicates_wins():
    buffer, state = make_buffer([1.0, 1.0])
    state = update(
        buffer, state, index_of(buffer, state, [0, 0, 1, 0]), jnp.array([2.0, 3.0, 1.0, NAN])
    )
    np.testing.assert_allclose(probabilities(buffer, state), [0.75, 0.25])


@pytest.mark.parametrize("row", [-1, -12, 12, 2**31 - 1, -(2**31)])
def test_a_row_out_of_range_is_ignored_and_counted(row):
    buffer, state = make_buffer([1.0, 2.0, 5.0])
    index = jr.types.Index(row=jnp.array([row], jnp.int32), lap=jnp.zeros(1, jnp.uint32))
    changed = update(buffer, state, index, jnp.array([100.0]))
    assert int(changed.sampler.num_stale_updates) == 1
    assert float(changed.sampler.max_priority) == 5
    np.testing.assert_array_equal(changed.sampler.tree.sums[0], state.sampler.tree.sums[0])


def test_rows_that_were_never_written_or_still_wait_are_ignored():
    buffer, state = make_buffer([1.0, 2.0])
    waiting, unwritten = 1, 2
    index = jr.types.Index(row=jnp.array([waiting, unwritten]), lap=jnp.zeros(2, jnp.uint32))
    changed = update(buffer, state, index, jnp.array([100.0, 100.0]))
    assert int(changed.sampler.num_stale_updates) == 2
    np.testing.assert_array_equal(changed.sampler.tree.sums[0], state.sampler.tree.sums[0])


def test_a_late_update_of_an_overwritten_row_is_ignored():
    buffer, state = make_buffer([1.0, 2.0])
    late = index_of(buffer, state, [0, 1])
    for _ in range(4):  # a full lap: each row number now names another step
        state = add(buffer, state, flat([0.0, 0.0]), priority=jnp.array([1.0, 1.0]))
    changed = update(buffer, state, late, jnp.array([100.0, 100.0]))
    assert int(changed.sampler.num_stale_updates) == 2
    np.testing.assert_array_equal(changed.sampler.tree.sums[0], state.sampler.tree.sums[0])
    assert not get(buffer, changed, late).is_valid.any()


def test_laps_wrap_around():
    """After 2^32 laps the counter restarts at 0; indices of the previous lap are still stale."""
    buffer, state = make_buffer([1.0, 2.0])
    state = state.replace(streams=state.streams.with_counters(lap=jnp.uint32(2**32 - 1)))
    early = index_of(buffer, state, [0, 1])
    assert early.lap.tolist() == [2**32 - 1] * 2
    for _ in range(4):
        state = add(buffer, state, flat([0.0, 0.0]))
    assert not get(buffer, state, early).is_valid.any()
    now = index_of(buffer, state, [0, 1])
    assert now.lap.tolist() == [0, 0]
    assert get(buffer, state, now).is_valid.all()


def test_ranks_wrap_around():
    """After 2^32 transitions a stream's count restarts at 0; sizes and samples stay correct."""
    buffer = jr.uniform(capacity=10, num_envs=1, batch_size=500, autoreset="same_step_no_final_obs")
    state = buffer.init(jax.tree.map(lambda x: x[0], flat([0.0])))
    state = state.replace(
        streams=state.streams.with_counters(num_candidates=jnp.array([2**32 - 7], jnp.uint32))
    )
    for time in range(25):
        state = add(buffer, state, flat([float(time)]))
        assert int(buffer.size(state)) == min(time, 9)
    assert set(np.asarray(sample(buffer, state, jax.random.key(0)).experience.reward)) == set(
        range(15, 24)
    )


def test_counters_of_what_was_ignored_stay_at_their_maximum():
    buffer, state = make_buffer([1.0])
    sampler = state.sampler.replace(
        num_bad_priorities=jnp.uint32(2**32 - 2), num_stale_updates=jnp.uint32(2**32 - 1)
    )
    bad = index_of(buffer, state, [0, 0, 0])
    state = update(buffer, state.replace(sampler=sampler), bad, jnp.array([NAN] * 3))
    assert int(state.sampler.num_bad_priorities) == 2**32 - 1
    state = update(buffer, state, jr.types.Index(row=bad.row - 1, lap=bad.lap), jnp.ones(3))
    assert int(state.sampler.num_stale_updates) == 2**32 - 1


def test_new_rows_have_the_largest_priority_so_far():
    buffer, state = make_buffer([1.0, 4.0])
    state = update(buffer, state, index_of(buffer, state, [0]), jnp.array([9.0]))
    state = update(buffer, state, index_of(buffer, state, [0]), jnp.array([1.0]))
    state = add(buffer, state, flat([0.0, 0.0]))  # default priority: 9
    state = add(buffer, state, flat([0.0, 0.0]))
    np.testing.assert_allclose(
        get(buffer, state, jnp.array([2, 6])).probability, 9 / (1 + 4 + 1 + 1 + 9 + 9), rtol=1e-6
    )


def test_a_waiting_row_keeps_the_priority_of_its_add():
    buffer = jr.prioritized(
        capacity=8,
        num_envs=1,
        batch_size=4,
        autoreset="same_step_no_final_obs",
        n_step=3,
        alpha=1.0,
    )
    state = buffer.init(jax.tree.map(lambda x: x[0], flat([0.0])))
    for priority in (2.0, 3.0, 5.0, 7.0, 11.0):
        state = add(buffer, state, flat([0.0]), priority=jnp.array([priority]))
    np.testing.assert_allclose(
        get(buffer, state, jnp.arange(8)).probability, [0.4, 0.6, 0, 0, 0, 0, 0, 0], rtol=1e-6
    )


def test_huge_and_tiny_priorities_stay_finite_and_positive():
    buffer, state = make_buffer([3.4e38] * 3 + [1e-30, 1e-38, 1e-45, -0.0, 0.0], alpha=2.0)
    sums = state.sampler.tree.sums
    assert np.isfinite(np.asarray(sums[-1])).all()
    assert (np.asarray(sums[0])[:8] > 0).tolist() == [True] * 6 + [False] * 2
    assert np.asarray(sample(buffer, state, jax.random.key(0), 100).is_valid).all()


def test_alpha_zero_is_uniform_over_positive_priorities():
    buffer, state = make_buffer([3.0, 0.0, 0.1], alpha=0.0)
    np.testing.assert_allclose(probabilities(buffer, state), [0.5, 0, 0.5])


def test_a_stale_index_is_known_after_clear():
    buffer, state = make_buffer([1.0, 2.0])
    late = index_of(buffer, state, [0, 1])
    state = clear(buffer, state)
    assert (
        int(buffer.size(state)),
        bool(buffer.can_sample(state)),
        float(state.sampler.max_priority),
    ) == (0, False, 1)
    for _ in range(9):
        state = add(buffer, state, flat([0.0, 0.0]))
        changed = update(buffer, state, late, jnp.array([100.0, 100.0]))
        assert int(changed.sampler.num_stale_updates) == 2
        assert not get(buffer, state, late).is_valid.any()


def hand_made(probability, is_valid=None, source=None):
    probability = jnp.asarray(probability, jnp.float32)
    return jr.Sample(
        experience=None,
        index=None,
        probability=probability,
        weight=None,
        is_valid=probability > 0 if is_valid is None else jnp.asarray(is_valid),
        source=source,
    )


def test_importance_weights_by_hand():
    batch = hand_made([0.5, 0.25, 0.125, 0.0])
    for beta in (0, 0.5, 1.0):
        for given, expected in (
            ({}, [0.25, 0.5, 1]),
            ({"reference": 1 / 4}, [0.5, 1, 2]),  # for 4 rows: not normalized
            ({"reference": 1 / 16}, [0.125, 0.25, 0.5]),
        ):
            weight = importance_weights(batch, beta, **given)
            np.testing.assert_allclose(weight, [*np.power(expected, beta), 0], rtol=1e-6)
    nothing = batch.replace(is_valid=jnp.zeros(4, bool))
    assert importance_weights(nothing, 1.0).tolist() == [0, 0, 0, 0]


def test_importance_weights_do_not_overflow():
    weight = importance_weights(hand_made([1e-37, 1.0]), 1.0)
    np.testing.assert_allclose(weight, [1, 1e-37], rtol=1e-3)


def test_importance_weights_refuse_what_is_no_batch_or_no_number():
    with pytest.raises(ValueError, match=r"got a dict; pass batch, not batch.experience"):
        importance_weights({}, 0.4)
    with pytest.raises(ValueError, match=r"beta must be one number, got an array of shape \[2\]"):
        importance_weights(hand_made([0.5, 0.5]), jnp.ones(2))


@pytest.mark.parametrize("normalize_weights", ["batch", "buffer", None])
@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
def test_weights_are_those_of_the_paper(normalize_weights, beta):
    """Weights for priorities 3, 0, 1, 4 and alpha 0.5 match those by hand; beta is traced."""
    buffer, state = make_buffer(
        [3.0, 0.0, 1.0, 4.0], alpha=0.5, beta=0.7, normalize_weights=normalize_weights
    )
    mass = np.sqrt([3.0, 0.0, 1.0, 4.0])
    batch = sample(buffer, state, jax.random.key(0), 64, beta=beta)
    probability = (mass / mass.sum())[np.asarray(batch.index.row) // 4]
    weight = (4 * probability) ** -(0.7 if beta is None else beta)
    if normalize_weights == "batch":
        weight = weight / weight.max()
    if normalize_weights == "buffer":
        weight = weight / (4 * 1 / mass.sum()) ** -(0.7 if beta is None else beta)
    np.testing.assert_allclose(batch.weight, weight, rtol=1e-5)
    everything = get(buffer, state, rows_of(buffer), beta=beta)
    assert (np.asarray(everything.weight) > 0).tolist() == [True, False, True, True]


def test_nothing_to_draw_weighs_nothing():
    for config in ({}, {"normalize_weights": "buffer"}, {"normalize_weights": None}):
        buffer, state = make_buffer([3.0, 1.0], **config)
        batch = sample(buffer, clear(buffer, state), jax.random.key(0), 8)
        assert batch.weight.tolist() == [0] * 8


def test_metrics_by_hand():
    buffer, state = make_buffer([3.0, 0.0, 1.0, 4.0], alpha=0.5, beta=1.0, stratified=True)
    state = update(buffer, state, index_of(buffer, state, [0, 0]), jnp.array([NAN, 3.0]))
    late = index_of(buffer, state, [2])
    late = late.replace(lap=late.lap + 1)
    state = update(buffer, state, late, jnp.ones(1))
    mass = np.sqrt([3.0, 0.0, 1.0, 4.0])
    found = metrics(buffer, state)
    # for probabilities q: (E 1/q)^2 / E 1/q^2, over the three rows with positive priority
    effective = 3**2 / (mass.sum() * (1 / mass[mass > 0]).sum())
    expected = {
        "size": 4,
        "fill": 0.5,
        "effective_sample_size": effective,
        "max_priority": 4,
        "mean_priority": (mass.sum() / 4) ** 2,
        "num_bad_priorities": 1,
        "num_stale_updates": 1,
    }
    assert {name: leaf.shape for name, leaf in found.items()} == dict.fromkeys(expected, ())
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0.02, err_msg=name)
    empty = metrics(buffer, clear(buffer, state))
    assert (float(empty["effective_sample_size"]), float(empty["mean_priority"])) == (0, 0)
    buffer, state = make_buffer([3.0, 0.0, 1.0, 4.0], alpha=0.0)
    assert "mean_priority" not in metrics(buffer, state)


@pytest.mark.parametrize("num_envs", [2, 127, 1023])
def test_a_buffer_full_of_huge_priorities_can_be_sampled(num_envs):
    """The total does not overflow, and its reciprocal stays positive."""
    buffer, state = make_buffer([3e38] * num_envs, length=2)
    batch = sample(buffer, state, jax.random.key(0), 8)
    assert batch.is_valid.all()
    np.testing.assert_allclose(batch.probability, 1 / num_envs, rtol=1e-5)


def test_a_positive_priority_has_a_positive_probability_beside_a_huge_one():
    buffer, state = make_buffer([1e-38, 1e30, 1e30], normalize_weights="buffer")
    for beta in (0.0, 0.4, 1.0):
        got = get(buffer, state, rows_of(buffer), beta=beta)
        assert (np.asarray(got.probability) > 0).all()
        np.testing.assert_allclose(got.weight[0], 1, rtol=1e-4)
        assert np.isfinite(np.asarray(got.weight)).all()


def test_the_index_of_an_invalid_item_names_no_row():
    """A sample of a buffer without sampleable rows returns some row number. Updates with it are
    ignored, even once that row is sampleable."""
    buffer = jr.prioritized(
        capacity=4, num_envs=1, batch_size=2, autoreset="same_step_no_final_obs", alpha=1.0
    )
    state = buffer.init(jax.tree.map(lambda x: x[0], flat([0.0])))
    state = add(buffer, state, flat([0.0]))
    early = sample(buffer, state, jax.random.key(0), None)
    assert not early.is_valid.any()
    for _ in range(3):
        state = add(buffer, state, flat([0.0]))
        state = update(buffer, state, early.index, jnp.array([100.0, 100.0]))
    assert (float(state.sampler.max_priority), int(state.sampler.num_stale_updates)) == (1, 6)
    stale = get(buffer, state, jr.types.Index(row=jnp.array([0]), lap=jnp.array([7], jnp.uint32)))
    assert (
        int(update(buffer, state, stale.index, jnp.array([100.0])).sampler.num_stale_updates) == 7
    )

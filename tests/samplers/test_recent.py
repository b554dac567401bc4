"""Recent rows: probabilities are geometric in a row's age, and exact over streams of any fill."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers.recent import Recent
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView
from tests.conftest import SOAK
from tests.support.sampling import (
    add,
    check_all_in_place,
    check_jit_and_vmap,
    fed,
    histories,
    make_buffer,
    probability_of_all,
    sample,
    size,
    step_of,
)
from tests.views.test_views import Config, ViewPair


def law(counts, decay):
    """Return a list of row probabilities, oldest first, for each stream of `counts` rows."""
    mass = [[decay**age for age in reversed(range(count))] for count in counts]
    total = sum(map(sum, mass))
    return [[m / total for m in stream] for stream in mass]


class RecentPair(ViewPair):
    def pop(self, batch_size):
        """Sample instead: this sampler consumes nothing."""
        batch = sample(self.config.replay, self.state, jax.random.key(self.clock), batch_size)
        expected = self.expected()
        assert np.asarray(batch.is_valid).tolist() == [bool(expected)] * batch_size
        if expected:
            np.testing.assert_allclose(
                batch.probability, [expected[int(row)] for row in batch.index.row], rtol=1e-5
            )

    def expected(self):
        """Return row number -> probability."""
        streams = [[] for _ in self.oracle.streams]
        for env, position, _ in sorted(
            self.config.anchors(self.oracle), key=lambda reader: reader[2]
        ):
            streams[env].append(env * self.config.length + position)
        shares = law(map(len, streams), self.config.sampler.decay)
        return {
            row: p
            for rows, stream in zip(streams, shares, strict=True)
            for row, p in zip(rows, stream, strict=True)
        }

    def check(self):
        expected, got = (
            self.expected(),
            np.asarray(probability_of_all(self.config.replay, self.state)),
        )
        np.testing.assert_allclose(
            [got[row] for row in expected], list(expected.values()), rtol=1e-5
        )
        assert int(size(self.config.replay, self.state)) == len(expected)


POOL = (
    Config(
        "next_step",
        True,
        6,
        TransitionView(n_step=3, gamma=0.5),
        Recent(decay=0.9),
        num_envs=3,
    ),
    Config(
        "same_step_no_final_obs",
        True,
        8,
        jr.views.SequenceView(length=2, period=2),
        Recent(decay=0.3),
        num_envs=1,
    ),
    Config("same_step_no_final_obs", False, 6, jr.views.FutureView(), Recent(decay=1.0)),
)


@hypothesis.settings(max_examples=500 if SOAK else 25)
@hypothesis.given(histories(POOL))
def test_probabilities_agree_with_the_oracle(case):
    config, history = case
    pair = RecentPair(config)
    for kind, *arguments in history:
        getattr(pair, kind)(*arguments)
    pair.check()
    pair.pop(3)


@pytest.mark.parametrize("decay", [0.2, 0.95])
def test_draws_follow_the_law(decay):
    """Chi-square of independent draws from streams of 0, 3 and 19 rows; the fixed key fails by
    chance once in 10^4."""
    buffer, state = make_buffer(Recent(decay=decay), num_envs=3, length=20, allow_mask=True)
    for time in range(33):
        state = add(buffer, state, step_of([1.0] * 3), jnp.array([False, time < 4, True]))
    expected = law([0, 3, 19], decay)
    rows = [[], list(range(20, 23)), [40 + (13 + k) % 20 for k in range(19)]]
    flat = np.zeros(60)
    for numbers, probability in zip(rows, expected, strict=True):
        flat[numbers] = probability
    batch = sample(buffer, state, jax.random.key(2), 200_000)
    counts = np.bincount(batch.index.row, minlength=60)
    assert counts[flat == 0].sum() == 0
    # Rows with fewer than 5 expected draws are pooled with the rarest of the others.
    order = np.argsort(-flat)
    split = max(1, (flat * 200_000 >= 5).sum() - 1)
    classes = [
        np.append(x[order][:split], x[order][split:].sum()) for x in (counts, flat * 200_000)
    ]
    assert stats.chisquare(*classes).pvalue > 1e-4
    np.testing.assert_allclose(batch.probability, flat[np.asarray(batch.index.row)], rtol=1e-5)


@pytest.mark.parametrize("decay", [1e-30, 1 - 1e-9])
def test_extreme_decays_are_the_newest_row_and_uniform(decay):
    buffer, state = make_buffer(Recent(decay=decay), num_envs=2)
    batch = sample(buffer, fed(buffer, state, range(6)), jax.random.key(0), 1000)
    assert batch.is_valid.all()
    assert set(np.asarray(batch.index.row)) == (
        {4, 12} if decay < 0.5 else {*range(5), *range(8, 13)}
    )
    np.testing.assert_allclose(batch.probability, 0.5 if decay < 0.5 else 0.1, rtol=1e-5)


def test_ranks_wrap_around():
    buffer, state = make_buffer(Recent(decay=0.5))
    state = state.replace(
        streams=state.streams.with_counters(num_candidates=jnp.array([2**32 - 3], jnp.uint32))
    )
    for time in range(12):
        state = fed(buffer, state, [time])
        rows = [k % 8 for k in range(max(0, time - 7), time)]
        np.testing.assert_allclose(
            probability_of_all(buffer, state)[np.array(rows, int)],
            law([len(rows)], 0.5)[0],
            rtol=1e-6,
        )


def test_items_by_age():
    buffer = ReplayBuffer(
        capacity=4,
        num_envs=1,
        batch_size=64,
        sampler=Recent(decay=0.5),
        view=Item(),
        autoreset=None,
    )
    state = buffer.init(jnp.float32(0))
    assert not sample(buffer, state, jax.random.key(0), 64).is_valid.any()
    for value in range(6):
        state = add(buffer, state, jnp.array([float(value)]))
    assert set(np.asarray(sample(buffer, state, jax.random.key(0), 64).experience)) == {2, 3, 4, 5}
    np.testing.assert_allclose(
        probability_of_all(buffer, state), np.array([4, 8, 1, 2]) / 15, rtol=1e-6
    )


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"Recent: decay must be in \(0, 1\], got"):
        Recent(decay=decay)


def test_jit_equals_eager_and_vmap_equals_a_loop():
    buffer, state = make_buffer(Recent(decay=0.9), num_envs=2)
    check_jit_and_vmap(buffer, [fed(buffer, state, range(k)) for k in (5, 0, 17)])


def test_it_is_in_place():
    def add_and_sample(buffer, state, key):
        state = buffer.add(state, step_of(jax.random.uniform(key, (4,))))
        return state, (buffer.sample(state, key), buffer.size(state))

    check_all_in_place(Recent(decay=0.999), [add_and_sample])


def test_dtypes_hold_with_64_bit_numbers():
    with jax.enable_x64(True):
        buffer, state = make_buffer(Recent(decay=0.9), num_envs=2)
        batch = jax.eval_shape(buffer.sample, state, jax.random.key(0))
    assert (batch.index.row.dtype, batch.probability.dtype) == (np.int32, np.float32)

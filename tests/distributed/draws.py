"""Draws of all shards have the distribution of one buffer. On 8 devices."""

import functools

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.distributed.common import filled, items
from tests.support.buffers import bits, everything, jitted

SIZES = [64, 17, 0, 3]
PRIORITIES = np.random.default_rng(0).gamma(0.5, size=256)
PRIORITIES[64:70] = 0


@functools.cache
def repeated(buffer):
    def sample(state, keys, beta):
        return jax.lax.map(lambda key: buffer.sample(state, key, beta=beta), keys)

    return jax.jit(sample)


def many(buffer, state, num, beta=None):
    """Return `num` batches, leaves [num, B, ...]."""
    keys = jax.random.split(jax.random.key(1), num)
    return jax.device_get(repeated(buffer)(state, keys, beta))


@pytest.mark.parametrize("priorities", [None, PRIORITIES], ids=["uniform", "prioritized"])
def test_probabilities_are_those_of_one_buffer(priorities):
    sampler = jr.Uniform() if priorities is None else jr.Prioritized(alpha=1.0)
    buffer = items(4, sampler)
    state = filled(buffer, SIZES, priorities)
    one, its_state = buffer.buffer, filled(buffer.buffer, SIZES, priorities)
    batch = many(buffer, state, 50)
    row, valid = batch.index.row, batch.is_valid
    expected = np.asarray(everything(one)(its_state, 0).probability)
    np.testing.assert_allclose(batch.probability[valid], expected[row[valid]], rtol=1e-5)
    np.testing.assert_array_equal(batch.experience[valid], row[valid])
    empty = row // 64 == 2
    np.testing.assert_array_equal(valid, ~empty)
    assert empty.any()
    figures, theirs = (
        {name: float(figure) for name, figure in jitted(part, "metrics")(its).items()}
        for part, its in ((buffer, state), (one, its_state))
    )
    assert figures == pytest.approx(theirs, rel=1e-5)


def test_weighted_means_are_those_of_one_buffer():
    """Two shards, of which one has 8 times the mass of the other. Equal ones need no correction."""
    r = np.random.default_rng(3)
    priorities = r.gamma(2.0, size=128)
    priorities[:64] *= 8 * priorities[64:].sum() / priorities[:64].sum()
    buffer = items(2, jr.Prioritized(alpha=1.0))
    state, values = filled(buffer, [64, 64], priorities), r.normal(size=128)
    probability = priorities / priorities.sum()
    for beta in (0.0, 0.4, 1.0):
        batch = many(buffer, state, 3000, beta)
        weight = (128 * probability) ** -beta
        drawn, row = batch.weight.astype(float), batch.index.row
        drawn = drawn * weight[row].max(axis=1, keepdims=True)  # undo what depends on the batch
        means = (drawn * values[row]).mean(axis=1)
        error = means.mean() - (probability * weight * values).sum()
        assert abs(error) < 4 * means.std() / np.sqrt(len(means))
    equal = filled(buffer, [64, 64], np.ones(128))
    assert (many(buffer, equal, 3000, 0.4).weight == 1).all()


def test_another_key_gives_another_batch_on_each_shard():
    buffer = items(4, jr.Uniform())
    state = filled(buffer, [64] * 4)
    batch = many(buffer, state, 50)
    parts = batch.index.row.reshape(-1, 4, 8) - 64 * np.arange(4)[:, None]
    assert len({tuple(part) for part in parts.reshape(-1, 8).tolist()}) == 200
    assert bits(batch) == bits(many(buffer, state, 50))

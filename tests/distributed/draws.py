"""Draws of all shards have the distribution of one buffer. On 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from tests.distributed import common
from tests.support.buffers import bits

SIZES = [64, 17, 0, 3]
PRIORITIES = np.random.default_rng(0).gamma(0.5, size=256)
PRIORITIES[64:70] = 0


def one_buffer(sizes, priorities, **options):
    """Return a buffer on one device with the same rows, and its state."""
    num = len(sizes)
    sampler = jr.Uniform() if priorities is None else jr.Prioritized(alpha=1.0, **options)
    buffer = jr.items(
        capacity=64 * num, num_envs=num, batch_size=8 * num, allow_mask=True, sampler=sampler
    )
    rows = jnp.arange(64)[:, None] + 64 * jnp.arange(num)
    given = [] if priorities is None else [jnp.asarray(priorities, jnp.float32)[rows]]
    mask = jnp.arange(64)[:, None] < jnp.asarray(sizes)
    return buffer, jax.jit(buffer.extend)(
        buffer.init(jnp.float32(0)), rows.astype(jnp.float32), mask, *given
    )


def many(buffer, state, num, **options):
    """Return `num` batches, leaves [num, B, ...]."""
    keys = jax.random.split(jax.random.key(1), num)
    return jax.jit(
        lambda keys: jax.lax.map(lambda key: buffer.sample(state, key, **options), keys)
    )(keys)


@pytest.mark.parametrize("priorities", [None, PRIORITIES], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("draw", ["even", "global"])
def test_probabilities_are_those_of_one_buffer(draw, priorities):
    buffer, state = common.items(SIZES, priorities, draw=draw)
    one, its_state = one_buffer(SIZES, priorities)
    batch = many(buffer, state, 50)
    valid = np.asarray(batch.is_valid)
    expected = np.asarray(one.get(its_state, jnp.arange(256)).probability)
    np.testing.assert_allclose(
        batch.probability[valid], expected[np.asarray(batch.index.row)[valid]], rtol=1e-5
    )
    np.testing.assert_array_equal(
        batch.experience[valid], np.asarray(batch.index.row)[valid].astype(np.float32)
    )
    empty = np.asarray(batch.index.row) // 64 == 2
    assert not valid[empty].any()
    assert valid[~empty].all()
    assert empty.any() == (draw == "even")
    figures, theirs = jax.jit(buffer.metrics)(state), jax.jit(one.metrics)(its_state)
    assert figures.keys() == theirs.keys()
    for name in figures.keys() - {"effective_sample_size"}:
        np.testing.assert_allclose(figures[name], theirs[name], rtol=1e-5)
    assert 0 < figures["effective_sample_size"] <= 1


@pytest.mark.parametrize(
    ("priorities", "options"),
    [(None, {}), (PRIORITIES, {"stratified": False}), (PRIORITIES, {"stratified": True})],
    ids=["uniform", "independent", "stratified"],
)
def test_a_global_draw_has_the_distribution_of_one_buffer(priorities, options):
    buffer, state = common.items(SIZES, priorities, draw="global", **options)
    one, its_state = one_buffer(SIZES, priorities)
    expected = np.asarray(one.get(its_state, jnp.arange(256)).probability, np.float64)
    rows = np.asarray(many(buffer, state, 2000).index.row).ravel()
    count = np.bincount(rows, minlength=256)
    assert not count[expected == 0].any()
    likely = expected * len(rows) >= 5
    found = [*count[likely], count[~likely].sum()]
    wanted = [*expected[likely], expected[~likely].sum()]
    kept = np.array(wanted) > 0
    wanted = np.array(wanted)[kept] / sum(wanted) * len(rows)
    # stratified draws vary less, so that the statistic may only be smaller
    assert stats.chisquare(np.array(found)[kept], wanted).pvalue > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("normalize", ["batch", "buffer", None])
@pytest.mark.parametrize("draw", ["even", "global"])
def test_weighted_means_are_those_of_one_buffer(draw, normalize, beta):
    """Two shards, of which one has 8 times the mass of the other."""
    r = np.random.default_rng(3)
    priorities = r.gamma(2.0, size=128)
    priorities[:64] *= 8 * priorities[64:].sum() / priorities[:64].sum()
    options = {"normalize_weights": normalize}
    buffer, state = common.items([64, 64], priorities, draw=draw, **options)
    value = jnp.asarray(r.normal(size=128), jnp.float32)
    batch = many(buffer, state, 3000, beta=beta)
    probability = priorities / priorities.sum()
    weight = (128 * probability) ** -beta
    if normalize == "buffer":
        weight /= weight.max()
    drawn = np.asarray(batch.weight, np.float64)
    if normalize == "batch":  # undo what depends on the batch
        rows = np.asarray(batch.index.row)
        drawn = drawn * weight[rows].max(axis=1, keepdims=True)
    values = np.asarray(value, np.float64)
    means = (drawn * values[np.asarray(batch.index.row)]).mean(axis=1)
    z = (means.mean() - (probability * weight * values).sum()) / (means.std() / np.sqrt(len(means)))
    assert abs(z) < 4
    if draw == "global":
        np.testing.assert_allclose(drawn, weight[np.asarray(batch.index.row)], rtol=2e-5)


def test_equal_shards_need_no_correction():
    buffer, state = common.items([64, 64], np.ones(128))
    assert (many(buffer, state, 20).weight == 1).all()


def test_items_cross_to_the_bit():
    """Negative zeros, NaN, subnormal and tiny types, flags."""
    kinds = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8", "uint32", "int4"]
    values = {
        kind: jnp.asarray([0, 1, 3, 7], "uint8").astype(kind)
        if "int" in kind
        else jnp.asarray([-0.0, jnp.nan, 1e-3, -7], kind)
        for kind in kinds
    }
    values |= {"flag": jnp.array([True, False, True, False]), "tiny": jnp.full(4, 1e-42)}
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]], axis=-1), values)
    buffer = jr.sharded(
        jr.items(capacity=128, num_envs=4, batch_size=64), common.mesh_of(4), draw="global"
    )
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    state = jax.jit(buffer.add)(state, rows)
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    env = np.asarray(batch.index.row) // 32
    assert set(env) == {0, 1, 2, 3}
    for name, leaf in rows.items():
        np.testing.assert_array_equal(
            np.asarray(batch.experience[name]).view(np.uint8),
            np.asarray(leaf)[env].view(np.uint8),
            err_msg=name,
        )


def test_another_key_gives_another_batch_on_each_shard():
    buffer, state = common.items([64] * 8)
    batch = many(buffer, state, 2)
    parts = np.asarray(batch.index.row).reshape(2, 8, 8) - 64 * np.arange(8)[:, None]
    assert len({tuple(part) for part in parts.reshape(16, 8).tolist()}) == 16
    again = many(buffer, state, 2)
    assert bits(batch) == bits(again)

"""Uniform sampling: exact over the sampleable rows, however few they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay._util import random
from jaxreplay.storage import platforms


@pytest.fixture(params=platforms.PLATFORMS)
def _on_each_platform(request, monkeypatch):
    """Make each platform the default: the sampling code differs between platforms."""
    monkeypatch.setattr(platforms, "default", lambda: request.param)


on_each_platform = pytest.mark.usefixtures("_on_each_platform")


def stream(autoreset, terminated, truncated, *, capacity, n_step=1):
    """Return a buffer of one stream, and its state after steps with these done flags."""
    buffer = jr.uniform(
        capacity=capacity, num_envs=1, batch_size=1, autoreset=autoreset, n_step=n_step
    )
    terminated, truncated = (jnp.asarray(flags, bool)[:, None] for flags in (terminated, truncated))
    time = jnp.arange(len(terminated), dtype=jnp.float32)[:, None]
    steps = jr.Step(obs=time, action=time, reward=time, terminated=terminated, truncated=truncated)
    return buffer, jax.jit(buffer.extend)(
        buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps
    )


def sampleable_rows(buffer, state):
    return np.flatnonzero(buffer.get(state, jnp.arange(buffer.capacity)).is_valid)


def check_law(buffer, state, draws):
    """Check independent draws by chi-square; the fixed key fails by chance once in 10^4."""
    rows = sampleable_rows(buffer, state)
    batch = jax.jit(buffer.sample, static_argnames="batch_size")(
        state, jax.random.key(3), batch_size=draws
    )
    assert batch.is_valid.all()
    np.testing.assert_allclose(batch.probability, 1 / len(rows), rtol=1e-6)
    counts = np.bincount(batch.index.row, minlength=buffer.capacity)
    assert counts.sum() == counts[rows].sum() == draws
    assert len(rows) == 1 or stats.chisquare(counts[rows]).pvalue > 1e-4


@on_each_platform
@pytest.mark.parametrize("autoreset", ["next_step", "same_step_no_final_obs"])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_the_law_is_exact_between_many_tails(autoreset, every):
    """An episode of one step with next-step autoreset makes every other row a final row."""
    done = np.arange(300) % every == 0
    buffer, state = stream(autoreset, done & (np.arange(300) % 3 > 0), done, capacity=120)
    check_law(buffer, state, 200_000)


@on_each_platform
@pytest.mark.parametrize("transitions", [1, 2, 5])
def test_the_law_is_exact_where_almost_every_row_is_a_tail(transitions):
    """Truncated rows without a final observation are final rows: redraws alone would take thousands
    of rounds for 5 rows of 4 000."""
    truncated = np.ones(4000, bool)
    truncated[np.linspace(100, 3900, transitions).astype(int)] = False
    buffer, state = stream("same_step_no_final_obs", np.zeros(4000), truncated, capacity=3950)
    assert int(buffer.size(state)) == transitions
    check_law(buffer, state, 20_000)


@on_each_platform
def test_the_law_is_exact_over_streams_of_different_fill():
    buffer = jr.uniform(
        capacity=30, num_envs=3, batch_size=1, autoreset="same_step_no_final_obs", allow_mask=True
    )
    zeros = jnp.zeros(3)
    step = jr.Step(obs=zeros, action=zeros, reward=zeros, terminated=zeros > 0, truncated=zeros > 0)
    state, add = buffer.init(jax.tree.map(lambda x: x[0], step)), jax.jit(buffer.add)
    for time in range(17):
        state = add(state, step, jnp.array([True, time % 4 == 0, False]))
    assert sampleable_rows(buffer, state).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        *range(7, 10),
        *range(10, 14),
    ]
    check_law(buffer, state, 100_000)


@on_each_platform
def test_nothing_but_tails_cannot_be_sampled():
    buffer, state = stream("same_step_no_final_obs", np.zeros(9), np.ones(9), capacity=8)
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    assert not buffer.can_sample(state)
    assert (batch.is_valid.tolist(), batch.probability.tolist()) == ([False], [0])


def test_below_is_exact_at_its_edges():
    top = jnp.uint32(2**32 - 1)
    for bound in (1, 2, 3, 1000, 2**31 - 1):
        assert int(random.below(top, top, jnp.int32(bound))) == bound - 1
        assert int(random.below(jnp.uint32(0), jnp.uint32(0), jnp.int32(bound))) == 0
    # 2^64 words map to 3 values; the first value's end at floor(2^64 / 3) = 0x5555555555555555.
    third = jnp.uint32(0x55555555)
    assert int(random.below(third, third, jnp.int32(3))) == 0
    assert int(random.below(third, third + 1, jnp.int32(3))) == 1


def test_below_agrees_with_the_96_bit_product():
    r = np.random.default_rng(0)
    high, low = r.integers(0, 2**32, (2, 2000), dtype=np.uint32)
    bound = r.integers(1, 2**31, 2000, dtype=np.int32)
    expected = [
        ((int(h) << 32 | int(w)) * int(b)) >> 64 for h, w, b in zip(high, low, bound, strict=True)
    ]
    np.testing.assert_array_equal(
        random.below(jnp.asarray(high), jnp.asarray(low), jnp.asarray(bound)), expected
    )


def test_remixed_bits_are_even_where_the_first_ones_are_not():
    """First bits that need a redraw are those of final rows, a narrow range; remixed bits must be
    even over the full range."""
    high = (jnp.uint32(5) << 27) + jnp.arange(4096, dtype=jnp.uint32)
    low = jnp.arange(4096, dtype=jnp.uint32) * jnp.uint32(12345)
    for round_number in range(4):
        other, _ = random.remix(high, low, jnp.uint32(round_number))
        assert stats.chisquare(np.bincount(np.asarray(other) >> 26, minlength=64)).pvalue > 1e-4
        assert len(set(other.tolist())) > 4090


def test_the_cipher_is_the_one_jax_has():
    """Threefry agrees with known answers of the reference implementation, and with `jax.random` on
    the same counters."""
    zero, ones = jnp.zeros(1, jnp.uint32), jnp.full(1, 2**32 - 1, jnp.uint32)
    assert [int(x[0]) for x in random._threefry(jnp.zeros(2, jnp.uint32), zero, zero)] == [
        0x6B200159,
        0x99BA4EFE,
    ]
    assert [int(x[0]) for x in random._threefry(jnp.tile(ones, 2), ones, ones)] == [
        0x1CB996FC,
        0xBB002BE7,
    ]
    key = jax.random.key(7)
    left, right = random._threefry(
        jax.random.key_data(key), jnp.zeros(9, jnp.uint32), jnp.arange(9, dtype=jnp.uint32)
    )
    np.testing.assert_array_equal(left ^ right, jax.random.bits(key, (9,)))


@pytest.mark.parametrize(
    "key",
    [jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")],
    ids=["typed", "raw", "rbg"],
)
def test_every_kind_of_key_is_taken(key):
    high, low = random.words(key, 5000)
    assert (high.dtype, low.shape) == (jnp.uint32, (5000,))
    for word in (high, low, high ^ low):
        assert stats.chisquare(np.bincount(np.asarray(word) >> 27, minlength=32)).pvalue > 1e-4

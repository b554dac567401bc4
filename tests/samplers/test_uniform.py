"""Uniform sampling: exact over the sampleable rows, however few they are. On a GPU, where rows are
tried and not searched, the share of invalid items is the one that is promised."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay._util import random
from jaxreplay.storage.sampleable import Sampleable
from tests.conftest import ALL
from tests.support.buffers import CATALOG
from tests.support.steps import begun, nth, plain_step

# the sampling code differs between platforms
on_two_platforms = pytest.mark.parametrize("platform", ["cpu", "gpu"])
DRAWS, BATCH = 50_000, 5


@jax.jit
def run(buffer, steps, mask):
    """Return independent draws of a buffer with these steps, all its rows, its size, and how many
    rows a GPU tries."""
    state = begun(buffer, steps, mask)
    keys = jax.random.split(jax.random.key(3), (DRAWS // BATCH, BATCH))
    # of each batch one item, since on a GPU several may share a row
    one = lambda nth, key: jax.tree.map(lambda leaf: leaf[nth], buffer.sample(state, key, BATCH))
    batch = jax.vmap(jax.vmap(one), (None, 0))(jnp.arange(BATCH), keys)
    batch = jax.tree.map(jnp.ravel, (batch.index.row, batch.probability, batch.is_valid))
    everything = buffer.get(state, jnp.arange(buffer.capacity))
    members = Sampleable.of(state)
    num_tried = state.counters.filled.sum()
    if not state.layout.lockstep:
        num_tried -= (members.num_pending + members.num_expired).sum()
    return batch, everything.is_valid, buffer.size(state), buffer.can_sample(state), num_tried


def check_law(platform, autoreset, terminated, truncated, *, capacity, mask=None):
    """Check independent draws of a buffer with these done flags [T, E] by chi-square; the fixed key
    fails by chance once in 10^4. Return the sampleable rows."""
    time = np.broadcast_to(np.arange(len(truncated))[:, None], truncated.shape)
    steps = plain_step(time, terminated=terminated, truncated=truncated)
    buffer = jr.uniform(
        capacity=capacity,
        num_envs=truncated.shape[1],
        batch_size=1,
        autoreset=autoreset,
        allow_mask=mask is not None,
    )
    buffer = dataclasses.replace(buffer, platform=platform)
    drawn, is_valid, size, can_sample, num_tried = jax.device_get(run(buffer, steps, mask))
    row, probability, is_drawn = drawn
    rows = np.flatnonzero(is_valid)
    assert (size, can_sample) == (len(rows), len(rows) > 0)
    none = 0.0 if can_sample else 1.0  # probability that an item is invalid
    if platform == "gpu" and buffer.length >= 16:
        none = (1 - len(rows) / num_tried) ** 64
    assert abs((~is_drawn).mean() - none) <= 5 * np.sqrt(none * (1 - none) / DRAWS)
    expected = is_drawn / max(1, len(rows))
    np.testing.assert_allclose(probability, expected, rtol=1e-6)
    counts = np.bincount(row[is_drawn], minlength=capacity)[rows]
    assert counts.sum() == is_drawn.sum()
    assert len(rows) <= 1 or stats.chisquare(counts).pvalue > 1e-4
    return rows.tolist()


@on_two_platforms
def test_the_law_is_exact_between_many_tails(platform):
    """An episode of one step with next-step autoreset makes every other row a final row."""
    time = np.arange(300)[:, None]
    for every in (1, 7):
        done = time % every == 0
        check_law(platform, "next_step", done & (time % 3 > 0), done, capacity=120)


def test_the_law_is_exact_where_almost_every_row_is_a_tail_or_all_are():
    """Truncated rows without a final observation are final rows: redraws alone would take hundreds
    of rounds for 2 rows of 400."""
    for transitions in (0, 1, 2):
        truncated = np.ones((410, 1), bool)
        truncated[np.linspace(50, 390, transitions).astype(int)] = False
        form = "same_step_no_final_obs"
        rows = check_law("cpu", form, truncated & False, truncated, capacity=400)
        assert len(rows) == transitions


def test_the_law_is_exact_over_streams_of_different_fill():
    """In rings that a GPU does not search: the third has 48 rows."""
    time, flag = np.arange(17), np.zeros((17, 3), bool)
    mask = np.stack([time >= 0, time % 4 == 0, time < 0], axis=1)
    form, expected = "same_step_no_final_obs", [*range(16), *range(48, 52)]
    assert check_law("gpu", form, flag, flag, capacity=144, mask=mask) == expected


UNIFORM = [case for case in CATALOG if isinstance(case.replay().sampler, jr.Uniform)]
EDGES = np.uint32([0, 1, 2**16, 2**31, 2**32 - 256, 2**32 - 1, *range(7**9, 2**32, 7**10)])
WORDS = [x.reshape(-1) for x in np.meshgrid(EDGES, EDGES)]  # the largest and the smallest, too


@functools.partial(jax.jit, static_argnums=0)
def tried(buffer, steps, mask=()):
    """Return the rows that a GPU tries from an empty buffer over a wrap to a clear, and whether
    those of the last step can be sampled."""

    def add(state, step_and_mask):
        state = buffer.add(state, *step_and_mask)
        members = Sampleable.of(state)
        rows = members.tried_row(*WORDS)
        return state, (rows, members.contains(rows))

    empty = buffer.init(nth(steps, (0, 0)))
    state, (rows, is_valid) = jax.lax.scan(add, empty, (steps, *mask))
    _, (after, _) = jax.lax.scan(add, buffer.clear(state), nth((steps, *mask), slice(6)))
    rows = [Sampleable.of(empty).tried_row(*WORDS), rows.ravel(), after.ravel()]
    return jnp.concatenate(rows), is_valid[-1]


@pytest.mark.parametrize("case", UNIFORM if ALL else UNIFORM[::3], ids=lambda case: case.name)
def test_no_try_of_a_gpu_leaves_the_ring(case):
    buffer = dataclasses.replace(case.replay(), platform="gpu")
    rows, is_valid = map(np.asarray, tried(buffer, case.step(1, 40), case.mask(buffer, 2, 40)))
    assert ((rows >= 0) & (rows < buffer.capacity)).all()
    assert is_valid.any()


def test_no_try_of_a_gpu_leaves_a_ring_that_an_unfinished_episode_fills():
    """Then no row's window is known."""
    buffer = jr.future_pairs(capacity=16, batch_size=1, autoreset="next_step")
    buffer = dataclasses.replace(buffer, platform="gpu")
    rows, is_valid = map(np.asarray, tried(buffer, plain_step(np.arange(40)[:, None])))
    assert ((rows >= 0) & (rows < 16)).all()
    assert not is_valid.any()


def test_below_is_the_top_of_the_96_bit_product():
    r = np.random.default_rng(0)
    top, third = 2**32 - 1, 0x55555555  # floor(2^64 / 3) = 0x5555555555555555: an edge of 3 values
    edges = [[top] * 5 + [0] * 5 + [third] * 2, [top] * 5 + [0] * 5 + [third, third + 1]]
    high, low = np.uint32(np.hstack([r.integers(0, 2**32, (2, 2000)), edges]))
    bound = np.int32([*r.integers(1, 2**31, 2000), *[1, 2, 3, 1000, 2**31 - 1] * 2, 3, 3])
    words = zip(high, low, bound, strict=True)
    expected = [((int(h) << 32 | int(w)) * int(b)) >> 64 for h, w, b in words]
    np.testing.assert_array_equal(jax.jit(random.below)(high, low, bound), expected)


def test_remixed_bits_are_even_where_the_first_ones_are_not():
    """First bits that need a redraw are those of final rows, a narrow range; remixed bits must be
    even over the full range."""
    count = np.arange(4096, dtype=np.uint32)
    for number in range(4):
        other, _ = jax.jit(random.remix)(count + (5 << 27), count * 12345, np.uint32(number))
        assert stats.chisquare(np.bincount(np.asarray(other) >> 26, minlength=64)).pvalue > 1e-4
        assert len(set(other.tolist())) > 4090


def test_the_cipher_is_the_one_jax_has():
    """Threefry agrees with known answers of the reference implementation, and with `jax.random` on
    the same counters."""
    cipher = jax.jit(random._threefry)
    zeros = np.zeros(9, np.uint32)
    for word, answer in ((0, (0x6B200159, 0x99BA4EFE)), (2**32 - 1, (0x1CB996FC, 0xBB002BE7))):
        words = zeros + np.uint32(word)
        assert tuple(int(half[0]) for half in cipher(words[:2], words, words)) == answer
    key = jax.random.key(7)
    left, right = cipher(jax.random.key_data(key), zeros, np.arange(9, dtype=np.uint32))
    np.testing.assert_array_equal(np.asarray(left) ^ np.asarray(right), jax.random.bits(key, (9,)))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", None], ids=["typed", "rbg", "raw"])
def test_every_kind_of_key_is_taken(impl):
    @jax.jit
    def words():
        if impl is None:
            return random.words(jax.random.PRNGKey(0), 5000)
        return random.words(jax.random.key(0, impl=impl), 5000)

    high, low = map(np.asarray, words())
    assert (high.dtype, low.shape) == (np.uint32, (5000,))
    for word in (high, low, high ^ low):
        assert stats.chisquare(np.bincount(word >> 27, minlength=32)).pvalue > 1e-4

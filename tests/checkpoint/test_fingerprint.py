"""Tests of the fingerprint of rows: independent of how rows were added, and different wherever any
row differs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.buffers import CATALOG, NUM_ENVS

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay.checkpoint import fingerprint
from jaxreplay.checkpoint.rows import Part, Picked, heads_of, span_of
from jaxreplay.storage import stored_arrays

cases = pytest.mark.parametrize("case", CATALOG, ids=lambda case: case.name)


def held(buffer, state):
    """Return all rows that a state holds."""
    span = span_of(heads_of(state), buffer.length)
    rows = [
        (env, number)
        for env in range(buffer.num_envs)
        for number in range(span.first[env], span.end[env])
    ]
    return Picked(*np.array(rows).T)


def of_state(buffer, state):
    return int(fingerprint.of_rows(Part(0, state), held(buffer, state)))


@cases
def test_it_is_the_sum_over_the_rows_however_they_came(case):
    buffer = case.replay(capacity=NUM_ENVS * 16)
    steps, mask = case.step(3, time=24), case.mask(buffer, 4, 24)
    one_by_one, add = buffer.init(case.example()), jax.jit(buffer.add)
    by_blocks, extend = buffer.init(case.example()), jax.jit(buffer.extend)
    for t in range(24):
        one_by_one = add(one_by_one, *jax.tree.map(lambda leaf, t=t: leaf[t], (steps, *mask)))
        if t % 4 == 3:
            by_blocks = extend(
                by_blocks, *jax.tree.map(lambda leaf, t=t: leaf[t - 3 : t + 1], (steps, *mask))
            )
    assert of_state(buffer, one_by_one) == of_state(buffer, by_blocks)
    every = held(buffer, one_by_one)
    alone = [
        int(fingerprint.of_rows(Part(0, one_by_one), Picked(env[None], number[None])))
        for env, number in zip(*every, strict=True)
    ]
    assert sum(alone) % 2**32 == of_state(buffer, one_by_one)
    assert len(set(alone)) == len(alone)


DTYPES = (
    "bool",
    "int4",
    "int8",
    "uint16",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "float8_e5m2",
    "float4_e2m1fn",
    "complex64",
)


def hashes_of(tree, number, env=0):
    """Return the hashes of K stored rows.

    Args:
      tree: Rows, leaves [K, ...].
      number: uint32[K].
      env: The env of all rows.
    """
    stored = jax.tree.map(
        lambda leaf: stored_arrays.write(
            stored_arrays.zeros(len(leaf), leaf[0], False), jnp.arange(len(leaf)), leaf
        ),
        tree,
    )
    return np.asarray(
        jax.jit(fingerprint.hashes)(
            stored, jnp.arange(len(number)), number, jnp.full(len(number), env, jnp.uint32)
        )
    )


def hash_of(tree, number=0, env=0):
    return int(
        hashes_of(
            jax.tree.map(lambda leaf: leaf[None], tree), jnp.full(1, number, jnp.uint32), env
        )[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
def test_every_element_of_every_dtype_counts(dtype, shape):
    def tree_of(flat, other=0):
        values = flat.reshape(shape).astype(jnp.dtype(dtype))
        return {"a": jnp.asarray(values), "b": jnp.float32(other), "none": jnp.zeros((0, 3))}

    zeros = np.zeros(int(np.prod(shape)), np.complex64 if dtype == "complex64" else np.float32)
    seen = {
        hash_of(tree_of(zeros)),
        hash_of(tree_of(zeros, 1)),
        hash_of(tree_of(zeros), 1),
        hash_of(tree_of(zeros), 0, 1),
    }
    for place in range(len(zeros)):
        changed = zeros.copy()
        changed[place] = 1
        seen.add(hash_of(tree_of(changed)))
    assert len(seen) == 4 + len(zeros)
    if dtype == "complex64":
        assert hash_of(tree_of(zeros + 1j)) not in seen
    if dtype == "float32" and shape:
        assert hash_of(tree_of(zeros * -1)) not in seen  # -0.0 has other bits than 0.0


@pytest.mark.skipif(jax.dtypes.canonicalize_dtype("int64") == np.int64, reason="x64 is on")
def test_both_halves_of_a_64_bit_number_count():
    with jax.enable_x64(True):
        values = [jnp.asarray(x, jnp.int64) for x in (0, 1, 2**40, -1)] + [
            jnp.asarray(1e-300, jnp.float64)
        ]
        assert len({hash_of(x) for x in values}) == 5


def test_a_swap_of_equal_things_shows():
    one, two = jnp.float32(1), jnp.float32(2)
    assert (
        len({hash_of((one, two)), hash_of((two, one)), hash_of(jnp.stack([two, one])[None])}) == 2
    )
    for num_envs in (1, 3):  # swaps of rows in a stream, and between streams
        buffer = jr.items(capacity=6, num_envs=num_envs, batch_size=1)
        states = [
            buffer.extend(buffer.init(jnp.float32(0)), jnp.asarray(values).reshape(-1, num_envs))
            for values in itertools.permutations([1.0, 2.0, 3.0])
        ]
        assert len({of_state(buffer, state) for state in states}) == 6


def test_flags_and_ranks_count():
    """Hash states of equal values: no episode ends, or one ends before or among the held rows."""
    buffer, flag, zero = (
        jr.uniform(capacity=8, batch_size=1, autoreset="next_step"),
        np.zeros(1, bool),
        np.zeros(1),
    )
    seen = set()
    for done in (None, 1, 5):
        state = buffer.init(jr.Step(0.0, 0.0, 0.0, terminated=False, truncated=False))
        for t in range(12):
            state = jax.jit(buffer.add)(
                state, jr.Step(zero, zero, zero, terminated=flag | (t == done), truncated=flag)
            )
        seen.add(of_state(buffer, state))
    assert len(seen) == 3


@pytest.mark.parametrize("size", [257, 1000, 84 * 84])
def test_all_elements_of_a_large_row_have_their_turn(size):
    num_turns = -(-size // 64)
    seen = np.concatenate(
        [
            np.asarray(fingerprint._places(size, jnp.full((1,), turn, jnp.uint32)))[0]
            for turn in range(num_turns)
        ]
    )
    assert set(seen.tolist()) == set(range(size))
    values = jnp.zeros((num_turns, size))
    number = jnp.arange(num_turns, dtype=jnp.uint32) + 5
    before = hashes_of(values, number)
    for place in np.random.default_rng(0).integers(0, size, 20):
        after = hashes_of(values.at[:, place].set(1), number)
        assert (before != after).any()


@pytest.mark.parametrize(
    "leaf",
    [np.zeros((6, 300), np.uint8), np.zeros((6, 3, 90), jnp.bfloat16), np.zeros((6, 5), jnp.int4)],
)
def test_it_is_the_same_on_every_platform(leaf):
    values, found = (
        jnp.asarray(np.random.default_rng(1).integers(-3, 4, leaf.shape)).astype(leaf.dtype),
        set(),
    )
    for platform in ("cpu", "gpu", "tpu"):
        buffer = jr.items(capacity=8, batch_size=1, platform=platform)
        state = buffer.extend(
            buffer.init(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)), values[:, None]
        )
        found.add(of_state(buffer, state))
    assert len(found) == 1


def test_rows_share_a_hash_as_rarely_as_by_chance():
    """Hash 200,000 rows of two small numbers, which differ in few bits. With 2^32 hashes, 4.7 pairs
    are expected to collide."""
    pairs = np.stack(np.meshgrid(np.arange(500), np.arange(400)), -1).reshape(-1, 2)
    for dtype in (np.float32, np.int32):
        hashes = hashes_of(jnp.asarray(pairs.astype(dtype)), jnp.zeros(len(pairs), jnp.uint32))
        assert len(pairs) - len(np.unique(hashes)) < 20  # exceeded by chance once in 10^7
    signs = np.where((np.arange(2**14)[:, None] >> np.arange(14)) & 1, 1, -1).astype(np.float32)
    assert len(np.unique(hashes_of(jnp.asarray(signs), jnp.zeros(2**14, jnp.uint32)))) > 2**14 - 5

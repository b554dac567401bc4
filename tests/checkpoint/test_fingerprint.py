"""Tests of the fingerprint of rows: independent of how rows were added, and different wherever any
row differs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import fingerprint
from jaxreplay.checkpoint.rows import Part, Picked, heads_of, span_of
from jaxreplay.storage import stored_arrays
from tests.conftest import ALL
from tests.support.buffers import CATALOG, NUM_ENVS, jitted
from tests.support.steps import nth

FEW = ("items", "uniform masked, episodes")


def held(buffer, state):
    """Return all rows that a state holds."""
    number = [np.arange(*its) for its in zip(*span_of(heads_of(state), buffer.length), strict=True)]
    env = np.repeat(np.arange(buffer.num_envs), [len(own) for own in number])
    return Picked(env, np.concatenate(number))


def of_state(buffer, state):
    return int(fingerprint.of_rows(Part(0, state), held(buffer, state)))


def fed(buffer, steps):
    """Return a state after steps, leaves [T, E, ...]."""
    return jitted(buffer, "extend")(jr.jit(buffer).init(nth(steps, (0, 0))), steps)


@pytest.mark.parametrize(
    "case", [case for case in CATALOG if ALL or case.name in FEW], ids=lambda case: case.name
)
def test_it_is_the_sum_over_the_rows_however_they_came(case):
    buffer = case.replay(capacity=NUM_ENVS * 16)
    given = case.step(3, time=24), *case.mask(buffer, 4, 24)
    one_by_one = by_blocks = jr.jit(buffer).init(case.example())
    for t in range(24):
        one_by_one = jitted(buffer, "add")(one_by_one, *nth(given, t))
        if t % 4 == 0:
            by_blocks = jitted(buffer, "extend")(by_blocks, *nth(given, slice(t, t + 4)))
    assert of_state(buffer, one_by_one) == of_state(buffer, by_blocks)
    alone = [
        int(fingerprint.of_rows(Part(0, one_by_one), Picked(*row[:, None])))
        for row in np.transpose(held(buffer, one_by_one))
    ]
    assert sum(alone) % 2**32 == of_state(buffer, one_by_one)
    assert len(set(alone)) == len(alone)


@jax.jit
def _hashes(tree, number, env):
    place = jnp.arange(len(number))

    def stored(leaf):
        return stored_arrays.write(stored_arrays.zeros(len(leaf), leaf[0], False), place, leaf)

    return fingerprint.hashes(jax.tree.map(stored, tree), place, number, env)


def hashes_of(tree, number=0, env=0):
    """Return the hashes of K stored rows.

    Args:
      tree: Rows, leaves [K, ...].
      number: Each row's number, [K], or that of all.
      env: Each row's env, [K], or that of all.
    """
    num_rows = len(jax.tree.leaves(tree)[0])
    whole = (np.full(num_rows, part, np.uint32) for part in (number, env))
    return np.asarray(_hashes(tree, *whole))


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


def test_every_element_of_every_dtype_counts():
    """Hash rows that differ from the first in one element each, or in their number or env."""
    shapes = (), (7,), (2, 3), (0, 3)
    example = [np.zeros(shape, dtype) for dtype in DTYPES for shape in shapes]
    values = {"complex64": (1, 1j), "float32": (1, -0.0)}  # -0.0 has other bits than 0.0
    changes = [
        (which, place, value)
        for which, leaf in enumerate(example)
        for place in range(leaf.size)
        for value in values.get(leaf.dtype.name, (1,))
    ]
    num_rows = 3 + len(changes)
    tree = [np.zeros((num_rows, *leaf.shape), leaf.dtype) for leaf in example]
    for row, (which, place, value) in enumerate(changes, 3):
        tree[which].reshape(num_rows, -1)[row, place] = value
    number, env = np.zeros((2, num_rows))
    number[1] = env[2] = 1
    assert len({*hashes_of(tree, number, env).tolist()}) == num_rows


@pytest.mark.skipif(jax.dtypes.canonicalize_dtype("int64") == np.int64, reason="x64 is on")
def test_both_halves_of_a_64_bit_number_count():
    values = np.array([0, 1, 2**40, -1])
    with jax.enable_x64(True):
        hashes = [hashes_of(values), hashes_of(np.array([1e-300, 1e300]))]
    assert len({*np.concatenate(hashes).tolist()}) == 6


def test_a_swap_of_equal_things_shows():
    one, two = np.float32([1, 2]), np.float32([2, 1])
    assert len({*hashes_of((one, two)).tolist()}) == 2
    # leaves are hashed as one row
    assert (hashes_of((one, two)) == hashes_of(np.stack([one, two], axis=1))).all()
    for num_envs in (1, 3):  # swaps of rows in a stream, and between streams
        buffer = jr.items(capacity=6, num_envs=num_envs, batch_size=1)
        orders = [np.float32(order) for order in itertools.permutations([1, 2, 3])]
        states = [fed(buffer, values.reshape(-1, num_envs)) for values in orders]
        assert len({of_state(buffer, state) for state in states}) == 6


def test_flags_count():
    """Hash states of equal values: no episode ends, or one ends among the held rows."""
    buffer = jr.uniform(capacity=8, batch_size=1, autoreset="next_step")
    time = np.arange(12)[:, None]
    zero = np.zeros((12, 1), np.float32)
    steps = [
        jr.Step(zero, zero, zero, terminated=time == done, truncated=time < 0)
        for done in (-1, 5, 7)
    ]
    assert len({of_state(buffer, fed(buffer, step)) for step in steps}) == 3


@pytest.mark.parametrize(("size", "num_places"), [(257, 257), (84 * 84, 20)])
def test_all_elements_of_a_large_row_have_their_turn(size, num_places):
    """Change one element of all rows in turn: one of the rows has another hash."""
    num_rows = -(-size // 64)
    values = np.zeros((1 + num_places, num_rows, size), np.float32)
    for row, place in enumerate(np.random.default_rng(0).permutation(size)[:num_places], 1):
        values[row, :, place] = 1
    number = np.tile(5 + np.arange(num_rows), len(values))
    hashes = hashes_of(values.reshape(-1, size), number).reshape(len(values), -1)
    assert (hashes[1:] != hashes[0]).any(axis=1).all()


def test_it_is_the_same_on_every_platform():
    r, found = np.random.default_rng(1), set()
    kinds = (((300,), np.uint8), ((3, 90), jnp.bfloat16), ((5,), jnp.int4))
    values = [r.integers(-3, 4, (6, 1, *shape)).astype(dtype) for shape, dtype in kinds]
    for platform in ("cpu", "gpu", "tpu"):
        buffer = jr.items(capacity=8, batch_size=1, platform=platform)
        found.add(of_state(buffer, fed(buffer, values)))
    assert len(found) == 1


def test_rows_share_a_hash_as_rarely_as_by_chance():
    """Hash 200,000 rows of two small numbers, which differ in few bits. With 2^32 hashes, 4.7 pairs
    are expected to collide."""
    pairs = np.stack(np.meshgrid(np.arange(500), np.arange(400)), -1).reshape(-1, 2)
    for dtype in (np.float32, np.int32):
        hashes = hashes_of(pairs.astype(dtype))
        assert len(pairs) - len(np.unique(hashes)) < 20  # exceeded by chance once in 10^7
    signs = np.where((np.arange(2**14)[:, None] >> np.arange(14)) & 1, 1, -1).astype(np.float32)
    assert len(np.unique(hashes_of(signs))) > 2**14 - 5

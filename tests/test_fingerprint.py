"""The fingerprint of what was written: the same however rows came, and another one wherever anything differs."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffers import CATALOG, NUM_ENVS
from conftest import SOAK

import jaxreplay as jr
from jaxreplay import fingerprint, provisional

cases = pytest.mark.parametrize("case", CATALOG, ids=lambda case: case.name)


def of_all_rows(replay, state):
    """What the fingerprint is by its definition, while no row was overwritten: uint32[E]."""
    length, rows = replay.length, np.arange(replay.capacity, dtype=np.int32)
    env, position = np.divmod(rows, length)
    hashes = np.asarray(jax.jit(state.streams.hashes)(rows, position.astype(np.uint32)))
    is_held = position < np.broadcast_to(state.streams.filled, (NUM_ENVS,))[env]
    return np.array([hashes[is_held & (env == e)].sum(dtype=np.uint32) for e in range(NUM_ENVS)])


@cases
def test_it_is_the_sum_over_the_rows_however_they_came(case):
    replay = case.replay(capacity=NUM_ENVS * 64)
    steps, mask = case.step(3, time=12), case.mask(replay, 4, 12)
    block = jax.jit(replay.extend)(replay.init(case.example()), steps, *mask)
    np.testing.assert_array_equal(block.streams.history, of_all_rows(replay, block))
    one_by_one, add = replay.init(case.example()), jax.jit(replay.add)
    for t in range(12):
        one_by_one = add(one_by_one, *jax.tree.map(lambda leaf, t=t: leaf[t], (steps, *mask)))
    np.testing.assert_array_equal(one_by_one.streams.history, block.streams.history)


def test_it_goes_on_through_wraps_and_clears():
    replay = jr.items(capacity=8, num_envs=2, batch_size=1)
    state, total = replay.init(jnp.float32(0)), np.zeros(2, np.uint32)
    for t in range(40):
        number = np.full(2, int(state.streams.lap) * 4 + int(state.streams.head), np.uint32)
        values = jnp.asarray([t % 3, t % 2], jnp.float32)
        state = replay.add(state, values)
        total += np.asarray(fingerprint.of_values(values, number))
        state = replay.clear(state) if t == 17 else state
        np.testing.assert_array_equal(state.streams.history, total)


DTYPES = ("bool", "int4", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "float8_e5m2", "float4_e2m1fn", "complex64")


def hash_of(tree, number=0):
    return int(jax.jit(fingerprint.of_values)(jax.tree.map(lambda leaf: leaf[None], tree), jnp.full(1, number, jnp.uint32))[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
def test_every_element_of_every_dtype_counts(dtype, shape):
    def tree_of(flat, other=0):
        values = flat.reshape(shape).astype(jnp.dtype(dtype))
        return {"a": jnp.asarray(values), "b": jnp.float32(other), "none": jnp.zeros((0, 3))}

    zeros = np.zeros(int(np.prod(shape)), np.complex64 if dtype == "complex64" else np.float32)
    seen = {hash_of(tree_of(zeros)), hash_of(tree_of(zeros, 1)), hash_of(tree_of(zeros), 1)}
    for place in range(len(zeros)):
        changed = zeros.copy()
        changed[place] = 1
        seen.add(hash_of(tree_of(changed)))
    assert len(seen) == 3 + len(zeros)
    if dtype == "complex64":
        assert hash_of(tree_of(zeros + 1j)) not in seen
    if dtype == "float32" and shape:
        assert hash_of(tree_of(zeros * -1)) not in seen  # by its bits


@pytest.mark.skipif(jax.dtypes.canonicalize_dtype("int64") == np.int64, reason="x64 is on")
def test_both_halves_of_a_64_bit_number_count():
    with jax.enable_x64(True):
        values = [jnp.asarray(x, jnp.int64) for x in (0, 1, 2**40, -1)] + [jnp.asarray(1e-300, jnp.float64)]
        assert len({hash_of(x) for x in values}) == 5


def test_a_swap_of_equal_things_shows():
    one, two = jnp.float32(1), jnp.float32(2)
    assert len({hash_of((one, two)), hash_of((two, one)), hash_of(jnp.stack([two, one])[None])}) == 2
    replay = jr.items(capacity=8, batch_size=1)
    history = {}
    for values in itertools.permutations([1.0, 2.0, 3.0]):
        state = replay.extend(replay.init(jnp.float32(0)), jnp.asarray(values)[:, None])
        history[values] = int(state.streams.history[0])
    assert len(set(history.values())) == 6


@pytest.mark.parametrize("size", [257, 1000, 84 * 84])
def test_all_elements_of_a_large_row_have_their_turn(size):
    num_turns = -(-size // 64)
    seen = np.concatenate([np.asarray(fingerprint._places(size, jnp.full((1,), turn, jnp.uint32)))[0] for turn in range(num_turns)])
    assert set(seen.tolist()) == set(range(size))
    values = jnp.zeros((num_turns, size))
    number = jnp.arange(num_turns, dtype=jnp.uint32) + 5
    before = np.asarray(fingerprint.of_values(values, number))
    for place in np.random.default_rng(0).integers(0, size, 20):
        after = np.asarray(fingerprint.of_values(values.at[:, place].set(1), number))
        assert (before != after).any()


@pytest.mark.parametrize("leaf", [np.zeros((6, 300), np.uint8), np.zeros((6, 3, 90), jnp.bfloat16), np.zeros((6, 5), jnp.int4)])
def test_stored_rows_have_the_hashes_of_what_was_written(leaf):
    replay = jr.items(capacity=8, batch_size=1)
    values = jnp.asarray(np.random.default_rng(1).integers(-3, 4, leaf.shape)).astype(leaf.dtype)
    state = replay.extend(replay.init(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)), values[:, None])
    rows = np.arange(6, dtype=np.int32)
    got = state.streams.hashes(rows, rows.astype(np.uint32))
    np.testing.assert_array_equal(got, fingerprint.of_values(values, jnp.arange(6, dtype=jnp.uint32)))


@pytest.mark.parametrize("seed", range(20 if SOAK else 2))
def test_a_row_that_is_taken_back_leaves_no_trace(seed):
    """Episodes that end for now and go on: at each moment the fingerprint is that of the rows as they are."""
    replay = jr.uniform(capacity=NUM_ENVS * 64, num_envs=NUM_ENVS, batch_size=1, autoreset="same_step")
    r, flag = np.random.default_rng(seed), np.zeros(NUM_ENVS, bool)

    def step():
        obs, final = (r.integers(0, 3, (NUM_ENVS, 2)).astype(np.float32) for _ in range(2))
        done = r.random(NUM_ENVS) < 0.2
        return jr.Step(obs, r.integers(0, 2, NUM_ENVS), obs[:, 0], done, ~done, final_obs=final), done

    state = replay.init(jax.tree.map(lambda leaf: leaf[0], step()[0]))
    may_go_on = was_first = flag
    for _ in range(20):
        goes_on = may_go_on & (r.random(NUM_ENVS) < 0.8)
        one, done = step()
        state = add(replay, state, one, goes_on, was_first)
        may_go_on, was_first = ~done, ~goes_on
        np.testing.assert_array_equal(state.streams.history, of_all_rows(replay, state))


add = jax.jit(provisional.add)


def test_rows_share_a_hash_as_rarely_as_by_chance():
    """Of 200,000 rows of two small numbers, which differ in few bits: 4.7 pairs are expected to have one of 2^32 hashes."""
    pairs = np.stack(np.meshgrid(np.arange(500), np.arange(400)), -1).reshape(-1, 2)
    for dtype in (np.float32, np.int32):
        hashes = np.asarray(fingerprint.of_values(jnp.asarray(pairs.astype(dtype)), jnp.zeros(len(pairs), jnp.uint32)))
        assert len(pairs) - len(np.unique(hashes)) < 20  # by chance once in 10^7
    signs = np.where((np.arange(2**14)[:, None] >> np.arange(14)) & 1, 1, -1).astype(np.float32)
    assert len(np.unique(np.asarray(fingerprint.of_values(jnp.asarray(signs), jnp.zeros(2**14, jnp.uint32))))) > 2**14 - 5


def test_it_is_kept_only_where_it_is_wanted():
    replay = dataclasses.replace(jr.uniform(capacity=8, num_envs=2, batch_size=1, autoreset="next_step"), keep_history=False)
    flag, zero = jnp.zeros(2, bool), jnp.zeros(2)
    step = jr.Step(zero, zero, zero, flag, flag)
    state = replay.add(replay.init(jax.tree.map(lambda leaf: leaf[0], step)), step)
    assert state.streams.history is None

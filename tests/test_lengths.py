"""Lengths that change from call to call: the same results, from few programs."""

import collections
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffers import CATALOG, KINDS, NUM_ENVS, bits
from conftest import SOAK
from replays import make, step

import jaxreplay as jr
from jaxreplay import lengths

KEY = jax.random.key(3)
LENGTHS = (5, 11, 30, 100) if SOAK else (5, 11)  # the first one has a program of its own
kinds = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _no_lengths_yet(monkeypatch):
    lengths._lengths.clear()
    monkeypatch.setattr(lengths, "_OWN", 1)


def test_few_lengths_have_programs(monkeypatch):
    monkeypatch.setattr(lengths, "_OWN", 4)
    own = [length for length in range(1, 200) if lengths.has_program("kind", length)]
    assert own == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128]
    assert lengths.has_program("kind", 7)
    assert lengths.has_program("other", 199)


@pytest.mark.parametrize("length", [0, 1, 2, 99, 100, 127])
def test_parts_are_the_whole_in_powers_of_two(length):
    for other in (5, 6, 7, 9):
        lengths.has_program("kind", other)
    tree = {"a": np.arange(length), "b": (jnp.arange(2 * length).reshape(length, 2), None)}
    parts = list(lengths.parts("kind", tree))
    sizes = [len(part["a"]) for part in parts]
    assert sum(sizes) == length
    assert sizes == sorted(set(sizes), reverse=True) or length == 0
    assert all(size & (size - 1) == 0 for size in sizes)
    np.testing.assert_array_equal(np.concatenate([part["b"][0] for part in parts]), tree["b"][0])


@kinds
def test_a_batch_of_any_size_is_that_of_the_core(case):
    """Bit for bit, though it is the first part of a larger one."""
    replay = case.replay()
    buffer, state = jr.jit(replay), case.filled(replay)
    draw = jax.jit(replay.take if replay.sampler.consumes else replay.sample, static_argnums=2)
    for size in LENGTHS:
        wanted = draw(state, KEY, size)
        got = (buffer.take if replay.sampler.consumes else buffer.sample)(jax.tree.map(jnp.copy, state), KEY, size)
        assert bits(got) == bits(wanted), size
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)


@kinds
def test_a_block_of_any_length_is_added_whole(case):
    replay = case.replay()
    buffer, extend = jr.jit(replay), jax.jit(replay.extend)
    for length in LENGTHS[:2]:
        steps, mask = case.step(length, time=length), case.mask(replay, 1, length)
        wanted = extend(case.filled(replay), steps, *mask)
        assert bits(buffer.extend(case.filled(replay), steps, *mask)) == bits(wanted), length
        if length == 11:
            assert bits(buffer.extend(case.filled(replay), jax.tree.map(np.asarray, steps), *mask)) == bits(wanted)


@pytest.mark.parametrize("sampler", [jr.Prioritized(keep_minimum=True), jr.RankBased()])
def test_updates_of_any_number_are_the_core_s(sampler):
    """Duplicates, bad priorities and stale rows too; what pads them is not counted as ignored."""
    case = next(case for case in CATALOG if case.name == "transitions by rank")
    replay = jr.transitions(capacity=64, num_envs=NUM_ENVS, batch_size=8, autoreset="same_step", n_step=2, sampler=sampler)
    buffer, update, r = jr.jit(replay), jax.jit(replay.update_priorities), np.random.default_rng(0)
    everything = jax.jit(replay.sample, static_argnums=2)(case.filled(replay), KEY, 100).index
    for length in LENGTHS:
        state = case.filled(replay)
        index = jax.tree.map(lambda leaf, length=length: leaf[:length], everything)
        index = index.replace(row=index.row.at[0].set(10**6), lap=index.lap.at[1].add(1))
        priority = r.choice([0.0, 0.5, 2.0, np.nan, -1.0], length).astype(np.float32)
        wanted = update(state, index, priority)
        for given in (index, jax.tree.map(np.asarray, index)):
            assert bits(buffer.update_priorities(case.filled(replay), given, priority)) == bits(wanted)
    with pytest.raises(ValueError, match=r"update_priorities: priority: got float32\[12\], expected float32\[13\]"):
        buffer.update_priorities(case.filled(replay), jax.tree.map(lambda leaf: leaf[:13], everything), np.ones(12))


def test_rows_are_looked_up_in_any_number():
    case = CATALOG[3]
    replay = case.replay()
    buffer, state, get, age = jr.jit(replay), case.filled(replay), jax.jit(replay.get), jax.jit(replay.age)
    everything = jax.jit(replay.sample, static_argnums=2)(state, KEY, 100).index
    for length in LENGTHS:
        index = jax.tree.map(lambda leaf, length=length: leaf[:length], everything)
        for rows in (index, index.row, np.asarray(index.row), np.asarray(index.row)[None]):
            assert bits(buffer.get(state, rows)) == bits(get(state, rows))
        assert bits(buffer.age(state, index)) == bits(age(state, index))


def test_a_block_whose_leaves_have_different_lengths_is_refused_whole():
    replay = jr.items(capacity=64, num_envs=2, batch_size=4, masked=True)
    buffer = jr.jit(replay)
    state = buffer.init({"x": np.float32(0)})
    for length in LENGTHS:
        state = buffer.extend(state, {"x": np.ones((length, 2), np.float32)})
    before = bits(state)
    with pytest.raises(ValueError, match=r"mask: got bool\[99, 2\], expected bool\[100, 2\]"):
        buffer.extend(state, {"x": np.ones((100, 2), np.float32)}, np.ones((99, 2), bool))
    assert bits(state) == before


def test_inside_of_jit_each_length_is_its_own():
    replay = jr.items(capacity=64, batch_size=4)
    buffer = jr.jit(replay)
    state = replay.extend(replay.init(jnp.float32(0)), jnp.arange(40.0)[:, None])
    for size in LENGTHS:
        got = jax.jit(lambda state, size=size: buffer.sample(state, KEY, size))(state)
        assert bits(got) == bits(replay.sample(state, KEY, size))
        buffer.sample(state, KEY, size)


def test_a_replay_of_changing_lengths_compiles_little(request):
    """Of each length from 1 to 59 a batch, a block, an update, weights: as many programs as there are powers of two, and one more."""
    replay = make(sampler=jr.Prioritized(), framework="numpy", num_envs=1, capacity=100)
    for t in range(10):
        replay.add(step(t, (1,)))
    compiled = []
    listener = lambda event, _, **options: compiled.append(options["fun_name"]) if event.endswith("backend_compile_duration") else None  # noqa: E731
    request.addfinalizer(lambda: jax.monitoring.unregister_event_duration_listener(listener))
    jax.monitoring.register_event_duration_secs_listener(listener)
    for length in range(1, 60, 1 if SOAK else 2):
        replay.add(step(length, (length, 1)))
        batch = replay.sample(length)
        assert batch.items.reward.shape == (length,)
        weights = replay.importance_weights(batch, 0.5)
        np.testing.assert_allclose(weights, (batch.probability / batch.probability.min()) ** -0.5, rtol=1e-5)
        replay.update_priorities(batch.index, np.full(length, 2.0))
    assert int(replay._held.state.sampler.ignored_rows) == 0
    counts = collections.Counter(compiled)
    assert {"jit(_write)", "jit(_sample)", "jit(importance_weights)", "jit(_update_priorities)"} <= counts.keys()
    assert max(counts.values()) <= 2 * (7 + 1)  # `stage` is compiled twice for a length


MEMORY = """
import ctypes, gc, sys, numpy as np, jax, jaxreplay as jr
def resident():
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)  # what is free is given back, where the C library can
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
replay = jr.Replay(jr.prioritized(capacity=10_000, num_envs=4, batch_size=32, autoreset="next_step"), framework="numpy")
def block(t):
    flags = np.zeros((t, 4), bool)
    return dict(obs=np.zeros((t, 4, 8), np.float32), action=np.zeros((t, 4), np.int32), reward=np.zeros((t, 4), np.float32),
                terminated=flags, truncated=flags)
def once(n):
    replay.add(**block(n))
    batch = replay.sample(n)
    replay.update_priorities(batch.index, np.ones(n))
    return replay.importance_weights(batch, 0.5)
replay.add(**block(20))
for n in [*range(1, 33), 64]:
    once(n)
before = resident()
for n in range(33, 64):
    once(n)
print(resident() - before)
"""


@pytest.mark.skipif(not SOAK, reason="runs in make soak: it compiles for 45 seconds")
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="this system does not tell of a process's memory")
def test_new_lengths_take_no_memory():
    """31 others after the first ones, which fill the heaps: batches, blocks and updates took 9, 6 and 5 MiB each, so 155 at the least."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "MALLOC_ARENA_MAX": "1",
    }  # threads' heaps keep what is free, up to 30 MiB
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 30

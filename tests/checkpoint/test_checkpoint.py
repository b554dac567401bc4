"""Tests of saving and restoring: a restored state continues bit-identically, a save writes only new
rows, and memory is bounded."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.buffers.adopt import canonical
from jaxreplay.checkpoint import Checkpointer, groups
from jaxreplay.storage.layout import NUM_PARTS
from jaxreplay.storage.writes import stamp_of
from tests.checkpoint.runs import SUPPORT, check_intact, files_of, groups_of
from tests.conftest import ALL, SOAK
from tests.support.buffers import FEW, bits, each, jitted
from tests.support.checkpointed_run import EXAMPLE, added, begun, expected, items, numbers, step
from tests.support.refusals import refused
from tests.support.steps import nth


@functools.cache
def go_on(case, replay, num_steps):
    """Return a jitted function of a state: add, sample and update priorities `num_steps` times.

    It returns the final state and, of each step, the batch and the buffer's size.
    """
    steps, masks = case.step(5, time=num_steps), case.mask(replay, 6, num_steps)

    def once(state, given):
        step, mask, seed = given
        state = replay.add(state, step, *mask)
        key = jax.random.key(seed)
        if replay.sampler.consumes:
            state, batch = replay.pop(state, key)
        else:
            batch = replay.sample(state, key)
        if replay.sampler.has_priorities:
            priority = jax.random.uniform(key, batch.probability.shape)
            state = replay.update_priorities(state, batch.index, priority)
        return state, (batch, replay.size(state))

    return jax.jit(lambda state: jax.lax.scan(once, state, (steps, masks, np.arange(num_steps))))


@each(FEW if ALL else FEW[1:2])
def test_a_restored_state_goes_on_to_the_last_bit(case, tmp_path):
    """Save in the middle of episodes: before the ring is full, after it wrapped around, and after a
    clear. Each save builds on the one before."""
    replay = case.replay(capacity=240)
    run = go_on(case, replay, 25)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=8192, max_to_keep=9)
    state, states = jr.jit(replay).init(case.example()), []
    for number in range(6):
        checkpointer.save(state, number)
        states.append(state)
        state = run(jitted(replay, "clear")(state) if number == 4 else state)[0]
    for number, state in enumerate(states):
        restored = checkpointer.restore(case.example(), number)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(canonical(restored)) == bits(canonical(state))
        for _ in range(20 if SOAK else 1):
            (restored, got), (state, wanted) = run(restored), run(state)
            assert bits(got) == bits(wanted)


@hypothesis.given(data=hypothesis.strategies.data())
def test_every_new_row_is_in_one_group_and_those_first_that_go_first(data):
    between = lambda *bounds: data.draw(hypothesis.strategies.integers(*bounds))
    num_envs, length, most = between(1, 6), between(1, 9), between(1, 12)
    end = np.array([between(0, 40) for _ in range(num_envs)])
    since = np.array([between(max(0, e - length), e) for e in end])
    num_rewritten = between(0, min(2, length))
    first_env = between(0, num_envs - 1)
    envs = slice(first_env, between(first_env + 1, num_envs))
    seen, nearest_before = [], -1
    save = groups.Save("0000000001-00000000", length, since, end, False)
    for group in groups.cut(save, most, envs, num_rewritten):
        env, number = group.rows()
        assert len({*(number >= end[env] - num_rewritten).tolist()}) == 1
        # rows that may be added before the row is overwritten
        distance = number + length - end[env]
        assert 1 <= len(env) == group.num_rows <= most
        assert distance.min() >= nearest_before
        nearest_before = distance.min()
        own = [*zip(env.tolist(), number.tolist(), strict=True)]
        assert own == sorted(own)
        seen += own
    envs = range(envs.start, envs.stop)
    assert sorted(seen) == [(env, number) for env in envs for number in range(since[env], end[env])]


# What a save writes.


def check_restored(checkpointer, end, number=None):
    """Check that the checkpoint of a number, or the newest, is of a run of `end` steps."""
    buffer = checkpointer.buffer
    assert numbers(buffer, checkpointer.restore(EXAMPLE, number)) == expected(buffer, end)


def check_is(checkpointer, state, example=EXAMPLE):
    """Check that the newest checkpoint is this state."""
    assert bits(checkpointer.restore(example)) == bits(state)


def size_of(path):
    return sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())


def test_a_save_writes_what_is_new_and_forgets_what_is_old(tmp_path):
    replay = items(capacity=4096, num_envs=2, allow_write=True)
    checkpointer = Checkpointer(
        tmp_path, replay, max_to_keep=2, compression_level=None, chunk_bytes=64 * 1024
    )
    state = begun(replay, 2000)
    checkpointer.save(state, 2000)
    full = size_of(tmp_path)
    assert full > 4000 * 104
    state = added(replay, state, 2000, 20)
    checkpointer.save(state, 2020)
    assert size_of(tmp_path) - full < 0.05 * full
    index = jitted(replay, "get")(state, np.int32([1500])).index
    state = jitted(replay, "write")(state, index, {"number": np.int32([1500])})
    for is_written in (True, False):  # the group of a row that was written, and then nothing
        before = files_of(tmp_path / "rows")
        checkpointer.save(state, 2021)
        new = {*files_of(tmp_path / "rows")} - {*before}
        assert is_written * len(before) // 2 >= len(new) >= is_written
    for end in range(2520, 9000, 500):  # several times around the ring
        state = added(replay, state, end - 500, 500)
        checkpointer.save(state, end)
        assert size_of(tmp_path) < 2 * full  # overwritten rows are deleted
    assert checkpointer.all_steps() == [8020, 8520]
    for end in (8020, 8520):
        check_restored(checkpointer, end, end)


def test_each_write_leaves_a_stamp_of_its_own():
    """A save finds writes by it: of other values, some of which would be equal after a rounding; to
    another leaf; to swapped rows or elements; to another row; in another order, also of one call;
    and by `map_rows`. It is left in the row's part of the ring alone."""
    example = {"n": np.int32(0), "y": np.zeros(2, bool), "z": np.complex64(0)}
    example |= dict.fromkeys("xw", np.float32(0))
    buffer = jr.items(capacity=19, batch_size=3, allow_write=True)  # a part has two rows
    blank = jax.tree.map(lambda leaf: np.zeros((19, 1, *leaf.shape), leaf.dtype), example)
    blank |= {"n": np.arange(19, dtype=np.int32)[:, None]}

    def stamps(change):
        counters = change(buffer.extend(buffer.init(example), blank)).counters
        return jnp.stack([getattr(counters, f"write_stamp_{at}") for at in range(NUM_PARTS)])

    @jax.jit
    @jax.vmap
    def written(rows, values):
        index = jr.types.Index(rows, jnp.zeros_like(rows, jnp.uint32))
        once = lambda state, given: (buffer.write(state, *given), None)
        return stamps(lambda state: jax.lax.scan(once, state, (index, values))[0])

    @jax.jit
    @jax.vmap
    def mapped(limit):
        larger = lambda item: {"x": jnp.where(item["n"] < limit, 1, item["x"])}
        return stamps(lambda state: buffer.map_rows(state, larger))

    full = lambda value: np.full((3, *np.shape(value)), value)
    one, two = np.float32([[3, 4, 5], [4, 3, 5]])
    y, n, z, first = np.eye(2, dtype=bool), np.int32(2**24), np.complex64(1j), (0, 1, 2)
    x_and_w = [{"x": one}, {"x": two}, {"w": one}]
    others = [{"y": full(y[0])}, {"y": full(y[1])}, {"n": full(n)}, {"n": full(n + 1)}]
    others += [{"z": full(1 + z)}, {"z": full(1 + 2 * z)}]
    to = [*[(first, own) for own in x_and_w + others]]
    swapped = (1, 0, 2), (1, 1, 2), (0, 0, 2), (18, 1, 2)
    to += [(rows, own) for rows in swapped for own in x_and_w[:2]]
    branches = [(own, (first, {})) for own in to]
    branches += [(to[a], to[b]) for a, b in ((0, 1), (1, 0), (0, 2), (2, 0))]
    rows = np.int32([[rows for rows, _ in both] for both in branches])
    values = {
        name: np.stack([[own.get(name, full(leaf)) for _, own in both] for both in branches])
        for name, leaf in example.items()
    }
    found = [*jax.device_get(written(rows, values))]
    for own, changed in zip(rows, found, strict=True):
        assert {*np.flatnonzero(changed)} == {*(own.ravel() // 2)}
    found += [*mapped(np.int32([3, 6])), np.zeros((NUM_PARTS, 1))]
    buffer = dataclasses.replace(buffer, platform="gpu")
    found += [written(rows[:1], {name: values["x"][:1]})[0] for name in "xw"]  # alone
    assert len({np.uint32(one).tobytes() for one in found}) == len(branches) + 5
    with jax.enable_x64(True):
        wide = {"x": np.float64([[1], [1 + 2**-40]]), "n": np.int64([[1], [1 + 2**40]])}
        trace = lambda name, leaf: stamp_of(np.zeros(1, np.int32), {name: leaf})
        both = jax.vmap(lambda own: [trace(name, leaf) for name, leaf in own.items()])
        assert all(one[0] != one[1] for one in jax.device_get(jax.jit(both)(wide)))


def test_small_saves_do_not_pile_up(tmp_path):
    """Save a few rows at a time, of some of many envs, and at the end no new ones."""
    buffer, r = items(capacity=4096, num_envs=64, allow_mask=True), np.random.default_rng(0)
    checkpointer, run = Checkpointer(tmp_path, buffer), jr.jit(buffer)
    state, last = run.init(EXAMPLE), 149 if SOAK else 60
    for number in range(last + 5):
        if number < last:
            state = run.add(state, step(number, 64), r.random(64) < 0.5)
        checkpointer.save(state, number)
        # two groups for each sixteenth of the ring, and the newest few
        assert len(groups_of(checkpointer)) < 2 * 16 + 8
    check_is(checkpointer, state)


def test_a_rewind_by_a_checkpoint_writes_only_what_is_new(tmp_path):
    """A rewind in memory writes all rows, one by a restore those since that checkpoint."""
    buffer = items(capacity=1024)
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=20_000)
    begin = lambda: begun(buffer, 300)
    checkpointer.save(begin(), 0)
    checkpointer.save(added(buffer, begin(), 300, 50), 1)
    for number, start in ((2, begin), (3, lambda: checkpointer.restore(EXAMPLE, 0))):
        checkpointer.save(state := added(buffer, start(), 300 + number, 10), number)
        folders = {group.save.folder[:10] for group in groups_of(checkpointer)}
        assert ("0000000001" in folders) == (number == 3)
        assert bits(checkpointer.restore(EXAMPLE, number)) == bits(state)


def test_what_is_not_ours_stays(tmp_path):
    theirs = [
        tmp_path / name for name in ("rows/mine.txt", "rest/photos/one.png", "manifests/notes.json")
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    replay, state = items(), begun(items(), 4)
    for number in range(3):
        checkpoint.save(tmp_path, replay, state, step=number)
    assert all(path.read_text() == "mine" for path in theirs)
    # settings of sampling may differ
    again = jr.items(capacity=64, num_envs=4, batch_size=100, min_size=7)
    assert numbers(again, checkpoint.restore(tmp_path, again, EXAMPLE)) == expected(again, 4)


# A save and the state that it is given.


def pointers(state):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.rows.steps)]


@pytest.mark.parametrize("level", [None, *[1] * ALL])
def test_a_save_leaves_the_rows_in_place(level, tmp_path):
    """Write from the state's memory, also across the ring's end. The save then releases that
    memory, so adds stay in place. A thread of the user saves a copy while the run goes on."""
    buffer, r = jr.jit(items(capacity=256)), np.random.default_rng(0)
    options = {"chunk_bytes": 2**18, "compression_level": level}
    checkpointer = Checkpointer(tmp_path, buffer.buffer, **options)
    example = np.zeros(10_000, np.uint8)
    block = lambda: r.integers(256, size=(30, 4, len(example)), dtype=np.uint8)
    state = buffer.extend(buffer.init(example), block())
    before = pointers(state)
    with ThreadPoolExecutor(1) as thread:
        for number in range(5):
            copy = jax.tree.map(jnp.copy, state)
            given = copy if number % 2 else state
            saved = thread.submit(checkpointer.save, given, number)
            if given is state:
                saved.result()
            state = buffer.extend(state, block())
            saved.result()
            check_is(checkpointer, copy, example)
            assert pointers(state) == before


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(),
    reason="needs Linux, whose kernel says how much memory there was",
)
@pytest.mark.parametrize(
    ("gigabytes", "row"),
    [(0.25, 100_000), *[(4, 100_000), (8, 100_000), (0.1, 4), (0.5, 4)] * SOAK],
)
def test_beside_the_state_there_are_few_chunks(gigabytes, row, tmp_path):
    script = SUPPORT / "checkpoint_memory.py"
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}  # compiling counts too
    command = [sys.executable, script, tmp_path, str(gigabytes), str(row), *["all"] * ALL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert max(found["peaks"].values()) <= 3 * 64 * 2**20, found
    assert found["full_bytes"] >= found["state"] >= gigabytes * 1e9
    assert row < 1000 or found["more_bytes"] <= 0.05 * found["full_bytes"]


# What can be saved.


def test_the_example_the_buffer_and_its_state_must_fit(tmp_path):
    replay, large, state = items(), items(capacity=128), begun(items(), 5)
    taken = (
        "buffer must be a ReplayBuffer, a Rollout, a Mixture, a sharded or a tiered buffer, got "
    )
    with refused(taken):
        Checkpointer(tmp_path, jr.Replay(replay))
    for buffer, its, said in (
        (replay, (state, 1), "the state must be a ReplayState, .* got a tuple of 2; the state com"),
        (large, state, r"not of this buffer.*\n  length: the state's is 16, this buffer's 32"),
    ):
        with refused(f"save: .*{said}"):
            Checkpointer(tmp_path, buffer).save(its)
    assert not list(tmp_path.rglob("*.json"))
    checkpoint.save(tmp_path, replay, state, step=5)
    with refused("there is no checkpoint of step 6", FileNotFoundError):
        checkpoint.restore(tmp_path, replay, EXAMPLE, step=6)
    with refused("keep must be an int of at least 1"):
        Checkpointer(tmp_path, replay, max_to_keep=0)


@pytest.mark.parametrize(
    "example",
    [
        {"a/b": np.float32(1), "..": np.zeros((2, 0)), "": {"é": np.ones((), bool)}},
        # too long for file names, and different only at the end
        {
            f"{'n' * 300}{end}": np.float32(value)
            for value, end in enumerate(("", "a", "b", "é" * 200, "/" * 200))
        },
        np.ones(3, jnp.float8_e5m2),
        np.zeros((0, 3), np.float32),  # no file has data of the rows
    ],
)
def test_leaves_of_any_name_and_dtype(example, tmp_path):
    replay = jr.items(capacity=4, batch_size=2)
    step = jax.tree.map(lambda leaf: leaf[None], example)
    state = jr.jit(replay).add(jr.jit(replay).init(example), step)
    checkpoint.save(tmp_path, replay, state)
    assert bits(checkpoint.restore(tmp_path, replay, example)) == bits(state)
    assert checkpoint.inspect(tmp_path).to_json()
    check_intact(checkpoint.verify(tmp_path))
    assert all(len(path.name) < 256 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("path", ["memory://somewhere/else", "a%20b c#d"], ids=["store", "folder"])
def test_metadata_and_paths_of_any_kind(path, tmp_path):
    replay, state = items(), begun(items(), 4)
    given = path if path.startswith("memory:") else tmp_path / path
    one, other = Checkpointer(given, replay, max_to_keep=1), Checkpointer(given, replay)
    for number in range(3):
        one.save(state, number, metadata={"episodes": number})
    assert one.all_steps() == [2]
    for _ in range(2):
        check_is(other, state)
        assert other.metadata == {"episodes": 2}
        other.metadata["episodes"] = 4  # the caller's copy
    assert [found.name for found in tmp_path.iterdir()] == [path] * (given != path)


def test_a_rollout_is_saved_too(tmp_path):
    """In files that are smaller and larger than the state."""
    rollout = jr.rollout(length=5, num_envs=2, autoreset="next_step")
    values, flags = np.ones(2, np.float32), np.zeros(2, bool)
    step = jr.Step(values, values, values, terminated=flags, truncated=flags)
    state, example = jr.jit(rollout).init(nth(step, 0)), nth(step, 0)
    for chunk_bytes in (64, 2**20):
        checkpointer = Checkpointer(tmp_path / str(chunk_bytes), rollout, chunk_bytes=chunk_bytes)
        for number in range(2):
            state = jr.jit(rollout).add(state, step)
            checkpointer.save(state, number)
            check_is(checkpointer, state, example)

"""Tests of saving and restoring: a restored state continues bit-identically, a save writes only new
rows, and memory is bounded."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, PathInUseError, groups, planning, rows
from jaxreplay.distributed.parts import Parts
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from tests.checkpoint.runs import SUPPORT, check_intact, groups_of
from tests.checkpoint.test_resize import kinds
from tests.conftest import ALL, SOAK
from tests.support.buffers import KINDS, bits, jitted, jitted_draw
from tests.support.checkpointed_run import EXAMPLE, added, begun, expected, items, numbers, step
from tests.support.refusals import refused
from tests.support.steps import nth, plain_step


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
        if isinstance(replay.sampler, ConsumingSampler):
            state, batch = replay.pop(state, key)
        else:
            batch = replay.sample(state, key)
        if isinstance(replay.sampler, PrioritySampler):
            priority = jax.random.uniform(key, batch.probability.shape)
            state = replay.update_priorities(state, batch.index, priority)
        return state, (batch, replay.size(state))

    return jax.jit(lambda state: jax.lax.scan(once, state, (steps, masks, np.arange(num_steps))))


@kinds
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
        assert bits(rows.split(restored)[1]) == bits(rows.split(state)[1])
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
    replay = items(capacity=4096, num_envs=2)
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
    for end in range(2520, 9000, 500):  # several times around the ring
        state = added(replay, state, end - 500, 500)
        checkpointer.save(state, end)
        assert size_of(tmp_path) < 2 * full  # overwritten rows are deleted
    assert checkpointer.all_steps() == [8020, 8520]
    for end in (8020, 8520):
        check_restored(checkpointer, end, end)


def test_a_save_after_a_drop_has_none_of_its_rows(tmp_path, monkeypatch):
    """Also where earlier saves have them, and rows were added since."""
    monkeypatch.setattr(planning, "_COMPARED", 1)
    sizes = {"capacity": 512, "num_envs": 2, "batch_size": 8}
    replay = jr.prioritized(**sizes, autoreset="next_step", allow_mask=True)
    run, r = jr.jit(replay), np.random.default_rng(0)
    steps = lambda time: plain_step(np.zeros((time, 2))).replace(
        obs=r.random((time, 2, 3)).astype(np.float32), terminated=r.random((time, 2)) < 0.02
    )
    example = nth(steps(1), (0, 0))
    state, checkpointer = run.init(example), Checkpointer(tmp_path, replay, chunk_bytes=4096)
    sizes = []
    for number in range(12):
        state = run.extend(state, steps(40))
        if number % 3 == 1:
            sizes.append(int(run.size(state)))
            state = run.drop(state, np.array([number % 2 == 0, True]))
            sizes.append(int(run.size(state)))
            state = run.extend(state, steps(int(r.integers(0, 3))))
        checkpointer.save(state, number)
        assert bits(checkpointer.restore(example)) == bits(state)
    assert min(before - after for before, after in zip(sizes[::2], sizes[1::2], strict=True)) > 5


def masked(seed, times, num_envs, share=0.5):
    """Yield the steps at some times, each with a random mask."""
    r = np.random.default_rng(seed)
    for t in times:
        yield step(t, num_envs), r.random(num_envs) < share


def test_groups_whose_rows_were_written_are_saved_again(tmp_path, monkeypatch):
    """Also where rows were added meanwhile, a ring went round, and few rows are compared."""
    monkeypatch.setattr(planning, "_COMPARED", 1)
    num_envs, length, r = 3, 4096, np.random.default_rng(0)
    buffer = jr.items(capacity=num_envs * length, num_envs=num_envs, batch_size=8, allow_write=True)
    example = {"n": np.int32(0), "x": np.float32(0), "y": np.zeros(2, bool), "z": np.complex64(0)}
    run, ones = jr.jit(buffer), lambda leaf, time: np.ones((time, num_envs, *leaf.shape))
    block = lambda time: (
        {name: ones(leaf, time).astype(leaf.dtype) for name, leaf in example.items()}
        | {"x": r.random((time, num_envs), np.float32)}
    )
    state, checkpointer = run.extend(run.init(example), block(3000)), Checkpointer(tmp_path, buffer)
    files = lambda: {path.name for path in (tmp_path / "rows").iterdir()}
    num_again = []
    for number in range(7):
        before = files() if number else set()
        if number % 3 == 2:
            state = run.extend(state, block(900))
        if number % 2:
            batch = run.get(state, np.int32([number, length, length + 2500]))
            state = run.write(state, batch.index, {"x": np.float32([number, -1, 7])})
        checkpointer.save(state, number)
        num_again.append(len(files() - before))
        assert bits(Checkpointer(tmp_path, buffer).restore(example)) == bits(state)
        if number % 6 == 4:  # nothing changed
            assert not num_again[-1]
    assert 0 < max(num_again[1:]) < num_again[0]
    # States that went on otherwise, by equally many writes: with other values, to swapped rows, to
    # swapped elements, to another row, in another order, and in another order of one call.
    one, two = np.float32([[3, 4, 5], [4, 3, 5]])
    left, right = np.eye(2, dtype=bool).repeat(3, axis=0).reshape(2, 3, 2)
    first, second, twice = ([0, 1, 2], [1, 0, 2], [0, 0, 2])
    branches = [
        [(first, {"x": one + 1})],
        [(first, {"x": one})],
        [(first, {"x": two})],
        [(first, {"y": left})],
        [(first, {"y": right})],
        [(first, {"n": np.full(3, 2**24, np.int32)})],
        [(first, {"n": np.full(3, 2**24 + 1, np.int32)})],
        [(first, {"z": np.full(3, 1 + 1j, np.complex64)})],
        [(first, {"z": np.full(3, 1 + 2j, np.complex64)})],
        [(first[:1], {"x": one[:1]})],
        [(second[:1], {"x": one[:1]})],
        [(first, {"x": one}), (first, {"x": two})],
        [(first, {"x": two}), (first, {"x": one})],
        [(twice, {"x": one})],
        [(twice, {"x": two})],
    ]
    for number, branch in enumerate(branches, 7):
        other = jax.tree.map(jnp.copy, state)
        for places, values in branch:
            index = jax.tree.map(lambda leaf, places=places: leaf[np.array(places)], batch.index)
            other = run.write(other, index, values)
        checkpointer.save(other, number)
        assert bits(Checkpointer(tmp_path, buffer).restore(example)) == bits(other), branch
    stale = batch.index.replace(lap=batch.index.lap + 9)
    state = run.write(state, stale, {"x": np.ones(3, np.float32)})
    assert int(run.metrics(state)["num_ignored_writes"]) == 3


@pytest.mark.parametrize(("num_envs", "steps_a_save"), [(2, 1), (64, 3)])
def test_small_saves_do_not_pile_up(num_envs, steps_a_save, tmp_path):
    """Save a few rows at a time, of two envs, or of some of many, and at the end no new ones."""
    mask = num_envs > 2
    buffer = items(capacity=4096, num_envs=num_envs, allow_mask=mask)
    checkpointer, run = Checkpointer(tmp_path, buffer), jr.jit(buffer)
    state, last = run.init(EXAMPLE), 149 if SOAK else 70
    for number in range(last + 10):
        for one, its_mask in masked(number, range(steps_a_save * (number < last)), num_envs):
            state = run.add(state, one, its_mask if mask else None)
        checkpointer.save(state, number)
        # two groups for each sixteenth of the ring, and the newest few
        assert len(groups_of(checkpointer)) < 2 * 16 + 8
    check_is(checkpointer, state)


@pytest.mark.parametrize("mask", [*[False] * ALL, True])
def test_parts_have_groups_of_their_own_which_stay_few(mask, tmp_path, monkeypatch):
    """Save as if three parts, such as those of several devices, had the envs. Now and then, rewind
    the run by up to five saves, after which all rows are written."""
    buffer = items(capacity=2048, num_envs=4, allow_mask=mask)
    bounds = [0, 1, 3, 4]
    parts_of = Parts.of
    monkeypatch.setattr(Parts, "of", lambda state: parts_of(state)._replace(bounds=bounds))
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=400_000, max_to_keep=30)
    run, r = jr.jit(buffer), np.random.default_rng(0)
    state, saved, num_rewinds = run.init(EXAMPLE), [], 0
    for number in range(30 + 400 * SOAK):
        for one, its_mask in masked(number, r.integers(10**6, size=r.integers(1, 40)), 4):
            state = run.add(state, one, its_mask if mask else None)
        checkpointer.save(state, number, blocking=number % 3 > 0)
        checkpointer.wait_until_finished()
        saved.append(rows.copied(state))
        found = groups_of(checkpointer)
        assert len(found) < 24  # a group has at most 512 rows here
        for group in found:
            assert group.env < group.env_stop <= min(stop for stop in bounds if group.env < stop)
        check_is(Checkpointer(tmp_path, buffer), state)
        if r.random() < 0.2:
            state = rows.copied(saved[r.integers(max(0, number - 5), number + 1)])
            num_rewinds += 1
    assert num_rewinds > 2
    check_intact(checkpointer.verify())


@pytest.mark.parametrize("chunk_bytes", [400, 3000])
def test_streams_of_different_speed(chunk_bytes, tmp_path):
    """Save streams of very different lengths, two of them empty. Groups have fewer or more rows
    than there are envs."""
    replay = items(capacity=8 * 30, num_envs=8, allow_mask=True)
    checkpointer, run = Checkpointer(tmp_path, replay, chunk_bytes=chunk_bytes), jr.jit(replay)
    state, share = run.init(EXAMPLE), np.array([0.9, 0.1, 0.5, 0.3, 0.0, 0.2, 0.1, 0.0])
    for number in range(4):
        for given in masked(number, range(25 * number, 25 * number + 25), 8, share):
            state = run.add(state, *given)
        checkpointer.save(state, number, blocking=number % 2 > 0)
        checkpointer.wait_until_finished()
        check_is(checkpointer, state)


# Which checkpoint a save goes on from.


def test_others_may_delete_what_a_save_would_go_on_from(tmp_path):
    replay = items()
    wide, narrow = (Checkpointer(tmp_path, replay, max_to_keep=most) for most in (3, 1))
    for end in (4, 6, 8):
        wide.save(begun(replay, end), end)
    narrow.save(added(replay, narrow.restore(EXAMPLE, 4), 4, 1), 5)  # its base is the oldest
    assert (narrow.all_steps(), narrow.latest_step()) == ([5], 5)
    check_restored(narrow, 5)
    with refused("has a newer checkpoint, by this process", PathInUseError):
        wide.save(begun(replay, 9), 9)
    wide.save(added(replay, wide.restore(EXAMPLE), 5, 4), 9)
    assert wide.all_steps() == [5, 9]
    check_restored(narrow, 9)


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


# A save beside a run that goes on.


def pointers(state):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.rows.steps)]


def slowly(store, monkeypatch):
    """Let a store take some time for each file."""
    write = store.write
    monkeypatch.setattr(store, "write", lambda *given: (time.sleep(0.02), write(*given)))


@pytest.mark.parametrize("num_envs", [*[1] * ALL, 4])
def test_a_save_that_does_not_wait_is_of_the_state_that_it_was_given(
    num_envs, tmp_path, monkeypatch
):
    """While it runs, the whole ring is overwritten."""
    replay = items(capacity=1024 * num_envs, num_envs=num_envs)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=64 * 1024 * num_envs)
    slowly(checkpointer._store, monkeypatch)
    buffer, state = jr.jit(replay), begun(replay, 1500)
    before = pointers(state)
    checkpointer.save(state, 1500, blocking=False)
    assert checkpointer.is_saving
    with refused("restore: a save is under way", RuntimeError):
        checkpointer.restore(EXAMPLE)
    assert checkpointer.all_steps() == []
    for t in range(1500, 2600):
        state = buffer.add(state, step(t, num_envs))
    assert pointers(state) == before  # every add was in place
    checkpointer.wait_until_finished()
    assert not checkpointer.is_saving
    check_restored(checkpointer, 1500)
    checkpointer.save(state, 2600, blocking=False)
    checkpointer.wait_until_finished()
    checkpointer.close()
    check_restored(checkpointer, 2600)


@pytest.mark.parametrize(("num_envs", "row_bytes"), [(1, 100), (4, 40_000)])
@pytest.mark.parametrize("level", [None, *[1] * ALL])
def test_a_save_that_waits_leaves_the_rows_in_place(num_envs, row_bytes, level, tmp_path):
    """Write rows from the state's memory, also across the ring's end. The save then releases that
    memory, so adds stay in place."""
    replay = items(capacity=64 * num_envs, num_envs=num_envs)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=2**20, compression_level=level)
    buffer, r = jr.jit(replay), np.random.default_rng(0)
    example = np.zeros(row_bytes, np.uint8)
    state = buffer.init(example)
    for _ in range(7):
        before = pointers(state)
        images = r.integers(256, size=(30, num_envs, row_bytes), dtype=np.uint8)
        state = buffer.extend(state, images)
        assert pointers(state) == before
        checkpointer.save(state)
        check_is(checkpointer, rows.copied(state), example)


def test_priorities_are_those_of_the_call(tmp_path, monkeypatch):
    """Save priorities with `blocking=False`, also without new rows."""
    case = next(case for case in KINDS if case.name.startswith("prioritized same_step"))
    replay = case.replay(capacity=240)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=2000)
    slowly(checkpointer._store, monkeypatch)
    state = go_on(case, replay, 25)(jr.jit(replay).init(case.example()))[0]
    for number in range(3):  # only the first save has new rows
        wanted = bits(rows.split(state)[1])
        checkpointer.save(state, number, blocking=False)
        batch = jitted_draw(replay)(state, jax.random.key(number))
        priority = np.arange(8, dtype=np.float32) + number
        state = jr.jit(replay).update_priorities(state, batch.index, priority)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(case.example(), number)
        assert bits(rows.split(restored)[1]) == wanted != bits(rows.split(state)[1])


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(),
    reason="needs Linux, whose kernel says how much memory there was",
)
@pytest.mark.parametrize(
    ("gigabytes", "row"),
    [(0.3, 100_000), *[(4, 100_000), (8, 100_000), (0.1, 4), (0.5, 4)] * SOAK],
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
    for other in (jr.jit(replay), jr.Replay(replay)):
        with refused(taken):
            Checkpointer(tmp_path, other)
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


def test_leaves_that_differ_are_named(tmp_path):
    """Also narrow numbers, which have the same bits."""
    replay = items()
    stored = {"a": np.zeros(3, jnp.float8_e5m2), "b": np.zeros(100, np.uint8)}
    other = {"a": np.zeros(3, jnp.float8_e4m3fn), "b": np.zeros(99, np.uint8)}
    checkpoint.save(tmp_path, replay, jr.jit(replay).init(stored))
    with refused(r"b: stored uint8\[100\], expected uint8\[99\]") as caught:
        checkpoint.restore(tmp_path, replay, other)
    assert "a: stored float8_e5m2[3], expected float8_e4m3fn[3]" in str(caught.value)


def test_metadata_and_paths_of_any_kind(tmp_path):
    replay, state = items(), begun(items(), 4)
    for path in (tmp_path / "a%20b c#d", "memory://somewhere/else"):
        one, other = Checkpointer(path, replay, max_to_keep=1), Checkpointer(path, replay)
        for number in range(3):
            one.save(state, number, metadata={"episodes": number})
        assert one.all_steps() == [2]
        for _ in range(2):
            check_is(other, state)
            assert other.metadata == {"episodes": 2}
            other.metadata["episodes"] = 4  # the caller's copy
    assert [path.name for path in tmp_path.iterdir()] == ["a%20b c#d"]


@pytest.mark.parametrize("chunk_bytes", [64, 2**20])  # smaller and larger than the state
def test_a_rollout_is_saved_too(tmp_path, chunk_bytes):
    rollout = jr.rollout(length=5, num_envs=2, autoreset="next_step")
    values, flags = np.ones(2, np.float32), np.zeros(2, bool)
    step = jr.Step(values, values, values, terminated=flags, truncated=flags)
    example, run = nth(step, 0), jr.jit(rollout)
    checkpointer = Checkpointer(tmp_path, rollout, chunk_bytes=chunk_bytes)
    state = run.init(example)
    for number, wait in enumerate((True, False)):
        state = run.add(state, step)
        checkpointer.save(state, number, blocking=wait)
        checkpointer.wait_until_finished()
        check_is(checkpointer, state, example)


def test_a_row_of_all_envs_may_be_larger_than_a_file(tmp_path):
    """As of images of many envs: then a file has some envs alone, also where rows may change."""
    buffer = jr.items(capacity=64, num_envs=8, batch_size=4, allow_write=True)
    state = buffer.init(np.zeros(100, np.uint8))
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=2_000, progress=False)
    for number in range(12):
        state = jitted(buffer, "add")(state, np.full((8, 100), number, np.uint8))
        index = jitted(buffer, "sample")(state, jax.random.key(number)).index
        state = jitted(buffer, "write")(state, index, np.full((4, 100), 100 + number, np.uint8))
        checkpointer.save(state, number)
    restored = checkpointer.restore(np.zeros(100, np.uint8))
    jax.tree.map(np.testing.assert_array_equal, restored, state)

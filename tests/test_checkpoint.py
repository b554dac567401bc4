"""Checkpoints: a restored state goes on to the last bit, a save writes what is new, and what is broken is never taken for whole."""

import contextlib
import functools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings

import checkpointed_run
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffers import KINDS, draw
from checkpointed_run import EXAMPLE, expected, numbers, step
from conftest import SOAK

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import BrokenError, Checkpointer, rows, store

kinds = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


@functools.cache
def go_on(case, replay, num_steps):
    """A function of a state: add, draw, and update the priorities, so often. The state after it, and all that was drawn."""
    steps = case.step(5, time=num_steps)
    masks = case.mask(replay, 6, num_steps)

    def once(state, given):
        step, mask, seed = given
        state = replay.add(state, step, *mask)
        key = jax.random.key(seed)
        if replay.sampler.consumes:
            state, batch = replay.take(state, key)
        else:
            batch = draw(replay, state, key)
        if replay.sampler.has_priorities:
            state = replay.update_priorities(state, batch.index, jax.random.uniform(key, batch.probability.shape))
        return state, (batch, replay.size(state))

    return jax.jit(lambda state: jax.lax.scan(once, state, (steps, masks, jnp.arange(num_steps))))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@kinds
def test_a_restored_state_goes_on_to_the_last_bit(case, tmp_path):
    """Saved in the middle of episodes, before the ring is full, after it went round, and after a clear; each on top of the one before."""
    replay = case.replay(capacity=480)
    run, checkpointer = go_on(case, replay, 50), Checkpointer(tmp_path, replay, chunk_bytes=8192, keep=9)
    state, states = replay.init(case.example()), []
    for number in range(6):
        checkpointer.save(state, number)
        states.append(state)
        state = run(replay.clear(state) if number == 4 else state)[0]
    for number, state in enumerate(states):
        restored = checkpointer.restore(case.example(), number)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(rows.split(restored)[1]) == bits(rows.split(state)[1])
        for _ in range(20 if SOAK else 1):
            (restored, got), (state, wanted) = run(restored), run(state)
            assert bits(got) == bits(wanted)


@hypothesis.given(data=hypothesis.strategies.data())
def test_every_new_row_is_in_one_group_and_those_first_that_go_first(data):
    integers = hypothesis.strategies.integers
    num_envs, length, most = (data.draw(integers(1, top)) for top in (6, 9, 12))
    end = np.array([data.draw(integers(0, 40)) for _ in range(num_envs)])
    first = np.array([data.draw(integers(max(0, e - length), e)) for e in end])
    since = np.array([data.draw(integers(0, 40)) for _ in range(num_envs)])
    seen, nearest_before = [], -1
    for nearest, picked in rows.groups_of(rows.Span(first, end), since, length, most):
        distance = picked.number + length - end[picked.env]  # rows that may be written before it is lost
        assert 1 <= len(picked.env) <= most
        assert distance.min() >= nearest >= nearest_before
        nearest_before = nearest
        seen += list(zip(picked.env.tolist(), picked.number.tolist(), strict=True))
    assert sorted(seen) == [(env, number) for env in range(num_envs) for number in range(max(first[env], since[env]), end[env])]
    assert rows.from_runs(rows.in_runs(end)).tolist() == end.tolist()


def items(capacity=64, num_envs=4, **options):
    return jr.items(capacity=capacity, num_envs=num_envs, batch_size=8, **options)


def added(replay, state, start, count):
    buffer = jr.jit(replay)
    for t in range(start, start + count):
        state = buffer.add(state, step(t, replay.num_envs))
    return state


def size_of(path):
    return sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())


def test_a_save_writes_what_is_new_and_forgets_what_is_old(tmp_path):
    replay = items(capacity=4096, num_envs=2)
    checkpointer = Checkpointer(tmp_path, replay, keep=2, level=None, chunk_bytes=64 * 1024)
    state = added(replay, replay.init(EXAMPLE), 0, 2000)
    checkpointer.save(state, 2000)
    full = size_of(tmp_path)
    assert full > 4000 * 104
    state = added(replay, state, 2000, 20)
    checkpointer.save(state, 2020)
    assert size_of(tmp_path) - full < 0.05 * full
    for end in range(2500, 9000, 500):  # round the ring, several times
        state = added(replay, state, end - 500 if end > 2500 else 2020, 500 if end > 2500 else 480)
        checkpointer.save(state, end)
        assert size_of(tmp_path) < 2 * full  # what is overwritten is deleted
    assert checkpointer.steps() == [8000, 8500]
    for end in (8000, 8500):
        assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE, end)) == expected(replay, end)


def test_a_run_that_goes_back_does_not_mix_with_the_one_it_left(tmp_path):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay)
    state = added(replay, replay.init(EXAMPLE), 0, 5)
    checkpointer.save(state, 5)
    checkpointer.save(added(replay, jax.tree.map(jnp.copy, state), 500, 4), 9)
    back = checkpointer.restore(EXAMPLE, 5)
    back = added(replay, back, 5, 3)
    checkpointer.save(back, 8)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 8)) == expected(replay, 8)
    fresh = added(replay, replay.init(EXAMPLE), 0, 30)  # another run under the same path
    for number in (1, 2):
        Checkpointer(tmp_path, replay).save(fresh, number)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 2)) == expected(replay, 30)
    checkpointer.save(added(replay, replay.init(EXAMPLE), 0, 3), 3)  # less than was saved here before: all of it
    assert numbers(replay, checkpointer.restore(EXAMPLE, 3)) == expected(replay, 3)


def test_only_rows_of_the_same_history_are_left_out(tmp_path):
    """A state that was made anew, and one that went another way, have rows of the same numbers."""
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay)
    start = added(replay, replay.init(EXAMPLE), 0, 8)
    checkpointer.save(start, 8)
    one, other = (added(replay, jax.tree.map(jnp.copy, start), 8 + 100 * way, 4) for way in (0, 1))
    checkpointer.save(one, 12)
    checkpointer.save(other, 13)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 13))[0][-5:] == [7, 108, 109, 110, 111]
    anew = added(replay, replay.init(EXAMPLE), 20, 14)
    checkpointer.save(anew, 14)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 14))[0] == list(range(20, 34))


def test_others_may_delete_what_a_save_would_go_on_from(tmp_path):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay, keep=1)
    states = [added(replay, replay.init(EXAMPLE), 0, 4)]
    checkpointer.save(states[0], 4)
    checkpoint.save(tmp_path, replay, states[0], step=5)  # keeps one: not that of step 4
    checkpointer.save(added(replay, jax.tree.map(jnp.copy, states[0]), 4, 2), 6)
    assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE)) == expected(replay, 6)
    wide = Checkpointer(tmp_path / "x", replay, keep=3)
    for end in (4, 6, 8):
        states.append(added(replay, replay.init(EXAMPLE), 0, end))
        wide.save(states[-1], end)
    narrow = Checkpointer(tmp_path / "x", replay, keep=1)
    state = narrow.restore(EXAMPLE, 4)
    narrow.save(added(replay, state, 4, 1), 5)
    assert numbers(replay, Checkpointer(tmp_path / "x", replay).restore(EXAMPLE, 5)) == expected(replay, 5)
    assert narrow.steps() == [5]


def test_what_cannot_be_read_now_is_not_deleted(tmp_path, monkeypatch):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay)
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    checkpointer.save(state, 4)

    def fails(name):
        raise ValueError("UNAVAILABLE: try again")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._store, "get", fails)
        for call in (lambda: checkpointer.save(state, 5), lambda: checkpointer.restore(EXAMPLE)):
            with pytest.raises(ValueError, match="UNAVAILABLE"):
                call()
    assert checkpointer.steps() == [4]
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 4)


def test_what_is_not_ours_stays(tmp_path):
    for name in ("rows/mine.txt", "rest/photos/one.png", "manifests/notes.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    replay = items()
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    for number in range(3):
        checkpoint.save(tmp_path, replay, state, step=number)
    assert len(list(tmp_path.rglob("*.txt"))) == len(list(tmp_path.rglob("*.png"))) == len(list(tmp_path.rglob("notes.json"))) == 1
    other = jr.items(capacity=64, num_envs=4, batch_size=8, masked=True)
    with pytest.raises(ValueError, match="has the generations of another buffer, or of other steps; give each a path of its own"):
        checkpoint.save(tmp_path, other, other.init(EXAMPLE))
    again = jr.items(capacity=64, num_envs=4, batch_size=100, min_size=7)  # what is drawn is no matter
    assert numbers(again, checkpoint.restore(tmp_path, again, EXAMPLE)) == expected(again, 4)


def test_small_saves_do_not_pile_up(tmp_path):
    replay = items(capacity=4096, num_envs=2)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=64 * 1024)
    state = replay.init(EXAMPLE)
    for end in range(1, 150):
        state = added(replay, state, end - 1, 1)
        checkpointer.save(state, end)
    assert len(checkpointer._base.groups) < 12
    for end in range(150, 160):  # nothing new
        checkpointer.save(state, end)
    assert len(checkpointer._base.groups) < 12
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 149)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("chunk_bytes", [400, 3000])
def test_streams_of_different_speed(wait, chunk_bytes, tmp_path):
    """One env is far ahead of the others, the last one has nothing; a group holds fewer rows than there are envs, or more."""
    replay = jr.items(capacity=8 * 30, num_envs=8, batch_size=8, masked=True)
    add, checkpointer = jr.jit(replay).add, Checkpointer(tmp_path, replay, chunk_bytes=chunk_bytes)
    state, r = replay.init(EXAMPLE), np.random.default_rng(0)
    for number in range(4):
        for t in range(25):
            mask = r.random(8) < [0.9, 0.1, 0.5, 0.3, 0.0, 0.2, 0.1, 0.0]
            state = add(state, step(25 * number + t, 8), mask)
        checkpointer.save(state, number, wait=wait)
        for _ in range(2):
            checkpointer.pump(state)
        checkpointer.finish(state)
        restored = checkpointer.restore(EXAMPLE)
        first, end = rows.span_of(rows.heads_of(state), 30, 8)
        for env in range(8):
            held = env * 30 + np.arange(first[env], end[env]) % 30
            for leaf, other in zip(jax.tree.leaves(restored.streams.steps), jax.tree.leaves(state.streams.steps), strict=True):
                np.testing.assert_array_equal(leaf[held], other[held])


@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_save_that_does_not_wait_is_of_the_state_that_it_was_given(num_envs, tmp_path):
    replay = items(capacity=1024 * num_envs, num_envs=num_envs)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=8 * 1024 * num_envs)
    buffer, state = jr.jit(replay), added(replay, replay.init(EXAMPLE), 0, 1500)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)}
    checkpointer.save(state, 1500, wait=False)
    for t in range(1500, 2600):  # the whole ring is overwritten meanwhile
        checkpointer.pump(state)
        state = buffer.add(state, step(t, num_envs))
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)} == pointers  # in place all the time
    checkpointer.finish(state)
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 1500)
    checkpointer.save(state, 2600, wait=False)
    checkpointer.finish(state)
    checkpointer.close()
    assert numbers(replay, checkpointer.restore(EXAMPLE, 2600)) == expected(replay, 2600)


def test_a_save_without_pumps_is_refused_and_the_one_before_stays(tmp_path):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=500)
    state = added(replay, replay.init(EXAMPLE), 0, 20)
    checkpointer.save(state, 20)
    state = added(replay, state, 20, 16)
    checkpointer.save(state, 36, wait=False)
    state = added(replay, state, 36, 16)
    with pytest.raises(RuntimeError, match=r"rows were overwritten, or cleared, before .*: call pump\(state\) before each add"):
        checkpointer.finish(state)
    assert checkpointer.steps() == [20]
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 20)
    checkpointer.save(state, 52, wait=False)
    with pytest.raises(RuntimeError, match="this state is not of the run that is being saved"):
        checkpointer.finish(replay.init(EXAMPLE))
    checkpointer.save(state, 52, wait=False)
    with pytest.raises(RuntimeError, match=r"finish\(state\) before a clear"):
        checkpointer.finish(added(replay, replay.clear(jax.tree.map(jnp.copy, state)), 0, 1))
    checkpointer.save(state, 52, wait=False)
    with pytest.raises(ZeroDivisionError), checkpointer:  # an error of the caller's goes on
        _ = 1 / 0
    assert checkpointer.steps() == [20]
    checkpointer.save(state, 52, wait=False)
    with pytest.raises(RuntimeError, match="a save was not finished, and is given up"):
        checkpointer.close()
    checkpointer.save(state, 52)
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 52)


def test_an_interrupt_leaves_no_thread(tmp_path, monkeypatch):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=500)
    state, number_of_threads = added(replay, replay.init(EXAMPLE), 0, 20), threading.active_count()
    checkpointer.save(state, 20)

    def interrupted(state, index):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rows, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(state, 21)

    def fails(*arguments):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._store, "create", fails)
        with pytest.raises(OSError, match="the disk is full"):
            checkpointer.save(state, 22)
        with contextlib.suppress(OSError):  # perhaps so soon
            checkpointer.save(state, 23, wait=False)
            with pytest.raises(OSError, match="the disk is full"):
                checkpointer.finish(state)
    assert threading.active_count() == number_of_threads
    assert checkpointer.steps() == [20]
    checkpointer.save(state, np.int64(24))
    with pytest.raises(TypeError, match="JSON"):
        checkpointer.save(state, 25, notes={"x": np.zeros(3)})
    assert checkpointer.steps() == [20, 24]


def test_what_is_damaged_is_never_taken_for_whole(tmp_path):
    """Bits flipped, files cut short, and files gone, anywhere: an error that names it, or the generation before."""
    replay, source = items(), tmp_path / "source"
    checkpointer = Checkpointer(source, replay, chunk_bytes=1000)
    state = added(replay, replay.init(EXAMPLE), 0, 20)
    checkpointer.save(state, 20)
    checkpointer.save(added(replay, state, 20, 5), 25)
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
    r, outcomes = random.Random(0), []
    for trial in range(200 if SOAK else 50):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(source, broken)
        file = broken / r.choice(files)
        content = bytearray(file.read_bytes())
        if trial % 3 == 0:
            file.write_bytes(content[: r.randrange(len(content))])
        elif trial % 10 == 1:
            file.unlink()
        else:
            content[r.randrange(len(content))] ^= 1 << r.randrange(8)
            file.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                restored = Checkpointer(broken, replay).restore(EXAMPLE)
            except BrokenError:
                outcomes.append("refused")
                continue
        end = int(restored.streams.head) + 16 * int(restored.streams.lap)
        assert numbers(replay, restored) == expected(replay, end)
        outcomes.append(end)
        if end == 20:
            assert "step 20 was read, since this is broken" in str(caught[-1].message)
    # The newest is whole where only what the older one alone has was hit.
    assert outcomes.count("refused") > 5
    assert outcomes.count(20) > 5


@pytest.mark.parametrize("how", ["wait", "pump"])
def test_a_run_that_is_killed_leaves_a_generation_that_is_whole(how, tmp_path):
    """Wherever it is killed, in a save or in the deletion of what is old; each run goes on from what the one before has left."""
    r, replay, ends = random.Random(how), checkpointed_run.REPLAY, [0]
    for _ in range(100 if SOAK else 10):
        script = [sys.executable, checkpointed_run.__file__, tmp_path, how]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for _ in range(r.randrange(1, 4)):
                assert run.stdout.readline().startswith("saved")
            time.sleep(r.random() * 0.05)
            run.kill()
        checkpointer = Checkpointer(tmp_path, replay)
        state, ends = checkpointer.restore(EXAMPLE), [*ends, checkpointer.steps()[-1]]
        assert numbers(replay, state) == expected(replay, ends[-1])
        assert ends[-1] >= ends[-2]
    assert ends[-1] > 10
    checkpointer.save(state, 10**9)  # what was left behind is gone
    folders = {path.name[:10] for kind in ("rest", "rows") for path in (tmp_path / kind).iterdir()}
    assert {manifest.folder for manifest in checkpointer._generations.read()[0]} <= folders
    assert len(list((tmp_path / "rest").iterdir())) <= 3


FULL = """
import resource, signal, sys
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer, add = Checkpointer(sys.argv[1], run.REPLAY, level=None), run.jr.jit(run.REPLAY).add
state = run.REPLAY.init(run.EXAMPLE)
for t in range(60):
    state = add(state, run.step(t, 4))
    if t == 9:
        checkpointer.save(state, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
for wait in (True, False):
    try:
        checkpointer.save(state, 60, wait=wait)
        checkpointer.finish(state)
    except Exception as error:
        print(type(error).__name__)
assert run.numbers(run.REPLAY, checkpointer.restore(run.EXAMPLE)) == run.expected(run.REPLAY, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(state, 60)
assert run.numbers(run.REPLAY, checkpointer.restore(run.EXAMPLE)) == run.expected(run.REPLAY, 60)
print("whole")
"""


def test_a_full_disk_leaves_the_generation_before(tmp_path):
    folder = pathlib.Path(checkpointed_run.__file__).parent
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, cwd=folder)
    assert done.stdout.split()[2:] == ["whole"], done.stderr


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux, whose kernel says how much memory there was")
@pytest.mark.parametrize(("gigabytes", "row"), [(1, 100_000), (0.1, 4), *([(4, 100_000), (8, 100_000), (0.5, 4)] if SOAK else [])])
def test_beside_the_state_there_are_few_chunks(gigabytes, row, tmp_path):
    script = pathlib.Path(checkpointed_run.__file__).parent / "checkpoint_memory.py"
    done = subprocess.run([sys.executable, script, tmp_path, str(gigabytes), str(row)], capture_output=True, text=True)
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("save", "save_more", "restore"):
        assert found[name] <= 3 * 64 * 2**20, (name, found)
    assert found["full_bytes"] >= found["state"] >= gigabytes * 0.99e9
    assert row < 1000 or found["more_bytes"] <= 0.05 * found["full_bytes"]


def test_the_example_and_the_buffer_must_fit(tmp_path):
    replay = items()
    with pytest.raises(FileNotFoundError, match="there is no generation under /"):
        checkpoint.restore(tmp_path, replay, EXAMPLE)
    checkpoint.save(tmp_path, replay, added(replay, replay.init(EXAMPLE), 0, 5), step=5)
    with pytest.raises(FileNotFoundError, match="there is no generation of step 6"):
        checkpoint.restore(tmp_path, replay, EXAMPLE, step=6)
    with pytest.raises(ValueError, match=r"step 5 is of another buffer:\n.*capacity=64.*\n.*\n.*capacity=128"):
        checkpoint.restore(tmp_path, items(capacity=128), EXAMPLE)
    with pytest.raises(ValueError, match=r"steps.bytes: stored uint8\[100\], expected uint8\[99\]") as caught:
        checkpoint.restore(tmp_path, replay, {**EXAMPLE, "bytes": jnp.zeros(99, jnp.uint8), "more": 0.0})
    assert "steps.more: stored nothing, expected float32[]" in str(caught.value)
    with pytest.raises(ValueError, match="save: the state is of another buffer, of 64 rows, not 128"):
        checkpoint.save(tmp_path, items(capacity=128), replay.init(EXAMPLE))
    with pytest.raises(ValueError, match="keep must be an int of at least 1"):
        Checkpointer(tmp_path, replay, keep=0)


def test_only_a_buffer_and_its_state_are_taken(tmp_path):
    replay = items()
    for other in (jr.jit(replay), jr.mix(one=(replay, 2)), jr.Replay(replay)):
        with pytest.raises(ValueError, match="Checkpointer: replay must be a ReplayBuffer or a Rollout, got "):
            Checkpointer(tmp_path, other)
    with pytest.raises(ValueError, match="save: expected a ReplayState alone, got tuple; the rest of a carry goes elsewhere"):
        Checkpointer(tmp_path, replay).save((replay.init(EXAMPLE), 1))
    assert not list(tmp_path.rglob("*.json"))


def test_it_is_said_what_was_restored(tmp_path):
    replay = items()
    checkpointer, state = Checkpointer(tmp_path, replay), added(replay, replay.init(EXAMPLE), 0, 4)
    for number in (1, 2):
        checkpointer.save(state, number, notes={"number": number})
    newest = sorted((tmp_path / "rest").iterdir())[-1]
    description = newest / "streams.head" / "zarr.json"
    description.unlink()
    description.symlink_to(description)  # cannot be read, and not because it is gone
    other = Checkpointer(tmp_path, replay)
    with pytest.warns(UserWarning, match="restore: step 1 was read, since this is broken:\n  step 2: rest/.*streams.head/zarr.json"):
        other.restore(EXAMPLE)
    assert (other.step, other.notes) == (1, {"number": 1})
    with pytest.raises(BrokenError, match=r"restore: no step 2 under .* can be restored \(there are 1, 2\):\n  step 2: rest/"):
        other.restore(EXAMPLE, 2)


AT_EXIT = """
import sys
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

state = run.REPLAY.init(run.EXAMPLE)
checkpointer = Checkpointer(sys.argv[1], run.REPLAY)
if sys.argv[2] == "fails":
    def sync(folder):
        raise OSError("no space left")
    checkpointer._store.sync = sync
add = run.jr.jit(run.REPLAY).add
for t in range(9):
    state = add(state, run.step(t, 4))
checkpointer.save(state, 9, wait=False)
if sys.argv[2] != "unfinished":
    while not checkpointer._saving.is_copied:
        checkpointer.pump(state, 0)
else:
    checkpointer._saving._next = (0, None)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("well", ""), ("fails", "the last checkpoint was not written: no space left"), ("unfinished", "was not finished, and is given up")],
)
def test_the_end_of_a_program_waits_and_says_what_failed(how, said, tmp_path):
    folder = pathlib.Path(checkpointed_run.__file__).parent
    done = subprocess.run([sys.executable, "-c", AT_EXIT, tmp_path, how], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
    assert Checkpointer(tmp_path, checkpointed_run.REPLAY).steps() == ([] if said else [9])


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_the_disk_has_every_file_before_the_manifest_is_there(has_syncfs, tmp_path, monkeypatch):
    replay, synced, real = items(), set(), os.fsync

    def fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if not has_syncfs:
        monkeypatch.setattr(store, "_sync_all", lambda folder: None)
    Checkpointer(tmp_path / "new" / "run", replay).save(added(replay, replay.init(EXAMPLE), 0, 4))
    paths = {str(path) for path in [tmp_path, *tmp_path.rglob("*")]}
    manifest = next(path for path in paths if path.endswith(".json") and "manifests" in path)
    assert {path for path in synced if path.startswith(str(tmp_path))} == {*paths - {manifest}, f"{manifest}.new"}


def test_notes_and_names_of_any_kind(tmp_path):
    replay = jr.items(capacity=4, batch_size=2)
    example = {"a/b": 0.0, "..": np.zeros((2, 0)), "": {"é": True}}
    state = replay.add(replay.init(example), jax.tree.map(lambda x: jnp.asarray(x)[None], example))
    checkpointer = Checkpointer(tmp_path / "x", replay)
    checkpointer.save(state, notes={"episodes": 3})
    other = Checkpointer(f"file://{tmp_path}/x/", replay)
    assert bits(other.restore(example)) == bits(state)
    assert other.notes == {"episodes": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    for path in (tmp_path / "a%20b c#d", "memory://somewhere/else"):
        one = Checkpointer(path, replay, keep=1)
        for number in range(3):
            one.save(state, number)
        assert one.steps() == [2]
        assert bits(Checkpointer(path, replay).restore(example)) == bits(state)
        assert [len(one._store.entries(kind)) for kind in ("manifests", "rest", "rows")] == [1, 1, 1]


def test_narrow_numbers_are_told_apart(tmp_path):
    replay = jr.items(capacity=4, batch_size=2)
    state = replay.add(replay.init(jnp.zeros(3, jnp.float8_e5m2)), jnp.ones((1, 3), jnp.float8_e5m2))
    checkpoint.save(tmp_path, replay, state)
    assert bits(checkpoint.restore(tmp_path, replay, jnp.zeros(3, jnp.float8_e5m2))) == bits(state)
    with pytest.raises(ValueError, match=r"stored float8_e5m2\[3\], expected float8_e4m3fn\[3\]"):
        checkpoint.restore(tmp_path, replay, jnp.zeros(3, jnp.float8_e4m3fn))


def test_a_rollout_is_saved_too(tmp_path):
    rollout = jr.rollout(length=5, num_envs=2, autoreset="next_step")
    zeros = jnp.zeros(2)
    step = jr.Step(obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0)
    example = jax.tree.map(lambda x: x[0], step)
    state = rollout.add(rollout.add(rollout.init(example), step), step)
    checkpointer = Checkpointer(tmp_path, rollout)
    for number, wait in enumerate((True, False)):
        checkpointer.save(state, number, wait=wait)
        checkpointer.pump(state)
        checkpointer.finish(state)
        assert bits(checkpointer.restore(example)) == bits(state)
        state = rollout.add(state, step)

"""Tests of kills, full disks, damage and interrupts: a damaged checkpoint is never restored as
intact."""

import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import COUNTERS_CHUNK, SOAK
from tests.support import checkpointed_run
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, rows


def test_what_cannot_be_read_now_is_not_deleted(tmp_path, monkeypatch):
    buffer = items()
    checkpointer = Checkpointer(tmp_path, buffer)
    state = added(buffer, buffer.init(EXAMPLE), 0, 4)
    checkpointer.save(state, 4)

    def fails(name, *_):
        raise OSError("UNAVAILABLE: try again")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._store, "read", fails)
        for call in (lambda: checkpointer.save(state, 5), lambda: checkpointer.restore(EXAMPLE)):
            with pytest.raises(OSError, match="UNAVAILABLE"):
                call()
    assert checkpointer.all_steps() == [4]
    assert numbers(buffer, checkpointer.restore(EXAMPLE)) == expected(buffer, 4)


def test_an_interrupt_leaves_no_thread(tmp_path, monkeypatch):
    buffer = items()
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=500)
    state, number_of_threads = added(buffer, buffer.init(EXAMPLE), 0, 20), threading.active_count()
    checkpointer.save(state, 20)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rows, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(
                added(buffer, jax.tree.map(jnp.copy, state), 20, 1), 21, blocking=False
            )

    def fails(*arguments):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._store, "write", fails)
        with pytest.raises(OSError, match="the disk is full"):
            checkpointer.save(state, 22)
        with contextlib.suppress(OSError):  # save itself may raise the error
            checkpointer.save(state, 23, blocking=False)
            with pytest.raises(OSError, match="the disk is full"):
                checkpointer.wait_until_finished(state)
    assert threading.active_count() == number_of_threads
    assert checkpointer.all_steps() == [20]
    checkpointer.save(state, np.int64(24))
    with pytest.raises(TypeError, match="JSON"):
        checkpointer.save(state, 25, metadata={"x": np.zeros(3)})
    assert checkpointer.all_steps() == [20, 24]


def test_what_is_damaged_is_never_taken_for_whole(tmp_path):
    """Flip bits, truncate files and delete files: the restore raises an error, or warns and returns
    the checkpoint before."""
    buffer, source = items(), tmp_path / "source"
    checkpointer = Checkpointer(source, buffer, chunk_bytes=1000)
    state = added(buffer, buffer.init(EXAMPLE), 0, 20)
    checkpointer.save(state, 20)
    checkpointer.save(added(buffer, state, 20, 5), 25)
    kinds = ("manifests", "rest", "rows")
    files = sorted(
        file.relative_to(source)
        for kind in kinds
        for file in (source / kind).rglob("*")
        if file.is_file() and file.name != "zarr.json"
    )
    r, outcomes = random.Random(0), []
    one_of_each = {(file.parent.name, file.suffix): file for file in files}.values()
    cuts = [(file, size) for file in one_of_each for size in (0, 4)]  # a checksum has 4 bytes
    for trial in range(len(cuts) + (200 if SOAK else 30)):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(source, broken)
        cut, size = cuts[trial] if trial < len(cuts) else (None, 0)
        file = broken / (cut or r.choice(files))
        content = bytearray(file.read_bytes())
        if cut:
            file.write_bytes(content[:size])
        elif trial % 3 == 0:
            file.write_bytes(content[: r.randrange(len(content))])
        elif trial % 10 == 1:
            file.unlink()
        else:
            content[r.randrange(len(content))] ^= 1 << r.randrange(8)
            file.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                restored = Checkpointer(broken, buffer).restore(EXAMPLE)
            except CorruptCheckpointError:
                outcomes.append("refused")
                continue
        end = int(restored.streams.head) + 16 * int(restored.streams.lap)
        assert numbers(buffer, restored) == expected(buffer, end)
        outcomes.append(end)
        if end == 20:
            # a missing manifest looks like a save that was killed
            is_never_done = file.parent.name == "manifests" and not file.exists()
            assert (
                any("step 20 was restored; this is damaged" in str(one.message) for one in caught)
                != is_never_done
            )
    # Step 25 is restored where the damage is to files that only step 20 uses.
    assert outcomes.count("refused") > 5
    assert outcomes.count(20) > 5


@pytest.mark.parametrize("how", ["wait", "advance"])
def test_a_run_that_is_killed_leaves_a_generation_that_is_whole(how, tmp_path):
    """Kill runs at random moments, in saves and deletions; each resumes from the one before."""
    r, buffer, ends = random.Random(how), checkpointed_run.REPLAY, [0]
    for _ in range(100 if SOAK else 5):
        script = [sys.executable, checkpointed_run.__file__, tmp_path, how]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for _ in range(r.randrange(1, 4)):
                assert run.stdout.readline().startswith("saved")
            time.sleep(r.random() * 0.05)
            run.kill()
        checkpointer = Checkpointer(tmp_path, buffer)  # the lock died with the run
        state, ends = checkpointer.restore(EXAMPLE), [*ends, checkpointer.all_steps()[-1]]
        assert numbers(buffer, state) == expected(buffer, ends[-1])
        assert ends[-1] >= ends[-2]
    assert ends[-1] > 5
    checkpointer.save(state, 10**9)  # deletes the files that killed runs left
    folders = {path.name[:19] for kind in ("rest", "rows") for path in (tmp_path / kind).iterdir()}
    assert {manifest.folder for manifest in checkpointer._chain.read()[0]} <= folders
    assert len(list((tmp_path / "rest").iterdir())) <= 3


FULL = """
import resource, signal, sys
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer, add = (
    Checkpointer(sys.argv[1], run.REPLAY, compression_level=None),
    run.jr.jit(run.REPLAY).add,
)
state = run.REPLAY.init(run.EXAMPLE)
for t in range(60):
    state = add(state, run.step(t, 4))
    if t == 9:
        checkpointer.save(state, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
for wait in (True, False):
    try:
        checkpointer.save(state, 60, blocking=wait)
        checkpointer.wait_until_finished(state)
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
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, cwd=folder
    )
    assert done.stdout.split()[2:] == ["whole"], done.stderr


def test_it_is_said_what_was_restored(tmp_path):
    buffer = items()
    checkpointer, state = Checkpointer(tmp_path, buffer), added(buffer, buffer.init(EXAMPLE), 0, 4)
    for number in (1, 2):
        checkpointer.save(state, number, metadata={"number": number})
    newest = sorted((tmp_path / "rest").iterdir())[-1]
    chunk = newest / COUNTERS_CHUNK
    chunk.unlink()
    chunk.symlink_to(chunk)  # exists, but cannot be read
    other = Checkpointer(tmp_path, buffer)
    with pytest.warns(
        UserWarning,
        match=f"restore: step 1 was restored; this is damaged:\n  step 2: rest/.*{COUNTERS_CHUNK}",
    ):
        other.restore(EXAMPLE)
    assert (other.step, other.metadata) == (1, {"number": 1})
    with pytest.raises(
        CorruptCheckpointError,
        match=r"restore: no step 2 under .* can be restored \(there are 1, 2\):\n  step 2: rest/",
    ):
        other.restore(EXAMPLE, 2)


AT_EXIT = """
import sys
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

state = run.REPLAY.init(run.EXAMPLE)
chunk_bytes = 1000 if sys.argv[2] == "unfinished" else 2**20
checkpointer = Checkpointer(sys.argv[1], run.REPLAY, chunk_bytes=chunk_bytes)
if sys.argv[2] == "fails":
    def commit(manifest):
        raise OSError("no space left")
    checkpointer._chain.commit = commit
add = run.jr.jit(run.REPLAY).add
for t in range(9):
    state = add(state, run.step(t, 4))
checkpointer.save(state, 9, blocking=False)
if sys.argv[2] != "unfinished":
    while not checkpointer._saving.is_copied:
        checkpointer.advance(state, 0)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("well", ""),
        ("fails", "the last checkpoint was not written: no space left"),
        ("unfinished", "a checkpoint was incomplete and is cancelled"),
    ],
)
def test_the_end_of_a_program_waits_and_says_what_failed(how, said, tmp_path):
    folder = pathlib.Path(checkpointed_run.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, tmp_path, how], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
    assert Checkpointer(tmp_path, checkpointed_run.REPLAY).all_steps() == ([] if said else [9])


def test_the_disk_has_every_file_before_the_manifest_is_there(tmp_path, monkeypatch):
    buffer, synced, real = items(), set(), os.fsync

    def fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpointer = Checkpointer(tmp_path / "new" / "run", buffer)
    checkpointer.save(added(buffer, buffer.init(EXAMPLE), 0, 4))
    paths = {str(path) for path in [tmp_path, *tmp_path.rglob("*")]}
    created = {path for path in paths if path.endswith(".json") and "zarr" not in path}
    assert {path.split("/")[-2] for path in created} == {"manifests", "writers"}
    ours = {path for path in synced if path.startswith(str(tmp_path))}
    unfinished = {path for path in ours if path.endswith(".new")}
    assert {path.rsplit(".", 2)[0] for path in unfinished} == created
    assert ours - unfinished == paths - created

"""Tests of kills, full disks and damage: a damaged checkpoint is never restored as
intact."""

import os
import random
import shutil
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from tqdm import tqdm

from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from jaxreplay.checkpoint.saving import Saving
from jaxreplay.checkpoint.store import store_at
from tests.checkpoint.runs import (
    BUFFER,
    EXAMPLE,
    SUPPORT,
    check,
    check_no_other_files,
    check_restored,
    expected,
    files_of,
    numbers,
    save_run,
    save_two,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support import checkpointed_run
from tests.support.refusals import check_refused, refused, warned


def test_what_cannot_be_read_now_is_not_deleted(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, BUFFER)
    save_run(checkpointer, 4)

    def fails(*_):
        raise OSError("UNAVAILABLE: try again")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._store, "read", fails)
        check_refused(
            "UNAVAILABLE",
            lambda: checkpointer.save(state_of(5), 5),
            lambda: checkpointer.restore(EXAMPLE),
            error=OSError,
        )
    assert checkpointer.all_steps() == [4]
    check_restored(checkpointer, 4)


def test_what_is_damaged_is_never_taken_for_intact(tmp_path):
    """Flip bits, truncate files and delete files: the restore raises an error, or warns and returns
    the checkpoint before."""
    source, broken = save_two(tmp_path / "source"), tmp_path / "broken"
    files = [file.relative_to(source) for file in files_of(source)]
    r, outcomes = random.Random(0), []
    one_of_each = {(file.parent.name, file.suffix): file for file in files}.values()
    cuts = [(file, size) for file in one_of_each for size in (0, 4)]
    num_random = 200 if SOAK else 60 if ALL else 20
    for trial, (cut, size) in enumerate([*cuts, *[(None, 0)] * num_random]):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(source, broken)
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
        checkpointer = Checkpointer(broken, BUFFER)
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                restored = checkpointer.restore(EXAMPLE)
            except CorruptCheckpointError:
                outcomes.append("refused")
                continue
        outcomes.append(checkpointer.step)
        check(restored, checkpointer.step)
        if checkpointer.step == 20:
            # a missing manifest looks like a save that was killed
            is_never_done = file.parent.name == "manifests" and not file.exists()
            told = ["step 20 was restored; this is damaged" in str(one.message) for one in caught]
            assert any(told) != is_never_done
    # Step 25 is restored where the damage is to files that only step 20 uses.
    assert outcomes.count("refused") > 5
    assert outcomes.count(20) > 5


@pytest.mark.parametrize("how", ["wait", "later"])
def test_a_run_that_is_killed_leaves_a_checkpoint_that_is_intact(how, tmp_path):
    """Kill runs at random moments, in saves and deletions; each resumes from the one before, and
    checks its rows."""
    r, ends = random.Random(how), [0]
    checkpointer = Checkpointer(tmp_path, checkpointed_run.REPLAY)
    for _ in range(100 if SOAK else 6 if ALL else 2):
        script = [sys.executable, checkpointed_run.__file__, tmp_path, how]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as run:
            for _ in range(r.randrange(1, 4)):
                assert run.stdout.readline().startswith("saved")
            time.sleep(r.random() * 0.05)
            run.kill()
        ends.append(checkpointer.latest_step())
        assert ends[-1] >= ends[-2]
    assert ends[-1] > 2
    state = checkpointer.restore(EXAMPLE)
    assert numbers(checkpointer.buffer, state) == expected(checkpointer.buffer, ends[-1])
    checkpointer.save(state, 10**9)  # deletes the files that the runs left
    check_no_other_files(checkpointer, tmp_path)


# A run on a full disk, which ends while it saves to two paths.
CHILD = """
import resource, signal, sys, threading
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
buffer, path = run.items(), sys.argv[1]
checkpointer = Checkpointer(f"{path}/full", buffer, compression_level=None)
checkpointer.save(run.begun(buffer, 10), 10)
state = run.begun(buffer, 60)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for blocking in (True, False):
    try:
        checkpointer.save(state, 60, blocking=blocking)
        checkpointer.wait_until_finished()
    except Exception as error:
        print(type(error).__name__)
assert run.numbers(buffer, checkpointer.restore(run.EXAMPLE)) == run.expected(buffer, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(state, 60)
assert run.numbers(buffer, checkpointer.restore(run.EXAMPLE)) == run.expected(buffer, 60)

sys.stderr.write("the end\\n")
ends, kept = threading.Event(), []

def commit(*_):
    ends.wait()
    raise OSError("no space left")

for how in ("well", "fails"):
    kept.append(checkpointer := Checkpointer(f"{path}/{how}", buffer))
    if how == "fails":
        checkpointer._chain.commit = commit
    checkpointer.save(state, 60, blocking=False)
ends.set()
print("all went well")
"""


def test_a_full_disk_leaves_the_checkpoint_before_and_an_end_says_what_failed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path],
        capture_output=True,
        text=True,
        cwd=SUPPORT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == ["all went well"]
    said = done.stderr.partition("the end\n")[2]
    assert said.count("Warning: ") == 1
    assert "Warning: the last checkpoint was not written: no space left" in said
    for how, steps in {"full": [10, 60], "well": [60], "fails": []}.items():
        assert Checkpointer(tmp_path / how, BUFFER).all_steps() == steps


def test_an_end_says_that_several_processes_have_not_committed(tmp_path):
    """None of them can commit alone."""
    saving = Saving(store_at(tmp_path), None, tqdm(disable=True))
    saving.put("rest/one", lambda: {"a": np.zeros(3)})
    saving.close(None)
    saving._threads.join()
    with pytest.warns(UserWarning, match="several processes was not committed: call wait_until_f"):
        saving._at_exit()
    saving.join()


def test_it_is_said_what_was_restored(tmp_path):
    save_two(tmp_path, ends=(1, 2))
    file = max((tmp_path / "rest").iterdir())
    file.unlink()
    file.symlink_to(file)  # exists, but cannot be read
    checkpointer = Checkpointer(tmp_path, BUFFER)
    with warned(
        f"restore: step 1 was restored; this is damaged:\n  step 2: rest/{file.name}",
    ):
        checkpointer.restore(EXAMPLE)
    assert (checkpointer.step, checkpointer.metadata) == (1, {"end": 1})
    with refused(
        r"restore: no step 2 under .* can be restored \(there are 1, 2\):\n  step 2: rest/",
        CorruptCheckpointError,
    ):
        checkpointer.restore(EXAMPLE, 2)


def test_the_disk_has_every_file_before_the_manifest_is_there(tmp_path, monkeypatch):
    synced, real = set(), os.fsync

    def fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpointer = Checkpointer(tmp_path / "new" / "run", BUFFER)
    checkpointer.save(state_of(4))
    paths = {str(path) for path in [tmp_path, *tmp_path.rglob("*")]}
    created = {path for path in paths if path.endswith(".json")}
    assert {path.split("/")[-2] for path in created} == {"manifests"}
    ours = {path for path in synced if path.startswith(str(tmp_path))}
    unfinished = {path for path in ours if path.endswith(".new")}
    assert {path.rsplit(".", 2)[0] for path in unfinished} == created
    assert ours - unfinished == paths - created

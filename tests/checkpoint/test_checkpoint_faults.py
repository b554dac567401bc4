"""Tests of kills, and of a disk on which an operation fails."""

import os
import random
import subprocess
import sys
import time

from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from tests.checkpoint.runs import (
    BUFFER,
    EXAMPLE,
    check_no_other_files,
    expected,
    numbers,
    save_two,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support import checkpointed_run
from tests.support.refusals import refused, warned


def test_a_run_that_is_killed_leaves_a_checkpoint_that_is_intact(tmp_path):
    """Kill runs at random moments, in saves and deletions; each resumes from the one before, and
    checks its rows."""
    r, ends = random.Random(0), [0]
    checkpointer = Checkpointer(tmp_path, checkpointed_run.REPLAY)
    for _ in range(100 if SOAK else 6 if ALL else 2):
        script = [sys.executable, checkpointed_run.__file__, tmp_path]
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

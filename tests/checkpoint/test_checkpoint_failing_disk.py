"""Tests of a disk on which any one operation of a save or restore fails: earlier checkpoints stay
intact, and the run can continue."""

import builtins
import contextlib
import errno
import gc
import io
import os
import pathlib
import random
import shutil
import threading
import warnings

import jax
import numpy as np
import pytest

from tests.conftest import SOAK
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError, folder


class Disk:
    """Count the operations of the disk, and let one fail."""

    def __init__(self, monkeypatch):
        self.count, self.fails_at, self.how, self.failed = 0, None, errno.EIO, "nothing"
        self._lock = threading.Lock()
        for name in ("fsync", "link", "unlink", "rmdir", "mkdir", "listdir"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))
        monkeypatch.setattr(folder, "open", self._open, raising=False)
        monkeypatch.setattr(
            pathlib.Path, "write_bytes", lambda path, content: self._write_bytes(path, content)
        )
        monkeypatch.setattr(os, "open", self._failing("os.open", os.open))

    def _asked(self, name):
        with self._lock:
            number, self.count = self.count, self.count + 1
        if number == self.fails_at:
            self.failed = name
            raise OSError(self.how, f"{os.strerror(self.how)} (made up, of {name})")

    def _failing(self, name, real):
        def call(*arguments, **options):
            self._asked(name)
            return real(*arguments, **options)

        return call

    def _write_bytes(self, path, content):
        with self._open(path, "wb", buffering=0) as file:
            while len(content):
                content = content[file.write(content) :]

    def _open(self, path, mode="r", **options):
        self._asked(f"open {mode}")
        disk, raw = self, builtins.open(path, mode, **options)  # noqa: SIM115

        class File(io.RawIOBase):
            def write(self, content):
                half = memoryview(content).cast("B")[: max(1, len(content) // 2)]
                try:
                    disk._asked("write")
                except OSError as error:
                    raw.write(half)
                    if disk.how == errno.EINTR:  # EINTR stands for a short write, which is no error
                        return len(half)
                    raise error from None
                return raw.write(content)

            def readinto(self, part):
                try:
                    disk._asked("read")
                except OSError:
                    if disk.how == errno.EINTR:
                        return raw.readinto(part[: max(1, len(part) // 2)])
                    raise
                return raw.readinto(part)

            def fileno(self):
                return raw.fileno()

            def close(self):
                raw.close()

        return File()


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


REPLAY = items(capacity=64)


class Run:
    """A run with checkpoints under a path: its state, and its number of steps."""

    def __init__(self, path, ends):
        self.checkpointer = Checkpointer(path, REPLAY, chunk_bytes=2000, max_to_keep=2)
        self.state, self.end = REPLAY.init(EXAMPLE), 0
        for end in ends:
            self.step(end - self.end)
            self.checkpointer.save(self.state, self.end)

    def step(self, count=5):
        self.state, self.end = added(REPLAY, self.state, self.end, count), self.end + count

    def save(self, blocking=True):
        self.checkpointer.save(self.state, self.end, blocking=blocking)
        self.checkpointer.wait_until_finished(self.state)


def whole(path, among, resume=False):
    """Restore with a fresh Checkpointer, and check the rows.

    Returns:
      The restored step, one of `among`; with `resume`, the Checkpointer and the state.
    """
    with quiet():
        checkpointer = Checkpointer(path, REPLAY)
        state = checkpointer.restore(EXAMPLE)
    assert checkpointer.step in among, (checkpointer.step, among)
    assert numbers(REPLAY, state) == expected(REPLAY, checkpointer.step)
    return (checkpointer, state) if resume else checkpointer.step


def trials(count, r, hows=(errno.EIO, errno.ENOSPC, errno.EINTR)):
    """Return the operations to fail, and how: a sample of 12, or in the soak all."""
    every = [(number, how) for number in range(count) for how in hows]
    return every if SOAK else r.sample(every, min(12, len(every)))


@pytest.mark.parametrize("kind", ["first", "second", "replaces", "does not wait"])
def test_a_save_that_fails_anywhere_leaves_what_there_was(kind, disk, tmp_path):
    before = [] if kind == "first" else [8, 16, 24]
    wait, source = kind != "does not wait", tmp_path / "source"

    def begun(path):
        run = Run(path, before)
        run.step(5 if kind != "replaces" else 0)
        return run

    run = begun(source)
    disk.count = 0
    run.save(wait)
    count, r = disk.count, random.Random(kind)
    run.checkpointer.close()
    assert count > 40
    failed = 0
    for number, how in trials(count, r):
        path = tmp_path / f"run {number} {how}"
        run = begun(path)
        disk.count, disk.fails_at, disk.how, disk.failed = 0, number, how, "nothing"
        try:
            with quiet():
                run.save(wait)
        except (OSError, CorruptCheckpointError):
            failed += 1
            is_saved, among = False, {*before[-2:], run.end}
        else:
            is_saved, among = True, {run.end}
        # a short read or write is no error
        assert how != errno.EINTR or is_saved or disk.failed not in ("write", "read")
        disk.fails_at = None
        if is_saved or run.checkpointer.all_steps():
            whole(path, among)
        # The same object continues, and then a fresh one.
        run.step(3)
        run.save(wait)
        whole(path, {run.end})
        run.checkpointer.close()
        run.checkpointer, run.state = whole(path, {run.end}, resume=True)
        run.step(3)
        run.save(wait)
        run.checkpointer.close()
        whole(path, {run.end})
        assert all(not found.problems for found in checkpoint.verify(path))
        shutil.rmtree(path)
    assert failed > 3


@pytest.mark.parametrize("salvage", [False, True])
def test_a_restore_that_fails_anywhere_harms_nothing(salvage, disk, tmp_path):
    run = Run(tmp_path, [8, 16, 24])
    run.checkpointer.close()
    reader = Checkpointer(tmp_path, REPLAY)
    disk.count = 0
    reader.restore(EXAMPLE, allow_partial=salvage)
    count, outcomes = disk.count, set()
    for number, how in trials(count, random.Random(0)):
        disk.count, disk.fails_at, disk.how, disk.failed = 0, number, how, "nothing"
        reader = Checkpointer(tmp_path, REPLAY)
        try:
            with quiet():
                state = reader.restore(EXAMPLE, allow_partial=salvage)
        except (OSError, CorruptCheckpointError):
            outcomes.add("error")
        else:
            outcomes.add(reader.step)
            if not reader.missing_rows:
                assert numbers(REPLAY, state) == expected(REPLAY, reader.step)
        disk.fails_at = None
        assert numbers(REPLAY, reader.restore(EXAMPLE)) == expected(REPLAY, 24)
        whole(tmp_path, {24})
    assert 24 in outcomes
    assert len(outcomes) > 1


def test_a_replay_that_cannot_be_saved_or_loaded_keeps_its_rows(disk, tmp_path):
    def made(num_steps):
        replay = jr.Replay(
            REPLAY, example=jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), EXAMPLE)
        )
        for t in range(num_steps):
            replay.add({"number": np.full(4, t, np.int32), "bytes": np.zeros((4, 100), np.uint8)})
        return replay

    def rows_of(replay):
        return [np.array(leaf) for leaf in jax.tree.leaves(replay._owner.state)]

    replay, other = made(9), made(4)
    disk.count = 0
    replay.save(tmp_path / "saved")
    num_save = disk.count
    disk.count = 0
    other.load(tmp_path / "saved")
    num_load, r = disk.count, random.Random(0)
    for number, how in trials(num_save, r):
        replay, path, before = made(9), tmp_path / f"{number} {how}", rows_of(replay)
        disk.count, disk.fails_at, disk.how, disk.failed = 0, number, how, "nothing"
        with quiet(), contextlib.suppress(OSError, CorruptCheckpointError):
            replay.save(path)
        disk.fails_at = None
        for got, wanted in zip(rows_of(replay), before, strict=True):
            np.testing.assert_array_equal(got, wanted)
        replay.save(path)
        other.load(path)
        assert len(other) == len(replay)
    for number, how in trials(num_load, r):
        other = made(4)
        before = rows_of(other)
        disk.count, disk.fails_at, disk.how, disk.failed = 0, number, how, "nothing"
        try:
            with quiet():
                other.load(tmp_path / "saved")
        except (OSError, CorruptCheckpointError):
            for got, wanted in zip(rows_of(other), before, strict=True):
                np.testing.assert_array_equal(got, wanted)
        disk.fails_at = None
        other.load(tmp_path / "saved")
        assert len(other) == 4 * 9


def test_no_failure_leaves_a_lock_a_thread_or_a_file_open(disk, tmp_path):
    run = Run(tmp_path / "source", [8])
    run.step()
    disk.count = 0
    run.save()
    count, num_threads, files = disk.count, threading.active_count(), pathlib.Path("/proc/self/fd")
    num_files = len(list(files.iterdir())) if files.exists() else 0
    for number, how in trials(count, random.Random(1), (errno.ENOSPC,)):
        path = tmp_path / f"run {number} {how}"
        disk.fails_at = None
        one = Checkpointer(path, REPLAY)
        disk.count, disk.fails_at, disk.how, disk.failed = 0, number, how, "nothing"
        with quiet(), contextlib.suppress(OSError, PathInUseError):
            one.save(run.state, 1)
            one.close()
        disk.fails_at = None
        one.close()
        with Checkpointer(path, REPLAY) as other:
            other.save(run.state, 2)
        assert threading.active_count() == num_threads
    del one, other
    gc.collect()
    if num_files:
        assert len(list(files.iterdir())) <= num_files

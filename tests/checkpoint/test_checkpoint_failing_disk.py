"""Tests of a disk on which any one operation of a save or restore fails: earlier checkpoints stay
intact, and the run can continue."""

import builtins
import contextlib
import errno
import functools
import gc
import io
import itertools
import os
import pathlib
import random
import shutil
import threading

import pytest

from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, folder
from tests.checkpoint.runs import (
    BUFFER,
    EXAMPLE,
    check,
    check_intact,
    check_no_other_files,
    check_restored,
    quiet,
    replay_of,
    save_run,
)
from tests.conftest import ALL, SOAK


class Disk:
    """Count the operations of the disk, and let one fail."""

    def __init__(self, monkeypatch):
        self.count, self.fails_at = 0, None
        self._lock = threading.Lock()
        for name in ("fsync", "link", "unlink", "rmdir", "mkdir", "listdir"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))
        monkeypatch.setattr(folder, "open", self._open, raising=False)
        monkeypatch.setattr(
            pathlib.Path, "write_bytes", lambda path, content: self._write_bytes(path, content)
        )
        monkeypatch.setattr(os, "open", self._failing("os.open", os.open))

    def count_of(self, call):
        """Return the number of operations of a call."""
        self.count, self.fails_at = 0, None
        call()
        return self.count

    @contextlib.contextmanager
    def failing(self, number, how):
        """Let one operation in the block fail."""
        self.count, self.fails_at, self.how, self.failed = 0, number, how, "nothing"
        try:
            with quiet():
                yield
        finally:
            self.fails_at = None

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

        def in_part(name, act, part):
            """Act on all of it, or on half if the operation fails.

            EINTR stands for a short read or write, which is no error.
            """
            try:
                disk._asked(name)
            except OSError:
                num_done = act(part[: max(1, len(part) // 2)])
                if disk.how == errno.EINTR:
                    return num_done
                raise
            return act(part)

        class File(io.RawIOBase):
            def write(self, content):
                return in_part("write", raw.write, memoryview(content).cast("B"))

            def readinto(self, part):
                return in_part("read", raw.readinto, part)

            def fileno(self):
                return raw.fileno()

            def close(self):
                raw.close()

        return File()


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def begun(path, ends):
    """Return a Checkpointer with checkpoints of a run."""
    checkpointer = Checkpointer(path, BUFFER, chunk_bytes=2000, max_to_keep=2)
    for end in ends:
        save_run(checkpointer, end)
    return checkpointer


def restored(path, among):
    """Restore with a new Checkpointer, check the rows, and return it. The step is in `among`."""
    checkpointer = begun(path, [])
    with quiet():
        state = checkpointer.restore(EXAMPLE)
    assert checkpointer.step in among, (checkpointer.step, among)
    check(state, checkpointer.step)
    return checkpointer


def trials(count, seed, most=4):
    """Return the operations to fail, and how: a sample of `most`, in `make test-all` of twice as
    many, or in the soak all."""
    hows = (errno.EIO, errno.ENOSPC, errno.EINTR)
    every = [*itertools.product(range(count), hows)]
    return every if SOAK else random.Random(seed).sample(every, 2 * most if ALL else most)


@pytest.mark.parametrize("kind", ["first", "second", "replaces", "does not wait"])
def test_a_save_that_fails_anywhere_leaves_what_there_was(kind, disk, tmp_path):
    """And no thread, lock, open file or other file is left."""
    before, wait = [] if kind == "first" else [8, 16, 24], kind != "does not wait"
    end = 24 if kind == "replaces" else 29 if before else 5
    checkpointer = begun(tmp_path / "source", before)
    count, num_failed = disk.count_of(functools.partial(save_run, checkpointer, end, wait)), 0
    checkpointer.close()
    assert count > 40
    count_files = lambda: len([*pathlib.Path("/proc/self").glob("fd/*")])  # open ones, on Linux
    num_threads, num_files = threading.active_count(), count_files()
    for trial, (number, how) in enumerate(trials(count, kind)):
        path = tmp_path / str(trial)
        checkpointer, is_saved = begun(path, before), True
        try:
            with disk.failing(number, how):
                save_run(checkpointer, end, wait)
        except (OSError, CorruptCheckpointError):
            num_failed, is_saved = num_failed + 1, False
            assert how != errno.EINTR or disk.failed not in ("write", "read")
        if is_saved or checkpointer.all_steps():
            restored(path, {end} if is_saved else {*before[-2:], end})
        if trial % 2:  # the same object continues, and then a new one
            save_run(checkpointer, end + 3, wait)
            checkpointer = restored(path, {end + 3})
        else:  # a new one continues at once
            checkpointer = Checkpointer(path, BUFFER, max_to_keep=2, overwrite=True)
        save_run(checkpointer, end + 6, wait)
        checkpointer.close()
        restored(path, {end + 6})
        check_intact(checkpoint.verify(path))
        check_no_other_files(checkpointer, path)
        assert threading.active_count() == num_threads
        shutil.rmtree(path)
    assert num_failed
    del checkpointer
    gc.collect()
    assert count_files() <= num_files


@pytest.mark.parametrize("salvage", [False, True])
def test_a_restore_that_fails_anywhere_harms_nothing(salvage, disk, tmp_path):
    begun(tmp_path, [8, 16, 24]).close()
    restore = lambda reader: reader.restore(EXAMPLE, allow_partial=salvage)
    count = disk.count_of(lambda: restore(Checkpointer(tmp_path, BUFFER)))
    outcomes = set()
    for number, how in trials(count, 0, most=12):
        reader = Checkpointer(tmp_path, BUFFER)
        try:
            with disk.failing(number, how):
                state = restore(reader)
        except (OSError, CorruptCheckpointError):
            outcomes.add("error")
        else:
            outcomes.add(reader.step)
            if not reader.missing_rows:
                check(state, reader.step)
        check_restored(reader, 24)
    restored(tmp_path, {24})
    assert 24 in outcomes
    assert len(outcomes) > 1


def test_a_replay_that_cannot_be_saved_or_loaded_keeps_its_rows(disk, tmp_path):
    saved, other = replay_of(9), replay_of(4)
    num_save = disk.count_of(lambda: saved.save(tmp_path / "saved"))
    num_load = disk.count_of(lambda: other.load(tmp_path / "saved"))
    for number, how in trials(num_save, 0):
        path = tmp_path / f"{number} {how}"
        with contextlib.suppress(OSError, CorruptCheckpointError), disk.failing(number, how):
            saved.save(path)
        check(saved._owner.state, 9)
        saved.save(path)
        other.load(path)
        check(other._owner.state, 9)
    for number, how in trials(num_load, 1):
        other = replay_of(4)
        try:
            with disk.failing(number, how):
                other.load(tmp_path / "saved")
        except (OSError, CorruptCheckpointError):
            check(other._owner.state, 4)
        other.load(tmp_path / "saved")
        check(other._owner.state, 9)

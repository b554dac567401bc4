"""A disk on which an operation fails, or at which a process is killed."""

import builtins
import contextlib
import errno
import io
import os
import pathlib
import threading

from jaxreplay.checkpoint import folder
from tests.checkpoint.runs import quiet

HOWS = (errno.EIO, errno.ENOSPC, errno.EINTR)
KILL = 0  # a way to fail: nothing reaches the disk any more


class Disk:
    """Count the operations of the disk, and let one fail."""

    def __init__(self, monkeypatch):
        self.count, self.fails_at, self.how = 0, None, 0
        self._lock = threading.Lock()
        for name in ("fsync", "link", "unlink", "rmdir", "mkdir", "listdir"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))
        monkeypatch.setattr(folder, "open", self._open, raising=False)
        monkeypatch.setattr(
            pathlib.Path, "write_bytes", lambda path, content: self._write_bytes(path, content)
        )
        monkeypatch.setattr(os, "open", self._failing("os.open", os.open))

    @contextlib.contextmanager
    def failing(self, number, how):
        """Let an operation in the block fail, and all after it if `how` is `KILL`."""
        self.count, self.fails_at, self.how, self.failed = 0, number, how, "nothing"
        try:
            with quiet():
                yield
        finally:
            self.fails_at = None

    def _asked(self, name):
        with self._lock:
            number, self.count = self.count, self.count + 1
        if self.fails_at is None:
            return
        if number == self.fails_at or (self.how == KILL and number > self.fails_at):
            self.failed = name
            raise OSError(self.how or errno.EIO, f"made up, of {name}")

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
            """Act on all of it, or on half if the operation fails. EINTR stands for a short read or
            write, which is no error."""
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

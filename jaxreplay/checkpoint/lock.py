"""Lock of a path for one writer: one object of one process. It is a lock of the operating system,
which ends with its process."""

import contextlib
import datetime
import errno
import json
import os
import pathlib
import socket
import sys
import warnings
import weakref
from typing import Any

from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint.files import PathInUseError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_BUSY = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK)
# errors of file systems without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


def whoami() -> dict[str, Any]:
    """Describe this process for the errors of other processes."""
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    return {"host": socket.gethostname(), "pid": os.getpid(), "program": program, "since": since}


def held_by(where: str, holder: Any) -> PathInUseError:
    """Return the error for a second writer. `holder`: the first writer's `whoami()`, or whatever
    was read in its place."""
    known = {
        name: str(holder[name])[:100]
        for name in ("host", "pid", "program", "since")
        if isinstance(holder, dict) and name in holder
    }
    who = ", ".join(f"{name} {value}" for name, value in known.items()) or "an unknown process"
    mine = whoami()
    is_own = (known.get("host"), known.get("pid")) == (mine["host"], str(mine["pid"]))
    cure = "close() that Checkpointer first" if is_own else "give each run a path of its own"
    return PathInUseError(
        f"{where} is being written to by {'this process, ' if is_own else ''}{who}; two writers "
        f"would mix their files: {cure}"
    )


class Lock:
    """Lock of a file that names its holder.

    The file is never deleted: otherwise two processes could hold locks of two files of that name.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._descriptor: int | None = None
        self._has_none = False  # True where the file system has no locks
        _all.add(self)

    def acquire(self, where: str) -> None:
        """Take the lock, unless it is held already. Raises a PathInUseError if another writer holds
        it."""
        with defer_interrupts():  # an interrupt before it is recorded would leave it held for ever
            self._acquire(where)

    def _acquire(self, where: str) -> None:
        if self._descriptor is not None and self._is_current():
            return
        self.release()
        descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644
        )
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in _BUSY:
                holder = _read(descriptor)
                os.close(descriptor)
                raise held_by(where, holder) from None
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            if not self._has_none:
                warnings.warn(
                    f"{where}: this file system has no locks, so a second writer is not "
                    "detected; make sure that only one process writes here",
                    stacklevel=2,
                )
            self._has_none = True
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # the lock is held without the holder's name, too
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps(whoami()).encode())

    def check(self, where: str) -> None:
        """Raise an OSError if the locked file is gone or replaced: the files beside it may be gone,
        too."""
        if self._descriptor is None or not self._is_current():
            raise OSError(
                errno.ENOENT, f"{where} was deleted, or replaced, while it was written to"
            )

    def release(self) -> None:
        with defer_interrupts():
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _is_current(self) -> bool:
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except OSError:
            return False

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit, parts of Python may be gone
            if self._descriptor is not None:
                os.close(self._descriptor)


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        os.lseek(descriptor, 2**20, os.SEEK_SET)  # past the holder's name, which others read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]


def _read(descriptor: int) -> Any:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        return json.loads(os.read(descriptor, 4096))
    except (OSError, ValueError):
        return None


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Release the locks that a forked process shares with its parent: they would outlive the
    parent."""
    for lock in list(_all):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

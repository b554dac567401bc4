"""Files in a local folder, written from and read into the caller's memory without a buffer."""

import contextlib
import ctypes
import errno
import functools
import io
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from jaxreplay.checkpoint.files import LARGE, CorruptCheckpointError, Files, MissingError
from jaxreplay.checkpoint.lock import Lock

# errors that a retry does not cure
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
# bytes that are read or written at a time; each written piece goes to the disk at once, which would
# be idle until `sync` otherwise
_PIECE = 2**20


class Folder(Files):
    """Local folder, created by `claim` if it does not exist."""

    def __init__(self, path: str):
        self._path = pathlib.Path(path).absolute()
        self.name = str(self._path)
        parents = list(self._path.parents)
        is_there = [parent.is_dir() for parent in parents]
        # the parents that `claim` creates, and the one above them
        self._above = parents[: is_there.index(True) + 1] if True in is_there else []
        self._lock = Lock(self._path / "writer.lock")

    def claim(self, is_successor: bool) -> None:
        """Claim the folder by a file lock, which ends with its process."""
        del is_successor
        self._check_no_file()
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire(self.name)

    def check_claim(self) -> None:
        self._lock.check(self.name)

    def release(self) -> None:
        self._lock.release()

    def write(self, name: str, parts: Sequence[Any]) -> None:
        with self._new(f"{self.name}/{name}") as file:
            begun = end = 0
            for part in parts:
                left = memoryview(part)
                while len(left):
                    count = file.write(left[:_PIECE])
                    left, end = left[count:], end + count
                    if end - begun >= _PIECE:
                        _begin_to_write_out(file.fileno(), begun, end - begun)
                        begun = end

    def _new(self, path: str) -> io.FileIO:
        try:
            return open(path, "wb", buffering=0)
        except FileNotFoundError:  # the first file in its folder
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return open(path, "wb", buffering=0)

    def expect(self, name: str) -> None:
        """Have the system read a small file in advance. A large file would lie in small pages,
        which are slower to copy."""
        if hasattr(os, "posix_fadvise"):
            with (
                contextlib.suppress(OSError),
                open(f"{self.name}/{name}", "rb", buffering=0) as file,
            ):
                if os.fstat(file.fileno()).st_size < LARGE:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def forget(self, name: str) -> None:
        """Do nothing: the system may drop what it has read."""

    def read(
        self,
        name: str,
        parts_of: Callable[[int], Sequence[Any]],
        tell: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        try:
            with open(f"{self.name}/{name}", "rb", buffering=0) as file:
                if (size := os.fstat(file.fileno()).st_size) >= LARGE and hasattr(
                    os, "posix_fadvise"
                ):
                    # makes the system read further ahead
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                for part in parts_of(size):
                    left = part
                    while len(left):
                        if not (count := file.readinto(left[:_PIECE])):
                            raise CorruptCheckpointError(f"{name} is cut short")
                        tell(left[:count])
                        left = left[count:]
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if error.errno == errno.ENOENT:
                raise MissingError(f"{name} is missing") from error
            raise CorruptCheckpointError(f"{name}: {error.strerror}") from error

    def sync(self, folder: str) -> None:
        if not (self._path / folder).is_dir():
            return
        for inner, _, files in os.walk(self._path / folder):
            for name in [*files, "."]:
                _fsync(os.path.join(inner, name))

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        path, unfinished = self._path / name, self._path / f"{name}.new"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        _fsync(unfinished)
        folders = [self._path / folder for folder in after]
        for folder in [*folders, self._path, *self._above]:
            if folder.is_dir() and os.access(folder, os.R_OK):
                _fsync(folder)
        unfinished.replace(path)
        _fsync(path.parent)

    def _check_no_file(self) -> None:
        if self._path.is_file():
            raise NotADirectoryError(f"{self.name} is a file, not the folder of a Checkpointer")

    def entries(self, folder: str) -> list[str]:
        self._check_no_file()
        return sorted(os.listdir(self._path / folder)) if (self._path / folder).is_dir() else []

    def delete(self, name: str) -> None:
        if (self._path / name).is_dir():
            shutil.rmtree(self._path / name)
        else:
            (self._path / name).unlink(missing_ok=True)


def _fsync(path: Any) -> None:
    """Wait until a file, or a folder's list of names, is on the disk (no folder on Windows)."""
    is_folder, is_windows = os.path.isdir(path), os.name == "nt"
    if is_folder and is_windows:
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _begin_to_write_out(descriptor: int, start: int, size: int) -> None:
    """Start to write bytes of a file to the disk, without waiting. Systems without
    `sync_file_range` do nothing."""
    if call := _sync_file_range():
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None

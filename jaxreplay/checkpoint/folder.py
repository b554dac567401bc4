"""Files in a local folder."""

import contextlib
import errno
import io
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxreplay.checkpoint.files import (
    CorruptCheckpointError,
    Files,
    Memory,
    MissingError,
    new_memory,
)

# errors that a retry does not cure
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
_PIECE = 2**20  # bytes that are written at a time
# errors of file systems without hard links
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


class Folder(Files):
    """Local folder. Writing creates it if it does not exist."""

    def __init__(self, path: str):
        self._path = pathlib.Path(path).absolute()
        self.name = str(self._path)
        parents = list(self._path.parents)
        is_there = [parent.is_dir() for parent in parents]
        # the parents that writing creates, and the one above them
        self._above = parents[: is_there.index(True) + 1] if True in is_there else []

    def write(self, name: str, parts: Sequence[Any]) -> None:
        with self._new(path := f"{self.name}/{name}") as file:
            for part in parts:
                left = memoryview(part)
                while len(left):
                    left = left[file.write(left[:_PIECE]) :]
                    _begin_to_write_out(file)
            os.fsync(file.fileno())
        _fsync(os.path.dirname(path))

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not (self._path / name).exists()]

    def _new(self, path: str) -> io.FileIO:
        try:
            return open(path, "wb", buffering=0)
        except FileNotFoundError:  # the first file in its folder
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return open(path, "wb", buffering=0)

    def create(self, name: str, content: bytes) -> bool:
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return False
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            unfinished.write_bytes(content)
            for one in (unfinished, *self._path.iterdir(), self._path, *self._above):
                if one == unfinished or (one.is_dir() and os.access(one, os.R_OK)):
                    _fsync(one)
            try:
                os.link(unfinished, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with contextlib.suppress(FileExistsError), open(path, "xb", buffering=0) as file:
                    file.write(content)
                    os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        _fsync(path.parent)
        return True

    def read(
        self, name: str, most: int, memory: Memory | None = new_memory, has_size: bool = False
    ) -> np.ndarray:
        del has_size
        try:
            # what is no file, such as a named pipe, is not waited for
            opener = lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
            with open(f"{self.name}/{name}", "rb", buffering=0, opener=opener) as file:
                kind, size = (found := os.fstat(file.fileno())).st_mode, found.st_size
                if not stat.S_ISREG(kind):
                    raise CorruptCheckpointError(f"{name} is no regular file")
                if size > most:
                    raise CorruptCheckpointError(
                        f"{name} has {size:,} bytes, expected at most {most:,}"
                    )
                if hasattr(os, "posix_fadvise"):  # the system reads further ahead
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                if memory is None and size:
                    return np.asarray(np.memmap(file, np.uint8, "r"))
                content = (memory or new_memory)(size)
                left = content.data
                while len(left):
                    if not (count := file.readinto(left)):
                        raise CorruptCheckpointError(f"{name} is cut short")
                    left = left[count:]
                return content
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if error.errno == errno.ENOENT:
                raise MissingError(f"{name} is missing") from error
            raise CorruptCheckpointError(f"{name}: {error.strerror}") from error

    def entries(self, folder: str) -> list[str]:
        if self._path.is_file():
            raise NotADirectoryError(f"{self.name} is a file, not the folder of a Checkpointer")
        path = self._path / folder
        return sorted(f"{folder}/{name}" for name in os.listdir(path)) if path.is_dir() else []

    def delete(self, name: str) -> None:
        path = self._path / name
        while path.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process deletes it, too
                shutil.rmtree(path)
        path.unlink(missing_ok=True)


def _begin_to_write_out(file: io.FileIO) -> None:
    """Start to write a file's bytes to the disk, without waiting: the disk would be idle until
    `fsync` otherwise. Linux does so on this hint, and drops from memory what the disk has."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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

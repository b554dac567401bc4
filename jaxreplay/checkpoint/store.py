"""Files under one path: a local folder, or any store that TensorStore opens by URL. A file that holds an array is never changed.

Nothing is buffered here: what is written goes out of the caller's memory, and what is read into it.
"""

import contextlib
import ctypes
import errno
import functools
import os
import pathlib
import shutil
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)  # other errors may be well the next time
_TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "CANCELLED")
LARGE = 2**20  # bytes of a file that is worth a thread
_PIECE = 2**20  # bytes that are read or written at a time, and given to the disk at once: it has nothing to do otherwise until `sync`


class BrokenError(ValueError):
    """Something stored is missing, cut short, or other than it was written."""


def store_at(path: Any) -> "Folder | Objects":
    """What lies under a path or URL, such as "runs/replay", "memory://replay/" or "s3://bucket/replay/"."""
    text = os.path.expanduser(os.fspath(path))
    if text.startswith("file://"):
        text = urllib.parse.unquote(text.removeprefix("file://"))
    return Objects(text) if "://" in text else Folder(text)


class Folder:
    """A local one, which need not be there yet."""

    is_far = False  # whether each file takes a while to come, so that those that belong together are asked for together

    def __init__(self, path: str):
        self._path = pathlib.Path(path).absolute()
        self.name = str(self._path)
        parents = list(self._path.parents)
        is_there = [parent.is_dir() for parent in parents]
        self._above = parents[: is_there.index(True) + 1] if True in is_there else []  # those that are made with it, and theirs

    def write(self, name: str, parts: Sequence[Any]) -> None:
        """A new file, of buffers of bytes one after another. It is safe after `sync`."""
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            begun = end = 0
            for part in parts:
                left = memoryview(part)
                while len(left):
                    count = file.write(left[:_PIECE])
                    left, end = left[count:], end + count
                    if end - begun >= _PIECE:
                        _begin_to_write_out(file.fileno(), begun, end - begun)
                        begun = end

    def expect(self, name: str) -> None:
        """Say that a file will be read soon: a small one comes meanwhile. A large one would then lie in small pages, slower to copy."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), open(f"{self.name}/{name}", "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < LARGE:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def forget(self, name: str) -> None:
        """A file that was expected, or all in a folder, will not be read after all."""

    def read(self, name: str, parts_of: Callable[[int], Sequence[Any]], tell: Callable[[Any], Any] = lambda _: None) -> None:
        """Fill arrays of bytes, one after another, with a file's.

        Args:
          parts_of: gives them, told how many bytes the file has. tell: called with each piece that was read, in turn, while a cache has it.

        Raises:
          BrokenError: there is no such file, or it is shorter now. OSError: it cannot be read at the moment.
        """
        try:
            with open(f"{self.name}/{name}", "rb", buffering=0) as file:
                if (size := os.fstat(file.fileno()).st_size) >= LARGE and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the system reads further ahead
                for part in parts_of(size):
                    left = part
                    while len(left):
                        if not (count := file.readinto(left[:_PIECE])):
                            raise BrokenError(f"{name} is cut short")
                        tell(left[:count])
                        left = left[count:]
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise BrokenError(f"{name} is missing" if error.errno == errno.ENOENT else f"{name}: {error.strerror}") from error

    def get(self, name: str) -> bytes:
        """A short file."""
        return _whole(self, name)

    def sync(self, folder: str) -> None:
        """Wait until the disk has all that is in a folder: what was created there is not safe before."""
        if not (self._path / folder).is_dir():
            return
        _sync_all(self._path / folder)
        for inner, _, files in os.walk(self._path / folder):
            for name in [*files, "."]:
                _fsync(os.path.join(inner, name))

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        """Write a file, whole or not at all, once the disk has what is in some folders: their names alone, which are not in `sync`."""
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

    def entries(self, folder: str) -> list[str]:
        """Files and folders in a folder, in the order of names; also what a killed process left unfinished."""
        return sorted(os.listdir(self._path / folder)) if (self._path / folder).is_dir() else []

    def delete(self, name: str) -> None:
        """A file, or a folder with all that is in it."""
        if (self._path / name).is_dir():
            shutil.rmtree(self._path / name)
        else:
            (self._path / name).unlink()


class Objects:
    """What TensorStore opens by URL. The methods are `Folder`'s; what takes long is under way until it is waited for."""

    is_far = True

    def __init__(self, url: str):
        self.name = url
        self._files = ts.KvStore.open(f"{url.removesuffix('/')}/", context=_context()).result()
        self._written: dict[str, Any] = {}  # futures, by name
        self._expected: dict[str, Any] = {}

    def write(self, name: str, parts: Sequence[Any]) -> None:
        self._written[name] = self._files.write(name, b"".join(parts))

    def expect(self, name: str) -> None:
        """What comes is held in memory until it is read."""
        self._expected[name] = self._files.read(name)

    def forget(self, name: str) -> None:
        for other in _under(name, self._expected):
            self._expected.pop(other)

    def read(self, name: str, parts_of: Callable[[int], Sequence[Any]], tell: Callable[[Any], Any] = lambda _: None) -> None:
        try:
            found = (self._expected.pop(name, None) or self._files.read(name)).result()
        except (ValueError, OSError, RuntimeError) as error:
            if any(word in str(error) for word in _TRANSIENT):
                raise
            raise BrokenError(f"{name}: {error}") from error
        if found.state != "value":
            raise BrokenError(f"{name} is missing")
        content, start = np.frombuffer(found.value, np.uint8), 0
        for part in parts_of(len(content)):
            if start + len(part) > len(content):
                raise BrokenError(f"{name} is cut short")
            part[:] = content[start : start + len(part)]
            tell(part)
            start += len(part)

    def get(self, name: str) -> bytes:
        return _whole(self, name)

    def sync(self, folder: str) -> None:
        futures = [self._written.pop(name) for name in _under(folder, self._written)]
        errors = [error for future in futures if (error := future.exception()) is not None]  # all of them have ended then
        if errors:
            raise errors[0]

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        self._files.write(name, content).result()

    def entries(self, folder: str) -> list[str]:
        keys = self._files.list(ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")).result()
        return sorted({key.decode().removeprefix(f"{folder}/").split("/")[0] for key in keys})

    def delete(self, name: str) -> None:
        with contextlib.suppress(Exception):  # of a save that was given up
            self.sync(name)
        self._files.write(name, None).result()
        self._files.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()


Store = Folder | Objects


def array_name(kind: str, folder: str, leaf: str) -> str:
    """Where a leaf's array lies; a slash in its name opens no folder."""
    return f"{kind}/{folder}/{urllib.parse.quote(leaf, safe='')}"


def _under(folder: str, names: dict[str, Any]) -> list[str]:
    return [name for name in list(names) if name == folder or name.startswith(f"{folder}/")]


def _whole(store: Store, name: str) -> bytes:
    content = np.empty(0, np.uint8)

    def parts_of(size: int) -> list[np.ndarray]:
        nonlocal content
        content = np.empty(size, np.uint8)
        return [content]

    store.read(name, parts_of)
    return content.tobytes()


def _fsync(path: Any) -> None:
    """Wait until the disk has a file, or a folder's names, where the system can wait for these."""
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
    """Tell the system that the disk may have these bytes of a file now, where it can be told; and wait for nothing."""
    if call := _sync_file_range():
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None


def _sync_all(folder: Any) -> None:
    """All of a folder's file system at once, where the system can: many small files then wait for little each. Errors come from these."""
    try:
        call = ctypes.CDLL(None).syncfs
    except (OSError, AttributeError, TypeError):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        call(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def _context() -> Any:
    """One for all, so that "memory://" is the same memory everywhere."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})

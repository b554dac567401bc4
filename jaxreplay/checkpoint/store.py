"""Arrays and short files under one path, by TensorStore: a local folder, or any store that it opens by URL.

An array is written once, in zarr's third format, and never changed. Each of its chunks ends with a checksum; its description has none, so
that whoever writes an array keeps its seal, a checksum of the description, and hands it in to read the array again.
"""

import ctypes
import errno
import functools
import os
import pathlib
import shutil
import urllib.parse
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

_DESCRIPTION = "zarr.json"
_TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "CANCELLED")


class BrokenError(ValueError):
    """Something stored is missing, cut short, or other than it was written."""


class Store:
    """What lies under a path or URL, such as "runs/replay", "memory://replay/" or "s3://bucket/replay/"."""

    def __init__(self, path: Any):
        text = os.path.expanduser(os.fspath(path))
        if text.startswith("file://"):
            text = urllib.parse.unquote(text.removeprefix("file://"))
        self._local = None if "://" in text else pathlib.Path(text).absolute()
        self.name = text if self._local is None else str(self._local)
        parents = [] if self._local is None else list(self._local.parents)
        is_there = [parent.is_dir() for parent in parents]
        self._above = parents[: is_there.index(True) + 1] if True in is_there else []  # those that are made with it, and theirs
        spec = f"{text.removesuffix('/')}/" if self._local is None else {"driver": "file", "path": f"{self._local}/"}
        self._files = ts.KvStore.open(spec, context=_context()).result()

    def create(self, name: str, shape: tuple[int, ...], dtype: Any, chunk_rows: int, level: int | None) -> Any:
        """A new array, to be written in blocks of `chunk_rows` along the first axis. `level`: of zstd; None: not compressed."""
        codecs: list[dict[str, Any]] = [{"name": "bytes"}, {"name": "crc32c"}]
        if level is not None:
            codecs.insert(1, {"name": "zstd", "configuration": {"level": level}})
        chunk = (chunk_rows, *shape[1:]) if shape else ()
        metadata = {
            "shape": shape,
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},  # one folder an array
            "codecs": codecs,
        }
        return ts.open(self._spec(name) | {"metadata": metadata, "create": True}, context=_context())

    def seal(self, name: str) -> int:
        return zlib.crc32(self.get(f"{name}/{_DESCRIPTION}"))

    def open(self, name: str, shape: tuple[int, ...], dtype: Any, seal: int) -> Any:
        """An array that was written, to be read."""
        return self.opening(name, shape, dtype, seal)()

    def opening(self, name: str, shape: tuple[int, ...], dtype: Any, seal: int) -> Callable[[], Any]:
        """The same in two steps, so that many are opened at once: what is returned gives the array."""
        description = self._files.read(f"{name}/{_DESCRIPTION}")
        opened = ts.open(self._spec(name) | {"open": True}, context=_context())

        def result() -> Any:
            found = checked(f"{name}/{_DESCRIPTION}", description.result)
            if found.state != "value":
                raise BrokenError(f"{name}/{_DESCRIPTION} is missing")
            if zlib.crc32(found.value) != seal:
                raise BrokenError(f"{name}/{_DESCRIPTION} is not as it was written")
            array = checked(name, opened.result)
            if (array.shape, array.dtype.numpy_dtype) != (tuple(shape), np.dtype(dtype)):
                raise BrokenError(f"{name}: got {array.dtype.numpy_dtype}{list(array.shape)}, expected {np.dtype(dtype)}{list(shape)}")
            return array

        return result

    def sync(self, folder: str) -> None:
        """Wait until the disk has all that is in a folder: what was created there is not safe before. Other stores are safe at once."""
        if self._local is None or not (self._local / folder).is_dir():
            return
        _sync_all(self._local / folder)
        for inner, _, files in os.walk(self._local / folder):
            for name in [*files, "."]:
                _fsync(os.path.join(inner, name))

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        """Write a file, whole or not at all, once the disk has what is in some folders: their names alone, which are not in `sync`."""
        if self._local is None:
            self._files.write(name, content).result()
            return
        path, unfinished = self._local / name, self._local / f"{name}.new"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        _fsync(unfinished)
        folders = [self._local / folder for folder in after]
        for folder in [*folders, self._local, *self._above]:
            if folder.is_dir() and os.access(folder, os.R_OK):
                _fsync(folder)
        unfinished.replace(path)
        _fsync(path.parent)

    def get(self, name: str) -> bytes:
        found = self._files.read(name).result()
        if found.state != "value":
            raise BrokenError(f"{name} is missing")
        return found.value

    def entries(self, folder: str) -> list[str]:
        """Files and folders in a folder, in the order of names; of a local one also what a killed process left unfinished."""
        if self._local is not None:
            return sorted(os.listdir(self._local / folder)) if (self._local / folder).is_dir() else []
        keys = self._files.list(ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")).result()
        return sorted({key.decode().removeprefix(f"{folder}/").split("/")[0] for key in keys})

    def delete(self, name: str) -> None:
        """A file, or a folder with all that is in it."""
        if self._local is None:
            self._files.write(name, None).result()
            self._files.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()
        elif (self._local / name).is_dir():
            shutil.rmtree(self._local / name)
        else:
            (self._local / name).unlink()

    def _spec(self, name: str) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": (self._files / f"{name}/").spec().to_json(),
            # A chunk of zeros is written too, so that one that is missing is an error.
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }


def array_name(kind: str, folder: str, leaf: str) -> str:
    """Where a leaf's array lies; a slash in its name opens no folder."""
    return f"{kind}/{folder}/{urllib.parse.quote(leaf, safe='')}"


def checked(name: str, read: Callable[[], Any]) -> Any:
    """What a function reads, or a BrokenError that names what it was to read. What may be well the next time is another error."""
    try:
        return read()
    except (ValueError, OSError, RuntimeError) as error:
        if any(word in str(error) for word in _TRANSIENT):
            raise
        raise BrokenError(f"{name}: {error}") from error


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
    """One for all, so that "memory://" is the same memory everywhere; few writes at once, so that few are held in memory."""
    limits = {"file_io_concurrency": {"limit": 4}, "data_copy_concurrency": {"limit": 2}, "cache_pool": {"total_bytes_limit": 0}}
    return ts.Context({**limits, "file_io_sync": False})  # `sync` does it, beside the next write

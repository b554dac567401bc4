"""Array files of NumPy in a folder, mapped into memory."""

import errno
import io
import math
import mmap
import os
import pathlib
import re
import shutil
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxreplay._util.aliases import Specs

_PAGE = mmap.PAGESIZE


class ArrayFiles:
    """Arrays in the files of a folder, mapped into memory.

    Args:
      folder: The folder, with what `make` left there.
      specs: Shapes and dtypes of the arrays, [N, ...], by kind and name.
      mark: Bytes that the files of no other folder have.

    Attributes:
      arrays: The arrays, by kind and name.

    Raises:
      ValueError: A file is missing, damaged, or that of another folder.
    """

    def __init__(self, folder: pathlib.Path, specs: Mapping[Any, Specs], mark: bytes):
        self.folder = folder
        self.arrays: dict[Any, np.ndarray] = {}
        self._maps: dict[Any, mmap.mmap] = {}
        self._starts: dict[Any, int] = {}  # places of the first rows in their files
        self._files: dict[Any, int] = {}  # closed at the latest with this object
        self._closed = weakref.finalize(self, _close_all, self._files)
        try:
            for nth, (key, spec) in enumerate(specs.items()):
                self._open(key, folder / _file_name(nth, key), spec, _last(mark, nth))
        except BaseException:
            self.close()
            raise

    def _open(self, key: Any, path: pathlib.Path, spec: Specs, last: bytes) -> None:
        check_file(path)
        header, size = _header(spec), _size(spec)
        try:
            with open(path, "rb") as file:
                found = file.read(len(header))
                file.seek(len(header) + size)
                its_last = file.read()
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing, so that the rows are damaged") from error
        if found != header:
            raise ValueError(f"{path} is no array file of {spec.dtype}{[*spec.shape]}")
        if len(its_last) != len(last):
            raise ValueError(f"{path} is cut or damaged")
        if its_last != last:
            raise ValueError(f"{path} is the file of another folder, or of another leaf")
        self._files[key] = os.open(path, os.O_RDWR)
        self._maps[key], self._starts[key] = mmap.mmap(self._files[key], 0), len(header)
        self._maps[key].madvise(mmap.MADV_RANDOM)
        self.arrays[key] = np.ndarray(spec.shape, spec.dtype, self._maps[key], len(header))

    def write(self, key: Any, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows, int64[K], of an array."""
        array = self.arrays[key]
        if array[:1].nbytes < _PAGE or not len(rows):
            array[rows] = values
            return
        # Through a map, a page that is overwritten would be read first.
        file, start, size = self._files[key], self._starts[key], array[:1].nbytes
        values = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        for row, value in zip(rows.tolist(), values, strict=True):
            at, left = start + row * size, memoryview(value)
            while len(left):
                written = os.pwrite(file, left, at)
                at, left = at + written, left[written:]

    def advise(self, key: Any, rows: np.ndarray) -> None:
        """Ask the system to read all pages of rows at once, in the background."""
        size = self.arrays[key][:1].nbytes
        start = self._starts[key] + np.sort(rows).astype(np.int64) * size
        first, last = start // _PAGE, (start + max(size, 1) - 1) // _PAGE
        is_new = np.append(True, first[1:] > last[:-1] + 1)
        firsts, lasts = first[is_new], last[np.append(is_new[1:], True)]
        for one, other in zip(firsts.tolist(), lasts.tolist(), strict=True):
            self._maps[key].madvise(mmap.MADV_WILLNEED, one * _PAGE, (other - one + 1) * _PAGE)

    def flush(self) -> None:
        """Wait until the files are on the disk."""
        for file in self._files.values():
            getattr(os, "fdatasync", os.fsync)(file)

    def close(self) -> None:
        self.arrays, self._maps = {}, {}
        self._closed()


def make(folder: pathlib.Path, specs: Mapping[Any, Specs], mark: bytes) -> None:
    """Make the files of a folder, of zeros, for `ArrayFiles`.

    Raises:
      OSError: The disk has too little space.
    """
    folder.mkdir()
    needs, free = sum(map(_size, specs.values())), shutil.disk_usage(folder).free
    if needs > free:
        raise OSError(
            errno.ENOSPC,
            f"the rows take {needs:,} bytes, but the disk has {free:,} free; rows that are "
            "replaced stay until the new ones are there, unless they are cleared before",
            str(folder.parent),
        )
    for nth, (key, spec) in enumerate(specs.items()):
        with open(folder / _file_name(nth, key), "wb") as file:
            header, size = _header(spec), _size(spec)
            file.write(header)
            file.flush()
            _reserve(file.fileno(), len(header), size)
            os.pwrite(file.fileno(), _last(mark, nth), len(header) + size)
    for one in (folder, folder.parent):
        _sync(one)


def check_file(path: pathlib.Path) -> None:
    """Raise a ValueError for what would be waited for, such as a named pipe."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, so that the rows are damaged")


def _size(spec: Specs) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _header(spec: Specs) -> bytes:
    """Return the first bytes of an array file."""
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(spec.dtype))
    header = {"descr": descr, "shape": spec.shape, "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def _last(mark: bytes, nth: int) -> bytes:
    """Return the last bytes of a file, after its array: whose it is, and which."""
    return mark + nth.to_bytes(8, "little")


def _file_name(nth: int, key: tuple[str, str]) -> str:
    """Return the name of a file, with its number, since names of leaves may be long, or differ in
    signs that a file's name cannot have."""
    return f"{nth}-{re.sub(r'[^A-Za-z0-9_.-]', '_', '.'.join(key).rstrip('.'))[:100]}.npy"


def _close_all(files: dict[Any, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()


def _reserve(file: int, start: int, size: int) -> None:
    """Reserve space of a file, filled with zeros."""
    if not size:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
        return
    zeros = bytes(2**20)
    for at in range(start, start + size, len(zeros)):
        os.pwrite(file, zeros[: start + size - at], at)


def _sync(path: pathlib.Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Rows in the files of a folder, mapped into memory, and a journal of what they are.

Each leaf is an array file of NumPy, which any program can map. The journal has the flags of each
row and, for each env, which rows are complete. It is kept in mapped memory, too, so that a process
that is killed leaves it whole: the index is rebuilt from it.
"""

import contextlib
import errno
import json
import math
import mmap
import os
import pathlib
import re
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxreplay._util.aliases import Specs
from jaxreplay._util.names import spec_of, spec_text
from jaxreplay.storage.host_rows import HostRows

fcntl: Any = None
with contextlib.suppress(ImportError):  # on Windows
    import fcntl

_FORMAT = 2
_PAGE = mmap.PAGESIZE
_MOST_BRANCHES = 100  # earlier tokens whose checkpoints can be loaded: 400 bytes each for 64 envs
# Seconds a row, and a byte of them, above which rows count as read from the disk.
_SLOW, _SLOW_BYTE = 5e-6, 5e-10
# Rows of the progress, int64[3, E]: the numbers of the oldest row, which no write has begun to
# overwrite, and of the next one; and the flags of the newest row.
FIRST, END, LAST_FLAGS = range(3)


class FileRows(HostRows):
    """Rows of some leaves in files, by their numbers.

    It opens the rows that a folder has, or makes new ones, of zeros. The folder, which must lie on
    a local disk, is locked until it is closed or the process ends.

    Args:
      folder: The folder. It is made if it does not exist.
      about: What the rows are, JSON, with `num_envs` E and the `length` of the ring of each: equal
        each time that the folder is opened.
      specs: Shape and dtype of a row of each leaf, by name.
      journal: The same of what the journal has of each row.

    Attributes:
      token: Text that no other rows have. It changes each time that the folder is opened, with
        `forget`, `go_on_from` and `begin_rewrite`.
      journal: All rows of what the journal has, by name.
      progress: int64[3, E], as above.

    Raises:
      BlockingIOError: Another process, or another object here, has the folder open.
      ValueError: The folder has other rows, or files that are damaged.
      OSError: The disk has too little space, or the system is Windows.
    """

    def __init__(
        self,
        folder: Any,
        about: Mapping[str, Any],
        specs: Mapping[str, Specs],
        journal: Mapping[str, Specs],
    ):
        self._folder = pathlib.Path(folder).absolute()
        num_envs, self._length = about["num_envs"], about["length"]
        if fcntl is None:
            raise OSError(errno.ENOSYS, "rows in files need Linux or macOS", str(self._folder))
        if self._folder.exists() and not self._folder.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "rows need a folder, and this is a file", str(self._folder)
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        # open files by what they have, closed at the latest with this object
        self._files: dict[Any, int] = {"lock": _locked(self._folder / "lock")}
        _OPEN.add(self)
        self._closed = weakref.finalize(self, _close_all, self._files)
        # shapes and dtypes of the files, by the kind and name of what they have
        shapes: dict[tuple[str, str], Any] = {
            (kind, name): ((num_envs * self._length, *spec.shape), np.dtype(spec.dtype))
            for kind, own in (("rows", specs), ("journal", journal))
            for name, spec in own.items()
        }
        shapes["journal", "progress"] = (1 + 6 * num_envs,), np.dtype(np.int64)
        texts = {name: spec_text(spec) for name, spec in specs.items()}
        own = {"format": _FORMAT, **about, "leaves": texts}
        self._rows = self._folder / "rows"
        self._maps: dict[str, mmap.mmap] = {}
        self._starts: dict[str, int] = {}  # places of the first rows in their files
        self.arrays, self.journal = {}, {}
        try:
            if is_new := not self._rows.exists():
                new = {"id": secrets.token_hex(8), "token": secrets.token_hex(8), "branches": {}}
                self._make({**own, **new}, shapes)
            self._about = self._read_about(own)
            # in the order in which they were made: that of a pytree of another kind may differ
            names = [("rows", name) for name in self._about["leaves"]]
            shapes = {key: shapes[key] for key in (*names, *shapes)}
            # by which it is written also if it is renamed
            self._files["folder"] = os.open(self._rows, os.O_RDONLY)
            for nth, (key, (shape, dtype)) in enumerate(shapes.items()):
                path, mark = self._rows / _file_name(nth, key), _mark(self._about, nth)
                self._open(key, path, shape, dtype, mark)
        except BaseException:
            self.close()
            raise
        self._slots = self.journal.pop("progress")
        first, end, last_flags = self.progress
        is_possible = (first >= 0) & (first <= end) & (end <= first + self._length)
        if not (is_possible & (last_flags >= 0) & (last_flags < 256)).all():
            self.close()
            raise ValueError(f"{self._rows}: the journal has numbers of rows that cannot be")
        self._is_cold: dict[int, bool] = {}  # whether the last rows that a thread took were
        self._is_saved = True  # an index may have the token
        if not is_new:  # copies of a folder go on with tokens of their own
            with contextlib.suppress(OSError):  # a full disk can be read still
                self.go_on_from(end)

    @property
    def token(self) -> str:
        return self._about["token"]

    # The files.

    def _make(self, about: Mapping[str, Any], shapes: Mapping[Any, Any]) -> None:
        """Make files of zeros. The folder of an attempt that failed is removed first."""
        unfinished = self._folder / "rows.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            needs = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
            free = shutil.disk_usage(unfinished).free
            if needs > free:
                raise OSError(
                    errno.ENOSPC,
                    f"the rows take {needs:,} bytes, but the disk has {free:,} free",
                    str(self._folder),
                )
            for nth, (key, (shape, dtype)) in enumerate(shapes.items()):
                path = unfinished / _file_name(nth, key)
                with open(path, "wb") as file:
                    header = {"descr": np.lib.format.dtype_to_descr(dtype), "shape": shape}
                    np.lib.format.write_array_header_1_0(file, {**header, "fortran_order": False})
                    start, size = file.tell(), math.prod(shape) * dtype.itemsize
                    file.flush()
                    _reserve(file.fileno(), start, size)
                    os.pwrite(file.fileno(), _mark(about, nth), start + size)
            folder = os.open(unfinished, os.O_RDONLY)
            try:
                _write_json(folder, about)
            finally:
                os.close(folder)
            unfinished.rename(self._rows)
            _sync(self._folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _read_about(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the folder says of its rows. Raise a ValueError if others are wanted."""
        found, lines = _found_about(self._rows / "rows.json"), []
        for name, value in own.items():
            if name == "leaves":
                its = found[name]
                lines += [
                    f"{leaf}: the folder has {its.get(leaf, 'nothing')}, this buffer "
                    f"{value.get(leaf, 'nothing')}"
                    for leaf in dict.fromkeys([*its, *value])
                    if its.get(leaf) != value.get(leaf)
                ]
            elif found.get(name) != value:
                lines.append(f"{name}: the folder has {found.get(name)!r}, this buffer {value!r}")
        if lines:
            raise ValueError(
                "\n  ".join([f"{self._folder} has the rows of another buffer:", *lines])
            )
        return found

    def _open(
        self, key: Any, path: pathlib.Path, shape: tuple[int, ...], dtype: Any, mark: bytes
    ) -> None:
        """Map the file of a leaf, or of a part of the journal."""
        kind, name = key
        _check_file(path)
        try:
            with open(path, "rb") as file:
                np.lib.format.read_magic(file)
                found = np.lib.format.read_array_header_1_0(file)
                start, size = file.tell(), math.prod(shape) * dtype.itemsize
                file.seek(start + size)
                own = file.read(len(mark))
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing, so that the rows are damaged") from error
        except ValueError as error:
            raise ValueError(f"{path} is no array file: {error}") from error
        if found != (shape, False, dtype):
            raise ValueError(f"{path} has {found[2]}{[*found[0]]}, not {dtype}{[*shape]}")
        if (has := os.path.getsize(path)) != start + size + len(mark):
            raise ValueError(
                f"{path} has {has:,} bytes, not {start + size + len(mark):,}: it is cut or damaged"
            )
        if own != mark:
            raise ValueError(f"{path} is the file of another folder, or of another leaf")
        self._files[key] = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(self._files[key], 0)
        if kind == "rows":
            self._maps[name], self._starts[name] = mapped, start
            mapped.madvise(mmap.MADV_RANDOM)
        of_kind = self.arrays if kind == "rows" else self.journal
        of_kind[name] = np.ndarray(shape, dtype, mapped, start)

    # Rows.

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        array = self.arrays[name]
        if array[:1].nbytes < _PAGE or not len(rows):
            array[rows] = values
            return
        # Through a map, a page that is overwritten would be read first.
        file, start, size = self._files["rows", name], self._starts[name], array[:1].nbytes
        values = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        for row, value in zip(rows.tolist(), values, strict=True):
            at, left = start + row * size, memoryview(value)
            while len(left):
                written = os.pwrite(file, left, at)
                at, left = at + written, left[written:]

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        if not rows.size:
            return super().take(name, rows)
        since = time.perf_counter()
        thread = threading.get_ident()
        if self._is_cold.get(thread, True):
            self._advise(name, rows.reshape(-1))
        found = super().take(name, rows)
        seconds = time.perf_counter() - since
        self._is_cold[thread] = seconds > _SLOW * rows.size + _SLOW_BYTE * found.nbytes
        return found

    def _advise(self, name: str, rows: np.ndarray) -> None:
        """Ask the system to read all pages of rows at once, in the background."""
        size = self.arrays[name][:1].nbytes
        start = self._starts[name] + np.sort(rows).astype(np.int64) * size
        first, last = start // _PAGE, (start + max(size, 1) - 1) // _PAGE
        is_new = np.append(True, first[1:] > last[:-1] + 1)
        firsts, lasts = first[is_new], last[np.append(is_new[1:], True)]
        mapped = self._maps[name]
        for one, other in zip(firsts.tolist(), lasts.tolist(), strict=True):
            mapped.madvise(mmap.MADV_WILLNEED, one * _PAGE, (other - one + 1) * _PAGE)

    # The journal.

    @property
    def progress(self) -> np.ndarray:
        return self._slots[1:].reshape(2, 3, -1)[self._slots[0] & 1].copy()

    def _announce(self, progress: np.ndarray) -> None:
        """Replace the progress: one store of 8 bytes makes all of it visible."""
        slot = 1 - (self._slots[0] & 1)
        self._slots[1:].reshape(2, 3, -1)[slot] = progress
        self._slots[0] = slot

    def begin(self, number: np.ndarray) -> None:
        progress = self.progress
        # of a block that is longer than the ring no row before it stays
        oldest = np.minimum(number - self._length, progress[END])
        progress[FIRST] = np.maximum(progress[FIRST], oldest)
        self._announce(progress)

    def end(self, number: np.ndarray, last_flags: Any, first: np.ndarray | None = None) -> None:
        """Note that all rows before some are written.

        Args:
          number: int64[E], the number of each env's next row.
          last_flags: uint8[E], flags of the newest rows.
          first: int64[E], the number of each env's oldest row. Default: as it was, of a ring.
        """
        progress = self.progress
        progress[END], progress[LAST_FLAGS] = number, last_flags
        oldest = np.maximum(progress[FIRST], number - self._length)
        progress[FIRST] = oldest if first is None else first
        self._announce(progress)

    def forget(self) -> None:
        self._renew({})  # first: no checkpoint of the index may find the rows that replace these
        self._announce(np.zeros_like(self.progress))

    # Saved indices.

    def go_on_from(self, end: np.ndarray) -> None:
        """Take another token, before the rows go on from the numbers int64[E]."""
        limits = {**self._about["branches"], self.token: end}
        branches = {token: np.minimum(limit, end).tolist() for token, limit in limits.items()}
        self._renew(dict([*branches.items()][-_MOST_BRANCHES:]))

    def begin_rewrite(self) -> None:
        # no checkpoint of the index may find other values than it had
        if self._is_saved or self._about["branches"]:
            self._renew({})

    def _renew(self, branches: Mapping[str, Any]) -> None:
        """Take another token.

        Args:
          branches: Earlier tokens, each with the numbers of each env's first row that may be
            replaced, int64[E], as lists.
        """
        about = {**self._about, "branches": branches, "token": secrets.token_hex(8)}
        try:
            _write_json(self._files["folder"], about)
        except FileNotFoundError as error:
            why = "the folder was deleted while its rows were in use"
            raise FileNotFoundError(errno.ENOENT, why, str(self._rows)) from error
        self._about, self._is_saved = about, False

    def since(self, token: str, end: np.ndarray) -> np.ndarray | None:
        """Return the number of the oldest row of each env, int64[E], that was not overwritten since
        the rows had a token; None if they never had it, or if a row before int64[E] is not there,
        or was replaced by another one of the same number."""
        first, newest, _ = self.progress
        # `first` grows, or falls to the end of a load that leaves no row: older rows are gone.
        limit = {**self._about["branches"], self.token: newest}.get(token, np.full_like(end, -1))
        return first if (end <= limit).all() else None

    def flush(self) -> str | None:
        for file in self._files.values():
            getattr(os, "fdatasync", os.fsync)(file)
        self._is_saved = True
        return self.token

    def close(self) -> None:
        """Unlock the folder. The rows stay there."""
        super().close()
        self._closed()
        self._maps, self.journal = {}, {}


def leaves_of(folder: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of a row of each leaf that a folder has, by name; {} without rows.

    Raises:
      ValueError: They cannot be read.
    """
    path = pathlib.Path(folder) / "rows" / "rows.json"
    if not path.parent.exists():
        return {}
    return {name: spec_of(text) for name, text in _found_about(path)["leaves"].items()}


def _found_about(path: pathlib.Path) -> dict[str, Any]:
    """Return what a folder says of its rows. Raises a ValueError if it is damaged."""
    _check_file(path)
    try:
        found = json.loads(path.read_text())
        if found["format"] == _FORMAT:
            bytes.fromhex(found["token"] + found.get("id", ""))
            for text in found["leaves"].values():
                spec_of(text)
            for limits in found["branches"].values():
                numbers = np.array(limits)
                if numbers.shape != (found["num_envs"],) or numbers.dtype.kind != "i":
                    raise ValueError("branches have other numbers")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if found["format"] != _FORMAT:
        raise ValueError(f"{path} has the format {found['format']!r}; this version reads {_FORMAT}")
    return found


def _close_all(files: dict[Any, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()


def _file_name(nth: int, key: tuple[str, str]) -> str:
    """Return the name of a file, with its number, since names of leaves may be long, or differ in
    signs that a file's name cannot have."""
    return f"{nth}-{re.sub(r'[^A-Za-z0-9_.-]', '_', '.'.join(key).rstrip('.'))[:100]}.npy"


def _give_up_locks() -> None:
    """Close the locks of a process in a fork of it, which would keep the folders locked."""
    for store in list(_OPEN):
        if (lock := store._files.pop("lock", None)) is not None:
            os.close(lock)


_OPEN: weakref.WeakSet[FileRows] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_locks)


def _mark(about: Mapping[str, Any], nth: int) -> bytes:
    """Return the last bytes of a file, after its array: whose it is, and which. Those of earlier
    versions have none."""
    return bytes.fromhex(about["id"]) + nth.to_bytes(8, "little") if "id" in about else b""


def _check_file(path: pathlib.Path) -> None:
    """Raise a ValueError for what would be waited for, such as a named pipe."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, so that the rows are damaged")


def _locked(path: pathlib.Path) -> int:
    """Return an open file that is locked."""
    _check_file(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(file, 100, 0).decode(errors="replace") or "unknown"
        os.close(file)
        raise BlockingIOError(
            error.errno,
            f"its rows are in use by the process {owner}; one at a time may open them",
            str(path.parent),
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


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


def _write_json(folder: int, value: Any) -> None:
    """Write rows.json in an open folder; a crash leaves the one before or the new one."""
    here = lambda name, flags: os.open(name, flags, 0o644, dir_fd=folder)
    with open("rows.new", "w", opener=here) as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace("rows.new", "rows.json", src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _sync(path: pathlib.Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Rows in the files of a folder, mapped into memory, and a database that knows which are there.

Each leaf is an array file of NumPy, which any program can map, as are the flags of the rows. The
database of SQLite has the numbers of the rows that are complete. Rows are written before they are
counted. Values that take the place of others wait in the database until they are in their files,
and other files take the place of all rows at once. So a process that is killed leaves the rows from
before a call or from after it, but for the oldest ones, which the call overwrites.
"""

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import re
import secrets
import shutil
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxreplay._util.aliases import Specs
from jaxreplay._util.names import spec_of, spec_text
from jaxreplay.storage import array_files
from jaxreplay.storage.array_files import ArrayFiles
from jaxreplay.storage.host_rows import RowStore, copied_rows

_FORMAT = 1
_MOST_TOKENS = 100  # whose checkpoints can be loaded
_MOST_WAITING = 2**24  # bytes of values in the database, which has them twice
# Seconds a row, and a byte of them, above which rows count as read from the disk.
_SLOW, _SLOW_BYTE = 5e-6, 5e-10
# Rows of the progress, int64[3, E]: the numbers of the oldest row, which no write has begun to
# overwrite, and of the next one; and the flags of the newest row.
FIRST, END, LAST_FLAGS = range(3)

# journal, one row: what the rows are, the folder of their files, and the progress.
# tokens, newest last: of saved indices, and the numbers int64[E] up to which they have these rows.
# waiting: values of a kind, by name, for rows int64[K].
_TABLES = """
CREATE TABLE journal (about, files, progress); INSERT INTO journal DEFAULT VALUES;
CREATE TABLE tokens (number INTEGER PRIMARY KEY, token, until);
CREATE TABLE waiting (kind, name, place, content);
"""


class FileRows(RowStore):
    """Rows of some leaves in files, by their numbers.

    It opens the rows that a folder has, or makes new ones, of zeros. The folder, which must lie on
    a local disk, is locked until it is closed or the process ends.

    Args:
      folder: The folder. It is made if it does not exist.
      about: What the rows are, JSON, with `num_envs` E and the `length` of the ring of each: equal
        each time that the folder is opened.
      specs: Shape and dtype of a row of each leaf, by name.
      journal: The same of what is known of each row.

    Attributes:
      journal: All rows of what is known of them, by name.
      progress: int64[3, E], as above.
      token: Text that no other rows have, for a checkpoint of their index. It changes each time
        that the folder is opened, and with the rows before the newest ones.

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
        if not hasattr(os, "pwrite"):
            raise OSError(errno.ENOSYS, "rows in files need Linux or macOS", str(self._folder))
        if self._folder.exists() and not self._folder.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "rows need a folder, and this is a file", str(self._folder)
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._specs = {
            (kind, name): jax.ShapeDtypeStruct((num_envs * self._length, *spec.shape), spec.dtype)
            for kind, own in (("rows", specs), ("journal", journal))
            for name, spec in own.items()
        }
        self._files: Any = None  # those of the rows; and those that the database names
        self._named: Any = None
        self._is_cold: dict[int, bool] = {}  # whether the last rows that a thread took were
        self._is_known = True  # an index may have the token
        self._database: Any = _connected(self._folder)
        self._file_of_folder = os.open(self._folder, os.O_RDONLY)
        self._closed = weakref.finalize(self, _end, self._database, self._file_of_folder)
        _OPEN.add(self)
        try:
            own = {**about, "leaves": {name: spec_text(spec) for name, spec in specs.items()}}
            if (found := _found(self._database, self._folder)) is None:
                self._about = {**own, "id": secrets.token_hex(8)}
                self.progress = np.zeros((3, num_envs), np.int64)
                self._files = self._made()
            else:
                self._about, name, self.progress = found
                self._check_about(own)
                # in the order in which they were made: that of a pytree of another kind may differ
                keys = [("rows", leaf) for leaf in self._about["leaves"]]
                self._specs = {key: self._specs[key] for key in (*keys, *self._specs)}
                self._files = self._named = self._opened(self._folder / name)
                try:
                    self._put(self._waiting())
                except (ValueError, LookupError, TypeError) as error:
                    raise ValueError(f"{self._folder / _DATABASE} is damaged: {error!r}") from error
            self._text = json.dumps(self._about)
            is_new = found is None
            with contextlib.nullcontext() if is_new else contextlib.suppress(OSError):
                # A full disk can be read.
                self._commit(self.progress, until=self.progress[END])  # copies have their own
            for number in self._numbers():  # of a process that was killed
                if (left := self._folder / f"rows-{number}") != self._files.folder:
                    shutil.rmtree(left, ignore_errors=True)
        except BaseException:
            self.close()
            raise

    def _check_about(self, own: Mapping[str, Any]) -> None:
        """Raise a ValueError if other rows are wanted than the folder has."""
        found, lines = self._about, []
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

    def _made(self) -> ArrayFiles:
        """Return new files of zeros."""
        folder = self._folder / f"rows-{max([0, *self._numbers()]) + 1}"
        try:
            array_files.make(folder, self._specs, bytes.fromhex(self._about["id"]))
            return self._opened(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _numbers(self) -> list[int]:
        """Return the numbers of the folders of files. Others, such as rows-1-copy, are not ours."""
        names = [one.name for one in self._folder.glob("rows-*")]
        return [int(name[5:]) for name in names if re.fullmatch(r"rows-[1-9]\d*", name)]

    def _opened(self, folder: pathlib.Path) -> ArrayFiles:
        return ArrayFiles(folder, self._specs, bytes.fromhex(self._about["id"]))

    def whole(self, name: str) -> np.ndarray:
        return self._files.arrays["rows", name]

    @property
    def journal(self) -> dict[str, np.ndarray]:
        arrays = self._files.arrays.items()
        return {name: array for (kind, name), array in arrays if kind == "journal"}

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        self._files.write(("rows", name), rows, values)

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        since, thread = time.perf_counter(), threading.get_ident()
        if rows.size and self._is_cold.get(thread, True):
            self._files.advise(("rows", name), rows.reshape(-1))
        found = copied_rows(self._files.arrays["rows", name], rows)
        seconds = time.perf_counter() - since
        self._is_cold[thread] = seconds > _SLOW * rows.size + _SLOW_BYTE * found.nbytes
        return found

    # The journal.

    def begin(self, number: np.ndarray) -> None:
        # of a block that is longer than the ring no row before it stays
        progress = self.progress.copy()
        oldest = np.minimum(number - self._length, progress[END])
        progress[FIRST] = np.maximum(progress[FIRST], oldest)
        if (progress != self.progress).any():
            self._commit(progress)

    def end(
        self,
        number: np.ndarray,
        last_flags: np.ndarray | None,
        first: np.ndarray | None = None,
        known: Any = (),
        until: np.ndarray | None = None,
    ) -> None:
        """Note which rows are there, all at once.

        Args:
          number: int64[E], the number of each env's next row.
          last_flags: uint8[E], flags of the newest rows, or None.
          first: int64[E], the number of each env's oldest row. Default: as it was, of a ring.
          known: What is known of rows that were there already: its name, the rows, int64[K], and
            their values, [K, ...], each.
          until: int64[E], the numbers from which on the rows are others than before; the token
            changes. Default: none are.
        """
        oldest = np.maximum(self.progress[FIRST], number - self._length)
        oldest = oldest if first is None else first
        flags = np.zeros_like(number) if last_flags is None else last_flags
        progress = np.stack([oldest, number, flags])
        values = [(("journal", name), *of) for name, *of in known]
        self._commit(progress.astype(np.int64), values, until)

    def rewrite(self, leaves: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        # no checkpoint of the index may find other values than it had
        until = np.full_like(self.progress[END], -1) if self._is_known else None
        size = sum(values.nbytes for values in leaves.values())
        parts = min(size // _MOST_WAITING + 1, len(rows))
        if not parts:
            return
        for part in np.array_split(np.arange(len(rows)), parts):
            given = [(("rows", name), rows[part], values[part]) for name, values in leaves.items()]
            self._commit(self.progress, given, until)
            until = None
        self._is_known = False

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Give room for other rows, until the block ends. Those from before come back if it does
        not note which rows there are, by `end`."""
        before = self._files
        # Rows that are not there need no files of their own while others come.
        if (self.progress[FIRST] < self.progress[END]).any():
            self._files = self._made()
        try:
            yield
        finally:
            if self._named is not before:
                self.flush()
            for one in {before, self._files} - {self._named}:
                one.close()
                shutil.rmtree(one.folder, ignore_errors=True)
            self._files = self._named

    def _commit(self, progress: np.ndarray, values: Any = (), until: Any = None) -> None:
        """Note the progress, and values that take the place of others; then write these.

        Args:
          progress: int64[3, E].
          values: Kind and name of what they are of, their rows, int64[K], and values, each.
          until: As for `end`.
        """
        with self._transaction() as database:
            given = self._text, self._files.folder.name, progress.tobytes()
            database.execute("UPDATE journal SET about = ?, files = ?, progress = ?", given)
            for key, rows, new in values:
                rows = np.asarray(rows, np.int64)
                new = np.ascontiguousarray(new, self._files.arrays[key].dtype)
                for at in range(0, len(rows), _MOST_WAITING):  # a value has at most 1 GB
                    part = slice(at, at + _MOST_WAITING)
                    given = *key, rows[part].tobytes(), new[part].tobytes()
                    database.execute("INSERT INTO waiting VALUES (?, ?, ?, ?)", given)
            if until is not None:
                self._take_token(until)
        self.progress, self._named = progress, self._files
        self._put(values)

    def _put(self, values: Any) -> None:
        """Write values that wait in the database, as `_commit` has them."""
        if values:
            for key, rows, new in values:
                self._files.write(key, rows, new)
            with self._transaction() as database:
                database.execute("DELETE FROM waiting")

    def _waiting(self) -> list[Any]:
        """Return the values that wait in the database, as `_commit` has them."""
        found = []
        for *key, place, content in self._database.execute("SELECT * FROM waiting"):
            array = self._files.arrays[tuple(key)]
            rows, values = np.frombuffer(place, np.int64), np.frombuffer(content, array.dtype)
            found.append((tuple(key), rows, values.reshape(len(rows), *array.shape[1:])))
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Yield the database. It keeps all changes of the block, or none."""
        if self._database is None:
            raise RuntimeError("rows in files cannot be changed by a fork of their process")
        with _told(self._folder):
            self._database.execute("BEGIN")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                self._database.rollback()
                raise

    # Saved indices.

    @property
    def token(self) -> str:
        newest = "SELECT token FROM tokens ORDER BY number DESC LIMIT 1"
        return self._database.execute(newest).fetchone()[0]

    def _take_token(self, until: np.ndarray) -> None:
        """Take another token, before the rows from the numbers int64[E] on change."""
        if not os.fstat(self._file_of_folder).st_nlink:
            why = "the folder was deleted while its rows were in use"
            raise FileNotFoundError(errno.ENOENT, why, str(self._folder))
        tokens = self._database.execute("SELECT number, until FROM tokens").fetchall()
        limits = [
            (np.minimum(self._limit(limit), until).astype(np.int64).tobytes(), number)
            for number, limit in tokens
        ]
        self._database.executemany("UPDATE tokens SET until = ? WHERE number = ?", limits)
        new = "INSERT INTO tokens (token) VALUES (?)"
        last = self._database.execute(new, [secrets.token_hex(8)]).lastrowid
        self._database.execute("DELETE FROM tokens WHERE number <= ?", [last - _MOST_TOKENS])

    def _limit(self, until: bytes | None) -> np.ndarray:
        return self.progress[END] if until is None else np.frombuffer(until, np.int64)

    def since(self, token: str, end: np.ndarray) -> np.ndarray | None:
        """Return the number of the oldest row of each env, int64[E], that was not overwritten since
        the rows had a token; None if they never had it, or if a row before int64[E] is not there,
        or was replaced by another one of the same number."""
        of_token = "SELECT until FROM tokens WHERE token = ?"
        found = self._database.execute(of_token, [token]).fetchone()
        # `FIRST` grows, or falls to the end of a load that leaves no row: older rows are gone.
        is_there = found is not None and (end <= self._limit(found[0])).all()
        return self.progress[FIRST] if is_there else None

    def flush(self) -> str:
        """Wait until all rows are on the disk. Return their token."""
        self._files.flush()
        with _told(self._folder):
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._is_known = True
        return self.token

    def close(self) -> None:
        """Unlock the folder. The rows stay there."""
        if self._files is not None:
            self._files.close()
        self._closed()


def leaves_of(folder: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of a row of each leaf that a folder has, by name; {} without rows.

    Raises:
      BlockingIOError: Another process, or another object here, has the folder open.
      ValueError: They cannot be read.
    """
    folder = pathlib.Path(folder)
    if not (folder / _DATABASE).exists():
        return {}
    with contextlib.closing(_connected(folder)) as database:
        found = _found(database, folder)
    return {} if found is None else {x: spec_of(text) for x, text in found[0]["leaves"].items()}


_DATABASE = "journal.sqlite"


def _connected(folder: pathlib.Path) -> sqlite3.Connection:
    """Return the database of a folder, which is locked."""
    for name in (_DATABASE, f"{_DATABASE}-wal"):
        array_files.check_file(folder / name)
    with _told(folder):
        database = sqlite3.connect(
            folder / _DATABASE, timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            # One process, which needs no shared memory, and waits for the disk now and then alone.
            for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = 1"):
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN IMMEDIATE")
            if not database.execute("PRAGMA user_version").fetchone()[0]:
                for line in _TABLES.split(";"):
                    database.execute(line)
                database.execute(f"PRAGMA user_version = {_FORMAT}")
            database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
    return database


def _found(database: Any, folder: pathlib.Path) -> tuple[dict[str, Any], str, np.ndarray] | None:
    """Return what a database says: what the rows are, the folder of their files, and the progress;
    None without rows. Raises a ValueError if it is damaged."""
    path = folder / _DATABASE
    with _told(folder):
        if (version := database.execute("PRAGMA user_version").fetchone()[0]) != _FORMAT:
            raise ValueError(f"{path} has the format {version}; this version reads {_FORMAT}")
        line = database.execute("SELECT * FROM journal").fetchone()
    try:
        text, files, progress = line
        if text is None:
            return None
        about = json.loads(text)
        bytes.fromhex(about["id"])
        for leaf in about["leaves"].values():
            spec_of(leaf)
        if not re.fullmatch(r"rows-[1-9]\d*", files):
            raise ValueError(f"no folder {files!r}")
        numbers = np.frombuffer(progress, np.int64).reshape(3, about["num_envs"])
        first, end, flags = numbers
        is_possible = (first >= 0) & (first <= end) & (end <= first + about["length"])
        if not (is_possible & (flags >= 0) & (flags < 256)).all():
            raise ValueError("it has numbers of rows that cannot be")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return about, files, numbers


@contextlib.contextmanager
def _told(folder: pathlib.Path) -> Iterator[None]:
    """Raise what a database raises as an OSError, or a ValueError if it is damaged."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the kind of the error
        if code == sqlite3.SQLITE_BUSY:
            raise BlockingIOError(
                errno.EAGAIN,
                "its rows are in use by another process, or by another buffer of this one; one at "
                "a time may open them",
                str(folder),
            ) from None
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise ValueError(f"{folder / _DATABASE} is damaged: {error}") from error
        number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(number, f"the journal of the rows: {error}", str(folder)) from error


def _give_up_databases() -> None:
    """Leave the databases of a process to it, in a fork: to close one would delete what the process
    writes from then on."""
    for store in list(_OPEN):
        store._closed.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._database))
        store._database = None


def _end(database: sqlite3.Connection, file: int) -> None:
    database.close()
    os.close(file)


_OPEN: weakref.WeakSet[FileRows] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_databases)

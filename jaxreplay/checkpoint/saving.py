"""One save under way: rows are copied out of the state, a group at a time, or left there, and
threads write them."""

import atexit
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint import fingerprint, rows, zarr_arrays
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.groups import Group, Seals
from jaxreplay.checkpoint.planning import Plan
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.store import array_name
from jaxreplay.checkpoint.trim import Trimmer


class Saving:
    """Copies in the caller's thread, and writes in its own: two, since one alone does not keep a
    disk busy.

    Args:
      store: where to. plan: what is written.
      rest: everything but the rows; dropped when it is written. is_own: whether nobody else has it,
        so that no `advance` waits for that.
      chunk_bytes: of an array's chunk, at most. level: of the compression.
      places: the memory of the rows, by name, where nobody writes to it until the save is there:
        none is copied; None: as of each state.
      check: called in a thread while the disk takes the last of it. commit: called in one when all
        is written, with the groups, and the seals of the rest's arrays.
      progress: called in a thread, in one at a time, with the bytes that were written.
    """

    def __init__(
        self,
        store: Files,
        plan: Plan,
        rest: Any,
        *,
        is_own: bool,
        chunk_bytes: int,
        level: int | None,
        places: dict[str, np.ndarray] | None,
        check: Callable[[], None],
        commit: Callable[[list[Group], Seals], None],
        progress: Callable[[int], Any],
    ):
        self._store, self._folder, self._plan, self._end, self._length = (
            store,
            plan.draft.folder,
            plan.groups,
            plan.end,
            plan.draft.length,
        )
        self._group_rows, self._chunk_bytes, self._level = plan.group_rows, chunk_bytes, level
        self._places, self._check, self._commit, self._progress = places, check, commit, progress
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)  # for one group that waits to be written
        self._num_announced = 0  # rows that a stream may have got since
        self._is_own = is_own
        self._groups: dict[int, Group] = {}  # that are written, by number
        self._trim = Trimmer()
        self._lock = threading.Lock()  # for what is told of progress
        self._is_rest_written = threading.Event()  # or given up
        # folders that are written, and may not be on the disk yet
        self._to_sync: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._sync_room = threading.Semaphore(2)
        self._error: BaseException | None = None
        self._next = next(self._plan, None)
        self._thread = threading.Thread(
            target=self._run, args=(named(rest),), name="jaxreplay-checkpoint", daemon=True
        )
        self._helper = threading.Thread(
            target=self._write_groups, name="jaxreplay-checkpoint-helper", daemon=True
        )
        self._syncer = threading.Thread(target=self._run_syncer, name="jaxreplay-sync", daemon=True)
        try:
            for thread in (self._syncer, self._helper, self._thread):
                thread.start()
        except BaseException:  # those that have begun end
            self._give_up()
            self._to_sync.put(None)
            raise
        atexit.register(self._at_exit)
        if self._next is None:
            self._copied.put(None)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_copied(self) -> bool:
        """Whether the state is not needed any more."""
        return self._next is None and (self._is_own or self._is_rest_written.is_set())

    def advance(self, state: Any, num_rows: int) -> None:
        """Copy a group, if there is room for one, and whatever is lost when `num_rows` more are
        added to each stream."""
        if not self._is_own:
            self._is_rest_written.wait()
        self._num_announced += num_rows
        if self._next is not None and self._room.acquire(blocking=False):
            self._copy(state)
        while self._next is not None and self._next[0] < self._num_announced:
            self._room.acquire()
            self._copy(state)

    def finish(self, state: Any) -> None:
        """Copy what is left, and wait until it is written."""
        while self._next is not None:
            self._room.acquire()
            self._copy(state)
        self.join()

    def join(self) -> None:
        """Wait for the thread, which must have everything, and raise what it raised."""
        self._thread.join()
        atexit.unregister(self._at_exit)
        self._raise_error()

    def abandon(self) -> None:
        """Nothing of it will be there. The threads end, also if an interrupt ends the wait for
        them."""
        self._give_up()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def _give_up(self) -> None:
        with defer_interrupts():
            self._error = self._error or RuntimeError("the save was given up")
            self._next = None
            self._copied.put(None)  # one too many does no harm

    def _at_exit(self) -> None:
        is_copied = self.is_copied
        if not is_copied:
            self.abandon()
        self._thread.join()
        if not is_copied:
            warnings.warn(
                "a checkpoint was not finished, and is given up; call wait_until_finished(state), "
                "or close(), before the end",
                stacklevel=1,
            )
        elif self._error is not None:
            warnings.warn(f"the last checkpoint was not written: {self._error}", stacklevel=1)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _copy(self, state: Any) -> None:
        self._raise_error()
        assert self._next is not None
        _, group = self._next
        picked = group.rows()
        total = fingerprint.of_rows(state, picked)
        values = heads = None
        if self._places is None:
            index = rows.rows_at(picked, self._length)
            values, heads = rows.read(state, pow2.padded(index, self._group_rows, index[-1]))
        self._copied.put((group, total, values, heads))
        self._next = next(self._plan, None)
        if self._next is None:
            self._copied.put(None)

    def _run(self, rest: list[tuple[str, Any]]) -> None:
        """What the first thread does."""
        seals: Seals = {}
        while rest:
            name, leaf = rest.pop()
            self._try(self._write_leaf, name, leaf, seals)
            del leaf
        self._is_rest_written.set()
        self._sync(f"rest/{self._folder}")
        self._write_groups()
        self._try(self._check)
        self._helper.join()
        self._places = None  # a view that stays makes the next add copy
        self._to_sync.put(None)
        self._syncer.join()
        self._try(self._commit, [self._groups[number] for number in sorted(self._groups)], seals)

    def _write_groups(self) -> None:
        """What both threads do, until there are no more. After an error they still take what comes:
        nobody may wait for them in vain."""
        while (item := self._copied.get()) is not None:
            self._room.release()
            self._try(self._write_group, *item)
            del item
        self._copied.put(None)  # for the other one

    def _sync(self, folder: str) -> None:
        """The disk takes a group while the next one is written, and is not further behind than
        that."""
        self._sync_room.acquire()
        self._to_sync.put(folder)

    def _run_syncer(self) -> None:
        while (folder := self._to_sync.get()) is not None:
            self._try(self._store.sync, folder)
            self._sync_room.release()

    def _try(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._error is None:
            try:
                function(*arguments)
            except BaseException as error:
                self._error = error

    def _write_leaf(self, name: str, leaf: Any, seals: Seals) -> None:
        """In pieces, each a chunk."""
        if not leaf.size:
            return
        where, num_rows = (
            array_name("rest", self._folder, name),
            rows.chunk_rows(leaf, self._chunk_bytes),
        )
        writer = zarr_arrays.Writer(
            self._store, where, leaf.shape, leaf.dtype, num_rows, self._level
        )
        for piece in rows.pieces(leaf, num_rows):
            writer.write([zarr_arrays.bytes_of(np.asarray(piece))])
            self._tell(piece.nbytes)
        seals[name] = writer.seals

    def _write_group(self, group: Group, total: Any, values: Any, heads: Any) -> None:
        """Each leaf in one chunk."""
        picked = group.rows()
        count, num_bytes, seals = len(picked.env), 0, {}
        if self._places is None:
            self._check_in_time(picked, heads)
            blocks = {
                name: _Block.of(np.asarray(leaf)[:count])
                for name, leaf in named(values)
                if leaf.size
            }
        else:
            index = rows.rows_at(picked, self._length)
            blocks = {
                name: _Block.of_rows(place, index)
                for name, place in self._places.items()
                if place.size
            }
        for name, block in blocks.items():
            writer = zarr_arrays.Writer(
                self._store,
                array_name("rows", group.folder, name),
                (count, *block.shape),
                block.dtype,
                count,
                self._level,
            )
            writer.write(block.parts)
            seals[name] = writer.seals
            num_bytes += sum(map(len, block.parts))
        del blocks
        self._tell(num_bytes)
        self._trim(num_bytes)
        self._groups[group.number] = group._replace(
            fingerprint=int(total), leaves=tuple(seals), sums=np.array([*seals.values()], np.uint32)
        )
        self._sync(f"rows/{group.folder}")

    def _tell(self, num_bytes: int) -> None:
        with self._lock:
            self._progress(num_bytes)

    def _check_in_time(self, picked: Picked, heads: Any) -> None:
        """Whether the state that the rows were read from still had them."""
        ends = rows.ends_of(heads, self._length)
        ends = ends[picked.env]
        if (ends < self._end[picked.env]).any():
            raise RuntimeError(
                "advance, wait_until_finished: this state is not of the run that is being saved: "
                "it has fewer rows"
            )
        if (ends > picked.number + self._length).any():
            raise RuntimeError(
                "rows were overwritten, or cleared, before they were copied: call "
                "advance(state) before each add, with its num_steps, and "
                "wait_until_finished(state) before a clear"
            )


class _Block(NamedTuple):
    """Rows of one leaf, as arrays of bytes one after another."""

    shape: tuple[int, ...]  # of a row
    dtype: np.dtype
    parts: list[np.ndarray]

    @classmethod
    def of(cls, values: np.ndarray) -> "_Block":
        return cls(values.shape[1:], values.dtype, [zarr_arrays.bytes_of(values)])

    @classmethod
    def of_rows(cls, place: np.ndarray, index: np.ndarray) -> "_Block":
        """Out of all rows: no copy, where they lie in long runs."""
        runs = rows.long_runs(index, place[0].nbytes)
        return (
            cls.of(place[index])
            if runs is None
            else cls(
                place.shape[1:], place.dtype, [zarr_arrays.bytes_of(place[run]) for run in runs]
            )
        )

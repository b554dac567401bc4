"""A running save: rows are copied from the state group by group, or read in place, and threads
write them."""

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
    """A running save. It copies in the caller's thread and writes in two of its own, since one
    alone does not keep a disk busy.

    Args:
      store: The store to write to.
      plan: The rows to write.
      rest: Everything but the rows; dropped as soon as it is written.
      is_own: Whether `rest` is a copy. If not, `advance` waits until `rest` is written.
      chunk_bytes: Largest number of bytes of an array's chunk.
      level: Level of zstd compression, or None.
      places: Memory of the rows, by name, if it does not change until the save is complete; the
        rows are then read in place. None to copy them from the states that are passed.
      check: Called in a thread after the last write, while the disk still syncs.
      commit: Called in a thread when all is written, with the groups and the seals of the arrays of
        `rest`.
      progress: Called with the number of bytes written, by one thread at a time.
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
        self._room = threading.Semaphore(1)  # one group may wait to be written
        self._num_announced = 0  # rows that a stream may have got since the save began
        self._is_own = is_own
        self._groups: dict[int, Group] = {}  # groups that are written, by number
        self._trim = Trimmer()
        self._lock = threading.Lock()  # around calls of `progress`
        self._is_rest_written = threading.Event()  # or the save has failed
        # folders that are written, but perhaps not on the disk yet
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
        except BaseException:  # end the threads that have started
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
        """True if the save needs no more of the state."""
        return self._next is None and (self._is_own or self._is_rest_written.is_set())

    def advance(self, state: Any, num_rows: int) -> None:
        """Copy a group if there is room for one, and all rows that are overwritten when `num_rows`
        more are added to each stream."""
        if not self._is_own:
            self._is_rest_written.wait()
        self._num_announced += num_rows
        if self._next is not None and self._room.acquire(blocking=False):
            self._copy(state)
        while self._next is not None and self._next[0] < self._num_announced:
            self._room.acquire()
            self._copy(state)

    def finish(self, state: Any) -> None:
        """Copy the remaining rows, and wait until all is written."""
        while self._next is not None:
            self._room.acquire()
            self._copy(state)
        self.join()

    def join(self) -> None:
        """Wait for the threads, after all rows are copied, and raise the save's error."""
        self._thread.join()
        atexit.unregister(self._at_exit)
        self._raise_error()

    def abandon(self) -> None:
        """Cancel the save, and wait for its threads. They end even if the wait is interrupted."""
        self._give_up()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def _give_up(self) -> None:
        with defer_interrupts():
            self._error = self._error or RuntimeError("the save was cancelled")
            self._next = None
            self._copied.put(None)  # a second None does no harm

    def _at_exit(self) -> None:
        is_copied = self.is_copied
        if not is_copied:
            self.abandon()
        self._thread.join()
        if not is_copied:
            warnings.warn(
                "a checkpoint was incomplete and is cancelled; call wait_until_finished(state) "
                "before the program ends",
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
        """Run the first thread: write `rest` and groups, and commit."""
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
        self._places = None  # a remaining view would make the next add copy
        self._to_sync.put(None)
        self._syncer.join()
        self._try(self._commit, [self._groups[number] for number in sorted(self._groups)], seals)

    def _write_groups(self) -> None:
        """Write groups until there are no more, in both threads. After an error groups are still
        taken from the queue, so that the caller never blocks."""
        while (item := self._copied.get()) is not None:
            self._room.release()
            self._try(self._write_group, *item)
            del item
        self._copied.put(None)  # for the other thread

    def _sync(self, folder: str) -> None:
        """Sync a folder in the background, while others are written; at most two are pending."""
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
        """Write a leaf of `rest` piece by piece, each as a chunk."""
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
        """Write a group of rows, each leaf as one chunk."""
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
        """Raise a RuntimeError if the state, from which rows were copied, no longer had them."""
        ends = rows.ends_of(heads, self._length)
        ends = ends[picked.env]
        if (ends < self._end[picked.env]).any():
            raise RuntimeError(
                "advance, wait_until_finished: this state is not from the run that is being saved: "
                "it has fewer rows"
            )
        if (ends > picked.number + self._length).any():
            raise RuntimeError(
                "rows were overwritten or cleared before they were copied: call "
                "advance(state) before each add, with its num_steps, and "
                "wait_until_finished(state) before a clear"
            )


class _Block(NamedTuple):
    """Rows of one leaf, as a sequence of arrays of bytes."""

    shape: tuple[int, ...]  # of a row
    dtype: np.dtype
    parts: list[np.ndarray]

    @classmethod
    def of(cls, values: np.ndarray) -> "_Block":
        return cls(values.shape[1:], values.dtype, [zarr_arrays.bytes_of(values)])

    @classmethod
    def of_rows(cls, place: np.ndarray, index: np.ndarray) -> "_Block":
        """Select rows of a leaf's memory, without a copy if they lie in long runs."""
        runs = rows.long_runs(index, place[0].nbytes)
        return (
            cls.of(place[index])
            if runs is None
            else cls(
                place.shape[1:], place.dtype, [zarr_arrays.bytes_of(place[run]) for run in runs]
            )
        )

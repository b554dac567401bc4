"""A running save: rows are copied from the state group by group, and threads write them."""

import atexit
import collections
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint import arrays, fingerprint, rows
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.planning import Plan, Written
from jaxreplay.checkpoint.rows import Parts, Picked

_WRITERS = 3  # threads: one alone does not keep a disk busy
_SLOTS = 3  # groups that are copied, and not written yet


class Saving:
    """A running save. It copies in the caller's thread and writes in threads of its own.

    Args:
      store: The store to write to.
      plan: The rows to write.
      parts: The state's parts. The rows of this process's own are written.
      rest: Everything but the rows; dropped as soon as it is written. Each process writes some of
        its leaves.
      is_own: Whether `rest` is a copy. If not, `advance` waits until `rest` is written.
      chunk_bytes: Largest number of bytes of a chunk of `rest`.
      level: Level of zstd compression, or None.
      is_alone: Whether to call `commit` in a thread as soon as all is written. If not, the
        processes do after `finish`, and an error waits for `finish`, too.
      commit: Called with what `finish` returns.
      progress: Called with the number of bytes written, by one thread at a time.
    """

    def __init__(
        self,
        store: Files,
        plan: Plan,
        parts: Parts,
        rest: Any,
        *,
        is_own: bool,
        chunk_bytes: int,
        level: int | None,
        is_alone: bool,
        commit: Callable[[Written, arrays.Chunks], None],
        progress: Callable[[int], Any],
    ):
        self._store, self._folder, self._end = store, plan.draft.folder, plan.end
        self._length, self._group_rows = plan.draft.length, plan.group_rows
        self._chunk_bytes, self._level, self._is_own = chunk_bytes, level, is_own
        self._is_alone, self.commit, self._progress = is_alone, commit, progress
        self._todo = collections.deque(
            (room, group) for room, group in plan.to_write() if parts.having(group.env) is not None
        )
        self._num_announced = 0  # rows that a stream may have got since the save began
        self._slots = threading.Semaphore(_SLOTS)
        # copies that are written, whose memory is used again, if it is all on one device
        self._spare: list[Any] = []
        self._is_one_part = len(parts.own) == 1
        self._written: Written = {}
        self._chunks: arrays.Chunks = {}
        self._lock = threading.Lock()  # around calls of `progress`
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(_WRITERS, "jaxreplay-checkpoint")
        self._futures: list[Future[None]] = []
        atexit.register(self._at_exit)
        among = parts.processes
        for name, leaf in named(rest)[among.index :: among.num]:
            self._submit(self._write_leaf, name, leaf)
        self._rest = tuple(self._futures)
        self._end_if_copied()

    @property
    def is_running(self) -> bool:
        return bool(self._todo) or not all(future.done() for future in self._futures)

    @property
    def is_copied(self) -> bool:
        """True if the save needs no more of the state."""
        return not self._todo and (self._is_own or all(future.done() for future in self._rest))

    def advance(self, parts: Callable[[], Parts], num_rows: int) -> None:
        """Copy a group if there is room for one, and all rows that are overwritten when `num_rows`
        more are added to each stream. `parts`: returns those of the state."""
        self._try(lambda: self._advance(parts(), num_rows))
        if self._is_alone:
            self._raise_error()

    def _advance(self, parts: Parts, num_rows: int) -> None:
        if not self._is_own:
            wait(self._rest)
        self._num_announced += num_rows
        if self._todo and self._slots.acquire(blocking=False):
            self._copy(parts)
        while self._todo and self._todo[0][0] < self._num_announced:
            self._slots.acquire()
            self._copy(parts)

    def finish(self, parts: Parts) -> tuple[Written, arrays.Chunks]:
        """Copy the remaining rows, and wait until all is written. Return the fields of new groups,
        and the checksums of `rest`."""
        while self._todo:
            self._slots.acquire()
            self._copy(parts)
        self.join()
        return self._written, self._chunks

    def join(self) -> None:
        """Wait for the threads, after all rows are copied, and raise the save's error."""
        self._close()
        self._raise_error()

    def abandon(self) -> None:
        """Cancel the save, and wait for its threads. They end even if the wait is interrupted."""
        with defer_interrupts():
            self._error = self._error or RuntimeError("the save was cancelled")
            self._todo.clear()
        self._close()

    def _close(self) -> None:
        self._pool.shutdown()
        atexit.unregister(self._at_exit)
        self._futures.clear()  # they refer to this object

    def _at_exit(self) -> None:
        """Wait, and warn of a save that is not complete."""
        is_complete = self.is_copied and self._is_alone
        if not is_complete:
            self.abandon()
        self._pool.shutdown()
        if not is_complete:
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

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        with defer_interrupts():
            self._futures.append(self._pool.submit(self._try, function, *arguments))

    def _try(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function, unless the save has failed. Its error is kept, and fails the save."""
        if self._error is None:
            try:
                function(*arguments)
            except BaseException as error:
                self._error = error
                if not isinstance(error, Exception):
                    raise

    def _copy(self, parts: Parts) -> None:
        """Copy the next group, for which there is a slot."""
        self._raise_error()
        _, group = self._todo[0]
        part, picked = parts.having(group.env), group.rows()
        assert part is not None
        total, index = fingerprint.of_rows(part, picked), part.indices(picked)
        spare = self._spare.pop() if self._spare else None
        index = pow2.padded(index, self._group_rows, index[-1])
        values, heads = rows.read(part.state, index, spare)
        self._submit(self._write_group, group, picked, total, values, heads, part.env)
        self._futures[-1].add_done_callback(lambda _: self._slots.release())
        self._todo.popleft()
        self._end_if_copied()

    def _end_if_copied(self) -> None:
        if not self._todo:
            self._submit(self._complete, tuple(self._futures))

    def _complete(self, futures: tuple[Future[None], ...]) -> None:
        wait(futures)
        self._raise_error()
        if self._is_alone:
            self.commit(self._written, self._chunks)

    def _write_leaf(self, name: str, leaf: Any) -> None:
        """Write a leaf of `rest` piece by piece, each as a chunk."""
        if not leaf.size:
            return
        where, num_rows = (
            arrays.array_name("rest", self._folder, name),
            rows.chunk_rows(leaf, self._chunk_bytes),
        )
        sums = [num_rows]
        for piece in rows.pieces(leaf, num_rows):
            values = rows.on_host(piece)
            if leaf.ndim and (missing := num_rows - len(values)):  # zeros fill up the last chunk
                values = np.pad(values, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)])
            content, checksum = arrays.packed(values, self._level)
            files = {arrays.chunk_name(where, leaf.ndim, len(sums) - 1): content}
            if len(sums) == 1:
                files |= arrays.description(where, leaf.shape, leaf.dtype, num_rows, self._level)
            self._store.write(files)
            sums.append(checksum)
            self._tell(values.nbytes)
        self._chunks[name] = sums

    def _write_group(
        self, group: Group, picked: Picked, total: Any, values: Any, heads: Any, first_env: int
    ) -> None:
        """Write a group of rows, each leaf as one chunk."""
        ends = rows.ends_of(heads, self._length)
        self._check_in_time(picked, ends[picked.env - first_env])
        sums = self._write_leaves(group, len(picked.env), named(values))
        if self._is_one_part:
            self._spare.append(values)  # of which no view is left
        self._written[group.number] = {
            "fingerprint": int(total),
            "leaves": tuple(sums),
            "sums": np.array([*sums.values()], np.uint32),
        }

    def _write_leaves(
        self, group: Group, count: int, leaves: list[tuple[str, Any]]
    ) -> dict[str, int]:
        """Write the first `count` rows of each leaf. Return the checksums."""
        files: dict[str, list[Any]] = {}
        sums: dict[str, int] = {}
        num_bytes = 0
        for name, leaf in leaves:
            if leaf.size:
                own = rows.on_host(leaf)[:count]
                where = arrays.array_name("rows", group.folder, name)
                files |= arrays.description(where, own.shape, own.dtype, count, self._level)
                content, sums[name] = arrays.packed(own, self._level)
                files[arrays.chunk_name(where, own.ndim)] = content
                num_bytes += own.nbytes
        self._store.write(files)
        self._tell(num_bytes)
        return sums

    def _tell(self, num_bytes: int) -> None:
        with self._lock:
            self._progress(num_bytes)

    def _check_in_time(self, picked: Picked, ends: np.ndarray) -> None:
        """Raise a RuntimeError if the state, from which rows were copied, no longer had them.

        Args:
          picked: The rows.
          ends: int64[K], one more than the newest number of each one's stream.
        """
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

"""Reading of rows from a checkpoint's groups into a state: newest groups first, each row once, a
few groups at a time."""

import collections
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np

from jaxreplay._util.names import named
from jaxreplay.checkpoint import rows, zarr_arrays
from jaxreplay.checkpoint.files import LARGE, Files
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.salvage import Holes
from jaxreplay.checkpoint.store import array_name
from jaxreplay.checkpoint.zarr_arrays import Array, Buffers
from jaxreplay.storage import ring

_AHEAD = 2**29  # bytes that the system may read in advance


class Ahead:
    """Groups to be read of a checkpoint. A thread announces them to the system in advance.

    Args:
      store: The checkpoint's files.
      manifest: The checkpoint's manifest.
      specs: Shapes and dtypes of the new state's rows.
      length: Rows in each stream's ring of the new state. The newest rows that fit are read.
      holes: Rows that are left out, and their groups. The remaining rows close up.
    """

    def __init__(self, store: Files, manifest: Manifest, specs: Any, length: int, holes: Holes):
        self._store, self._holes, self.length = store, holes, length
        self._groups = [(group, group.folder in holes.folders) for group in manifest.groups]
        self._end = np.asarray(manifest.end, np.int64)
        manifest.groups.check_apart(self._end)
        filled = self._end - np.asarray(manifest.first, np.int64)
        self._first = self._end - (filled if holes.folders else np.minimum(filled, length))
        self._held = np.minimum(filled - holes.num_lost, length)
        self.num_rows = int(self._held.sum())
        row_bytes = sum(
            math.prod(spec.shape[1:]) * spec.dtype.itemsize for spec in jax.tree.leaves(specs)
        )
        largest = int(manifest.groups.num_rows().max(initial=1)) * row_bytes
        self._room = threading.Semaphore(max(1, _AHEAD // max(1, largest)))
        self._is_over = store.is_far  # there, `GroupReader.begin` requests the files
        self._thread = threading.Thread(
            target=self._run, args=(named(specs),), name="jaxreplay-ahead", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups with rows to be read, newest first."""
        for group, is_left_out in reversed(self._groups):
            low, high = group.range()
            if not is_left_out and ((low < high) & (high > self._first)).any():
                yield group

    def places_of(self, env: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Select the rows that are read.

        Args:
          env: int64[K], the stream of each row.
          number: int64[K], its number there.

        Returns:
          A mask of the rows that are read, bool[K], and their indices in the state, int32[...].
        """
        is_read = number >= self._first[env]
        if self._holes.folders:
            age, is_lost = self._holes.age_of(env, self._end[env] - 1 - number)
            is_read &= ~is_lost & (age < self.length)
            number = self._end[env] - 1 - age
        return is_read, rows.rows_at(Picked(env[is_read], number[is_read]), self.length)

    def was_read(self) -> None:
        self._room.release()

    def clear_others(self, places: list[np.ndarray]) -> None:
        """Fill the rows that are not read with zeros, in the memory of each leaf."""
        missing, head = self.length - self._held, ring.position_of(self._end, self.length)
        for env in np.flatnonzero(missing).tolist():
            start, count = env * self.length, min(int(missing[env]), self.length - int(head[env]))
            for place in places:
                place[start + head[env] :][:count] = 0
                place[start:][: missing[env] - count] = 0  # wraps around to the stream's start

    def close(self) -> None:
        self._is_over = True
        self._room.release()
        self._thread.join()

    def _run(self, leaves: list[tuple[str, Any]]) -> None:
        for group in self:
            self._room.acquire()
            if self._is_over:
                return
            _expect(self._store, group, leaves)


def _expect(store: Files, group: Group, leaves: list[tuple[str, Any]]) -> None:
    for name, ndim in ((name, leaf.ndim) for name, leaf in leaves if leaf.size):
        zarr_arrays.expect(store, array_name("rows", group.folder, name), ndim)


class GroupReader:
    """Reader of groups' rows into a state's memory. Threads read large chunks, and meanwhile the
    caller reads the rest.

    Args:
      store: The checkpoint's files.
      leaves: Names, shapes and dtypes of the leaves of the state's rows.
      places: The memory of each leaf, or None to return the rows instead.
      ahead: The groups to be read.
      pool: The threads.
    """

    def __init__(
        self,
        store: Files,
        leaves: list[tuple[str, Any]],
        places: list[np.ndarray] | None,
        ahead: Ahead,
        pool: Executor,
    ):
        self._store, self._leaves, self._ahead, self._pool = store, leaves, ahead, pool
        into = places or [None] * len(leaves)
        self._described = [
            (name, leaf.shape[1:], leaf.dtype, place)
            for (name, leaf), place in zip(leaves, into, strict=True)
        ]
        self._thread = threading.local()

    def begin(self, group: Group) -> Callable[[], tuple[np.ndarray, list[Any]]]:
        """Begin to read a group.

        Returns:
          A function that waits for the group. It returns the rows' indices in the state, int32[K],
          and, if `places` is None, their values, `[K, ...]` for each leaf.
        """
        if self._store.is_far:
            _expect(self._store, group, self._leaves)
        is_taken, index = self._ahead.places_of(*group.rows())
        found = []
        for name, shape, dtype, place in self._described:
            if math.prod(shape):
                array = zarr_arrays.array_of(self._store, group, name, shape, dtype)
                begin = self._pool.submit if array.chunk_bytes >= LARGE else _done
                found.append(begin(self._read, array, place, index, is_taken))
            else:
                found.append(_done(np.zeros, (len(index), *shape), dtype))

        def wait() -> tuple[np.ndarray, list[Any]]:
            return index, [future.result() for future in found]

        return wait

    def wait(
        self, group: Group, result: Callable[[], tuple[np.ndarray, list[Any]]]
    ) -> tuple[np.ndarray, list[Any]]:
        try:
            return result()
        finally:
            self.forget(group)

    def forget(self, group: Group) -> None:
        self._store.forget(f"rows/{group.folder}")

    def _read(
        self, array: Array, place: np.ndarray | None, index: np.ndarray, is_taken: np.ndarray
    ) -> np.ndarray | None:
        """Read rows of one leaf: without a copy if their indices form long runs."""
        is_whole = len(index) == len(is_taken)
        if place is None:
            values = array.read(self._buffers())
            return values if is_whole else values[is_taken]
        if is_whole and (runs := rows.long_runs(index, place[0].nbytes)) is not None:
            array.read_chunk(
                0, lambda: [zarr_arrays.bytes_of(place[run]) for run in runs], self._buffers()
            )
        else:
            content = self._buffers()("values", len(is_taken) * place[0].nbytes)
            array.read_chunk(0, lambda: [content], self._buffers())
            values = content.view(place.dtype).reshape(-1, *place.shape[1:])
            place[index] = values if is_whole else values[is_taken]
        return None

    def _buffers(self) -> Buffers:
        if not hasattr(self._thread, "buffers"):
            self._thread.buffers = Buffers()
        return self._thread.buffers


def flags_of(store: Files, manifest: Manifest, env: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the flags of rows that the checkpoint has: uint8[K].

    Args:
      store: The checkpoint's files.
      manifest: The checkpoint's manifest.
      env: int64[K], the stream of each row.
      number: int64[K], its number there.
    """
    found = np.zeros(len(env), np.uint8)
    for group in manifest.groups:
        low, high = group.range()
        if (wanted := (number >= low[env]) & (number < high[env])).any():
            flags, before = (
                zarr_arrays.array_of(store, group, "flags", (), np.uint8).read(),
                np.cumsum(high - low) - (high - low),
            )
            found[wanted] = flags[(before[env] + number - low[env])[wanted]]
    return found


def _done(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function at once, and return its result as a future."""
    future: Future[Any] = Future()
    future.set_result(function(*args))
    return future


def in_turn(
    read: GroupReader, groups: Iterable[Group], at_once: int
) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Iterate over what `read` reads of each group. `at_once`: groups that are read at a time."""
    waiting: collections.deque[tuple[Group, Callable[[], tuple[np.ndarray, list[Any]]]]] = (
        collections.deque()
    )
    begun = None
    try:
        for group in groups:
            if len(waiting) == at_once:
                yield read.wait(*waiting.popleft())
            begun = group
            waiting.append((group, read.begin(group)))
        while waiting:
            yield read.wait(*waiting.popleft())
    finally:  # after an error, drop what was requested
        for group in filter(None, [begun, *(group for group, _ in waiting)]):
            read.forget(group)

"""A state from what a generation holds, filled in place: beside the state there are never more than a few chunks."""

import collections
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import memory, resize, ring
from jaxreplay.checkpoint import arrays, rows, unwritten
from jaxreplay.checkpoint.arrays import Array, Buffers
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.store import LARGE, BrokenError, Store, array_name
from jaxreplay.paths import named

_THREADS = 2  # that read large chunks; with more they wait for each other, as they do where they read small ones
_AHEAD = 2**29  # bytes that a system may read before they are asked for


class Reading:
    """Reads a generation into a new state.

    Args:
      progress: called with the bytes that were read.
    """

    def __init__(self, store: Store, manifest: Manifest, progress: Callable[[int], Any]):
        self._store, self._manifest, self._progress = store, manifest, progress

    def state(self, replay: Any, before: Any, example: Any, sharding: Any) -> Any:
        """A new state of a buffer.

        Args:
          before: the buffer that the generation is of: as `replay`, or of another capacity. sharding: None, or as `out_shardings`.

        Raises:
          BrokenError: an array is missing, or not as it was written; it is named.
        """
        shape = jax.eval_shape(replay.init, example)
        specs, _ = rows.split(shape)
        is_resized = bool(specs) and before.capacity != replay.capacity
        old = None
        if is_resized:
            old = resize.parted(before, rows.split(jax.eval_shape(before.init, example))[1])
            # A sampler that cannot move what it has says so before anything is read.
            jax.eval_shape(functools.partial(resize.resized, before, replay), old[0], shape.streams)
        ahead = _Ahead(self._store, self._manifest, specs, replay.streams.length) if specs else None
        try:
            return self._filled(replay, before, old, example, sharding, ahead)
        finally:
            if ahead is not None:
                ahead.close()

    def _filled(self, replay: Any, before: Any, old: Any, example: Any, sharding: Any, ahead: "_Ahead | None") -> Any:
        stored, specs = self._begun(replay, example, sharding)
        if old is None:
            rest = self._rest(specs)
            stored = stored if ahead is None else self._rows(stored, ahead)
        else:
            assert ahead is not None
            old, by_place = self._rest(old[0]), old[1]
            streams = resize.with_heads(before.streams, replay.streams, old.streams)
            stored = self._rows(stored, ahead)
            rest = resize.resized(before, replay, old, streams.replace(**stored))
            sampler, state = rest.sampler, rows.join(stored, rest.replace(sampler=None))
            for name, spec in by_place.items():
                for start, values in self._pieces(f"sampler.{name}", spec):
                    sampler = jax.block_until_ready(resize.moved(before, replay, old.streams, sampler, state, name, start, values))
            rest = rest.replace(sampler=sampler)
        state = rows.join(stored, rest)
        return state if sharding is None else jax.device_put(state, sharding)

    def _begun(self, replay: Any, example: Any, sharding: Any) -> tuple[Any, Any]:
        """Rows that are to be filled, and what the rest is like."""
        if sharding is None and memory.default_device().platform == "cpu":
            memory.check_fits("restore", replay.memory(example))
            stored, rest = rows.split(jax.eval_shape(replay.init, example))
            return unwritten.like(stored), rest
        state = replay.init(example) if sharding is None else jax.jit(lambda: replay.init(example), out_shardings=sharding)()
        stored, rest = rows.split(state)
        return stored, jax.tree.map(_spec, rest)

    def _rest(self, specs: Any) -> Any:
        """All but the rows."""
        return jax.tree.unflatten(jax.tree.structure(specs), [self._leaf(name, spec) for name, spec in named(specs)])

    def _leaf(self, name: str, spec: jax.ShapeDtypeStruct) -> Any:
        leaf = jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
        if not leaf.size:
            return leaf
        if not leaf.ndim:
            return rows.put_piece(leaf, 0, self._array(name, leaf).read())
        place = rows.memory_of(leaf)
        for start, values in self._pieces(name, leaf, place):
            if place is None:
                leaf = jax.block_until_ready(rows.put_piece(leaf, start, values))
            self._progress(values.nbytes)
        return leaf

    def _pieces(self, name: str, leaf: Any, place: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """What is written of a leaf, read into its `place` if that is given, a chunk at a time, each with its first index."""
        array = self._array(name, leaf)
        for number in range(len(array)):
            start = number * array.chunk_rows
            size = min(array.chunk_rows, leaf.shape[0] - start)
            values = np.empty((size, *leaf.shape[1:]), leaf.dtype) if place is None else place[start : start + size]
            array.read_chunk(number, [arrays.bytes_of(values)])
            yield start, values

    def _array(self, name: str, leaf: Any) -> Array:
        return Array(self._store, array_name("rest", self._manifest.folder, name), leaf.shape, leaf.dtype, self._manifest.seals[name])

    def _rows(self, stored: Any, ahead: "_Ahead") -> Any:
        """New rows, which are taken over, with those that are read."""
        leaves = named(stored)
        places = [place for _, leaf in leaves if (place := rows.memory_of(leaf)) is not None]
        is_here = len(places) == len(leaves)
        missing, row_bytes = ahead.num_rows, sum(leaf.nbytes // len(leaf) for _, leaf in leaves)
        at_once = _THREADS + (is_here and not self._store.is_far)  # of others, what is under way takes memory
        with ThreadPoolExecutor(_THREADS) as pool:
            read = _GroupReader(self._store, leaves, places if is_here else None, ahead.length, pool)
            for index, values in _in_turn(read, ahead, at_once):
                if not is_here and len(index):
                    stored = rows.put(stored, index, jax.tree.unflatten(jax.tree.structure(stored), values))
                ahead.was_read()
                missing -= len(index)
                self._progress(len(index) * row_bytes)
                del values
        if missing:
            raise BrokenError(f"{missing:,} rows of the generation are in none of its groups")
        if is_here:
            ahead.clear_others(places)
        return stored


def _spec(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if len(leaf.sharding.device_set) > 1 else None)


class _Ahead:
    """The groups of a generation that are to be read; and a thread that tells the system of them before they are, from now on.

    Args:
      specs: of the rows of a buffer with streams of `length`: the newest that they hold are read, from number `first` on, int64[E].
    """

    def __init__(self, store: Store, manifest: Manifest, specs: Any, length: int):
        self._store, self._groups, self.length = store, manifest.groups, length
        self._end = np.asarray(manifest.end)
        self._first = np.maximum(manifest.first, self._end - length)
        self.num_rows = int((self._end - self._first).sum())
        row_bytes = sum(math.prod(spec.shape[1:]) * spec.dtype.itemsize for spec in jax.tree.leaves(specs))
        largest = max((group.num_rows for group in manifest.groups), default=1) * row_bytes
        self._room = threading.Semaphore(max(1, _AHEAD // max(1, largest)))
        self._is_over = store.is_far  # who reads these asks for them
        self._thread = threading.Thread(target=self._run, args=(named(specs),), name="jaxreplay-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Group, np.ndarray, np.ndarray]]:
        """Groups, the newest first, each with the numbers from which on and up to which its rows are taken: int64[E] both.

        A row is taken from the last group that has it, and a group has a stream's rows from one number to another.
        """
        first, end = self._first, self._end
        for group in reversed(self._groups):
            low, high = rows.from_runs(group.first), rows.from_runs(group.last)
            these = slice(len(low))
            if ((low <= high) & (low < end[these]) & (high >= first[these])).any():
                yield group, first, end
            end = end.copy()
            end[these] = np.where(low <= high, np.minimum(low, end[these]), end[these])

    def was_read(self) -> None:
        self._room.release()

    def clear_others(self, places: list[np.ndarray]) -> None:
        """Zeros for the rows that are not read."""
        missing, head = self.length - (self._end - self._first), ring.position_of(self._end, self.length)
        for env in np.flatnonzero(missing).tolist():
            start, count = env * self.length, min(int(missing[env]), self.length - int(head[env]))
            for place in places:
                place[start + head[env] :][:count] = 0
                place[start:][: missing[env] - count] = 0  # it goes on at the stream's start

    def close(self) -> None:
        self._is_over = True
        self._room.release()
        self._thread.join()

    def _run(self, leaves: list[tuple[str, Any]]) -> None:
        for group, _, _ in self:
            self._room.acquire()
            if self._is_over:
                return
            _expect(self._store, group, leaves)


def _expect(store: Store, group: Group, leaves: list[tuple[str, Any]]) -> None:
    for name, rank in (("env", 1), ("number", 1), *((name, leaf.ndim) for name, leaf in leaves if leaf.size)):
        arrays.expect(store, array_name("rows", group.folder, name), rank)


class _GroupReader:
    """Reads groups' rows into their places. Large chunks are read by threads, meanwhile all else by who asks for it.

    Args:
      leaves: of the state's rows, with their names. places: the memory of each; None: the rows are returned.
    """

    def __init__(self, store: Store, leaves: list[tuple[str, Any]], places: list[np.ndarray] | None, length: int, pool: Executor):
        self._store, self._leaves, self._length, self._pool = store, leaves, length, pool
        into = places or [None] * len(leaves)
        self._described = [(name, leaf.shape[1:], leaf.dtype, place) for (name, leaf), place in zip(leaves, into, strict=True)]
        self._thread = threading.local()

    def begin(self, group: Group, first: np.ndarray, end: np.ndarray) -> Callable[[], tuple[np.ndarray, list[Any]]]:
        """Begin to read a group.

        Returns:
          a function that waits for it: the rows' places, int32[K], and, where there are no arrays for them, their values, `[K, ...]` each.
        """
        if self._store.is_far:
            _expect(self._store, group, self._leaves)
        env, number = (self._array(group, name, (), dtype).read() for name, dtype in (("env", np.int32), ("number", np.int64)))
        is_taken = (number >= first[env]) & (number < end[env])
        index = rows.rows_at(Picked(env[is_taken].astype(np.int64), number[is_taken]), self._length)
        found = []
        for name, shape, dtype, place in self._described:
            if math.prod(shape):
                array = self._array(group, name, shape, dtype)
                begin = self._pool.submit if array.chunk_bytes >= LARGE else _done
                found.append(begin(self._read, array, place, index, is_taken))
            else:
                found.append(_done(np.zeros, (len(index), *shape), dtype))

        def wait() -> tuple[np.ndarray, list[Any]]:
            values = [future.result() for future in found]
            self._store.forget(f"rows/{group.folder}")
            return index, values

        return wait

    def _read(self, array: Array, place: np.ndarray | None, index: np.ndarray, is_taken: np.ndarray) -> np.ndarray | None:
        """Rows of one leaf: straight into their places, where these lie in long runs."""
        is_whole = len(index) == len(is_taken)
        if place is None:
            values = array.read(self._buffers())
            return values if is_whole else values[is_taken]
        if is_whole and (runs := rows.long_runs(index, place[0].nbytes)) is not None:
            array.read_chunk(0, [arrays.bytes_of(place[run]) for run in runs], self._buffers())
        else:
            content = self._buffers()("values", len(is_taken) * place[0].nbytes)
            array.read_chunk(0, [content], self._buffers())
            values = content.view(place.dtype).reshape(-1, *place.shape[1:])
            place[index] = values if is_whole else values[is_taken]
        return None

    def _array(self, group: Group, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return Array(self._store, array_name("rows", group.folder, name), (group.num_rows, *shape), dtype, group.seals[name])

    def _buffers(self) -> Buffers:
        if not hasattr(self._thread, "buffers"):
            self._thread.buffers = Buffers()
        return self._thread.buffers


def _done(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """As if a thread had run it."""
    future: Future[Any] = Future()
    future.set_result(function(*args))
    return future


def _in_turn(
    read: _GroupReader, groups: Iterable[tuple[Group, np.ndarray, np.ndarray]], at_once: int
) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """What is read of each group, in turn; so many of them are under way."""
    waiting: collections.deque[Callable[[], tuple[np.ndarray, list[Any]]]] = collections.deque()
    for group, first, end in groups:
        if len(waiting) == at_once:
            yield waiting.popleft()()
        waiting.append(read.begin(group, first, end))
    while waiting:
        yield waiting.popleft()()

"""A state from what a generation holds, filled in place: beside the state there are never more than a few chunks, but for a resize."""

import collections
import concurrent.futures
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import resize
from jaxreplay.checkpoint import arrays, rows
from jaxreplay.checkpoint.arrays import Array, Buffers
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.store import BrokenError, Store, array_name
from jaxreplay.paths import named

_AT_ONCE = 4  # groups that are read at once: a disk gives more to four than to two
_AT_ONCE_TO_A_DEVICE = 2  # these are held in memory on the way
_RUN = 2**15  # bytes in a row from which on a read of their own is faster than a copy


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
        old = rows.split(jax.eval_shape(before.init, example))[1] if is_resized else None
        if is_resized:  # a sampler that cannot move what it has says so before anything is read
            jax.eval_shape(functools.partial(resize.resized, before, replay), old, shape.streams)
        ahead = _Ahead(self._store, self._manifest, specs, replay.streams.length) if specs else None
        try:
            return self._filled(replay, before, old, example, sharding, ahead)
        finally:
            if ahead is not None:
                ahead.close()

    def _filled(self, replay: Any, before: Any, old: Any, example: Any, sharding: Any, ahead: "_Ahead | None") -> Any:
        state = replay.init(example) if sharding is None else jax.jit(lambda: replay.init(example), out_shardings=sharding)()
        stored, rest = rows.split(state)
        specs = jax.tree.map(_spec, rest)
        del state, rest
        if old is None:
            rest = self._rest(specs)
            stored = stored if ahead is None else self._rows(stored, ahead)
        else:
            assert ahead is not None
            old = self._rest(old)
            streams = resize.with_heads(before.streams, replay.streams, old.streams)
            stored = self._rows(stored, ahead)
            rest = resize.resized(before, replay, old, streams.replace(**stored))
        state = rows.join(stored, rest)
        return state if sharding is None else jax.device_put(state, sharding)

    def _rest(self, specs: Any) -> Any:
        """All but the rows."""
        return jax.tree.unflatten(jax.tree.structure(specs), [self._leaf(name, spec) for name, spec in named(specs)])

    def _leaf(self, name: str, spec: jax.ShapeDtypeStruct) -> Any:
        leaf = jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
        if not leaf.size:
            return leaf
        array = Array(self._store, array_name("rest", self._manifest.folder, name), leaf.shape, leaf.dtype, self._manifest.seals[name])
        if not leaf.ndim:
            return rows.put_piece(leaf, 0, array.read())
        memory = rows.memory_of(leaf)
        for number in range(len(array)):
            start = number * array.chunk_rows
            size = min(array.chunk_rows, len(leaf) - start)
            values = np.empty((size, *leaf.shape[1:]), leaf.dtype) if memory is None else memory[start : start + size]
            array.read_chunk(number, [arrays.bytes_of(values)])
            if memory is None:
                leaf = jax.block_until_ready(rows.put_piece(leaf, start, values))
            self._progress(values.nbytes)
        return leaf

    def _rows(self, stored: Any, ahead: "_Ahead") -> Any:
        """New rows, which are taken over, with those that are read."""
        leaves = named(stored)
        memory = [rows.memory_of(leaf) for _, leaf in leaves]
        is_here = all(values is not None for values in memory)
        missing, row_bytes = ahead.num_rows, sum(leaf.nbytes // len(leaf) for _, leaf in leaves)
        read = _GroupReader(self._store, leaves, memory if is_here else [None] * len(leaves), ahead.length)
        at_once = _AT_ONCE if is_here else _AT_ONCE_TO_A_DEVICE
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for index, values in _in_turn(pool, at_once, read, ahead):
                if not is_here:
                    stored = rows.put(stored, index, jax.tree.unflatten(jax.tree.structure(stored), values))
                ahead.was_read()
                missing -= len(index)
                self._progress(len(index) * row_bytes)
                del values
        if missing:
            raise BrokenError(f"{missing:,} rows of the generation are in none of its groups")
        return stored


def _spec(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if len(leaf.sharding.device_set) > 1 else None)


class _Ahead:
    """The groups of a generation that are to be read, and a thread that tells the store of them before they are.

    Args:
      specs: of the rows of a buffer with streams of `length`: the newest that they hold are read, from number `first` on, int64[E].
    """

    def __init__(self, store: Store, manifest: Manifest, specs: Any, length: int):
        self.length = length
        self._end = np.asarray(manifest.end)
        self._first = np.maximum(manifest.first, self._end - length)
        self.num_rows = int((self._end - self._first).sum())
        self._groups = manifest.groups
        self._ranks = [("env", 1), ("number", 1), *((name, spec.ndim) for name, spec in named(specs) if spec.size)]
        row_bytes = sum(spec.size // len(spec) * spec.dtype.itemsize for spec in jax.tree.leaves(specs)) + 12
        largest = max((group.num_rows for group in manifest.groups), default=1) * row_bytes
        self._room = threading.Semaphore(max(1, store.most_expected // largest))
        self._is_over = False
        self._thread = threading.Thread(target=self._run, args=(store,), name="jaxreplay-ahead", daemon=True)
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

    def close(self) -> None:
        self._is_over = True
        self._room.release()
        self._thread.join()

    def _run(self, store: Store) -> None:
        for group, _, _ in self:
            self._room.acquire()
            if self._is_over:
                return
            for name, rank in self._ranks:
                arrays.expect(store, array_name("rows", group.folder, name), rank)


class _GroupReader:
    """Reads a group's rows into their places, in any thread.

    Args:
      leaves: of the state's rows, with their names. memory: the array that has a leaf's places; None: the rows are returned.
    """

    def __init__(self, store: Store, leaves: list[tuple[str, Any]], memory: list[np.ndarray | None], length: int):
        self._store, self._length = store, length
        self._described = [(name, leaf.shape[1:], leaf.dtype, values) for (name, leaf), values in zip(leaves, memory, strict=True)]
        self._thread = threading.local()

    def __call__(self, group: Group, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """The rows' places, int32[K], and their values, `[K, ...]` each, where there are no arrays for them."""
        if not hasattr(self._thread, "buffers"):
            self._thread.buffers = Buffers()
        env, number = (self._array(group, name, (), dtype).read() for name, dtype in (("env", np.int32), ("number", np.int64)))
        is_taken = (number >= first[env]) & (number < end[env])
        index = rows.rows_at(Picked(env[is_taken].astype(np.int64), number[is_taken]), self._length)
        found = []
        for name, shape, dtype, memory in self._described:
            array = self._array(group, name, shape, dtype) if math.prod(shape) else None
            if memory is None:
                found.append(np.zeros((len(index), *shape), dtype) if array is None else array.read()[is_taken])
            elif array is not None:
                self._fill(array, memory, index, is_taken)
        return index, found

    def _fill(self, array: Array, memory: np.ndarray, index: np.ndarray, is_taken: np.ndarray) -> None:
        """Straight into the rows' places, where these lie in long runs."""
        starts = np.flatnonzero(np.diff(index, prepend=-2) != 1)
        is_whole = len(index) == len(is_taken)
        if is_whole and len(index) * memory[0].nbytes >= _RUN * len(starts):
            runs = zip(index[starts].tolist(), np.diff(starts, append=len(index)).tolist(), strict=True)
            array.read_chunk(0, [arrays.bytes_of(memory[start : start + count]) for start, count in runs])
        else:
            content = self._thread.buffers("values", len(is_taken) * memory[0].nbytes)
            array.read_chunk(0, [content])
            values = content.view(memory.dtype).reshape(-1, *memory.shape[1:])
            memory[index] = values if is_whole else values[is_taken]

    def _array(self, group: Group, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        where = array_name("rows", group.folder, name)
        return Array(self._store, where, (group.num_rows, *shape), dtype, group.seals[name], self._thread.buffers)


def _in_turn(
    pool: concurrent.futures.Executor, at_once: int, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]
) -> Iterator[Any]:
    """What a function of each item returns, in turn; so many of them are under way."""
    waiting: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    for item in items:
        if len(waiting) == at_once:
            yield waiting.popleft().result()
        waiting.append(pool.submit(function, *item))
    while waiting:
        yield waiting.popleft().result()

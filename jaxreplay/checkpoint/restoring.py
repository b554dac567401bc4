"""A state from what a generation holds, filled in place: beside the state there are never more than a few chunks, but for a resize."""

import collections
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import resize
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.store import BrokenError, Store, array_name, checked
from jaxreplay.checkpoint.trim import Trimmer
from jaxreplay.paths import named

_READ = 2  # groups that are read, or wait to be put into their places
_OPENED = 8  # groups whose descriptions are read before they are: small files, which wait for large ones that are read already


class Reading:
    """Reads a generation into a new state.

    Args:
      chunk_bytes: of what is not rows, read at once. progress: called with the bytes that were read.
    """

    def __init__(self, store: Store, manifest: Manifest, chunk_bytes: int, progress: Callable[[int], Any]):
        self._store, self._manifest, self._chunk_bytes, self._progress = store, manifest, chunk_bytes, progress

    def state(self, replay: Any, before: Any, example: Any, sharding: Any) -> Any:
        """A new state of a buffer.

        Args:
          before: the buffer that the generation is of: as `replay`, or of another capacity. sharding: None, or as `out_shardings`.

        Raises:
          BrokenError: an array is missing, or not as it was written; it is named.
        """
        specs, _ = rows.split(shape := jax.eval_shape(replay.init, example))
        ahead = _ReadAhead(self._store, self._manifest, specs, replay.streams.length) if specs else None
        is_resized = ahead is not None and before.capacity != replay.capacity
        old = rows.split(jax.eval_shape(before.init, example))[1] if is_resized else None
        if is_resized:  # a sampler that cannot move what it has says so before anything is read
            jax.eval_shape(functools.partial(resize.resized, before, replay), old, shape.streams)
        state = replay.init(example) if sharding is None else jax.jit(lambda: replay.init(example), out_shardings=sharding)()
        stored, rest = rows.split(state)
        specs = jax.tree.map(_spec, rest)
        del state, rest
        if ahead is None or not is_resized:
            rest = self._rest(specs)
            stored = stored if ahead is None else self._rows(stored, ahead)
        else:
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
        where = array_name("rest", self._manifest.folder, name)
        array = self._store.open(where, leaf.shape, leaf.dtype, self._manifest.seals[name])
        if not leaf.ndim:
            return rows.put_piece(leaf, 0, checked(where, lambda: array.read().result()))
        num_rows = rows.chunk_rows(leaf, self._chunk_bytes)
        for start in range(0, len(leaf), num_rows):
            values = checked(where, lambda start=start: array[start : min(start + num_rows, array.shape[0])].read().result())
            leaf = jax.block_until_ready(rows.put_piece(leaf, start, values))
            self._progress(values.nbytes)
        return leaf

    def _rows(self, stored: Any, ahead: "_ReadAhead") -> Any:
        """New rows, which are taken over, with those that are read."""
        first, end, length = ahead.first, ahead.end, ahead.length
        capacity = length * len(first)
        trim = Trimmer()
        is_there = np.zeros(-(-capacity // 8), np.uint8)  # a bit for each row
        row_bytes = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(stored))
        for picked, values in ahead:
            index = rows.rows_at(picked, length)
            index[(picked.number < first[picked.env]) | (picked.number >= end[picked.env])] = capacity  # gone since, or taken back
            stored = rows.put(stored, index, values)
            del values
            index = index[index < capacity]
            np.bitwise_or.at(is_there, index >> 3, np.uint8(1) << (index & 7).astype(np.uint8))
            self._progress(num_bytes := len(picked.env) * row_bytes)
            trim(num_bytes)
        if (missing := int((end - first).sum()) - int(np.bitwise_count(is_there).sum(dtype=np.int64))) > 0:
            raise BrokenError(f"{missing:,} rows of the generation are in none of its groups")
        return stored


def _spec(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if len(leaf.sharding.device_set) > 1 else None)


def _has_any(group: Group, first: np.ndarray) -> bool:
    last = rows.from_runs(group.last)
    return bool((last >= first[: len(last)]).any())


class _ReadAhead:
    """The rows of groups, in turn: while those of one are put into their places, the next one is read, and those after it are opened.

    It begins at once.

    Args:
      specs: of the rows of a buffer with streams of `length`: the newest that they hold are read, from number `first` on, int64[E].
    """

    def __init__(self, store: Store, manifest: Manifest, specs: Any, length: int):
        self._store, self._structure, self.length = store, jax.tree.structure(specs), length
        self.end = np.asarray(manifest.end)
        self.first = np.maximum(manifest.first, self.end - length)
        self._groups = [group for group in manifest.groups if _has_any(group, self.first)]
        self._described = [(name, jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype)) for name, spec in named(specs)]
        self._opened = 0
        self._opening: collections.deque[_Group] = collections.deque()
        self._reading: collections.deque[Callable[[], tuple[Picked, list[np.ndarray]]]] = collections.deque()
        for _ in range(_OPENED + _READ):
            self._advance()

    def __iter__(self) -> Iterator[tuple[Picked, Any]]:
        while self._reading:
            picked, leaves = self._reading.popleft()()
            yield picked, jax.tree.unflatten(self._structure, leaves)
            del picked, leaves
            self._advance()

    def _advance(self) -> None:
        if self._opened < len(self._groups):
            self._opening.append(_Group(self._store, self._groups[self._opened], self._described))
            self._opened += 1
        is_ahead = len(self._opening) > _OPENED or self._opened == len(self._groups)
        if self._opening and is_ahead and len(self._reading) < _READ:
            self._reading.append(self._opening.popleft().read())


class _Group:
    """A group whose arrays are being opened."""

    def __init__(self, store: Store, group: Group, described: list[tuple[str, Any]]):
        def opening(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            if not math.prod(shape):
                return np.zeros((group.num_rows, *shape), dtype)
            return store.opening(array_name("rows", group.folder, name), (group.num_rows, *shape), dtype, group.seals[name])

        self._folder = f"rows/{group.folder}"
        self._arrays = [opening("env", (), np.int32), opening("number", (), np.int64)]
        self._arrays += [opening(name, leaf.shape, leaf.dtype) for name, leaf in described]

    def read(self) -> Callable[[], tuple[Picked, list[np.ndarray]]]:
        """Begin; what is returned gives the rows, once."""
        futures = [array if isinstance(array, np.ndarray) else array().read() for array in self._arrays]

        def result() -> tuple[Picked, list[np.ndarray]]:
            found = [future if isinstance(future, np.ndarray) else checked(self._folder, future.result) for future in futures]
            futures.clear()
            return Picked(found[0].astype(np.int64), found[1]), found[2:]

        return result

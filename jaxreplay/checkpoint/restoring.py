"""A state from what a generation holds, filled in place: beside the state there are never more than a few chunks."""

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.store import BrokenError, Store, array_name, checked
from jaxreplay.checkpoint.trim import Trimmer
from jaxreplay.paths import named


def restore(store: Store, manifest: Manifest, state: Any, chunk_bytes: int, progress: Callable[[int], Any]) -> Any:
    """Fill a new state, which is taken over, with a generation's rows and everything else.

    Raises:
      BrokenError: an array is missing, or not as it was written; it is named.
    """
    stored, rest = rows.split(state)
    del state
    leaves, structure = [leaf for _, leaf in named(rest)], jax.tree.structure(rest)
    names = [name for name, _ in named(rest)]
    del rest
    for place, name in enumerate(names):
        leaf, leaves[place] = leaves[place], None
        leaves[place] = _read_leaf(store, manifest, name, leaf, chunk_bytes, progress)
        del leaf
    if stored:
        stored = _read_rows(store, manifest, stored, progress)
    return rows.join(stored, jax.tree.unflatten(structure, leaves))


def _read_leaf(store: Store, manifest: Manifest, name: str, leaf: Any, chunk_bytes: int, progress: Callable[[int], Any]) -> Any:
    if not leaf.size:
        return leaf
    where = array_name("rest", manifest.folder, name)
    array = store.open(where, leaf.shape, leaf.dtype, manifest.seals[name])
    if not leaf.ndim:
        return rows.put_scalar(leaf, checked(where, lambda: array.read().result()))
    num_rows = rows.chunk_rows(leaf, chunk_bytes)
    for start in range(0, len(leaf), num_rows):
        values = checked(where, lambda start=start: array[start : min(start + num_rows, array.shape[0])].read().result())
        leaf = jax.block_until_ready(rows.put_piece(leaf, start, values))
        progress(values.nbytes)
    return leaf


def _read_rows(store: Store, manifest: Manifest, stored: Any, progress: Callable[[int], Any]) -> Any:
    first, end = np.asarray(manifest.first), np.asarray(manifest.end)
    capacity = manifest.length * len(first)
    trim = Trimmer()
    is_there = np.zeros(-(-capacity // 8), np.uint8)  # a bit for each row
    row_bytes = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(stored))
    for picked, values in _read_ahead(store, manifest.groups, stored):
        index = rows.rows_at(picked, manifest.length)
        index[(picked.number < first[picked.env]) | (picked.number >= end[picked.env])] = capacity  # gone since, or taken back
        stored = rows.put(stored, index, values)
        del values
        index = index[index < capacity]
        np.bitwise_or.at(is_there, index >> 3, np.uint8(1) << (index & 7).astype(np.uint8))
        progress(num_bytes := len(picked.env) * row_bytes)
        trim(num_bytes)
    if (missing := int((end - first).sum()) - int(np.bitwise_count(is_there).sum(dtype=np.int64))) > 0:
        raise BrokenError(f"{missing:,} rows of the generation are in none of its groups")
    return stored


def _read_ahead(store: Store, groups: list[Group], stored: Any) -> Iterator[tuple[Picked, Any]]:
    """The rows of each group; while they are put into their places, the next two are read, and the one after them is opened."""
    described = [(name, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)) for name, leaf in named(stored)]
    structure, opening = jax.tree.structure(stored), None
    reading: collections.deque[Callable[[], tuple[Picked, list[np.ndarray]]]] = collections.deque()
    for group in [*groups, *[None] * 3]:
        if opening is not None:
            reading.append(opening.read())
        opening = None if group is None else _Group(store, group, described)
        if len(reading) == 3 or (group is None and reading):
            picked, leaves = reading.popleft()()
            yield picked, jax.tree.unflatten(structure, leaves)
            del picked, leaves


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

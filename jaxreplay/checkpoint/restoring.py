"""A state from what a generation holds, filled in place: beside the state there are never more than a few chunks."""

from collections.abc import Callable
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
    trim = Trimmer()
    is_there = np.zeros(-(-manifest.length * len(first) // 8), np.uint8)  # a bit for each row
    for group in manifest.groups:
        stored = _put_group(store, group, stored, rows.Span(first, end), manifest.length, is_there)
        num_bytes = group.num_rows * sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(stored))
        progress(num_bytes)
        trim(num_bytes)
    if (missing := int((end - first).sum()) - int(np.bitwise_count(is_there).sum(dtype=np.int64))) > 0:
        raise BrokenError(f"{missing:,} rows of the generation are in none of its groups")
    return stored


def _put_group(store: Store, group: Group, stored: Any, span: rows.Span, length: int, is_there: np.ndarray) -> Any:
    """The rows with those of a group; what was read of it is gone afterwards."""
    picked, values = _read_group(store, group, stored)
    index, capacity = rows.rows_at(picked, length), length * len(span.end)
    index[(picked.number < span.first[picked.env]) | (picked.number >= span.end[picked.env])] = capacity  # gone since, or taken back
    size = rows.power_above(len(index))  # few programs are compiled
    if size > len(index):
        values = jax.tree.map(lambda leaf: np.resize(leaf, (size, *leaf.shape[1:])), values)
    stored = jax.block_until_ready(rows.write(stored, rows.padded(index, size, capacity), values))
    index = index[index < capacity]
    np.bitwise_or.at(is_there, index >> 3, np.uint8(1) << (index & 7).astype(np.uint8))
    return stored


def _read_group(store: Store, group: Group, stored: Any) -> tuple[Picked, Any]:
    def opened(name, shape, dtype):
        return store.open(array_name("rows", group.folder, name), (group.num_rows, *shape), dtype, group.seals[name]).read()

    picked = [opened("env", (), np.int32), opened("number", (), np.int64)]
    leaves = [
        opened(name, leaf.shape[1:], leaf.dtype) if leaf.size else np.zeros((group.num_rows, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in named(stored)
    ]
    read = [leaf if isinstance(leaf, np.ndarray) else checked(f"rows/{group.folder}", leaf.result) for leaf in [*picked, *leaves]]
    return Picked(read[0].astype(np.int64), read[1]), jax.tree.unflatten(jax.tree.structure(stored), read[2:])

"""Rows of a state, in the order in which they were added, and copies out of a state and into one.

A row does not change until it is overwritten. So a save writes only the rows since the last save,
and may still read a row after later adds, until the ring wraps around. Each row has a number in its
stream that keeps counting when the head wraps around: the ring position is the number modulo the
length.
"""

import ctypes
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import named
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.sampleable import ReplayState

_RUN = 2**15  # contiguous bytes from which on a system call of their own is faster than a copy


class Span(NamedTuple):
    """Rows of each of E streams that a state holds: the numbers `first` to `end - 1`, int64[E]."""

    first: np.ndarray
    end: np.ndarray


class Picked(NamedTuple):
    """Selected rows: their streams, and their numbers there, int64[K] each."""

    env: np.ndarray
    number: np.ndarray


def split(state: Any) -> tuple[Any, Any]:
    """Split a state into its rows, which do not change once written, and the rest. Only a
    `ReplayState` has rows."""
    if not isinstance(state, ReplayState):
        return {}, state
    streams = state.streams
    rows = {
        "steps": streams.steps,
        "flags": streams.flags,
        "candidate_number": streams.candidate_number,
    }
    return rows, state.replace(
        streams=streams.replace(steps=None, flags=None, candidate_number=None)
    )


def specs_of(shape: Any) -> Any:
    """Return the shapes and dtypes of a state's rows in their plain form, which is the same on
    every platform (`storage/stored_arrays.py`)."""
    stored, _ = split(shape)
    return stored and {**stored, "steps": stored_arrays.plain_specs(stored["steps"])}


def join(rows: Any, rest: Any) -> Any:
    return rest.replace(streams=rest.streams.replace(**rows)) if rows else rest


def ends_of(heads: Any, length: int) -> np.ndarray:
    """Return the number of the next row of each stream, int64[E]. `heads`: `heads_of(state)`."""
    return np.asarray(heads[1]).astype(np.int64) * length + np.asarray(heads[0])


def span_of(heads: Any, length: int) -> Span:
    """Return the rows that a state holds. `heads`: `heads_of(state)`."""
    end = ends_of(heads, length)
    return Span(end - np.asarray(heads[2]), end)


def num_rewritten(state: ReplayState) -> int:
    """Count a stream's newest rows that may still change: a step and its final row, which is taken
    back if the episode continues."""
    return 2 if state.layout.may_take_back else 0


def _heads(state: ReplayState) -> tuple[jax.Array, jax.Array, jax.Array]:
    counters = state.streams.counters
    return counters.position, counters.lap, counters.filled


def rows_at(picked: Picked, length: int) -> np.ndarray:
    return (picked.env * length + ring.position_of(picked.number, length)).astype(np.int32)


def long_runs(index: np.ndarray, row_bytes: int) -> list[slice] | None:
    """Return the runs of consecutive rows if they are so long that reading or writing each run is
    faster than copying all rows together first, or None."""
    starts = np.flatnonzero(np.diff(index, prepend=-2) != 1)
    if len(index) * row_bytes < _RUN * len(starts):
        return None
    firsts, counts = index[starts].tolist(), np.diff(starts, append=len(index)).tolist()
    return [slice(first, first + count) for first, count in zip(firsts, counts, strict=True)]


def heads_of(state: ReplayState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return copies of the heads. If a host array shared a leaf's memory, the next add would copy
    that leaf."""
    return copied(_heads(state))


@jax.jit
def read(state: ReplayState, index: jax.Array) -> tuple[Any, Any]:
    """Return rows in their plain form, and the current heads. `index`: int32[K], in bounds."""
    rows, _ = split(state)
    return stored_arrays.read_plain(rows, index), _heads(state)


def put(rows: Any, index: np.ndarray, values: Any) -> Any:
    """Write values in plain form to rows, which are donated, and return the rows.

    Args:
      rows: The rows of a new state.
      index: int32[K]. Rows past the end are dropped.
      values: Leaves [K, ...].
    """
    size = pow2.power_above(len(index))  # few programs are compiled
    if size > len(index):
        values = jax.tree.map(lambda leaf: np.resize(leaf, (size, *leaf.shape[1:])), values)
    return jax.block_until_ready(
        _in_place(_write, rows, pow2.padded(index, size, len(jax.tree.leaves(rows)[0])), values)
    )


def memory_of(leaf: jax.Array) -> np.ndarray | None:
    """Return a new array's memory, to be written to, or None if it is not on one CPU device.

    A jitted program would copy each value three times.
    """
    if not _is_here(leaf):
        return None
    if not leaf.size:
        return np.empty(leaf.shape, leaf.dtype)
    memory = np.ctypeslib.as_array(
        (ctypes.c_ubyte * leaf.nbytes).from_address(leaf.unsafe_buffer_pointer())
    )
    return memory.view(leaf.dtype).reshape(leaf.shape)


def views_of(rows: Any) -> dict[str, np.ndarray] | None:
    """Return views of the rows' memory by name, to be read.

    While a view exists, an add copies the leaf. The views are of each leaf's only shard: a leaf
    would keep a view of itself.

    Returns:
      The views, or None if the rows are not on one CPU device, not in plain form, or do not exist.
    """
    found = named(rows)
    if (
        not found
        or not stored_arrays.is_plain(rows)
        or not all(_is_here(leaf) for _, leaf in found)
    ):
        return None
    return {name: np.asarray(leaf.addressable_data(0)) for name, leaf in found}


def _is_here(leaf: jax.Array) -> bool:
    devices = jax.block_until_ready(leaf).devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _in_place(function: Any, tree: Any, *arguments: Any) -> Any:
    """Call a function that consumes its first argument's memory. Leaves on several devices keep
    their sharding."""
    shardings = [
        leaf.sharding if len(leaf.sharding.device_set) > 1 else None
        for leaf in jax.tree.leaves(tree)
    ]
    return _jitted(function, jax.tree.structure(tree), tuple(shardings))(tree, *arguments)


@functools.cache
def _jitted(function: Any, structure: Any, shardings: tuple[Any, ...]) -> Any:
    return jax.jit(
        function, donate_argnums=0, out_shardings=jax.tree.unflatten(structure, shardings)
    )


def _write(rows: Any, index: jax.Array, values: Any) -> Any:
    """Write values to rows. Rows past the end are dropped."""
    return stored_arrays.write_plain(rows, index, values)


def chunk_rows(leaf: Any, num_bytes: int) -> int:
    """Return how many rows along the first axis fit in `num_bytes`, at least 1."""
    row_bytes = max(math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize, 1)
    return max(1, min(leaf.shape[0] if leaf.shape else 1, num_bytes // row_bytes))


def pieces(leaf: jax.Array, num_rows: int) -> Iterator[jax.Array]:
    """Iterate over copies of `num_rows` rows each of a leaf, or over one copy of a scalar."""
    if not leaf.ndim:
        yield copied(leaf)
        return
    for start in range(0, len(leaf), num_rows):
        yield _piece(leaf, start, min(num_rows, len(leaf) - start))


@jax.jit
def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@functools.partial(jax.jit, static_argnums=2)
def _piece(leaf: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, start, size)


def put_piece(leaf: jax.Array, start: int, values: np.ndarray) -> jax.Array:
    """Write values from `start` on along an array's first axis, or a scalar's value. The array is
    donated."""
    return _in_place(_put_piece if leaf.ndim else _put_scalar, leaf, start, values)


def _put_scalar(leaf: jax.Array, start: jax.Array, value: jax.Array) -> jax.Array:
    del start
    return jax.lax.dynamic_update_slice(leaf, value, ())


def _put_piece(leaf: jax.Array, start: jax.Array, values: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(leaf, values, start, 0)

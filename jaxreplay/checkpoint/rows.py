"""Rows of a state, in the order in which they were added, and copies out of a state and into one.

A row does not change until it is overwritten. So a save writes only the rows since the last save,
and may still read a row after later adds, until the ring wraps around. Each row has a number in its
stream that keeps counting when the head wraps around: the ring position is the number modulo the
length.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.adopt import stored
from jaxreplay.checkpoint.bundle import Piece
from jaxreplay.distributed.parts import Part
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.state import ReplayState


class Span(NamedTuple):
    """Rows of each of E streams that a state holds: the numbers `first` to `end - 1`, int64[E]."""

    first: np.ndarray
    end: np.ndarray


class Picked(NamedTuple):
    """Selected rows: their streams, and their numbers there, int64[K] each."""

    env: np.ndarray
    number: np.ndarray


def span_of(counters: dict[str, Any], length: int) -> Span:
    """Return the rows that a state holds.

    Args:
      counters: Those of the state, by name.
      length: Rows in each stream's ring.
    """
    lap = np.asarray(counters["lap"]).astype(np.int64)
    end = lap * length + np.asarray(counters["position"])
    return Span(end - np.asarray(counters["filled"]), end)


def rows_at(picked: Picked, length: int) -> np.ndarray:
    return (picked.env * length + ring.position_of(picked.number, length)).astype(np.int32)


def copied(part: Part, picked: Picked, size: int = 1, spare: Any = None) -> tuple[Any, int]:
    """Copy the rows that a part has of the picked ones.

    Args:
      part: The part.
      picked: The rows.
      size: Rows that the copy has at least; some repeat. It has a power of two of them, so that few
        programs are compiled. Default: 1.
      spare: Donated: an earlier copy of as many rows, whose memory may be used again.

    Returns:
      The copy in plain form, [size, ...], and the number of the rows.
    """
    is_own = (picked.env >= part.env) & (picked.env < part.env_stop)
    own = Picked(picked.env[is_own] - part.env, picked.number[is_own])
    index = rows_at(own, part.state.layout.length)
    size = max(size, pow2.power_above(len(index)))
    with defer_interrupts():  # JAX would report one during its comparison of layouts as an error
        return _read(part.state, np.resize(index, size), spare), len(index)


@functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
def _read(state: ReplayState, index: jax.Array, spare: Any = None) -> Any:
    """Return rows in their plain form.

    Args:
      state: The state.
      index: int32[K], the rows, in bounds.
      spare: Donated: rows that an earlier call returned, whose memory may be used again.
    """
    del spare
    return stored_arrays.read_plain(stored(state), index)


def on_host(leaf: Any) -> np.ndarray:
    """Return a leaf's values. On a CPU they are its own memory, of which no view is kept, so that
    it may be donated later."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        leaf = leaf.addressable_data(0)
    elif isinstance(leaf, jax.Array):
        own = [shard.data for shard in leaf.addressable_shards]
        leaf = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, own)
    return np.asarray(leaf)


def with_rows(rows: Any, index: np.ndarray, values: Any, most: int) -> Any:
    """Write values in plain form to rows, which are donated, and return the rows.

    Args:
      rows: The rows of a new state; or NumPy arrays, which are written in place.
      index: int32[K].
      values: Leaves [K, ...], which may be overwritten as soon as this returns.
      most: The largest K of all calls.
    """
    if isinstance(jax.tree.leaves(rows)[0], np.ndarray):  # rows on the host
        for leaf, new in zip(jax.tree.leaves(rows), jax.tree.leaves(values), strict=True):
            leaf[index] = new
        return rows
    size = min(pow2.power_above(len(index)), most)  # few programs are compiled
    if size > len(index):
        values = jax.tree.map(lambda leaf: np.resize(leaf, (size, *leaf.shape[1:])), values)
    # rows past the end are dropped
    end = len(jax.tree.leaves(rows)[0])
    places = np.pad(index, (0, size - len(index)), constant_values=end)
    return jax.block_until_ready(_in_place(stored_arrays.write_plain, rows, places, values))


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


def piece_of(leaf: Any, piece: Piece) -> Any:
    """Return the rows of a piece of a leaf, or a scalar."""
    size = piece.stop - piece.start
    if not np.ndim(leaf) or size == len(leaf):
        return leaf
    is_on_device = isinstance(leaf, jax.Array)
    return _piece(leaf, piece.start, size) if is_on_device else leaf[piece.start : piece.stop]


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

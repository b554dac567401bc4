"""Stored leaves of every dtype: zeros, a masked write of rows in place, and a read of rows.

On CPUs, XLA widens a whole array of bfloat16, 8-bit floats or int4 before a scatter, and narrows it
after. Every write would cost O(capacity). Such arrays are stored as their bits, and only the rows
that are written or read are converted.

On a TPU a row lies in parts that are written in place there (`tiles.py`). Other modules see only
the plain form: `shape` and `dtype` of a stored leaf are those of its values, and the plain form of
rows, which checkpoints keep, has no tiles.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree, Stored
from jaxreplay._util.names import short, short_bytes
from jaxreplay._util.struct import Node, static_field
from jaxreplay.storage import split_programs, tiles
from jaxreplay.storage.tiles import Tile

_PLAIN_FLOATS = (np.dtype("float16"), np.dtype("float32"), np.dtype("float64"))


class BitsArray(Node):
    """Array of a dtype into which XLA does not scatter in place, stored as bits."""

    bits: Any  # [N, ...]; an array or a `TiledArray`
    dtype: Any = static_field()  # of the values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


class TiledArray(Node):
    """Array whose rows lie in parts, which a TPU writes in place."""

    tiles: tuple[jax.Array, ...]  # [N, ...] each
    row: tuple[int, ...] = static_field()  # the shape of a row
    dtype: Any = static_field()  # of the values

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tiles[0].shape[0], *self.row)

    @property
    def rule(self) -> tuple[Tile, ...]:
        return tiles.tiles_of(self.row, self.dtype) or ()


class HostArray(Node):
    """Array whose rows lie outside of the device, which knows their shape and dtype alone."""

    name: tuple[str, str] = static_field()  # of its buffer in a mixture, or ""; and its own
    shape: tuple[int, ...] = static_field()
    dtype: Any = static_field()  # of the values


def zeros(num_rows: int, row: Any, has_tiles: bool = False) -> jax.Array | BitsArray | TiledArray:
    """Return `num_rows` rows of zeros.

    Args:
      num_rows: Number of rows N.
      row: Array or `jax.ShapeDtypeStruct` with the shape and dtype of a row.
      has_tiles: Store rows in tiles, as on a TPU. Default: False.
    """
    dtype = np.dtype(row.dtype)
    if (bits := carrier(dtype)) is not None:
        return BitsArray(zeros(num_rows, jax.ShapeDtypeStruct(row.shape, bits), has_tiles), dtype)  # type: ignore[arg-type]
    if not has_tiles or (rule := tiles.tiles_of(tuple(row.shape), dtype)) is None:
        return jnp.zeros((num_rows, *row.shape), dtype)
    return TiledArray(
        tuple(jnp.zeros((num_rows, *tile.shape), tiles.stored_dtype(tile, dtype)) for tile in rule),
        tuple(row.shape),
        dtype,
    )


def write(
    leaf: jax.Array | BitsArray | TiledArray | HostArray,
    row: jax.Array,
    values: jax.Array,
    are_distinct: bool = True,
) -> PyTree:
    """Write `values`, `[*row.shape, ...]`, to rows. Rows past the end are dropped.

    Args:
      leaf: The stored leaf.
      row: int32[...].
      values: The new values.
      are_distinct: If False, a row may be written twice; on a CPU the last one stays. Default:
        True.
    """
    # The host writes the values.
    if isinstance(leaf, HostArray) or isinstance(getattr(leaf, "bits", None), HostArray):
        return leaf
    if isinstance(leaf, BitsArray):
        bits = encode(values, leaf.dtype)
        return leaf.replace(bits=write(leaf.bits, row, bits, are_distinct))
    if isinstance(leaf, TiledArray):
        values = values.reshape((row.size, *leaf.row))
        encoded = tiles.encoded(values, leaf.row, leaf.rule)
        return leaf.replace(
            tiles=tuple(
                write(tile, row, new, are_distinct)
                for tile, new in zip(leaf.tiles, encoded, strict=True)
            )
        )
    values = values.reshape((row.size, *leaf.shape[1:]))
    return leaf.at[row.reshape(-1)].set(values, unique_indices=are_distinct, mode="drop")


def read(leaf: jax.Array | BitsArray | TiledArray | HostArray, row: jax.Array) -> jax.Array:
    """Read rows int32[...], which must be in bounds: `[*row.shape, ...]`."""
    if isinstance(leaf, HostArray):
        return split_programs.rows_of(leaf.name, row, leaf.shape[1:], leaf.dtype)
    if isinstance(leaf, BitsArray):
        return decode(read(leaf.bits, row), leaf.dtype)
    if isinstance(leaf, TiledArray):
        parts = [read(part, row) for part in leaf.tiles]
        return tiles.decoded(parts, leaf.row, leaf.dtype, leaf.rule)
    # A single row would be read by a slice, which has two coordinates under vmap. A TPU would then
    # copy the whole leaf into another layout.
    if not jnp.ndim(row):
        return leaf.at[row[None]].get(mode="promise_in_bounds")[0]
    return leaf.at[row].get(mode="promise_in_bounds")


def values(leaf: jax.Array | BitsArray | TiledArray) -> Any:
    """Return every row: `[N, ...]`. A leaf that is a plain array is returned itself, as is one
    whose rows lie on the host."""
    if isinstance(leaf, BitsArray) and not isinstance(leaf.bits, HostArray):
        return decode(values(leaf.bits), leaf.dtype)
    if isinstance(leaf, TiledArray):
        return tiles.decoded(list(leaf.tiles), leaf.row, leaf.dtype, leaf.rule)
    return leaf


def stored_leaves(tree: PyTree) -> list[Any]:
    """Return the stored leaves of a tree."""
    return jax.tree.leaves(tree, is_leaf=is_compound)


def tree_map(function: Any, stored: Stored, *rest: PyTree) -> PyTree:
    """Map a function over stored leaves, and the values in `rest` that belong to each."""
    return jax.tree.map(function, stored, *rest, is_leaf=is_compound)


def plain_specs(stored: Stored) -> PyTree:
    """Return shapes and dtypes of stored leaves in their plain form."""
    return _map_arrays(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored)


def read_plain(stored: Stored, row: jax.Array) -> PyTree:
    """Read rows int32[K] of stored leaves in their plain form. They must be in bounds."""
    return _map_arrays(lambda leaf: read(leaf, row), stored)


def write_plain(stored: Stored, row: jax.Array, values: Any) -> PyTree:
    """Write values in their plain form to distinct rows int32[K] of stored leaves. Rows past the
    end are dropped."""
    return _map_arrays(lambda leaf, new: write(leaf, row, new), stored, values)


def _map_arrays(function: Any, stored: Stored, *rest: PyTree) -> PyTree:
    """Map a function over the arrays of the plain form."""
    return jax.tree.map(function, stored, *rest, is_leaf=lambda node: isinstance(node, TiledArray))


def num_bits(dtype: np.dtype) -> int:
    """Return the number of bits of a value, possibly less than 8. The dtype must not be bool."""
    return int((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits)


def carrier(dtype: np.dtype) -> PyTree:
    """Return the dtype that stores the values' bits, or None if they are stored as they are."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype not in _PLAIN_FLOATS:
        # Floats of less than a byte are widened, which is exact.
        return {16: jnp.uint16, 8: jnp.uint8}.get(num_bits(dtype), jnp.float16)
    if jnp.issubdtype(dtype, jnp.integer) and num_bits(dtype) < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    return None


def is_compound(leaf: Any) -> bool:
    """Return whether a node of a tree is a stored leaf that has leaves of its own."""
    return isinstance(leaf, BitsArray | TiledArray | HostArray)


def decode(bits: Any, dtype: np.dtype) -> Any:
    """Return the values of a dtype that are stored as `bits`, an array of JAX or NumPy."""
    return bits.view(dtype) if _is_bitcast(dtype) else bits.astype(dtype)


def encode(values: Any, dtype: np.dtype) -> Any:
    """Return the bits that store values of a dtype, an array of JAX or NumPy."""
    bits = np.dtype(carrier(dtype))
    return values.view(bits) if _is_bitcast(dtype) else values.astype(bits)


def _is_bitcast(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits >= 8


def shown(
    state: Any,
    population: Sequence[int],
    sizes: tuple[int, int],
    name: str,
    rows: Stored,
    num_axes: int = 1,
    what: str = "env",
) -> str:
    """Return the line that shows a state, such as `ReplayState(4 envs x 250 rows, obs f32[3],
    16 kB)`.

    Args:
      state: The state.
      population: Sizes of the axes that `vmap` put in front.
      sizes: Number of envs, and number of rows of each.
      name: What `rows` are.
      rows: The stored leaves that are shown.
      num_axes: Number of axes of these before a row's own. Default: 1.
      what: What has these rows each. Default: "env".
    """
    num_envs, length = sizes
    num_shards = stored_leaves(rows)[0].shape[len(population)] // (num_envs * length)
    parts = [*map(str, population), *[f"{num_shards} shards"] * (num_shards > 1)]
    parts += [f"{num_envs} {what}{'s' * (num_envs != 1)}", f"{length} rows"]

    def row_of(leaf: Any) -> Any:
        is_tiled = isinstance(getattr(leaf, "bits", leaf), TiledArray)
        start = 1 if is_tiled else len(population) + num_axes
        return jax.ShapeDtypeStruct(leaf.shape[start:], leaf.dtype)

    row, size = short(tree_map(row_of, rows)), short_bytes(state)
    return f"{type(state).__name__}({' x '.join(parts)}, {name} {row}, {size})"

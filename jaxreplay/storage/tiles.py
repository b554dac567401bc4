"""Tiles: a row's form on a TPU, in which XLA writes and reads it in place. It depends only on the
row's shape and dtype.

A TPU stores arrays in tiles of 8 x 128 words. XLA copies the whole buffer into another layout and
back around every write if rows have 8 bits an element or do not fill whole tiles. Compiling for a
v5e (jax 0.10.2) showed which rows are written in place:

- with 16 or 32 bits an element: rows of at most 48 elements, which it stores as columns, and rows
  of a multiple of 128 elements;
- with 8 bits an element: whole tiles of 8 x 128 = 1,024 elements, and 32-bit words of four elements
  each.

So a row is cut into parts that are written in place. It is padded with zeros to a multiple of 128
or 1,024 elements if that multiplies its size by at most `_MOST_FILLER`. Otherwise the rest goes
into a part of its own, or into several of at most 48 columns. (Compiled loop over 1 M rows of 64
floats: 256 MB and 13 k cycles in two parts of 32; 512 MB and 11.7 k cycles padded to 128; 5 M
cycles, and 512 MB of copies, as plain arrays.)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

_MOST_COLUMNS, _COLUMNS, _LANES, _TILE = 48, 8, 128, 8 * 128
_MOST_FILLER = 1.15


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a row: consecutive elements of the flat row.

    Args:
      size: Number of elements.
      shape: Shape in which the part is stored. It is padded with zeros beyond `size` elements.
      is_words: Store four 8-bit elements as one uint32. Default: False.
    """

    size: int
    shape: tuple[int, ...]
    is_words: bool = False


def tiles_of(shape: tuple[int, ...], dtype: np.dtype) -> tuple[Tile, ...] | None:
    """Return the parts of a row, or None if it is stored as a plain array.

    That is a row that is written in place as it is, or one of which no part would be: a scalar, an
    empty row, or elements of 64 bits.
    """
    size = math.prod(shape)
    if not shape or not size or dtype.itemsize > 4 or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    tiles = tuple(_tiles(size) if dtype.itemsize == 1 else _columns(size))
    return None if tiles == (Tile(size, shape),) else tiles


def encoded(values: jax.Array, shape: tuple[int, ...], tiles: tuple[Tile, ...]) -> list[jax.Array]:
    """Return rows `[..., *shape]` as they are stored: for each part `[..., *part.shape]`."""
    axes = values.shape[: values.ndim - len(shape)]
    flat = values.reshape((*axes, -1))
    flat = flat.astype(jnp.uint8) if flat.dtype == jnp.bool_ else flat
    found, start = [], 0
    for tile in tiles:
        piece = flat[..., start : start + tile.size]
        start += tile.size
        room = math.prod(tile.shape) * (4 if tile.is_words else 1)
        piece = jnp.pad(piece, [(0, 0)] * len(axes) + [(0, room - tile.size)])
        if tile.is_words:
            piece = jax.lax.bitcast_convert_type(piece.reshape((*axes, -1, 4)), jnp.uint32)
        found.append(piece.reshape((*axes, *tile.shape)))
    return found


def decoded(
    stored: list[jax.Array], shape: tuple[int, ...], dtype: np.dtype, tiles: tuple[Tile, ...]
) -> jax.Array:
    """Return rows `[..., *shape]` from their parts: the inverse of `encoded`."""
    pieces = []
    for piece, tile in zip(stored, tiles, strict=True):
        axes = piece.shape[: piece.ndim - len(tile.shape)]
        if tile.is_words:
            piece = jax.lax.bitcast_convert_type(piece, dtype if dtype != jnp.bool_ else jnp.uint8)
        pieces.append(piece.reshape((*axes, -1))[..., : tile.size])
    flat = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-1)
    return flat.reshape((*flat.shape[:-1], *shape)).astype(dtype)


def stored_dtype(tile: Tile, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a part of a row is stored."""
    if tile.is_words:
        return np.dtype(np.uint32)
    return np.dtype(np.uint8) if dtype == np.bool_ else dtype


def _columns(size: int) -> list[Tile]:
    """Return the parts of a row of `size` elements of 16 or 32 bits."""
    if size <= _MOST_COLUMNS:
        return [_column(size)]
    filled = -(-size // _LANES) * _LANES
    if filled <= _MOST_FILLER * size:
        return [Tile(size, (filled,))]
    whole = size // _LANES * _LANES
    rest, start = size - whole, [Tile(whole, (whole,))] if whole else []
    num_parts = -(-rest // _MOST_COLUMNS)
    width = -(-rest // (num_parts * _COLUMNS)) * _COLUMNS
    sizes = [min(width, rest - place) for place in range(0, rest, width)]
    return [*start, *map(_column, sizes)]


def _column(size: int) -> Tile:
    """Return a part of at most 48 elements. A single one has no axis: it would be copied to another
    layout around every write."""
    return Tile(size, (size,) if size > 1 else ())


def _tiles(size: int) -> list[Tile]:
    """Return the parts of a row of `size` elements of 8 bits."""
    filled = -(-size // _TILE) * _TILE
    if filled <= _MOST_FILLER * size:
        return [Tile(size, (filled // _LANES, _LANES))]
    whole = size // _TILE * _TILE
    start, rest = [Tile(whole, (whole // _LANES, _LANES))] if whole else [], size - whole
    words = _words(-(-rest // 4))
    sizes = [4 * tile.size for tile in words]
    sizes[-1] -= sum(sizes) - rest
    return [
        *start,
        *(Tile(size, tile.shape, is_words=True) for size, tile in zip(sizes, words, strict=True)),
    ]


def _words(size: int) -> list[Tile]:
    """Return the parts of `size` words.

    If 9 to 20 words end with 1 to 4 beyond a multiple of 8, these would take 8 columns. They go
    into a part of their own, where they take 1, 2 or 4.
    """
    few = size & (_COLUMNS - 1)
    if few == size or few not in (1, 2, 3, 4) or size > 2 * _COLUMNS + 4:
        return _columns(size)
    return [*_columns(size - few), _column(few)]

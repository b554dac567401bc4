"""Fingerprints of rows, which tell whether a state still has the rows that an earlier save wrote.

A row's hash covers its stream, its number there and its values. The fingerprint of several rows is
the sum of their hashes, modulo 2^32.

If a leaf has rows of more than 256 elements, 64 elements of each row are hashed, spread over it.
The next row hashes other elements; after ceil(elements / 64) rows each element had its turn. Rows
that differ in a hashed element have equal fingerprints with a probability of 2^-32.

References:
  Clarke et al., "Incremental Multiset Hash Functions and Their Application to Memory Integrity
  Checking" (2003): MSet-Add-Hash, here without a secret, against accidents and not attacks.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.random import avalanche
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.rows import Part, Picked
from jaxreplay.storage import ring, stored_arrays

_BLOCK = 4096  # rows at a time, so that few programs are compiled
_MOST_ELEMENTS = 256  # the largest row of a leaf of which all elements are hashed
# runs of a larger row, and elements of a run: reading one element costs as much as reading its
# neighbors, too
_RUNS, _RUN = 8, 8
# odd, so that multiples of each are distinct modulo 2^32
_GOLDEN, _FOR_NUMBERS, _FOR_STREAMS = 0x9E3779B9, 0x27D4EB2F, 0x165667B1


def of_rows(part: Part, picked: Picked) -> Any:
    """Compute the fingerprint of rows of a part: uint32[], the same on every platform."""
    stored, total = rows.stored(part.state), np.uint32(0)
    columns = (
        part.indices(picked),
        picked.number.astype(np.uint32),
        picked.env.astype(np.uint32),
    )
    size = min(_BLOCK, pow2.power_above(max(len(picked.env), 1)))
    for start in range(0, len(picked.env), size):
        block = [array[start : start + size] for array in columns]
        total = _add(
            total, stored, *(pow2.padded(array, size, array[0]) for array in block), len(block[0])
        )
    return total


@jax.jit
def _add(
    total: jax.Array,
    stored: Any,
    row: jax.Array,
    number: jax.Array,
    env: jax.Array,
    count: jax.Array,
) -> jax.Array:
    return total + jnp.where(jnp.arange(len(row)) < count, hashes(stored, row, number, env), 0).sum(
        dtype=jnp.uint32
    )


def hashes(stored: Any, row: jax.Array, number: jax.Array, env: jax.Array) -> jax.Array:
    """Hash stored rows: uint32[K]. Only elements that are hashed are read.

    Args:
      stored: Stored leaves, `[N, ...]`.
      row: int32[K], the rows' indices, in bounds.
      number: uint32[K], each row's number in its stream.
      env: uint32[K], each row's stream.
    """
    content, num_words = jnp.zeros_like(number), 0
    for leaf in stored_arrays.stored_leaves(stored):
        size = math.prod(leaf.shape[1:])
        if not size:
            continue
        words = _words(
            stored_arrays.read(leaf, row)
            if size <= _MOST_ELEMENTS
            else stored_arrays.read_elements(leaf, row, _places(size, number))
        )
        # The salt makes the hash depend on each word's place in the row.
        salt = np.arange(num_words, num_words + words.shape[-1], dtype=np.uint32) * np.uint32(
            _GOLDEN
        )
        content += avalanche(words ^ salt).sum(axis=-1, dtype=jnp.uint32)
        num_words += words.shape[-1]
    return avalanche(
        avalanche(content + number * jnp.uint32(_FOR_NUMBERS)) + env * jnp.uint32(_FOR_STREAMS)
    )


def _places(size: int, number: jax.Array) -> jax.Array:
    """Choose P elements of each row to hash: int32[K, P]. Evenly spread runs of elements move on
    with each row, until all had their turn."""
    num_turns = -(-size // (_RUNS * _RUN))
    _, turn = ring.split(number, num_turns)
    nth_run, within = (places.reshape(-1) for places in np.mgrid[:_RUNS, :_RUN].astype(np.int32))
    return jnp.minimum(
        (nth_run * num_turns + turn.astype(jnp.int32)[..., None]) * _RUN + within, size - 1
    )


def _words(values: jax.Array) -> jax.Array:
    """Return the bits of rows [K, ...] as uint32[K, W]."""
    dtype = values.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = jnp.stack([values.real, values.imag], axis=-1)
    elif dtype == jnp.bool_:
        values = values.astype(jnp.uint8)
    elif (carrier := stored_arrays.carrier(np.dtype(dtype))) is not None and stored_arrays.num_bits(
        np.dtype(dtype)
    ) < 8:
        values = values.astype(carrier)  # exact
    size = np.dtype(values.dtype).itemsize
    # 64 bits become two words
    words = jax.lax.bitcast_convert_type(
        values, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    )
    return words.astype(jnp.uint32).reshape((len(values), -1))

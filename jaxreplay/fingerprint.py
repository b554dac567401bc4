"""A fingerprint of all that was ever written to a stream: it tells apart two states of which one does not go on from the other.

Each row has a hash of its number in the stream, its flags and its values, and the fingerprint is the sum of those of all rows, modulo
2^32. So it is the same however the rows came, one at a time or in blocks, and rows can be taken off again.

Of a leaf whose rows have more than 256 elements, 64 of each row are hashed, spread over it, and other ones in the next row: after as
many rows as there are 64ths all have had their turn. (Of 64 images of 84 x 84 x 4 bytes all elements took 150 us, where the write
itself took 60; these take 1.) Two streams that differ anywhere else have the same fingerprint once in 2^32.

Source: the sum of hashes is MSet-Add-Hash of Clarke et al., "Incremental Multiset Hash Functions and Their Application to Memory
Integrity Checking" (2003), without a secret: it is for accidents, not against attacks.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import leaves, ring
from jaxreplay.bits import avalanche

_MOST_ELEMENTS = 256  # of a row of one leaf, that are all hashed
_MOST_IN_LINE = 16  # words of a leaf's row that are added one by one on a GPU
_RUNS, _RUN = 8, 8  # of a larger one: so many runs of so many elements, since to read a lone one costs as much as to read its neighbors
_GOLDEN, _FOR_NUMBERS, _FOR_FLAGS = 0x9E3779B9, 0x27D4EB2F, 0x165667B1  # odd: a multiple of each tells 2^32 things apart


class _Leaf(NamedTuple):
    """Some rows of a leaf, to be read."""

    shape: tuple[int, ...]  # of a row
    whole: Callable[[], jax.Array]  # [..., *shape]
    some: Callable[[jax.Array], jax.Array]  # of places int32[..., K] in the flat row: [..., K]


def of_values(tree: Any, number: jax.Array, in_line: bool = False) -> jax.Array:
    """Of rows, without their flags: uint32[...]. It is the same on every platform; how it is added up is not.

    Args:
      tree: leaves [..., *shape]. number: uint32[...], of each row in its stream.
    """

    def leaf_of(values: jax.Array) -> _Leaf:
        flat = values.reshape((*number.shape, -1))
        some = lambda place: jnp.take_along_axis(flat, place, axis=-1, mode="promise_in_bounds")  # noqa: E731
        return _Leaf(values.shape[number.ndim :], lambda: values, some)

    return _of_leaves([leaf_of(values) for values in jax.tree.leaves(tree)], number, in_line)


def of_stored(tree: Any, row: jax.Array, number: jax.Array, in_line: bool = False) -> jax.Array:
    """`of_values` for stored rows int32[K], which must be in bounds: uint32[K]. `tree`: stored leaves. No more is read than is hashed."""

    def leaf_of(leaf: Any) -> _Leaf:
        return _Leaf(leaf.shape[1:], lambda: leaves.take(leaf, row), lambda place: leaves.take_elements(leaf, row, place))

    return _of_leaves([leaf_of(leaf) for leaf in leaves.stored_leaves(tree)], number, in_line)


def of_flags(flags: jax.Array, number: jax.Array) -> jax.Array:
    """The part of a row's hash that its flags, uint8[...], have: uint32[...]."""
    return avalanche(number * jnp.uint32(_FOR_NUMBERS) + (flags.astype(jnp.uint32) + 1) * jnp.uint32(_FOR_FLAGS))


def _of_leaves(rows: list[_Leaf], number: jax.Array, in_line: bool) -> jax.Array:
    content, num_words = jnp.zeros_like(number), 0
    for leaf in rows:
        size = math.prod(leaf.shape)
        if not size:
            continue
        words = _words(leaf.whole() if size <= _MOST_ELEMENTS else leaf.some(_places(size, number)), number.ndim)
        # Each word's place in the row is part of what is hashed.
        salt = np.arange(num_words, num_words + words.shape[-1], dtype=np.uint32) * np.uint32(_GOLDEN)
        content += _sum(avalanche(words ^ salt), in_line)
        num_words += words.shape[-1]
    return avalanche(content + number * jnp.uint32(_FOR_NUMBERS))


def _sum(words: jax.Array, in_line: bool) -> jax.Array:
    """Over the last axis. On a GPU a sum is a kernel of its own, and a few words that are added one by one go into another; on a CPU
    these make an add of small steps slower by a third."""
    if not in_line or words.shape[-1] > _MOST_IN_LINE:
        return words.sum(axis=-1, dtype=jnp.uint32)
    return functools.reduce(operator.add, [words[..., nth] for nth in range(words.shape[-1])])


def _places(size: int, number: jax.Array) -> jax.Array:
    """Which elements of a row are hashed: int32[..., K]. Runs of them, evenly spread, that move on with each row, until all had a turn."""
    num_turns = -(-size // (_RUNS * _RUN))
    _, turn = ring.split(number, num_turns)
    nth_run, within = (places.reshape(-1) for places in np.mgrid[:_RUNS, :_RUN].astype(np.int32))
    return jnp.minimum((nth_run * num_turns + turn.astype(jnp.int32)[..., None]) * _RUN + within, size - 1)


def _words(values: jax.Array, num_axes: int) -> jax.Array:
    """The bits of numbers, uint32[..., W]; `num_axes` leading axes stay."""
    dtype = values.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = jnp.stack([values.real, values.imag], axis=-1)
    elif dtype == jnp.bool_:
        values = values.astype(jnp.uint8)
    elif (carrier := leaves.carrier(np.dtype(dtype))) is not None and leaves.num_bits(np.dtype(dtype)) < 8:
        values = values.astype(carrier)  # exact
    size = np.dtype(values.dtype).itemsize
    words = jax.lax.bitcast_convert_type(values, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))  # 64 bits become two words
    return words.astype(jnp.uint32).reshape((*values.shape[:num_axes], -1))

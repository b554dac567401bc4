"""Modular arithmetic: every wrap-around and every division of a position is here, and nowhere else.

A ring of `length` places holds positions `0 .. length - 1`. Nothing in the package counts upwards
for ever: what would overflow in a long run is kept as a position on a ring, and two such values are
only ever compared by their modular difference.
"""

import jax
import jax.numpy as jnp
import numpy as np


def wrap(position: jax.Array, length: int) -> jax.Array:
    """Put a position from `[-length, 2 * length)` back on the ring. Two selects: a vectorized
    remainder costs several times as much."""
    position = jnp.where(position < 0, position + length, position)
    return jnp.where(position >= length, position - length, position)


def forward(start: jax.Array, stop: jax.Array, length: int) -> jax.Array:
    """Places from `start` forward to `stop`, in `[0, length)`; both must lie in `[0, length)`."""
    return jnp.where(stop < start, stop - start + length, stop - start)


def arange(length: int) -> jax.Array:
    """`0 .. length - 1` as int32, whether or not 64-bit numbers are on."""
    return jnp.arange(length, dtype=jnp.int32)


def split(index: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The quotient and the remainder of a non-negative index by `length`: of a row, its stream and
    its position there."""
    quotient = jax.lax.div(index, jnp.asarray(length, index.dtype))
    return quotient, index - quotient * length


def position_of(number: np.ndarray, length: int) -> np.ndarray:
    """On the host: where what was written as number 0, 1, 2, ... to a ring lies; also of numbers
    below 0."""
    return number % length


def difference(newer: jax.Array, older: jax.Array) -> jax.Array:
    """`newer - older` of two uint32 counters that wrap around, less than 2^31 apart: int32[...]."""
    return (newer - older).astype(jnp.int32)

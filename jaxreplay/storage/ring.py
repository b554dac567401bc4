"""Modular arithmetic: all wrap-arounds and divisions of positions are in this module.

A ring of `length` places has positions `0 .. length - 1`. No counter in the package grows without
bound: a value that would overflow in a long run is kept as a position on a ring, and two such
values are compared only by their modular difference.
"""

import jax
import jax.numpy as jnp
import numpy as np


def wrap(position: jax.Array, length: int) -> jax.Array:
    """Put a position from `[-length, 2 * length)` back on the ring."""
    # Two selects, since a vectorized remainder costs several times as much.
    position = jnp.where(position < 0, position + length, position)
    return jnp.where(position >= length, position - length, position)


def forward(start: jax.Array, stop: jax.Array, length: int) -> jax.Array:
    """Count the places from `start` forward to `stop`; all three lie in `[0, length)`."""
    return jnp.where(stop < start, stop - start + length, stop - start)


def arange(length: int) -> jax.Array:
    """Return `0 .. length - 1` as int32, also if JAX has 64-bit numbers enabled."""
    return jnp.arange(length, dtype=jnp.int32)


def divide(index: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Divide a non-negative index by `length`. Return the quotient and the remainder: of a row, its
    stream and its position there."""
    quotient = jax.lax.div(index, jnp.asarray(length, index.dtype))
    return quotient, index - quotient * length


def moved(
    lap: jax.Array, position: jax.Array, length: int, other: int
) -> tuple[jax.Array, jax.Array]:
    """Return the lap, uint32[...], and the position, int32[...], of the same number on a ring of
    another length. The number `lap * length + position` may exceed 32 bits."""
    # lap * length = laps * other * length + rest * length, and `rest` is multiplied bit by bit.
    laps, rest = divide(lap, other)
    step, step_rest = divmod(length, other)

    def plus(carry: tuple[jax.Array, jax.Array], by: jax.Array) -> tuple[jax.Array, jax.Array]:
        quotient, remainder = carry[0], carry[1] + by
        is_over = remainder >= jnp.uint32(other)
        return quotient + is_over, jnp.where(is_over, remainder - jnp.uint32(other), remainder)

    def double(nth: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bit = (rest >> (31 - nth).astype(jnp.uint32)) & 1
        carry = plus((carry[0] * 2, carry[1]), carry[1])
        return plus((carry[0] + bit * jnp.uint32(step), carry[1]), bit * jnp.uint32(step_rest))

    zero = jnp.zeros_like(rest)
    carry = jax.lax.fori_loop(0, 32, double, (zero, zero))
    quotient, remainder = divide(position.astype(jnp.uint32), other)
    moved_laps, place = plus((carry[0] + quotient, carry[1]), remainder)
    return moved_laps + laps * jnp.uint32(length), place.astype(jnp.int32)


def position_of(number: np.ndarray, length: int) -> np.ndarray:
    """Return the positions of the rows with the given numbers, which may be negative, on the host.

    Number 0 was written at position 0, and each later row at the next position.
    """
    return number % length


def difference(newer: jax.Array, older: jax.Array) -> jax.Array:
    """Return `newer - older` of two uint32 counters that wrap around: int32[...]. They must be less
    than 2^31 apart."""
    return (newer - older).astype(jnp.int32)

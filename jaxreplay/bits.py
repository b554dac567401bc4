"""Randomness by arithmetic: a sample draws its random bits once, in one array, and derives the rest here.

Most of a small sample's time would otherwise go into generating bits: a threefry call costs about as much as reading the batch.
"""

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: the increments of a Weyl sequence


def draw(key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """64 random bits an item, as two uint32[B]. Consumes the key."""
    high, low = jax.random.bits(key, (2, batch_size), jnp.uint32)
    return high, low


def fraction(word: jax.Array) -> jax.Array:
    """float32[...] in [0, 1), a multiple of 2^-24, from the word's top bits."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def below(high: jax.Array, low: jax.Array, bound: jax.Array) -> jax.Array:
    """An int32[...] in `[0, bound)`: the top of the 96-bit product of 64 random bits and the bound.

    Each value's probability is off by less than `2^-64`, that is by `bound / 2^64` of itself.

    Source: Lemire, "Fast Random Integer Generation in an Interval" (2019), without its rejection step, which 64 bits make idle.
    """
    bound = bound.astype(jnp.uint32)
    _, carried = _multiply(low, bound)
    product, overflow = _multiply(high, bound)
    total = product + carried
    return (overflow + (total < product)).astype(jnp.int32)


def remix(high: jax.Array, low: jax.Array, round_number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fresh bits for another try, a different bijection of the first ones in each round."""
    step = (round_number.astype(jnp.uint32) + 1) * jnp.uint32(_GOLDEN)
    high = _avalanche(high ^ _avalanche(low + step))
    return high, _avalanche(low + high)


def _avalanche(word: jax.Array) -> jax.Array:
    """A bijection in which every bit depends on all. Source: Appleby, MurmurHash3's 32-bit finalizer."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _multiply(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low and the high word of a 32 x 32-bit product, by halves: there is no uint64 without x64."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    cross = a_high * b_low + ((a_low * b_low) >> 16)
    middle = (cross & 0xFFFF) + a_low * b_high
    return a * b, a_high * b_high + (cross >> 16) + (middle >> 16)

"""Random numbers by arithmetic: a sample generates its random bits once, in one array, and derives
all other random numbers from them.

Generating bits would otherwise take most of a small sample's time: a Threefry call costs about as
much as reading the batch.
"""

import math

import jax
import jax.numpy as jnp

from jaxreplay._util import xla
from jaxreplay._util.aliases import Key
from jaxreplay._util.names import kind_of

# High word of the counters, so that no block coincides with one of `jax.random` for the same key.
_DOMAIN = 0x6A72706C
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: increment of a Weyl sequence


def words(key: Key, batch_size: int, purpose: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return 64 random bits for each item, as two uint32[B]. Consumes the key.

    For JAX's default keys this is JAX's own cipher, written without a loop: one block per item
    gives both words. On a CPU `jax.random.bits` has a loop of five iterations; without it a fused
    loop took 35 us instead of 47 (measured).

    Args:
      key: Random key, consumed.
      batch_size: Number of items B, static.
      purpose: Small int, static; each value gives other bits. The library has 0 for samplers and 1
        to 3 for what uses the same key: take others for more bits of yours. Default: 0.

    Raises:
      TypeError: `key` is no random key.
    """
    try:
        words = jax.random.key_data(key)
    except TypeError:
        raise TypeError(
            f"expected a random key, such as jax.random.key(0), got {kind_of(key)}"
        ) from None
    if words.ndim > 1:
        raise TypeError(f"expected one random key, got {words.shape[0]} of them; use jax.vmap")
    if words.shape == (2,):
        high, low = _threefry(
            words,
            jnp.full((batch_size,), _DOMAIN + purpose, jnp.uint32),
            jnp.arange(batch_size, dtype=jnp.uint32),
        )
    else:  # a key of another generator
        high, low = jax.random.bits(jax.random.fold_in(key, purpose), (2, batch_size), jnp.uint32)
    # Without the barrier XLA copies the whole cipher into each of its uses: jax 0.12 compiled one
    # sample for more than ten minutes (jax 0.10: 6 s; with the barrier 3 s).
    return xla.barrier((high, low))


def _threefry(key: Key, left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute Threefry-2x32 with 20 rounds.

    References:
      Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011),
      https://doi.org/10.1145/2063384.2063405, section 4.2.
    """
    schedule = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    left, right = left + schedule[0], right + schedule[1]
    injections = ((1, 2), (2, 0), (0, 1), (1, 2), (2, 0))
    for number, (to_left, to_right) in enumerate(injections):
        for rotation in _ROTATIONS[number & 1]:
            left = left + right
            right = left ^ (right << rotation | right >> (32 - rotation))
        left, right = left + schedule[to_left], right + schedule[to_right] + jnp.uint32(number + 1)
    return left, right


def fraction(word: jax.Array) -> jax.Array:
    """Return float32[...] in [0, 1), a multiple of 2**-24, from the word's top bits."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def below(high: jax.Array, low: jax.Array, bound: jax.Array) -> jax.Array:
    """Return a uniform int32[...] in `[0, bound)`, the top of the product of 64 random bits and
    `bound`.

    Each value's probability has an error below 2**-64, a relative error of bound / 2**64.

    References:
      Lemire, "Fast Random Integer Generation in an Interval" (2019),
      https://arxiv.org/abs/1805.10941, without its rejection step, which 64 bits do not need.
    """
    bound = bound.astype(jnp.uint32)
    _, carried = _multiply(low, bound)
    product, overflow = _multiply(high, bound)
    total = product + carried
    return (overflow + (total < product)).astype(jnp.int32)


def remix(high: jax.Array, low: jax.Array, round_number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return other bits for each round of a retry, by a different bijection of the first bits."""
    step = (round_number.astype(jnp.uint32) + 1) * jnp.uint32(_GOLDEN)
    high = avalanche(high ^ avalanche(low + step))
    return high, avalanche(low + high)


def avalanche(word: jax.Array) -> jax.Array:
    """Apply a bijection in which every bit depends on all bits.

    References:
      Appleby, MurmurHash3's 32-bit finalizer.
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _multiply(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the low and high words of a 32 x 32-bit product, by halves: uint64 needs x64."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    cross = a_high * b_low + ((a_low * b_low) >> 16)
    middle = (cross & 0xFFFF) + a_low * b_high
    return a * b, a_high * b_high + (cross >> 16) + (middle >> 16)


def geometric(
    gamma: float, bound: jax.Array, high: jax.Array, low: jax.Array, *, clip: bool = False
) -> jax.Array:
    """Return int32[...] k in [1, bound] of a geometric distribution; 0 where `bound` is 0.

    P(k) is proportional to `gamma ** (k - 1)`. The inverse distribution function is computed by
    log1p and expm1, which are exact enough in float32 for every gamma. The result is clipped, since
    a fraction next to 1 may round beyond the bound.

    Args:
      gamma: Static number in [0, 1]: 0 gives 1, and 1 the uniform distribution, or the bound with
        `clip`.
      bound: int32[...].
      high: uint32[...], random bits.
      low: uint32[...], random bits.
      clip: If False, the distribution is truncated at the bound. If True, it is not, and larger k
        become the bound. Default: False.
    """
    if gamma == 1:
        return bound if clip else jnp.where(bound > 0, below(high, low, bound) + 1, 0)
    if gamma == 0:
        return jnp.minimum(bound, 1)
    log = math.log(gamma)
    # probability of k <= bound, where the distribution is truncated
    mass = jnp.float32(1) if clip else -jnp.expm1(bound.astype(jnp.float32) * jnp.float32(log))
    # A fraction of 48 bits: those of `low` follow those of `high`.
    part = jnp.minimum(
        fraction(high) + fraction(low) * jnp.float32(2**-24), jnp.float32(1 - 2**-24)
    )
    failures = jnp.floor(jnp.log1p(-part * mass) / jnp.float32(log))  # k - 1
    k = 1 + jnp.minimum(failures, jnp.float32(2**30)).astype(jnp.int32)
    return jnp.clip(k, jnp.minimum(bound, 1), bound)

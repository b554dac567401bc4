"""Randomness by arithmetic: a sample draws its random bits once, in one array, and derives the rest
here.

Most of a small sample's time would otherwise go into generating bits: a threefry call costs about
as much as reading the batch.
"""

import math

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Key

# the counters' high word: no block is one that `jax.random` takes from the same key
_DOMAIN = 0x6A72706C
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: the increments of a Weyl sequence


def words(key: Key, batch_size: int, purpose: int = 0) -> tuple[jax.Array, jax.Array]:
    """64 random bits an item, as two uint32[B]: others for each small int `purpose`. Consumes the
    key.

    For JAX's default keys this is JAX's own cipher, written out: one block an item gives both
    words, and XLA compiles it without a loop, where `jax.random.bits` runs five rounds of one on a
    CPU (a fused loop of 47 us took 35 so, measured).
    """
    words = jax.random.key_data(key)
    if words.shape == (2,):
        high, low = _threefry(
            words,
            jnp.full((batch_size,), _DOMAIN + purpose, jnp.uint32),
            jnp.arange(batch_size, dtype=jnp.uint32),
        )
    else:  # a key of another generator
        high, low = jax.random.bits(jax.random.fold_in(key, purpose), (2, batch_size), jnp.uint32)
    # XLA would write the whole cipher into each of its uses: jax 0.12 compiled one sample for more
    # than ten minutes (0.10: for 6 s, now 3).
    return jax.lax.optimization_barrier((high, low))


def _threefry(key: Key, left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1,
    2, 3" (2011), section 4.2."""
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
    """float32[...] in [0, 1), a multiple of 2^-24, from the word's top bits."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def below(high: jax.Array, low: jax.Array, bound: jax.Array) -> jax.Array:
    """An int32[...] in `[0, bound)`: the top of the 96-bit product of 64 random bits and the bound.

    Each value's probability is off by less than `2^-64`, that is by `bound / 2^64` of itself.

    Source: Lemire, "Fast Random Integer Generation in an Interval" (2019), without its rejection
    step, which 64 bits make idle.
    """
    bound = bound.astype(jnp.uint32)
    _, carried = _multiply(low, bound)
    product, overflow = _multiply(high, bound)
    total = product + carried
    return (overflow + (total < product)).astype(jnp.int32)


def remix(high: jax.Array, low: jax.Array, round_number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fresh bits for another try, a different bijection of the first ones in each round."""
    step = (round_number.astype(jnp.uint32) + 1) * jnp.uint32(_GOLDEN)
    high = avalanche(high ^ avalanche(low + step))
    return high, avalanche(low + high)


def avalanche(word: jax.Array) -> jax.Array:
    """A bijection in which every bit depends on all. Source: Appleby, MurmurHash3's 32-bit
    finalizer."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _multiply(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low and the high word of a 32 x 32-bit product, by halves: there is no uint64 without
    x64."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    cross = a_high * b_low + ((a_low * b_low) >> 16)
    middle = (cross & 0xFFFF) + a_low * b_high
    return a * b, a_high * b_high + (cross >> 16) + (middle >> 16)


def geometric(
    gamma: float, bound: jax.Array, high: jax.Array, low: jax.Array, *, clip: bool = False
) -> jax.Array:
    """k in `1 .. bound`, int32[...]; 0 where `bound` is 0.

    P(k) is in proportion to `gamma ** (k - 1)`: the geometric law, truncated at the bound. With
    `clip` it is the untruncated one, and what lies beyond the bound falls on it. By the inverse of
    the distribution function, with log1p and expm1, so that it holds in float32 for every gamma;
    the last step is clipped, since a fraction next to 1 may round beyond.

    Args:
      gamma: static, in [0, 1]: at 0 always 1, and at 1 uniform, or with `clip` always the bound.
      bound: int32[...].
      high, low: uint32[...], 64 random bits.
    """
    if gamma == 1:
        return bound if clip else jnp.where(bound > 0, below(high, low, bound) + 1, 0)
    if gamma == 0:
        return jnp.minimum(bound, 1)
    log = math.log(gamma)
    mass = jnp.float32(1) if clip else -jnp.expm1(bound.astype(jnp.float32) * jnp.float32(log))
    # The fraction by 48 bits, in two parts: those of the second fill in below the first's.
    part = jnp.minimum(
        fraction(high) + fraction(low) * jnp.float32(2**-24), jnp.float32(1 - 2**-24)
    )
    steps = jnp.floor(jnp.log1p(-part * mass) / jnp.float32(log))
    return jnp.clip(
        1 + jnp.minimum(steps, jnp.float32(2**30)).astype(jnp.int32), jnp.minimum(bound, 1), bound
    )

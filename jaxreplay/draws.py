"""Draws from the laws that samplers and views share, by arithmetic on random bits."""

import math

import jax
import jax.numpy as jnp

from jaxreplay import bits, ring
from jaxreplay.platforms import Traits
from jaxreplay.search import last_place
from jaxreplay.streams import Streams, of_stream


def written_row(streams: Streams, high: jax.Array, low: jax.Array) -> jax.Array:
    """A row among all that are written, uniformly: int32[...], the bits' shape; any row where there are none."""
    layout, filled = streams.layout, streams.filled
    if layout.lockstep:  # all streams hold the same number: no search for the stream
        age, env = ring.split(bits.below(high, low, filled * layout.num_envs), layout.num_envs)
    else:
        env, age = split_by(filled, bits.below(high, low, filled.sum(dtype=jnp.int32)), layout.traits)
    return layout.row(env, layout.wrap(of_stream(streams.head, env) - 1 - age))


def split_by(count: jax.Array, nth: jax.Array, traits: Traits) -> tuple[jax.Array, jax.Array]:
    """The `nth` of all things, as a stream and a place in it, where stream e has `count[e]` of them: int32[...] each."""
    ends = jnp.cumsum(count, dtype=jnp.int32)
    if traits.in_line:
        env = last_place(lambda place: ends[place - 1] <= nth, nth, count.shape[0], traits.num_ways)
    else:
        env = jnp.searchsorted(ends, nth, side="right", method="scan_unrolled").astype(jnp.int32)
        env = jnp.minimum(env, count.shape[0] - 1)
    return env, nth - (ends[env] - count[env])


def uniform_probability(total: jax.Array) -> jax.Array:
    """Of one thing among `total` that are alike: float32[...], 0 where there are none."""
    return jnp.where(total > 0, 1 / jnp.maximum(total, 1).astype(jnp.float32), 0)


def geometric(discount: float, bound: jax.Array, high: jax.Array, low: jax.Array, *, clip: bool = False) -> jax.Array:
    """k in `1 .. bound`, int32[...]; 0 where `bound` is 0.

    P(k) is in proportion to `discount ** (k - 1)`: the geometric law, truncated at the bound. With `clip` it is the untruncated one, and
    what lies beyond the bound falls on it. By the inverse of the distribution function, with log1p and expm1, so that it holds in float32
    for every discount; the last step is clipped, since a fraction next to 1 may round beyond.

    Args:
      discount: static, in [0, 1]: at 0 always 1, and at 1 uniform, or with `clip` always the bound.
      bound: int32[...].
      high, low: uint32[...], 64 random bits.
    """
    if discount == 1:
        return bound if clip else jnp.where(bound > 0, bits.below(high, low, bound) + 1, 0)
    if discount == 0:
        return jnp.minimum(bound, 1)
    log = math.log(discount)
    mass = jnp.float32(1) if clip else -jnp.expm1(bound.astype(jnp.float32) * jnp.float32(log))
    # The fraction by 48 bits, in two parts: those of the second fill in below the first's.
    fraction = jnp.minimum(bits.fraction(high) + bits.fraction(low) * jnp.float32(2**-24), jnp.float32(1 - 2**-24))
    steps = jnp.floor(jnp.log1p(-fraction * mass) / jnp.float32(log))
    return jnp.clip(1 + jnp.minimum(steps, jnp.float32(2**30)).astype(jnp.int32), jnp.minimum(bound, 1), bound)

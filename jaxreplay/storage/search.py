"""Searches in sorted values and in running sums: which stream has the n-th of all rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxreplay.storage.platforms import Traits


def last_slot(
    passes: Callable[[jax.Array], jax.Array], like: jax.Array, size: int, num_ways: int
) -> jax.Array:
    """The largest slot that passes, of those in `[0, size)`, where all before one that passes do,
    and 0 always does: int32, as `like`.


    Args:
      passes: of slots in `[1, size)`, shaped as `like`; bool of that shape. num_ways: parts that
        each step divides into, at least 2.
    """
    slot, step = jnp.zeros(like.shape, jnp.int32), 1
    while step < size:
        step *= num_ways
    while step > 1:
        step //= num_ways
        num_passed = jnp.zeros_like(slot)
        for nth in range(1, 1 + min(num_ways - 1, (size - 1) // step)):
            further = slot + step * nth
            num_passed += passes(jnp.minimum(further, size - 1)) & (further < size)
        slot += step * num_passed
    return slot


def split_by(count: jax.Array, nth: jax.Array, traits: Traits) -> tuple[jax.Array, jax.Array]:
    """The `nth` of all things, as a stream and a place in it, where stream e has `count[e]` of
    them: int32[...] each."""
    ends = jnp.cumsum(count, dtype=jnp.int32)
    if traits.in_line:
        env = last_slot(lambda slot: ends[slot - 1] <= nth, nth, count.shape[0], traits.num_ways)
    else:
        env = jnp.searchsorted(ends, nth, side="right", method="scan_unrolled").astype(jnp.int32)
        env = jnp.minimum(env, count.shape[0] - 1)
    return env, nth - (ends[env] - count[env])

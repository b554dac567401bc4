"""Searches in sorted values and running sums, such as for the stream of the n-th of all rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxreplay.storage.platforms import Traits


def last_slot(
    passes: Callable[[jax.Array], jax.Array], like: jax.Array, size: int, num_ways: int
) -> jax.Array:
    """Return the largest slot in `[0, size)` that passes: int32[...], shaped as `like`.

    Slot 0 always passes. If a slot passes, so do all slots before it.

    Args:
      passes: Test of slots int32[...] in `[1, size)`, shaped as `like`. Returns bool[...].
      like: Array of the result's shape [...].
      size: Number of slots.
      num_ways: Number of parts that each step divides the slots into, at least 2.
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
    """Return the stream of the `nth` of all items, and its place there: int32[...] each. Stream e
    has `count[e]` items."""
    ends = jnp.cumsum(count, dtype=jnp.int32)
    if traits.in_line:
        env = last_slot(lambda slot: ends[slot - 1] <= nth, nth, count.shape[0], traits.num_ways)
    else:
        env = jnp.searchsorted(ends, nth, side="right", method="scan_unrolled").astype(jnp.int32)
        env = jnp.minimum(env, count.shape[0] - 1)
    return env, nth - (ends[env] - count[env])

"""A search in sorted values without a loop, for accelerators."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def last_place(passes: Callable[[jax.Array], jax.Array], like: jax.Array, size: int, num_ways: int) -> jax.Array:
    """The largest place that passes, of those in `[0, size)`, where all before one that passes do, and 0 always does: int32, as `like`.


    Args:
      passes: of places in `[1, size)`, shaped as `like`; bool of that shape. num_ways: parts that each step divides into, at least 2.
    """
    place, step = jnp.zeros(like.shape, jnp.int32), 1
    while step < size:
        step *= num_ways
    while step > 1:
        step //= num_ways
        num_passed = jnp.zeros_like(place)
        for nth in range(1, 1 + min(num_ways - 1, (size - 1) // step)):
            further = place + step * nth
            num_passed += passes(jnp.minimum(further, size - 1)) & (further < size)
        place += step * num_passed
    return place

"""A search in sorted values without a loop, for accelerators."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_WAYS = {"gpu": 16, "tpu": 2}


def last_place(passes: Callable[[jax.Array], jax.Array], like: jax.Array, size: int, platform: str | None) -> jax.Array:
    """The largest place that passes, of those in `[0, size)`, where all before one that passes do, and 0 always does: int32, as `like`.

    A GPU reads many values at once in each step, which is a kernel of its own; on a TPU each element that is read takes its time.

    Args:
      passes: of places in `[1, size)`, shaped as `like`; bool of that shape.
    """
    place, step, num_ways = jnp.zeros(like.shape, jnp.int32), 1, _WAYS.get(platform or "", 2)
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

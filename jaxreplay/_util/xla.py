"""Differences between versions of JAX, and guidance for XLA, which copies an array that is read and
then written in place unless the write depends on the read."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import shard_map as shard_map  # None where JAX is too old for it
else:
    shard_map = getattr(jax, "shard_map", None)


def varying(tree: Any, axis: Any) -> Any:
    """Return arrays that are equal on all devices of an axis in the type of those that differ
    between them, inside of a `shard_map`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(tree, axis, to="varying")
    return getattr(jax.lax, "pvary")(tree, axis)  # noqa: B009, the name in older JAX


def after(value: jax.Array, read: jax.Array) -> jax.Array:
    """Return `value`, which XLA computes after `read`, for a write that depends on `value`.

    XLA updates a donated array in place only if every read of the old values is ordered before the
    write. So a write depends on what was read before, by a condition that is always True, which XLA
    does not know. Without it, an add after a sample copies the flags of all rows, and a GPU copies
    the counters.

    Args:
      value: bool[...] or int32[...] that decides a write, such as its mask or its rows.
      read: number[...] of at least 0 that broadcast to the shape of `value`.

    Returns:
      An array like `value`.
    """
    return jnp.where(read >= 0, value, jnp.zeros((), value.dtype))


# JAX before 0.5 cannot `vmap` it.
barrier: Any = (
    jax.lax.optimization_barrier if jax.__version_info__ >= (0, 5) else lambda operands: operands
)


def is_last(values: jax.Array) -> jax.Array:
    """Return whether each value is the last one of those that equal it: bool[B].

    It sorts them: a scatter with equal indices has no order on a GPU or TPU.

    Args:
      values: int32[B].
    """
    order = jnp.argsort(values, stable=True)
    in_order = values[order]
    is_end = jnp.concatenate([in_order[1:] != in_order[:-1], jnp.ones(1, bool)])
    return jnp.zeros(values.shape, bool).at[order].set(is_end, unique_indices=True)

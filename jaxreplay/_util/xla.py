"""Differences between versions of JAX."""

from typing import TYPE_CHECKING, Any

import jax

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


# JAX before 0.5 cannot `vmap` it.
barrier: Any = (
    jax.lax.optimization_barrier if jax.__version_info__ >= (0, 5) else lambda operands: operands
)

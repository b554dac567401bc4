"""Differences between versions of JAX."""

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jax import shard_map as shard_map  # of JAX 0.6.1 or later
else:
    shard_map = getattr(jax, "shard_map", None)


def varying(tree: Any, axis: Any) -> Any:
    """Return arrays that differ between the devices of an axis, as far as types inside of a
    `shard_map` tell, from arrays that are equal on all."""
    if hasattr(jax.lax, "pcast"):  # JAX 0.8
        return jax.lax.pcast(tree, axis, to="varying")
    return getattr(jax.lax, "pvary")(tree, axis)  # noqa: B009, newer JAX has none


# JAX before 0.5 cannot `vmap` it.
barrier: Any = (
    jax.lax.optimization_barrier if jax.__version_info__ >= (0, 5) else lambda operands: operands
)

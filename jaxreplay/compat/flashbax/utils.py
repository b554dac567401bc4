"""Helpers that programs import from `flashbax.utils`."""

from typing import Any

import jax

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import check_leaves


def get_tree_shape_prefix(tree: PyTree, n_axes: int = 1) -> tuple[int, ...]:
    """Return the sizes of the leading axes that all leaves share.

    Args:
      tree: Pytree of arrays.
      n_axes: Number of leading axes. Default: 1.

    Raises:
      ValueError: The leaves have other sizes.
    """
    prefix = jax.tree.leaves(tree)[0].shape[:n_axes]

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*prefix, *leaf.shape[n_axes:]), leaf.dtype)

    expected = jax.tree.map(spec, tree)
    check_leaves("get_tree_shape_prefix", tree, expected, "all leaves have the same leading axes")
    return prefix


def get_timestep_count(buffer_state: Any) -> jax.Array:
    """Return the number of stored time steps of all envs: int32[].

    Args:
      buffer_state: State of a buffer.
    """
    return buffer_state.replay.counters.filled.sum(-1)

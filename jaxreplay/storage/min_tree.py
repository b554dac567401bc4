"""A tree of minima: the smallest of many numbers, found in O(log capacity).

Each node is the minimum of its `fan_out` children, recomputed from them. The smallest m leaves lie
below the smallest m nodes of every level, so a search reads m * fan_out numbers a level.
"""

import jax
import jax.numpy as jnp

from jaxreplay.storage import ring

Levels = tuple[
    jax.Array, ...
]  # float32[n] each: the leaves, their parents, ..., the root's children


def filled(capacity: int, fan_out: int, value: float) -> Levels:
    """Return a tree whose leaves are all `value`.

    Args:
      capacity: Number of leaves, at least 1.
      fan_out: Number of children of a node, at least 2.
      value: The number.
    """
    levels = [jnp.full((capacity,), value, jnp.float32)]
    while levels[-1].shape[0] > fan_out:
        levels.append(jnp.full((-(-levels[-1].shape[0] // fan_out),), value, jnp.float32))
    return tuple(levels)


def smallest(levels: Levels, fan_out: int, num: int) -> tuple[jax.Array, jax.Array]:
    """Find the smallest leaves, of equal ones those with the lowest index.

    Args:
      levels: The tree.
      fan_out: Number of children of a node.
      num: Number of leaves m, static, at most the capacity.

    Returns:
      int32[m], the leaves, the smallest first; float32[m], their values.
    """
    node, value = ring.arange(levels[-1].shape[0]), levels[-1]
    for below in (*reversed(levels[:-1]), None):
        value, nth = jax.lax.top_k(-value, min(num, value.shape[0]))
        node, value = node[nth], -value
        if below is not None:  # in the order of their index, which decides between equal ones
            node = (jnp.sort(node)[:, None] * fan_out + ring.arange(fan_out)).reshape(-1)
            value = below.at[node].get(mode="fill", fill_value=jnp.inf)
    return node, value


def put(levels: Levels, fan_out: int, index: jax.Array, value: jax.Array) -> Levels:
    """Set leaves.

    Args:
      levels: The tree.
      fan_out: Number of children of a node.
      index: int32[B], the leaves, all different. Indices of `capacity` or more are ignored, and may
        repeat.
      value: float32[B], their new values, not NaN.

    Returns:
      The new tree.
    """
    # After all earlier reads, on which the root's children depend: else XLA would copy the leaves.
    index = jnp.where(levels[-1].min() <= jnp.inf, index, levels[0].shape[0])
    new = [levels[0].at[index].set(value, mode="drop")]
    for level in levels[1:]:
        index, _ = ring.split(index, fan_out)
        child = index[:, None] * fan_out + ring.arange(fan_out)
        of_node = new[-1].at[child].get(mode="fill", fill_value=jnp.inf).min(axis=1)
        new.append(level.at[index].set(of_node, mode="drop"))
    return tuple(new)

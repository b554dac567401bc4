"""What samplers by priority share: which priorities and rows are accepted, what new rows are given, and where a row's leaf is.

The `state` here is any with the fields `largest`, `ignored_priorities` and `ignored_rows` of a `PrioritizedState`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.drawable import Drawable
from jaxreplay.layout import Layout
from jaxreplay.types import Index
from jaxreplay.window import Window

SMALLEST = float(np.finfo(np.float32).tiny)  # the smallest number that no processor flushes to 0
_MAX_COUNT = np.uint32(2**32 - 1)


def check_window(where: str, window: Window) -> Window:
    """A bounded window, or a ValueError."""
    if not window.is_bounded:
        raise ValueError(
            f"{where}: this view's window reaches to the end of the episode, so that rows become drawable by whole episodes, "
            "which a tree of priorities would pay for with a write of any length; draw uniformly, or take goals from any row"
        )
    return window


def leaf_of(layout: Layout, row: jax.Array) -> jax.Array:
    """Leaves lie by time, then env: what all envs write together is one range of the tree. A row past the end stays there."""
    env, position = layout.split(row)
    return jnp.where(row < layout.capacity, position * layout.num_envs + env, layout.capacity)


def is_positive(priority: jax.Array) -> jax.Array:
    """By its bits, as an integer: a comparison of floats takes a subnormal number for 0 where the processor flushes these."""
    return jax.lax.bitcast_convert_type(priority, jnp.int32) > 0


def give(state: Any, is_new: jax.Array, priority: jax.Array | None) -> tuple[Any, jax.Array]:
    """The state after rows were written, and their priorities, float32[K, E]: where none is given, or a bad one, the largest so far.

    Args:
      is_new: bool[K, E], whether a row was written. priority: float32[K, E].
    """
    if priority is None:
        return state, jnp.broadcast_to(state.largest, is_new.shape)
    is_good = _is_good(priority)
    largest = jax.lax.cummax(jnp.max(jnp.where(is_new & is_good, priority, state.largest), axis=1))
    largest = jnp.maximum(largest, state.largest)
    before = jnp.concatenate([state.largest[None], largest[:-1]])  # as of the row's own step
    state = state.replace(largest=largest[-1], ignored_priorities=_count(state.ignored_priorities, is_new & ~is_good))
    return state, jnp.where(is_good, priority, before[:, None])


def accept(state: Any, drawable: Drawable, index: Index, priority: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """The state after an update, the leaves to write, int32[B], and their priorities, float32[B]; of what is ignored, the capacity and 0.

    A row that is out of range, overwritten since, or not drawable is ignored and counted; so is a priority that is NaN, infinite
    or negative.
    """
    layout = drawable.layout
    is_in_range = (index.row >= 0) & (index.row < layout.capacity)
    row = jnp.where(is_in_range, index.row, 0)
    is_live = is_in_range & (drawable.streams.index(row).lap == index.lap) & drawable.contains(row)
    is_good = _is_good(priority)
    accepted = is_live & is_good
    priority = jnp.where(accepted, priority, 0)
    state = state.replace(
        largest=jnp.maximum(state.largest, jnp.max(priority, initial=0)),
        ignored_rows=_count(state.ignored_rows, ~is_live),
        ignored_priorities=_count(state.ignored_priorities, is_live & ~is_good),
    )
    return state, jnp.where(accepted, leaf_of(layout, row), layout.capacity), priority


def _is_good(priority: jax.Array) -> jax.Array:
    return jnp.isfinite(priority) & (priority >= 0)


def _count(counter: jax.Array, what: jax.Array) -> jax.Array:
    return counter + jnp.minimum(what.sum(dtype=jnp.uint32), _MAX_COUNT - counter)

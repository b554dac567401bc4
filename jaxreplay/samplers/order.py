"""Rows by their ranks, for samplers that go through a stream in the order of time.

A row's rank is the number of anchors written to its stream before it, modulo 2^32. It names a row for good: ranks go on through wraps
and clears, and those of a stream's drawable rows are one run. Of items, every one is an anchor.
"""

import jax
import jax.numpy as jnp

from jaxreplay import ring
from jaxreplay.drawable import Drawable


def next_rank(drawable: Drawable) -> jax.Array:
    """The rank of the next anchor that will be written to each stream: uint32[E]."""
    streams, state = drawable.streams, drawable.state
    if state.count is not None:
        return state.count
    return jnp.broadcast_to(_position_of_all_time(drawable, state.lap, state.head), (streams.num_envs,))


def first_rank(drawable: Drawable) -> jax.Array:
    """The rank of each stream's oldest drawable row: uint32[E]. Where there is none, of the next anchor whose look-back will be whole."""
    if drawable.state.count is not None:
        return drawable.first_rank()
    return next_rank(drawable) - drawable.state.filled.astype(jnp.uint32)


def rank_of(drawable: Drawable, row: jax.Array) -> jax.Array:
    """The rank of each stored row, in `[0, capacity)`: uint32[...]."""
    streams, state = drawable.streams, drawable.state
    if state.rank is not None:
        return state.rank.at[row].get(mode="promise_in_bounds")
    _, position = ring.split(row, streams.length)
    return _position_of_all_time(drawable, streams.index(state, row).lap, position)


def look_back(drawable: Drawable, row: jax.Array) -> jax.Array:
    """Rows before each stored row that its window reads: int32[...]."""
    before = drawable.window.before
    if before is None:
        return drawable.episodes.steps_from_start(row)
    return drawable.streams.back(drawable.state, row, before) if before else jnp.zeros_like(row)


def _position_of_all_time(drawable: Drawable, lap: jax.Array, position: jax.Array) -> jax.Array:
    return lap * jnp.uint32(drawable.streams.length) + position.astype(jnp.uint32)

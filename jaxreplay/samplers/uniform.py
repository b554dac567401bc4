"""Uniform sampling, exact over the drawable rows, with no state of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import bits, ring
from jaxreplay.drawable import Change, Drawable
from jaxreplay.streams import Streams

_MAX_REDRAWS = 16


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every drawable row alike, with replacement.

    A row is drawn among all that are written, and drawn again where it is no transition or still waits for its window. At least half
    of a stream's rows are transitions but for pathological streams, so a few rounds do; what is left after 16 of them is selected by
    rank, which is exact and costs a binary search. (A list of the drawable rows would be exact at once, and cost every sample another
    random read: 41-48 us for the fused loop against 30, measured.)
    """

    @property
    def has_priorities(self) -> bool:
        return False

    def init(self, streams: Streams, lookahead: int) -> Any:
        del streams, lookahead
        return ()

    def clear(self, state: Any) -> Any:
        return state

    def observe(self, streams: Streams, state: Any, change: Change, priority: jax.Array | None) -> Any:
        del streams, change, priority
        return state

    def can_draw(self, state: Any) -> jax.Array:
        del state
        return jnp.asarray(True)

    def draw(self, state: Any, drawable: Drawable, key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
        high, low = bits.draw(key, batch_size)
        count = drawable.count()
        total = count.sum(dtype=jnp.int32)

        def redraw(carry):
            tries, row, is_drawn = carry
            other = _written_row(drawable, *bits.remix(high, low, tries))
            return tries + 1, jnp.where(is_drawn, row, other), is_drawn | drawable.contains(other)

        def select(carry):
            tries, row, is_drawn = carry
            env, nth = _split_by(count, bits.below(*bits.remix(high, low, tries), total))
            return tries + 1, jnp.where(is_drawn, row, drawable.select(env, nth)), jnp.ones_like(is_drawn)

        def is_short(carry):
            return (total > 0) & ~jnp.all(carry[2])

        def complete(carry):
            carry = jax.lax.while_loop(lambda carry: is_short(carry) & (carry[0] < _MAX_REDRAWS), redraw, carry)
            return jax.lax.while_loop(is_short, select, carry)

        row = _written_row(drawable, high, low)
        carry = redraw((jnp.uint32(0), row, drawable.contains(row)))  # twice at once: few batches go on to the loop
        # Loops rather than a cond, which would run both branches under vmap. This one and that of `select` run at most once.
        _, row, _ = jax.lax.while_loop(is_short, complete, carry)
        return row, jnp.broadcast_to(self._probability(total), row.shape)

    def probability(self, state: Any, drawable: Drawable, row: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self._probability(drawable.count().sum(dtype=jnp.int32)), row.shape)

    def _probability(self, total: jax.Array) -> jax.Array:
        return jnp.where(total > 0, 1 / jnp.maximum(total, 1).astype(jnp.float32), 0)


def _written_row(drawable: Drawable, high: jax.Array, low: jax.Array) -> jax.Array:
    """A row among all that are written, int32[B]; any row where there are none."""
    streams, filled = drawable.streams, drawable.state.filled
    if filled.ndim == 0:  # all streams hold the same number: no search for the stream
        nth = bits.below(high, low, filled * streams.num_envs)
        age, env = ring.split(nth, streams.num_envs)
    else:
        env, age = _split_by(filled, bits.below(high, low, filled.sum(dtype=jnp.int32)))
    head = streams.of_stream(drawable.state.head, env)
    return streams.row(env, ring.wrap(head - 1 - age, streams.length))


def _split_by(count: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `nth` of all things, as a stream and a place in it, where stream e has `count[e]` of them: int32[B] each."""
    ends = jnp.cumsum(count, dtype=jnp.int32)
    env = jnp.searchsorted(ends, nth, side="right", method="scan_unrolled").astype(jnp.int32)
    env = jnp.minimum(env, count.shape[0] - 1)
    return env, nth - (ends[env] - count[env])

"""Uniform sampling, exact over the drawable rows, with no state of its own."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay.samplers.sampler import Draw, Sampler, uniform_probability
from jaxreplay.storage.sampleable import Drawable
from jaxreplay.storage.search import split_by
from jaxreplay.storage.streams import written_row

_MAX_REDRAWS = 16
_TRIES_AT_ONCE = 4  # on an accelerator
_MOST_TRIES = 4  # where fewer than one row in so many is an anchor, rows are selected by rank at once


class Uniform(Sampler):
    """Every drawable row alike, with replacement.

    A row is drawn among all that are written, and drawn again where it is no transition or still waits for its window. At least half
    of a stream's rows are transitions but for pathological streams, so a few rounds do; what is left after 16 of them is selected by
    rank, which is exact and costs a binary search. (A list of the drawable rows would be exact at once, and cost every sample another
    random read: 41-48 us for the fused loop against 30, measured.)

    On an accelerator there is no loop whose end only the device knows, nor a branch, for which a GPU would wait for its host: four rows are
    drawn at once, and the one that is selected by rank is for where all of them fail.
    """

    def draw(self, state: Any, drawable: Drawable, key: jax.Array, batch_size: int) -> Draw:
        high, low = random.draw(key, batch_size)
        drawable_rows, traits = drawable.count(), drawable.layout.traits
        total = drawable_rows.sum(dtype=jnp.int32)
        probability = jnp.broadcast_to(uniform_probability(total), (batch_size,))
        if drawable.layout.window.stride > _MOST_TRIES:
            row = drawable.select(*split_by(drawable_rows, random.below(high, low, total), traits))
            return Draw(state, row, probability)

        def selected(tries, row, is_drawn):
            env, nth = split_by(drawable_rows, random.below(*random.remix(high, low, tries), total), traits)
            return jnp.where(is_drawn, row, drawable.select(env, nth))

        if not traits.has_loops:
            row, is_drawn = _first_drawn(drawable, high, low, _TRIES_AT_ONCE)
            exact = lambda: selected(jnp.uint32(_TRIES_AT_ONCE - 1), row, is_drawn)  # noqa: E731
            if traits.has_branches:  # the search costs much more
                return Draw(state, jax.lax.cond((total > 0) & ~jnp.all(is_drawn), exact, lambda: row), probability)
            return Draw(state, exact(), probability)

        def redraw(carry):
            tries, row, is_drawn = carry
            other = written_row(drawable.streams, *random.remix(high, low, tries))
            return tries + 1, jnp.where(is_drawn, row, other), is_drawn | drawable.contains(other)

        def select(carry):
            return carry[0] + 1, selected(*carry), jnp.ones_like(carry[2])

        def is_short(carry):
            return (total > 0) & ~jnp.all(carry[2])

        def complete(carry):
            carry = jax.lax.while_loop(lambda carry: is_short(carry) & (carry[0] < _MAX_REDRAWS), redraw, carry)
            return jax.lax.while_loop(is_short, select, carry)

        # Two draws at once, so that few batches go on to the loop; in one read: two took 1 to 2 us more.
        carry = jnp.uint32(1), *_first_drawn(drawable, high, low, 2)
        # Loops rather than a cond, which would run both branches under vmap. This one and that of `select` run at most once.
        _, row, _ = jax.lax.while_loop(is_short, complete, carry)
        return Draw(state, row, probability)

    def probability(self, state: Any, drawable: Drawable, row: jax.Array) -> jax.Array:
        return jnp.broadcast_to(uniform_probability(drawable.count().sum(dtype=jnp.int32)), row.shape)


def _first_drawn(drawable: Drawable, high: jax.Array, low: jax.Array, num_tries: int) -> tuple[jax.Array, jax.Array]:
    """The first drawable row of several draws, or the last one where none is: int32[B], bool[B]. In one read."""
    tries = [(high, low), *(random.remix(high, low, jnp.uint32(nth)) for nth in range(num_tries - 1))]
    if drawable.layout.traits.in_line:  # one by one: the tries go into the kernel that chooses among them
        rows = [written_row(drawable.streams, *words) for words in tries]
        is_drawn = [drawable.contains(row) for row in rows]
    else:
        rows = written_row(drawable.streams, *jax.tree.map(lambda *words: jnp.stack(words), *tries))
        is_drawn = drawable.contains(rows)
    row, found = rows[-1], is_drawn[-1]
    for nth in reversed(range(num_tries - 1)):
        row, found = jnp.where(is_drawn[nth], rows[nth], row), is_drawn[nth] | found
    return row, found

"""Uniform sampling: exact over the sampleable rows, and without a state."""

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.sampler import Draw, Sampler, uniform_probability
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by

_MAX_REDRAWS = 16
_TRIES_AT_ONCE = 4  # on an accelerator
# With a longer period, candidates are too rare to be found by trying.
_MOST_TRIES = 4


class Uniform(Sampler):
    """Sample uniformly from the sampleable rows, with replacement.

    Each item tries random written rows until one is sampleable. At least half of a stream's rows
    are transitions except in pathological streams, so a few rounds are enough. After 16 rounds, the
    remaining items are selected by candidate number, which is exact and takes a binary search. (A
    stored list of the sampleable rows needs no second try, but one more random read an item: 41-48
    us for the fused loop instead of 30, measured.)

    An accelerator tries four rows at once, and selects by candidate number where all four fail. The
    program has no loop of unknown length, and on a GPU no branch: a GPU would wait for its host.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=8, batch_size=4, sampler=jr.Uniform())
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(5)[:, None])
      >>> print(buffer.sample(state, jax.random.key(0)).probability)
      [0.2 0.2 0.2 0.2]
    """

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        high, low = random.words(key, batch_size)
        sampleable_rows, traits = sampleable.count(), sampleable.layout.traits
        total = sampleable_rows.sum(dtype=jnp.int32)
        probability = jnp.broadcast_to(uniform_probability(total), (batch_size,))
        if sampleable.layout.window.period > _MOST_TRIES:
            row = sampleable.select(
                *split_by(sampleable_rows, random.below(high, low, total), traits)
            )
            return Draw(state, row, probability)

        def selected(tries, row, is_drawn):
            env, nth = split_by(
                sampleable_rows, random.below(*random.remix(high, low, tries), total), traits
            )
            return jnp.where(is_drawn, row, sampleable.select(env, nth))

        if not traits.has_loops:
            row, is_drawn = _first_drawn(sampleable, high, low, _TRIES_AT_ONCE)
            exact = lambda: selected(jnp.uint32(_TRIES_AT_ONCE - 1), row, is_drawn)
            if traits.has_branches:  # the search costs much more
                return Draw(
                    state,
                    jax.lax.cond((total > 0) & ~jnp.all(is_drawn), exact, lambda: row),
                    probability,
                )
            return Draw(state, exact(), probability)

        def redraw(carry):
            tries, row, is_drawn = carry
            other = sampleable.state.random_row(*random.remix(high, low, tries))
            return tries + 1, jnp.where(is_drawn, row, other), is_drawn | sampleable.contains(other)

        def select(carry):
            return carry[0] + 1, selected(*carry), jnp.ones_like(carry[2])

        def is_short(carry):
            return (total > 0) & ~jnp.all(carry[2])

        def complete(carry):
            carry = jax.lax.while_loop(
                lambda carry: is_short(carry) & (carry[0] < _MAX_REDRAWS), redraw, carry
            )
            return jax.lax.while_loop(is_short, select, carry)

        # Two tries at once, so that few batches enter the loop. They share one read: two reads took
        # 1 to 2 us more.
        carry = jnp.uint32(1), *_first_drawn(sampleable, high, low, 2)
        # Loops instead of a cond, which would run both branches under vmap. This loop and that of
        # `select` run at most once.
        _, row, _ = jax.lax.while_loop(is_short, complete, carry)
        return Draw(state, row, probability)

    def mass(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the number of sampleable rows."""
        return self.size(state, sampleable).astype(jnp.float32)

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        return jnp.broadcast_to(
            uniform_probability(sampleable.count().sum(dtype=jnp.int32)), row.shape
        )


def _first_drawn(
    sampleable: Sampleable, high: jax.Array, low: jax.Array, num_tries: int
) -> tuple[jax.Array, jax.Array]:
    """Return the first sampleable row of several tries, or the last row if none is sampleable.

    All tries share one read.

    Args:
      high: uint32[B], random bits of each item.
      low: uint32[B], more random bits.
      num_tries: Number of tries.

    Returns:
      int32[B], the rows; bool[B], whether each is sampleable.
    """
    tries = [
        (high, low),
        *(random.remix(high, low, jnp.uint32(nth)) for nth in range(num_tries - 1)),
    ]
    # One by one, XLA fuses the tries into the kernel that chooses among them.
    if sampleable.layout.traits.in_line:
        rows = [sampleable.state.random_row(*words) for words in tries]
        is_drawn = [sampleable.contains(row) for row in rows]
    else:
        rows = sampleable.state.random_row(*jax.tree.map(lambda *words: jnp.stack(words), *tries))
        is_drawn = sampleable.contains(rows)
    row, found = rows[-1], is_drawn[-1]
    for nth in reversed(range(num_tries - 1)):
        row, found = jnp.where(is_drawn[nth], rows[nth], row), is_drawn[nth] | found
    return row, found

"""Uniform sampling: exact over the sampleable rows, and without a state."""

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.sampler import Draw, Sampler, uniform_probability
from jaxreplay.storage import ring
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by

_MAX_REDRAWS = 16
_TRIES_AT_ONCE = 4
# On a GPU an item looks at the results of 16 threads; the first 4 are its own.
_LOOKS, _OWN_THREADS = 16, 4
# Rings of fewer windows are searched there: most of their rows may be incomplete for good.
_FEW_WINDOWS = 8
# With a longer period, candidates are too rare to be found by trying.
_MOST_TRIES = 4


class Uniform(Sampler):
    """Sample uniformly from the sampleable rows, with replacement.

    Each item tries random written rows until one is sampleable. At least half of a stream's rows
    are transitions except in pathological streams, so a few rounds are enough. After 16 rounds, the
    remaining items are selected by candidate number, which is exact and takes a binary search. (A
    stored list of the sampleable rows needs no second try, but one more random read an item: 41-48
    us for the fused loop instead of 30, measured.)

    A TPU tries four rows at once, and selects by candidate number if all four of an item fail. A
    GPU would wait for its host before a branch, and a search costs more than all else. So there an
    item tries 16 rows and, if none of them is sampleable, looks at the 48 that the next items
    tried. If all fail, it is not valid: its probability and weight are 0. A valid item is exactly
    uniform. If a share p of the tried rows is sampleable, an item is not valid with probability
    (1 - p) ** 64, 5e-20 for p = 0.5, and shares its row with a neighbor with (1 - p) ** 16. Tiny
    rings, and periods above 1, are searched.

    Its law, in NumPy: `row = rng.choice(sampleable, B)`, `probability = 1 / len(sampleable)`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=8, batch_size=4, sampler=jr.Uniform())
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(5)[:, None])
      >>> print(buffer.sample(state, jax.random.key(0)).probability)
      [0.2 0.2 0.2 0.2]
    """

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        # How many rows there are.
        layout, window = sampleable.layout, sampleable.layout.window
        sampleable_rows, traits = sampleable.count(), layout.traits
        total = sampleable_rows.sum(dtype=jnp.int32)
        probability = jnp.broadcast_to(uniform_probability(total), (batch_size,))

        # By trying alone: a GPU.
        is_dense = not sampleable.is_narrowed and window.period == 1
        if traits.in_line and is_dense and layout.length >= _FEW_WINDOWS * window.length:
            row, is_hit = _tried(sampleable, key, batch_size)
            return Draw(state, row, jnp.where(is_hit, probability, 0))

        # By candidate number: where most rows are none, and on unknown platforms.
        high, low = random.words(key, batch_size)
        is_rare = sampleable.is_narrowed or window.period > _MOST_TRIES
        selected = lambda high, low: sampleable.select(
            *split_by(sampleable_rows, random.below(high, low, total), traits)
        )
        if not traits.has_branches or is_rare:
            return Draw(state, selected(high, low), probability)
        # By trying, then by candidate number: a TPU.
        if not traits.has_loops:
            row, is_hit = _first_drawn(sampleable, high, low, _TRIES_AT_ONCE)
            others = random.remix(high, low, jnp.uint32(_TRIES_AT_ONCE - 1))
            exact = lambda: jnp.where(is_hit, row, selected(*others))
            row = jax.lax.cond((total > 0) & ~jnp.all(is_hit), exact, lambda: row)
            return Draw(state, row, probability)

        # The same with loops: a CPU.
        def redraw(carry):
            tries, row, is_hit = carry
            other = sampleable.state.random_row(*random.remix(high, low, tries))
            return tries + 1, jnp.where(is_hit, row, other), is_hit | sampleable.contains(other)

        def select(carry):
            tries, row, is_hit = carry
            others = random.remix(high, low, tries)
            row = jnp.where(is_hit, row, selected(*others))
            return tries + 1, row, jnp.ones_like(is_hit)

        is_short = lambda carry: (total > 0) & ~jnp.all(carry[2])
        may_redraw = lambda carry: is_short(carry) & (carry[0] < _MAX_REDRAWS)
        redrawn = lambda carry: jax.lax.while_loop(may_redraw, redraw, carry)
        complete = lambda carry: jax.lax.while_loop(is_short, select, redrawn(carry))
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


def _tried(sampleable: Sampleable, key: Key, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Return a sampleable row for each item, by trying alone, for a GPU.

    Each thread tries some rows. An item looks at the results of its own threads, and then at those
    of the next items. All tries are one kernel, without a branch or a search.

    Args:
      sampleable: The sampleable rows.
      key: Random key.
      batch_size: B.

    Returns:
      int32[B], the rows; bool[B], whether each is sampleable.
    """
    if sampleable.state.rows.flags is None:  # all tried rows are sampleable, if any is
        row = sampleable.tried_row(*random.words(key, batch_size))
        return row, sampleable.contains(row)
    # A smaller batch has too few neighbors: its items look at threads of their own alone.
    num_own = _OWN_THREADS if batch_size >= _OWN_THREADS else _LOOKS
    row, is_hit = _first_drawn(sampleable, *random.words(key, num_own * batch_size), _TRIES_AT_ONCE)
    result, item = jnp.where(is_hit, row, -1), ring.arange(batch_size)
    found = jnp.full((batch_size,), -1, jnp.int32)
    for look in reversed(range(_LOOKS)):
        neighbor, thread = divmod(look, num_own)
        at = ring.wrap(item + neighbor, batch_size) + thread * batch_size
        row = result.at[at].get(mode="promise_in_bounds")
        found = jnp.where(row >= 0, row, found)
    return jnp.maximum(found, 0), found >= 0


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
        rows = [sampleable.tried_row(*words) for words in tries]
        is_hit = [sampleable.contains(row) for row in rows]
    else:
        rows = sampleable.state.random_row(*jax.tree.map(lambda *words: jnp.stack(words), *tries))
        is_hit = sampleable.contains(rows)
    row, found = rows[-1], is_hit[-1]
    for nth in reversed(range(num_tries - 1)):
        row, found = jnp.where(is_hit[nth], rows[nth], row), is_hit[nth] | found
    return row, found

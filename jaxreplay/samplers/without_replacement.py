"""Without replacement: passes over the sampleable rows, each in a random order of its own, as in
epochs of supervised learning."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import random
from jaxreplay._util.aliases import Key
from jaxreplay._util.struct import Node
from jaxreplay.samplers.permutation import permute
from jaxreplay.samplers.sampler import ConsumingSampler, Draw, uniform_probability
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.platforms import Traits
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by

_MAX_ROUNDS = 8  # a batch of rows is examined in each


class WithoutReplacementState(Node):
    """A pass over the rows that were sampleable when it began, in the order of a permutation."""

    key: Key  # uint32[2]: of the permutation
    position: jax.Array  # int32[], in [0, rows of the pass]: the next one to examine
    # uint32[E], modulo 2^32: the candidate number of each stream's first row of the pass
    first: jax.Array
    # int32[E]: rows of each stream in the pass; candidate numbers follow each other
    num_rows: jax.Array


class WithoutReplacement(ConsumingSampler):
    """Every sampleable row at most once a pass, in an order that each pass draws anew. The order is
    computed, not stored.

    A pass is over the rows that are sampleable when it begins. Rows that are added meanwhile wait
    for the next one; rows that are overwritten meanwhile, or their look-back, are skipped. A new
    pass begins when the last one is used up, or when no more than an eighth of its rows are still
    sampleable, so that the search for them stays short: none of these waits longer for it than for
    the next pass. (In the second case a row that was just handed out may come again soon.)

    A batch is of one pass, so that the last one of a pass may be short; so may one with many rows
    to skip, which are looked for among 8 batches of rows. What falls short is not valid. While
    there is a sampleable row, a batch has at least one.

    The probability is that of uniform draws, which the batches are when seen one at a time.
    """

    def init(self, layout: Layout) -> WithoutReplacementState:
        """A pass that is used up."""
        rows = jnp.zeros((layout.num_envs,), jnp.int32)
        return WithoutReplacementState(
            jnp.zeros((2,), jnp.uint32), jnp.int32(0), rows.astype(jnp.uint32), rows
        )

    def clear(self, state: WithoutReplacementState) -> WithoutReplacementState:
        return state.replace(
            position=jnp.zeros_like(state.position), num_rows=jnp.zeros_like(state.num_rows)
        )

    def after_loss(
        self,
        state: WithoutReplacementState,
        candidate_number_now: Callable[[np.ndarray], np.ndarray],
    ) -> WithoutReplacementState:
        """The pass is given up: its order was one of rows that are not there any more."""
        del candidate_number_now
        return self.clear(state)

    def size(self, state: WithoutReplacementState, sampleable: Sampleable) -> jax.Array:
        """Sampleable rows, which is what a new pass would hold: those left in the present one are
        not counted."""
        del state
        return sampleable.count().sum(dtype=jnp.int32)

    def sample(
        self,
        state: WithoutReplacementState,
        sampleable: Sampleable,
        key: Key,
        batch_size: int,
    ) -> Draw:
        num_sampleable = sampleable.count()
        total = num_sampleable.sum(dtype=jnp.int32)
        fresh = WithoutReplacementState(
            jnp.concatenate(random.words(key, 1)),
            jnp.int32(0),
            sampleable.first_candidate_number(),
            num_sampleable,
        )

        def goes_on(carry):
            rounds, state, taken, _ = carry
            may = (taken == 0) | (rounds < _MAX_ROUNDS) & (
                state.position < state.num_rows.sum(dtype=jnp.int32)
            )
            return (total > 0) & (taken < batch_size) & may

        def examine(carry):
            rounds, state, taken, rows = carry
            is_over = _is_over(state, fresh)
            state = jax.tree.map(lambda new, old: jnp.where(is_over, new, old), fresh, state)
            env, nth, is_left = _candidates(state, fresh, batch_size, sampleable.layout.traits)
            place = taken + jnp.cumsum(is_left, dtype=jnp.int32) - is_left
            # what comes after the last one that fits is for the next batch
            fits = place < batch_size
            put = jnp.where(is_left & fits, place, batch_size)
            rows = jax.tree.map(
                lambda kept, new: kept.at[put].set(new, mode="drop", unique_indices=True),
                rows,
                (env, nth),
            )
            position = jnp.minimum(
                state.position + fits.sum(dtype=jnp.int32), state.num_rows.sum(dtype=jnp.int32)
            )
            return (
                rounds + 1,
                state.replace(position=position),
                taken + (is_left & fits).sum(dtype=jnp.int32),
                rows,
            )

        none = jnp.zeros((batch_size,), jnp.int32)
        _, state, taken, rows = jax.lax.while_loop(
            goes_on, examine, (jnp.int32(0), state, jnp.int32(0), (none, none))
        )
        is_taken = ring.arange(batch_size) < taken
        return Draw(
            state, sampleable.select(*rows), jnp.where(is_taken, uniform_probability(total), 0)
        )

    def probability(
        self, state: WithoutReplacementState, sampleable: Sampleable, row: jax.Array
    ) -> jax.Array:
        del state
        return jnp.broadcast_to(
            uniform_probability(sampleable.count().sum(dtype=jnp.int32)), row.shape
        )

    def can_add(
        self, state: WithoutReplacementState, sampleable: Sampleable, num_rows: int
    ) -> jax.Array:
        """Always: a pass has no claim on its rows, it skips what is overwritten."""
        del state, sampleable, num_rows
        return jnp.asarray(True)


def _is_over(state: WithoutReplacementState, fresh: WithoutReplacementState) -> jax.Array:
    """Whether a pass is used up, or has lost seven eighths of its rows; `fresh` is one that would
    begin now: bool[]."""
    num_rows = state.num_rows.sum(dtype=jnp.int32)
    gone = jnp.clip(ring.difference(fresh.first, state.first), 0, state.num_rows)
    return (state.position >= num_rows) | (num_rows - gone.sum(dtype=jnp.int32) <= num_rows >> 3)


def _candidates(
    state: WithoutReplacementState, fresh: WithoutReplacementState, batch_size: int, traits: Traits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next rows of a pass: int32[B] stream and place among its sampleable rows now; bool[B],
    whether there is one, still sampleable."""
    position = state.position + ring.arange(batch_size)
    num_rows = state.num_rows.sum(dtype=jnp.int32)
    is_one = position < num_rows
    env, nth = split_by(
        state.num_rows, permute(state.key, jnp.where(is_one, position, 0), num_rows), traits
    )
    now = nth - ring.difference(fresh.first, state.first)[env]
    is_left = is_one & (now >= 0) & (now < fresh.num_rows[env])
    return env, jnp.where(is_left, now, 0), is_left

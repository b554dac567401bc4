"""Sampling without replacement, in passes over the sampleable rows, like the epochs of supervised
learning."""

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key
from jaxreplay._util.struct import Node
from jaxreplay.samplers.permutation import permute
from jaxreplay.samplers.sampler import Draw, Sampler, uniform_probability
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.platforms import Traits
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by

_MAX_ROUNDS = 8  # each examines the next `batch_size` rows of the pass


class WithoutReplacementState(Node):
    """A pass over the rows that were sampleable when it began, in the order of a permutation."""

    key: Key  # uint32[2]: determines the permutation
    position: jax.Array  # int32[], in [0, rows of the pass]: place in the order of the next row
    # uint32[E], modulo 2^32: the candidate number of each stream's first row of the pass
    first: jax.Array
    # int32[E]: rows of each stream in the pass; their candidate numbers are consecutive
    num_rows: jax.Array


class WithoutReplacement(Sampler):
    """Sample every sampleable row at most once a pass. Each pass has a new random order, which is
    computed, not stored.

    A pass covers the rows that are sampleable when it begins. Rows that are added later wait for
    the next pass. Rows are skipped if they, or their look-back, were overwritten meanwhile.

    A new pass begins when the last one is used up. It also begins when at most an eighth of the
    pass's rows are still sampleable, which keeps the search for them short. The new pass covers the
    remaining rows, and a row that was sampled shortly before may come again.

    All items of a batch are of one pass, so the last batch of a pass may have items that are not
    valid. So may a batch that skips many rows: the search stops after 8 * B rows. While a row is
    sampleable, a batch has at least one valid item.

    Probabilities are those of uniform sampling, which is how a single batch is distributed. The
    size is the number of sampleable rows, which is the length of a new pass; the current pass may
    have fewer rows left.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=4, batch_size=2, sampler=jr.WithoutReplacement())
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(4)[:, None])
      >>> state, first = buffer.pop(state, jax.random.key(0))
      >>> state, second = buffer.pop(state, jax.random.key(1))
      >>> sorted(first.experience.tolist() + second.experience.tolist())
      [0, 1, 2, 3]
      >>> def oracle(left, sampleable, B, rng):  # left: the rest of the pass
      ...     left = left or rng.permutation(sampleable).tolist()
      ...     return left[B:], left[:B]
    """

    def init(self, layout: Layout) -> WithoutReplacementState:
        """Return a pass that is used up."""
        rows = jnp.zeros((layout.num_envs,), jnp.int32)
        return WithoutReplacementState(
            jnp.zeros((2,), jnp.uint32), jnp.int32(0), rows.astype(jnp.uint32), rows
        )

    def clear(self, state: WithoutReplacementState) -> WithoutReplacementState:
        return state.replace(
            position=jnp.zeros_like(state.position), num_rows=jnp.zeros_like(state.num_rows)
        )

    def sample(
        self,
        state: WithoutReplacementState,
        sampleable: Sampleable,
        key: Key,
        batch_size: int,
    ) -> Draw:
        # The pass that would begin now.
        num_sampleable = sampleable.count()
        total = num_sampleable.sum(dtype=jnp.int32)
        fresh = WithoutReplacementState(
            jnp.concatenate(random.words(key, 1)),
            jnp.int32(0),
            sampleable.first_candidate_number(),
            num_sampleable,
        )

        # Rounds, each of which examines the next B rows of the pass.
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
            # rows beyond the last one that fits are for the next batch
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
        """Return True: a pass skips overwritten rows, so nothing has to wait."""
        del state, sampleable, num_rows
        return jnp.asarray(True)


def _is_over(state: WithoutReplacementState, fresh: WithoutReplacementState) -> jax.Array:
    """Return whether a pass is used up, or has lost seven eighths of its rows: bool[].

    Args:
      state: The pass.
      fresh: A pass that would begin now.
    """
    num_rows = state.num_rows.sum(dtype=jnp.int32)
    gone = jnp.clip(ring.difference(fresh.first, state.first), 0, state.num_rows)
    return (state.position >= num_rows) | (num_rows - gone.sum(dtype=jnp.int32) <= num_rows >> 3)


def _candidates(
    state: WithoutReplacementState, fresh: WithoutReplacementState, batch_size: int, traits: Traits
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the next rows of a pass.

    Args:
      state: The pass.
      fresh: A pass that would begin now.
      batch_size: Number of rows B.
      traits: Traits of the platform.

    Returns:
      int32[B], the stream of each row; int32[B], its place among the stream's sampleable rows now;
      bool[B], whether the pass has such a row and it is still sampleable.
    """
    position = state.position + ring.arange(batch_size)
    num_rows = state.num_rows.sum(dtype=jnp.int32)
    is_one = position < num_rows
    env, nth = split_by(
        state.num_rows, permute(state.key, jnp.where(is_one, position, 0), num_rows), traits
    )
    now = nth - ring.difference(fresh.first, state.first)[env]
    is_left = is_one & (now >= 0) & (now < fresh.num_rows[env])
    return env, jnp.where(is_left, now, 0), is_left

"""First in, first out: each row is handed out once, in the order of time, as on-policy learners
want their data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import Key
from jaxreplay._util.struct import Node
from jaxreplay.samplers.sampler import ConsumingSampler, Draw
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by

_MAX_COUNT = np.uint32(2**32 - 1)


class QueueState(Node):
    # uint32[E], modulo 2^32: the candidate number of the next row to hand out, or of one before it
    # that is lost
    next: jax.Array
    # uint32[]: rows overwritten, or their look-back, before they were taken, up to the last take;
    # stays at its maximum
    lost: jax.Array
    # bool[]: since the last take, so that what is gone since then was not lost
    is_cleared: jax.Array


class Queue(ConsumingSampler):
    """Every sampleable row once, the oldest first. Streams take turns.

    A batch of B is the B rows that come first by their place in their stream's queue, then by env;
    within the batch they lie by env, then by time. What the queue cannot fill is not valid, with
    probability 0; a row that is handed out has probability 1.

    A row that is overwritten before it was taken is lost, and counted in the state by the next take
    (but for one after a `clear`, which cannot tell what was lost from what was cleared). `can_add`
    says beforehand whether an add would lose any. Taken or lost, fewer than 2^32 rows of a stream
    may go by between two takes.
    """

    def init(self, layout: Layout) -> QueueState:
        return QueueState(
            next=jnp.zeros((layout.num_envs,), jnp.uint32),
            lost=jnp.uint32(0),
            is_cleared=jnp.asarray(False),
        )

    def clear(self, state: QueueState) -> QueueState:
        """The candidate numbers go on: the rows that are forgotten lie before the first sampleable
        one from now on."""
        return state.replace(is_cleared=jnp.ones_like(state.is_cleared))

    def after_loss(
        self, state: QueueState, candidate_number_now: Callable[[np.ndarray], np.ndarray]
    ) -> QueueState:
        """What was taken stays so; what is lost is not counted in `lost`."""
        return state.replace(next=jnp.asarray(candidate_number_now(np.asarray(state.next))))

    def size(self, state: QueueState, sampleable: Sampleable) -> jax.Array:
        """Rows left to take."""
        return _left(state, sampleable)[0].sum(dtype=jnp.int32)

    def sample(self, state: QueueState, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        del key
        left, lost = _left(state, sampleable)
        wanted = jnp.minimum(left.sum(dtype=jnp.int32), batch_size)
        taken = _turns(left, wanted, min(batch_size, sampleable.layout.length))
        item = ring.arange(batch_size)
        is_taken = item < taken.sum(dtype=jnp.int32)
        env, nth = split_by(taken, item, sampleable.layout.traits)
        held = sampleable.count()
        row = sampleable.select(env, jnp.where(is_taken, (held - left)[env] + nth, 0))
        num_lost = jnp.where(state.is_cleared, 0, lost.sum(dtype=jnp.uint32))
        state = QueueState(
            next=sampleable.first_candidate_number() + (held - left + taken).astype(jnp.uint32),
            lost=state.lost + jnp.minimum(num_lost, _MAX_COUNT - state.lost),
            is_cleared=jnp.zeros_like(state.is_cleared),
        )
        return Draw(state, row, is_taken.astype(jnp.float32))

    def probability(self, state: QueueState, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """1 for a row that is left to take, else 0."""
        env, _ = sampleable.layout.split(row)
        end = sampleable.first_candidate_number() + sampleable.count().astype(jnp.uint32)
        is_left = (
            end[env] - sampleable.streams.candidate_number_of(row)
            <= _left(state, sampleable)[0].astype(jnp.uint32)[env]
        )
        return is_left.astype(jnp.float32)

    def can_add(self, state: QueueState, sampleable: Sampleable, num_rows: int) -> jax.Array:
        """Whether `num_rows` more rows of each stream overwrite neither a row that is still to be
        taken, now or once its window is known, nor what the first of these looks back to: bool[].
        Where none is waiting, the next row is one, with all that its view may read.

        An episode that fills its stream blocks for ever, where the view waits for the episode's
        end.
        """
        layout, streams = sampleable.layout, sampleable.streams
        held, next_candidate_number = streams.filled, streams.next_candidate_number
        # candidates of each stream whose look-back is stored
        whole = next_candidate_number - sampleable.first_candidate_number()
        waiting = jnp.minimum(next_candidate_number - state.next, whole)
        row = sampleable.select(
            layout.envs(), jnp.where(waiting > 0, whole - waiting, 0).astype(jnp.int32)
        )
        place = held - 1 - streams.age(row)  # from the stream's oldest row on
        needed = jnp.where(
            waiting > 0, place - sampleable.look_back(row), held - (layout.window.before or 0)
        )
        return jnp.all(held + num_rows - layout.length <= needed)


def _left(state: QueueState, sampleable: Sampleable) -> tuple[jax.Array, jax.Array]:
    """Rows of each stream that are left to take, int32[E], and candidates that never can be since
    they are gone, uint32[E]."""
    count = sampleable.count().astype(jnp.uint32)
    # the newest of these are stored
    untaken = sampleable.first_candidate_number() + count - state.next
    left = jnp.minimum(untaken, count)
    return left.astype(jnp.int32), untaken - left


def _turns(left: jax.Array, wanted: jax.Array, most: int) -> jax.Array:
    """How many rows each stream gives to a batch when they take turns, the first streams first:
    int32[E].

    All give `level` rows, or what they have, and the first ones one more.

    Args:
      left: int32[E], rows that each has. wanted: int32[], of all together. most: that one stream
        can be asked for.
    """
    level = jnp.int32(0)  # the largest one that does not give too many: bit by bit
    for bit in reversed(range(most.bit_length())):
        higher = level + (1 << bit)
        level = jnp.where(jnp.minimum(left, higher).sum(dtype=jnp.int32) <= wanted, higher, level)
    given = jnp.minimum(left, level)
    has_more = left > level
    rest = wanted - given.sum(dtype=jnp.int32)
    return given + (has_more & (jnp.cumsum(has_more, dtype=jnp.int32) <= rest))

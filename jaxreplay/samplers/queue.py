"""First in, first out: each row is used once, or a given number of times, in the order of time, as
on-policy learners need it."""

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Key
from jaxreplay._util.checks import check_size
from jaxreplay._util.struct import Node
from jaxreplay.samplers.sampler import Draw, Sampler, plus
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by

_MOST_USES = 127  # an int8


class QueueState(Node):
    # uint32[k, E], modulo 2^32: candidate number of the next row for each of `max_uses` k uses, the
    # first one first; that row may be lost by now
    next: jax.Array
    # uint32[]: rows lost before the last `pop`: they, or their look-back, were overwritten before
    # they were consumed; stays at its maximum
    lost: jax.Array
    # bool[]: the buffer was cleared since the last `pop`, so that missing rows do not count as lost
    is_cleared: jax.Array


class Queue(Sampler):
    """Consume every sampleable row once, or `max_uses` times, the oldest first. Envs take turns.

    A batch takes equally many rows from each env, or all that the env has. If they do not divide
    evenly, the first envs give one more. The items of a batch are ordered by env, then by time.
    Consumed rows have probability 1. If too few rows are left, the other items are not valid,
    with probability 0.

    A row that is overwritten before it was consumed is lost. The next `pop` counts lost rows in the
    state, except after a `clear`: it cannot tell lost rows from cleared ones. `buffer.can_add`
    tells beforehand whether an `add` would lose rows. Between two calls of `pop`, fewer than 2^32
    rows of an env may be added.

    With `max_uses` above 1, a batch takes rows that were used least: new ones first, then those
    that were used once, and so on, each at most once a batch. A row is consumed by its last use,
    and lost if it is overwritten before its first one.

    Args:
      max_uses: Largest number of batches that a row is in, in 1 .. 127. Default: 1.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=4, batch_size=2, sampler=jr.Queue())
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.array([[7], [8], [9]]))
      >>> state, batch = buffer.pop(state, jax.random.key(0))
      >>> batch.experience.tolist()
      [7, 8]
      >>> state, batch = buffer.pop(state, jax.random.key(0))
      >>> batch.is_valid.tolist()  # one row was left
      [True, False]
      >>> def oracle(queues, B):  # queues: the rows of each env that are not consumed yet
      ...     share = [B // len(queues) + (env < B % len(queues)) for env in range(len(queues))]
      ...     return [queue.pop(0) for queue, n in zip(queues, share) for _ in queue[:n]]
    """

    max_uses: int = 1
    counts = ("lost", "num_waiting")
    period = 1  # every `period`-th row of a stream is consumed; of `EveryNth` above 1

    def _check(self) -> None:
        check_size("Queue", "max_uses", self.max_uses)
        if self.max_uses > _MOST_USES:
            raise ValueError(f"Queue: max_uses must be at most {_MOST_USES}, got {self.max_uses}")

    def init(self, layout: Layout) -> QueueState:
        return QueueState(
            next=jnp.zeros((self.max_uses, layout.num_envs), jnp.uint32),
            lost=jnp.uint32(0),
            is_cleared=jnp.asarray(False),
        )

    def clear(self, state: QueueState) -> QueueState:
        """Return the state after a clear. Forgotten rows have smaller candidate numbers than the
        sampleable rows from now on, so `next` stays."""
        return state.replace(is_cleared=jnp.ones_like(state.is_cleared))

    def numbers(self, state: QueueState, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return which rows were consumed, and the number of lost rows up to now."""
        row, _, place = _places(sampleable)
        before, _, _ = self._levels(state, sampleable)
        uses = (place < jnp.stack(before)[:, :, None]).sum(axis=0, dtype=jnp.int8)
        is_consumed = (uses == self.max_uses).reshape(-1)
        found = {
            "is_consumed": sampleable.contains(row) & is_consumed,
            "lost": self._lost(state, sampleable),
            "num_waiting": self._num_waiting(state.next, sampleable),
            "is_cleared": state.is_cleared,
        }
        if self.period > 1:
            end = sampleable.first_candidate_number() + sampleable.count().astype(jnp.uint32)
            ahead = ring.difference(state.next[0], end)
            found["num_ahead"] = jnp.maximum(ahead, 0)
        if self.max_uses > 1:
            found["num_uses"] = uses.reshape(-1)
        return found

    def from_numbers(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> QueueState:
        """Return the state in which the rows of each stream up to the first one that was not
        consumed are consumed; with a period, its rows are counted on from there."""
        row, first, place = _places(sampleable)
        fresh = self.init(sampleable.layout)
        if "is_consumed" not in numbers:
            return fresh.replace(next=jnp.broadcast_to(first, fresh.next.shape))
        is_left = sampleable.contains(row) & ~numbers["is_consumed"]

        def following(use: int) -> jax.Array:
            is_next = is_left & (numbers.get("num_uses", 0) <= use)
            here = jnp.where(is_next.reshape(place.shape), place, end[:, None])
            return first + here.min(axis=1).astype(jnp.uint32)

        end, ahead = sampleable.count(), numbers.get("num_ahead")
        if ahead is not None and ahead.shape == end.shape:
            end += jnp.minimum(ahead, self.period - 1)
        cursors = jnp.stack([following(use) for use in range(self.max_uses)])
        # Rows that did not fit are lost, too.
        num_lost = jnp.maximum(numbers["num_waiting"] - self._num_waiting(cursors, sampleable), 0)
        return QueueState(
            next=cursors,
            lost=plus(numbers["lost"], num_lost.astype(jnp.uint32)),
            is_cleared=numbers["is_cleared"],
        )

    def size(self, state: QueueState, sampleable: Sampleable) -> jax.Array:
        """Return the number of rows left to consume."""
        _, left, _ = self._levels(state, sampleable)
        return jnp.stack(left).sum(dtype=jnp.int32)

    def sample(self, state: QueueState, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        del key
        befores, left, _ = self._levels(state, sampleable)
        rest, turns = jnp.int32(batch_size), []
        for own in left:
            wanted = jnp.minimum(own.sum(dtype=jnp.int32), rest)
            turns.append(_turns(own, wanted, min(batch_size, sampleable.layout.length)))
            rest -= turns[-1].sum(dtype=jnp.int32)
        item, taken = ring.arange(batch_size), jnp.concatenate(turns)
        is_taken = item < taken.sum(dtype=jnp.int32)
        place, nth = split_by(taken, item, sampleable.layout.traits)
        env = place if self.max_uses == 1 else ring.divide(place, sampleable.layout.num_envs)[1]
        at = jnp.concatenate(befores)[place] + nth * self.period
        row = sampleable.select(env, jnp.where(is_taken, at, 0))
        first = sampleable.first_candidate_number()
        ends = [before + turn * self.period for before, turn in zip(befores, turns, strict=True)]
        state = QueueState(
            next=jnp.stack([first + end.astype(jnp.uint32) for end in ends]),
            lost=self._lost(state, sampleable),
            is_cleared=jnp.zeros_like(state.is_cleared),
        )
        return Draw(state, row, is_taken.astype(jnp.float32))

    def probability(self, state: QueueState, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """Return 1 for a row that is left to consume, else 0."""
        env, _ = sampleable.layout.split(row)
        end = sampleable.first_candidate_number() + sampleable.count().astype(jnp.uint32)
        _, each, _ = self._levels(state, sampleable)
        left = jnp.stack(each).sum(axis=0, dtype=jnp.uint32)
        number = sampleable.state.candidate_number_of(row)
        return (end[env] - number <= left[env]).astype(jnp.float32)

    def can_add(self, state: QueueState, sampleable: Sampleable, num_rows: int) -> jax.Array:
        """Return whether `num_rows` more rows of each stream overwrite no row that is needed.

        Rows to be consumed are needed, now or once their windows are known, and so is the look-back
        of the oldest of them. If there are none, the look-back of the next new row is needed.

        If the view waits for the end of the episode, and an episode fills its stream, the result
        stays False forever.
        """
        layout, stored = sampleable.layout, sampleable.state
        held, next_candidate_number = stored.filled, stored.next_candidate_number
        # candidates of each stream whose look-back is intact
        whole = next_candidate_number - sampleable.first_candidate_number()
        before, waiting, _ = self._left(state.next[-1], next_candidate_number, whole)
        row = sampleable.select(layout.envs(), jnp.where(waiting > 0, before, 0))
        place = held - 1 - sampleable.age(row)  # counted from the stream's oldest row
        needed = jnp.where(
            waiting > 0, place - sampleable.look_back(row), held - (layout.window.before or 0)
        )
        return jnp.all(held + num_rows - layout.length <= needed)

    def _levels(
        self, state: QueueState, sampleable: Sampleable
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array]:
        """Return for each use the number of sampleable rows of each stream before the next one, and
        the number that are left for it, int32[E] each; and the number of each stream's candidates
        that were lost before their first use, uint32[E]."""
        first, before, levels = sampleable.first_candidate_number(), sampleable.count(), []
        for cursor in state.next:
            held = before.astype(jnp.uint32)
            before, left, lost = self._left(cursor, first + held, held)
            levels.append((before, left, lost))
        befores, lefts, losts = zip(*levels, strict=True)
        return befores, lefts, losts[0]

    def _left(
        self, cursor: jax.Array, end: jax.Array, held: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return how many rows of each stream are before the next one to consume, and how many are
        left, int32[E] both; and how many are lost, uint32[E].

        Args:
          cursor: uint32[E], candidate number of the next row to consume, less than `period` ahead
            of `end`.
          end: uint32[E], candidate number after the last row.
          held: uint32[E], number of rows before `end` that are there; earlier ones are lost.
        """
        more = jnp.uint32(self.period - 1)
        untaken, rest = ring.divide(end - cursor + more, self.period)
        room = held + (more - rest)
        left = jnp.minimum(untaken, ring.divide(room, self.period)[0])
        before = room - left * jnp.uint32(self.period)
        return before.astype(jnp.int32), left.astype(jnp.int32), untaken - left

    def _num_waiting(self, cursors: jax.Array, sampleable: Sampleable) -> jax.Array:
        """Return the number of stored candidates that are to be consumed, pending ones too:
        int32[].

        Args:
          cursors: As `QueueState.next`.
          sampleable: The sampleable rows.
        """
        end, first = sampleable.state.next_candidate_number, sampleable.first_candidate_number()
        return self._left(cursors[-1], end, end - first)[1].sum(dtype=jnp.int32)

    def metrics(self, state: QueueState, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the number of rows that wait for their first use, and the number of lost rows."""
        _, left, _ = self._levels(state, sampleable)
        num_new = left[0].sum(dtype=jnp.int32)
        return {"num_new": num_new, "num_lost": self._lost(state, sampleable)}

    def _lost(self, state: QueueState, sampleable: Sampleable) -> jax.Array:
        """Return the number of rows that were lost up to now: uint32[]."""
        _, _, lost = self._levels(state, sampleable)
        num_lost = jnp.where(state.is_cleared, 0, lost.sum(dtype=jnp.uint32))
        return plus(state.lost, num_lost)


def _places(sampleable: Sampleable) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return all rows, int32[N]; the candidate number of each stream's first sampleable row,
    uint32[E]; and how far each row's is ahead of it, int32[E, N / E]."""
    layout, first = sampleable.layout, sampleable.first_candidate_number()
    row = ring.arange(layout.capacity)
    number = sampleable.state.candidate_number_of(row).reshape(layout.num_envs, -1)
    return row, first, ring.difference(number, first[:, None])


class EveryNth(Queue):
    """Consume every `period`-th sampleable row of each stream once; the others are never consumed.

    Args:
      period: Number of sampleable rows from one to the next.
    """

    period: int  # type: ignore[assignment]


def _turns(left: jax.Array, wanted: jax.Array, most: int) -> jax.Array:
    """Return the number of rows that each stream gives to a batch when they take turns: int32[E].

    Each stream gives `level` rows or all that it has. The first streams give one more.

    Args:
      left: int32[E], rows that each stream has.
      wanted: int32[], rows that all streams give together.
      most: The most rows that one stream may give, static.
    """
    level = jnp.int32(0)  # the largest level that does not give too many, found bit by bit
    for bit in reversed(range(most.bit_length())):
        higher = level + (1 << bit)
        level = jnp.where(jnp.minimum(left, higher).sum(dtype=jnp.int32) <= wanted, higher, level)
    given = jnp.minimum(left, level)
    has_more = left > level
    rest = wanted - given.sum(dtype=jnp.int32)
    return given + (has_more & (jnp.cumsum(has_more, dtype=jnp.int32) <= rest))

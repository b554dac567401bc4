"""Each new row once, then another sampler: the online queue of world models."""

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.checks import check_size
from jaxreplay.samplers.joined import Joined, own
from jaxreplay.samplers.queue import EveryNth
from jaxreplay.samplers.sampler import Draw, Sampler, of_class, uniform_probability
from jaxreplay.samplers.shares import spread
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.storage import ring
from jaxreplay.storage.sampleable import Sampleable

_FOR_PLACES = 3  # the purpose of these random bits; the buffer has 0 and 1, a blend 2


class OnlineQueue(Joined):
    """Sample each new row once, the oldest first, and fill the rest of each batch by another
    sampler.

    The buffer has `pop`. New rows are those of a `Queue`: envs take turns. If more rows become new
    than batches have items, they wait; rows that are overwritten meanwhile are lost. Batches then
    have new rows alone, which are old by now. `buffer.metrics` has both numbers, `num_new` and
    `num_lost`. Items have the probability that `sampler` gives to their row, or that of a uniform
    sample if this is 0. Rows that a buffer adopts from another one count as sampled.

    Args:
      sampler: Sampler of the other items. Default: `Uniform()`.
      period: Number of sampleable rows of an env from one new row to the next. The rows between
        them are sampled by `sampler` alone. With the length of the sequences, new ones do not
        overlap, as in DreamerV3. Default: 1, each row is new.
      beta: Exponent of importance weights, at least 0. Default: that of a sampler with priorities,
        else 0, so that all weights are 1.

    Raises:
      ValueError: `sampler` is no sampler, or consumes rows; `period` is no int of at least 1;
        `beta` is negative or not finite.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=8, batch_size=4, sampler=jr.OnlineQueue(sampler=jr.Uniform()))
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(3)[:, None])
      >>> state, batch = buffer.pop(state, jax.random.key(0))
      >>> batch.experience[:3].tolist()
      [0, 1, 2]
      >>> state = buffer.add(state, jnp.array([7]))
      >>> state, batch = buffer.pop(state, jax.random.key(0))
      >>> int(batch.experience[0])
      7
      >>> def oracle(new, sampled, B):  # new: the new rows not given yet; sampled() samples one
      ...     first, new = new[:B], new[B:]
      ...     return new, first + [sampled() for _ in range(B - len(first))]

    References:
      Hafner et al., "Mastering Diverse Domains through World Models" (2023),
      https://arxiv.org/abs/2301.04104, whose batches begin with new sequences that do not overlap.
    """

    sampler: Sampler = Uniform()
    period: int = 1

    def _check(self) -> None:
        check_size("OnlineQueue", "period", self.period)
        self._check_parts()
        if self.sampler.consumes:
            raise ValueError(
                f"OnlineQueue: sampler: {type(self.sampler).__name__} consumes rows itself; give "
                "one that samples with replacement, such as jaxreplay.Uniform()"
            )

    @property
    def parts(self) -> dict[str, Sampler]:
        """Samplers by name."""
        return {"queue": self._queue, "sampler": self.sampler}

    @property
    def _queue(self) -> EveryNth:
        return EveryNth(period=self.period)

    def identity(self) -> "OnlineQueue":
        """Return the sampler with what its state depends on."""
        return OnlineQueue(
            sampler=self.sampler.identity() or Uniform(), period=self.period, beta=0.0
        )

    def from_numbers(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> PyTree:
        # Rows are not new, unless they were of a buffer with a queue.
        state = super().from_numbers(sampleable, numbers)
        if not of_class(EveryNth, numbers):
            end = sampleable.first_candidate_number() + sampleable.count().astype(jnp.uint32)
            state["queue"] = state["queue"].replace(next=end[None])
        return state

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        queue, new, is_new = self._queue.sample(state["queue"], sampleable, key, batch_size)
        rest = own(state, "sampler")
        _, row, probability = self.sampler.sample(rest, sampleable, key, batch_size)
        item, (_, word) = ring.arange(batch_size), random.words(key, 1, _FOR_PLACES)
        num_new = is_new.sum(dtype=jnp.int32)
        nth = jnp.maximum(item - num_new, 0)
        place = spread(nth, batch_size - num_new, jnp.int32(batch_size), word)
        row, probability = row[place], probability[place]
        of_new = self.sampler.probability(rest, sampleable, new)
        least = uniform_probability(sampleable.count().sum(dtype=jnp.int32))
        of_new = jnp.where(of_new > 0, of_new, least)
        is_new = item < num_new
        row, probability = jnp.where(is_new, new, row), jnp.where(is_new, of_new, probability)
        return Draw({**state, "queue": queue}, row, probability)

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """Return the probability of each row by `sampler`."""
        return self.sampler.probability(own(state, "sampler"), sampleable, row)

    def can_add(self, state: PyTree, sampleable: Sampleable, num_rows: int) -> jax.Array:
        """Return whether `num_rows` more rows of each stream overwrite no new row."""
        return self._queue.can_add(state["queue"], sampleable, num_rows)

"""Sampling of rows whose priority was set long ago."""

import jax
import jax.numpy as jnp

from jaxreplay._util import random, xla
from jaxreplay._util.aliases import Key
from jaxreplay._util.struct import Node
from jaxreplay.samplers.prioritized import is_good_priority, live_rows
from jaxreplay.samplers.sampler import Draw, PrioritySampler
from jaxreplay.samplers.sum_tree import SumTree
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.writes import WriteEffect
from jaxreplay.types import Index

_LARGEST = jnp.iinfo(jnp.int32).max


class StaleState(Node):
    """When each row's priority was set. Times count the priorities that were set before."""

    now: jax.Array  # uint32[], modulo 2^32
    since: jax.Array  # uint32[N], modulo 2^32


class Stale(PrioritySampler):
    """Sample rows in proportion to the time since their priority was set, with replacement.

    The time counts the priorities that were set since, of all rows: each row of a write sets one,
    written or masked, and each item of an `update_priorities`. If all times are 0, rows are equally
    probable. It is made for a part of a blend, beside a sampler with priorities, which may be out
    of date. A sample reads one number of every row.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> sampler = jr.blend(
      ...     score=(jr.Prioritized(alpha=1.0), 0.5), stale=(jr.samplers.Stale(), 0.5)
      ... )
      >>> buffer = jr.items(capacity=8, batch_size=4, sampler=sampler)
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(4)[:, None])
      >>> buffer.get(state, jnp.arange(4)).probability.tolist()  # halves of 1/4, and of times / 6
      [0.375, 0.2916666865348816, 0.2083333432674408, 0.125]
      >>> import numpy as np
      >>> def oracle(now, since, B, rng):  # since: when each row's priority was set
      ...     time = np.maximum(now - since, (now == since).all())
      ...     return rng.choice(len(time), B, p=time / time.sum())

    References:
      Jiang et al., "Prioritized Level Replay" (2021), https://arxiv.org/abs/2010.03934, section 3.
      There, a level's time begins when it is sampled; here when its new score arrives.
    """

    beta = 0.0

    def window(self, window: Window) -> Window:
        if not window.is_bounded:
            raise ValueError("Stale: needs a view with a window of fixed length")
        return window

    def init(self, layout: Layout) -> StaleState:
        """Return a state where no time has passed."""
        return StaleState(jnp.uint32(0), jnp.zeros((layout.capacity,), jnp.uint32))

    def numbers(self, state: StaleState, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the time of each row, at most 2^31 - 1."""
        return {"time": jnp.minimum(state.now - state.since, _LARGEST).astype(jnp.int32)}

    def from_numbers(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> StaleState:
        """Return the state with these times; rows without one have just been written."""
        fresh = self.init(sampleable.layout)
        if "time" not in numbers:
            return fresh
        return fresh.replace(since=-jnp.maximum(numbers["time"], 0).astype(jnp.uint32))

    def observe(
        self, state: StaleState, effect: WriteEffect | None, priority: jax.Array | None
    ) -> StaleState:
        """Begin the time of the rows that were written."""
        assert effect is not None
        del priority
        first, num = effect.layout.window.after, effect.is_written.shape[0]
        assert first is not None
        row = effect.row[first : first + num]
        return self._set(state, jnp.where(effect.is_written, row, effect.layout.capacity))

    def sample(self, state: StaleState, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        layout, (high, low) = sampleable.layout, random.words(key, batch_size)
        tree = SumTree.on(layout.traits, layout.capacity)
        row, _ = tree.find(tree.of(self._mass(state, sampleable)), random.fraction(high), low)
        return Draw(state, row, self.probability(state, sampleable, row))

    def probability(self, state: StaleState, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        mass = self._mass(state, sampleable)
        return mass[row] / jnp.maximum(mass.sum(), 1)

    def update(
        self, state: StaleState, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> StaleState:
        """Begin the time of rows anew, but of those whose index or priority is ignored."""
        capacity, (row, is_live) = sampleable.layout.capacity, live_rows(sampleable, index)
        row = jnp.where(is_live & is_good_priority(priority), row, capacity)
        return self._set(state, jnp.where(xla.is_last(row), row, capacity))

    def _set(self, state: StaleState, row: jax.Array) -> StaleState:
        """Begin the times of different rows, one after another. Rows past the end are ignored."""
        row = row.reshape(-1)
        num = jnp.uint32(row.shape[0])
        time = state.now + 1 + jnp.arange(row.shape[0], dtype=jnp.uint32)
        since = state.since.at[row].set(time, mode="drop", unique_indices=True)
        return state.replace(now=state.now + num, since=since)

    def _mass(self, state: StaleState, sampleable: Sampleable) -> jax.Array:
        """Return the time of each row, 0 where it is not sampleable: float32[N]."""
        is_one = sampleable.contains(ring.arange(sampleable.layout.capacity))
        time = jnp.where(is_one, state.now - state.since, 0).astype(jnp.float32)
        return jnp.where(is_one & ~jnp.any(time > 0), 1, time)

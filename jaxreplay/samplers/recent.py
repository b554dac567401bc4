"""Sampling that prefers recent rows: geometric in the age of a row, over all streams together."""

import math

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.sampler import SMALLEST, Draw, Sampler
from jaxreplay.samplers.sum_tree import SumTree
from jaxreplay.storage import ring
from jaxreplay.storage.sampleable import Sampleable


class Recent(Sampler):
    """Sample rows in proportion to decay ** a, with replacement, where `a` is the number of newer
    sampleable rows in the row's stream.

    The stream is sampled in proportion to the sum over its rows, then the row by inverting the
    distribution function. The only cost that depends on the capacity is a binary search.

    Args:
      decay: Decay of the probability from one row to the next older one, in (0, 1]. With 1, all
        rows are equally probable. With 0.999, half of the samples are among the newest 693 rows of
        each stream.

    Raises:
      ValueError: `decay` is not in (0, 1].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=8, batch_size=4, sampler=jr.Recent(decay=0.5))
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(5)[:, None])
      >>> (buffer.get(state, jnp.arange(5)).probability * 31).round().tolist()
      [1.0, 2.0, 4.0, 8.0, 16.0]
      >>> import numpy as np
      >>> def oracle(sizes, decay, B, rng):  # sizes: sampleable rows of each stream
      ...     rows = [(env, nth) for env, size in enumerate(sizes) for nth in range(size)]
      ...     mass = np.array([decay ** (sizes[env] - 1 - nth) for env, nth in rows])
      ...     return [rows[i] for i in rng.choice(len(rows), B, p=mass / mass.sum())]
    """

    decay: float

    def _check(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"Recent: decay must be in (0, 1], got {self.decay}")

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        high, low = random.words(key, batch_size)
        count = sampleable.count()
        # A tree never samples a stream without rows, whatever the rounding. It also resolves
        # streams with few rows, for which the 24 bits of one float32 sum are too few.
        tree = SumTree.on(sampleable.layout.traits, sampleable.layout.num_envs)
        mass = self._mass(count)
        env, _ = tree.find(
            tree.set_range(tree.init(), jnp.int32(0), mass, mass >= 0), random.fraction(high), low
        )
        nth_newest = random.geometric(
            self.decay, count[env], *random.remix(high, low, jnp.uint32(0))
        )
        row = sampleable.select(env, count[env] - nth_newest)
        return Draw(state, row, self._probability(count, nth_newest - 1))

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        del state
        env, _ = sampleable.layout.split(row)
        count = sampleable.count()
        end = sampleable.first_candidate_number() + count.astype(jnp.uint32)
        return self._probability(
            count, ring.difference(end[env], sampleable.state.candidate_number_of(row)) - 1
        )

    def mass(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the sum of decay ** a over the rows of all streams."""
        return self._mass(sampleable.count()).sum()

    def _mass(self, count: jax.Array) -> jax.Array:
        """Return the sum of decay ** a over the rows of each stream: float32[E]."""
        count = count.astype(jnp.float32)
        return (
            count
            if self.decay == 1
            else jnp.expm1(count * jnp.float32(math.log(self.decay))) / jnp.float32(self.decay - 1)
        )

    def _probability(self, count: jax.Array, newer: jax.Array) -> jax.Array:
        """Return the probability of a row with `newer` newer rows in its stream: float32[B].

        It is positive unless no row is sampleable.
        """
        total = self._mass(count).sum()
        share = jnp.exp(
            newer.astype(jnp.float32) * jnp.float32(math.log(self.decay))
        ) / jnp.maximum(total, SMALLEST)
        return jnp.where(total > 0, jnp.maximum(share, SMALLEST), 0)

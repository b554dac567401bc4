"""Recent rows more often: geometric in a row's age, over all streams at once."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.sampler import Draw, Sampler
from jaxreplay.samplers.sum_tree import SumTree
from jaxreplay.storage import ring
from jaxreplay.storage.sampleable import Sampleable

_SMALLEST = float(np.finfo(np.float32).tiny)  # the smallest number that no processor flushes to 0


class Recent(Sampler):
    """A row with `a` newer sampleable rows in its stream is drawn in proportion to decay ** a, with
    replacement.

    A stream is drawn in proportion to the sum over its rows, then the row by the inverse of its
    distribution function: a binary search is all that depends on the capacity.

    Args:
      decay: in (0, 1]: 1 is uniform; 0.999 draws half of the rows from the newest 693 of each
        stream.
    """

    decay: float

    def _check(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"Recent: decay must be in (0, 1], got {self.decay}")

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        high, low = random.words(key, batch_size)
        count = sampleable.count()
        # A tree never draws a stream without rows, whatever the rounding, and tells small streams
        # apart where a sum's 24 bits do not.
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
            count, ring.difference(end[env], sampleable.streams.candidate_number_of(row)) - 1
        )

    def _mass(self, count: jax.Array) -> jax.Array:
        """The sum of decay ** a over the rows of each stream: float32[E]."""
        count = count.astype(jnp.float32)
        return (
            count
            if self.decay == 1
            else jnp.expm1(count * jnp.float32(math.log(self.decay))) / jnp.float32(self.decay - 1)
        )

    def _probability(self, count: jax.Array, newer: jax.Array) -> jax.Array:
        """Of a row with so many newer ones; never 0 but where there is no row: float32[B]."""
        total = self._mass(count).sum()
        share = jnp.exp(
            newer.astype(jnp.float32) * jnp.float32(math.log(self.decay))
        ) / jnp.maximum(total, _SMALLEST)
        return jnp.where(total > 0, jnp.maximum(share, _SMALLEST), 0)

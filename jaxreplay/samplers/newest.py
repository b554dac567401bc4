"""Uniform sampling from the newest rows: a hard limit of their age."""

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.checks import check_size
from jaxreplay.samplers.sampler import Draw
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.storage.sampleable import Sampleable


class Newest(Uniform):
    """Sample uniformly from the sampleable rows among the newest ones of each env, with
    replacement.

    Rows are found by a search. If no env has more rows than the limit, the distribution is
    that of `Uniform`.

    Args:
      num_rows: Number of newest rows of each env's ring, final rows included.

    Raises:
      ValueError: `num_rows` is no int of at least 1.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=8, batch_size=4, sampler=jr.Newest(num_rows=2))
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(5)[:, None])
      >>> buffer.get(state, jnp.arange(5)).probability.tolist()
      [0.0, 0.0, 0.0, 0.5, 0.5]
    """

    num_rows: int

    def _check(self) -> None:
        check_size("Newest", "num_rows", self.num_rows)

    def size(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the number of sampleable rows among the newest ones."""
        return super().size(state, sampleable.newest(self.num_rows))

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        """Return rows of the newest ones, as `Sampler.sample` does.

        Args:
          state: The sampler's state, which is none.
          sampleable: The sampleable rows.
          key: Random key, consumed.
          batch_size: Number of rows B.
        """
        return super().sample(state, sampleable.newest(self.num_rows), key, batch_size)

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """Return the probability of each row in one draw, 0 for older ones: float32[...].

        Args:
          state: The sampler's state, which is none.
          sampleable: The sampleable rows.
          row: int32[...].
        """
        own = sampleable.newest(self.num_rows)
        return jnp.where(own.contains(row), super().probability(state, own, row), 0)

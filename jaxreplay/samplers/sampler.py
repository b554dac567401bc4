"""What a sampler is: it is told which rows became sampleable and which were overwritten, and never
sees the data."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.struct import Static
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable, WriteEffect
from jaxreplay.targets import weights_of
from jaxreplay.types import Index


class Draw(NamedTuple):
    """A batch of B rows, and the sampler's state after the draw."""

    state: PyTree  # unchanged, unless the sampler consumes
    row: jax.Array  # int32[B], in [0, capacity)
    # float32[B]: what one draw has for each; 0 where there was nothing to draw
    probability: jax.Array


class Sampler(Static):
    """A frozen, hashable configuration with pure methods over a state of its own: any pytree.

    It must have `sample` and `probability`. What it leaves out is as here: without a state, for any
    window, over all sampleable rows.
    """

    # fields of its state with a number for each row, which `init` makes anew for another capacity
    PER_ROW: ClassVar[tuple[str, ...]] = ()

    def window(self, window: Window) -> Window:
        """What must be known around a row: the view's window, or more. A ValueError for a window
        that it cannot serve."""
        return window

    def init(self, layout: Layout) -> PyTree:
        """The state for an empty buffer."""
        del layout
        return ()

    def clear(self, state: PyTree) -> PyTree:
        """The state for a buffer whose rows are all forgotten."""
        return state

    def observe(
        self, state: PyTree, effect: WriteEffect | None, priority: jax.Array | None
    ) -> PyTree:
        """The state after a write.

        Args:
          effect: None where the window is not bounded.
          priority: float32[K, E] for the rows written, or None; only given to samplers that have
            priorities.
        """
        del effect, priority
        return state

    def per_row(self, state: PyTree) -> dict[str, jax.Array]:
        """Return what it keeps for each row, `[N or more]`, ordered by time, then env, by its name
        in the state.

        `put_per_row` is given it a part at a time. The state may be of shapes alone.
        """
        del state
        if self.PER_ROW:
            raise NotImplementedError(
                f"{type(self).__name__} has {', '.join(self.PER_ROW)} for each row, and must have "
                "per_row"
            )
        return {}

    def put_per_row(
        self, state: PyTree, sampleable: Sampleable, name: str, row: jax.Array, values: jax.Array
    ) -> PyTree:
        """Put what rows had before into the state of a buffer of another capacity. All else, such
        as candidate numbers and ages, is as it was.

        Args:
          sampleable: the rows as they are now. name: of what `per_row` gave.
          row: int32[K], which rows these are now, all different; the capacity for those that are
            gone. values: `[K]`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has {name} for each row, and must have put_per_row"
        )

    def after_loss(
        self, state: PyTree, candidate_number_now: Callable[[np.ndarray], np.ndarray]
    ) -> PyTree:
        """Return the state, without what is kept for each row, for a buffer that has lost rows out
        of its midst.

        Args:
          candidate_number_now: gives what a candidate number of before is now, or that of the next
            row that is left: uint32[E] to uint32[E].
        """
        del candidate_number_now
        return state

    def size(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Rows that can be drawn now: int32[]."""
        del state
        return sampleable.count().sum(dtype=jnp.int32)

    def can_sample(self, state: PyTree) -> jax.Array:
        """Whether there is mass to draw from, where there are rows that can be drawn: bool[]."""
        del state
        return jnp.asarray(True)

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        """Draw a batch of `batch_size` rows. `key`: consumed."""
        raise NotImplementedError(f"{type(self).__name__} is a sampler, and must have sample")

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """What one draw would have for each sampleable row: float32[B]."""
        raise NotImplementedError(f"{type(self).__name__} is a sampler, and must have probability")

    def weight(
        self,
        state: PyTree,
        sampleable: Sampleable,
        probability: jax.Array,
        is_valid: jax.Array,
        beta: jax.Array | float | None,
    ) -> jax.Array:
        """Return the weight of each item in a loss: float32[...]; 0 where not valid.

        Args:
          probability: float32[...], of each row drawn. is_valid: bool[...].
          beta: number[], how far weights correct the bias of the draws. Default: the sampler's.
        """
        del state, sampleable, probability, beta
        return is_valid.astype(jnp.float32)

    def metrics(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the sampler's part of `ReplayBuffer.metrics`: scalars, by name."""
        del state, sampleable
        return {}


class PrioritySampler(Sampler):
    """A sampler with priorities, so that `add` takes them; it must also have `update`."""

    def update(
        self, state: PyTree, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> PyTree:
        """The state with new priorities, float32[B], for drawn rows; it ignores what is bad or
        stale."""
        raise NotImplementedError(f"{type(self).__name__} has priorities, and must have update")

    def weight(
        self,
        state: PyTree,
        sampleable: Sampleable,
        probability: jax.Array,
        is_valid: jax.Array,
        beta: jax.Array | float | None,
    ) -> jax.Array:
        """Return importance weights, divided by the largest of the batch. `beta`: 1 by default."""
        del state, sampleable
        return weights_of(probability, is_valid, 1.0 if beta is None else beta)


class ConsumingSampler(Sampler):
    """A sampler that hands out each row once: drawing changes its state, so that a buffer has
    `pop` and not `sample`."""

    def can_add(self, state: PyTree, sampleable: Sampleable, num_rows: int) -> jax.Array:
        """Whether as many more rows of each stream overwrite nothing that is still to be taken:
        bool[]."""
        raise NotImplementedError(
            f"{type(self).__name__} hands out each row once, and must have can_add"
        )


def uniform_probability(total: jax.Array) -> jax.Array:
    """Of one thing among `total` that are alike: float32[...], 0 where there are none."""
    return jnp.where(total > 0, 1 / jnp.maximum(total, 1).astype(jnp.float32), 0)

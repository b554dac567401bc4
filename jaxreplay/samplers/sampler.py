"""What a sampler is: it is told which rows became drawable and which were overwritten, and never sees the data."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.drawable import Change, Drawable
from jaxreplay.layout import Layout
from jaxreplay.struct import Static
from jaxreplay.types import Index
from jaxreplay.window import Window


class Sampler(Static):
    """A frozen, hashable configuration with pure methods over a state of its own: any pytree.

    It must have `draw` and `probability`. What it leaves out is as here: without a state, for any window, over all drawable rows.
    """

    has_priorities: ClassVar[bool] = False  # whether `add` takes a priority and `update_priorities` exists
    consumes: ClassVar[bool] = False  # whether drawing changes its state, so that a buffer has `take` and not `sample`

    def window(self, window: Window) -> Window:
        """What must be known around a row: the view's window, or more. A ValueError for a window that it cannot serve."""
        return window

    def init(self, layout: Layout) -> Any:
        """The state for an empty buffer."""
        del layout
        return ()

    def clear(self, state: Any) -> Any:
        """The state for a buffer whose rows are all forgotten."""
        return state

    def observe(self, state: Any, change: Change | None, priority: jax.Array | None) -> Any:
        """The state after a write.

        Args:
          change: None where the window is not bounded.
          priority: float32[K, E] for the rows written, or None; only given to samplers that have priorities.
        """
        del change, priority
        return state

    def parted(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """What `resized` takes of a state; and the leaves that have a value for each row, `[N or more]`, ordered by time, then env, by
        their names in the state: what `moved` is given of them, a part at a time. Both may be of shapes alone.
        """
        return state, {}

    def resized(self, before: Layout, after: Layout, state: Any) -> Any:
        """The state for a buffer of another capacity, which has taken over the newest rows that fit; `moved` is to follow.

        Ranks and ages are as they were, so that a state without a number for each row stays as it is.
        """
        shape, other = (jax.eval_shape(lambda of=of: self.init(of)) for of in (before, after))
        if shape != other:
            raise NotImplementedError(f"{type(self).__name__} keeps something for each row, and must have parted, resized and moved")
        return state

    def moved(self, state: Any, drawable: Drawable, name: str, row: jax.Array, values: jax.Array) -> Any:
        """The state with what rows had before.

        Args:
          drawable: the rows as they are now. name: of a leaf that is kept by place.
          row: int32[K], which rows these are now, all different; the capacity for those that are gone. values: `[K]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must have moved")

    def after_loss(self, state: Any, rank_now: Callable[[np.ndarray], np.ndarray]) -> Any:
        """The state, such as `resized` takes, for a buffer that has lost rows out of its midst.

        Args:
          rank_now: gives what a rank of before is now, or that of the next row that is left: uint32[E] to uint32[E].
        """
        del rank_now
        return state

    def size(self, state: Any, drawable: Drawable) -> jax.Array:
        """Rows that can be drawn now: int32[]."""
        del state
        return drawable.count().sum(dtype=jnp.int32)

    def can_draw(self, state: Any) -> jax.Array:
        """Whether there is mass to draw from, where there are rows that can be drawn: bool[]."""
        del state
        return jnp.asarray(True)

    def draw(self, state: Any, drawable: Drawable, key: jax.Array, batch_size: int) -> tuple[Any, jax.Array, jax.Array]:
        """Draw a batch.

        Returns:
          The state, unchanged unless the sampler consumes. Rows in `[0, capacity)`, int32[B]. The probability that one draw has for
          each, float32[B], which is 0 where there was nothing to draw.
        """
        raise NotImplementedError(f"{type(self).__name__} is a sampler, and must have draw")

    def probability(self, state: Any, drawable: Drawable, row: jax.Array) -> jax.Array:
        """What one draw would have for each drawable row: float32[B]."""
        raise NotImplementedError(f"{type(self).__name__} is a sampler, and must have probability")


class PrioritySampler(Sampler):
    """A sampler with priorities; it must also have these."""

    has_priorities = True

    def update(self, state: Any, drawable: Drawable, index: Index, priority: jax.Array) -> Any:
        """The state with new priorities, float32[B], for drawn rows; it ignores what is bad or stale."""
        raise NotImplementedError(f"{type(self).__name__} has priorities, and must have update")

    def min_probability(self, layout: Layout, state: Any) -> jax.Array:
        """The smallest probability of a drawable row of positive priority: float32[]."""
        raise NotImplementedError(f"{type(self).__name__} has priorities, and must have min_probability")


class RankedSampler(PrioritySampler):
    """A sampler by ranks, as of the last time that they were taken."""

    def rerank(self, state: Any, drawable: Drawable) -> Any:
        """The state with new ranks: O(n log n)."""
        raise NotImplementedError(f"{type(self).__name__} has ranks, and must have rerank")


class ConsumingSampler(Sampler):
    """A sampler that hands out each row once."""

    consumes = True

    def can_add(self, state: Any, drawable: Drawable, num_rows: int) -> jax.Array:
        """Whether as many more rows of each stream overwrite nothing that is still to be taken: bool[]."""
        raise NotImplementedError(f"{type(self).__name__} hands out each row once, and must have can_add")

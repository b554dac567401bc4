"""What a sampler is: it is told which rows became drawable and which were overwritten, and never sees the data."""

from typing import Any, Protocol

import jax

from jaxreplay.drawable import Change, Drawable
from jaxreplay.streams import Streams
from jaxreplay.types import Index


class Sampler(Protocol):
    """A frozen, hashable configuration with pure methods over a state of its own (any pytree; `()` where it needs none)."""

    @property
    def has_priorities(self) -> bool:
        """Whether `add` takes a priority and `update_priorities` exists."""
        ...

    def init(self, streams: Streams, lookahead: int) -> Any:
        """The state for an empty buffer."""
        ...

    def clear(self, state: Any) -> Any:
        """The state for a buffer whose rows are all forgotten."""
        ...

    def observe(self, streams: Streams, state: Any, change: Change, priority: jax.Array | None) -> Any:
        """The state after a write. `priority`: float32[K, E] for the rows written, or None; only given to samplers that have priorities."""
        ...

    def can_draw(self, state: Any) -> jax.Array:
        """Whether there is mass to draw from, where there are drawable rows: bool[]."""
        ...

    def draw(self, state: Any, drawable: Drawable, key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
        """Rows in `[0, capacity)`, int32[B], and the probability that one draw has for each, float32[B], which is 0 where there was
        nothing to draw."""
        ...

    def probability(self, state: Any, drawable: Drawable, row: jax.Array) -> jax.Array:
        """What one draw would have for each drawable row: float32[B]."""
        ...


class PrioritySampler(Sampler, Protocol):
    """A sampler with `has_priorities`."""

    def update(self, state: Any, drawable: Drawable, index: Index, priority: jax.Array) -> Any:
        """The state with new priorities, float32[B], for drawn rows; it ignores what is bad or stale."""
        ...

    def min_probability(self, streams: Streams, state: Any) -> jax.Array:
        """The smallest probability of a drawable row of positive priority: float32[]."""
        ...

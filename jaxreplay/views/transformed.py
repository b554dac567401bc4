"""Items that are changed when they are sampled, such as by augmentation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.checks import call_traced, check_callable
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import WrappedView


class Transformed(WrappedView[Any]):
    """Apply a function to each item of a view, with a random key for each item.

    The function always runs last. If `FrameStack` or `Hindsight` wraps this view, items still have
    their stacks and new goals.

    Args:
      inner: The view that makes the items, such as a `TransitionView`.
      transform: Pure function `transform(item, key)` that returns the new item, any pytree. `item`
        has no batch axis; `key` is a `jax.random.key`.
    """

    transform: Callable[[Any, jax.Array], Any]

    @property
    def is_random(self) -> bool:
        """True: each item gets a key."""
        return True

    def _check(self) -> None:
        check_callable("Transformed", "transform", self.transform, ("item", "key"))

    def read(self, reader: RowReader) -> Any:
        # Bits of their own for `inner`, so that its random choices are independent of the key.
        key = jax.random.wrap_key_data(jnp.stack(reader.random_words(0)), impl="threefry2x32")
        item = self.inner.read(reader.at(bits=jnp.stack(reader.random_words(1))))
        return call_traced("Transformed", "transform", self.transform, item, key)

"""Items changed at sample time, such as by augmentation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.checks import check_callable
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import WrappedView


class Transformed(WrappedView[Any]):
    """Another view's items, each through a function with a key of its own.

    It comes last, in whatever order views are wrapped: the item has its stacks and new goals.

    Args:
      inner: the view that reads them.
      transform: pure; `transform(item, key)` for one item, without a batch axis.
    """

    transform: Callable[[Any, jax.Array], Any]

    @property
    def is_random(self) -> bool:
        return True

    def _check(self) -> None:
        check_callable("Transformed", "transform", self.transform, ("item", "key"))

    def read(self, reader: RowReader) -> Any:
        # The item's own bits are a key; what the view below draws from is another.
        key = jax.random.wrap_key_data(jnp.stack(reader.random_words(0)), impl="threefry2x32")
        return self.transform(
            self.inner.read(reader.at(bits=jnp.stack(reader.random_words(1)))), key
        )

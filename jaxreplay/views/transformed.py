"""Items that are changed when they are sampled, such as by augmentation."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.checks import call_traced, check_callable
from jaxreplay.types import Transition
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
        new = call_traced("Transformed", "transform", self.transform, item, key)
        if _n_step_of(self) > 1 and _replaces_reward(self.transform, item, key, new):
            warnings.warn(
                "transform: its function replaces the reward of a transition over several steps, "
                "and leaves the discount. The new reward counts as the sum over all steps. To "
                "replace the reward of each step before the sum: "
                "jaxreplay.relabel(buffer, lambda step, next_obs: reward)",
                stacklevel=2,
            )
        return new


def _n_step_of(view: Any) -> int:
    while isinstance(view, WrappedView):
        view = view.inner
    return getattr(view, "n_step", 1)


def _replaces_reward(function: Callable, item: Any, key: jax.Array, new: Any) -> bool:
    """Return whether a transition's new reward does not depend on its old one, though its discount
    is the old one."""
    if not (isinstance(item, Transition) and isinstance(new, Transition)):
        return False
    if new.discount is not item.discount:
        return False
    found = jax.make_jaxpr(lambda reward: function(item.replace(reward=reward), key).reward)
    jaxpr = found(item.reward).jaxpr
    depends = set(map(id, jaxpr.invars))
    for equation in jaxpr.eqns:
        if depends & set(map(id, equation.invars)):
            depends |= set(map(id, equation.outvars))
    return not depends & set(map(id, jaxpr.outvars))

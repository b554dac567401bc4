"""Items that are changed when they are sampled, such as by augmentation."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

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
        if _n_step_of(self) == 1:
            return call_traced("Transformed", "transform", self.transform, item, key)
        # The function runs once: its jaxpr tells what depends on the reward, and is computed.
        anew = lambda *given: self.transform(*given)  # it may close over what is traced: no cache
        traced = jax.make_jaxpr(anew, return_shape=True)
        closed, shape = call_traced("Transformed", "transform", traced, item, key)
        found = jaxpr_as_fun(closed)(*jax.tree.leaves((item, key)))
        if _replaces_reward(closed.jaxpr, item, shape):
            warnings.warn(
                "transform: its function replaces the reward of a transition over several steps, "
                "and leaves the discount. The new reward counts as the sum over all steps. To "
                "replace the reward of each step before the sum: "
                "jaxreplay.relabel(buffer, lambda step, next_obs: reward)",
                stacklevel=2,
            )
        return jax.tree.unflatten(jax.tree.structure(shape), found)


def _n_step_of(view: Any) -> int:
    while isinstance(view, WrappedView):
        view = view.inner
    return getattr(view, "n_step", 1)


def _replaces_reward(jaxpr: Any, item: Any, shape: Any) -> bool:
    """Return whether a transition's new reward does not depend on its old one, though its discount
    is the old one.

    Args:
      jaxpr: Of the function.
      item: The item that it gets first.
      shape: Shapes of its result.
    """
    if not (isinstance(item, Transition) and isinstance(shape, Transition)):
        return False
    structure = jax.tree.structure(item)
    old = jax.tree.unflatten(structure, jaxpr.invars[: structure.num_leaves])
    new = jax.tree.unflatten(jax.tree.structure(shape), jaxpr.outvars)
    if new.discount is not old.discount:
        return False
    depends = set(map(id, jax.tree.leaves(old.reward)))
    for equation in jaxpr.eqns:
        if depends & set(map(id, equation.invars)):
            depends |= set(map(id, equation.outvars))
    return not depends & set(map(id, jax.tree.leaves(new.reward)))

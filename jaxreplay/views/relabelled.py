"""Rewards that are computed anew as rows are read, before sums and sequences are made of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import call_traced, check_callable
from jaxreplay._util.names import name_of, spec_text
from jaxreplay.types import Step
from jaxreplay.views.row_reader import RowReader, WrappedReader
from jaxreplay.views.view import WrappedView


class Relabelled(WrappedView[Any]):
    """Compute every reward that a view reads anew.

    n-step sums, sequences and hindsight get the new rewards of single steps.

    Args:
      inner: The view that reads the steps, such as a `TransitionView`.
      reward_fn: Pure function `reward_fn(step, next_obs)` that returns the reward of one step.
        `step` is the stored `Step`, and `next_obs` the observation after it, leaves [...]. After a
        termination whose final observation is not stored, `next_obs` is `step.obs`. The stored
        reward's shape and dtype must be able to hold the result.
    """

    reward_fn: Callable[[Step, PyTree], PyTree]

    def _check(self) -> None:
        check_callable("Relabelled", "reward_fn", self.reward_fn, ("step", "next_obs"))
        if not self.inner.needs_steps:
            raise ValueError(
                "Relabelled: inner must be a view of steps, such as "
                f"jaxreplay.views.TransitionView(), got {self.inner}"
            )

    def read(self, reader: RowReader) -> Any:
        return self.inner.read(_WithReward.around(reader, reward_fn=self.reward_fn))


@dataclasses.dataclass(frozen=True)
class _WithReward(WrappedReader):
    reward_fn: Any = None

    def read(self, name: str, offset: ArrayLike) -> PyTree:
        stored = super().read(name, offset)
        if name != "reward":
            return stored

        def one(offset: jax.Array) -> PyTree:
            step, next_obs = self._inner.step(offset), self._inner.next_obs(offset)
            return call_traced("Relabelled", "reward_fn", self.reward_fn, step, next_obs)

        return of_each("Relabelled", self.reward_fn, one, offset, stored)


def of_each(
    where: str, function: Callable, one: Callable, offset: ArrayLike, stored: PyTree
) -> PyTree:
    """Return `one(offset)` for each offset, in the dtypes of the stored values.

    Args:
      where: Name of the view, for errors.
      function: The user's function, for errors.
      one: Function of one offset, int32[].
      offset: int or int32[...].
      stored: Pytree with leaves [...] followed by the leaf's own axes.

    Raises:
      ValueError: The values have another structure or shape, or a dtype of another kind.
    """
    offset = jnp.asarray(offset, jnp.int32)
    for_all = one
    for _ in offset.shape:
        for_all = jax.vmap(for_all)
    new = jax.tree.map(jnp.asarray, for_all(offset))
    name = getattr(function, "__name__", repr(function))
    if jax.tree.structure(new) != jax.tree.structure(stored):
        raise ValueError(
            f"{where}: {name} gave {jax.tree.structure(new)}, but stored is "
            f"{jax.tree.structure(stored)}; return a pytree of this structure"
        )

    def cast(path: Any, new: jax.Array, stored: jax.Array) -> jax.Array:
        if new.shape == stored.shape and _kind(new.dtype) <= _kind(stored.dtype):
            return new.astype(stored.dtype)
        got, expected = (spec_text(x, offset.ndim) for x in (new, stored))
        leaf = name_of(path)
        raise ValueError(
            f"{where}: {name} gave {leaf and leaf + ': '}{got} for one step, but stored is "
            f"{expected}, which cannot hold it; return a value of the stored shape and dtype"
        )

    return jax.tree_util.tree_map_with_path(cast, new, stored)


def _kind(dtype: Any) -> int:
    """Return the rank of a dtype's kind. A cast to a kind of lower rank may change values."""
    kinds = (jnp.bool_, jnp.unsignedinteger, jnp.signedinteger, jnp.floating, jnp.complexfloating)
    return next(number for number, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))

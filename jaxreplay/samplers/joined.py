"""Base class of samplers that ask other samplers over the same rows."""

import functools
from collections.abc import Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import check_part
from jaxreplay.samplers.sampler import Sampler
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.writes import WriteEffect
from jaxreplay.types import Index


class Joined(Sampler):
    """Base class of samplers that ask other samplers, `parts`.

    The state is a dict by name of the states of those parts that have one.
    """

    beta: float | None = None

    @property
    def parts(self) -> dict[str, Sampler]:
        """Samplers by name."""
        raise NotImplementedError

    @functools.cached_property
    def has_priorities(self) -> bool:
        """True if a part has priorities."""
        return any(one.has_priorities for one in self.parts.values())

    def _stateful(self) -> dict[str, Sampler]:
        return {name: one for name, one in self.parts.items() if one.identity() is not None}

    def _ask(self, name: str, state: PyTree, *arguments: Any) -> dict[str, Any]:
        """Call a method of each part with its own state."""
        return {
            part: getattr(one, name)(own(state, part), *arguments)
            for part, one in self.parts.items()
        }

    def _kept(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return {name: states[name] for name in self._stateful()}

    def _check_parts(self) -> None:
        where = type(self).__name__
        for name, one in self.parts.items():
            check_part(where, name, one, Sampler, "jaxreplay.Uniform()")
            if "." in name or ":" in name:
                raise ValueError(f"{where}: {name}: a name must have no dot and no colon")
        if self.beta is None:
            known = [getattr(one, "beta", 0.0) for one in self.parts.values() if one.has_priorities]
            object.__setattr__(self, "beta", known[0] if known else 0.0)
        if not is_at_least_0(self.beta):
            raise ValueError(
                f"{where}: beta must be a finite number of at least 0, got {self.beta!r}"
            )

    def window(self, window: Window) -> Window:
        """Return the window that suits every part."""
        for one in [*self.parts.values()] * 2:  # a later part may widen it
            window = one.window(window)
        return window

    def init(self, layout: Layout) -> PyTree:
        return {name: one.init(layout) for name, one in self._stateful().items()}

    def clear(self, state: PyTree) -> PyTree:
        return self._kept(self._ask("clear", state))

    def observe(
        self, state: PyTree, effect: WriteEffect | None, priority: jax.Array | None
    ) -> PyTree:
        """Return the state after a write. Priorities are for the parts that have them."""
        return {
            name: one.observe(state[name], effect, priority if one.has_priorities else None)
            for name, one in self._stateful().items()
        }

    def numbers(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the numbers of all parts, with the part and its class in their names:
        "priority.jaxreplay/Prioritized:mass"."""
        each = self._ask("_labelled", state, sampleable)
        return {
            f"{part}.{name}": x for part, of_part in each.items() for name, x in of_part.items()
        }

    def from_numbers(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> PyTree:
        """Return the states of all parts, each from the numbers of a sampler of its class: of that
        of its name, if there is one.

        Args:
          sampleable: The sampleable rows of the new buffer.
          numbers: Numbers of any samplers, with names as those of `numbers`.
        """
        made = {}
        for part, one in self._stateful().items():
            prefix = part + "."
            of_part = {
                name.removeprefix(prefix): x
                for name, x in numbers.items()
                if name.startswith(prefix)
            }
            given = of_part | numbers | of_part  # those of the part come first
            made[part] = one._from_labelled(sampleable, given)
        return made

    def _labelled(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        return self.numbers(state, sampleable)

    def _all_counts(self) -> set[str]:
        return {f"{part}.{name}" for part, one in self.parts.items() for name in one._all_counts()}

    def _from_labelled(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> PyTree:
        return self.from_numbers(sampleable, numbers)

    def size(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the number of rows that a part can sample, of the part with the most: 0 if no part
        gives items."""
        asked = (self._ask(name, state, sampleable).values() for name in ("size", "can_sample"))
        # one by one: a stack of them is a kernel of its own on a GPU
        sizes = [
            jnp.where(gives & can_sample, size, 0)
            for gives, size, can_sample in zip(self._gives(), *asked, strict=True)
        ]
        return functools.reduce(jnp.maximum, sizes)

    def _gives(self) -> Any:
        """Return which parts may give items to a batch: bool[M]."""
        return [True] * len(self.parts)

    def update(
        self, state: PyTree, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> PyTree:
        """Return the state with new priorities in each part that has them."""
        return {
            name: one.update(state[name], sampleable, index, priority)
            if one.has_priorities
            else state[name]
            for name, one in self._stateful().items()
        }

    def reset_max_priority(self, state: PyTree, sampleable: Sampleable) -> PyTree:
        return self._kept(self._ask("reset_max_priority", state, sampleable))

    def metrics(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the figures of all parts; of a name that several have, the first one's."""
        found: dict[str, jax.Array] = {}
        for of_part in self._ask("metrics", state, sampleable).values():
            found = of_part | found
        return found


def own(state: PyTree, name: str) -> PyTree:
    """Return the state of a part, `()` if it has none.

    Args:
      state: A dict of states by name, or `()`.
      name: Name of the part.
    """
    return dict(state).get(name, ())


def is_at_least_0(number: Any) -> bool:
    """Return whether a value is a finite number of at least 0."""
    return isinstance(number, Real) and 0 <= float(number) < float("inf")

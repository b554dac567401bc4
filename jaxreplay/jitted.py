"""A buffer's methods jitted with the right donation, for loops that are not one big `jit`."""

import functools
from typing import Any

import jax
import numpy as np

from jaxreplay import checks, lengths, operations
from jaxreplay.donation import check_not_gone
from jaxreplay.types import Index


class Jitted:
    """A buffer's methods, compiled; see `jit`."""

    def __init__(self, replay: Any):
        self.replay = replay

    def _call(self, function: Any, state: Any, *arguments: Any) -> Any:
        where = function.__name__.lstrip("_")
        try:
            return function(self.replay, state, *(_owned(where, argument) for argument in arguments))
        except TypeError:
            for argument in arguments:
                checks.check_storable(where, argument)
            raise
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error):
                check_not_gone(where, state)
            raise

    @property
    def _sampler(self) -> Any:
        return getattr(self.replay, "sampler", None)

    def _has_program(self, kind: str, rows: Any) -> bool:
        """Whether a call for so many rows has a program of its own; of rows with more axes than one, each shape has."""
        return len(np.shape(rows)) != 1 or lengths.has_program((self.replay, kind), len(rows))

    def init(self, example: Any) -> Any:
        """Not compiled: there is nothing to fuse, and a state that does not fit is refused here."""
        return self.replay.init(example)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(self.replay, name):
            raise AttributeError(f"jaxreplay.jit(replay) has no {name}: it is on the buffer itself, replay.{name}")
        raise AttributeError(name)

    def add(self, state: Any, step: Any, mask: Any = None, priority: Any = None) -> Any:
        """Donates `state`."""
        return self._call(_add, state, step, _given(mask=mask, priority=priority))

    def extend(self, state: Any, steps: Any, mask: Any = None, priority: Any = None) -> Any:
        """Donates `state`."""
        block = (steps, _given(mask=mask, priority=priority))
        for part in lengths.parts((self.replay, "extend"), block):
            state = self._call(_extend, state, *part)
        return state

    def update_priorities(self, state: Any, index: Any, priority: Any) -> Any:
        """Donates `state`."""
        if isinstance(index, Index) and np.shape(index.row) == np.shape(priority) and not self._has_program("update", index.row):
            index, priority = lengths.padded((index, priority), (lengths.NONE, 0))
        return self._call(_update_priorities, state, index, priority)

    def clear(self, state: Any) -> Any:
        """Donates `state`."""
        return self._call(_clear, state)

    def sample(self, state: Any, key: jax.Array, batch_size: int | None = None) -> Any:
        if (part := lengths.shared((self.replay, "sample"), self._sampler, batch_size)) is None:
            return self._call(_sample, state, key, batch_size)
        return lengths.first(self._call(_sample, state, key, *part), part.wanted)

    def take(self, state: Any, key: jax.Array, batch_size: int | None = None) -> Any:
        """Donates `state`."""
        if (part := lengths.shared((self.replay, "take"), self._sampler, batch_size)) is None:
            return self._call(_take, state, key, batch_size)
        state, batch = self._call(_take, state, key, *part)
        return state, lengths.first(batch, part.wanted)

    def rerank(self, state: Any) -> Any:
        """Donates `state`."""
        return self._call(_rerank, state)

    def get(self, state: Any, index: Any, key: jax.Array | None = None) -> Any:
        rows = index.row if isinstance(index, Index) else index
        if self._has_program("get", rows):
            return self._call(_get, state, index, key)
        return lengths.first(self._call(_get, state, lengths.padded(index, lengths.NONE), key), len(rows))

    def can_add(self, state: Any, num_steps: int = 1) -> jax.Array:
        return self._call(_can_add, state, num_steps)

    def size(self, state: Any) -> jax.Array:
        return self._call(_size, state)

    def can_sample(self, state: Any) -> jax.Array:
        return self._call(_can_sample, state)

    def age(self, state: Any, index: Any) -> jax.Array:
        if self._has_program("age", index.row):
            return self._call(_age, state, index)
        return lengths.first(self._call(_age, state, lengths.padded(index, lengths.NONE)), len(index.row))

    def min_probability(self, state: Any) -> jax.Array:
        return self._call(_min_probability, state)


def jit(replay: Any) -> Jitted:
    """The methods of `replay` jitted, with the state donated where it changes: for a loop that is not one big `jit`.

    A `Rollout` and a `Mixture` may be handed over too: the methods that they have are jitted alike. What is not here, such as `memory`,
    `episodes` or a rollout's `steps`, is on `.replay`, the buffer itself.

    Equal configurations share one compilation. NumPy input is copied first: JAX may read an array after the call has returned, when
    an env that reuses its observation array has already written the next one into it.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> replay = jr.items(capacity=8, num_envs=2, batch_size=4)
      >>> buffer = jr.jit(replay)
      >>> state = buffer.init({"x": jnp.zeros(3)})
      >>> state = buffer.add(state, {"x": jnp.ones((2, 3))})
      >>> int(buffer.size(state))
      2
    """
    if not hasattr(replay, "add") and not hasattr(replay, "sample"):
        raise ValueError(f"jit: takes a buffer, such as jaxreplay.uniform(...), got {replay!r}; to compile a function use jax.jit")
    return Jitted(replay)


def _given(**options: Any) -> dict[str, Any]:
    """What was given: a rollout takes neither a mask nor priorities, a mixture no batch size."""
    return {name: value for name, value in options.items() if value is not None}


def _owned(where: str, tree: Any) -> Any:
    def own(leaf: Any) -> Any:
        if isinstance(leaf, np.ma.MaskedArray):
            checks.check_storable(where, tree)
        return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(own, tree)


# The configuration is a leafless pytree: its value is part of the compilation's key, so that equal ones share it.
_donating = functools.partial(jax.jit, donate_argnums=1)


@_donating
def _add(replay, state, step, options):
    return replay.add(state, step, **options)


@_donating
def _extend(replay, state, steps, options):
    return replay.extend(state, steps, **options)


@_donating
def _update_priorities(replay, state, index, priority):
    return replay.update_priorities(state, index, priority)


@_donating
def _clear(replay, state):
    return replay.clear(state)


@functools.partial(jax.jit, static_argnums=3)
def _sample(replay, state, key, batch_size, wanted=None):
    """`wanted`: how many items of the batch are, the first ones; None: all."""
    if wanted is None:
        return replay.sample(state, key, **_given(batch_size=batch_size))
    return operations.draw(replay, state, key, batch_size, replay.can_sample(state), wanted)[1]


@functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
def _take(replay, state, key, batch_size, wanted=None):
    if wanted is None:
        return replay.take(state, key, **_given(batch_size=batch_size))
    return operations.draw(replay, state, key, batch_size, replay.can_sample(state), wanted)


@_donating
def _rerank(replay, state):
    return replay.rerank(state)


@jax.jit
def _can_add(replay, state, num_steps):
    return replay.can_add(state, num_steps)


@jax.jit
def _get(replay, state, index, key):
    return replay.get(state, index, key)


@jax.jit
def _size(replay, state):
    return replay.size(state)


@jax.jit
def _can_sample(replay, state):
    return replay.can_sample(state)


@jax.jit
def _age(replay, state, index):
    return replay.age(state, index)


@jax.jit
def _min_probability(replay, state):
    return replay.min_probability(state)

"""A buffer's methods compiled with the right donation, for loops that are not one big `jit`."""

import functools
from collections.abc import Callable
from typing import Any, Generic, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_not_deleted
from jaxreplay.types import Sample, T

# methods that donate the state
_CHANGES = frozenset({"add", "extend", "update_priorities", "clear", "pop", "rerank"})
_CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def program(
    function: Callable[..., Any], *, changes: bool = False, static: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Compile `function(buffer, state, ...)`. Inside of another `jit` it is called as it is, and
    compiled there.

    On a CPU its small steps run in order. By default XLA hands them from core to core: an add to
    one env took 97 us that way, and 36 in order (two cores, jax 0.10.2).

    Args:
      function: pure; a buffer, a state, and further arguments.
      changes: whether it returns a new state, so that `state` is donated.
      static: names of its static arguments.

    Returns:
      A function of the same arguments.
    """

    @functools.cache
    def compiled() -> Any:
        # The configuration is a leafless pytree: its value is part of the compilation's key, so
        # that equal ones share it.
        return jax.jit(
            function, donate_argnums=1 if changes else (), static_argnames=static, **options_here()
        )

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return compiled()(*arguments, **options)
        except ValueError:
            if not isinstance(jnp.zeros(()), Tracer):
                raise
        return function(*arguments, **options)

    return call


@functools.cache
def options_here() -> dict[str, Any]:
    """Return the options of `jax.jit` for a CPU; none on other platforms, or if this JAX or XLA
    does not know them."""
    options: dict[str, Any] = {"compiler_options": _CPU_OPTIONS}
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, **options).lower().compile()
    except Exception:
        return {}
    return options


@functools.cache
def method(name: str) -> Callable[..., Any]:
    """Compile a method of any buffer: `method(name)(buffer, state, ...)` returns
    `buffer.name(state, ...)`."""

    def call(buffer: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(buffer, name)(state, *arguments, **options)

    call.__name__ = call.__qualname__ = name
    return program(call, changes=name in _CHANGES, static=("batch_size",))


class Jitted(Generic[T]):
    """A buffer's methods, compiled; see `jit`."""

    def __init__(self, buffer: Any):
        self.buffer = buffer

    def _call(self, name: str, state: Any, *arguments: Any, **options: Any) -> Any:
        # a rollout takes no mask, a mixture no batch size
        given = {key: value for key, value in options.items() if value is not None}
        try:
            return method(name)(self.buffer, state, *_owned(name, arguments), **_owned(name, given))
        except TypeError:
            for argument in (*arguments, *given.values()):
                checks.check_storable(name, argument)
            raise
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error):
                check_not_deleted(name, state)
            raise

    def _step(self, step: PyTree) -> Any:
        """Return a step as a pytree, and an item as it is."""
        return (
            step if getattr(self.buffer, "autoreset", None) is None else step_checks.by_field(step)
        )

    def init(self, example: PyTree) -> Any:
        """Not compiled: there is nothing to fuse, and a state that does not fit is refused here."""
        return self.buffer.init(example)

    def __getattr__(self, name: str) -> Any:
        buffer = vars(self).get("buffer")  # None while a copy is made
        if name in getattr(buffer, "__dataclass_fields__", {}):
            return getattr(buffer, name)
        if not name.startswith("__") and hasattr(buffer, name):
            raise AttributeError(
                f"jaxreplay.jit(buffer) has no {name}: it is on the buffer itself, buffer.{name}"
            )
        raise AttributeError(name)

    def add(self, state: Any, step: PyTree, mask: Any = None, priority: Any = None) -> Any:
        """Donates `state`."""
        return self._call("add", state, self._step(step), mask=mask, priority=priority)

    def extend(self, state: Any, steps: PyTree, mask: Any = None, priority: Any = None) -> Any:
        """Donates `state`. Compiles for each number of steps."""
        return self._call("extend", state, self._step(steps), mask=mask, priority=priority)

    def update_priorities(self, state: Any, index: Any, priority: Any) -> Any:
        """Donates `state`. Compiles for each number of rows."""
        return self._call("update_priorities", state, index, priority)

    def clear(self, state: Any) -> Any:
        """Donates `state`."""
        return self._call("clear", state)

    def sample(
        self,
        state: Any,
        key: Key | None = None,
        batch_size: int | None = None,
        *,
        beta: Any = None,
    ) -> Sample[T]:
        """Compiles for each batch size."""
        return self._call("sample", state, key, batch_size=batch_size, beta=beta)

    def pop(self, state: Any, key: Key, batch_size: int | None = None) -> tuple[Any, Sample[T]]:
        """Donates `state`. Compiles for each batch size."""
        return self._call("pop", state, key, batch_size=batch_size)

    def rerank(self, state: Any) -> Any:
        """Donates `state`."""
        return self._call("rerank", state)

    def get(self, state: Any, index: Any, key: Key | None = None, *, beta: Any = None) -> Sample[T]:
        """Compiles for each number of rows."""
        return self._call("get", state, index, key=key, beta=beta)

    def can_add(self, state: Any, num_steps: int = 1) -> jax.Array:
        return self._call("can_add", state, num_steps)

    def size(self, state: Any) -> jax.Array:
        return self._call("size", state)

    def can_sample(self, state: Any) -> jax.Array:
        return self._call("can_sample", state)

    def age(self, state: Any, index: Any) -> jax.Array:
        """Compiles for each number of rows."""
        return self._call("age", state, index)

    def metrics(self, state: Any, *, beta: Any = None) -> dict[str, jax.Array]:
        return self._call("metrics", state, beta=beta)


@overload
def jit(buffer: ReplayBuffer[T]) -> Jitted[T]: ...
@overload
def jit(buffer: Any) -> Jitted[Any]: ...
def jit(buffer: Any) -> Jitted[Any]:
    """The methods of `buffer` jitted, with the state donated where it changes: for a loop that is
    not one big `jit`.

    A `Rollout` and a `Mixture` may be handed over too: the methods that they have are jitted alike.
    The buffer's arguments, such as `capacity`, are attributes here too. What is not here, such as
    `memory`, `episode_table` or a rollout's `steps`, is on `.buffer`, the buffer itself.

    Equal configurations share one compilation. NumPy input is copied first: JAX may read an array
    after the call has returned, when an env that reuses its observation array has already written
    the next one into it.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.jit(jr.items(capacity=8, num_envs=2, batch_size=4))
      >>> state = buffer.init({"x": jnp.zeros(3)})
      >>> state = buffer.add(state, {"x": jnp.ones((2, 3))})
      >>> int(buffer.size(state))
      2
    """
    if not hasattr(buffer, "add") and not hasattr(buffer, "sample"):
        raise ValueError(
            f"jit: takes a buffer, such as jaxreplay.uniform(...), got {buffer!r}; to compile a "
            "function use jax.jit"
        )
    return Jitted(buffer)


def _owned(where: str, tree: PyTree) -> Any:
    def own(leaf: Any) -> Any:
        if isinstance(leaf, np.ma.MaskedArray):
            checks.check_storable(where, tree)
        return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(own, tree)

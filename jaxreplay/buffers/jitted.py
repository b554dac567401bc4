"""Compiled methods of a buffer with donated states, for loops that are not one big `jit`."""

import functools
from collections.abc import Callable
from typing import Any, Generic, overload

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_not_deleted
from jaxreplay.storage.sampleable import ReplayState
from jaxreplay.types import Sample, T

# methods that donate the state
_CHANGES = frozenset({"add", "extend", "clear", "pop", "end_streams"})
_CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def program(
    function: Callable[..., Any], *, changes: bool = False, static: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Compile `function(buffer, state, ...)`. Inside another `jit`, that one compiles it.

    On a CPU, XLA by default moves small operations from core to core. Here they run in order: an
    `add` to one env took 36 us instead of 97 us (two cores, jax 0.10.2).

    Args:
      function: Pure function of a buffer, a state, and further arguments.
      changes: Donate `state`, for functions that return a new one. Default: False.
      static: Names of static arguments. Default: none.

    Returns:
      A function with the same arguments.
    """

    @functools.cache
    def compiled() -> Any:
        # The buffer is a pytree without leaves. Its value is part of the compilation's key, so
        # equal buffers share one compilation.
        return jax.jit(
            function, donate_argnums=1 if changes else (), static_argnames=static, **options_here()
        )

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return compiled()(*arguments, **options)
        except ValueError:
            if not checks.is_tracing():
                raise
        return function(*arguments, **options)

    return call


@functools.cache
def options_here() -> dict[str, Any]:
    """Return options of `jax.jit` for CPUs; {} on other platforms, or if JAX or XLA rejects
    them."""
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
    """Compile a method of any buffer: `method("add")(buffer, state, ...)` returns
    `buffer.add(state, ...)`."""

    def call(buffer: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(buffer, name)(state, *arguments, **options)

    call.__name__ = call.__qualname__ = name
    if name == "update_priorities":
        return _sampler_method(call)
    return program(call, changes=name in _CHANGES, static=("batch_size",))


def _sampler_method(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a method that changes only the sampler's part of a state.

    The rows go in, and the new state shares them with the old one. To take each array of the rows
    out of the program again would cost 2 us an array.
    """

    def change(buffer: Any, sampler: Any, rows: Any, *arguments: Any, **options: Any) -> Any:
        return call(buffer, rows.replace(sampler=sampler), *arguments, **options).sampler

    change.__name__ = change.__qualname__ = call.__name__
    of_sampler, of_state = program(change, changes=True), program(call, changes=True)

    @functools.wraps(call)
    def run(buffer: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(state, ReplayState):  # the states of a mixture
            return of_state(buffer, state, *arguments, **options)
        rows = state.replace(sampler=None)
        return rows.replace(sampler=of_sampler(buffer, state.sampler, rows, *arguments, **options))

    return run


class Jitted(Generic[T]):
    """Compiled methods of a buffer, as `jaxreplay.jit` returns them. T is time, E env, B batch.

    Methods that return a new state donate the old one. For a `Mixture`, `state` is the dict of its
    members' states.

    Args:
      buffer: A `ReplayBuffer`, `Rollout` or `Mixture`.
    """

    def __init__(self, buffer: Any):
        self.buffer = buffer

    def __repr__(self) -> str:
        return f"jaxreplay.jit({self.buffer!r})"

    def _call(self, name: str, state: Any, *arguments: Any, **options: Any) -> Any:
        # a rollout has no argument `mask`, a mixture no `batch_size`
        given = {key: value for key, value in options.items() if value is not None}
        try:
            arguments, given = _owned(name, (arguments, given))
            return method(name)(self.buffer, state, *arguments, **given)
        except TypeError:
            for argument in (*arguments, *given.values()):
                checks.check_storable(name, argument)
            raise
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error):
                check_not_deleted(name, state)
            raise

    def _step(self, step: PyTree) -> Any:
        """Return a step as a pytree; an item is returned unchanged."""
        return (
            step if getattr(self.buffer, "autoreset", None) is None else step_checks.by_field(step)
        )

    def init(self, example: PyTree) -> Any:
        """Return an empty state. A lack of memory is an error before anything is allocated.

        Args:
          example: One env's step (leaves without the env axis) or one item: arrays or
            `jax.ShapeDtypeStruct`s.
        """
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
        """Append one step of every env.

        Args:
          state: The buffer's state. Donated: use the returned state instead.
          step: Pytree with leaves [E, ...].
          mask: bool[E], False where an env took no step; needs `allow_mask=True`. With
            `autoreset="next_step"`, never mask the step after a done. Default: every env took one.
          priority: float[E], at least 0. Default: the largest priority so far.

        Returns:
          The new state.
        """
        return self._call("add", state, self._step(step), mask=mask, priority=priority)

    def extend(self, state: Any, steps: PyTree, mask: Any = None, priority: Any = None) -> Any:
        """Append a block of steps. Compiles once for each number of steps.

        Args:
          state: The buffer's state. Donated: use the returned state instead.
          steps: Pytree with leaves [T, E, ...], oldest first.
          mask: bool[T, E], as for `add`. Default: every env took every step.
          priority: float[T, E], at least 0. Default: the largest priority so far.

        Returns:
          The new state.
        """
        return self._call("extend", state, self._step(steps), mask=mask, priority=priority)

    def update_priorities(self, state: Any, index: Any, priority: Any) -> Any:
        """Set the priorities of sampled rows. Compiles once for each number of rows.

        Args:
          state: The buffer's state. Donated: use the returned state instead.
          index: `batch.index` of a sample, leaves [B]; for a mixture, the batch itself.
          priority: float[B], at least 0. A row with priority 0 is never sampled again.

        Returns:
          The new state.
        """
        return self._call("update_priorities", state, index, priority)

    def clear(self, state: Any) -> Any:
        """Remove all rows.

        Args:
          state: The buffer's state. Donated: use the returned state instead.

        Returns:
          The new state.
        """
        return self._call("clear", state)

    def end_streams(self, state: Any, mask: Any = None) -> Any:
        """End the unfinished episodes, after a reset that no step tells.

        Args:
          state: The buffer's state. Donated: use the returned state instead.
          mask: bool[E], False for envs that go on. Default: every env was reset.

        Returns:
          The new state.
        """
        return self._call("end_streams", state, mask=mask)

    def sample(
        self,
        state: Any,
        key: Key | None = None,
        batch_size: int | None = None,
        *,
        beta: Any = None,
    ) -> Sample[T]:
        """Sample a batch with replacement. Compiles once for each batch size.

        Args:
          state: The buffer's state.
          key: Random key, consumed. Required: the default raises an error that shows the call.
          batch_size: Number of items. Static. Default: the buffer's batch size.
          beta: float[], at least 0, the exponent of importance weights; may be traced. Default: the
            sampler's beta.

        Returns:
          A batch of items, leaves [B, ...].
        """
        return self._call("sample", state, key, batch_size=batch_size, beta=beta)

    def pop(self, state: Any, key: Key, batch_size: int | None = None) -> tuple[Any, Sample[T]]:
        """Sample and consume a batch (Queue, WithoutReplacement). Compiles once for each batch
        size.

        Args:
          state: The buffer's state. Donated: use the returned state instead.
          key: Random key, consumed.
          batch_size: Number of items. Static. Default: the buffer's batch size.

        Returns:
          The new state, and a batch of items, leaves [B, ...].
        """
        return self._call("pop", state, key, batch_size=batch_size)

    def get(self, state: Any, index: Any, key: Key | None = None, *, beta: Any = None) -> Sample[T]:
        """Return the items of given rows. Compiles once for each number of rows.

        Args:
          state: The buffer's state.
          index: `batch.index` of a sample, or row numbers int32[B].
          key: Random key, consumed. Required for a view that is random (goals, horizons,
            augmentations). Default: no key.
          beta: float[], at least 0, the exponent of importance weights; may be traced. Default: the
            sampler's beta.

        Returns:
          A batch of items, leaves [B, ...].
        """
        return self._call("get", state, index, key=key, beta=beta)

    def can_add(self, state: Any, num_steps: int = 1) -> jax.Array:
        """Return whether more steps overwrite only consumed rows (Queue, WithoutReplacement), or
        whether a rollout has room for them: bool[].

        Args:
          state: The buffer's state.
          num_steps: Number of steps of every env. Default: 1.
        """
        return self._call("can_add", state, num_steps)

    def size(self, state: Any) -> jax.Array:
        """Return the number of sampleable rows: int32[].

        Args:
          state: The buffer's state.
        """
        return self._call("size", state)

    def can_sample(self, state: Any) -> jax.Array:
        """Return whether a sample is valid, bool[]: `min_size` rows are sampleable, and one has a
        positive priority. For a mixture, this holds for every member.

        Args:
          state: The buffer's state.
        """
        return self._call("can_sample", state)

    def age(self, state: Any, index: Any) -> jax.Array:
        """Return the number of rows that were written after each row in its env's ring, final rows
        included: int32[B]. Compiles once for each number of rows.

        Args:
          state: The buffer's state.
          index: `batch.index` of a sample, leaves [B].
        """
        return self._call("age", state, index)

    def metrics(self, state: Any) -> dict[str, jax.Array]:
        """Return scalars to log, by name, such as `size` and `fill`.

        Args:
          state: The buffer's state.
        """
        return self._call("metrics", state)


@overload
def jit(buffer: ReplayBuffer[T]) -> Jitted[T]: ...
@overload
def jit(buffer: Any) -> Jitted[Any]: ...
def jit(buffer: Any) -> Jitted[Any]:
    """Compile the methods of a buffer, for loops that are not one big `jit`.

    Methods that return a new state donate the old one, which changes the buffer in place. Equal
    buffers share one compilation.

    The buffer's arguments, such as `capacity`, are attributes of the result, too. Other members,
    such as `memory`, `episode_table` or a rollout's `steps`, are on `.buffer`, the buffer itself.

    NumPy input is copied first. JAX may read an array after the call has returned. By then, an env
    that reuses its observation array may have written the next observation into it.

    Args:
      buffer: A `ReplayBuffer`, `Rollout` or `Mixture`.

    Returns:
      An object with the buffer's methods, compiled.

    Raises:
      ValueError: `buffer` is not a buffer.

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
    """Copy NumPy arrays, which an env may overwrite before JAX reads them."""
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return tree

    def own(leaf: Any) -> Any:
        if isinstance(leaf, np.ma.MaskedArray):
            checks.check_storable(where, tree)
        return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(own, tree)

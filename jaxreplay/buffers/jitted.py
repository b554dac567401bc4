"""Compiled methods of a buffer with donated states, for loops that are not one big `jit`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import kind_of
from jaxreplay._util.struct import Static
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.adopt import check_adopted, numbers_of, rebuilt
from jaxreplay.buffers.map_rows import identified
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_not_deleted
from jaxreplay.buffers.verbs import VERBS, Verb
from jaxreplay.samplers import Sampler
from jaxreplay.storage.relayout import stays
from jaxreplay.storage.state import ReplayState

B = TypeVar("B")  # the type of a buffer

_CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
# XLA takes a read of a few rows of a large array for a large one, and divides it among all cores.
# On one core an add with priorities took 0.62 to 0.90 of the time, an update of 256 to 16,384 rows
# 0.68 to 0.99, and a uniform sample of 32 rows 0.62, of 256 rows 0.80 to 0.99, of 4,096 rows 1.05
# (of two cores, jax 0.10.2).
_ON_ONE_CORE = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
_FEW_ROWS, _FEW_BYTES = 2**10, 2**20  # which one core reads or writes as fast as several do


def program(
    function: Callable[..., Any],
    *,
    changes: bool = False,
    static: tuple[int | str, ...] = (),
    on_one_core: bool = False,
) -> Callable[..., Any]:
    """Compile `function(buffer, state, ...)`. Inside another `jit`, that one compiles it.

    On a CPU, XLA by default moves small operations from core to core. Here they run in order: an
    `add` to one env took 36 us instead of 97 us (two cores, jax 0.10.2).

    Args:
      function: Pure function of a buffer, a state, and further arguments.
      changes: Donate `state`, for functions that return a new one. Default: False.
      static: Names of static arguments, and places of those that may be given by place.
        Default: none.
      on_one_core: Divide no operation among the cores of a CPU, for programs that touch little.
        Default: False.

    Returns:
      A function with the same arguments.
    """

    @functools.cache
    def compiled() -> Any:
        # The buffer is a pytree without leaves. Its value is part of the compilation's key, so
        # equal buffers share one compilation.
        return jax.jit(
            function,
            donate_argnums=1 if changes else (),
            static_argnums=tuple(one for one in static if isinstance(one, int)) or None,
            static_argnames=tuple(one for one in static if isinstance(one, str)),
            **options_here(on_one_core),
        )

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        # JAX refuses options of a compiler inside of another `jit`.
        run = function if checks.is_tracing() else compiled()
        return run(*arguments, **options)

    return call


@functools.cache
def options_here(on_one_core: bool = False) -> dict[str, Any]:
    """Return options of `jax.jit` for CPUs; {} on other platforms, or if JAX or XLA rejects them.

    Args:
      on_one_core: As for `program`. Default: False.
    """
    options: dict[str, Any] = {
        "compiler_options": _CPU_OPTIONS | (_ON_ONE_CORE if on_one_core else {})
    }
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, **options).lower().compile()
    except Exception:
        return options_here() if on_one_core else {}
    return options


@functools.cache
def method(name: str, on_one_core: bool = False) -> Callable[..., Any]:
    """Compile a method of any buffer: `method("add")(buffer, state, ...)` returns
    `buffer.add(state, ...)`.

    Args:
      name: Name of the method.
      on_one_core: As for `program`. That of priorities of a `ReplayBuffer` always is.
        Default: False.
    """

    def call(buffer: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(buffer, name)(state, *arguments, **options)

    call.__name__ = call.__qualname__ = name
    verb = VERBS[name]
    if verb.changes == "sampler":
        return _sampler_method(call)
    if name == "adopt":
        return _adopts
    changes = verb.changes is not None
    made = program(call, changes=changes, static=verb.static, on_one_core=on_one_core)
    if name != "map_rows":
        return made
    return lambda buffer, state, function, *rest, **options: made(
        buffer, state, identified(function), *rest, **options
    )


def _sampler_method(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a method that changes only the sampler's part of a state.

    The rows go in, and the new state shares them with the old one. To take each array of the rows
    out of the program again would cost 2 us an array.
    """

    def change(buffer: Any, sampler: Any, rows: Any, *arguments: Any, **options: Any) -> Any:
        return call(buffer, rows.replace(sampler=sampler), *arguments, **options).sampler

    change.__name__ = change.__qualname__ = call.__name__
    of_sampler = program(change, changes=True, on_one_core=True)
    of_state = program(call, changes=True)

    @functools.wraps(call)
    def run(buffer: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(state, ReplayState):  # the states of a mixture
            return of_state(buffer, state, *arguments, **options)
        rows = state.replace(sampler=None)
        return rows.replace(sampler=of_sampler(buffer, state.sampler, rows, *arguments, **options))

    return run


rebuild = program(rebuilt, static=("is_intact",))
_adopt_all = program(lambda buffer, state: buffer.adopt(state))
_rebuilt = program(lambda buffer, state: rebuilt(buffer, state, numbers_of(state)))


def _adopts(buffer: Any, state: Any) -> Any:
    """Call `buffer.adopt`. Steps that stay where they are do not go through the program."""
    if not isinstance(buffer, ReplayBuffer):  # several devices'
        return _adopt_all(buffer, state)
    state = check_adopted("adopt", buffer, state)
    steps = state.rows.steps
    if state.layout == buffer.layout():
        return state
    if not stays(state.layout, buffer.layout()):
        return _rebuilt(buffer, state)
    made = _rebuilt(buffer, state.replace(rows=state.rows.replace(steps=None)))
    return made.replace(rows=made.rows.replace(steps=steps))


class Jitted:
    """Compiled methods of a buffer, as `jaxreplay.jit` returns them.

    Args:
      buffer: As for `jaxreplay.jit`.
    """

    def __init__(self, buffer: Any):
        self.buffer = buffer
        self.__doc__ = buffer.__doc__  # what `help` shows

    def __repr__(self) -> str:
        return f"jaxreplay.jit({self.buffer!r})"

    def __reduce__(self) -> Any:
        return Jitted, (self.buffer,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.buffer, name)
        if (verb := VERBS.get(name)) is None or not verb.is_compiled:
            return found
        vars(self)[name] = made = _method_of(self.buffer, name, verb)
        return made

    def __dir__(self) -> list[str]:
        return [*{*super().__dir__(), *(name for name in dir(self.buffer) if name[0] != "_")}]


def unjitted(buffer: Any) -> Any:
    """Return the buffer of one that `jit` returned; any other one as it is."""
    return buffer.buffer if isinstance(buffer, Jitted) else buffer


def buffer_of(where: str, buffer: Any, hint: str = "") -> ReplayBuffer[Any]:
    """Return a `ReplayBuffer`, jitted or not, or raise a ValueError.

    Args:
      where: Name of the called function, for the error.
      buffer: A buffer.
      hint: End of the error. Default: none.
    """
    if not isinstance(own := unjitted(buffer), ReplayBuffer):
        raise ValueError(
            f"{where}: takes a ReplayBuffer, such as jaxreplay.uniform(...), got "
            f"{kind_of(buffer)}{hint}"
        )
    return own


def _method_of(buffer: Any, name: str, verb: Verb) -> Callable[..., Any]:
    """Return a compiled method of one buffer, which owns its arguments."""
    whole = getattr(buffer, "buffer", buffer)  # the one that a sharded buffer divides
    takes_steps = verb.takes_steps and getattr(whole, "autoreset", None) is not None
    # a buffer over several devices has no number of rows of a call
    count = verb.counts if isinstance(buffer, ReplayBuffer) else None
    most = None  # `few_rows` of the first state

    @functools.wraps(getattr(buffer, name))
    def call(state: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal most
        if takes_steps and arguments:
            arguments = (step_checks.by_field(arguments[0]), *arguments[1:])
        try:
            buffer.check_given(name, options)
            if options.get("envs") is not None:  # numbers that are known here, but not in a program
                step_checks.check_envs(name, options["envs"], state.layout, whole.num_envs)
            arguments, options = _owned(name, (arguments, options))
            few = False
            if count is not None and isinstance(state, ReplayState):
                most = few_rows(state) if most is None else most
                sizes = options.get("batch_size"), *arguments[1:2]  # by name, or after the key
                size = sizes[-1] if verb.reads else None
                few = (size if isinstance(size, int) else getattr(buffer, count)) <= most
            return method(name, few)(buffer, state, *arguments, **options)
        except TypeError:
            for argument in (*arguments, *options.values()):
                checks.check_storable(name, argument)
            raise
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error):
                check_not_deleted(name, state)
            raise

    return call


def programs(function: Callable[..., Any], **options: Any) -> list[Callable[..., Any]]:
    """Compile a function for all cores of a CPU, and for one, which is as fast for a few rows:
    `programs(f)[num_rows <= few_rows(state)]`.

    Args:
      function: As for `program`, as are the options.
    """
    return [program(function, on_one_core=few, **options) for few in (False, True)]


def few_rows(state: ReplayState) -> int:
    """Return the number of rows that one core of a CPU reads or writes as fast as several do."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.rows.steps))
    return min(_FEW_ROWS, _FEW_BYTES * state.layout.capacity // max(num_bytes, 1))


def jit(buffer: B) -> B:
    """Compile the methods of a buffer, for loops that are not one big `jit`.

    Methods that return a new state donate the old one, which changes the buffer in place; `adopt`
    shares the steps that stay where they are. Equal buffers share one compilation.

    The buffer's other members, such as `capacity`, `memory`, `episode_table` or a rollout's
    `advantages`, are attributes of the result, too. They are not compiled. `.buffer` is the buffer
    itself, and what takes a buffer also takes the result. `map_rows` is compiled once for each
    function.

    NumPy input is copied first. JAX may read an array after the call has returned. By then, an env
    that reuses its observation array may have written the next observation into it. Integers that
    JAX would cut to 32 bits are an error.

    Args:
      buffer: A `ReplayBuffer`, `Rollout`, `Groups` or `Mixture`, or the result of
        `jaxreplay.sharded`.

    Returns:
      A `jaxreplay.buffers.Jitted`, with the buffer's methods, compiled. A type checker sees the
      buffer itself.

    Raises:
      ValueError: `buffer` is no such buffer. A `Replay` compiles its methods itself, and so does a
        tiered buffer those that touch rows.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.jit(jr.items(capacity=8, num_envs=2, batch_size=4))
      >>> state = buffer.init({"x": jnp.zeros(3)})
      >>> state = buffer.add(state, {"x": jnp.ones((2, 3))})
      >>> int(buffer.size(state))
      2
    """
    buffer = unjitted(buffer)
    has_methods = hasattr(buffer, "add") or hasattr(buffer, "sample")
    if not (isinstance(buffer, Static) and has_methods) or isinstance(buffer, Sampler):
        raise ValueError(
            f"jit: takes a buffer, such as jaxreplay.uniform(...), got {buffer!r}; to compile a "
            "function use jax.jit. Call the methods of a Replay, or of a tiered buffer, as they "
            "are: they run compiled programs"
        )
    return cast(B, Jitted(buffer))


@functools.cache
def _is_numpy(kind: type) -> bool:
    return issubclass(kind, np.ndarray)


def _owned(where: str, tree: PyTree) -> Any:
    """Copy NumPy arrays, which an env may overwrite before JAX reads them."""
    if not any(map(_is_numpy, {*map(type, jax.tree_util.tree_leaves(tree))})):
        return tree

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        if isinstance(leaf, np.ma.MaskedArray) or checks.lost_integer(leaf) is not None:
            checks.check_storable(where, tree)
        return np.array(leaf)

    return jax.tree.map(own, tree)

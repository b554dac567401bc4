"""The timed programs, the same for each JAX library.

Each keeps one filled buffer alive and changes it in place: states are donated. `Case.mode` defines
an iteration. "call": one jitted call, with its dispatch; many calls follow each other, and the last
is waited for. "scan": one iteration of a `lax.scan` in one jitted program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from cases import Case
from steps import random_steps
from timing import stopwatch


class Drawn(NamedTuple):
    """A sampled batch, in a form common to all libraries."""

    kept: Any  # pytree, carried through the loop so that each of its leaves is computed
    reward: Any  # float32[B]
    index: Any
    probability: Any  # float32[B]
    is_valid: Any = None  # bool[B], if the library has it
    weight: Any = None  # float32[B], if the library has it


class Population:
    """A library's calls for many buffers at once, under `vmap`. All add the same steps."""

    is_compiled = False

    def __init__(self, library: "Library", size: int):
        self._library, self._size = library, size
        self.add = jax.vmap(library.add, in_axes=(0, None))
        self.update, self.weight = jax.vmap(library.update), jax.vmap(library.weight)

    def init(self, example: Any) -> Any:
        state = self._library.init(example)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], self._size, axis=0), state)

    def sample(self, state: Any, key: jax.Array) -> Drawn:
        return jax.vmap(self._library.sample)(state, jax.random.split(key, self._size))


class Library(Protocol):
    """Calls that every measured library has."""

    is_compiled: bool  # its methods are jitted, with the donation right, for calls from Python

    def init(self, example: Any) -> Any: ...
    def add(self, state: Any, step: Any) -> Any: ...
    def sample(self, state: Any, key: jax.Array) -> Drawn: ...
    def update(self, state: Any, index: Any, priority: jax.Array) -> Any: ...
    def weight(self, state: Any, drawn: Drawn) -> jax.Array: ...


def prepare(library: Library, case: Case) -> Callable[[], float]:
    """Fill a buffer and compile; return a function that measures microseconds per iteration."""
    if case.population:
        library = Population(library, case.population)
    steps = jax.tree.map(jnp.asarray, random_steps(case))
    keys = jax.random.split(jax.random.key(1), case.iterations)
    state = _filled(library, case, steps)
    if case.operation == "sample":
        sample = lambda state, key: library.sample(state, key).kept
        run = reading(case, sample, state, keys, library.is_compiled)
    elif case.operation == "add":
        run = _changing(case, library.add, state, steps, library.is_compiled)
    elif case.operation == "update":
        update = lambda state, x: library.update(state, *x)
        updates = _updates(case, library, state, keys)
        run = _changing(case, update, state, updates, library.is_compiled)
    else:
        drawn = jax.tree.map(
            lambda spec: jnp.zeros(spec.shape, spec.dtype),
            jax.eval_shape(library.sample, state, keys[0]),
        )
        run = _changing(
            case, _fused(library, case), (state, drawn.kept, jnp.float32(0)), (steps, keys)
        )
    return stopwatch(run, case.iterations)


def reading(
    case: Case, apply: Callable, state: Any, xs: Any, is_compiled: bool = False
) -> Callable[[], None]:
    """Return a function that runs `apply(state, x)` for each x and keeps the last result. If it
    `is_compiled`, calls are not jitted again."""
    if case.mode == "scan":
        first = jax.tree.map(
            lambda spec: jnp.zeros(spec.shape, spec.dtype), jax.eval_shape(apply, state, xs[0])
        )
        program = jax.jit(
            lambda state, xs: jax.lax.scan(lambda _, x: (apply(state, x), None), first, xs)[0]
        )
        inputs = [xs]
    else:
        program, inputs = apply if is_compiled else jax.jit(apply), _unstacked(case, xs)

    def run() -> None:
        result = None
        for x in inputs:
            result = program(state, x)
        jax.block_until_ready(result)

    return run


def _filled(library: Library, case: Case, steps: Any) -> Any:
    """Return the state of a buffer that has wrapped once.

    Memory that was never written may be one shared page of zeros, which is read too fast.
    """
    add_all = jax.jit(
        lambda state, steps: jax.lax.scan(
            lambda state, step: (library.add(state, step), None), state, steps
        )[0],
        donate_argnums=0,
    )
    state = library.init(jax.tree.map(lambda leaf: leaf[0, 0], steps))
    num_steps, num_envs = jax.tree.leaves(steps)[0].shape[:2]
    for _ in range(case.capacity // (num_steps * num_envs) + 2):
        state = add_all(state, steps)
    return jax.block_until_ready(state)


def _updates(case: Case, library: Library, state: Any, keys: jax.Array) -> tuple[Any, jax.Array]:
    """Return sampled indices and new priorities, leaves `[iterations, B]`; of a population
    `[iterations, P, B]`."""
    draw_all = jax.jit(
        lambda state, keys: jax.lax.map(lambda key: library.sample(state, key).index, keys)
    )
    members = (case.population,) * bool(case.population)
    shape = (case.iterations, *members, case.batch_size)
    priority = jax.random.uniform(jax.random.key(2), shape, minval=0.1)
    return draw_all(state, keys), priority


def _fused(library: Library, case: Case) -> Callable:
    """Return a step that adds, samples and, for a prioritized buffer, sets priorities from the
    sample."""

    def apply(carry: Any, x: Any) -> Any:
        state, _, loss = carry
        step, key = x
        state = library.add(state, step)
        drawn = library.sample(state, key)
        if case.form == "weights":
            loss += jnp.mean(library.weight(state, drawn) * drawn.reward)
        if case.buffer == "prioritized":
            priority = jnp.abs(drawn.reward) + 0.5
            if case.form not in ("weights", "carried"):
                priority += 0 * drawn.probability  # so that XLA computes them
            state = library.update(state, drawn.index, priority)
        return state, drawn.kept, loss

    return apply


def _changing(
    case: Case, apply: Callable, carry: Any, xs: Any, is_compiled: bool = False
) -> Callable[[], None]:
    """Return a function that runs `carry = apply(carry, x)` for each x. If it `is_compiled`, calls
    are not jitted again."""
    if case.mode == "scan":
        program = jax.jit(
            lambda carry, xs: jax.lax.scan(lambda carry, x: (apply(carry, x), None), carry, xs)[0],
            donate_argnums=0,
        )
        inputs = [xs]
    else:
        program = apply if is_compiled else jax.jit(apply, donate_argnums=0)
        inputs = _unstacked(case, xs)

    def run() -> None:
        nonlocal carry
        for x in inputs:
            carry = program(carry, x)
        jax.block_until_ready(carry)

    return run


def _unstacked(case: Case, xs: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], xs) for i in range(case.iterations)]

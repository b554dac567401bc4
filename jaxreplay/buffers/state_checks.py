"""Checks of states: made by another configuration, already donated, or changed outside of `jit`.

A state of another configuration would be read at wrong rows without an error. All checks use what
is known while tracing: shapes, dtypes, the structure, and the state's `Layout`. They cost nothing
in a compiled function.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util.aliases import PyTree, Specs
from jaxreplay._util.checks import check_leaves
from jaxreplay._util.names import kind_of
from jaxreplay.buffers.verbs import VERBS
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.state import ReplayState


def check_state(where: str, buffer: Any, state: Any) -> Any:
    """Return the state with JAX arrays in place of NumPy arrays. Warn if the call copies a large
    one, as changes outside of `jit` do, where nothing is donated.

    Args:
      where: Name of the method, for errors.
      buffer: A buffer with a class of states, such as a `ReplayBuffer`.
      state: Its leaves are arrays, tracers or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: The state is not of this buffer. The error names each leaf, or each part of the
        configuration, that differs.
    """
    if not isinstance(state, buffer._kind):
        raise of_another_kind(where, state, buffer._kind)
    found, structure = jax.tree.flatten(state)
    check_not_deleted(where, found)
    if problem := _problem(
        getattr(buffer, "_outline", buffer),
        structure,
        tuple((jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in found),
    ):
        raise ValueError(f"{where}: this state is not of this buffer: {problem}")
    if where in _COPYING and not any(isinstance(leaf, Tracer) for leaf in found):
        _warn_of_copy(where, buffer, found)
    return as_arrays(state)


def of_another_kind(where: str, state: Any, kind: type) -> ValueError:
    """Return the error for what is given in place of a state."""
    return ValueError(
        f"{where}: the state must be a {kind.__name__}, as init and add return it, got "
        f"{kind_of(state)}; the state comes first"
    )


@functools.lru_cache(maxsize=1024)
def _problem(buffer: Any, structure: Any, specs: tuple[Any, ...]) -> str:
    """Return what is wrong with a state, or "". Cached: all states with these shapes are alike."""
    state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*spec) for spec in specs])
    if isinstance(state, ReplayState) and (problem := _problem_of_rows(buffer, state)):
        return problem
    expected = jax.eval_shape(buffer._empty_like, state)
    try:
        check_leaves(
            "", state, expected, "A restored state needs a buffer with the same configuration."
        )
    except ValueError as error:
        return str(error).lstrip(":\n ")
    return ""


def _problem_of_rows(buffer: Any, state: ReplayState) -> str:
    """Return in what the configurations of a buffer and a state differ, or ""."""
    layout = state.layout
    if layout != (expected := buffer.layout(buffer.platform or layout.platform)):
        return "\n  ".join(
            ["it was made with another configuration", *_differences(layout, expected)]
        )
    if problem := agents_problem(buffer, state.rows.steps):
        return problem
    rows = {leaf.shape[:1] for leaf in stored_arrays.stored_leaves(state.rows.steps)}
    if rows != {(buffer.capacity,)}:
        got = (
            " and ".join("none" if not shape else f"{shape[0]:,}" for shape in sorted(rows)) or "no"
        )
        problem = f"its stored steps have {got} rows, but the buffer has capacity={buffer.capacity}"
        under_vmap = {leaf.shape[1:2] for leaf in stored_arrays.stored_leaves(state.rows.steps)}
        if under_vmap == {(buffer.capacity,)}:
            problem += (
                f"; it is {got} states, as `vmap` stacks them: take one, jax.tree.map(lambda leaf: "
                "leaf[0], state), or map the method over them"
            )
        return problem
    return ""


def agents_problem(buffer: Any, steps: PyTree) -> str:
    """Return what is wrong with the stored flags of agents, or ""."""
    stored = getattr(steps, "terminated", None)
    found = None if stored is None else stored.shape[-1]
    expected = getattr(buffer, "num_agents", None)
    if found == expected:
        return ""
    return f"its steps have num_agents={found}, but the buffer has num_agents={expected}"


def row_of(steps: PyTree, num_axes: int = 1) -> Any:
    """Return shapes and dtypes of one row of stored leaves, without their first axes."""
    return stored_arrays.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[num_axes:], leaf.dtype), steps
    )


def example_of(layout: Layout, steps: PyTree) -> Any:
    """Return shapes and dtypes of one env's step, or of an item, from the stored rows."""
    row = row_of(steps)
    if layout.autoreset is None:
        return row
    agents = () if row.terminated is None else row.terminated.shape
    flag = jax.ShapeDtypeStruct(agents, bool)
    final_obs = row.obs if layout.autoreset == "same_step" else None
    return row.replace(terminated=flag, truncated=flag, final_obs=final_obs)


_SAID = {"before": "rows before one (burn_in, stack)", "after": "rows after one (n_step, length)"}


def _differences(got: Any, expected: Specs) -> list[str]:
    """Return a line for each field that differs between two configurations."""
    lines = []
    for field in dataclasses.fields(expected):
        mine, other = getattr(expected, field.name), getattr(got, field.name)
        if mine != other:
            is_part = type(other) is type(mine) and dataclasses.is_dataclass(mine)
            lines += (
                _differences(other, mine)
                if is_part
                else [
                    f"{_SAID.get(field.name, field.name)}: the state's is {other!r}, "
                    f"this buffer's {mine!r}"
                ]
            )
    return lines


_LARGE_BYTES = 2**24
_COPYING = {name for name, verb in VERBS.items() if verb.changes and not verb.copies_little}
_warned: set[tuple[Any, str]] = set()


class CopyWarning(UserWarning):
    """A large buffer was copied, because a method that changes it was called outside of `jit`.

    With `jax.jit(buffer.add, donate_argnums=0)` or `jaxreplay.jit(buffer)`, the buffer is changed
    in place.
    """


def _warn_of_copy(where: str, buffer: Any, leaves: list[Any]) -> None:
    """Warn if a large state is changed outside of `jit`, where nothing is donated.

    It warns once for each buffer and method. The warning names the call of the method.
    """
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    if num_bytes >= _LARGE_BYTES and (buffer, where) not in _warned:
        _warned.add((buffer, where))
        warnings.warn(
            f"{where} was called outside of jit: it copies the whole buffer "
            f"({num_bytes / 2**20:,.0f} MiB) on every call. "
            f"Use {where} = jax.jit(buffer.{where}, donate_argnums=0), or "
            f"jaxreplay.jit(buffer).{where}, once before the loop.",
            CopyWarning,
            stacklevel=4,
        )


def check_not_deleted(where: str, tree: PyTree) -> None:
    """Raise a ValueError if an array was donated: XLA's own error does not explain the cause."""
    if any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
        for leaf in jax.tree.leaves(tree)
    ):
        raise ValueError(
            f"{where}: this state was donated to an earlier call, so its memory is in use by the "
            "state that the call returned. Use that one: state = buffer.add(state, step)"
        )


def as_arrays(state: Any) -> Any:
    """Return a state with JAX arrays in place of NumPy arrays, which `jax.device_get` and
    `flax.serialization` return."""
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(state)):
        return state
    return jax.tree.map(jnp.asarray, state)


def is_alive(state: Any) -> bool:
    """Return whether a state can still be used after a call failed to which it was donated."""
    try:
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(jax.block_until_ready(state)))
    except Exception:
        return False

"""Checks of states: one of another configuration would be read in the wrong places without a word,
one that was donated is gone, and one that is changed outside of `jit` is copied.

All of it is known while tracing: shapes, dtypes, the structure, and the `Layout` that a state
carries. It costs nothing at run time.
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
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import ReplayState


def check_donated(where: str, buffer: Any, state: Any) -> Any:
    """`check_state` for a method that changes the state, and a warning where that copies a large
    one."""
    state = check_state(where, buffer, state)
    warn_of_copy(buffer, where, state, stacklevel=4)
    return state


def check_state(where: str, buffer: Any, state: Any) -> Any:
    """Return the state, with JAX's arrays in place of NumPy's.

    Args:
      where: the method. buffer: a `ReplayBuffer`. state: arrays, or tracers, or
        `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: it is no state of this buffer; each leaf, or part of the configuration, that
        differs is named.
    """
    if not isinstance(state, ReplayState):
        raise ValueError(
            f"{where}: the state must be a ReplayState, what init gave or the last call returned, "
            f"got {_kind(state)}; the state comes first"
        )
    found, structure = jax.tree.flatten(state)
    check_not_deleted(where, found)
    if problem := _problem(
        buffer,
        structure,
        tuple((jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in found),
    ):
        raise ValueError(f"{where}: this state is not of this buffer: {problem}")
    return as_arrays(state)


@functools.lru_cache(maxsize=1024)
def _problem(buffer: Any, structure: Any, specs: tuple[Any, ...]) -> str:
    """What is wrong, or nothing. The same for all states of these shapes."""
    state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*spec) for spec in specs])
    layout = state.layout
    if layout != (expected := buffer.layout(buffer.platform or layout.platform)):
        return "\n  ".join(
            ["it was made with another configuration", *_differences(layout, expected)]
        )
    rows = {leaf.shape[:1] for leaf in stored_arrays.stored_leaves(state.streams.steps)}
    if rows != {(buffer.capacity,)}:
        got = (
            " and ".join("none" if not shape else f"{shape[0]:,}" for shape in sorted(rows)) or "no"
        )
        return f"its stored steps have {got} rows, of a buffer with capacity={buffer.capacity}"
    try:
        expected = jax.eval_shape(
            functools.partial(buffer._empty, platform=layout.platform),
            _example_of(layout, state.streams.steps),
        )
        check_leaves(
            "", state, expected, "A state restored from a file must be of an equal configuration."
        )
    except (ValueError, TypeError, AttributeError) as error:
        return str(error).lstrip(":\n ")
    return ""


def _example_of(layout: Layout, steps: PyTree) -> Any:
    """One env's step, or an item, from the stored ones."""
    row = stored_arrays.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), steps
    )
    if layout.autoreset is None:
        return row
    flag = jax.ShapeDtypeStruct((), bool)
    final_obs = row.obs if layout.autoreset == "same_step" else None
    return row.replace(terminated=flag, truncated=flag, final_obs=final_obs)


def _differences(got: Any, expected: Specs) -> list[str]:
    """Of two configurations of one kind, field by field."""
    if type(got) is not type(expected) or not dataclasses.is_dataclass(expected):
        return [f"it has {got!r}, this buffer {expected!r}"]
    lines = []
    for field in dataclasses.fields(expected):
        mine, other = getattr(expected, field.name), getattr(got, field.name)
        if mine != other:
            is_part = dataclasses.is_dataclass(mine)
            lines += (
                _differences(other, mine)
                if is_part
                else [f"{field.name}: the state's is {other!r}, this buffer's {mine!r}"]
            )
    return lines


def _kind(state: Any) -> str:
    if isinstance(state, dict | tuple | list):
        return f"a {type(state).__name__} of {len(state)}"
    return f"a {type(state).__name__}"


_LARGE_BYTES = 2**24
_warned: set[tuple[Any, str]] = set()


class CopyWarning(UserWarning):
    """An eager `add`, `extend` or `update_priorities` copied a large buffer, which a jitted and
    donated one would change in place."""


def warn_of_copy(buffer: Any, method: str, state: Any, stacklevel: int = 3) -> None:
    """Warn, once for each configuration and method, where a large state is changed outside of
    `jit`: eager operations donate nothing.

    `stacklevel`: of the user's call, which the warning names.
    """
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, Tracer) for leaf in leaves) or (buffer, method) in _warned:
        return
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    if num_bytes >= _LARGE_BYTES:
        _warned.add((buffer, method))
        warnings.warn(
            f"{method} was called outside of jit: it copies the whole buffer "
            f"({num_bytes / 2**20:,.0f} MiB) on every call. "
            f"Use {method} = jax.jit(buffer.{method}, donate_argnums=0), or "
            f"jaxreplay.jit(buffer).{method}, once before the loop.",
            CopyWarning,
            stacklevel=stacklevel,
        )


def check_not_deleted(where: str, tree: PyTree) -> None:
    """A ValueError for arrays that were donated; XLA's own error says nothing of why."""
    if any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
        for leaf in jax.tree.leaves(tree)
    ):
        raise ValueError(
            f"{where}: this state was handed to a call that took it over, so that its memory is "
            "used anew; go on with the one that the "
            "call returned: state = buffer.add(state, step)"
        )


def as_arrays(state: Any) -> Any:
    """Return a state with JAX's arrays in place of NumPy's, which `jax.device_get` and
    `flax.serialization` give."""
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(state)):
        return state
    return jax.tree.map(jnp.asarray, state)


def is_alive(state: Any) -> bool:
    """Whether a state can still be used after a call that was to take it over failed."""
    try:
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(jax.block_until_ready(state)))
    except Exception:
        return False

"""Whether a state is one of this buffer: a state of another configuration would be read in the wrong places, without a word.

All of it is known while tracing: shapes, dtypes, the structure, and the `Layout` that a state carries. It costs nothing at run time.
"""

import dataclasses
import functools
from typing import Any

import jax

from jaxreplay import leaves
from jaxreplay.checks import check_leaves
from jaxreplay.donation import as_arrays, check_not_gone, warn_of_copy
from jaxreplay.drawable import ReplayState
from jaxreplay.layout import Layout


def take_over(where: str, replay: Any, state: Any) -> Any:
    """`check_state` for a method that changes the state, and a warning where that copies a large one."""
    state = check_state(where, replay, state)
    warn_of_copy(replay, where, state, stacklevel=4)
    return state


def check_state(where: str, replay: Any, state: Any) -> Any:
    """Return the state, with JAX's arrays in place of NumPy's.

    Args:
      where: the method. replay: a `ReplayBuffer`. state: arrays, or tracers, or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: it is no state of this buffer; each leaf, or part of the configuration, that differs is named.
    """
    if not isinstance(state, ReplayState):
        raise ValueError(
            f"{where}: the state must be a ReplayState, what init gave or the last call returned, got {_kind(state)}; the state comes first"
        )
    found, structure = jax.tree.flatten(state)
    check_not_gone(where, found)
    if problem := _problem(replay, structure, tuple((jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in found)):
        raise ValueError(f"{where}: this state is not of this buffer: {problem}")
    return as_arrays(state)


@functools.lru_cache(maxsize=1024)
def _problem(replay: Any, structure: Any, specs: tuple[Any, ...]) -> str:
    """What is wrong, or nothing. The same for all states of these shapes."""
    state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*spec) for spec in specs])
    layout = state.layout
    if layout != (expected := replay.layout(layout.has_final_obs, replay.platform or layout.platform)):
        return "\n  ".join(["it was made with another configuration", *_differences(layout, expected)])
    rows = {leaf.shape[:1] for leaf in leaves.stored_leaves(state.streams.steps)}
    if rows != {(replay.capacity,)}:
        got = " and ".join("none" if not shape else f"{shape[0]:,}" for shape in sorted(rows)) or "no"
        return f"its stored steps have {got} rows, of a buffer with capacity={replay.capacity}"
    try:
        expected = jax.eval_shape(functools.partial(replay._empty, platform=layout.platform), _example_of(layout, state.streams.steps))
        check_leaves("", state, expected, "A state restored from a file must be of an equal configuration.")
    except (ValueError, TypeError, AttributeError) as error:
        return str(error).lstrip(":\n ")
    return ""


def _example_of(layout: Layout, steps: Any) -> Any:
    """One env's step, or an item, from the stored ones."""
    row = leaves.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), steps)
    if layout.autoreset is None:
        return row
    flag = jax.ShapeDtypeStruct((), bool)
    return row.replace(terminated=flag, truncated=flag, final_obs=row.obs if layout.has_final_obs else None)


def _differences(got: Any, expected: Any) -> list[str]:
    """Of two configurations of one kind, field by field."""
    if type(got) is not type(expected) or not dataclasses.is_dataclass(expected):
        return [f"it has {got!r}, this buffer {expected!r}"]
    lines = []
    for field in dataclasses.fields(expected):
        mine, other = getattr(expected, field.name), getattr(got, field.name)
        if mine != other:
            is_part = dataclasses.is_dataclass(mine)
            lines += _differences(other, mine) if is_part else [f"{field.name}: the state's is {other!r}, this buffer's {mine!r}"]
    return lines


def _kind(state: Any) -> str:
    if isinstance(state, dict | tuple | list):
        return f"a {type(state).__name__} of {len(state)}"
    return f"a {type(state).__name__}"

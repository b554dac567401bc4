"""Rows of one buffer in the state of another: `buffer.adopt` and `buffer.merge`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.checks import check_leaves
from jaxreplay._util.names import kind_of
from jaxreplay.buffers.state_checks import agents_problem, as_arrays, check_not_deleted, example_of
from jaxreplay.samplers import Sampler
from jaxreplay.samplers.sampler import plus
from jaxreplay.storage import newest_row, relayout, row_flags, stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState

# Forms of `autoreset` with the same rows: a step that is done, then its final row.
_SAME_ROWS = {"next_step", "same_step"}


def adopted(where: str, buffer: Any, state: ReplayState) -> ReplayState:
    """Return the state of a buffer, with the rows of another one's state."""
    state = check_adopted(where, buffer, state)
    return state if state.layout == buffer.layout() else rebuilt(buffer, state, numbers_of(state))


def rebuilt(
    buffer: Any, state: ReplayState, numbers: dict[str, jax.Array], is_intact: bool = True
) -> ReplayState:
    """Return the state of a buffer, of rows and counters.

    Args:
      buffer: The buffer.
      state: State with the same leaves, in which what is derived may be missing.
      numbers: What its sampler knew, as `numbers_of` returns it.
      is_intact: Whether the rows are those of one run, none of them missing. Default: True.
    """
    layout, before = buffer.layout(), state.layout
    if before.autoreset == "next_step" != layout.autoreset:  # a final row will not come
        owes = row_flags.owes_final_row(state.counters.last_flags)
        state, _ = newest_row.close(state, owes)
    is_aligned = layout.lockstep and not before.lockstep
    if before.num_envs == layout.num_envs and not (is_aligned and layout.autoreset is None):
        state, source = relayout.moved(layout, state)
        if source is not None:
            place = lambda values: relayout.rows_from(values, source, nothing(values))
            numbers = _placed(numbers, before, place)
        is_derived = source is None and state.rows.candidate_number is not None
        is_same = (before.window, before.has_table) == (layout.window, layout.has_table)
        if not (is_derived and is_same):
            state = relayout.derived(state, before if is_intact else None)
    else:
        empty = ReplayState.empty(layout, example_of(before, state.rows.steps), None)
        state, row = relayout.appended(empty, state)
        numbers = _placed(numbers, before, lambda values: _scattered(layout, row, values))
        state = relayout.derived(state, None)
    sampler = buffer.sampler._from_labelled(Sampleable.of(state), numbers)
    return state.replace(sampler=sampler)


def merged(buffer: Any, state: ReplayState, other: ReplayState) -> tuple[ReplayState, jax.Array]:
    """Return a buffer's state with the rows of another state appended, and the new row of each of
    these, as `relayout.appended` does. The first is donated."""
    other = check_adopted("merge", buffer, other)
    layout, before = state.layout, other.layout
    row_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    got, expected = (
        {"steps": stored_arrays.tree_map(row_of, one.rows.steps)} for one in (other, state)
    )
    check_leaves("merge", got, expected, "Both states must have the same leaves.")
    _check_dealt("merge", before, layout)
    numbers, its = numbers_of(state), numbers_of(other)
    if layout.sampler is not None and before.sampler != layout.sampler:
        sampleable, sampler = Sampleable.of(other), buffer.sampler
        its = sampler._labelled(sampler._from_labelled(sampleable, its), sampleable)
    state, row = relayout.appended(state, other)
    counts = set() if layout.sampler is None else layout.sampler._all_counts()
    for name, values in numbers.items():
        if values.shape[:1] == (layout.capacity,):
            own = its.get(name, jnp.full(before.capacity, nothing(values), values.dtype))
            numbers[name] = values.at[row].set(own, mode="drop", unique_indices=True)
        elif name in counts:
            numbers[name] = plus(values, its.get(name, jnp.zeros_like(values)))
        elif not values.ndim and jnp.issubdtype(values.dtype, jnp.floating):
            numbers[name] = jnp.maximum(values, its.get(name, values))
    state = relayout.derived(state, None)
    sampler = buffer.sampler._from_labelled(Sampleable.of(state), numbers)
    return state.replace(sampler=sampler), row


def check_adopted(where: str, buffer: Any, state: Any) -> ReplayState:
    """Return a state with JAX arrays, or raise a ValueError if a buffer cannot take its rows."""
    if not isinstance(state, ReplayState):
        raise ValueError(f"{where}: takes the state of a ReplayBuffer, got {kind_of(state)}")
    check_not_deleted(where, jax.tree.leaves(state))
    layout, forms = state.layout, (state.layout.autoreset, buffer.autoreset)
    if not are_alike(*forms):
        raise ValueError(
            f"{where}: autoreset: the state's is {forms[0]!r}, this buffer's {forms[1]!r}; rows of "
            'different forms mean different things, but for "next_step" and "same_step"'
        )
    num_rows = {leaf.shape[0] for leaf in jax.tree.leaves(state.rows)}
    if num_rows != {layout.capacity}:
        raise ValueError(
            f"{where}: the state's arrays have {sorted(num_rows)} rows, but its layout "
            f"{layout.capacity:,}; use jax.vmap for a population, and the state of one shard"
        )
    if problem := agents_problem(buffer, state.rows.steps):
        raise ValueError(f"{where}: the state cannot be adopted: {problem}")
    own = buffer.layout()
    buffer.view.check(where, own, example_of(layout, state.rows.steps))
    if layout.num_envs != own.num_envs or (own.lockstep and not layout.lockstep):
        _check_dealt(where, layout, own)
    return as_arrays(state)


def are_alike(autoreset: Any, other: Any) -> bool:
    """Return whether stored rows mean the same with two forms of `autoreset`."""
    return autoreset == other or _SAME_ROWS.issuperset((autoreset, other))


def _check_dealt(where: str, before: Layout, layout: Layout) -> None:
    """Raise a ValueError if rows cannot be dealt to other envs."""
    if layout.autoreset is None and layout.window.length > 1:
        raise ValueError(
            f"{where}: num_envs: the state's is {before.num_envs}, this buffer's "
            f"{layout.num_envs}, but items have no episodes, so that a window of "
            f"{layout.window.length} rows would reach from the items of one env into those of "
            "another; keep num_envs and allow_mask"
        )


def numbers_of(state: ReplayState) -> dict[str, jax.Array]:
    """Return what the sampler of a state knows, by names that tell its class."""
    sampler: Sampler | None = state.layout.sampler
    return {} if sampler is None else sampler._labelled(state.sampler, Sampleable.of(state))


def stored(state: ReplayState) -> dict[str, Any]:
    """Return the arrays [N, ...] of a state's rows from which it can be rebuilt: shared, not
    copied."""
    return {"steps": state.rows.steps, "flags": state.rows.flags}


@jax.jit
def canonical(state: ReplayState) -> dict[str, Any]:
    """Return what a state is rebuilt from beside its rows, copied: counters, [E] by name, and what
    the sampler knows, in a form for any layout."""
    counters = {name: getattr(state.counters, name) for name in state.layout.counter_names}
    found = {"counters": counters, "sampler": numbers_of(state)}
    return jax.tree.map(jnp.copy, found)


def _placed(numbers: dict[str, jax.Array], before: Layout, place: Any) -> dict[str, jax.Array]:
    """Return numbers of rows at their new places. Others stay as they are."""
    return {
        name: place(values) if values.shape[:1] == (before.capacity,) else values
        for name, values in numbers.items()
    }


def _scattered(layout: Layout, row: jax.Array, values: jax.Array) -> jax.Array:
    """Return [N, ...] with the values of old rows, [M, ...], at their new rows, int32[M]."""
    empty = jnp.full((layout.capacity, *values.shape[1:]), nothing(values), values.dtype)
    return empty.at[row].set(values, mode="drop", unique_indices=True)


def nothing(values: Any) -> Any:
    """Return the number of a row that has none: NaN, -1 or, if it is unsigned or bool, 0."""
    if jnp.issubdtype(values.dtype, jnp.inexact):
        return jnp.nan
    return -1 if jnp.issubdtype(values.dtype, jnp.signedinteger) else 0

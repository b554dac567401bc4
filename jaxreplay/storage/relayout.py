"""Rebuild a state of one layout from the rows of another.

Rows are what happened: steps, flags, and each stream's position, fill and lap. All else is derived
from them: candidate numbers, skipped, pending and expired rows, and the episode table. `moved` and
`appended` put rows in their places, and `derived` computes the rest. All are O(capacity).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay.storage import newest_row, ring, row_flags, stored_arrays, writes
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.state import Counters, EpisodeTable, ReplayState, Rows, at


def stays(before: Layout, layout: Layout) -> bool:
    """Return whether each row of one layout has the same place in another."""
    sizes = lambda one: (one.num_envs, one.length, one.traits.has_tiles)
    return sizes(before) == sizes(layout) and (before.lockstep or not layout.lockstep)


def moved(layout: Layout, state: ReplayState) -> tuple[ReplayState, jax.Array | None]:
    """Put the newest rows of each stream that fit into rings of another length or platform.

    A row keeps its number in its stream, so its position is its number modulo the length. If all
    streams of the layout step together and those of the state did not, shorter streams get rows
    without a step before their own.

    Args:
      layout: The new layout, with as many envs as the state.
      state: The state. Donated.

    Returns:
      The state with the new layout, in which nothing is derived; int32[N], the old row of each new
      one, the old capacity for none, or None if each row stays where it is.
    """
    before, counters = state.layout, state.counters
    values = {name: getattr(counters, name) for name in before.counter_names}
    rows, source = state.rows, None
    is_aligned = layout.lockstep and not before.lockstep
    if layout.length != before.length or is_aligned:
        filled = jnp.minimum(counters.filled, layout.length)
        if is_aligned:
            values["filled"] = jnp.full_like(filled, filled.max())
            lap, position = ring.divide(values["filled"], layout.length)
        else:
            values["filled"] = filled
            lap, position = ring.moved(
                counters.lap, counters.position, before.length, layout.length
            )
        values |= {"lap": lap, "position": position}
        age = layout.wrap(position[:, None] - 1 - ring.arange(layout.length))
        old = before.wrap(counters.position[:, None] - 1 - jnp.minimum(age, before.length - 1))
        is_held = age < filled[:, None]
        source = jnp.where(is_held, before.row(before.envs()[:, None], old), before.capacity)
        source = source.reshape(-1)
        rows = jax.tree.map(lambda leaf: rows_from(leaf, source), rows)
        if is_aligned:
            flags = jnp.where(source < before.capacity, rows.flags, jnp.uint8(row_flags.NO_STEP))
            rows = rows.replace(flags=flags)
    return _with(layout, state, rows, values), source


def rows_from(values: jax.Array, source: jax.Array, fill: Any = 0) -> jax.Array:
    """Return values of rows at new places: [N, ...].

    Args:
      values: [M, ...], of old rows.
      source: int32[N], the old row of each new one; M for none.
      fill: Value of rows without an old one. Default: 0.
    """
    return values.at[source].get(mode="fill", fill_value=fill)


def appended(state: ReplayState, other: ReplayState) -> tuple[ReplayState, jax.Array]:
    """Append the rows of another state.

    The streams of the other are dealt out in turn, to the envs with the fewest rows first.
    Unfinished episodes end, as by `newest_row.close`. An episode whose first rows are overwritten
    begins with its oldest row, if other rows lie before it. If all streams of the state step
    together, those that get fewer rows get rows without a step before them, which are never
    sampled. Items have no order, so they are dealt one by one; the oldest are left out if they
    cannot be divided.

    Args:
      state: The state. Donated.
      other: State with the same leaves and `autoreset`, of any capacity and number of envs.

    Returns:
      The state, in which nothing is derived; int32[M], the new row of each row of the other, the
      capacity where it is not kept.
    """
    layout, its = state.layout, other.layout
    has_flags = layout.autoreset is not None
    if has_flags:
        state, _ = newest_row.close(state, jnp.ones(layout.num_envs, bool))
        other, _ = newest_row.close(other, jnp.ones(its.num_envs, bool))
    env, nth, count = _dealt(state, other) if has_flags else _divided(layout, other)
    counters = state.counters
    num_rows = jnp.full_like(count, count.max()) if layout.lockstep else count
    nth = jnp.where(nth >= 0, nth + at(num_rows - count, env), nth)
    # of the rows that go to one ring, the newest that fit
    is_kept = other.is_written(ring.arange(its.capacity)) & (nth >= 0)
    is_kept &= at(num_rows, env) - nth <= layout.length
    place = at(counters.position, env) + ring.divide(jnp.maximum(nth, 0), layout.length)[1]
    row = jnp.where(is_kept, layout.row(env, layout.wrap(place)), layout.capacity)
    plain = stored_arrays.tree_map(stored_arrays.values, other.rows.steps)
    rows = state.rows.replace(
        steps=stored_arrays.tree_map(
            lambda leaf, new: stored_arrays.write(leaf, row, new), state.rows.steps, plain
        )
    )
    num_laps, position = ring.divide(counters.position + num_rows, layout.length)
    if has_flags:
        ahead = ring.forward(counters.position[:, None], ring.arange(layout.length), layout.length)
        is_new = (ahead < num_rows[:, None]).reshape(-1)
        flags = jnp.where(is_new, jnp.uint8(row_flags.NO_STEP), rows.flags)
        # A stream that comes after other rows begins an episode, also where it had gone round: no
        # window may reach back into the rows before it.
        its_row, new = ring.arange(its.capacity), other.rows.flags
        oldest = other.age(its_row) == at(other.counters.filled, its.split(its_row)[0]) - 1
        follows = (nth > 0) | (at(counters.filled, env) > 0)
        opens = oldest & follows & ~row_flags.has_no_action(new)
        new = jnp.where(opens, new | row_flags.FIRST, new)
        rows = rows.replace(flags=stored_arrays.write(flags, row, new))
    values = {name: getattr(counters, name) for name in layout.counter_names} | {
        "position": position,
        "filled": jnp.minimum(counters.filled + num_rows, layout.length),
        "lap": counters.lap + num_laps.astype(jnp.uint32),
    }
    return _with(layout, state, rows, values), row


def _dealt(state: ReplayState, other: ReplayState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Deal out whole streams in turn, to the envs with the fewest rows first.

    Returns:
      int32[M], the env of each row of the other; int32[M], its place among the env's new rows;
      int32[E], the number of new rows of each env.
    """
    layout, its, row = state.layout, other.layout, ring.arange(other.layout.capacity)
    order = jnp.argsort(state.counters.filled, stable=True).astype(jnp.int32)
    stream, _ = its.split(row)
    env = at(order, ring.divide(stream, layout.num_envs)[1])
    filled = other.counters.filled
    num_turns = -(-its.num_envs // layout.num_envs)
    turns = jnp.pad(filled, (0, num_turns * layout.num_envs - its.num_envs))
    turns = turns.reshape(num_turns, layout.num_envs)
    before = (jnp.cumsum(turns, axis=0, dtype=jnp.int32) - turns).reshape(-1)
    nth = at(before, stream) + at(filled, stream) - 1 - other.age(row)
    return env, nth, jnp.zeros_like(order).at[order].set(turns.sum(axis=0, dtype=jnp.int32))


def _divided(layout: Layout, other: ReplayState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Deal out rows one by one, the oldest first, equally many to each env. Return as `_dealt`."""
    its = other.layout
    age = its.length - 1 - ring.arange(its.length)
    is_row = age[:, None] < other.counters.filled
    rank = jnp.cumsum(is_row.reshape(-1), dtype=jnp.int32).reshape(is_row.shape) - 1
    count, rest = ring.divide(rank[-1, -1] + 1, layout.num_envs)
    row = ring.arange(its.capacity)
    stream, _ = its.split(row)
    rank = rank[its.length - 1 - other.age(row), stream] - rest
    nth, env = ring.divide(jnp.maximum(rank, 0), layout.num_envs)
    return env, jnp.where(rank < 0, -1, nth), jnp.broadcast_to(count, (layout.num_envs,))


def _with(layout: Layout, state: ReplayState, rows: Rows, values: dict[str, PyTree]) -> ReplayState:
    """Return a state of a layout, with rows and counters."""
    has_tiles = layout.traits.has_tiles
    if has_tiles != state.layout.traits.has_tiles:
        plain = stored_arrays.tree_map(stored_arrays.values, rows.steps)
        every = ring.arange(layout.capacity)

        def stored(values: jax.Array) -> PyTree:
            row = jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
            return stored_arrays.write(
                stored_arrays.zeros(layout.capacity, row, has_tiles), every, values
            )

        rows = rows.replace(steps=jax.tree.map(stored, plain))
    counters = Counters.zeros(layout).set(**values)
    return ReplayState(rows, counters, None)


def derived(state: ReplayState, before: Layout | None) -> ReplayState:
    """Compute what follows from the rows.

    Where an episode ends between two steps, its last row becomes a final row if the window of the
    layout needs that (`newest_row.close`).

    Args:
      state: A state without a sampler's state, from `moved` or `appended`. Donated.
      before: The layout that was last derived from the rows; None if they come from several states,
        or some are missing.

    Returns:
      The state. Candidate numbers are those of before, unless other rows are candidates now; then
      they are larger than all before.
    """
    layout, window, counters = state.layout, state.layout.window, state.counters
    filled, length = counters.filled, layout.length
    if layout.autoreset is None:
        pending = jnp.minimum(filled, window.after or 0)
        state = state.replace(counters=counters.set(num_pending=pending))
        return _with_expired(state)
    # The whole ring is a block, which is counted again: [length, E], in the order of time.
    place = ring.arange(length)[:, None]
    is_written = place >= length - filled
    row = layout.row(layout.envs(), layout.wrap(counters.position + place))
    old = at(state.rows.flags, row.T).T

    # Ends of episodes between two steps: their last rows become final.
    closes = is_written & layout.closes_episode(old)
    is_first = is_written & ((old & row_flags.FIRST) != 0)
    is_next_first = jnp.append(
        is_first[1:], layout.closes_episode(counters.last_flags)[None], axis=0
    )
    is_seam = is_written & ~closes & is_next_first
    flags, is_final = newest_row.ended(window, old, is_seam)

    # Candidates count from the first stored transition of each episode or, across episodes, of the
    # stream. If the period stays, so do the SKIPPED flags.
    skips_by = lambda one: (
        one.needs_next_obs,
        one.period,
        one.period > 1 and one.crosses_episodes,
    )
    is_new = before is None or skips_by(before.window) != skips_by(window)
    if is_new:
        flags = flags & jnp.uint8(~row_flags.SKIPPED & 0xFF)
    if not window.needs_next_obs:
        flags = row_flags.skip_without_action(flags)
    phase = None
    if is_new and window.period > 1:
        phase, flags = writes.skipped(layout, jnp.zeros_like(filled), flags, is_written)

    # The counts stay, unless other rows are candidates now. Any ordinal would do for the next row,
    # but a restored state equals that which was saved. (A longer ring's may be too large.)
    is_candidate = is_written & ((flags & window.no_candidate) == 0)
    count = is_candidate.sum(axis=0, dtype=jnp.uint32)
    is_same = before is not None and _candidates_of(before.window) == _candidates_of(window)
    ends = (closes | is_seam) & row_flags.is_of_episode(flags)
    if layout.has_table:
        counters = counters.set(ordinal=ring.divide(counters.ordinal, length)[1])
    num_ends = ends.sum(axis=0, dtype=jnp.int32)
    counters = writes.taken_back(counters, filled, count if is_same else 0, num_ends)
    counters, written = writes.counted(counters, flags, is_written, ends)
    # The newest row's flags are not the last ones after an end that needs no final row.
    last_flags = state.counters.last_flags
    is_newest = is_final[-1] | (((old[-1] ^ last_flags) & ~row_flags.SKIPPED) == 0)
    last_flags = jnp.where(is_newest, counters.last_flags, last_flags)
    counters = counters.set(last_flags=last_flags, phase=phase)

    zeros, table = jnp.zeros(layout.capacity, jnp.int32), None
    # Inverse of the order of time. A gather of all rows takes half the time of a scatter.
    in_time = ring.forward(state.counters.position[:, None], place.T, length)
    of_rows = lambda values: jnp.take_along_axis(values.T, in_time, axis=1).reshape(-1)
    if layout.has_table:
        _, position = layout.split(written.row)
        put = lambda entry: stored_arrays.write(zeros, entry.T, position.T)
        ends, starts = put(written.end_entry), put(written.start_entry)
        table = EpisodeTable(of_rows(written.ordinal), ends, starts)
    rows = Rows(state.rows.steps, of_rows(flags), of_rows(written.candidate_number), table)
    return _with_expired(state.replace(rows=rows, counters=counters))


def _with_expired(state: ReplayState) -> ReplayState:
    return state.replace(counters=state.counters.set(num_expired=writes.count_expired(state)))


def _candidates_of(window: Window) -> tuple[object, ...]:
    """Return what decides which rows are candidates."""
    crosses = window.crosses_episodes and window.period > 1
    gives_up = window.after != 0, window.after is None or window.crosses_episodes
    return window.period, crosses, window.completed_by, *gives_up

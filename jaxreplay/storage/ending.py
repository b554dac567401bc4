"""End of episodes between two steps, where an env was reset and no step says so.

The newest step of such an episode has no next observation. So its row is written again, as the
episode's final row: its observation is the last one known, and its transition is given up. The
windows before it are complete, as after any final row. No head moves.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.episodes import EpisodeState
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import ReplayState, Sampleable, WriteEffect, effect_of
from jaxreplay.storage.streams import Written


def end(state: ReplayState, mask: jax.Array) -> tuple[ReplayState, WriteEffect | None]:
    """End the episode of each stream, after its newest step.

    A terminated row that is sampleable already stays so, since its target reads no next
    observation; its final row does not come.

    Args:
      state: The buffer's state. Donated.
      mask: bool[E]; False keeps a stream as it is.

    Returns:
      The new state, whose sampler is still to observe the effect; the effect, None if the window is
      unbounded.
    """
    layout, table, counters = state.layout, state.episodes, state.streams.counters
    last_flags, stored_flags = counters.last_flags, state.streams.flags
    assert last_flags is not None
    assert stored_flags is not None
    assert counters.num_candidates is not None
    is_first, is_candidate = (
        (last_flags & row_flags.FIRST) != 0,
        (last_flags & row_flags.NO_CANDIDATE) == 0,
    )
    is_empty = counters.filled == 0
    is_open = mask & ~is_empty & ~layout.closes_episode(last_flags)
    ends = is_open & (True if counters.num_pending is None else counters.num_pending > 0)

    num_pending, phase = counters.num_pending, counters.phase
    if num_pending is not None and not layout.window.crosses_episodes:
        num_pending = jnp.where(ends, 0, num_pending)
    if phase is not None:
        before = jnp.where(phase > 0, phase - 1, layout.window.period - 1)
        phase = jnp.where(ends, before, phase)
    # The next row opens an episode, also after a clear.
    flags = jnp.where(ends, last_flags & row_flags.FIRST | row_flags.TRUNCATED, 0)
    flags = flags.astype(jnp.uint8) | jnp.uint8(row_flags.FINAL)
    streams = state.streams.with_counters(
        last_flags=jnp.where(is_open | (mask & is_empty), flags, last_flags),
        num_candidates=counters.num_candidates - (ends & is_candidate).astype(jnp.uint32),
        phase=phase,
        num_pending=num_pending,
    )
    position = layout.wrap(counters.position - 1)  # of the newest row
    row = jnp.where(ends, layout.row(layout.envs(), position), layout.capacity)
    effect = None
    if layout.window.is_bounded:
        after = dataclasses.replace(
            Sampleable.of(state), streams=streams, num_pending=streams.counters.num_pending
        )
        effect = _effect(Sampleable.of(state), after, row, flags, ends)
    streams = streams.replace(flags=stored_arrays.write(stored_flags, row, flags))
    if table is not None:
        # A final row that opens an episode belongs to none.
        table = _ended(layout, table, is_open & ~(ends & is_first), position)
    return state.replace(streams=streams, episodes=table), effect


def _effect(
    before: Sampleable, after: Sampleable, row: jax.Array, flags: jax.Array, ends: jax.Array
) -> WriteEffect:
    """Return the effect: the newest rows no longer wait, and are written again as final rows.

    Args:
      before: The sampleable rows before.
      after: The sampleable rows after, with the heads of `before`.
      row: int32[E], the newest rows; the capacity where none is written again.
      flags: uint8[E], of these rows.
      ends: bool[E], whether the newest row no longer waits.
    """
    written = Written(
        row=row[None],
        is_written=(row < after.layout.capacity)[None],
        flags=flags[None],
        age=jnp.zeros_like(row)[None],
        num_rows=jnp.zeros_like(row),
    )
    effect = effect_of(before, after, written)
    place = ring.arange(len(effect.row))[:, None]
    waits_no_more = ends & (effect.age == 0) & (place < (after.layout.window.after or 0))
    return effect._replace(
        became_sampleable=effect.became_sampleable & ~waits_no_more,
        is_gone=jnp.zeros_like(effect.is_gone),
        age=jnp.where(waits_no_more, after.layout.length, effect.age),
    )


def _ended(
    layout: Layout, table: EpisodeState, ends: jax.Array, position: jax.Array
) -> EpisodeState:
    """Return the table with the current episode ended at a position, int32[E], where `ends`."""
    entry = jnp.where(ends, layout.row(layout.envs(), table.current), layout.capacity)
    return table.replace(
        end_position=table.end_position.at[entry].set(position, mode="drop", unique_indices=True),
        current=layout.wrap(table.current + ends),
        is_open=table.is_open & ~ends,
    )

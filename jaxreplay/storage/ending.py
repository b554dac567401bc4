"""End of episodes between two steps, where an env was reset and no step says so.

The newest step of such an episode has no next observation. So its row becomes the episode's final
row: its observation is the last one known, and its transition is given up. The windows before it
are complete, as after any final row. No row is written, and no head moves.

If the episode table tells an episode's start by the end of the one before, a final row must not be
an episode's only row. Such a row is removed: the next step overwrites it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay.storage import row_flags, stored_arrays
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

    Raises:
      ValueError: The state has an episode table, and rows cannot be removed from one stream alone.
    """
    layout, window, table = state.layout, state.layout.window, state.episodes
    counters = state.streams.counters
    last_flags, candidates = counters.last_flags, counters.num_candidates
    stored_flags = state.streams.flags
    assert last_flags is not None
    assert candidates is not None
    assert stored_flags is not None
    has = lambda bits: (last_flags & bits) != 0
    is_empty = counters.filled == 0
    is_pending = True if counters.num_pending is None else counters.num_pending > 0
    is_open = mask & ~is_empty & ~layout.closes_episode(last_flags)
    ends = is_open & is_pending

    removed = jnp.zeros_like(ends)
    if table is not None and table.start_position is None:
        if layout.lockstep or window.crosses_episodes:
            raise ValueError(
                "end_streams: this buffer looks episodes up, and all its envs step together or its "
                "windows cross episodes: make it with allow_mask=True and windows within episodes, "
                "or flag the last step as truncated when you add it"
            )
        removed = ends & has(row_flags.FIRST)
    closed = ends & ~removed
    position = layout.wrap(counters.position - 1)  # of the newest row
    flags = (last_flags & row_flags.FIRST) | jnp.uint8(row_flags.FINAL | row_flags.TRUNCATED)
    num_pending, phase = counters.num_pending, counters.phase
    if num_pending is not None and not window.crosses_episodes:
        num_pending = jnp.where(ends, 0, num_pending)
    if phase is not None:
        before = jnp.where(phase > 0, phase - 1, window.period - 1)
        phase = jnp.where(ends & ~has(row_flags.FINAL), before, phase)
    streams = state.streams.with_counters(
        # the next row opens an episode, also after a clear
        last_flags=jnp.where(
            closed,
            flags,
            jnp.where(is_open | (mask & is_empty), jnp.uint8(row_flags.FINAL), last_flags),
        ),
        num_candidates=candidates - (ends & ~has(row_flags.NO_CANDIDATE)).astype(jnp.uint32),
        phase=phase,
        num_pending=num_pending,
    )
    effect = None
    if window.is_bounded:
        after = dataclasses.replace(Sampleable.of(state), streams=streams)
        if num_pending is not None:
            after = dataclasses.replace(after, num_pending=num_pending)
        effect = effect_of(Sampleable.of(state), after, _nothing(layout))
        is_ended = (effect.age == 0) & ends
        effect = effect._replace(
            became_sampleable=effect.became_sampleable & ~is_ended,
            is_gone=jnp.zeros_like(effect.is_gone),
        )

    row = jnp.where(closed, layout.row(layout.envs(), position), layout.capacity)
    streams = streams.with_counters(
        position=jnp.where(removed, position, counters.position),
        filled=counters.filled - removed,
        lap=counters.lap - (removed & (counters.position == 0)).astype(jnp.uint32),
    ).replace(flags=stored_arrays.write(stored_flags, row, flags))
    if table is not None:
        # A final row that opens an episode belongs to none.
        ends_episode = (closed & ~has(row_flags.FIRST)) | (is_open & ~ends)
        entry = jnp.where(ends_episode, layout.row(layout.envs(), table.current), layout.capacity)
        table = table.replace(
            end_position=table.end_position.at[entry].set(
                position, mode="drop", unique_indices=True
            ),
            current=layout.wrap(table.current + ends_episode),
            is_open=table.is_open & ~(ends_episode | removed),
        )
    return state.replace(streams=streams, episodes=table), effect


def _nothing(layout: Layout) -> Written:
    """Return the rows of a step that no env took."""
    none = jnp.zeros((1, layout.num_envs), jnp.int32)
    return Written(
        row=jnp.full_like(none, layout.capacity),
        is_written=none.astype(bool),
        flags=none.astype(jnp.uint8),
        age=none,
        num_rows=none[0],
    )

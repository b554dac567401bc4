"""Changes of each stream's newest row: close its episode, or reopen it.

`close` ends episodes between two steps, where an env was reset and no step says so. The newest step
of such an episode has no next observation. So its row becomes the episode's final row: its
observation is the last one known, and its transition is given up, unless the view reads no next
observation. The windows before it are complete, as after any final row. No head moves.

`reopen` and `extend` are for libraries that add whole transitions, with the next observation of
every step, and sample them right away. Observations are stored once: a next observation is the row
after its step. So each call ends every episode with a final row, as a truncation does, and the next
call removes the final rows of the episodes that continue. In between, the buffer is like any other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay.storage import ring, row_flags, stored_arrays, writes
from jaxreplay.storage.layout import Window
from jaxreplay.storage.state import ReplayState
from jaxreplay.storage.writes import WriteEffect


def close(state: ReplayState, mask: jax.Array) -> tuple[ReplayState, WriteEffect | None]:
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
    layout, counters, last_flags = state.layout, state.counters, state.counters.last_flags
    is_empty, phase = counters.filled == 0, counters.phase
    ends = mask & ~is_empty & ~layout.closes_episode(last_flags)
    flags, is_final = ended(layout.window, last_flags, ends)
    is_given_up = is_final & layout.window.needs_next_obs

    # The final row is counted in place of the newest one.
    is_candidate = is_final & ((last_flags & layout.window.no_candidate) == 0)
    before = writes.taken_back(counters, is_final, is_candidate, 0)
    new, written = writes.counted(before, flags[None], is_final[None], ends[None])
    if phase is not None:
        before = jnp.where(phase > 0, phase - 1, layout.window.period - 1)
        phase = jnp.where(is_given_up, before, phase)
    # The next row opens an episode, also after a clear.
    final = jnp.where(is_final, flags, jnp.uint8(row_flags.FINAL))
    last_flags = jnp.where(ends | (mask & is_empty), final, last_flags)
    position = layout.wrap(counters.position - 1)  # of the newest row
    row = jnp.where(is_final, layout.row(layout.envs(), position), layout.capacity)
    rows = state.rows.replace(flags=stored_arrays.write(state.rows.flags, row, flags))
    if (table := rows.table) is not None:  # rows of a checkpoint have none yet
        end_position = stored_arrays.write(table.end_position, written.end_entry, position)
        rows = rows.replace(table=table.replace(end_position=end_position))
    # The head stays: if it were counted, XLA would make kernels for it.
    names = "num_candidates", "num_pending", "ordinal", "is_open"
    found = {name: getattr(new, name) for name in names}
    counters = counters.set(last_flags=last_flags, phase=phase, **found)
    after = state.replace(rows=rows, counters=counters)
    bounded = layout.window.is_bounded
    effect = _effect(after, state.counters.num_pending, is_given_up) if bounded else None
    return after, effect


def ended(window: Window, flags: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the flags of rows, uint8[...], and which of them become final rows, bool[...]: those
    that end an episode between two steps, and whose window waits for the row after them.

    Args:
      window: Window of the layout.
      flags: uint8[...], of the rows.
      ends: bool[...], True for rows after which an episode ends, though no flag says so.
    """
    is_final = ends & (window.after != 0)
    if window.after is not None and not window.crosses_episodes:
        is_final &= (flags & window.completed_by) == 0
    final = flags & row_flags.FIRST | jnp.uint8(row_flags.TRUNCATED | row_flags.FINAL)
    return jnp.where(is_final, final, flags), is_final


def _effect(after: ReplayState, num_waiting: Any, is_given_up: jax.Array) -> WriteEffect:
    """Return the effect of `close`: pending rows become sampleable, and the newest row is written
    again.

    Args:
      after: The state afterwards.
      num_waiting: int32[E], number of rows that were pending before.
      is_given_up: bool[E], whether the newest row is written again, as one that is not sampled.
    """
    layout = after.layout
    lookahead = layout.window.after or 0
    age = lookahead - 1 - ring.arange(lookahead + 1)[:, None] + jnp.zeros_like(num_waiting)
    row = layout.row(layout.envs(), layout.wrap(after.head - 1 - jnp.maximum(age, 0)))
    # The entry after those that waited is that of the row that is written again.
    is_again = (age < 0) & is_given_up
    is_waiting = (age >= 0) & (age < num_waiting)
    stays = is_waiting & ~((age == 0) & is_given_up)
    return WriteEffect(
        layout=layout,
        envs=None,
        row=jnp.where(is_waiting | is_again, row, layout.capacity),
        became_sampleable=stays & (age >= after.counters.num_pending),
        is_written=is_again[-1:],
        is_candidate=jnp.zeros_like(is_again[-1:]),
        is_gone=jnp.zeros_like(is_again),
        age=jnp.where(stays | is_again, jnp.maximum(age, 0), layout.length),
        start=layout.wrap(after.head - lookahead),
    )


def extend(
    buffer: Any, state: ReplayState, steps: PyTree, goes_on: jax.Array, was_first: jax.Array
) -> ReplayState:
    """Append a block of steps of every env, with a final row after the last step of each episode.

    The rows, and all that can be sampled, equal those of one call for each step.

    Args:
      buffer: A `ReplayBuffer` with `autoreset="same_step"` and no mask.
      state: The buffer's state. Donated: use the returned state instead.
      steps: Leaves [T, num_envs, ...], with `final_obs`. `truncated` is True wherever `terminated`
        is not.
      goes_on: bool[T, num_envs]; True where the step continues the episode of the step before it,
        whose end was only provisional.
      was_first: bool[num_envs]; True where the stream's newest step was its episode's first.

    Returns:
      The new state.
    """
    goes_on = jnp.asarray(goes_on)
    is_continued = jnp.concatenate([goes_on[1:], jnp.zeros_like(goes_on[:1])])
    steps = steps.replace(truncated=steps.truncated & ~is_continued)
    return buffer.extend(reopen(state, goes_on[0], was_first), steps)


def reopen(state: ReplayState, mask: jax.Array, was_first: jax.Array) -> ReplayState:
    """Remove each stream's newest row, a final row, where the episode continues with the next step.

    Do not read the state until that step is written: rows that are sampleable by now stay so,
    although their final row is gone.

    Args:
      state: The buffer's state. Donated.
      mask: bool[num_envs]; True where the episode continues.
      was_first: bool[num_envs]; True where the stream's newest step was its episode's first. The
        step's flags are made anew from it: if they were read, XLA would copy all flags before the
        next write.

    Returns:
      The new state.
    """
    layout, counters = state.layout, state.counters
    flags = jnp.asarray(was_first).astype(jnp.uint8) * jnp.uint8(row_flags.FIRST)
    row = layout.row(layout.envs(), layout.wrap(counters.position - 2))
    row = jnp.where(mask, row, layout.capacity)
    rows = state.rows.replace(flags=stored_arrays.write(state.rows.flags, row, flags))
    new = writes.taken_back(counters, mask, 0, mask)  # a final row is no candidate
    new = new.set(last_flags=jnp.where(mask, flags, counters.last_flags))
    return state.replace(rows=rows, counters=new)

"""Steps that come with their next observation and are sampleable at once: each `add` ends every
episode provisionally, and the next one continues it.

Some libraries add whole transitions, with the next observation of every step, and sample them right
away. Observations are stored once: a next observation is the row after its step. So each call ends
every episode with a final row, as a truncation does. The next call removes the final rows of the
episodes that continue. In between, the buffer is like any other: the windows of its newest rows are
complete and end at the final row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay.storage import row_flags, stored_arrays
from jaxreplay.storage.sampleable import ReplayState


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
    before, layout = state.streams, state.layout
    assert before.flags is not None
    last_flags = before.counters.last_flags
    assert last_flags is not None
    newest = layout.row(layout.envs(), layout.wrap(before.head - 2))
    flags = jnp.asarray(was_first).astype(jnp.uint8) * jnp.uint8(row_flags.FIRST)
    after = before.with_counters(
        position=jnp.where(mask, layout.wrap(before.head - 1), before.head),
        filled=before.filled - mask,
        lap=before.lap - (mask & (before.head == 0)).astype(jnp.uint32),
        last_flags=jnp.where(mask, flags, last_flags),
    ).replace(
        flags=stored_arrays.write(before.flags, jnp.where(mask, newest, layout.capacity), flags)
    )
    return state.replace(
        streams=after, episodes=state.episodes and _reopened(layout, state.episodes, mask)
    )


def _reopened(layout: Any, table: Any, mask: jax.Array) -> Any:
    """Make each stream's last episode the current one again where `mask` is True."""
    return table.replace(
        current=jnp.where(mask, layout.wrap(table.current - 1), table.current),
        is_open=table.is_open | mask,
    )

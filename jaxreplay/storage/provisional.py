"""Steps that bring their next observation, sampleable at once: each episode ends for now, and goes
on with the next step.

Some libraries hand over whole transitions, with the next observation of every step, and draw them
right away. Stored once, a next observation is the row after its step. So each `add` ends every
episode with a final row, as a truncation does, and the next one takes the final rows of those that
go on back. In between, the buffer is like any other: its newest rows are complete, their windows
end at the final row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay.storage import row_flags, stored_arrays
from jaxreplay.storage.sampleable import ReplayState


def add(
    buffer: Any, state: ReplayState, step: PyTree, goes_on: jax.Array, was_first: jax.Array
) -> ReplayState:
    """Append one step of every env, the newest of its episode for now. `state` is donated.

    Args:
      buffer: a `ReplayBuffer` with `autoreset="same_step"` and no mask.
      step: leaves `[num_envs, ...]`, with `final_obs`; `truncated` wherever it is not terminated.
      goes_on: bool[num_envs]; whether the step belongs to the same episode as the stream's newest
        one, which was not ended in earnest.
      was_first: bool[num_envs]; whether that newest one was its episode's first.
    """
    return buffer.add(reopen(state, goes_on, was_first), step)


def reopen(state: ReplayState, mask: jax.Array, was_first: jax.Array) -> ReplayState:
    """Take the newest row back, a final row, where `mask`, bool[num_envs], says that the episode
    goes on: with the next step.

    Until that is written the state is not to be read: rows that are sampleable by now stay so,
    though their final row is gone. `state` is donated. (The step's flags are made anew from
    `was_first`: to read them here would make XLA copy all flags before the next write.)
    """
    before, layout = state.streams, state.layout
    assert before.flags is not None
    assert before.last_flags is not None
    newest = layout.row(layout.envs(), layout.wrap(before.head - 2))
    flags = jnp.asarray(was_first).astype(jnp.uint8) * jnp.uint8(row_flags.FIRST)
    heads = before.with_heads(
        position=jnp.where(mask, layout.wrap(before.head - 1), before.head),
        filled=before.filled - mask,
        lap=before.lap - (mask & (before.head == 0)).astype(jnp.uint32),
    )
    after = heads.replace(
        flags=stored_arrays.write(before.flags, jnp.where(mask, newest, layout.capacity), flags),
        last_flags=jnp.where(mask, flags, before.last_flags),
    )
    return state.replace(
        streams=after, episodes=state.episodes and _reopened(layout, state.episodes, mask)
    )


def _reopened(layout: Any, table: Any, mask: jax.Array) -> Any:
    """The last episode of each stream is the current one again."""
    return table.replace(
        current=jnp.where(mask, layout.wrap(table.current - 1), table.current),
        is_open=table.is_open | mask,
    )

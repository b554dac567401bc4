"""The rows of a drop-in buffer: whole transitions, each with its next observation, in a state that
an owner changes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay.buffers.jitted import programs
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.sb3 import columns
from jaxreplay.stateful.owner import StateOwner
from jaxreplay.storage import newest_row
from jaxreplay.types import Step


class TransitionBuffer(ReplayBuffer):
    """A buffer whose `extend` ends every episode provisionally, so that each step is sampleable at
    once."""

    def extend(self, state: Any, steps: Step, goes_on: Any, was_first: Any) -> Any:  # type: ignore[override]
        """Append a block of steps, as `newest_row.extend` does.

        Args:
          state: The state. Donated.
          steps: Leaves [T, num_envs, ...], without `truncated`.
          goes_on: bool[T, num_envs]; the step continues the episode of the step before it.
          was_first: bool[T, num_envs]; the step before it was its episode's first.
        """
        steps = steps.replace(truncated=~steps.terminated)
        return newest_row.extend(super(), state, steps, goes_on, was_first[0])


class RowsOwner(StateOwner):
    """State of a `TransitionBuffer`, whose steps wait in a `Record`."""

    cure = "remove them all with buffer.reset()"

    def _look(self, steps: Any, mask: Any) -> None:
        """Leave the look for resets by hand to the record."""

    def items(self, chosen: Any) -> Any:
        """Return transitions, as `_items` does."""
        return self.read(_READ, _ADD_AND_READ, chosen.shape[1], chosen)


def _items(buffer: ReplayBuffer, state: Any, chosen: jax.Array) -> Any:
    """Read transitions.

    Args:
      buffer: The buffer.
      state: Its state.
      chosen: Their streams, and their numbers in the rings, int32[2, B]; 0 is the oldest one.

    Returns:
      An `SB3Batch` of fewer arrays, which take some 10 us each on the host: `obs` is obs and
      next_obs, [2, B, ...]; `done` is done and reward, float32[2, B, 1].
    """
    item = buffer.get(state, columns.transitions(state).select(*chosen)).experience
    stack = lambda *leaves: jnp.stack(leaves)
    obs = jax.tree.map(stack, item.obs, item.next_obs)
    return item.replace(obs=obs, next_obs=None, done=stack(item.done, item.reward), reward=None)


def _add_and_read(buffer: ReplayBuffer, state: Any, block: Any, chosen: Any) -> tuple[Any, Any]:
    """Add a block of steps, then read transitions."""
    state = buffer.extend(state, *block)
    return state, _items(buffer, state, chosen)


_READ, _ADD_AND_READ = programs(_items), programs(_add_and_read, changes=True)

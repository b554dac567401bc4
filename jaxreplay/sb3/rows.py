"""The rows of a drop-in buffer: whole transitions, each with its next observation, in a state that
an owner changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.tiered import tiered
from jaxreplay.sb3 import columns
from jaxreplay.sb3.arrays import each
from jaxreplay.sb3.batch import SB3Batch, SB3View
from jaxreplay.stateful.owner import StateOwner
from jaxreplay.stateful.places import OnHost
from jaxreplay.storage import newest_row, row_flags, stored_arrays
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


class TransitionsOnHost(OnHost):
    """Rows of a `TransitionBuffer` on the host.

    The rows that a folder has at first stay until the first steps come, so that a checkpoint of
    them can be restored.

    Args:
      buffer: The buffer.
      rows: As for `jaxreplay.tiered`.
    """

    def __init__(self, buffer: TransitionBuffer, rows: Any):
        fields = {field.name: getattr(buffer, field.name) for field in dataclasses.fields(buffer)}
        super().__init__(tiered(ReplayBuffer(**fields), rows=rows), ahead=False)

    def init(self, example: Any) -> Any:
        return self.tier._init_anew(example)

    def _extend(self, buffer: Any, state: Any, block: Any, **envs: Any) -> Any:
        steps, goes_on, was_first = block
        is_continued = np.concatenate([goes_on[1:], np.zeros_like(goes_on[:1])])
        steps = steps.replace(truncated=~steps.terminated & ~is_continued)
        reopens = goes_on[0], was_first[0]
        return self.tier._append("extend", state, steps, (None, None), reopens=reopens)

    def begun(self, batch: Any) -> Any:
        return super().begun(batch).sample


class RowsOwner(StateOwner):
    """State of a `TransitionBuffer`, whose steps wait in a `Record`."""

    cure = "remove them all with buffer.reset()"

    def _look(self, steps: Any, mask: Any) -> None:
        """Leave the look for resets by hand to the record."""

    def begin(self, state: Any, staging: Any) -> None:
        super().begin(state, staging)
        view, rows = self.buffer.view, self._state.rows
        (device,) = rows.flags.devices()
        leaves = stored_arrays.stored_leaves(rows.steps)
        self.is_in_memory = (  # so that `taken` may read the rows
            type(view) is SB3View
            and not view.has_steps
            and self.buffer.num_envs <= 4  # of which each has a search
            and device.platform == "cpu"
            and not any(map(stored_arrays.is_compound, leaves))
        )

    def empty(self, example: Any) -> Any:
        """Return an empty state."""
        with self.on_device():
            return self.place.init(example)


def taken(state: Any, row: np.ndarray, after: np.ndarray, convert: Any) -> Any:
    """Read transitions of one step from a CPU's memory, without a program.

    Args:
      state: A state whose stored leaves are plain arrays on a CPU.
      row: Their rows, int64[B].
      after: The rows after them, int64[B].
      convert: What makes an array of each array of NumPy.

    Returns:
      An `SB3Batch`.
    """
    steps, flags = state.rows.steps, np.asarray(state.rows.flags)
    read = lambda leaf, rows: convert(np.asarray(leaf)[rows])
    is_terminated = (flags[row] & row_flags.TERMINATED) != 0
    return SB3Batch(
        obs=each(lambda leaf: read(leaf, row), steps.obs),
        action=read(steps.action, row),
        reward=convert(np.asarray(steps.reward)[row][..., None]),
        rewards=None,
        done=convert(is_terminated.astype(np.float32)[..., None]),
        next_obs=each(lambda leaf: read(leaf, after), steps.obs),
        num_steps=None,
    )


def items(buffer: ReplayBuffer, state: Any, chosen: jax.Array) -> Any:
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

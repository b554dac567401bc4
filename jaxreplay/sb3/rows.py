"""The rows of a drop-in buffer: whole transitions, each with its next observation, in a state that
an owner changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.buffers.index_buffer import IndexBuffer
from jaxreplay.buffers.jitted import program, programs
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.sb3 import columns
from jaxreplay.stateful.owner import StateOwner
from jaxreplay.stateful.tiered_owner import TieredOwner
from jaxreplay.storage import newest_row
from jaxreplay.storage.file_rows import END, FileRows
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


class TransitionIndex(TransitionBuffer, IndexBuffer):  # type: ignore[misc]
    """A `TransitionBuffer` whose states have no rows."""


class TransitionTier(Tiered):
    """A `TransitionBuffer` whose rows lie on the host.

    The rows that a folder has at first stay until the first `extend`, so that a checkpoint of them
    can be restored.
    """

    _takes, _index_type = TransitionBuffer, TransitionIndex

    def __init__(self, buffer: TransitionBuffer, rows: Any):
        super().__init__(buffer, rows)
        self._is_stale = False  # the folder's rows are not the state's

    def init(self, example: Any) -> Any:
        """Return an empty state."""
        state = self._prepared(example)
        self.num_written = np.zeros(self.buffer.num_envs, np.int64)
        self._is_stale = self.is_in_files
        return state

    def _followed(self, state: Any, is_new: bool = False, until: Any = None) -> Any:
        self._is_stale = False
        return super()._followed(state, is_new, until)

    def _begin_anew(self) -> None:
        """Forget the rows that the folder had at first."""
        if self._is_stale and isinstance(store := self._store_of("clear"), FileRows):
            none = np.zeros_like(store.progress[END])
            store.end(none, 0, none, until=none)
        self._is_stale = False

    def clear(self, state: Any) -> Any:
        self._begin_anew()
        return super().clear(state)

    def extend(self, state: Any, steps: Step, goes_on: Any, was_first: Any) -> Any:  # type: ignore[override]
        """Append a block of steps, as `TransitionBuffer.extend` does.

        Args:
          state: The newest state. Donated.
          steps: As for `TransitionBuffer.extend`, as are `goes_on` and `was_first`.
        """
        self._begin_anew()
        is_continued = np.concatenate([goes_on[1:], np.zeros_like(goes_on[:1])])
        steps = steps.replace(truncated=~steps.terminated & ~is_continued)
        reopens = goes_on[0], was_first[0]
        return self._append("extend", state, steps, (None, None), reopens=reopens)


class RowsOwner(StateOwner):
    """State of a `TransitionBuffer`, whose steps wait in a `Record`."""

    cure = "remove them all with buffer.reset()"

    def _look(self, steps: Any, mask: Any) -> None:
        """Leave the look for resets by hand to the record."""

    def empty(self, example: Any) -> Any:
        """Return an empty state."""
        with self.on_device():
            return self._empty(example)

    def adopted(self, state: Any) -> Any:
        """Return a whole state that was pickled."""
        return state

    def items(self, chosen: Any) -> Any:
        """Return transitions, as `_items` does."""
        return self.read(_READ, _ADD_AND_READ, chosen.shape[1], chosen)

    def drawn(self, function: Any, *arguments: Any) -> Any:
        """Return what a function of a buffer, a state and arguments reads of rows."""
        return self.ask(_CALL, function, *arguments)


class TieredRowsOwner(TieredOwner, RowsOwner):
    """The same with rows on the host.

    Args:
      buffer: A `TransitionBuffer`.
      draws: As for `StateOwner`.
      rows: As for `jaxreplay.tiered`.
    """

    def __init__(self, buffer: TransitionBuffer, draws: Any, rows: Any):
        TieredOwner.__init__(self, TransitionTier(buffer, rows), draws, ahead=False)

    def adopted(self, state: Any) -> Any:
        return self.tier.adopt(state)

    def items(self, chosen: Any) -> Any:
        return self.drawn(_items, chosen)

    def draw(self, batch_size: int, options: Any, consume: bool = True) -> Any:
        batch = super().draw(batch_size, options, consume)
        return None if batch is None else self.finished(batch)


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


_CALL = program(
    lambda buffer, state, function, *arguments: function(buffer, state, *arguments),
    static=("function",),
)
_READ, _ADD_AND_READ = programs(_items), programs(_add_and_read, changes=True)

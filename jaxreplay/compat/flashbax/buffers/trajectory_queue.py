"""Queues of time steps, which hand out each step once, in order."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay.compat.flashbax._storage import Sequence, State, Storage, checked, read, storage_of
from jaxreplay.compat.flashbax.buffers.trajectory_buffer import (
    Experience as Experience,
    TrajectoryBufferSample,
)
from jaxreplay.storage import ring
from jaxreplay.views import Item


class TrajectoryQueueState(State, Generic[Experience]):
    """State of a queue.

    Attributes:
      replay: The stored rows, as jaxreplay keeps them.
      num_unread: int32[]. Number of time steps that are not sampled yet.
    """

    num_unread: jax.Array

    @property
    def write_index(self) -> jax.Array:
        """Time index of the next write: int32[]."""
        return self.replay.counters.position[..., 0]

    @property
    def read_index(self) -> jax.Array:
        """Time index of the next step that is sampled: int32[]."""
        length = self.replay.layout.length
        return ring.wrap(self.write_index - self.num_unread, length)

    @property
    def is_full(self) -> jax.Array:
        """True if no step fits before a sample: bool[]."""
        return self.num_unread == self.replay.layout.length


TrajectoryQueueSample = TrajectoryBufferSample


@dataclasses.dataclass(frozen=True)
class TrajectoryQueue(Generic[Experience]):
    """Pure functions of a queue, which hands out each time step once, in order.

    Attributes:
      init: Function from one time step, leaves [...], to a state.
      add: Function from a state and steps [E, T, ...] to a state. If there is no room, the oldest
        steps are lost.
      sample: Function from a state to a state and a sample with leaves [E, L, ...]. If fewer than L
        steps are unread, none is consumed, and the sample means nothing.
      can_sample: Function from a state to bool[]: whether L steps are unread.
      can_add: Function from a state to bool[]: whether `add_sequence_length` steps fit.
    """

    init: Callable[[PyTree], TrajectoryQueueState]
    add: Callable[[TrajectoryQueueState, PyTree], TrajectoryQueueState]
    sample: Callable[[TrajectoryQueueState], tuple[TrajectoryQueueState, TrajectoryQueueSample]]
    can_sample: Callable[[TrajectoryQueueState], jax.Array]
    can_add: Callable[[TrajectoryQueueState], jax.Array]

    def replace(self, **changes: Any) -> "TrajectoryQueue":
        """Return a queue with other functions.

        Args:
          changes: Functions by name.
        """
        return dataclasses.replace(self, **changes)


def make_trajectory_queue(
    max_length_time_axis: int,
    add_batch_size: int,
    add_sequence_length: int,
    sample_sequence_length: int,
    max_size: int | None = None,
) -> TrajectoryQueue:
    """Make a queue of time steps, which hands out each step once, in order.

    Args:
      max_length_time_axis: Number of time steps that the queue holds.
      add_batch_size: Number of envs E.
      add_sequence_length: Number of time steps of an `add`, for `can_add`.
      sample_sequence_length: Number of time steps L of a sample.
      max_size: Number of steps of all envs, in place of `max_length_time_axis`. Default: not given.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_trajectory_queue"
    if max_size is not None:
        max_length_time_axis = max_size // checked(where, "add_batch_size", add_batch_size)
    length = checked(where, "max_length_time_axis", max_length_time_axis)
    for name, size in (
        ("add_sequence_length", add_sequence_length),
        ("sample_sequence_length", sample_sequence_length),
    ):
        if checked(where, name, size) > length:
            raise ValueError(f"{where}: {name}={size} exceeds max_length_time_axis={length}")
    config = _Queue(
        storage=storage_of(where, add_batch_size, length, 1, Item()),
        add_length=add_sequence_length,
        sample_length=sample_sequence_length,
    )
    return TrajectoryQueue(
        config.init, config.add, config.sample, config.can_sample, config.can_add
    )


class _Queue(Storage):
    """Sequences of all streams, one after another."""

    add_length: int
    sample_length: int

    def init(self, experience: PyTree) -> TrajectoryQueueState:
        return TrajectoryQueueState(self.storage.init(experience), jnp.int32(0))

    def add(self, state: TrajectoryQueueState, batch: PyTree) -> TrajectoryQueueState:
        rows = self._extend(state, batch)
        num_steps = jax.tree.leaves(batch)[0].shape[1]
        num_unread = jnp.minimum(state.num_unread + num_steps, self.storage.length)
        return state.replace(replay=rows, num_unread=num_unread)

    def sample(
        self, state: TrajectoryQueueState
    ) -> tuple[TrajectoryQueueState, TrajectoryQueueSample]:
        replay, layout = state.replay, state.replay.layout
        row = layout.row(layout.envs(), state.read_index)
        steps = read(Sequence(length=self.sample_length), replay, row)
        num_read = jnp.where(self.can_sample(state), self.sample_length, 0)
        state = state.replace(num_unread=state.num_unread - num_read)
        return state, TrajectoryQueueSample(steps)

    def can_sample(self, state: TrajectoryQueueState) -> jax.Array:
        return state.num_unread >= self.sample_length

    def can_add(self, state: TrajectoryQueueState) -> jax.Array:
        return state.num_unread + self.add_length <= self.storage.length

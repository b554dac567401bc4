"""Buffers of sequences, which are sampled uniformly."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.struct import Node
from jaxreplay.compat._stacked import num_written
from jaxreplay.compat.flashbax._storage import (
    Sequence,
    State,
    Storage,
    checked,
    least,
    length_of,
    read,
    storage_of,
)
from jaxreplay.storage import ring

Experience = TypeVar("Experience")  # the pytree of a step


class TrajectoryBufferState(State, Generic[Experience]):
    """State of a buffer without priorities.

    Attributes:
      replay: The stored rows, as jaxreplay keeps them.
    """

    @property
    def current_index(self) -> jax.Array:
        """Time index of the next write: int32[]."""
        return self.replay.counters.position[..., 0]

    @property
    def is_full(self) -> jax.Array:
        """True if every time index is written: bool[]."""
        return num_written(self) == self.replay.layout.length


class TrajectoryBufferSample(Node, Generic[Experience]):
    """Sample of a buffer without priorities.

    Attributes:
      experience: Pytree with leaves [B, L, ...]; [B, ...] for item buffers; an `ExperiencePair` for
        flat buffers.
    """

    experience: Experience


BufferState = TypeVar("BufferState", bound=TrajectoryBufferState)
BufferSample = TypeVar("BufferSample", bound=TrajectoryBufferSample)


@dataclasses.dataclass(frozen=True)
class TrajectoryBuffer(Generic[Experience, BufferState, BufferSample]):
    """Pure functions of a buffer without priorities.

    Attributes:
      init: Function from one time step, leaves [...], to a state.
      add: Function from a state and new steps to a state. Jit it with `donate_argnums=0`.
      sample: Function from a state and a random key to a sample.
      can_sample: Function from a state to bool[]: whether the minimum length is stored. Before
        that, samples mean nothing.
    """

    init: Callable[[PyTree], Any]
    add: Callable[[Any, PyTree], Any]
    sample: Callable[[Any, Key], Any]
    can_sample: Callable[[Any], jax.Array]

    def replace(self, **changes: Any) -> Any:
        """Return a buffer with other functions, such as `add=jax.jit(buffer.add)`.

        Args:
          changes: Functions by name.
        """
        return dataclasses.replace(self, **changes)


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
) -> TrajectoryBuffer:
    """Make a buffer of sequences, which are sampled uniformly. They may cross episodes.

    Args:
      add_batch_size: Number of envs E. `add` takes leaves [E, T, ...], with any T.
      sample_batch_size: Number of sequences B in a sample.
      sample_sequence_length: Number of time steps L of a sequence.
      period: Number of time steps between possible starts, counted from the oldest step.
      min_length_time_axis: Number of time steps from which on `can_sample` is True; at least L.
      max_size: Number of steps of all envs, in place of `max_length_time_axis`. Default: not given.
      max_length_time_axis: Number of time steps that are kept. Default: `max_size // E`.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_trajectory_buffer"
    length = length_of(where, add_batch_size, max_size, max_length_time_axis)
    view = Sequence(length=checked(where, "sample_sequence_length", sample_sequence_length))
    return uniform(
        min_length=least(where, length, min_length_time_axis, sample_sequence_length),
        storage=storage_of(where, add_batch_size, length, sample_batch_size, view),
        period=checked(where, "period", period),
    )


def uniform(**options: Any) -> TrajectoryBuffer:
    """Return the functions of a buffer without priorities.

    Args:
      options: Fields of `Trajectories`.
    """
    config = Trajectories(**options)
    return TrajectoryBuffer(config.init, config.add, config.sample, config.can_sample)


class Trajectories(Storage):
    """Uniform sampling."""

    min_length: int
    period: int = 1

    def init(self, experience: PyTree) -> TrajectoryBufferState:
        return TrajectoryBufferState(self.storage.init(experience))

    def add(self, state: TrajectoryBufferState, batch: PyTree) -> TrajectoryBufferState:
        rows = self._extend(state, batch)
        return state.replace(replay=rows)

    def sample(self, state: TrajectoryBufferState, rng_key: Key) -> Any:
        if self.period == 1:
            return TrajectoryBufferSample(self.storage.sample(state.replay, rng_key).experience)
        # All streams are equally long, so that each start is computed.
        replay, layout = state.replay, state.replay.layout
        num_later = layout.window.after or 0  # steps of a sequence after the first
        last, _ = ring.divide(jnp.maximum(replay.filled - 1 - num_later, 0), self.period)
        bounds = jnp.stack([last + 1, jnp.int32(layout.num_envs)])[:, None]
        nth, env = jax.random.randint(rng_key, (2, self.storage.batch_size), 0, bounds, jnp.int32)
        oldest = replay.head - replay.filled
        row = layout.row(env, layout.wrap(oldest + nth * self.period))
        return TrajectoryBufferSample(read(self.storage.view, replay, row))

    def can_sample(self, state: TrajectoryBufferState) -> jax.Array:
        return num_written(state) >= self.min_length

"""Buffers of sequences, which are sampled in proportion to priority ** exponent."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.compat._stacked import for_each
from jaxreplay.compat.flashbax._storage import Sequence, checked, least, length_of, storage_of
from jaxreplay.compat.flashbax.buffers.trajectory_buffer import (
    BufferSample as BufferSample,
    BufferState as BufferState,
    Experience as Experience,
    Trajectories,
    TrajectoryBuffer as TrajectoryBuffer,
    TrajectoryBufferSample as TrajectoryBufferSample,
    TrajectoryBufferState as TrajectoryBufferState,
)
from jaxreplay.storage import ring

Indices = Priorities = Probabilities = jax.Array


class PrioritisedTrajectoryBufferState(TrajectoryBufferState[Experience]):
    """State of a buffer with priorities. `rows.sampler` has these.

    Attributes:
      replay: The stored rows, as jaxreplay keeps them.
    """

    @property
    def running_index(self) -> jax.Array:
        """Number of time steps that were ever added: int32[]."""
        return self.replay.next_number[..., 0].astype(jnp.int32)


class PrioritisedTrajectoryBufferSample(TrajectoryBufferSample[Experience]):
    """Sample of a buffer with priorities.

    Attributes:
      experience: As for `TrajectoryBufferSample`.
      indices: int32[B]. Numbers of the sampled items, for `set_priorities`.
      probabilities: float32[B]. Probability of each item; 0 if the buffer cannot be sampled.
    """

    indices: jax.Array
    probabilities: jax.Array


@dataclasses.dataclass(frozen=True)
class PrioritisedTrajectoryBuffer(TrajectoryBuffer[Experience, BufferState, BufferSample]):
    """Pure functions of a buffer with priorities.

    Attributes:
      set_priorities: Function from a state, `sample.indices` and new priorities float[B] to a
        state. Priorities that are NaN, infinite or negative are ignored. If an index occurs more
        than once, its largest priority counts.
    """

    set_priorities: Callable[[Any, jax.Array, jax.Array], Any]


def make_prioritised_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    priority_exponent: float = 0.6,
    device: str | None = None,
) -> PrioritisedTrajectoryBuffer:
    """Make a buffer of sequences, which are sampled in proportion to priority ** exponent.

    Args:
      add_batch_size: Number of envs E. `add` takes leaves [E, T, ...], with any T.
      sample_batch_size: Number of sequences B in a sample.
      sample_sequence_length: Number of time steps L of a sequence.
      period: Number of time steps between possible starts, counted from the first step ever.
      min_length_time_axis: Number of time steps from which on `can_sample` is True; at least L.
      max_size: Number of steps of all envs, in place of `max_length_time_axis`. Default: not given.
      max_length_time_axis: Number of time steps that are kept, rounded down to a multiple of
        `period`. Default: `max_size // E`.
      priority_exponent: Exponent of priorities, in [0, 1]. Default: 0.6.
      device: Ignored: the layout is that of JAX's default device. Default: not given.

    Raises:
      ValueError: A size or the exponent is wrong.
    """
    del device
    where = "make_prioritised_trajectory_buffer"
    length = length_of(where, add_batch_size, max_size, max_length_time_axis)
    length = length // checked(where, "period", period) * period
    view = Sequence(length=checked(where, "sample_sequence_length", sample_sequence_length))
    return prioritised(
        min_length=least(where, length, min_length_time_axis, sample_sequence_length),
        storage=storage_of(
            where, add_batch_size, length, sample_batch_size, view, priority_exponent
        ),
        period=period,
    )


def prioritised(**options: Any) -> PrioritisedTrajectoryBuffer:
    """Return the functions of a buffer with priorities.

    Args:
      options: Fields of `Prioritised`.
    """
    config = Prioritised(**options)
    functions = config.init, config.add, config.sample, config.can_sample, config.set_priorities
    return PrioritisedTrajectoryBuffer(*functions)


class Prioritised(Trajectories):
    """Prioritized sampling. With a period, rows between possible starts have priority 0."""

    def init(self, experience: PyTree) -> PrioritisedTrajectoryBufferState:
        return PrioritisedTrajectoryBufferState(self.storage.init(experience))

    def sample(self, state: Any, rng_key: Key) -> PrioritisedTrajectoryBufferSample:
        batch = self.storage.sample(state.replay, rng_key)
        indices, _ = ring.divide(batch.index.row, self.period)
        return PrioritisedTrajectoryBufferSample(batch.experience, indices, batch.probability)

    def can_sample(self, state: Any) -> jax.Array:
        has_mass = for_each(lambda one: self.storage.can_sample(one.replay), state)
        return super().can_sample(state) & has_mass

    def set_priorities(self, state: Any, indices: jax.Array, priorities: jax.Array) -> Any:
        index = state.replay.index(jnp.asarray(indices) * self.period)
        return state.replace(replay=self.storage.update_priorities(state.replay, index, priorities))

    def _priority(self, state: Any, num_steps: int) -> jax.Array | None:
        if self.period == 1:
            return None  # the largest so far
        # The length is a multiple of the period, so that starts keep their positions.
        _, place = ring.divide(state.replay.head + ring.arange(num_steps), self.period)
        priority = jnp.where(place == 0, state.replay.sampler.max_priority, 0)
        return jnp.broadcast_to(priority[:, None], (num_steps, self.storage.num_envs))

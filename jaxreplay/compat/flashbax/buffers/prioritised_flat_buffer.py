"""Buffers of pairs, which are sampled in proportion to priority ** exponent."""

from jaxreplay.compat.flashbax._storage import flat_sizes, storage_of
from jaxreplay.compat.flashbax.buffers.flat_buffer import (
    ExperiencePair as ExperiencePair,
    Pair,
    TransitionSample as TransitionSample,
)
from jaxreplay.compat.flashbax.buffers.prioritised_trajectory_buffer import (
    Indices as Indices,
    Priorities as Priorities,
    PrioritisedTrajectoryBuffer as PrioritisedTrajectoryBuffer,
    PrioritisedTrajectoryBufferSample,
    PrioritisedTrajectoryBufferState as PrioritisedTrajectoryBufferState,
    Probabilities as Probabilities,
    prioritised,
)

PrioritisedTransitionSample = PrioritisedTrajectoryBufferSample


def make_prioritised_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float = 0.6,
    device: str | None = None,
) -> PrioritisedTrajectoryBuffer:
    """Make a buffer of pairs, which are sampled in proportion to priority ** exponent.

    Args:
      max_length: Number of steps of all envs that are kept, rounded down to a multiple of E.
      min_length: Number of steps from which on `can_sample` is True.
      sample_batch_size: Number of pairs B in a sample.
      add_sequences: Let `add` take leaves [E, T, ...] in place of [E, ...]. Default: False.
      add_batch_size: Number of envs E. Default: one env, and leaves without the axis E.
      priority_exponent: Exponent of priorities, in [0, 1]. Default: 0.6.
      device: Ignored: the layout is that of JAX's default device. Default: not given.

    Raises:
      ValueError: A size or the exponent is wrong.
    """
    del device
    where = "make_prioritised_flat_buffer"
    length, minimum = flat_sizes(where, max_length, min_length, add_batch_size)
    return prioritised(
        min_length=minimum,
        storage=storage_of(
            where, add_batch_size or 1, length, sample_batch_size, Pair(), priority_exponent
        ),
        has_envs=add_batch_size is not None,
        has_time=add_sequences,
    )

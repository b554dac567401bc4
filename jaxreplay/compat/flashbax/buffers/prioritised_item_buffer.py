"""Buffers of independent items, which are sampled in proportion to priority ** exponent."""

from jaxreplay.compat.flashbax._storage import checked, least, storage_of
from jaxreplay.compat.flashbax.buffers.prioritised_trajectory_buffer import (
    Experience as Experience,
    PrioritisedTrajectoryBuffer as PrioritisedTrajectoryBuffer,
    PrioritisedTrajectoryBufferSample as PrioritisedTrajectoryBufferSample,
    PrioritisedTrajectoryBufferState as PrioritisedTrajectoryBufferState,
    prioritised,
)
from jaxreplay.views import Item


def make_prioritised_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    priority_exponent: float = 0.6,
    device: str | None = None,
) -> PrioritisedTrajectoryBuffer:
    """Make a buffer of independent items, which are sampled in proportion to priority ** exponent.

    Args:
      max_length: Number of items that are kept.
      min_length: Number of items from which on `can_sample` is True.
      sample_batch_size: Number of items B in a sample.
      add_sequences: Let `add` take items with an axis of time. Default: False.
      add_batches: Let `add` take items with an axis of any number of envs, before that of time.
        Default: False.
      priority_exponent: Exponent of priorities, in [0, 1]. Default: 0.6.
      device: Ignored: the layout is that of JAX's default device. Default: not given.

    Raises:
      ValueError: A size or the exponent is wrong.
    """
    del device
    where = "make_prioritised_item_buffer"
    length = checked(where, "max_length", max_length)
    return prioritised(
        min_length=least(where, length, min_length, 1),
        storage=storage_of(where, 1, length, sample_batch_size, Item(), priority_exponent),
        has_envs=add_batches,
        has_time=add_sequences,
        is_flat=True,
    )

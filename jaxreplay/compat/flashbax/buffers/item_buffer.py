"""Buffers of independent items, which are sampled uniformly."""

from jaxreplay.compat.flashbax._storage import checked, least, storage_of
from jaxreplay.compat.flashbax.buffers.trajectory_buffer import (
    Experience as Experience,
    TrajectoryBuffer as TrajectoryBuffer,
    TrajectoryBufferSample as TrajectoryBufferSample,
    TrajectoryBufferState as TrajectoryBufferState,
    uniform,
)
from jaxreplay.views import Item


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
) -> TrajectoryBuffer:
    """Make a buffer of independent items, which are sampled uniformly.

    Args:
      max_length: Number of items that are kept.
      min_length: Number of items from which on `can_sample` is True.
      sample_batch_size: Number of items B in a sample.
      add_sequences: Let `add` take items with an axis of time. Default: False.
      add_batches: Let `add` take items with an axis of any number of envs, before that of time.
        Default: False.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_item_buffer"
    length = checked(where, "max_length", max_length)
    return uniform(
        min_length=least(where, length, min_length, 1),
        storage=storage_of(where, 1, length, sample_batch_size, Item()),
        has_envs=add_batches,
        has_time=add_sequences,
        is_flat=True,
    )

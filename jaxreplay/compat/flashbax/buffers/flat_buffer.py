"""Buffers of pairs of time steps that follow each other, which are sampled uniformly."""

import operator
from typing import Generic, NamedTuple

import jax

from jaxreplay.compat.flashbax._storage import flat_sizes, storage_of
from jaxreplay.compat.flashbax.buffers.trajectory_buffer import (
    Experience as Experience,
    TrajectoryBuffer as TrajectoryBuffer,
    TrajectoryBufferSample,
    TrajectoryBufferState as TrajectoryBufferState,
    uniform,
)
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Window
from jaxreplay.views import RowReader, View

TransitionSample = TrajectoryBufferSample


class ExperiencePair(NamedTuple, Generic[Experience]):
    """Two rows that follow each other: pytrees with leaves [B, ...].

    `second` may belong to the next episode.
    """

    first: Experience
    second: Experience


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
) -> TrajectoryBuffer:
    """Make a buffer of pairs of time steps that follow each other, which are sampled uniformly.

    Args:
      max_length: Number of steps of all envs that are kept, rounded down to a multiple of E.
      min_length: Number of steps from which on `can_sample` is True.
      sample_batch_size: Number of pairs B in a sample.
      add_sequences: Let `add` take leaves [E, T, ...] in place of [E, ...]. Default: False.
      add_batch_size: Number of envs E. Default: one env, and leaves without the axis E.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_flat_buffer"
    length, minimum = flat_sizes(where, max_length, min_length, add_batch_size)
    return uniform(
        min_length=minimum,
        storage=storage_of(where, add_batch_size or 1, length, sample_batch_size, Pair()),
        has_envs=add_batch_size is not None,
        has_time=add_sequences,
    )


class Pair(View[ExperiencePair]):
    """Read the sampled row and the next."""

    @property
    def window(self) -> Window:
        return Window(after=1)

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> ExperiencePair:
        both = reader.item(ring.arange(2))
        return ExperiencePair(*(jax.tree.map(operator.itemgetter(nth), both) for nth in (0, 1)))

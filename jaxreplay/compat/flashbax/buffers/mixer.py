"""Mixers, which sample several buffers at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Key
from jaxreplay.compat.flashbax._storage import checked
from jaxreplay.compat.flashbax.buffers.flat_buffer import TransitionSample as TransitionSample
from jaxreplay.compat.flashbax.buffers.prioritised_trajectory_buffer import (
    PrioritisedTrajectoryBuffer as PrioritisedTrajectoryBuffer,
    PrioritisedTrajectoryBufferSample as PrioritisedTrajectoryBufferSample,
    PrioritisedTrajectoryBufferState as PrioritisedTrajectoryBufferState,
    TrajectoryBuffer as TrajectoryBuffer,
    TrajectoryBufferSample as TrajectoryBufferSample,
    TrajectoryBufferState as TrajectoryBufferState,
)
from jaxreplay.storage import ring


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Pure functions that sample several buffers at once.

    Attributes:
      sample: Function from a list of states and a random key to a sample: the parts of the buffers,
        in their order.
      can_sample: Function from a list of states to bool[]: whether each buffer can be sampled.
    """

    sample: Callable[[Sequence[Any], Key], Any]
    can_sample: Callable[[Sequence[Any]], jax.Array]


def make_mixer(
    buffers: Sequence[Any], sample_batch_size: int, proportions: Sequence[float]
) -> Mixer:
    """Make a mixer, which samples several buffers at once.

    Args:
      buffers: Buffers of one kind.
      sample_batch_size: Number of items of all buffers together in a sample. Each buffer's own
        batch must have at least its part of them.
      proportions: Part of each buffer, in any unit. What rounding down leaves goes to the first.

    Raises:
      ValueError: There is not one proportion for each buffer, or one is negative.
    """
    where = "make_mixer"
    checked(where, "sample_batch_size", sample_batch_size)
    if len(buffers) != len(proportions) or not buffers:
        raise ValueError(
            f"{where}: each buffer needs one proportion, got {len(buffers)} buffers and "
            f"{len(proportions)} proportions"
        )
    total = sum(proportions)
    if min(proportions) < 0 or not total > 0:
        raise ValueError(
            f"{where}: proportions must be at least 0, and one positive, got {proportions}"
        )
    sizes = [int(part / total * sample_batch_size) for part in proportions]
    sizes[0] += sample_batch_size - sum(sizes)

    def sample(states: Sequence[Any], key: Key) -> Any:
        keys = jax.random.split(key, 2 * len(buffers))
        parts = [
            _part(buffer.sample(state, sample_key), part_key, size)
            for buffer, state, sample_key, part_key, size in zip(
                buffers, states, keys[::2], keys[1::2], sizes, strict=True
            )
        ]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

    def can_sample(states: Sequence[Any]) -> jax.Array:
        return jnp.stack(
            [buffer.can_sample(state) for buffer, state in zip(buffers, states, strict=True)]
        ).all()

    return Mixer(sample, can_sample)


def _part(batch: Any, key: Key, size: int) -> Any:
    """Return `size` different items of a batch, spread evenly over it from a random place on.

    A batch with priorities is stratified: its first items are those of the first rows.
    """
    found = len(jax.tree.leaves(batch)[0])
    if size > found:
        raise ValueError(
            f"make_mixer: a part of {size} items needs a buffer with sample_batch_size of at "
            f"least {size}, got {found}"
        )
    if size == found:
        return batch
    place = (ring.arange(size) + jax.random.uniform(key)) * (found / max(size, 1))
    chosen = jnp.minimum(place.astype(jnp.int32), found - 1)
    return jax.tree.map(lambda leaf: leaf[chosen], batch)

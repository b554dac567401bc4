"""Uniform over episodes, then over the steps of the one drawn: a step of a short episode is drawn
as often as all of a long one's share."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.sampler import Draw, Sampler
from jaxreplay.storage.layout import Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by
from jaxreplay.storage.streams import of_stream


class UniformEpisodes(Sampler):
    """An episode, every one alike, then one of its sampleable rows, every one alike; with
    replacement. O(1), however long the episodes.

    Args:
      unfinished: whether episodes are drawn too that have not ended, or whose first rows are
        overwritten. Otherwise only complete ones.
    """

    unfinished: bool = False

    def window(self, window: Window) -> Window:
        is_run = (
            window.before == 0 and window.after in (0, 1)
            if self.unfinished
            else not window.crosses_episodes
        )
        if window.period != 1 or not is_run:
            raise ValueError(
                "UniformEpisodes: the sampleable rows of an episode must be one run, which they "
                "are not for a view with a period or across "
                "episodes or, with unfinished=True, with a look-back or a look-ahead of more than "
                "a row; use the sampler Uniform"
            )
        return dataclasses.replace(
            window if self.unfinished else window.widened(before=None, after=None),
            needs_episodes=True,
        )

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        high, low = random.words(key, batch_size)
        skipped, count = self._stored(sampleable)
        total = count.sum(dtype=jnp.int32)
        env, nth = split_by(count, random.below(high, low, total), sampleable.layout.traits)
        first, _ = sampleable.episodes.range_of(env, nth + skipped[env])
        size = self._size_of(sampleable, first)
        nth_row = random.below(*random.remix(high, low, jnp.uint32(0)), size)
        return Draw(state, sampleable.layout.ahead(first, nth_row), _probability(total, size))

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        del state
        _, count = self._stored(sampleable)
        return _probability(count.sum(dtype=jnp.int32), self._size_of(sampleable, row))

    def _stored(self, sampleable: Sampleable) -> tuple[jax.Array, jax.Array]:
        """Episodes of each stream, from its oldest on, that come before the first one to draw from,
        and those to draw from: int32[E] each.

        Only the oldest and the newest one may have no sampleable row.
        """
        env = sampleable.layout.envs()
        count = sampleable.episodes.num_episodes()

        def is_empty(nth):
            first, _ = sampleable.episodes.range_of(env, jnp.maximum(nth, 0))
            return (self._size_of(sampleable, first) == 0).astype(jnp.int32)

        skipped = is_empty(jnp.zeros_like(count))
        return skipped, jnp.maximum(count - skipped - is_empty(count - 1), 0)

    def _size_of(self, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """Sampleable rows of each row's episode, a run from its first row on: int32[...]."""
        layout, streams, episodes = sampleable.layout, sampleable.streams, sampleable.episodes
        env, _ = layout.split(row)
        before, after = episodes.steps_from_start(row), episodes.steps_to_end(row)
        # A final row may be the last row, and the newest rows may be pending; what is cut are whole
        # episodes.
        size = before + after + sampleable.is_candidate(layout.ahead(row, after))
        age = streams.age(layout.ahead(row, -before))
        size = jnp.minimum(size, age + 1 - of_stream(sampleable.num_pending, env))
        is_expired = age >= of_stream(streams.filled, env) - of_stream(sampleable.num_expired, env)
        return jnp.where(is_expired, 0, jnp.maximum(size, 0))


def _probability(total: jax.Array, size: jax.Array) -> jax.Array:
    """Of one row of an episode that has `size` rows to draw from, where there are `total` episodes:
    float32[...]."""
    product = jnp.maximum(total, 1).astype(jnp.float32) * jnp.maximum(size, 1).astype(jnp.float32)
    return jnp.where((total > 0) & (size > 0), 1 / product, 0)

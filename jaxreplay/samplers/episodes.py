"""Uniform sampling of an episode, then of a row in it. Episodes are equally probable, so rows of
short episodes are sampled more often."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.sampler import Draw, Sampler
from jaxreplay.storage.layout import Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.search import split_by
from jaxreplay.storage.state import of_stream


class UniformEpisodes(Sampler):
    """Sample an episode uniformly, then one of its sampleable rows uniformly, with replacement.

    The time does not depend on the lengths of episodes.

    Args:
      unfinished: Also sample episodes that have not ended, and episodes whose first rows are
        overwritten. Default: False, only complete episodes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.transitions(
      ...     capacity=8,
      ...     batch_size=4,
      ...     autoreset="same_step_no_final_obs",
      ...     sampler=jr.UniformEpisodes(),
      ... )
      >>> done = jnp.array([False, False, True, True])[:, None]  # episodes of 3 steps and of 1
      >>> time = jnp.arange(4.0)[:, None]
      >>> steps = jr.Step(
      ...     obs=time, action=time, reward=time, terminated=done, truncated=done & False
      ... )
      >>> state = buffer.init(jax.tree.map(lambda x: x[0, 0], steps))
      >>> state = jax.jit(buffer.extend)(state, steps)
      >>> print(buffer.get(state, jnp.arange(4)).probability * 6)  # 1/2 * 1/3, and 1/2 * 1/1
      [1. 1. 1. 3.]
      >>> def oracle(episodes, B, rng):  # episodes: the rows of each
      ...     return [rng.choice(episodes[rng.integers(len(episodes))]) for _ in range(B)]
    """

    unfinished: bool = False

    def window(self, window: Window) -> Window:
        is_run = (
            window.before == 0 and window.after in (0, 1)
            if self.unfinished
            else not window.crosses_episodes
        )
        if window.period != 1 or not (is_run and window.needs_next_obs):
            raise ValueError(
                "UniformEpisodes: the sampleable rows of an episode must be contiguous. They are "
                "not if the view has a period above 1, or samples steps without a next "
                "observation; with unfinished=False, if it crosses episodes; with unfinished=True, "
                "if it reads rows before the candidate or more than one row after it. Use "
                "sampler=jaxreplay.Uniform()"
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

    def mass(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the number of episodes."""
        _, count = self._stored(sampleable)
        return count.sum(dtype=jnp.int32).astype(jnp.float32)

    def _stored(self, sampleable: Sampleable) -> tuple[jax.Array, jax.Array]:
        """Count each stream's oldest episodes to skip, and the episodes to sample from.

        Only the oldest and the newest episode may have no sampleable row.

        Returns:
          int32[E], the number of skipped episodes; int32[E], the number of episodes after these.
        """
        env = sampleable.layout.envs()
        count = sampleable.episodes.num_episodes()

        def is_empty(nth):
            first, _ = sampleable.episodes.range_of(env, jnp.maximum(nth, 0))
            return (self._size_of(sampleable, first) == 0).astype(jnp.int32)

        skipped = is_empty(jnp.zeros_like(count))
        return skipped, jnp.maximum(count - skipped - is_empty(count - 1), 0)

    def _size_of(self, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """Count the sampleable rows of each row's episode, contiguous from its first row:
        int32[...]."""
        layout, state, episodes = sampleable.layout, sampleable.state, sampleable.episodes
        env, _ = layout.split(row)
        before, after = episodes.steps_from_start(row), episodes.steps_to_end(row)
        # The last row may be a final row, and the newest rows may be pending. Expired rows are
        # whole episodes.
        size = before + after + sampleable.is_candidate(layout.ahead(row, after))
        age = state.age(layout.ahead(row, -before))
        size = jnp.minimum(size, age + 1 - of_stream(sampleable.num_pending, env))
        is_expired = age >= of_stream(state.filled, env) - of_stream(sampleable.num_expired, env)
        return jnp.where(is_expired, 0, jnp.maximum(size, 0))


def _probability(total: jax.Array, size: jax.Array) -> jax.Array:
    """Return the probability of a row, given the number of episodes and the number of sampleable
    rows in its episode: float32[...]."""
    product = jnp.maximum(total, 1).astype(jnp.float32) * jnp.maximum(size, 1).astype(jnp.float32)
    return jnp.where((total > 0) & (size > 0), 1 / product, 0)

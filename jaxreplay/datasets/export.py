"""A buffer's episodes."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree, Stored
from jaxreplay._util.pow2 import power_above
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.datasets.episodes import Episode, cut
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.state import ReplayState


def to_episodes(
    buffer: ReplayBuffer, state: ReplayState, *, include_partial: bool = False
) -> Iterator[Episode]:
    """Return the episodes of a buffer, env by env, oldest first, one at a time.

    Narrow floats (bfloat16, 8 bits) become float32. If the buffer lacks the final observation of a
    terminated episode, the last observation is repeated; no target reads it. This always holds with
    `autoreset="same_step_no_final_obs"`, and for an episode whose final row has not been added yet.

    Args:
      buffer: A `ReplayBuffer` of steps.
      state: The buffer's state.
      include_partial: If True, also return episodes whose start was overwritten, and unfinished
        ones. Those are truncated at the newest row, which becomes their final observation.
        Default: False.

    Returns:
      Iterator of episodes of NumPy arrays, whose `id` counts them.

    Raises:
      ValueError: The buffer holds items, or the state belongs to another buffer.

    Example:
      >>> import numpy as np, jaxreplay as jr
      >>> from jaxreplay.datasets import Episode, from_episodes, to_episodes
      >>> buffer = jr.uniform(capacity=8, batch_size=2, autoreset="next_step")
      >>> flags = np.array([False, False])
      >>> episode = Episode(np.arange(3.0), np.zeros(2), np.ones(2), flags, flags)
      >>> state = from_episodes([episode], buffer)
      >>> [one.observations.tolist() for one in to_episodes(buffer, state)]
      [[0.0, 1.0, 2.0]]
    """
    buffer = buffer_of("to_episodes", buffer)
    if buffer.autoreset is None:
        raise ValueError("to_episodes: takes a buffer of steps, since items have no episodes")
    if (
        not isinstance(state, ReplayState)
        or len(jax.tree.leaves(state.rows.flags)[0]) != buffer.capacity
    ):
        raise ValueError(
            f"to_episodes: the state belongs to another buffer; this one has {buffer.capacity} rows"
        )
    found = _found(buffer, state, include_partial)
    return (episode._replace(id=number) for number, episode in enumerate(found))


def _found(buffer: ReplayBuffer, state: ReplayState, include_partial: bool) -> Iterator[Episode]:
    layout, counters = state.layout, state.counters
    head, filled = np.array(counters.position), np.array(counters.filled)
    for env in range(buffer.num_envs):
        row = env * layout.length + ring.position_of(
            head[env] - filled[env] + np.arange(filled[env]), layout.length
        )
        own = _read(state.rows.flags, row)
        closes = np.asarray(layout.closes_episode(own))
        for start, end in itertools.pairwise([0, *(np.flatnonzero(closes) + 1).tolist(), len(own)]):
            if episode := _episode(
                state.rows.steps,
                own[start:end],
                row[start:end],
                end > start and bool(closes[end - 1]),
                include_partial,
            ):
                yield episode


def _episode(
    steps: PyTree, flags: np.ndarray, row: np.ndarray, is_closed: bool, include_partial: bool
) -> Episode | None:
    """Convert consecutive rows to an episode, or return None if it has no step or is left out."""
    if not len(row) or not (include_partial or (is_closed and flags[0] & row_flags.FIRST)):
        return None
    # The newest row of an unfinished episode serves as its final observation.
    ends_in_tail = bool(flags[-1] & row_flags.FINAL) or not (
        is_closed or flags[-1] & row_flags.TERMINATED
    )
    length = len(row) - ends_in_tail
    if not length:
        return None
    values = _read(steps.replace(final_obs=None), row)
    terminated, truncated = (
        (flags[:length] & bit) != 0 for bit in (row_flags.TERMINATED, row_flags.TRUNCATED)
    )
    truncated[-1] |= not terminated[-1]
    observations = (
        values.obs
        if ends_in_tail
        else jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[-1:]]), values.obs)
    )
    action, reward, extras = cut((values.action, values.reward, values.extras), 0, length)
    return Episode(observations, action, reward, terminated, truncated, extras=extras)


def _read(stored: Stored, row: np.ndarray) -> Any:
    """Read rows, int64[K], to the host."""
    padded = np.resize(row, power_above(len(row))).astype(np.int32)  # few programs are compiled
    found = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(row)], _take(stored, padded))
    return jax.tree.map(_plain, found)


def _plain(values: np.ndarray) -> np.ndarray:
    """Cast to a dtype of NumPy's own."""
    if stored_arrays.carrier(values.dtype) is None:
        return values
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(np.float32)
    return values.astype(np.int8 if jnp.issubdtype(values.dtype, jnp.signedinteger) else np.uint8)


@jax.jit
def _take(stored: Stored, row: jax.Array) -> Any:
    return stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, row), stored)

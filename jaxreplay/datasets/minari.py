"""Import and export of Minari datasets: episodes of T transitions and T + 1 observations, as a
buffer stores them; needs `jaxreplay[minari]`.

    dataset = minari.load_dataset("D4RL/door/human-v2")
    capacity = required_capacity(dataset)
    buffer = jr.uniform(capacity=capacity, batch_size=256, autoreset="next_step")
    state = from_minari(dataset, buffer)
    dataset = to_minari(buffer, state, "mine/door-v0", env="AdroitHandDoor-v1")
"""

import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree, Stored

try:
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.storage.datasets_root_dir import get_dataset_path
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f"jaxreplay.datasets needs {error.name}: pip install 'jaxreplay[minari]'"
    ) from error

from jaxreplay._util.pow2 import power_above
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.datasets.episodes import check_buffer, fill
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.state import ReplayState

_MOST_BYTES = 16 * 2**20  # of episodes written at once; a larger episode is written alone


def required_capacity(dataset: Any) -> int:
    """Return the number of rows that a dataset needs in a buffer.

    Each transition needs one row, and each episode one more for its final observation. An end
    before an episode's last step needs one more row, which only `from_minari` can count.

    Args:
      dataset: A `minari.MinariDataset`.
    """
    return dataset.total_steps + dataset.total_episodes


def from_minari(
    dataset: Any,
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    into: ReplayState | None = None,
    progress: bool | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of a dataset.

    Memory holds the state, and one episode at a time with some copies of it. If a dataset's episode
    has an end before its last step, the next step opens another episode. If an episode has no end,
    its last step is truncated.

    Args:
      dataset: A `minari.MinariDataset`. Its infos are left out.
      buffer: A `ReplayBuffer` of steps with any `num_envs` and `autoreset`.
      example: One env's step, as for `buffer.init`. Default: the dataset's shapes and dtypes, cut
        to 32 bits while `jax_enable_x64` is off.
      into: State of the buffer to add to, as for `from_episodes`. Donated. Default: an empty one.
      progress: If True, show a progress bar. Default: only in a terminal.

    Returns:
      The state.

    Raises:
      ValueError: The buffer is too small or does not store steps, the dataset is empty,
        or a leaf does not fit the example or cannot be stored.
    """
    check_buffer("from_minari", buffer)
    if dataset.total_steps > buffer.capacity:
        raise ValueError(
            f"from_minari: capacity={buffer.capacity} is too small; required_capacity(dataset) is "
            f"{required_capacity(dataset)}"
        )
    too_small = (
        f"required_capacity(dataset) is {required_capacity(dataset):,}, and each end within an "
        "episode needs one more row"
    )
    episodes = _progress(dataset.iterate_episodes(), dataset.total_episodes, progress)
    return fill("from_minari", episodes, buffer, example, into, too_small)


def _progress(episodes: Any, total: int, progress: bool | None) -> Any:
    hidden = None if progress is None else not progress
    return tqdm(episodes, total=total, desc="from_minari", unit="episode", disable=hidden)


def to_minari(
    buffer: ReplayBuffer,
    state: ReplayState,
    dataset_id: str,
    *,
    include_partial: bool = False,
    **options: Any,
) -> Any:
    """Write a buffer's episodes to a new local dataset.

    Episodes are written env by env, oldest first, a few at a time. Narrow floats (bfloat16, 8
    bits) become float32. If the buffer lacks the final observation of a terminated episode, the
    last observation is repeated; no target reads it. This always holds with
    `autoreset="same_step_no_final_obs"`, and for an episode whose final row has not been added yet.

    Args:
      buffer: A `ReplayBuffer` of steps.
      state: The buffer's state.
      dataset_id: Minari's name of the new dataset, such as "mine/door-v0".
      include_partial: If True, also write episodes whose start was overwritten, and unfinished
        ones. Those are truncated at the newest row, which becomes their final observation.
        Default: False.
      options: Arguments of `minari.create_dataset_from_buffers`, such as `env`, or both spaces.
        Images are stored losslessly, unless `jpeg_encoding=True`.

    Returns:
      The `minari.MinariDataset`.

    Raises:
      ValueError: The buffer holds items or no intact episode, its rewards are not one array, the
        state belongs to another buffer, or the dataset exists.
    """
    if not isinstance(buffer, ReplayBuffer) or buffer.autoreset is None:
        raise ValueError(
            "to_minari: buffer must be a ReplayBuffer of steps, since items have no episodes"
        )
    if (
        not isinstance(state, ReplayState)
        or len(jax.tree.leaves(state.rows.flags)[0]) != buffer.capacity
    ):
        raise ValueError(
            f"to_minari: the state belongs to another buffer; this one has {buffer.capacity} rows"
        )
    reward = jax.tree.structure(state.rows.steps.reward, is_leaf=stored_arrays.is_compound)
    if not jax.tree_util.treedef_is_leaf(reward):
        raise ValueError("to_minari: a Minari step has one reward, but the buffer's are a pytree")
    path = get_dataset_path(dataset_id)
    if path.exists():
        raise ValueError(f"to_minari: pass another dataset_id, since {dataset_id} exists: {path}")
    batches = _batches(_episodes(buffer, state, include_partial))
    if (first := next(batches, None)) is None:
        raise ValueError(
            f"to_minari: there is no {'transition' if include_partial else 'intact episode'} in "
            "the buffer"
        )
    try:
        dataset = minari.create_dataset_from_buffers(
            dataset_id, first, **{"jpeg_encoding": False, **options}
        )
        for batch in batches:
            dataset.update_dataset_from_buffer(batch)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # a partial dataset would look complete
        raise
    return dataset


def _batches(episodes: Iterator[EpisodeBuffer]) -> Iterator[list[EpisodeBuffer]]:
    """Yield lists of episodes: each write by Minari goes through all of a dataset's files."""
    batch, num_bytes = [], 0
    for episode in episodes:
        batch.append(episode)
        num_bytes += sum(
            leaf.nbytes for leaf in jax.tree.leaves((episode.observations, episode.actions))
        )
        if num_bytes >= _MOST_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _episodes(buffer: ReplayBuffer, state: ReplayState, include_partial: bool) -> Iterator[Any]:
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
) -> Any:
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
    values = _read(steps.replace(final_obs=None, extras=None), row)
    terminated, truncated = (
        (flags[:length] & bit) != 0 for bit in (row_flags.TERMINATED, row_flags.TRUNCATED)
    )
    truncated[-1] |= not terminated[-1]
    observations = (
        values.obs
        if ends_in_tail
        else jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[-1:]]), values.obs)
    )
    return EpisodeBuffer(
        observations=observations,
        actions=jax.tree.map(lambda leaf: leaf[:length], values.action),
        rewards=list(values.reward[:length]),
        terminations=list(terminated),
        truncations=list(truncated),
    )


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

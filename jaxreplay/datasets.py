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

from jaxreplay._util import checks
from jaxreplay._util.names import named
from jaxreplay._util.pow2 import power_above, power_below
from jaxreplay.buffers.jitted import jit
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.sampleable import ReplayState
from jaxreplay.types import Step

_MOST_STEPS = 1024  # added at once
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
    dataset: Any, buffer: ReplayBuffer, example: PyTree = None, *, progress: bool | None = None
) -> ReplayState:
    """Return a buffer's state with all transitions of a dataset.

    Memory holds the state, and one episode at a time with some copies of it. If a dataset's episode
    has an end before its last step, the next step opens another episode. If an episode has no end,
    its last step is truncated.

    Args:
      dataset: A `minari.MinariDataset`. Its infos are left out.
      buffer: A `ReplayBuffer` of steps with `num_envs=1` and any `autoreset`.
      example: One env's step, as for `buffer.init`. Default: the dataset's shapes and dtypes, cut
        to 32 bits while `jax_enable_x64` is off.
      progress: If True, show a progress bar. Default: only in a terminal.

    Returns:
      The state.

    Raises:
      ValueError: The buffer is too small or does not store steps of one env, the dataset is empty,
        or a leaf does not fit the example or cannot be stored.
    """
    if not isinstance(buffer, ReplayBuffer) or buffer.autoreset is None or buffer.num_envs != 1:
        raise ValueError(
            "from_minari: buffer must be a ReplayBuffer of steps with num_envs=1, since a dataset "
            "is one stream of episodes"
        )
    form, state, waiting, used = buffer.autoreset, None, [], 0
    if dataset.total_steps > buffer.capacity:
        raise ValueError(
            f"from_minari: capacity={buffer.capacity} is too small; required_capacity(dataset) is "
            f"{required_capacity(dataset)}"
        )
    most = min(_MOST_STEPS, power_below(buffer.capacity))
    hidden = None if progress is None else not progress
    for episode in tqdm(
        dataset.iterate_episodes(),
        total=dataset.total_episodes,
        desc="from_minari",
        unit="episode",
        disable=hidden,
    ):
        if not len(episode.rewards):
            continue
        steps = _steps_of(episode, form)
        used += len(steps.reward) + (
            int((steps.terminated | steps.truncated).sum()) if form == "same_step" else 0
        )
        if used > buffer.capacity:
            raise ValueError(
                f"from_minari: capacity={buffer.capacity} is too small: episode {episode.id} ends "
                f"in row {used:,}; required_capacity(dataset) is "
                f"{required_capacity(dataset):,}, and each end within an episode needs one more row"
            )
        example = _example_of(steps) if example is None else example
        state = buffer.init(example) if state is None else state
        waiting.append(_fitted(steps, example, f"episode {episode.id}"))
        if sum(len(steps.reward) for steps in waiting) >= most:
            state, waiting = _extended(buffer, state, waiting, most)
    if state is None:
        raise ValueError("from_minari: the dataset has no transitions")
    while waiting:  # powers of two: each size of a block is compiled
        state, waiting = _extended(
            buffer, state, waiting, power_below(sum(len(steps.reward) for steps in waiting))
        )
    return state


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
      ValueError: The buffer holds items or no intact episode, the state belongs to another buffer,
        or the dataset exists.
    """
    if not isinstance(buffer, ReplayBuffer) or buffer.autoreset is None:
        raise ValueError(
            "to_minari: buffer must be a ReplayBuffer of steps, since items have no episodes"
        )
    if (
        not isinstance(state, ReplayState)
        or len(jax.tree.leaves(state.streams.flags)[0]) != buffer.capacity
    ):
        raise ValueError(
            f"to_minari: the state belongs to another buffer; this one has {buffer.capacity} rows"
        )
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


def _steps_of(episode: Any, form: str) -> Step:
    """Convert an episode to K steps, leaves [K, ...]: its transitions and, with next-step
    autoreset, one for each final observation."""
    reward, terminated, truncated = (
        np.asarray(x) for x in (episode.rewards, episode.terminations, episode.truncations)
    )
    length = len(reward)
    for part, expected in (("observations", length + 1), ("actions", length)):
        # Minari returns values that are no arrays as a list.
        for name, leaf in named(
            getattr(episode, part), is_leaf=lambda leaf: isinstance(leaf, list)
        ):
            if np.asarray(leaf).dtype.kind not in "biuf" or np.shape(leaf)[:1] != (expected,):
                what = f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}"
                raise ValueError(
                    f"from_minari: episode {episode.id}: {part}{name and '.' + name}: expected "
                    f"{expected} numbers or arrays, got {what}"
                )
    observations, actions = jax.tree.map(np.asarray, (episode.observations, episode.actions))
    truncated = truncated | (~(terminated | truncated) & (np.arange(length) == length - 1))

    def at(tree: PyTree, index: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], tree)

    if form != "next_step":
        return Step(
            at(observations, slice(-1)),
            actions,
            reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=at(observations, slice(1, None)) if form == "same_step" else None,
        )
    ends = np.flatnonzero(terminated | truncated) + 1
    now = np.insert(np.arange(length), ends, ends)
    step = np.insert(np.arange(length), ends, ends - 1)
    is_step = np.insert(np.ones(length, bool), ends, False)
    reward = reward[step]
    reward[~is_step] = 0
    return Step(
        at(observations, now),
        at(actions, step),
        reward,
        terminated=terminated[step] & is_step,
        truncated=truncated[step] & is_step,
    )


def _example_of(steps: Step) -> Step:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), steps)


def _fitted(steps: Step, example: PyTree, where: str) -> Step:
    """Cast to the example's dtypes. Leaves that do not fit stay, so that `extend` names them."""
    dtypes = {
        name: np.dtype(leaf.dtype) for name, leaf in named(checks.specs("from_minari", example))
    }

    def fitted(name: str, leaf: np.ndarray) -> np.ndarray:
        dtype = dtypes.get(name, leaf.dtype)
        are_integers = leaf.dtype.kind in "iu" and dtype.kind in "iu"
        if not are_integers and not np.can_cast(leaf.dtype, dtype, "same_kind"):
            return leaf
        return checks.cast(
            f"from_minari: {where}: {name}",
            leaf,
            dtype,
            "the example's dtype; pass an example with another dtype",
        )

    return jax.tree.unflatten(
        jax.tree.structure(steps), [fitted(name, leaf) for name, leaf in named(steps)]
    )


def _extended(
    buffer: ReplayBuffer, state: ReplayState, waiting: list[Step], size: int
) -> tuple[ReplayState, list[Step]]:
    """Add the waiting steps in blocks of `size`; return the state and the steps that are left."""
    joined = jax.tree.map(lambda *include_partial: np.concatenate(include_partial), *waiting)
    whole = len(joined.reward) // size * size
    for start in range(0, whole, size):
        state = jit(buffer).extend(
            state, jax.tree.map(lambda leaf, start=start: leaf[start : start + size, None], joined)
        )
    return state, [jax.tree.map(lambda leaf: leaf[whole:].copy(), joined)] if whole < len(
        joined.reward
    ) else []


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
    layout, counters = state.layout, state.streams.counters
    head, filled = np.array(counters.position), np.array(counters.filled)
    for env in range(buffer.num_envs):
        row = env * layout.length + ring.position_of(
            head[env] - filled[env] + np.arange(filled[env]), layout.length
        )
        own = _read(state.streams.flags, row)
        closes = np.asarray(layout.closes_episode(own))
        for start, end in itertools.pairwise([0, *(np.flatnonzero(closes) + 1).tolist(), len(own)]):
            if episode := _episode(
                state.streams.steps,
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

"""Minari datasets, in and out: episodes of T transitions and T + 1 observations, as streams store
them; needs `jaxreplay[minari]`.

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

_MOST_STEPS = 1024  # that are added at once
_MOST_BYTES = 16 * 2**20  # of episodes that are written at once, but for one that is larger


def required_capacity(dataset: Any) -> int:
    """The rows that a `minari.MinariDataset` takes: one for each transition, and one for each
    episode's final observation. An episode that has an end before its last step takes one more for
    that, which only `from_minari` sees."""
    return dataset.total_steps + dataset.total_episodes


def from_minari(
    dataset: Any, buffer: ReplayBuffer, example: PyTree = None, *, progress: bool | None = None
) -> ReplayState:
    """A buffer's state with all of a dataset's transitions. Beside it, an episode at a time and
    some copies of it are in memory.

    Where the dataset has an end within an episode, another one begins there; an episode without an
    end is truncated.

    Args:
      dataset: a `minari.MinariDataset`. Its infos are left out.
      buffer: of one env, since episodes follow each other; its `autoreset` may be any form.
      example: as for `init`; by default the dataset's own shapes and dtypes, of 32 bits where these
        have 64 and `jax_enable_x64` is off.
      progress: whether to show a bar; None: if this is a terminal.

    Raises:
      ValueError: the buffer is too small, or has no streams of steps; or a leaf does not fit the
        example, or cannot be stored.
    """
    if not isinstance(buffer, ReplayBuffer) or buffer.autoreset is None or buffer.num_envs != 1:
        raise ValueError(
            "from_minari: buffer must be a ReplayBuffer of steps with num_envs=1: its episodes "
            "follow each other"
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
                f"{required_capacity(dataset):,}, and each end within an episode takes one more"
            )
        example = _example_of(steps) if example is None else example
        state = buffer.init(example) if state is None else state
        waiting.append(_fitted(steps, example, f"episode {episode.id}"))
        if sum(len(steps.reward) for steps in waiting) >= most:
            state, waiting = _extended(buffer, state, waiting, most)
    if state is None:
        raise ValueError("from_minari: the dataset has no transitions")
    while waiting:  # in blocks of few sizes, each of which is compiled
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
    """A new local dataset of a buffer's episodes, stream after stream, the oldest first. Few of
    them are in memory at once.

    The final observation of a terminated episode is its last one once more where the buffer does
    not have it: always with `autoreset="same_step_no_final_obs"`, and for an end whose
    final row is still to come. No target reads it. Narrow floats (bfloat16, 8 bits) become float32.

    Args:
      include_partial: whether to take along what is stored of episodes that began before the oldest
        row, or that go on. Those that go on are truncated at the newest row, which is their final
        observation.
      options: of `minari.create_dataset_from_buffers`, such as `env`, or both spaces. Images are
        kept exactly, unless `jpeg_encoding=True`.

    Returns:
      the `minari.MinariDataset`.

    Raises:
      ValueError: there is no whole episode, or the buffer holds items, or there is such a dataset.
    """
    if not isinstance(buffer, ReplayBuffer) or buffer.autoreset is None:
        raise ValueError(
            "to_minari: buffer must be a ReplayBuffer of steps: items have no episodes"
        )
    if (
        not isinstance(state, ReplayState)
        or len(jax.tree.leaves(state.streams.flags)[0]) != buffer.capacity
    ):
        raise ValueError(
            f"to_minari: the state is not of this buffer, which has {buffer.capacity} rows"
        )
    path = get_dataset_path(dataset_id)
    if path.exists():
        raise ValueError(f"to_minari: there is a dataset {dataset_id} already: {path}")
    batches = _batches(_episodes(buffer, state, include_partial))
    if (first := next(batches, None)) is None:
        raise ValueError(
            f"to_minari: there is no {'transition' if include_partial else 'whole episode'} in "
            "the buffer"
        )
    try:
        dataset = minari.create_dataset_from_buffers(
            dataset_id, first, **{"jpeg_encoding": False, **options}
        )
        for batch in batches:
            dataset.update_dataset_from_buffer(batch)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # a half would be taken for a whole
        raise
    return dataset


def _steps_of(episode: Any, form: str) -> Step:
    """Leaves `[K, ...]`: the transitions and, with next-step autoreset, a step for each final
    observation."""
    reward, terminated, truncated = (
        np.asarray(x) for x in (episode.rewards, episode.terminations, episode.truncations)
    )
    length = len(reward)
    for part, expected in (("observations", length + 1), ("actions", length)):
        # what is no array comes as a list
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
    """In the example's dtypes; what does not fit is left as it is, for `extend` to name."""
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
            "as the example has it; give one with another dtype",
        )

    return jax.tree.unflatten(
        jax.tree.structure(steps), [fitted(name, leaf) for name, leaf in named(steps)]
    )


def _extended(
    buffer: ReplayBuffer, state: ReplayState, waiting: list[Step], size: int
) -> tuple[ReplayState, list[Step]]:
    """The state with all whole blocks of `size` steps that wait, and the steps that are left."""
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
    """Some at a time: Minari goes through all of a dataset's files with each write."""
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
    layout, heads = state.layout, state.streams.heads
    head, filled = np.array(heads.position), np.array(heads.filled)
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
    """An episode of rows that follow each other, or None where there is nothing of it to give."""
    if not len(row) or not (include_partial or (is_closed and flags[0] & row_flags.FIRST)):
        return None
    # The newest row of one that goes on is an observation alone.
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
    """Values of rows int64[K], on the host."""
    padded = np.resize(row, power_above(len(row))).astype(np.int32)  # few programs are compiled
    found = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(row)], _take(stored, padded))
    return jax.tree.map(_plain, found)


def _plain(values: np.ndarray) -> np.ndarray:
    """In a dtype that NumPy itself has."""
    if stored_arrays.carrier(values.dtype) is None:
        return values
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(np.float32)
    return values.astype(np.int8 if jnp.issubdtype(values.dtype, jnp.signedinteger) else np.uint8)


@jax.jit
def _take(stored: Stored, row: jax.Array) -> Any:
    return stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, row), stored)

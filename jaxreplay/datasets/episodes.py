"""Episodes, and a buffer's state made of them.

A source of rows is read a block at a time, and a block goes to the buffer before the end of its
last episode is read: an episode may be larger than memory.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import named
from jaxreplay._util.pow2 import power_below
from jaxreplay.buffers.jitted import buffer_of, jit, unjitted
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import example_of
from jaxreplay.buffers.step_checks import as_step
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.host.arrays import Format
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Step

BLOCK_BYTES = 2**22  # of rows that are read, or added, at once
_MOST_STEPS = 1024  # added at once


class Episode(NamedTuple):
    """Episode of T transitions.

    Args:
      observations: Pytree with leaves [T + 1, ...]; the last is the final observation.
      actions: Pytree with leaves [T, ...].
      rewards: Pytree with leaves [T, ...], often one array.
      terminations: bool[T], True where the task ended.
      truncations: bool[T], True where the episode was cut. If no flag is True at the last step, it
        is truncated.
      id: Name in errors. Default: "".
      extras: Pytree with leaves [T, ...]; or [T + 1, ...], as observations, of which the last is
        left out. Default: no further fields.
    """

    observations: PyTree
    actions: PyTree
    rewards: PyTree
    terminations: Any
    truncations: Any
    id: Any = ""
    extras: PyTree = None


class SourceRows(NamedTuple):
    """Consecutive rows of a source, K steps.

    Attributes:
      obs: Pytree with leaves [K, ...].
      action: Pytree with leaves [K, ...].
      reward: Pytree with leaves [K, ...].
      terminated: bool[K].
      truncated: bool[K].
      next_obs: Pytree with leaves [K, ...], or None if the source has none.
      extras: Pytree with leaves [K, ...], or None.
      episode: int64[K], equal for rows of one episode; None if the source has no such numbers.
    """

    obs: PyTree
    action: PyTree
    reward: PyTree
    terminated: np.ndarray
    truncated: np.ndarray
    next_obs: PyTree = None
    extras: PyTree = None
    episode: Any = None


def from_episodes(
    episodes: Iterable[Any],
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    into: ReplayState | None = None,
    progress: bool | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of some episodes, or of a Minari dataset.

    Each episode goes to the env with the fewest rows so far. Memory holds the state, and an episode
    at a time with a copy of it. If an episode has an end before its last step, the next step opens
    another episode. If several envs of the buffer always step together, shorter ones are filled up
    with rows that are never sampled, and the state is copied once.

    Args:
      episodes: `Episode`s, or objects with their fields, such as those of a `minari.MinariDataset`,
        whose infos are left out.
      buffer: A `ReplayBuffer` of steps with any `num_envs` and `autoreset`; or a `jaxreplay.tiered`
        one, whose rows go to the host's memory or to files.
      example: One env's step, as for `buffer.init`. Default: shapes and dtypes of the first
        episode, cut to 32 bits while `jax_enable_x64` is off; or those of `into`.
      into: State of the buffer, to whose rows the episodes are added. Donated. Its unfinished
        episodes end. Default: an empty one; a folder that has rows is refused.
      progress: If True, show a progress bar. Default: only in a terminal, if tqdm is installed.

    Returns:
      The state.

    Raises:
      ImportError: There shall be a progress bar, and tqdm is not installed.
      ValueError: The buffer is too small or does not store steps, its folder has rows already,
        there is no transition, or a leaf does not fit the example or cannot be stored.

    Example:
      >>> import numpy as np, jaxreplay as jr
      >>> from jaxreplay.datasets import Episode, from_episodes
      >>> buffer = jr.uniform(capacity=8, batch_size=2, autoreset="next_step")
      >>> flags = np.array([False, False])
      >>> episode = Episode(np.arange(3.0), np.zeros(2), np.ones(2), flags, flags)
      >>> state = from_episodes([episode, episode], buffer)
      >>> int(buffer.size(state))
      4
    """
    parts = episode_parts("from_episodes", episodes)
    total = getattr(episodes, "total_steps", None)
    return fill("from_episodes", parts, buffer, example, into=into, progress=progress, total=total)


def episode_parts(where: str, episodes: Iterable[Any]) -> Iterator[tuple[str, list[SourceRows]]]:
    """Yield the name of each episode, and its rows."""
    for episode in episodes:
        if len(episode.terminations):
            yield f"episode {episode.id}", [rows_of(where, episode)]


def fill(
    where: str,
    parts: Iterable[tuple[str, Iterable[SourceRows]]],
    buffer: Any,
    example: PyTree,
    *,
    into: ReplayState | None = None,
    final_rows: bool = False,
    progress: bool | None = None,
    total: int | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of some rows.

    Args:
      where: Name of the called function, for errors.
      parts: Names and rows, in blocks. A part's end is the end of an episode.
      buffer: As for `from_episodes`.
      example: As for `from_episodes`.
      into: As for `from_episodes`. Default: an empty state.
      final_rows: As for `steps_of`. Default: False.
      progress: As for `from_episodes`.
      total: Number of rows, for the progress bar. Default: unknown.
    """
    buffer = unjitted(buffer)
    plain = buffer.buffer if isinstance(buffer, Tiered) else buffer_of(where, buffer)
    _check_buffer(where, plain)
    has_mask, calls = plain.num_envs > 1 or plain.allow_mask, buffer
    if not isinstance(buffer, Tiered):
        calls = jit(dataclasses.replace(buffer, allow_mask=has_mask))
        into = into if into is None else calls.adopt(into)
    elif has_mask and not plain.allow_mask:
        raise ValueError(f"{where}: the tiered buffer of several envs needs allow_mask=True")
    if into is not None:
        example = example_of(into.layout, into.rows.steps) if example is None else example
    state = None if into is None else calls.end_streams(into)
    added = blocks(where, parts, plain, example, final_rows, progress, total)
    try:
        for example, steps, mask in added:
            state = _empty(where, calls, example) if state is None else state
            state = calls.extend(state, steps, mask)
    except BaseException:
        if isinstance(buffer, Tiered) and buffer.newest is None:
            buffer.newest = state
        raise
    assert state is not None
    return jit(buffer).adopt(state) if plain is buffer else state


def blocks(
    where: str,
    parts: Iterable[tuple[str, Iterable[SourceRows]]],
    buffer: ReplayBuffer,
    example: PyTree,
    final_rows: bool = False,
    progress: bool | None = None,
    total: int | None = None,
) -> Iterator[tuple[PyTree, Step, np.ndarray | None]]:
    """Yield the example, and blocks of steps for `extend`, each with its mask.

    Args:
      where: As for `fill`, as are the other arguments.
      parts: Names and rows.
      buffer: A `ReplayBuffer`.
      example: One env's step, or None.
      final_rows: As for `steps_of`. Default: False.
      progress: As for `from_episodes`.
      total: Number of rows. Default: unknown.

    Raises:
      ValueError: As for `from_episodes`.
    """
    num_envs, form = buffer.num_envs, buffer.autoreset
    # Envs get episodes of different lengths, so some take no step.
    has_mask = num_envs > 1 or buffer.allow_mask
    waiting: list[list[Step]] = [[] for _ in range(num_envs)]
    counts = [0] * num_envs  # steps that wait
    deal, most = Deal(num_envs, form), 0
    wanted: Any = None
    with _bar(where, total, progress) as update:
        for name, rows in parts:
            for steps, is_last in steps_of(rows, form, final_rows):
                if not most:
                    example = at(steps, 0) if example is None else example
                    step = as_step(where, example)
                    step = step.replace(final_obs=step.obs if form == "same_step" else None)
                    why = "the example's dtype; pass an example with another dtype"
                    wanted = Format(where, buffer, step, why=why)
                    most = _num_steps_at_once(steps, buffer)
                steps = wanted.steps(f"{where}: {name}", steps, is_ours=True)
                wanted.check(f"{where}: {name}", at(steps, 0), ())
                for env, start, stop in deal.places(is_last):
                    if deal.used[env] > buffer.length:
                        of_env = f" in each of {num_envs} envs" if num_envs > 1 else ""
                        raise ValueError(
                            f"{where}: capacity={buffer.capacity} is too small: {name} reaches row "
                            f"{deal.used[env]:,} of {buffer.length:,}{of_env}; datasets."
                            "required_capacity says how many are needed"
                        )
                    waiting[env].append(cut(steps, start, stop))
                    counts[env] += stop - start
                while sum(counts) >= most * num_envs:
                    yield example, *_taken(waiting, counts, most, has_mask)
                update(len(is_last))
        if not most:
            raise ValueError(f"{where}: there is no transition")
        while left := max(counts):  # each size is compiled: one with a mask, else powers of two
            size = most if has_mask else min(most, power_below(left))
            yield example, *_taken(waiting, counts, size, has_mask)


def _empty(where: str, calls: Any, example: PyTree) -> ReplayState:
    """Return an empty state. Raise a ValueError if a folder has rows."""
    state = calls.init(example)
    if isinstance(calls, Tiered) and (num_rows := int(np.sum(state.counters.filled))):
        calls.close()
        raise ValueError(
            f"{where}: {calls.place} has {num_rows:,} rows already, maybe of an import that was "
            "cut off. To begin anew, delete the folder, or pass into=tier.clear(tier.init(example))"
            "; to add to its rows, pass into=tier.init(example)"
        )
    return state


class Deal:
    """Rows dealt to envs: each episode goes to the env with the fewest.

    Args:
      num_envs: Number of envs E.
      form: The buffer's `autoreset`.

    Attributes:
      used: Number of rows of each env, E of them.
    """

    def __init__(self, num_envs: int, form: str | None):
        self.used, self._env = [0] * num_envs, 0
        self._at_an_end = form == "same_step"  # rows that the buffer adds there

    def places(self, is_last: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield env, start and stop of each piece of an episode, of steps that go on from the last
        ones. An episode ends where bool[K] is True."""
        ends = (np.flatnonzero(is_last) + 1).tolist()
        for start, stop in itertools.pairwise([0, *ends, len(is_last)]):
            if start < stop:
                self.used[self._env] += stop - start + (self._at_an_end and bool(is_last[stop - 1]))
                yield self._env, start, stop
                if is_last[stop - 1]:
                    self._env = self.used.index(min(self.used))


def _check_buffer(where: str, buffer: ReplayBuffer) -> None:
    """Raise a ValueError unless a buffer stores steps."""
    if buffer.autoreset is None:
        raise ValueError(f"{where}: takes a buffer of steps, since items have no episodes")
    if buffer.num_agents is not None:
        raise ValueError(f"{where}: an episode has one flag for all agents; leave out num_agents")


def rows_of(where: str, episode: Any) -> SourceRows:
    """Return the rows of an episode."""
    length = len(episode.terminations)
    expected = {"observations": length + 1, "actions": length, "rewards": length, "extras": length}
    expected |= {"terminations": length, "truncations": length}
    found = {}
    # Minari returns values that are no arrays as a list.
    is_list = lambda leaf: isinstance(leaf, list)
    for part, num in expected.items():
        found[part] = jax.tree.map(native, getattr(episode, part, None), is_leaf=is_list)
        for name, leaf in named(found[part]):
            is_flag = part in ("terminations", "truncations")
            if (
                leaf.dtype.kind not in "biuf"
                or leaf.shape[:1] not in ((num,), (num + (part == "extras"),))
                or (is_flag and (leaf.ndim > 1 or not ((leaf == 0) | (leaf == 1)).all()))
            ):
                raise ValueError(
                    f"{where}: episode {episode.id}: {part}{name and '.' + name}: expected {num} "
                    f"{'flags, 0 or 1' if is_flag else 'numbers or arrays'}, got "
                    f"{leaf.dtype}{list(leaf.shape)}"
                )
    return SourceRows(
        at(found["observations"], slice(-1)),
        found["actions"],
        found["rewards"],
        found["terminations"].astype(bool),
        found["truncations"].astype(bool),
        at(found["observations"], slice(1, None)),
        cut(found["extras"], 0, length),
    )


def native(values: Any) -> np.ndarray:
    """Return an array of numbers in the order of bytes of this machine."""
    values = np.asarray(values)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def steps_of(
    blocks: Iterable[SourceRows], form: str | None, final_rows: bool = False
) -> Iterator[tuple[Step, np.ndarray]]:
    """Yield steps [K, ...] of rows that follow each other, and bool[K], the last of each episode.

    An episode ends at a flag, where `part` changes, where `next_obs` is not the next row's
    observation, and with the last row. If its final observation is unknown, it repeats the last one
    after a termination, or if the buffer reads none. Else the last row is the final observation,
    and no step.

    Args:
      blocks: Blocks of rows, in order.
      form: The buffer's `autoreset`.
      final_rows: The row with a flag is the final observation of its episode, and no step. Default:
        False.
    """
    held, is_start = None, True  # rows of which the end of their episode, or the next, is unknown
    for block, is_end in with_last(blocks):
        rows = block if held is None else jax.tree.map(_concatenated, held, block)
        length = len(rows.terminated)
        ends = _ends(rows)
        ends[-1] = True
        has_final = rows.terminated | (form == "same_step_no_final_obs")
        has_final |= rows.next_obs is not None
        is_final = ends & (final_rows | ~has_final)
        starts = np.append(is_start, ends[:-1])
        # the next row is the final one of this row's episode
        is_cut = np.append(is_final[1:], False) & ~ends
        num = length
        if not is_end:
            num = length - 1 if length > 1 and ends[-2] else max(length - 2, 0)
        if num:
            made = _steps(rows, num, form, ends, is_final, is_final & starts, is_cut)
            is_start = bool(ends[num - 1])
            if len(made[1]):
                yield made
        held = cut(rows, num, None)


def with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item, and whether it is the last one."""
    coming = iter(items)
    following = next(coming, None)
    while following is not None:
        item, following = following, next(coming, None)
        yield item, following is None


def _ends(rows: SourceRows) -> np.ndarray:
    """Return whether an episode ends with each row, bool[K]; of the last one, its flags alone."""
    ends = rows.terminated | rows.truncated
    if rows.episode is not None:
        ends[:-1] |= rows.episode[1:] != rows.episode[:-1]
    if rows.next_obs is not None:
        for after, obs in zip(
            jax.tree.leaves(rows.next_obs), jax.tree.leaves(rows.obs), strict=True
        ):
            after, obs = after[:-1], obs[1:]
            goes_on = after == obs
            if obs.dtype.kind == "f" and not goes_on.all():
                goes_on |= np.isnan(after) & np.isnan(obs)
            ends[:-1] |= ~goes_on.all(axis=tuple(range(1, goes_on.ndim)))
    return ends


def _steps(
    rows: SourceRows,
    num: int,
    form: str | None,
    ends: np.ndarray,
    is_final: np.ndarray,
    is_alone: np.ndarray,
    is_cut: np.ndarray,
) -> tuple[Step, np.ndarray]:
    """Make steps of the first rows.

    Args:
      rows: N rows, of which the last may be of an episode that goes on.
      num: Number of rows that become steps, at least 1.
      form: The buffer's `autoreset`.
      ends: bool[N], True for the last row of each episode.
      is_final: bool[N], True for rows that are a final observation, and no step.
      is_alone: bool[N], those of them that have no step before.
      is_cut: bool[N], True for rows whose next row is the final observation.

    Returns:
      Steps [K, ...], and bool[K], the last of each episode.
    """
    here = slice(num)
    truncated = (rows.truncated | is_cut | (ends & ~rows.terminated))[here]
    if form == "next_step":  # a step for each final observation: a row itself, or one more
        count = 1 + (ends & ~is_final)[here] - is_alone[here]
        order = np.repeat(np.arange(num), count)
        is_more = np.zeros(len(order), bool)
        is_more[1:] = order[1:] == order[:-1]
        is_last = is_final[order] | is_more
        obs, final_obs = at(rows.obs, order), None
        if rows.next_obs is not None and is_more.any():
            for leaf, after in zip(
                jax.tree.leaves(obs), jax.tree.leaves(rows.next_obs), strict=True
            ):
                leaf[is_more] = after[order[is_more]]
        is_step = ~is_last
    else:
        order = np.flatnonzero(~is_final[here])
        is_last, is_step = (ends | is_cut)[order], True
        after = np.where(ends, np.arange(len(ends)), np.arange(1, len(ends) + 1))[order]
        obs, final_obs = at(rows.obs, order), None
        if form == "same_step":
            known = rows.next_obs is not None
            final_obs = at(rows.next_obs, order) if known else at(rows.obs, after)
    steps = Step(
        obs,
        at(rows.action, order),
        at(rows.reward, order),
        terminated=rows.terminated[order] & is_step,
        truncated=truncated[order] & is_step,
        final_obs=final_obs,
        extras=at(rows.extras, order),
    )
    return steps, is_last


def at(tree: PyTree, index: Any) -> Any:
    """Return rows of each leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def cut(tree: PyTree, start: int, stop: int | None) -> Any:
    """Return consecutive rows of each leaf."""
    return at(tree, slice(start, stop))


def _concatenated(*leaves: np.ndarray) -> np.ndarray:
    return leaves[0] if len(leaves) == 1 else np.concatenate(leaves)


def _num_steps_at_once(steps: Step, buffer: ReplayBuffer) -> int:
    step_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(steps)) / len(steps.terminated)
    fitting = min(buffer.length, _MOST_STEPS, BLOCK_BYTES / step_bytes / buffer.num_envs)
    return power_below(int(fitting))


def _taken(
    waiting: list[list[Step]], counts: list[int], size: int, has_mask: bool
) -> tuple[Step, np.ndarray | None]:
    """Return the next `size` steps of each env, leaves [size, E, ...], and their mask. They wait no
    longer, nor are they counted."""
    blocks, mask = [], np.zeros((size, len(waiting)), bool)
    some = next(filter(None, waiting))[:1]
    for env, own in enumerate(waiting):
        joined = jax.tree.map(_concatenated, *(own or some))
        num_steps = min(counts[env], size)
        mask[:num_steps, env] = True
        places = np.minimum(np.arange(size), max(num_steps - 1, 0))  # masked steps are any
        blocks.append(at(joined, places))
        counts[env] -= num_steps
        own[:] = [cut(joined, num_steps, None)] if counts[env] else []
    block = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *blocks)
    return block, mask if has_mask else None


@contextlib.contextmanager
def _bar(where: str, total: int | None, progress: bool | None) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar, whose update takes a number of rows."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress:
            raise ImportError(f"{where}: a progress bar needs tqdm: pip install tqdm") from error
        yield lambda _: None
        return
    hidden = None if progress is None else not progress
    with tqdm(total=total, desc=where, unit="row", unit_scale=True, disable=hidden) as bar:
        yield bar.update

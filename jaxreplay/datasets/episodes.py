"""Episodes, and a buffer's state made of them."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import named
from jaxreplay._util.pow2 import power_below
from jaxreplay.buffers.jitted import jit
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import example_of
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Step

_MOST_STEPS = 1024  # added at once


class Episode(NamedTuple):
    """Episode of T transitions.

    Args:
      observations: Pytree with leaves [T + 1, ...]; the last is the final observation.
      actions: Pytree with leaves [T, ...].
      rewards: [T].
      terminations: bool[T], True where the task ended.
      truncations: bool[T], True where the episode was cut. If no flag is True at the last step, it
        is truncated.
      id: Name in errors. Default: "".
    """

    observations: PyTree
    actions: PyTree
    rewards: Any
    terminations: Any
    truncations: Any
    id: Any = ""


def from_episodes(
    episodes: Iterable[Any],
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    into: ReplayState | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of some episodes.

    Each episode goes to the env with the fewest rows so far. Memory holds the state, and a few
    episodes at a time with some copies of them. If an episode has an end before its last step, the
    next step opens another episode. If several envs of the buffer always step together, shorter
    ones are filled up with rows that are never sampled, and the state is copied once.

    Args:
      episodes: `Episode`s, or objects with their fields.
      buffer: A `ReplayBuffer` of steps with any `num_envs` and `autoreset`.
      example: One env's step, as for `buffer.init`. Default: shapes and dtypes of the first
        episode, cut to 32 bits while `jax_enable_x64` is off; or those of `into`.
      into: State of the buffer, to whose rows the episodes are added. Donated. Its unfinished
        episodes end. Default: an empty one.

    Returns:
      The state.

    Raises:
      ValueError: The buffer is too small or does not store steps, there is no transition, or a leaf
        does not fit the example or cannot be stored.

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
    return fill("from_episodes", episodes, buffer, example, into)


def fill(
    where: str,
    episodes: Iterable[Any],
    buffer: Any,
    example: PyTree,
    into: ReplayState | None = None,
    too_small: str = "each episode needs a row more than it has transitions",
) -> ReplayState:
    """Return a buffer's state with all transitions of some episodes.

    Args:
      where: Name of the called function, for errors.
      episodes: As for `from_episodes`.
      buffer: As for `from_episodes`.
      example: As for `from_episodes`.
      into: As for `from_episodes`. Default: an empty state.
      too_small: End of the error for a buffer that is too small. Default: how many rows an episode
        needs.
    """
    check_buffer(where, buffer)
    # Envs get episodes of different lengths, so some take no step.
    masked = dataclasses.replace(buffer, allow_mask=buffer.num_envs > 1 or buffer.allow_mask)
    form, state, num_envs = buffer.autoreset, None, buffer.num_envs
    if into is not None:
        example = example_of(into.layout, into.rows.steps) if example is None else example
        state = jit(masked).end_streams(jit(masked).adopt(into))
    waiting: list[list[Step]] = [[] for _ in range(num_envs)]
    used = [0] * num_envs
    most = min(_MOST_STEPS, power_below(buffer.length))
    for episode in episodes:
        if not len(episode.terminations):
            continue
        steps = steps_of(where, episode, form)
        env = used.index(min(used))
        used[env] += len(steps.terminated) + (
            int((steps.terminated | steps.truncated).sum()) if form == "same_step" else 0
        )
        if used[env] > buffer.length:
            of_env = f" in each of {num_envs} envs" if num_envs > 1 else ""
            raise ValueError(
                f"{where}: capacity={buffer.capacity} is too small: episode {episode.id} ends in "
                f"row {used[env]:,} of {buffer.length:,}{of_env}; {too_small}"
            )
        example = _example_of(steps) if example is None else example
        state = masked.init(example) if state is None else state
        waiting[env].append(_fitted(where, steps, example, f"episode {episode.id}"))
        if sum(map(_num_steps, waiting)) >= most * num_envs:
            state = _extended(masked, state, waiting, most)
    if state is None:
        raise ValueError(f"{where}: the dataset has no transitions")
    while left := max(map(_num_steps, waiting)):  # powers of two: each size is compiled
        state = _extended(masked, state, waiting, min(most, power_below(left)))
    return jit(buffer).adopt(state)


def check_buffer(where: str, buffer: Any) -> None:
    """Raise a ValueError unless a buffer stores steps."""
    if not isinstance(buffer, ReplayBuffer) or buffer.autoreset is None:
        raise ValueError(
            f"{where}: buffer must be a ReplayBuffer of steps, since a dataset has episodes"
        )
    if buffer.num_agents is not None:
        raise ValueError(f"{where}: an episode has one flag for all agents; leave out num_agents")


class Rows(NamedTuple):
    """Consecutive rows of a file, K steps.

    Attributes:
      obs: Pytree with leaves [K, ...].
      action: Pytree with leaves [K, ...].
      reward: [K].
      terminated: bool[K].
      truncated: bool[K].
      next_obs: Pytree with leaves [K, ...], or None if the file has none.
      part: Array [K], equal for rows of one episode; None if the flags alone end episodes.
    """

    obs: PyTree
    action: PyTree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_obs: PyTree = None
    part: Any = None


def episodes_of(
    blocks: Iterable[Rows], buffer: ReplayBuffer, final_rows: bool = False
) -> Iterable[Episode]:
    """Yield the episodes of rows that follow each other.

    An episode ends at a flag, where `part` changes, and where `next_obs` is not the next row's
    observation. If its final observation is unknown, it repeats the last one after a termination,
    or if the buffer reads none. Else the last transition is left out.

    Args:
      blocks: Blocks of rows, in order.
      buffer: The buffer that they go to. It is read with the first episode.
      final_rows: The row with a flag is the final observation of its episode, and no step.
    """
    reads_none = buffer.autoreset == "same_step_no_final_obs"
    # Whether a row ends its episode is known with the row after it: a block's last row is held.
    waiting, held, number = [], None, 0
    for block in itertools.chain(blocks, [None]):
        rows = held if block is None else _joined([*([] if held is None else [held]), block])
        if rows is None:
            return
        ends, known = _ends(rows), len(rows.terminated) - (block is not None)
        ends[-1] |= block is None
        start = 0
        for stop in (np.flatnonzero(ends[:known]) + 1).tolist():
            whole, waiting = _joined([*waiting, _cut(rows, start, stop)]), []
            if (episode := _episode(whole, reads_none, final_rows, number)) is not None:
                yield episode
            start, number = stop, number + 1
        waiting, held = [*waiting, _cut(rows, start, known)], _cut(rows, known, None)


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _cut(rows: Rows, start: int, stop: int | None) -> Rows:
    return jax.tree.map(lambda leaf: leaf[start:stop], rows)


def _ends(rows: Rows) -> np.ndarray:
    ends = rows.terminated | rows.truncated
    if rows.part is not None:
        ends[:-1] |= rows.part[1:] != rows.part[:-1]
    if rows.next_obs is not None:
        for after, obs in zip(
            jax.tree.leaves(rows.next_obs), jax.tree.leaves(rows.obs), strict=True
        ):
            goes_on = after[:-1] == obs[1:]
            ends[:-1] |= ~goes_on.all(axis=tuple(range(1, goes_on.ndim)))
    return ends


def _episode(rows: Rows, reads_none: bool, final_rows: bool, number: int) -> Episode | None:
    """Return an episode, or None if it has no transition."""
    last = jax.tree.map(
        lambda leaf: leaf[-1:], rows.obs if rows.next_obs is None else rows.next_obs
    )
    needs_none = (rows.terminated[-1] or reads_none) and not final_rows
    is_step = rows.next_obs is not None or needs_none
    if not is_step:  # the last row has the final observation
        rows = _cut(rows, 0, -1)
    if not len(rows.terminated):
        return None
    observations = jax.tree.map(lambda *leaves: np.concatenate(leaves), rows.obs, last)
    return Episode(observations, rows.action, rows.reward, rows.terminated, rows.truncated, number)


def steps_of(where: str, episode: Any, form: str) -> Step:
    """Convert an episode to K steps, leaves [K, ...]: its transitions and, with next-step
    autoreset, one for each final observation."""
    terminated, truncated = (np.asarray(x) for x in (episode.terminations, episode.truncations))
    length = len(terminated)
    parts = {"observations": length + 1, "actions": length, "rewards": length}
    # Minari returns values that are no arrays as a list.
    is_list = lambda leaf: isinstance(leaf, list)
    for part, expected in parts.items():
        for name, leaf in named(getattr(episode, part), is_leaf=is_list):
            if np.asarray(leaf).dtype.kind not in "biuf" or np.shape(leaf)[:1] != (expected,):
                what = f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}"
                raise ValueError(
                    f"{where}: episode {episode.id}: {part}{name and '.' + name}: expected "
                    f"{expected} numbers or arrays, got {what}"
                )
    observations, actions, reward = jax.tree.map(
        np.asarray, tuple(getattr(episode, part) for part in parts), is_leaf=is_list
    )
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
    return Step(
        at(observations, now),
        at(actions, step),
        at(reward, step),
        terminated=terminated[step] & is_step,
        truncated=truncated[step] & is_step,
    )


def _example_of(steps: Step) -> Step:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), steps)


def _fitted(where: str, steps: Step, example: PyTree, what: str) -> Step:
    """Cast to the example's dtypes. Leaves that do not fit stay, so that `extend` names them."""
    dtypes = {name: np.dtype(leaf.dtype) for name, leaf in named(checks.specs(where, example))}

    def fitted(name: str, leaf: np.ndarray) -> np.ndarray:
        dtype = dtypes.get(name, leaf.dtype)
        are_integers = leaf.dtype.kind in "iu" and dtype.kind in "iu"
        if not are_integers and not np.can_cast(leaf.dtype, dtype, "same_kind"):
            return leaf
        return checks.cast(
            f"{where}: {what}: {name}",
            leaf,
            dtype,
            "the example's dtype; pass an example with another dtype",
        )

    return jax.tree.unflatten(
        jax.tree.structure(steps), [fitted(name, leaf) for name, leaf in named(steps)]
    )


def _num_steps(waiting: list[Step]) -> int:
    return sum(len(steps.terminated) for steps in waiting)


def _extended(
    buffer: ReplayBuffer, state: ReplayState, waiting: list[list[Step]], size: int
) -> ReplayState:
    """Add the next `size` steps of each env, and return the state. Each env's `waiting` steps lose
    those that are added."""
    blocks, mask = [], np.zeros((size, len(waiting)), bool)
    some = next(filter(None, waiting)).copy()
    for env, own in enumerate(waiting):
        parts, num_steps = own or some, min(_num_steps(own), size)
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        mask[:num_steps, env] = True
        places = np.minimum(np.arange(size), max(num_steps - 1, 0))  # masked steps are any
        blocks.append(jax.tree.map(lambda leaf, places=places: leaf[places], joined))
        if own:
            rest = jax.tree.map(lambda leaf, num=num_steps: leaf[num:].copy(), joined)
            own[:] = [rest] if len(rest.terminated) else []
    block = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *blocks)
    return jit(buffer).extend(state, block, mask if buffer.allow_mask else None)

"""Partial restore: a checkpoint without its damaged rows.

The gaps ("holes") that they leave in each stream (an env's ring of rows) are closed, so that the
result is a valid stream:

- The last row before a gap ends its episode. It becomes a final row and loses its transition, as
  after a truncation whose final observation is unknown.
- The first row after a gap begins an episode. If it is a final row, whose step is lost, it is left
  out too. So no window, stack or pair reaches across a gap.
- Candidate numbers of rows older than a gap increase, so that they stay consecutive.
- If a pending row is lost (one whose window is not complete yet), all pending rows are left out.
- Envs that always step together share one head, so they lose the same rows.
- Items that are sampled in windows have no episodes to end, so only the newest run of rows is kept.

E is the number of streams. The age of a row is the number of newer rows in its stream.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.storage import ring, row_flags
from jaxreplay.storage.state import ReplayState

_Gap = tuple[int, int]  # ages from the first to before the second


class MissingRows(NamedTuple):
    """Rows of one env that a partial restore left out.

    A row's number counts the rows written for its env, from 0 on, including overwritten ones.

    Attributes:
      env: Index of the env.
      first: Number of the oldest of these rows.
      last: Number of the newest of these rows.
    """

    env: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Holes:
    """Lost rows of E streams: at most H holes for each stream, newest first."""

    folders: frozenset[str]  # of the damaged groups
    start: np.ndarray  # int64[E, H]: age of the newest row of each hole
    size: np.ndarray  # int64[E, H]: number of rows of each hole; 0 for no hole

    @classmethod
    def none(cls, num_envs: int) -> "Holes":
        return cls(frozenset(), *np.zeros((2, num_envs, 0), np.int64))

    @property
    def is_newest_lost(self) -> np.ndarray:
        """True for streams whose newest row is lost: bool[E]."""
        return ((self.start == 0) & (self.size > 0)).any(axis=1)

    @property
    def num_lost(self) -> np.ndarray:
        """Number of lost rows of each stream: int64[E]."""
        return self.size.sum(axis=1)

    def age_of(self, env: np.ndarray, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert ages of rows to ages after the holes are closed.

        Args:
          env: int64[K], streams of the rows.
          age: int64[K], ages of the rows before.

        Returns:
          Ages after, int64[K]; and whether the rows are lost, bool[K].
        """
        now, is_lost = age.copy(), np.zeros(age.shape, bool)
        for start, size in zip(self.start.T, self.size.T, strict=True):
            now -= np.where(age >= start[env] + size[env], size[env], 0)
            is_lost |= (age >= start[env]) & (age < start[env] + size[env])
        return now, is_lost

    def lost(self, end: np.ndarray) -> list[MissingRows]:
        """List the lost rows by their numbers.

        Args:
          end: int64[E], number of each stream's newest row, plus 1.
        """
        found = np.argwhere(self.size > 0).tolist()
        return [
            MissingRows(
                env,
                int(end[env] - self.start[env, h] - self.size[env, h]),
                int(end[env] - 1 - self.start[env, h]),
            )
            for env, h in found
        ]


def holes_of(
    manifest: Manifest, damaged: Iterable[str], buffer: Any, old: ReplayState, flags_of: Any
) -> Holes:
    """Find the rows that a checkpoint has lost with its damaged groups.

    Args:
      manifest: The checkpoint's manifest.
      damaged: Folders of the damaged groups.
      buffer: The buffer that was saved.
      old: Its state, without rows.
      flags_of: Function from envs and numbers of intact rows, int64[K] each, to their flags,
        uint8[K].
    """
    folders = frozenset(damaged)
    end, first = np.array(manifest.end, np.int64), np.array(manifest.first, np.int64)
    gaps: list[list[_Gap]] = [[] for _ in end]
    for group in manifest.groups:
        if group.folder in folders:
            low, high = group.range()
            for env in np.flatnonzero((low < high) & (high > first)).tolist():
                begin, stop = end[env] - high[env], end[env] - max(low[env], first[env])
                gaps[env].append((int(begin), int(stop)))
    joined = functools.partial(_joined, old.layout.lockstep)
    gaps = joined(gaps)
    pending = old.counters.num_pending if buffer.window.is_bounded else None
    for env, own in enumerate(gaps):
        num_pending = 0 if pending is None else int(pending[env])
        if own and own[0][0] < num_pending:
            own.append((0, num_pending))
    gaps = joined(gaps)
    if "flags" in manifest.rows:
        # a gap whose next row is a final row has that, too
        found = [(env, at) for env, own in enumerate(gaps) for at, gap in enumerate(own) if gap[0]]
        env, begin = np.array([(e, gaps[e][at][0]) for e, at in found], np.int64).reshape(-1, 2).T
        is_final = (flags_of(env, end[env] - begin) & row_flags.FINAL) != 0
        for (e, at), one in zip(found, is_final, strict=True):
            begin, stop = gaps[e][at]
            gaps[e][at] = (begin - int(one), stop)
    elif buffer.window.length > 1:  # the newest run of rows is left
        for env, own in enumerate(gaps):
            if newest := [gap for gap in own if gap[0]][:1]:
                own.append((newest[0][0], int(end[env] - first[env])))
    gaps = joined(gaps)
    start, size = np.zeros((2, len(end), max(map(len, gaps), default=0)), np.int64)
    for env, own in enumerate(gaps):
        for number, (newest, oldest) in enumerate(own):
            start[env, number], size[env, number] = newest, oldest - newest
    return Holes(folders, start, size)


def _joined(is_lockstep: bool, gaps: list[list[_Gap]]) -> list[list[_Gap]]:
    """Sort each stream's ranges of ages, and merge those that touch or overlap. With one head for
    all streams, each gets the ranges of all."""
    if is_lockstep:
        gaps = [[gap for own in gaps for gap in own]] * len(gaps)
    found = []
    for own in gaps:
        made: list[_Gap] = []
        for begin, stop in sorted(own):
            if made and begin <= made[-1][1]:
                made[-1] = (made[-1][0], max(made[-1][1], stop))
            else:
                made.append((begin, stop))
        found.append(made)
    return found


def closed(
    streams: ReplayState, holes: Holes
) -> tuple[ReplayState, Callable[[np.ndarray], np.ndarray]]:
    """Return valid streams, with episodes and candidate numbers adjusted to the closed holes.

    Args:
      streams: State whose rows lie at the ages that `Holes.age_of` returns, and whose `filled`
        counts the remaining rows.
      holes: The lost rows.

    Returns:
      The streams; and a function from an old candidate number of each stream, uint32[E], to the new
      one. That of a lost row becomes that of the next remaining row.
    """
    seam = holes.start - (np.cumsum(holes.size, axis=1) - holes.size)  # age of the row before
    counters, layout, is_lost = streams.counters, streams.layout, holes.is_newest_lost
    filled, end = np.asarray(counters.filled)[:, None], np.asarray(streams.next_candidate_number)
    if counters.num_pending is not None:
        counters = counters.set(num_pending=jnp.where(is_lost, 0, counters.num_pending))
        streams = streams.replace(counters=counters)
    if streams.rows.flags is None:  # each item's candidate number is its number

        def now(number: np.ndarray) -> np.ndarray:
            newer = (end - number).astype(np.int32).astype(np.int64)[:, None]
            lost = np.clip(newer - holes.start, 0, holes.size).sum(axis=1, keepdims=True)
            return end - np.clip(newer - lost, 0, filled)[:, 0].astype(np.uint32)

        return streams, now
    old = streams.rows.candidate_number
    assert counters.last_flags is not None
    assert old is not None
    cleared = row_flags.after_clear(layout.autoreset, counters.last_flags)
    last_flags = jnp.where(is_lost, cleared, counters.last_flags)
    is_seam = (holes.size > 0) & (seam < filled)
    seam = np.minimum(seam, layout.length - 1).astype(np.int32)
    streams, row, is_candidate = _counted(streams, seam, is_seam)

    def of_row(number: np.ndarray) -> np.ndarray:
        is_later = (old[row] - number[:, None]).astype(jnp.int32) >= 0
        return end - np.asarray((is_candidate & is_later).sum(axis=1, dtype=jnp.uint32))

    return streams.replace(counters=counters.set(last_flags=last_flags)), of_row


@jax.jit
def _counted(streams: ReplayState, seam: jax.Array, is_seam: jax.Array) -> Any:
    """Set the flags of rows beside holes, and count the candidates again.

    Args:
      streams: The streams.
      seam: int32[E, H], age of the newest row that is older than each hole.
      is_seam: bool[E, H], whether there is such a row.

    Returns:
      The streams; and for each stream and age the row, int32[E, length], and whether it is a
      candidate, bool[E, length].
    """
    layout, rows = streams.layout, streams.rows
    flags, candidate_number = rows.flags, rows.candidate_number
    assert candidate_number is not None
    row_of = lambda age: layout.row(
        layout.envs()[:, None], layout.wrap(streams.counters.position[:, None] - 1 - age)
    )

    def flagged(flags: Any, age: jax.Array, is_one: Any, flag: int) -> jax.Array:
        row = row_of(age)
        is_changed = is_one & ~(layout.closes_episode(flags[row]) & (flag == row_flags.FINAL))
        new = flags[row] | jnp.uint8(flag)
        return flags.at[jnp.where(is_changed, row, layout.capacity)].set(new, mode="drop")

    flags = flagged(flags, seam, is_seam, row_flags.FINAL)
    flags = flagged(flags, jnp.maximum(seam - 1, 0), is_seam & (seam > 0), row_flags.FIRST)
    age = ring.arange(layout.length)
    row, is_written = row_of(age), age < streams.counters.filled[:, None]
    is_candidate = is_written & ((flags[row] & row_flags.NO_CANDIDATE) == 0)
    through = jnp.cumsum(is_candidate, axis=1, dtype=jnp.uint32)
    number = streams.next_candidate_number[:, None] - through
    written = jnp.where(is_written, row, layout.capacity)
    candidate_number = candidate_number.at[written].set(number, mode="drop")
    streams = streams.replace(rows=rows.replace(flags=flags, candidate_number=candidate_number))
    return streams, row, is_candidate

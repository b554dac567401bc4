"""Partial restore: a checkpoint without its damaged rows.

The gaps ("holes") that they leave in each stream (an env's ring of rows) are closed, so that the
result is a valid stream:

- The last row before a gap ends its episode. It becomes a final row and loses its transition, as
  after a truncation whose final observation is unknown.
- The first row after a gap begins an episode. So no window, stack or pair reaches across a gap. If
  it is a final row, whose step is lost, it belongs to no episode.
- Everything else is computed from the rows that are left, as for any restore.
- Envs that always step together share one head, so they lose the same rows.
- Items that are sampled in windows have no episodes to end, so only the newest run of rows is kept.

E is the number of streams. The age of a row is the number of newer rows in its stream.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.storage.layout import Layout

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


def holes_of(manifest: Manifest, damaged: Iterable[str], layout: Layout) -> Holes:
    """Find the rows that a checkpoint has lost with its damaged groups.

    Args:
      manifest: The checkpoint's manifest.
      damaged: Folders of the damaged groups.
      layout: Its layout.
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
    joined = functools.partial(_joined, layout.lockstep)
    gaps = joined(gaps)
    if "flags" not in manifest.rows and layout.window.length > 1:  # the newest run of rows is left
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

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
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.storage import ring, row_flags
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import ReplayState
from jaxreplay.storage.streams import Streams


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
    gaps = _gaps(manifest, folders, first, end)
    if old.layout.lockstep:  # one head for all streams
        together = _joined([gap for some in gaps for gap in some])
        gaps = [together] * len(end)
    pending = (
        None
        if old.streams.counters.num_pending is None or not buffer.window.is_bounded
        else np.asarray(old.streams.counters.num_pending)
    )
    for env, own in enumerate(gaps):
        if own and pending is not None and own[0][0] < pending[env]:
            gaps[env] = own = _joined([*own, (0, int(pending[env]))])
        if own and manifest.rows.keys().isdisjoint({"flags"}) and buffer.window.length > 1:
            gaps[env] = _all_but_the_newest(own, int(end[env] - first[env]))
    if "flags" in manifest.rows:
        gaps = _without_lone_tails(gaps, end, flags_of, old.layout.lockstep)
    most = max(map(len, gaps), default=0)
    start, size = np.zeros((2, len(end), most), np.int64)
    for env, own in enumerate(gaps):
        for number, (newest, oldest) in enumerate(own):
            start[env, number], size[env, number] = newest, oldest - newest
    return Holes(folders, start, size)


def _gaps(
    manifest: Manifest, folders: frozenset[str], first: np.ndarray, end: np.ndarray
) -> list[list[tuple[int, int]]]:
    """Return each stream's ranges of ages whose rows are in no intact group, newest first.

    A range (begin, stop) has the ages from `begin` to before `stop`, as in the functions below.
    """
    gaps: list[list[tuple[int, int]]] = [[] for _ in end]
    reached = end.copy()  # rows from this number on are accounted for
    for group in reversed(manifest.groups):
        low, high = group.range()
        for env in np.flatnonzero((low < high) & (low < reached) & (high > first)).tolist():
            begin, stop = (
                max(int(low[env]), int(first[env])),
                min(int(high[env]), int(reached[env])),
            )
            if stop < reached[env]:
                gaps[env].append((int(end[env] - reached[env]), int(end[env]) - stop))
            if group.folder in folders:
                gaps[env].append((int(end[env]) - stop, int(end[env]) - begin))
            reached[env] = begin
    for env in np.flatnonzero(reached > first).tolist():
        gaps[env].append((int(end[env] - reached[env]), int(end[env] - first[env])))
    return [_joined(own) for own in gaps]


def _joined(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges of ages, and merge those that touch or overlap."""
    made: list[tuple[int, int]] = []
    for begin, stop in sorted(gaps):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], stop))
        else:
            made.append((begin, stop))
    return made


def _all_but_the_newest(gaps: list[tuple[int, int]], filled: int) -> list[tuple[int, int]]:
    """Extend the gaps so that only the newest run of rows is left."""
    newest = gaps[0] if gaps[0][0] else (gaps[1] if len(gaps) > 1 else None)
    return gaps if newest is None else _joined([*gaps, (newest[0], filled)])


def _without_lone_tails(
    gaps: list[list[tuple[int, int]]], end: np.ndarray, flags_of: Any, together: bool
) -> list[list[tuple[int, int]]]:
    """Extend each gap by one row if the row after it is a final row."""
    found = [
        (env, number)
        for env, own in enumerate(gaps)
        for number, (begin, _) in enumerate(own)
        if begin
    ]
    if not found:
        return gaps
    env, number = np.array(found, np.int64).T
    begin = np.array([gaps[e][n][0] for e, n in found], np.int64)
    is_final = (flags_of(env, end[env] - begin) & row_flags.FINAL) != 0
    longer = [list(own) for own in gaps]
    for e, n in np.stack([env, number], 1)[is_final].tolist():
        longer[e][n] = (gaps[e][n][0] - 1, gaps[e][n][1])
    if together:
        return [_joined([gap for own in longer for gap in own])] * len(gaps)
    return [_joined(own) for own in longer]


class Part(NamedTuple):
    """A run of remaining rows of one stream, between two holes."""

    env: int
    newest: int  # age of its newest row, after the holes are closed
    oldest: int  # age of its oldest row, after the holes are closed
    is_cut: bool  # whether a hole follows its newest row
    follows: bool  # whether a hole precedes its oldest row, with older rows left
    first: int  # candidate number of its oldest row, before
    end: int  # candidate number of the row that would follow its newest one, before
    shift: int  # by how much its candidate numbers increase, modulo 2^32


class CandidateNumbers(NamedTuple):
    """Candidate numbers of streams whose holes are closed."""

    parts: list[Part]
    end: np.ndarray  # uint32[E]: candidate number of the next row of each stream, unchanged

    def now(self, candidate_number: np.ndarray) -> np.ndarray:
        """Convert one old candidate number of each stream to the new one, uint32[E]. That of a lost
        row becomes that of the next remaining row.

        Args:
          candidate_number: uint32[E], for example of the next row to consume.
        """
        left = np.zeros(len(self.end), np.int64)  # remaining candidates from this number on
        for part in self.parts:
            left[part.env] += min(
                max(_signed(part.end - int(candidate_number[part.env])), 0),
                _signed(part.end - part.first),
            )
        return self.end - left.astype(np.uint32)


def closed(state: Streams, holes: Holes) -> tuple[Streams, CandidateNumbers]:
    """Return valid streams, with episodes and candidate numbers adjusted to the closed holes.

    Args:
      state: Streams whose rows lie at the ages that `Holes.age_of` returns, and whose `filled`
        counts the remaining rows. Donated.
      holes: The lost rows.
    """
    layout, has_flags = state.layout, state.flags is not None
    num_envs = layout.num_envs
    head, filled, end = (
        np.asarray(x)
        for x in (state.counters.position, state.counters.filled, state.next_candidate_number)
    )
    runs = [(env, *run) for env in range(num_envs) for run in _runs(holes, env, int(filled[env]))]
    rows_at = [_rows_of_ages(layout, head, runs, which) for which in (1, 2)]
    flags, newest_candidate_number, oldest_candidate_number = (
        _at(state, *rows_at) if has_flags else _of_items(holes, end, runs)
    )
    closes = (
        np.asarray(layout.closes_episode(jnp.asarray(flags)))
        if has_flags
        else np.ones(len(runs), bool)
    )
    parts: list[Part] = []
    following: dict[int, int] = {}  # by env: the candidate number that follows the part
    for number, (env, newest, oldest, is_cut, follows) in enumerate(runs):
        is_candidate = not flags[number] & row_flags.NO_CANDIDATE and (closes[number] or not is_cut)
        first, stop = (
            int(oldest_candidate_number[number]),
            int(newest_candidate_number[number]) + is_candidate,
        )
        shift = (following.get(env, int(end[env])) - stop) & 0xFFFFFFFF
        following[env] = first + shift
        parts.append(Part(env, newest, oldest, is_cut, follows, first, stop, shift))
    candidate_numbers = CandidateNumbers(parts, end.astype(np.uint32))
    if not has_flags:
        return state, candidate_numbers
    is_cut, follows = (
        np.array([getattr(part, name) for part in parts], bool) for name in ("is_cut", "follows")
    )
    last_flags = np.asarray(state.counters.last_flags)
    cleared = np.asarray(row_flags.after_clear(layout.autoreset, jnp.asarray(last_flags)))
    state = state.with_counters(last_flags=np.where(holes.is_newest_lost, cleared, last_flags))
    final_rows, firsts = (
        np.where(is_one, row, layout.capacity)
        for is_one, row in ((is_cut & ~closes, rows_at[0]), (follows, rows_at[1]))
    )
    return _patched(
        state, final_rows, firsts, *_shifts(parts, num_envs, holes.size.shape[1])
    ), candidate_numbers


def _runs(holes: Holes, env: int, filled: int) -> list[tuple[int, int, bool, bool]]:
    """Return the runs of remaining rows of a stream, newest first: `newest`, `oldest`, `is_cut` and
    `follows` of each `Part`."""
    edges, lost = [], 0
    for start, size in zip(holes.start[env].tolist(), holes.size[env].tolist(), strict=True):
        if size:
            edges.append(start - lost)
            lost += size
    runs = []
    for begin, stop in itertools.pairwise([0, *edges, filled]):
        if begin < stop:
            runs.append((begin, stop - 1, begin in edges, stop < filled))
    return runs


def _rows_of_ages(layout: Layout, head: np.ndarray, runs: list[Any], which: int) -> np.ndarray:
    """Return a row of each run, int32[P]: the newest (`which` is 1) or the oldest (2)."""
    env, age = (np.array([run[field] for run in runs], np.int64) for field in (0, which))
    return (env * layout.length + ring.position_of(head[env] - 1 - age, layout.length)).astype(
        np.int32
    )


def _at(
    state: Streams, newest: np.ndarray, oldest: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return flags and candidate numbers of the newest rows of runs, and candidate numbers of the
    oldest."""
    return tuple(
        np.asarray(leaf) for leaf in _gathered(state.flags, state.candidate_number, newest, oldest)
    )  # type: ignore[return-value]


def _of_items(
    holes: Holes, end: np.ndarray, runs: list[Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same for items. Each is a candidate, so its candidate number is its number."""
    env, newest, oldest = (np.array([run[field] for run in runs], np.int64) for field in range(3))
    gone = np.zeros(len(runs), np.int64)  # newer rows that are lost
    lost_before = np.cumsum(holes.size, axis=1) - holes.size
    for start, size, before in zip(holes.start.T, holes.size.T, lost_before.T, strict=True):
        gone += np.where((size[env] > 0) & (newest >= (start - before)[env]), size[env], 0)
    candidate_numbers = [(end[env] - 1 - age - gone) & 0xFFFFFFFF for age in (newest, oldest)]
    return np.zeros(len(runs), np.uint8), candidate_numbers[0], candidate_numbers[1]


def _shifts(parts: list[Part], num_envs: int, num_holes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ages at which the shift of candidate numbers changes, int32[E, H], and the shifts,
    uint32[E, H + 1], from the newest rows on."""
    edges, shift = (
        np.full((num_envs, num_holes), np.iinfo(np.int32).max, np.int32),
        np.zeros((num_envs, num_holes + 1), np.uint32),
    )
    count = np.zeros(num_envs, int)
    for part in parts:
        if part.is_cut:
            edges[part.env, count[part.env]] = part.newest
            count[part.env] += 1
        shift[part.env, count[part.env]] = part.shift
    return edges, shift


def _signed(difference: int) -> int:
    """Return the signed difference of two candidate numbers, which are modulo 2^32."""
    return (difference + 2**31 & 0xFFFFFFFF) - 2**31


@jax.jit
def _gathered(
    flags: jax.Array, candidate_number: jax.Array, newest: jax.Array, oldest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    at = lambda leaf, row: leaf.at[row].get(mode="promise_in_bounds")
    return at(flags, newest), at(candidate_number, newest), at(candidate_number, oldest)


@functools.partial(jax.jit, donate_argnums=0)
def _patched(
    state: Streams, final_rows: jax.Array, firsts: jax.Array, edges: jax.Array, shift: jax.Array
) -> Streams:
    """Set flags and candidate numbers of rows next to holes.

    Args:
      state: Donated.
      final_rows: int32[P], rows that become final rows; the capacity for none.
      firsts: int32[P], rows that begin episodes; the capacity for none.
      edges: int32[E, H], from `_shifts`.
      shift: uint32[E, H + 1], from `_shifts`.
    """
    assert state.flags is not None
    assert state.candidate_number is not None
    flags = state.flags
    for row, bit in ((final_rows, row_flags.FINAL), (firsts, row_flags.FIRST)):
        old = flags.at[jnp.minimum(row, state.layout.capacity - 1)].get(mode="promise_in_bounds")
        flags = flags.at[row].set(old | jnp.uint8(bit), mode="drop")
    row = ring.arange(state.layout.capacity)
    env, _ = state.layout.split(row)
    part = (state.age(row)[:, None] >= edges[env]).sum(axis=1, dtype=jnp.int32)
    return state.replace(flags=flags, candidate_number=state.candidate_number + shift[env, part])

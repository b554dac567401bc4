"""What an earlier generation already has of a state's rows: those need not be written again."""

import functools
import zlib
from typing import Any

import jax
import numpy as np

from jaxreplay import sizes
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.rows import Picked, Span

_MOST_PROBES = 64


def probes_of(state: Any, span: Span, length: int, num_rewritten: int, most: int) -> list[list[int]]:
    """The stream, the number and a checksum of some rows: the newest ones of some streams, and others from all over the state."""
    first, end = span.first, np.maximum(span.end - num_rewritten, span.first)
    before = np.cumsum(end - first) - (end - first)
    total = int((end - first).sum())
    count = min(_MOST_PROBES, most)
    if not total:
        return []
    nth = np.unique(np.linspace(0, total - 1, max(count // 2, 1)).astype(np.int64))
    env = np.searchsorted(before + (end - first), nth, side="right")
    spread = Picked(env, first[env] + nth - before[env])
    some = np.unique(np.linspace(0, len(end) - 1, max(count - len(nth), 1)).astype(np.int64))
    some = some[end[some] > first[some]]
    picked = Picked(np.concatenate([some, spread.env])[:count], np.concatenate([end[some] - 1, spread.number])[:count])
    return [[int(e), int(n), c] for e, n, c in zip(*picked, _checksums(state, picked, length), strict=True)]


def is_of_one_history(state: Any, span: Span, length: int, probes: list[list[int]]) -> bool:
    """Whether every probed row that the state still has is as it was."""
    env, number, checksum = np.array(probes, np.int64).reshape(-1, 3).T
    is_held = (number >= span.first[env]) & (number < span.end[env])
    is_lost = number >= span.end[env]
    if is_lost.any() or not is_held.any():
        return not is_lost.any()
    picked = Picked(env[is_held], number[is_held])
    return _checksums(state, picked, length) == checksum[is_held].tolist()


def _checksums(state: Any, picked: Picked, length: int) -> list[int]:
    index = rows.rows_at(picked, length)
    values, _ = rows.read(state, sizes.padded(index, sizes.power_above(len(index)), index[-1]))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(values)]
    return [functools.reduce(lambda crc, leaf, row=row: zlib.crc32(leaf[row].tobytes(), crc), leaves, 0) for row in range(len(index))]


def kept_of(base: Manifest, span: Span, num_rewritten: int, group_rows: int) -> tuple[np.ndarray, list[Group]]:
    """From which number on a stream's rows are to be written, int64[E], and the groups that have the others.

    The newest groups are written again with what is new while they are no larger: so there are never many small ones.
    """
    since = np.maximum(np.maximum(base.first, np.array(base.end) - num_rewritten), span.first)
    for group in reversed(base.groups):
        is_live = (live := _live(group, span.first, since)) > 0
        if live.sum() > min(int((span.end - since).sum()), group_rows // 2):
            break
        low = np.maximum(rows.from_runs(group.first), span.first[: len(live)])
        since[: len(live)] = np.where(is_live, low, since[: len(live)])
    return since, [group for group in base.groups if _live(group, span.first, since).any()]


def _live(group: Group, first: np.ndarray, since: np.ndarray) -> np.ndarray:
    """Rows of each stream that are still held, and not written anew: int64[the first streams]."""
    low, high = rows.from_runs(group.first), rows.from_runs(group.last)
    return np.maximum(np.minimum(high, since[: len(high)] - 1) - np.maximum(low, first[: len(high)]) + 1, 0)

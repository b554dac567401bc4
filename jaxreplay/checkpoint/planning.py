"""Plan of a save: which rows to write, in which groups, and which groups to reuse.

Rows that an earlier checkpoint shares with the state are not written again. The rows themselves
are compared, so the state's history does not matter. If a state was rewound and continued
differently, its rows differ from there on.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import description, named
from jaxreplay._version import __version__
from jaxreplay.checkpoint import arrays, fingerprint, rows
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.fits import described
from jaxreplay.checkpoint.groups import MOST_ROWS, Group, Groups, Save, array_of, cut
from jaxreplay.checkpoint.manifest import Manifest, StoredLayout
from jaxreplay.checkpoint.rows import Part, Parts, Picked, Span

Written = dict[int, dict[str, Any]]  # fields of new groups that are known once they are written
_BOOKKEEPING = 64  # bytes of a row's numbers, while it is being copied or written
# Largest number of streams * saves in a manifest, which has two vectors for each save. Above it
# nothing is reused, and all rows are written again.
_MOST_NUMBERS = 2**21


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of one save; E streams.

    Attributes:
      draft: The manifest, without what is known only after writing: checksums and groups.
      groups: The checkpoint's groups, in the order of their rows. Those without checksums are to be
        written.
      end: int64[E], number of each stream's newest row, plus 1.
      group_rows: Largest number of rows of a group that is to be written.
      row_bytes: Bytes of a row.
      num_bytes: Bytes to write, by all processes.
    """

    draft: Manifest
    groups: list[Group]
    end: np.ndarray
    group_rows: int
    row_bytes: int
    num_bytes: int

    @property
    def kept(self) -> list[Group]:
        """Groups of earlier checkpoints."""
        return [group for group in self.groups if group.sums is not None]

    def to_write(self) -> list[tuple[int, Group]]:
        """Return the groups to write, each with the number of rows that its streams may get before
        one of its rows is overwritten. Those that are overwritten first come first."""
        found, length = [], self.draft.length
        for group in self.groups:
            if group.sums is None:
                low, high = group.range()
                room = (low + length - self.end)[low < high]
                found.append((int(room.min()), group))
        return sorted(found, key=lambda one: one[0])

    def manifest(self, written: Written, chunks: arrays.Chunks) -> Manifest:
        """Return the complete manifest.

        Args:
          written: Fields of the new groups, by number.
          chunks: Checksums of all arrays but the rows'.
        """
        groups = [
            one._replace(**written[one.number]) if one.sums is None else one for one in self.groups
        ]
        return dataclasses.replace(self.draft, groups=Groups.of(groups), chunks=chunks)


def planned(
    store: Files,
    buffer: Any,
    stored: Any,
    rest: Any,
    parts: Parts,
    base: Manifest | None,
    *,
    folder: str,
    step: int,
    metadata: dict[str, Any],
    group_bytes: int,
    is_compressed: bool,
    damaged: dict[str, str],
) -> Plan:
    """Plan a save. All processes make the same plan.

    Args:
      store: The store that has `base`.
      buffer: The buffer.
      stored: The state's rows, as `rows.split` returns them. They are read from `parts`.
      rest: The rest of the state.
      parts: The state's parts.
      base: Manifest of the checkpoint that the state may continue, or None.
      folder: Name of the new checkpoint's folder.
      step: The step.
      metadata: The user's.
      group_bytes: Largest number of bytes of a group.
      is_compressed: Whether the new files are compressed.
      damaged: A problem of each damaged group, by its folder; these are written again. Damage that
        is found here is added.
    """
    stored_text, rest_text = described(stored, rest)
    layout = StoredLayout.of(buffer.layout()) if stored else StoredLayout.none()
    length, row_bytes, groups = 1, 0, []
    span = Span(np.zeros(0, np.int64), np.zeros(0, np.int64))
    if stored:
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) // buffer.capacity
        most = pow2.power_below(min(group_bytes // (row_bytes + _BOOKKEEPING), MOST_ROWS))
        length, span = buffer.length, rows.span_of(rows.heads_in(rest["counters"]), buffer.length)
        make = lambda since, end: Save(folder, length, since, end, is_compressed)
        num_rewritten = rows.num_rewritten(buffer.layout())
        groups = _groups(store, parts, base, span, make, num_rewritten, most, damaged)
    num_rows = [group.num_rows for group in groups if group.sums is None]
    return Plan(
        draft=Manifest(
            folder=folder,
            step=step,
            buffer=description(buffer),
            library=__version__,
            layout=layout,
            length=length,
            first=span.first.tolist(),
            end=span.end.tolist(),
            rows=stored_text,
            rest=rest_text,
            is_compressed=is_compressed,
            chunks={},
            groups=Groups.of([]),
            metadata=metadata,
        ),
        groups=groups,
        end=span.end,
        group_rows=pow2.power_above(max(num_rows, default=1)),
        row_bytes=row_bytes,
        num_bytes=sum(num_rows) * row_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(rest)),
    )


def _groups(
    store: Files,
    parts: Parts,
    base: Manifest | None,
    span: Span,
    make: Callable[[np.ndarray, np.ndarray], Save],
    num_rewritten: int,
    most: int,
    damaged: dict[str, str],
) -> list[Group]:
    """Return a checkpoint's groups, in the order of their rows. New ones lie in one part each.

    Args:
      store: The files.
      parts: The state's parts.
      base: Manifest of the checkpoint that the state may continue, or None.
      span: The rows that the state holds.
      make: Makes a `Save` from its `since` and `end`.
      num_rewritten: Newest rows of each stream that may change before the next save.
      most: The largest number of rows in a group.
      damaged: As for `planned`.
    """
    since, kept = span.first, []
    if base is not None and len(base.groups.saves) * len(base.end) <= _MOST_NUMBERS:
        newest = np.clip(np.array(base.end) - num_rewritten, span.first, span.end)
        is_same = _compared(store, parts, base, Span(span.first, newest), damaged)
        since, kept = _kept(base, is_same, span, num_rewritten, most)
    groups, ranges = [], [*itertools.pairwise(parts.bounds)]
    for group in kept:
        groups += _again(group, span, make, ranges) if group.folder in damaged else [group]
    save = make(since, span.end)
    for env, env_stop in ranges:
        groups += cut(save, most, slice(env, env_stop), num_rewritten)
    number = itertools.count()
    return [
        group._replace(number=next(number)) if group.sums is None else group for group in groups
    ]


def _again(
    group: Group, span: Span, make: Any, ranges: Sequence[tuple[int, int]]
) -> Iterator[Group]:
    """Return groups that have a damaged group's rows, as far as the state still holds them."""
    low, high = group.range()
    first = np.maximum(low, span.first)
    save = make(first, np.maximum(high, first))
    for env, env_stop in ranges:
        own = Group(save, 0, 0, save.length, env, env_stop)
        if own.num_rows:
            yield own


def _kept(
    base: Manifest, is_same: Sequence[bool], span: Span, num_rewritten: int, most: int
) -> tuple[np.ndarray, list[Group]]:
    """Divide a state's rows into those to be written and those that an earlier checkpoint has.

    From the first group on that differs from the state, its streams' rows are written. Each
    stream's newest rows may have changed since, and are written again. The newest groups are
    written again with their streams' new rows while they have no more rows than these, and than
    half of `most`, so that small groups stay few.

    Args:
      base: The earlier checkpoint.
      is_same: Whether the state has the rows of each of its groups.
      span: The rows that the state holds.
      num_rewritten: Newest rows of each stream that may have changed.
      most: The largest number of rows in a group.

    Returns:
      The first number of each stream's rows to be written, int64[E], and the groups that have the
      rows before it.
    """
    since = np.clip(np.array(base.end) - num_rewritten, span.first, span.end)
    differs = span.first < base.first  # the state has older rows than the checkpoint
    since, same = np.where(differs, span.first, since), []
    for group, own_is_same in zip(base.groups, is_same, strict=True):
        low, high = group.range()
        own = (low < high) & (high > span.first)
        if own_is_same and not differs[own].any():
            same.append(group)
        else:
            since = np.where(own, np.minimum(since, np.maximum(low, span.first)), since)
            differs |= own
    kept, is_kept = [], np.zeros(len(since), bool)
    for group in reversed(same):
        low, high = group.range()
        first = np.maximum(low, span.first)
        num_held = np.maximum(np.minimum(high, since) - first, 0)
        own = num_held > 0
        num_new = (span.end - since)[group.env : group.env_stop].sum()
        if not is_kept[own].any() and num_held.sum() <= min(num_new, most // 2):
            since = np.where(own, first, since)
        else:
            kept.append(group)
            is_kept |= own
    return since, kept[::-1]


def _compared(
    store: Files,
    parts: Parts,
    base: Manifest,
    span: Span,
    damaged: dict[str, str],
) -> list[bool]:
    """Return for each group whether the state has those of its rows that lie in `span`, and none
    lies after it. Damaged groups count as the same: they are written again from the state.

    A group whose rows all lie in `span` is compared by its fingerprint, one with rows before `span`
    by its files.
    """
    expected, begun = [], []  # for each group a number, and functions whose results add up to it
    for group in base.groups:
        low, high = group.range()
        is_row = low < high
        has_later = bool((is_row & (high > span.end)).any())
        has_any = (is_row & (high > span.first)).any() and group.folder not in damaged
        wanted, compares = int(has_later), []  # a sum of nothing is never 1
        if has_any and not has_later and (is_row & (low < span.first)).any():
            differs = functools.partial(_differs, store, group, span)
            compares = [functools.partial(differs, part) for part in parts.own]
        elif has_any and not has_later:
            wanted = group.fingerprint
            for part in parts.own:  # begun now, so that the device computes meanwhile
                picked = group.within(part.env, part.env_stop).rows()
                compares.append(functools.partial(int, fingerprint.of_rows(part, picked)))
        expected.append(wanted)
        begun.append(compares)
    own = [0] * len(begun)
    for at, (group, compares) in enumerate(zip(base.groups, begun, strict=True)):
        try:
            own[at] = sum(compare() for compare in compares)
        except CorruptCheckpointError as error:
            damaged[group.folder] = str(error)
    told = parts.processes.told((own, damaged))
    for _, others in told:
        damaged |= others
    totals = [sum(numbers) & 0xFFFFFFFF for numbers in zip(*(one for one, _ in told), strict=True)]
    return [total == wanted for total, wanted in zip(totals, expected, strict=True)]


def _differs(store: Files, group: Group, span: Span, part: Part) -> bool:
    """Return whether the rows in `span` that a part has differ from those of a group's files.
    Raises a CorruptCheckpointError if a file is damaged."""
    picked = group.rows()
    is_own = (picked.env >= part.env) & (picked.env < part.env_stop)
    is_own &= picked.number >= span.first[picked.env]
    if not is_own.any():
        return False
    index = part.indices(Picked(picked.env[is_own], picked.number[is_own]))
    # padded, so that few programs are compiled
    padded = pow2.padded(index, pow2.power_above(len(is_own)), index[-1])
    values, _ = rows.read(part.state, padded)
    for name, leaf in named(values):
        found = array_of(store, group, name, leaf.shape[1:], leaf.dtype)[is_own]
        if rows.on_host(leaf)[: len(index)].tobytes() != found.tobytes():
            return True
    return False

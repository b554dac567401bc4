"""Plan of a save: which rows to write, in which groups, and which groups to reuse.

Rows that an earlier checkpoint shares with the state are not written again. The rows themselves
are compared, so the state's history does not matter. If a state was rewound and continued
differently, its rows differ from there on.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import named
from jaxreplay._version import __version__
from jaxreplay.checkpoint import arrays, fingerprint, rows
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.groups import MOST_ROWS, Group, Groups, Save, array_of, cut
from jaxreplay.checkpoint.identity import described, identity
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.rows import Picked, Span
from jaxreplay.storage.sampleable import ReplayState

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
      num_bytes: Bytes to write.
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
        return found

    def manifest(self, written: dict[int, Group], chunks: arrays.Chunks) -> Manifest:
        """Return the complete manifest.

        Args:
          written: The new groups, by number.
          chunks: Checksums of all arrays but the rows'.
        """
        groups = [written[one.number] if one.sums is None else one for one in self.groups]
        return dataclasses.replace(self.draft, groups=Groups.of(groups), chunks=chunks)


def planned(
    store: Files,
    buffer: Any,
    state: Any,
    base: Manifest | None,
    *,
    folder: str,
    step: int,
    metadata: dict[str, Any],
    group_bytes: int,
    is_compressed: bool,
    damaged: dict[str, str],
) -> Plan:
    """Plan a save.

    Args:
      store: The store that has `base`.
      base: Manifest of the checkpoint that the state may continue, or None.
      folder: Name of the new checkpoint's folder.
      group_bytes: Largest number of bytes of a group.
      is_compressed: Whether the new files are compressed.
      damaged: A problem of each damaged group, by its folder; these are written again. Damage that
        is found here is added.
    """
    stored, rest = (jax.tree.leaves(part) for part in rows.split(state))
    stored_text, rest_text = described(state)
    length, groups = 1, []
    span = Span(np.zeros(0, np.int64), np.zeros(0, np.int64))
    row_bytes = sum(leaf.nbytes for leaf in stored) // buffer.capacity if stored else 0
    most = pow2.power_below(min(group_bytes // (row_bytes + _BOOKKEEPING), MOST_ROWS))
    if stored:
        length, span = buffer.length, rows.span_of(rows.heads_of(state), buffer.length)
        since, kept = span.first, []
        if base is not None and len(base.groups.saves) * len(base.end) <= _MOST_NUMBERS:
            since, kept = _kept(store, base, state, span, most, damaged)
        make = lambda since, end: Save(folder, length, since, end, is_compressed)
        groups = [_again(group, span, make) if group.folder in damaged else group for group in kept]
        groups += cut(make(since, span.end), most, rows.num_rewritten(state))
        number = itertools.count()
        groups = [
            group._replace(number=next(number)) if group.sums is None else group for group in groups
        ]
    num_rows = [group.num_rows for group in groups if group.sums is None]
    return Plan(
        draft=Manifest(
            folder=folder,
            step=step,
            buffer=identity(buffer),
            library=__version__,
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
        num_bytes=sum(num_rows) * row_bytes + sum(leaf.nbytes for leaf in rest),
    )


def _again(group: Group, span: Span, make: Any) -> Group:
    """Return the group that has a damaged group's rows, as far as the state still holds them."""
    low, high = group.range()
    first = np.maximum(low, span.first)
    save = make(first, np.maximum(high, first))
    return Group(save, 0, 0, save.length, 0, len(low))


def _kept(
    store: Files,
    base: Manifest,
    state: ReplayState,
    span: Span,
    most: int,
    damaged: dict[str, str],
) -> tuple[np.ndarray, list[Group]]:
    """Divide a state's rows into those to be written and those that an earlier checkpoint has.

    Groups are compared with the state, oldest first. From the first group that differs on, rows are
    written. Each stream's newest rows may have changed since, and are written again. The newest
    groups are written again with the new rows while they have no more rows than these, and than
    half of `most`: small groups stay few.

    Args:
      store: The earlier checkpoint's files.
      base: The earlier checkpoint.
      state: The state.
      span: The rows that the state holds.
      most: The largest number of rows in a group.
      damaged: As for `planned`.

    Returns:
      The first number of each stream's rows to be written, int64[E], and the groups that have the
      rows before it.
    """
    if (span.first < base.first).any():  # the state has older rows than the checkpoint
        return span.first, []
    since, kept = np.clip(np.array(base.end) - rows.num_rewritten(state), span.first, span.end), []
    compared = Span(span.first, since)
    # all are begun first, so that the device need not wait for the host
    begun = [_compared(store, state, group, compared, damaged) for group in base.groups]
    num_same = sum(1 for _ in itertools.takewhile(lambda is_same: is_same(), begun))
    for at, group in reversed([*enumerate(base.groups)]):
        low, high = group.range()
        first = np.maximum(low, span.first)
        num_held = np.maximum(np.minimum(high, since) - first, 0)
        num_new = int((span.end - since).sum())
        is_small = not kept and num_held.sum() <= min(num_new, most // 2)
        if at >= num_same or is_small:
            since = np.where(num_held > 0, first, since)
        elif num_held.any():
            kept.append(group)
    return since, kept[::-1]


def _compared(
    store: Files, state: ReplayState, group: Group, span: Span, damaged: dict[str, str]
) -> Callable[[], bool]:
    """Begin to compare a group with a state.

    A group whose rows all lie in `span` is compared by its fingerprint, one with rows before `span`
    by its files. A damaged group counts as equal: it is written again from the state.

    Returns:
      A function that returns True if the state has the group's rows that lie in `span`, and none
      lies after `span`.
    """
    low, high = group.range()
    if ((low < high) & (high > span.end)).any():
        return lambda: False
    if not ((low < high) & (high > span.first)).any() or group.folder in damaged:
        return lambda: True
    picked = group.rows()
    is_held = picked.number >= span.first[picked.env]
    if is_held.all():
        total = fingerprint.of_rows(state, picked)
        return lambda: int(total) == group.fingerprint

    def by_files() -> bool:
        held = Picked(picked.env[is_held], picked.number[is_held])
        index = rows.rows_at(held, state.layout.length)
        # padded, so that few programs are compiled
        own, _ = rows.read(state, pow2.padded(index, pow2.power_above(len(is_held)), index[-1]))
        try:
            for name, leaf in named(own):
                values = array_of(store, group, name, leaf.shape[1:], leaf.dtype)[is_held]
                if rows.on_host(leaf)[: len(index)].tobytes() != values.tobytes():
                    return False
        except CorruptCheckpointError as error:
            damaged[group.folder] = str(error)
        return True

    return by_files

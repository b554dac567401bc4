"""Plan of a save: which rows to write, in which groups, and which groups to reuse."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._version import __version__
from jaxreplay.checkpoint import reuse, rows
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.groups import MOST_ROWS, Group, Groups, Save, Seals, cut
from jaxreplay.checkpoint.identity import described, identity
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.rows import Span

_BOOKKEEPING = 64  # bytes of a row's numbers, while it is being copied or written
# Largest number of streams * saves in a manifest, which has two vectors for each save. Above it
# nothing is reused, and all rows are written again.
_MOST_NUMBERS = 2**21


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of one save; E streams.

    Attributes:
      draft: The manifest, without what is known only after writing: seals and groups.
      kept: Reused groups of an earlier checkpoint, including the damaged ones in `again`.
      again: Number of new groups that replace each damaged group, by the damaged group's folder.
      groups: Groups to write, each with the number of rows that its streams may get before one of
        its rows is overwritten. Groups that replace damaged ones come first.
      end: int64[E], number of each stream's newest row, plus 1.
      group_rows: Largest number of rows of a group.
      row_bytes: Bytes of a row.
      num_bytes: Bytes to write.
    """

    draft: Manifest
    kept: list[Group]
    again: dict[str, int]
    groups: Iterator[tuple[int, Group]]
    end: np.ndarray
    group_rows: int
    row_bytes: int
    num_bytes: int

    def manifest(self, written: list[Group], seals: Seals) -> Manifest:
        """Return the complete manifest.

        Args:
          written: The new groups, in the order of the plan.
          seals: Seals of all arrays but the rows'.
        """
        new = iter(written)
        groups = [
            itertools.islice(new, self.again[group.folder])
            if group.folder in self.again
            else [group]
            for group in self.kept
        ]
        before = [group for some in groups for group in some]
        return dataclasses.replace(self.draft, groups=Groups.of([*before, *new]), seals=seals)


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
    damaged: dict[str, str],
) -> Plan:
    """Plan a save.

    Args:
      store: The store that has `base`.
      base: Manifest of the checkpoint that the state may continue, or None.
      folder: Name of the new checkpoint's folder.
      group_bytes: Largest number of bytes of a group.
      damaged: A problem of each damaged group, by its folder; these are written again. Damage that
        is found here is added.
    """
    stored, rest = rows.split(state)
    stored_leaves, rest_bytes = (
        jax.tree.leaves(stored),
        sum(leaf.nbytes for leaf in jax.tree.leaves(rest)),
    )
    stored_text, rest_text = described(state)
    length, num_rewritten = 1, 0
    span, since, kept = (
        Span(np.zeros(0, np.int64), np.zeros(0, np.int64)),
        np.zeros(0, np.int64),
        [],
    )
    row_bytes = (
        sum(leaf.nbytes for leaf in stored_leaves) // buffer.capacity if stored_leaves else 0
    )
    most = pow2.power_below(min(group_bytes // (row_bytes + _BOOKKEEPING), MOST_ROWS))
    if stored_leaves:
        length, num_rewritten = buffer.length, rows.num_rewritten(state)
        span = rows.span_of(rows.heads_of(state), length)
        since = span.first
        if base is not None and len(base.groups.saves) * len(base.end) <= _MOST_NUMBERS:
            since, kept = reuse.kept_of(store, base, state, span, most, damaged)
    again = {
        group.folder: reuse.held_of(group, span, folder, length)
        for group in kept
        if group.folder in damaged
    }
    saves = [*again.values(), Save(folder, length, since, span.end)]
    cuts = [list(cut(save, most)) for save in saves[:-1]]
    num_rows = sum(int((save.end - save.since).sum()) for save in saves)
    group_rows = min(most, pow2.power_above(num_rows))
    draft = Manifest(
        folder=folder,
        step=step,
        buffer=identity(buffer),
        library=__version__,
        length=length,
        first=span.first.tolist(),
        end=span.end.tolist(),
        rows=stored_text,
        rest=rest_text,
        seals={},
        groups=Groups.of([]),
        metadata=metadata,
    )
    return Plan(
        draft=draft,
        kept=kept,
        again=dict(zip(again, map(len, cuts), strict=True)),
        # Groups that replace damaged ones come first: their rows are older, and overwritten sooner.
        groups=_numbered(
            itertools.chain(*cuts, cut(saves[-1], group_rows, num_rewritten)), span, length
        ),
        end=span.end,
        group_rows=group_rows,
        row_bytes=row_bytes,
        num_bytes=num_rows * row_bytes + rest_bytes,
    )


def _numbered(groups: Iterable[Group], span: Span, length: int) -> Iterator[tuple[int, Group]]:
    """Number the groups of several saves consecutively. Yield each with the number of rows that its
    streams may get before one of its rows is overwritten."""
    for number, group in enumerate(groups):
        low, high = group.range()
        has_rows = low < high
        yield int((low + length - span.end)[has_rows].min()), group._replace(number=number)

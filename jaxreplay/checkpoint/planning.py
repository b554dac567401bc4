"""What a save writes: which rows, on top of which generation, in which groups."""

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

_BOOKKEEPING = 64  # bytes of a row's numbers, while it is on its way
# of all streams and saves that a manifest names: it has two vectors of each save. Past these all is
# written anew
_MOST_NUMBERS = 2**21


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one save.

    Args:
      draft: what is known of the generation before it is written.
      kept: groups of an earlier generation; those that are written again, for they are damaged,
        among them.
      again: how many new groups take the place of each of these, by its folder.
      groups: that are to be written, each with how many rows its streams may get before one of it
        is lost: first those that take the place of others.
      group_rows: rows of a group, at most. row_bytes: of one. num_bytes: that are written.
    """

    draft: Manifest
    kept: list[Group]
    again: dict[str, int]
    groups: Iterator[tuple[int, Group]]
    end: np.ndarray  # int64[E]: one more than the number of each stream's newest row
    group_rows: int
    row_bytes: int
    num_bytes: int

    def manifest(self, written: list[Group], seals: Seals) -> Manifest:
        """The generation, once its groups are written, in the order of the plan."""
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
    """The plan of a save.

    Args:
      store: where `base` lies, the generation that the state may go on from.
      damaged: a problem of each damaged group, by its folder: they are written again. Those that
        are found here are added.
      folder: of the new generation. group_bytes: of a group, at most.
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
        # Oldest first: these are overwritten before any that is newer than all that is kept.
        groups=_numbered(
            itertools.chain(*cuts, cut(saves[-1], group_rows, num_rewritten)), span, length
        ),
        end=span.end,
        group_rows=group_rows,
        row_bytes=row_bytes,
        num_bytes=num_rows * row_bytes + rest_bytes,
    )


def _numbered(groups: Iterable[Group], span: Span, length: int) -> Iterator[tuple[int, Group]]:
    """Groups of several saves with numbers that no two have; and with the distance, as of now, of
    the row that is lost first."""
    for number, group in enumerate(groups):
        low, high = group.range()
        has_rows = low < high
        yield int((low + length - span.end)[has_rows].min()), group._replace(number=number)

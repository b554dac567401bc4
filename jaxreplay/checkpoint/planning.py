"""Plan of a save: which rows to write, in which groups, and which groups of an earlier checkpoint
to keep.

A row does not change once it is added, but by `buffer.write`, which leaves a stamp. So rows that
the checkpoint before has are not written again, except groups whose stamps differ. If a state was
rewound in memory and went on differently, or lost the newest rows of an env by `buffer.drop`, it
does not continue that checkpoint. The newest rows tell: they are compared by their checksum, and if
they differ, all rows are written.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import description, named, spec_text
from jaxreplay._version import __version__
from jaxreplay.checkpoint import bundle, rows
from jaxreplay.checkpoint.chain import whoami
from jaxreplay.checkpoint.groups import MOST_ROWS, Group, Save, columns_of, cut
from jaxreplay.checkpoint.manifest import MOST_NUMBERS, Manifest, Member, StoredLayout, in_member
from jaxreplay.distributed.parts import Parts
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.layout import NUM_PARTS, Layout
from jaxreplay.storage.stored_arrays import HostArray

_BOOKKEEPING = 64  # bytes of a row's numbers, while it is being copied or written
# Parts of a ring that have groups of their own: while rows of one are overwritten, the rest stays.
_PARTS, _LEAST_ROWS = 16, 256
_COMPARED = 2**23  # bytes of the newest rows that are compared, at least


class SaveParts(NamedTuple):
    """A state, divided into what a checkpoint has of it."""

    rows: Any  # that do not change once written, as `rows.stored` returns them; {} of a rollout
    rest: Any
    parts: Parts  # from which the rows are read

    @property
    def layout(self) -> Layout:
        """Layout of each part."""
        return self.parts.own[0].state.layout


class SavePlan(NamedTuple):
    """Plan of one save.

    Attributes:
      manifest: The manifest, without the checksums of the files that are to be written.
      rest: The arrays beside the rows.
      num_bytes: Bytes to write, by all processes.
    """

    manifest: Manifest
    rest: dict[str, Any]
    num_bytes: int


def plan_of(
    buffer: Any,
    splits: Mapping[str, SaveParts],
    extras: Mapping[str, Any],
    base: Manifest | None,
    group_bytes: int,
    **fields: Any,
) -> SavePlan:
    """Plan a save. All processes make the same plan.

    Args:
      buffer: The buffer.
      splits: The states of its members.
      extras: Arrays to save beside them.
      base: Manifest of the checkpoint that the state may continue, or None.
      group_bytes: Largest number of bytes of a group.
      fields: Those of the new manifest that are left: `folder`, `step`, `is_compressed`,
        `piece_bytes` and `text`.
    """
    members, rest, numbers, num_bytes = {}, {**extras}, itertools.count(), 0
    for name, split in splits.items():
        rest |= {in_member(name, own): leaf for own, leaf in named(split.rest)}
        if split.rows:
            layout, num_envs = split.layout, split.parts.bounds[-1]
            span = rows.span_of(split.rest["counters"], layout.length)
            row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(split.rows))
            row_bytes //= num_envs * layout.length
            leaves = {
                own: spec_text(leaf, 1)
                for own, leaf in named(split.rows, is_leaf=stored_arrays.is_compound)
                if not isinstance(leaf, HostArray)
            }
            before = base.members.get(name) if base is not None else None
            if before is not None and before.rows != leaves:  # one is an index, without the steps
                before = None
            save = Save(
                fields["folder"], layout.length, span.first, span.end, fields["is_compressed"]
            )
            own = _groups(split, before, save, row_bytes, group_bytes)
            num_bytes += row_bytes * sum(one.num_rows for one in own if one.sums is None)
            saves, columns = columns_of(
                one._replace(number=next(numbers)) if one.sums is None else one for one in own
            )
            members[name] = Member(
                layout=StoredLayout.of(layout),
                length=layout.length,
                first=span.first,
                end=span.end,
                rows=leaves,
                saves=saves,
                columns=columns,
            )
    num_bytes += sum(leaf.nbytes for leaf in rest.values())
    manifest = Manifest(
        **fields,
        library=__version__,
        writer=whoami(),
        buffer=description(buffer),
        members=members,
        rest={name: spec_text(leaf) for name, leaf in rest.items()},
        files=[],
    )
    return SavePlan(manifest, rest, num_bytes)


def _groups(
    split: SaveParts,
    base: Member | None,
    save: Save,
    row_bytes: int,
    group_bytes: int,
) -> list[Group]:
    """Return a state's groups, in the order of their rows. New ones lie in one part each. `save`:
    all of the state's rows."""
    layout, num_envs = split.layout, len(save.end)
    most = pow2.power_below(
        min(
            group_bytes // (row_bytes + _BOOKKEEPING),
            MOST_ROWS,
            max(num_envs * layout.length // _PARTS, _LEAST_ROWS),
        )
    )
    # Newest rows of each stream that may still change: a step and its final row, which is taken
    # back if the episode continues.
    num_rewritten = 2 if layout.rows_per_step == 2 and not layout.allow_mask else 0
    stamps = None
    if layout.allow_write:
        counters = split.rest["counters"]
        # of the writes to each part of the rings, uint32[E, NUM_PARTS]
        stamps = np.stack([counters[f"write_stamp_{part}"] for part in range(NUM_PARTS)], axis=-1)
    since, kept = save.since, []
    # A state may continue a checkpoint if it has as many streams, and neither lacks newer rows nor
    # has older ones.
    if (
        base is not None
        and len(base.end) == num_envs
        and len(base.saves) * num_envs < MOST_NUMBERS
        and (base.end - num_rewritten <= save.end).all()
        and (save.since >= base.first).all()
    ):
        since, kept = _kept(base, save, num_rewritten, most)
        saves: dict[Save, Save] = {}
        kept = [_again(group, stamps, save, saves) for group in kept]
        unchanged = [group for group in kept if group.sums is not None]
        can_write = all(
            split.parts.lie_in_one(group.env, group.env_stop)
            for group in kept
            if group.sums is None
        )
        if not (can_write and _has(split.parts, unchanged, save, row_bytes)):
            since, kept = save.since, []
    save = msgspec.structs.replace(save, since=since)
    for env, env_stop in itertools.pairwise(split.parts.bounds):
        new = cut(save, most, slice(env, env_stop), num_rewritten)
        kept += [group.stamped(stamps) for group in new]
    return kept


def _again(group: Group, stamps: np.ndarray | None, save: Save, saves: dict[Save, Save]) -> Group:
    """Return a group that an earlier checkpoint has; if its rows were written since, as one that is
    to be written again, without the rows that are overwritten.

    Args:
      group: The group.
      stamps: Those of the state, as for `Group.stamped`.
      save: The rows of the state.
      saves: Gets the new form of each earlier save of which a group is written again.
    """
    now, before = group.stamped(stamps), group.save
    # With another length, parts of the rings have other rows than their stamps are of.
    is_known = before.length == save.length or not np.any(stamps)
    if now.stamp == group.stamp and is_known:
        return group
    since = np.clip(save.since, before.since, before.end)  # a stream may have no row of it left
    changed = {"folder": save.folder, "since": since, "is_compressed": save.is_compressed}
    again = saves.setdefault(before, msgspec.structs.replace(before, **changed))
    return now._replace(save=again, sums=None)


def _kept(
    base: Member, save: Save, num_rewritten: int, most: int
) -> tuple[np.ndarray, list[Group]]:
    """Divide a state's rows into those to be written and those that an earlier checkpoint has.

    Each stream's newest rows may have changed since, and are written again. So are the newest
    groups, with their streams' new rows, while they have no more rows than these, and than half of
    `most`: small groups stay few.

    Args:
      base: The earlier checkpoint.
      save: The rows of the state.
      num_rewritten: Newest rows of each stream that may have changed.
      most: The largest number of rows in a group.

    Returns:
      The first number of each stream's rows to be written, int64[E], and the groups that have the
      rows before it.
    """
    since = np.clip(base.end - num_rewritten, save.since, save.end)
    kept, is_kept = [], np.zeros(len(since), bool)
    for group in reversed(base.groups):
        low, high = group.range()
        first = np.maximum(low, save.since)
        num_held = np.maximum(np.minimum(high, since) - first, 0)
        own = num_held > 0
        num_new = (save.end - since)[group.env : group.env_stop].sum()
        has_newest = ((low < high) & (high > since)).any()  # which may have changed
        is_small = num_held.sum() <= min(num_new, most // 2)
        if has_newest or (is_small and not is_kept[own].any()):
            since = np.where(own, first, since)
        else:
            kept.append(group)
            is_kept |= own
    return since, kept[::-1]


def _has(parts: Parts, groups: list[Group], save: Save, row_bytes: int) -> bool:
    """Return whether a state has the rows of groups: of each stream's, those of the newest ones are
    compared, up to a few MiB. A group that is partly overwritten cannot be compared.

    Args:
      parts: The state's parts.
      groups: The groups, in the order of their rows.
      save: The rows of the state.
      row_bytes: Bytes of a row.
    """
    num_compared = np.full(len(save.end), -1)  # rows, of groups that have rows of a stream
    is_same = True
    for group in reversed(groups):
        low, high = group.range()
        own = (low < high) & (high > save.since)
        is_whole = (low >= save.since)[low < high].all()
        if is_whole and num_compared[own].min() * row_bytes < _COMPARED:
            is_same = is_same and _is_in(parts, group)
            num_compared[own] = np.maximum(num_compared[own], 0) + group.num_rows
        elif not is_whole and (num_compared[own] < 0).any():
            is_same = False
    return all(parts.processes.told(is_same))


def _is_in(parts: Parts, group: Group) -> bool:
    """Return whether a state has the rows of a group, as far as this process knows. If several
    processes have some of them, none does."""
    own = [one for one in parts.own if one.env < group.env_stop and group.env < one.env_stop]
    if not own:
        return True
    ends = [(max(one.env, group.env), min(one.env_stop, group.env_stop)) for one in own]
    if sum(stop - start for start, stop in ends) < group.env_stop - group.env:
        return False
    found: dict[str, list[np.ndarray]] = {}
    for part in own:
        copied, count = rows.copied(part, group.rows())
        for name, leaf in named(copied):
            found.setdefault(name, []).append(rows.on_host(leaf)[:count])
    joined = lambda leaves: np.concatenate(leaves) if len(leaves) > 1 else leaves[0]
    whole = {name: joined(leaves) for name, leaves in found.items()}
    return group.sums is not None and bundle.checksum(bundle.content_of(whole)) == group.sums.raw

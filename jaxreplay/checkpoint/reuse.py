"""Reuse of an earlier checkpoint's groups: rows that it shares with a state are not written again.

The rows themselves are compared, so the state's history does not matter. If a state was rewound and
continued differently, its rows differ from there on.
"""

import itertools

import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.names import named
from jaxreplay.checkpoint import fingerprint, rows, zarr_arrays
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.groups import Group, Save
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.rows import Picked, Span
from jaxreplay.storage.sampleable import ReplayState


def kept_of(
    store: Files,
    base: Manifest,
    state: ReplayState,
    span: Span,
    group_rows: int,
    damaged: dict[str, str],
) -> tuple[np.ndarray, list[Group]]:
    """Divide a state's rows into those to be written and those that an earlier checkpoint has.

    Groups are compared with the state, oldest first. From the first group that differs on, rows are
    written. Each stream's newest rows may have changed since, and are written again. The newest
    groups are written again with the new rows while they have no more rows than these, and than
    half of `group_rows`: small groups stay few.

    Args:
      store: The earlier checkpoint's files.
      base: The earlier checkpoint.
      state: The state.
      span: The rows that the state holds.
      group_rows: The largest number of rows in a group.
      damaged: The problem of each damaged group, by folder. Damaged groups that are found here are
        added.

    Returns:
      The first number of each stream's rows to be written, int64[E], and the groups that have the
      rows before it.
    """
    if (span.first < base.first).any():  # the state has older rows than the checkpoint
        return span.first, []
    since, kept = np.clip(np.array(base.end) - rows.num_rewritten(state), span.first, span.end), []
    same = list(
        itertools.takewhile(
            lambda group: _has(store, state, group, Span(span.first, since), damaged), base.groups
        )
    )
    for at, group in reversed([*enumerate(base.groups)]):
        low, high = group.range()
        first = np.maximum(low, span.first)
        num_held = np.maximum(np.minimum(high, since) - first, 0)
        is_small = not kept and num_held.sum() <= min(
            int((span.end - since).sum()), group_rows // 2
        )
        if at >= len(same) or is_small:
            since = np.where(num_held > 0, first, since)
        elif num_held.any():
            kept.append(group)
    return since, kept[::-1]


def held_of(group: Group, span: Span, folder: str, length: int) -> Save:
    """Return the save that writes a group's rows again, as far as the state still holds them."""
    low, high = group.range()
    first = np.maximum(low, span.first)
    return Save(folder, length, first, np.maximum(high, first))


def _has(
    store: Files, state: ReplayState, group: Group, span: Span, damaged: dict[str, str]
) -> bool:
    """Return True if the state has the group's rows that lie in `span`, and none lies after `span`.

    A group whose rows all lie in `span` is compared by its fingerprint, one with rows before `span`
    by its files. A damaged group counts as equal: it is written again from the state.
    """
    low, high = group.range()
    if ((low < high) & (high > span.end)).any():
        return False
    if not ((low < high) & (high > span.first)).any() or group.folder in damaged:
        return True
    picked = group.rows()
    is_held = picked.number >= span.first[picked.env]
    if is_held.all():
        return int(fingerprint.of_rows(state, picked)) == group.fingerprint
    index = rows.rows_at(Picked(picked.env[is_held], picked.number[is_held]), state.layout.length)
    # padded, so that few programs are compiled
    own, _ = rows.read(state, pow2.padded(index, pow2.power_above(len(is_held)), index[-1]))
    try:
        for name, leaf in named(own):
            if leaf.size:
                values = zarr_arrays.array_of(
                    store, group, name, leaf.shape[1:], leaf.dtype
                ).read()[is_held]
                if not np.array_equal(
                    zarr_arrays.bytes_of(np.asarray(leaf)[: len(index)]),
                    zarr_arrays.bytes_of(values),
                ):
                    return False
    except CorruptCheckpointError as error:
        damaged[group.folder] = str(error)
    finally:
        store.forget(f"rows/{group.folder}")
    return True

"""What an earlier generation already has of a state's rows: those need not be written again.

That is so where the state goes on from the one that was saved, which its fingerprint tells (`fingerprint.py`): that of the rows up to the
generation's newest ones is what the generation has noted. A state that went back, and on another way, has another one, though its rows have
the same numbers and perhaps, here and there, the same values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import sizes
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.groups import Group, Save, cut
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.rows import Span
from jaxreplay.drawable import ReplayState

_BLOCK_BYTES = 2**22  # of rows whose fingerprint is taken at a time


def noted(replay: Any, state: ReplayState, span: Span) -> list[int]:
    """The fingerprint of each stream's rows, but for the newest ones if they may be taken back; none where the state keeps none."""
    if state.streams.history is None:
        return []
    settled = np.maximum(span.end - rows.num_rewritten(state), span.first)
    return _up_to(replay, state, settled, span).tolist()


def goes_on(replay: Any, state: ReplayState, span: Span, base: Manifest) -> bool:
    """Whether all rows that the state and a generation have in common are the same ones."""
    if state.streams.history is None or not base.history or len(base.end) != len(span.end):
        return False
    settled = np.maximum(np.array(base.end, np.int64) - rows.num_rewritten(state), np.array(base.first, np.int64))
    if (settled > span.end).any():  # it is behind
        return False
    is_shared = settled > span.first
    found = _up_to(replay, state, np.where(is_shared, settled, span.end), span)
    return bool((found == np.array(base.history, np.uint32))[is_shared].all())


def kept_of(base: Manifest, span: Span, num_rewritten: int, group_rows: int) -> tuple[np.ndarray, list[Group]]:
    """From which number on a stream's rows are to be written, int64[E], and the groups that have the others.

    The newest groups are written again with what is new while they are no larger: so there are never many small ones. So are the newest
    rows of each stream, which may be other ones by now.
    """
    since = np.maximum(np.maximum(base.first, np.array(base.end) - num_rewritten), span.first)
    for group in reversed(base.groups):
        low, high = group.range()
        live = np.minimum(high, since) - np.maximum(low, span.first)  # rows that are still held, and not written anew
        if np.maximum(live, 0).sum() > min(int((span.end - since).sum()), group_rows // 2):
            break
        since = np.where(live > 0, np.maximum(low, span.first), since)
    return since, [base.groups[at] for at in np.flatnonzero(base.groups.num_rows(span.first, since))]


def held_of(group: Group, span: Span, since: np.ndarray, folder: str, length: int) -> Save:
    """The rows of a group that are still held, and not written anew from `since` on, int64[E]: to be written again in its place."""
    low, high = group.range()
    first = np.maximum(low, span.first)
    return Save(folder, length, first, np.maximum(np.minimum(high, since), first))


def _up_to(replay: Any, state: ReplayState, number: np.ndarray, span: Span) -> np.ndarray:
    """The fingerprint of each stream's rows before a number, uint32[E]: of those before `span.end`, without the ones from there on."""
    length, total = replay.length, np.array(rows.copied(state.streams.history))
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.streams.steps)) // max(replay.capacity, 1)
    most = sizes.power_below(_BLOCK_BYTES // (row_bytes + 64))
    for group in cut(Save("", length, np.maximum(number, span.first), span.end), most):
        picked = group.rows()
        index, size = rows.rows_at(picked, length), sizes.power_above(len(picked.env))
        arrays = (index, picked.number.astype(np.uint32), picked.env.astype(np.int32))
        total -= np.asarray(_fingerprint(replay, state, *(sizes.padded(array, size, array[-1]) for array in arrays), len(index)))
    return total


@functools.partial(jax.jit, static_argnums=0)
def _fingerprint(replay: Any, state: ReplayState, row: jax.Array, number: jax.Array, env: jax.Array, count: jax.Array) -> jax.Array:
    """The sum over the first `count` of some rows, for each stream: uint32[E]."""
    hashes = jnp.where(jnp.arange(len(row)) < count, state.streams.hashes(row, number), 0)
    return jnp.zeros((replay.num_envs,), jnp.uint32).at[env].add(hashes)

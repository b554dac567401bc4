"""Writes: count a block of steps, write its rows, and tell which rows became sampleable.

All is counted before any row is written. Each write is one masked scatter per array; a row that is
not written points past the end. (A `lax.cond` around the write would become a select over the whole
buffer under `vmap`. A strided `dynamic_update_slice` took 13 us where the scatter takes 2.)
"""

import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util import random, xla
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import named
from jaxreplay.storage import agents, ring, row_flags, stored_arrays
from jaxreplay.storage.layout import NUM_PARTS, Layout
from jaxreplay.storage.state import Counters, EpisodeTable, ReplayState, Rows, stored_step
from jaxreplay.types import Index


class Writes(NamedTuple):
    """Rows that one call writes, in the order of time: at most K rows in each of E streams."""

    row: jax.Array  # int32[K, E]; capacity where nothing is written
    is_written: jax.Array  # bool[K, E]
    flags: Any  # uint8[K, E]; None for plain items
    age: jax.Array  # int32[K, E]: rows of its stream written after it
    num_rows: jax.Array  # int32[E]: rows written in each stream
    num_waiting: Any  # int32[E]: rows that were pending before; None if the window is unbounded
    candidate_number: Any = None  # uint32[K, E]; None for plain items
    # None without an episode table:
    ordinal: Any = None  # int32[K, E]: each row's episode
    # int32[K, E]: entry of `EpisodeTable.end_position` that gets the position; capacity for none
    end_entry: Any = None
    start_entry: Any = None  # the same for `EpisodeTable.start_position`
    agents: jax.Array | None = None  # uint8[T, E, A]: bytes of several agents


def advance(state: ReplayState, steps: PyTree, mask: jax.Array | None) -> tuple[Counters, Writes]:
    """Count a block of steps, which `write` then writes.

    Args:
      state: The buffer's state.
      steps: Leaves [T, E, ...]. The block is short enough to overwrite neither a row that waits for
        its window, nor one that a new row looks back to.
      mask: bool[T, E], False where an env took no step; or None if all envs took all.

    Returns:
      The new counters, but for `num_expired`; and the rows to be written.
    """
    layout, before = state.layout, state.counters
    envs, num_steps = layout.envs(before.some), jax.tree.leaves(steps)[0].shape[0]
    taken = jnp.ones((num_steps, *envs.shape), bool) if mask is None else mask
    if before.some is not None:
        taken &= envs < layout.num_envs
    if before.num_expired is not None:  # the last sample may have read flags for the look-back
        taken = xla.after(taken, before.num_expired)

    flags, is_written, bytes_of_all = None, taken, None
    if layout.autoreset is not None:
        newest = _newest_bytes(state) if steps.terminated.ndim > taken.ndim else None
        before, flags, is_written, bytes_of_all = rows_of(
            before, steps.terminated, steps.truncated, taken, newest
        )
    new, writes = counted(before, flags, is_written)
    writes = writes._replace(agents=bytes_of_all)
    if layout.traits.in_line:
        # In one kernel. Otherwise XLA fuses the counting into each write again.
        if writes.num_waiting is not None:  # else XLA keeps a copy of the old counts
            waiting = xla.after(writes.num_waiting, writes.num_waiting)
            writes = writes._replace(num_waiting=waiting)
        new, writes = xla.barrier((new, writes))
    return new, writes


def rows_of(
    counters: Counters,
    terminated: jax.Array,
    truncated: jax.Array,
    taken: jax.Array,
    newest: jax.Array | None = None,
) -> tuple[Counters, jax.Array, jax.Array, jax.Array | None]:
    """Return which rows a block of steps writes, and their flags.

    Args:
      counters: The counters before the block.
      terminated: bool[T, E], or bool[T, E, A] of several agents.
      truncated: The same.
      taken: bool[T, E], False where an env took no step.
      newest: uint8[E, A], bytes of several agents in the newest rows. Default: one agent.

    Returns:
      The counters with the phase after the block; uint8[K, E], flags; bool[K, E], True for rows
      that are written; uint8[T, E, A], bytes of several agents, or None.
    """
    layout, of_agents = counters.layout, None
    if newest is not None:
        last_flags, is_cleared = counters.last_flags, (counters.filled == 0) & (counters.lap > 0)
        has_ended = agents.ended(newest) & ~layout.closes_episode(last_flags)[:, None]
        # After a clear it is not known who has ended. Then a flag counts as one of an earlier step.
        has_ended |= is_cleared[:, None]
        own = last_flags if layout.autoreset == "next_step" else None
        of_agents = agents.bytes_of(terminated, truncated, taken, has_ended, own)
        terminated, truncated = agents.flags_of_env(of_agents)
    assert layout.autoreset is not None
    flags, is_written = row_flags.rows_of(
        layout.autoreset, terminated, truncated, taken, counters.last_flags
    )
    if not layout.window.needs_next_obs:
        flags = row_flags.skip_without_action(flags)
    if counters.phase is not None:
        phase, flags = skipped(layout, counters.phase, flags, is_written)
        counters = counters.set(phase=phase)
    return counters, flags, is_written, of_agents


def counted(
    counters: Counters, flags: jax.Array | None, is_written: jax.Array, ends: Any = None
) -> tuple[Counters, Writes]:
    """Return where the rows of a block go, and what is known of them: which are candidates, which
    are pending, and which end episodes.

    Args:
      counters: The counters before the block.
      flags: uint8[K, E]; None for plain items.
      is_written: bool[K, E], True for rows that are written.
      ends: bool[K, E], True for the last rows of episodes, if rows are counted again. Default: the
        block is of new steps, whose flags say it.

    Returns:
      The counters after the block, but for `num_expired`; the rows to be written.
    """
    layout, new = counters.layout, counters
    envs, window, length = layout.envs(counters.some), layout.window, layout.length

    # Where they go.
    size = len(is_written)
    if layout.lockstep or ends is not None:  # the last row is the newest
        age = jnp.broadcast_to(size - 1 - ring.arange(size)[:, None], is_written.shape)
        num_rows = jnp.full(envs.shape, size, jnp.int32)
        num_rows = num_rows if ends is None else is_written.sum(axis=0, dtype=jnp.int32)
    else:
        nth = jnp.cumsum(is_written, axis=0, dtype=jnp.int32) - 1
        num_rows = nth[-1] + 1
        age = num_rows - 1 - nth
    end = counters.position + num_rows
    new = new.set(
        position=ring.wrap(end, length),
        filled=jnp.minimum(counters.filled + num_rows, length),
        lap=counters.lap + (end >= length).astype(jnp.uint32),
    )
    # Rows, and candidate numbers below, are counted back from the new counts. If they were
    # counted forward from the old ones, XLA would keep a copy of these for later kernels.
    row = layout.row(envs, layout.wrap(new.position - 1 - age))
    row = jnp.where(is_written, row, layout.capacity)
    writes = Writes(row, is_written, flags, age, num_rows, counters.num_pending)
    from_each_on = lambda is_one: jax.lax.cumsum(is_one.astype(jnp.uint32), axis=0, reverse=True)

    # Which of them are candidates, which rows are pending, and which episodes end.
    if flags is not None:
        is_candidate = is_written & ((flags & window.no_candidate) == 0)
        count = counters.num_candidates + is_candidate.sum(axis=0, dtype=jnp.uint32)
        newest = jnp.where(is_written & (age == 0), flags, 0).sum(axis=0, dtype=jnp.uint8)
        last_flags = jnp.where(num_rows > 0, newest, counters.last_flags)
        new = new.set(last_flags=last_flags, num_candidates=count)
        writes = writes._replace(candidate_number=count - from_each_on(is_candidate))
    if counters.num_pending is not None:
        new = new.set(num_pending=count_pending(layout, counters.num_pending, writes))
    if layout.has_table:
        assert flags is not None
        ends = is_written & layout.closes_episode(flags) if ends is None else ends
        ends &= row_flags.is_of_episode(flags)
        starts = is_written & ((flags & row_flags.NO_STEP) == row_flags.FIRST)
        current = layout.wrap(counters.ordinal + ends.sum(axis=0, dtype=jnp.int32))
        ordinal = layout.wrap(current - from_each_on(ends).astype(jnp.int32))
        row = layout.row(envs, ordinal)
        entry = lambda where: jnp.where(where, row, layout.capacity)
        is_open = (counters.is_open | (num_rows > 0)) & ~jnp.any(ends & (age == 0), axis=0)
        new = new.set(ordinal=current, is_open=is_open)
        writes = writes._replace(ordinal=ordinal, end_entry=entry(ends), start_entry=entry(starts))
    return new, writes


def taken_back(counters: Counters, num_rows: Any, num_candidates: Any, num_ends: Any) -> Counters:
    """Return the counters without the newest rows of each stream, which may be counted again.

    Args:
      counters: The counters with these rows.
      num_rows: int32[E], their number.
      num_candidates: uint32[E], the number of candidates among them.
      num_ends: int32[E], the number of episodes that end with one of them.
    """
    wrap = counters.layout.wrap
    new = counters.set(
        position=wrap(counters.position - num_rows),
        filled=counters.filled - num_rows,
        lap=counters.lap - (counters.position < num_rows).astype(jnp.uint32),
        num_candidates=counters.num_candidates - num_candidates,
    )
    if counters.num_pending is not None:
        new = new.set(num_pending=jnp.maximum(counters.num_pending - num_rows, 0))
    if counters.layout.has_table:
        is_open = counters.is_open | (num_ends > 0)
        new = new.set(ordinal=wrap(counters.ordinal - num_ends), is_open=is_open)
    return new


def _newest_bytes(state: ReplayState) -> jax.Array:
    """Return the bytes of several agents in the newest rows: uint8[E, A]."""
    layout, counters = state.layout, state.counters
    env = jnp.minimum(layout.envs(counters.some), layout.num_envs - 1)
    newest = layout.row(env, layout.wrap(counters.position - 1))
    return stored_arrays.read(state.rows.steps.terminated, newest)


def skipped(
    layout: Layout, phase: jax.Array, flags: jax.Array, is_written: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mark the transitions between candidates.

    Args:
      layout: Layout of the state, whose window has a period above 1.
      phase: int32[E], number of transitions since the newest candidate before these rows.
      flags: uint8[K, E], of rows in the order of time, without marks of transitions.
      is_written: bool[K, E].

    Returns:
      The phase after these rows, int32[E]; the flags, uint8[K, E].
    """
    window = layout.window
    is_transition = is_written & ((flags & window.no_candidate) == 0)
    # transitions of this block up to each row, itself included
    through = jnp.cumsum(is_transition, axis=0, dtype=jnp.int32)
    before = through - is_transition
    starts = is_written & ((flags & row_flags.FIRST) != 0) & (not window.crosses_episodes)
    # Count from the start of the row's episode if that is in the block, else from the phase
    # before the block.
    latest_start = jax.lax.cummax(jnp.where(starts, before, -1), axis=0)
    since = jnp.where(latest_start >= 0, before - latest_start, before + phase)
    _, place = ring.divide(since, window.period)
    _, phase = ring.divide((since + is_transition)[-1], window.period)
    return phase, jnp.where(is_transition & (place != 0), flags | row_flags.SKIPPED, flags)


def write(rows: Rows, layout: Layout, steps: PyTree, writes: Writes) -> Rows:
    """Write the rows of a block of steps, which `advance` has counted."""
    put = lambda stored, new, row: stored_arrays.tree_map(
        lambda leaf, values: stored_arrays.write(leaf, row, values), stored, new
    )
    if rows.flags is None:
        return rows.replace(steps=put(rows.steps, steps, writes.row))
    new = stored_step(steps, writes.agents)
    if layout.rows_per_step == 2:  # of a final row, only the observation is read
        pairs = writes.row.reshape(-1, 2, writes.row.shape[-1])
        rest = put(rows.steps.replace(obs=()), new.replace(obs=()), pairs[:, 0])
        stored = rest.replace(obs=put(rows.steps.obs, _with_final_obs(steps), writes.row))
    else:
        stored = put(rows.steps, new, writes.row)
    write, table = stored_arrays.write, rows.table
    if table is not None:
        _, position = layout.split(writes.row)
        table = EpisodeTable(
            write(table.ordinal, writes.row, writes.ordinal),
            write(table.end_position, writes.end_entry, position),
            write(table.start_position, writes.start_entry, position),
        )
    return Rows(
        stored,
        write(rows.flags, writes.row, writes.flags),
        write(rows.candidate_number, writes.row, writes.candidate_number),
        table,
    )


def overwrite(state: ReplayState, index: Index, values: dict[str, jax.Array]) -> ReplayState:
    """Write leaves of rows that are still stored, and no final rows.

    Args:
      state: The buffer's state, of a layout with `allow_write`. Donated.
      index: The rows, leaves [B]. If one appears twice, its last values stay.
      values: New values of leaves, [B, ...], by the name of the leaf.

    Returns:
      The new state.
    """
    layout, target = state.layout, written_again(state, index)
    row, is_written = jnp.clip(index.row, 0, layout.capacity - 1), target < layout.capacity
    has_order = layout.traits.has_loops  # of a scatter
    if not has_order:
        target = jnp.where(xla.is_last(target), target, layout.capacity)
    rows = put(state.rows, target, values, are_distinct=not has_order)

    env, position = layout.split(row)
    part = jnp.where(is_written, layout.part(position), NUM_PARTS)
    noted = jnp.zeros((NUM_PARTS + 1, layout.num_envs), jnp.uint32)
    noted = noted.at[part, env].add(jnp.where(is_written, stamp_of(row, values), 1))
    counters = stamped(state.counters, noted[:NUM_PARTS], noted[NUM_PARTS])
    return state.replace(rows=rows, counters=counters)


def written_again(state: ReplayState, index: Index) -> jax.Array:
    """Return the rows that `overwrite` writes: int32[B], the capacity for those that are ignored.

    Args:
      state: The buffer's state.
      index: The rows, leaves [B].
    """
    row = jnp.clip(index.row, 0, state.layout.capacity - 1)
    is_same = (row == index.row) & state.is_written(row) & (state.index(row).lap == index.lap)
    is_written = is_same & ~state.has(row, row_flags.FINAL)
    return jnp.where(is_written, row, state.layout.capacity)


def stamp_of(row: jax.Array, values: dict[str, jax.Array]) -> jax.Array:
    """Return a hash of each row, its new values and its place in the batch, since of equal rows the
    last one stays: uint32[B], at least 1.

    Args:
      row: int32[B], the rows.
      values: New values of leaves, [B, ...], by the name of the leaf.
    """
    place = lambda size: random.avalanche(ring.arange(size).astype(jnp.uint32) + 1)
    stamp = random.avalanche(row.astype(jnp.uint32) + place(len(row)))
    for name, leaf in values.items():
        words = _words(leaf)
        content = random.avalanche(words + place(words.shape[1])).sum(axis=1, dtype=jnp.uint32)
        stamp = random.avalanche((stamp ^ content) + jnp.uint32(zlib.crc32(name.encode())))
    return jnp.maximum(stamp, 1)


def _words(leaf: jax.Array) -> jax.Array:
    """Return all bits of values [B, ...] as uint32[B, K]."""
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype.itemsize < 8:  # both casts are exact
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        leaf = leaf.astype(jnp.float32 if is_float else jnp.uint32)
    words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return words.reshape(len(words), math.prod(words.shape[1:]))


def stamped(counters: Counters, stamps: jax.Array, num_ignored: Any = 0) -> Counters:
    """Add writes to the counters: to the stamp of each part of the rings that they change, which is
    a hash of all its writes in their order.

    Args:
      counters: The counters.
      stamps: uint32[NUM_PARTS, E] or uint32[NUM_PARTS, 1], the sum of the stamps of each part's
        rows; 0 for no write.
      num_ignored: uint32[E], number of rows that were ignored. Default: 0.
    """
    after = lambda old, stamp: jnp.where(stamp > 0, random.avalanche(old + stamp), old)
    names, stored = counters.layout.counter_names, counters.stored
    first, ignored = names.index("write_stamp_0"), names.index("num_ignored_writes")
    if isinstance(stored, tuple):
        new = [*stored]
        for part in range(NUM_PARTS):
            new[first + part] = after(stored[first + part], stamps[part])
        new[ignored] += num_ignored
        return counters.replace(stored=tuple(new))
    # All at once: 17 counters one by one took 15 us.
    parts = slice(first, first + NUM_PARTS)
    new = stored.at[parts].set(after(stored[parts], stamps)).at[ignored].add(num_ignored)
    return counters.replace(stored=new)


def put(rows: Rows, row: jax.Array, values: dict[str, jax.Array], are_distinct: bool) -> Rows:
    """Write leaves of steps, [B, ...] by their names, to rows int32[B], as `stored_arrays.write`
    does."""
    leaves, structure = jax.tree.flatten(rows.steps, is_leaf=stored_arrays.is_compound)
    names = [name for name, _ in named(rows.steps, is_leaf=stored_arrays.is_compound)]
    new = [
        stored_arrays.write(leaf, row, values[name], are_distinct) if name in values else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return rows.replace(steps=jax.tree.unflatten(structure, new))


def _with_final_obs(steps: Any) -> Any:
    """Return the observations of a block, each followed by the final one of its step: leaves
    [2 T, E, ...]."""

    def joined(obs: jax.Array, final_obs: jax.Array) -> jax.Array:
        return jnp.stack([obs, final_obs], axis=1).reshape((2 * len(obs), *obs.shape[1:]))

    return jax.tree.map(joined, steps.obs, steps.final_obs)


def count_pending(layout: Layout, num_pending: jax.Array, writes: Writes) -> jax.Array:
    """Count the newest rows of each stream whose window is not complete after a write: int32[E].

    Args:
      layout: Layout of the state, with a bounded look-ahead.
      num_pending: int32[E], their number before the write.
      writes: The rows that are written.
    """
    window = layout.window
    assert window.after is not None
    if window.crosses_episodes or writes.flags is None:
        since = layout.length
    else:
        # A final row completes every window that reaches it, and so does a termination if no final
        # observation is read. Only rows after the newest of these are pending.
        completes = writes.is_written & ((writes.flags & window.completed_by) != 0)
        since = jnp.min(jnp.where(completes, writes.age, layout.length), axis=0)
    return jnp.minimum(jnp.minimum(since, num_pending + writes.num_rows), window.after)


def count_expired(state: ReplayState) -> jax.Array | None:
    """Count the oldest rows of each stream whose look-back is overwritten: int32[E], or None if the
    window has no bounded look-back."""
    layout, filled = state.layout, state.filled
    if not (before := layout.window.before):
        return None
    place = ring.arange(before)[:, None]
    position = layout.wrap(state.head - filled + place)
    # Rows from the next episode start on have their whole look-back.
    is_start = state.has(layout.row(layout.envs(state.counters.some), position), row_flags.FIRST)
    return jnp.min(
        jnp.where(is_start & (place < filled), place, jnp.minimum(before, filled)), axis=0
    )


class WriteEffect(NamedTuple):
    """Effect of one write on the set of sampleable rows: all that a sampler observes of it.

    Axes: E streams, all or those of `envs`; K rows that a stream may have got; W = look-ahead + K +
    look-back rows in the order of time. The W rows are those that may have been pending, those
    written, and the oldest ones, whose look-back may have been overwritten.

    A row becomes sampleable once, and stays so until it is overwritten or expires. A written row
    takes the place of an old one, which is gone.

    With a period, or across episodes, rows that are no candidates may be pending, too. A sampler
    that follows rows one by one must remember which of the written rows are candidates. If their
    flags were read here, XLA would copy all flags before the next write.

    Attributes:
      layout: Sizes of the buffer.
      envs: int32[E], the streams; one from `layout.num_envs` on stands for none. None: all.
      row: int32[W, E], the rows; the capacity where there is none.
      became_sampleable: bool[W, E], True where the window became complete.
      is_written: bool[K, E], True where a row was written.
      is_candidate: bool[K, E], True for written rows that are sampleable once their window is
        complete.
      is_gone: bool[W, E], True for rows that were overwritten or expired.
      age: int32[W, E], number of rows of the stream that were written after the row.
      start: int32[] or int32[E], position of `row[0]` in the ring. If it is a scalar, `row` is the
        same range of every stream.
    """

    layout: Layout
    envs: jax.Array | None
    row: jax.Array
    became_sampleable: jax.Array
    is_written: jax.Array
    is_candidate: jax.Array
    is_gone: jax.Array
    age: jax.Array
    start: jax.Array

    @property
    def written(self) -> jax.Array:
        """Rows that were written: int32[K, E], the capacity where there is none."""
        first = self.layout.window.after or 0
        return self.row[first : first + len(self.is_written)]


def effect_of(after: ReplayState, writes: Writes) -> WriteEffect | None:
    """Return the effect of a write, from the state after it, or None if the window is unbounded."""
    layout, window, envs = after.layout, after.layout.window, after.layout.envs(after.counters.some)
    if window.before is None or window.after is None:
        return None
    num_pending = after.counters.num_pending
    position = lambda start, size: layout.wrap(start + ring.arange(size)[:, None])
    range_of = lambda start, size: layout.row(
        envs, jnp.broadcast_to(position(start, size), (size, *envs.shape))
    )

    # Rows that were pending before, the oldest first.
    num_rows = writes.num_rows[0] if layout.lockstep else writes.num_rows
    start = layout.wrap(after.head - num_rows - window.after)
    waited = window.after - 1 - ring.arange(window.after)[:, None]  # ages before the write
    waiting = range_of(start, window.after)
    is_waiting = waited < writes.num_waiting
    age = waited + writes.num_rows

    # Rows that were written.
    is_candidate = writes.is_written
    if writes.flags is not None:
        is_candidate = is_candidate & ((writes.flags & window.no_candidate) == 0)

    # The oldest rows, whose look-back may have been overwritten.
    oldest = range_of(after.head, window.before)  # of a full ring
    nth = ring.arange(window.before)[:, None]
    num_expired = after.counters.num_expired if window.before else 0
    is_expired = (nth < num_expired) & (after.filled == layout.length)
    none = lambda rows: jnp.zeros_like(rows, bool)
    join = lambda *parts: jnp.concatenate([part for part in parts if part.shape[0]])
    return WriteEffect(
        layout=layout,
        envs=after.counters.some,
        row=join(jnp.where(is_waiting, waiting, layout.capacity), writes.row, oldest),
        is_written=writes.is_written,
        is_candidate=is_candidate,
        became_sampleable=join(
            is_waiting & (age >= num_pending),
            is_candidate & (writes.age >= num_pending),
            none(oldest),
        ),
        is_gone=join(none(waiting), writes.is_written, is_expired),
        age=join(age, writes.age, layout.length - 1 - jnp.broadcast_to(nth, oldest.shape)),
        start=start,
    )

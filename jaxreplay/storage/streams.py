"""Streams: each env has a ring of rows of its own, its stream. All streams share an array per leaf.

Leaves are `[num_envs * length, ...]`, env-major: row = env * length + position. So a stream's
neighbours in time are neighbours in memory. Each write is one masked scatter per leaf; a row that
is not written points past the end. (A `lax.cond` around the write would become a select over the
whole buffer under `vmap`. A strided `dynamic_update_slice` took 13 us where the scatter takes 2.)

For each row, streams keep a step's leaves, flags (`row_flags.py`) and a candidate number, from
which `sampleable.py` counts and finds rows without a list of them. Flags and numbers are separate
arrays, since samples read only the flags: at one byte a row, those of a million rows stay in a
core's cache.

Glossary, for the whole library. E is the number of envs, N the number of rows of all streams:

    row               place of a step in the arrays: int32, in [0, N)
    position          place of a row in the ring of its stream: int32, in [0, length)
    head              position of the next write
    lap               number of times that a stream's head went round: uint32
    number            number of rows that were written to the stream before a row, overwritten
                      ones too: uint32
    age               number of rows that were written to the stream after a row: int32, 0 for the
                      newest
    candidate         row that may be sampled once its window is known: a transition, and no final
                      row
    candidate number  number of candidates that were written to the stream before a row: uint32
    final row         row with an episode's final observation; it is no transition
    window            rows around a candidate that its view reads
    sampleable        candidate whose window is known and still stored
    pending           newest rows, whose window is not known yet
    expired           oldest rows, of whose window a part is overwritten
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.struct import Node, static_field
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.search import split_by
from jaxreplay.types import Index, Step


class Written(NamedTuple):
    """Rows that one call wrote, in the order of time: at most K rows in each of E streams."""

    row: jax.Array  # int32[K, E]; capacity where nothing is written
    is_written: jax.Array  # bool[K, E]
    flags: jax.Array | None  # uint8[K, E]; None for plain items
    age: jax.Array  # int32[K, E]: rows of its stream written after it
    num_rows: jax.Array  # int32[E]: rows written in each stream
    candidate_number: jax.Array | None = None  # uint32[K, E]; None for plain items

    def of_newest(self, values: jax.Array, before: jax.Array) -> jax.Array:
        """Return the value of each stream's newest row after the write: [E].

        Args:
          values: [K, E], of the written rows.
          before: [E], of the newest rows before the write; kept if a stream got no row.
        """
        newest = jnp.where(self.is_written & (self.age == 0), values, 0).sum(
            axis=0, dtype=before.dtype
        )
        return jnp.where(self.num_rows > 0, newest, before)


class Counters(NamedTuple):
    """Counters of each stream; None for those that are not in `layout.counter_names`.

    The first three are equal for all streams if these always step together. They are stored for
    each stream all the same: a GPU counts a step in one kernel if all numbers are [E].
    """

    position: jax.Array  # int32[E], in [0, length): position of the next write
    filled: jax.Array  # int32[E], in [0, length]: number of rows that are stored
    lap: jax.Array  # uint32[E]: number of times that the head went round
    last_flags: jax.Array | None = None  # uint8[E]: flags of the newest row; None for plain items
    # uint32[E], modulo 2^32: number of candidates that were ever written, which is the candidate
    # number of the next row; None for plain items
    num_candidates: jax.Array | None = None
    # int32[E], in [0, period): number of transitions since the newest candidate, itself included,
    # modulo the period; None if every transition is a candidate
    phase: jax.Array | None = None
    # int32[E]: number of newest rows whose window is not complete yet; None if the episode table
    # has it
    num_pending: jax.Array | None = None
    # int32[E]: number of oldest rows whose look-back is overwritten; None without a bounded one
    num_expired: jax.Array | None = None


# of counters that are not int32
_DTYPES = {"lap": jnp.uint32, "last_flags": jnp.uint8, "num_candidates": jnp.uint32}


class Streams(Node):
    """Rows and counters of E streams, N = num_envs * length rows in all. A write donates them."""

    # stored leaves [N, ...]: of a Step, without done flags, which are in `flags`; or of an item
    steps: PyTree
    flags: jax.Array | None  # uint8[N]: bits of `row_flags`; None for plain items
    # uint32[N], modulo 2^32: candidates of the stream before each row; None for plain items
    candidate_number: jax.Array | None
    # uint32[C, E]: the counters in `layout.counter_names`, in one array, since each array of a
    # state takes 2 us of a call; on a GPU C arrays [E], which one kernel counts
    stored_counters: jax.Array | tuple[jax.Array, ...]
    layout: Layout = static_field()

    @classmethod
    def empty(cls, layout: Layout, example: PyTree) -> "Streams":
        """Return streams without rows.

        Args:
          layout: Layout of the streams.
          example: Shapes and dtypes of one env's step, or of one item.
        """
        stored = example if layout.autoreset is None else _stored(example)
        has_flags = layout.autoreset is not None

        capacity = layout.capacity
        empty = cls(
            steps=jax.tree.map(
                lambda leaf: stored_arrays.zeros(capacity, leaf, layout.traits.has_tiles), stored
            ),
            flags=jnp.zeros((capacity,), jnp.uint8) if has_flags else None,
            candidate_number=jnp.zeros((capacity,), jnp.uint32) if has_flags else None,
            stored_counters=jnp.zeros((len(layout.counter_names), layout.num_envs), jnp.uint32),
            layout=layout,
        )
        # As if a final row had been written: the first row opens an episode.
        return empty.with_counters(last_flags=row_flags.FINAL)

    @property
    def counters(self) -> Counters:
        """Counters of all streams."""
        stored, found = self.stored_counters, {}
        for nth, name in enumerate(self.layout.counter_names):
            is_packed = not isinstance(stored, tuple)
            row = jax.lax.index_in_dim(stored, nth, -2, False) if is_packed else stored[nth]
            found[name] = row.astype(_DTYPES.get(name, jnp.int32))
        return Counters(**found)

    @property
    def head(self) -> jax.Array:
        """Position of the next write: int32[E], or int32[] if all streams step together."""
        return self.counters.position[self.layout.streams_apart]

    @property
    def filled(self) -> jax.Array:
        """Number of rows that are stored: int32[E] or int32[], as `head`."""
        return self.counters.filled[self.layout.streams_apart]

    @property
    def lap(self) -> jax.Array:
        """Number of times that the head went round: uint32[E] or uint32[], as `head`."""
        return self.counters.lap[self.layout.streams_apart]

    @property
    def next_number(self) -> jax.Array:
        """Number of each stream's next row, modulo 2^32: uint32[E]. A row's position is its number
        modulo the length."""
        counters = self.counters
        return self.layout.number(counters.lap, counters.position)

    @property
    def next_candidate_number(self) -> jax.Array:
        """Candidate number of the next candidate that is written to each stream: uint32[E]. Every
        item is a candidate."""
        number = self.counters.num_candidates
        return self.next_number if number is None else number

    def with_counters(self, **new: Any) -> "Streams":
        """Replace counters, each by an array [E] or one value for all streams.

        None keeps a counter. Values of counters outside of `layout.counter_names` are ignored.
        """
        given = {name: value for name, value in new.items() if value is not None}
        counters, shape = self.counters._replace(**given), (self.layout.num_envs,)
        rows = tuple(
            jnp.broadcast_to(
                jnp.asarray(getattr(counters, name), _DTYPES.get(name, jnp.int32)), shape
            )
            for name in self.layout.counter_names
        )
        if not self.layout.traits.in_line:
            rows = jnp.stack([row.astype(jnp.uint32) for row in rows])
        return self.replace(stored_counters=rows)

    def clear(self) -> "Streams":
        """Forget every row. The stored steps stay as they are; indices of earlier samples become
        stale.

        If the newest row is done and its final row is not written yet (`autoreset="next_step"`),
        the next row is that final row. Otherwise it would count as a transition into the next
        episode.
        """
        # Add two laps: rows from the head on count as written in the lap before the head's, and no
        # earlier index has that lap.
        counters = self.counters
        return self.with_counters(
            position=0,
            filled=0,
            lap=counters.lap + jnp.uint32(2),
            last_flags=None
            if counters.last_flags is None
            else row_flags.after_clear(self.layout.autoreset, counters.last_flags),
            phase=0,
            num_pending=0,
            num_expired=0,
        )

    def advance(self, steps: PyTree, mask: jax.Array | None) -> tuple["Streams", Written]:
        """Count a block of steps, whose rows `write` then writes.

        Args:
          steps: Leaves [T, num_envs, ...]. T * `rows_per_step` must not exceed the length.
          mask: bool[T, num_envs], False where an env took no step; or None if all envs took all.

        Returns:
          The streams with new counters, and the rows to be written.
        """
        layout, state, before = self.layout, self, self.counters
        num_steps = jax.tree.leaves(steps)[0].shape[0]
        mask = jnp.ones((num_steps, layout.num_envs), bool) if mask is None else mask
        flags, is_written = None, mask
        if layout.autoreset is not None:
            assert before.last_flags is not None
            flags, is_written = row_flags.rows_of(
                layout.autoreset, steps.terminated, steps.truncated, mask, before.last_flags
            )
            if before.phase is not None:
                state, flags = self._skipped(before.phase, flags, is_written)
        if layout.lockstep:  # the positions are known without looking at the block
            nth = jnp.broadcast_to(ring.arange(num_steps)[:, None], is_written.shape)
            num_rows = jnp.full((layout.num_envs,), num_steps, jnp.int32)
        else:
            nth = jnp.cumsum(is_written, axis=0, dtype=jnp.int32) - 1
            num_rows = nth[-1] + 1
        age = num_rows - 1 - nth
        end = before.position + num_rows
        new = state.with_counters(
            position=ring.wrap(end, layout.length),
            filled=jnp.minimum(before.filled + num_rows, layout.length),
            lap=before.lap + (end >= layout.length).astype(jnp.uint32),
        )
        # Rows, and candidate numbers below, are counted back from the new counts. If they were
        # counted forward from the old ones, XLA would keep a copy of these for later kernels.
        row = layout.row(layout.envs(), layout.wrap(new.counters.position - 1 - age))
        written = Written(
            jnp.where(is_written, row, layout.capacity), is_written, flags, age, num_rows
        )
        if flags is not None:
            is_candidate = is_written & ((flags & row_flags.NO_CANDIDATE) == 0)
            count = self.next_candidate_number + is_candidate.sum(axis=0, dtype=jnp.uint32)
            assert before.last_flags is not None
            new = new.with_counters(
                last_flags=written.of_newest(flags, before.last_flags), num_candidates=count
            )
            written = written._replace(candidate_number=count - from_each_on(is_candidate))
        return new, written

    def _skipped(
        self, phase: jax.Array, flags: jax.Array, is_written: jax.Array
    ) -> tuple["Streams", jax.Array]:
        """Mark the transitions between candidates. Return the streams with the new phase, and the
        flags uint8[K, E]."""
        window = self.layout.window
        is_transition = is_written & ((flags & row_flags.FINAL) == 0)
        # transitions of this block up to each row, itself included
        through = jnp.cumsum(is_transition, axis=0, dtype=jnp.int32)
        before = through - is_transition
        starts = is_written & ((flags & row_flags.FIRST) != 0) & (not window.crosses_episodes)
        # Count from the start of the row's episode if that is in the block, else from the phase
        # before the block.
        latest_start = jax.lax.cummax(jnp.where(starts, before, -1), axis=0)
        since = jnp.where(latest_start >= 0, before - latest_start, before + phase)
        _, place = ring.split(since, window.period)
        _, phase = ring.split((since + is_transition)[-1], window.period)
        return self.with_counters(phase=phase), jnp.where(
            is_transition & (place != 0), flags | row_flags.SKIPPED, flags
        )

    def write(self, steps: PyTree, written: Written) -> "Streams":
        """Write the rows of a block of steps, in the streams that `advance` returned."""

        def write(stored, new, row):
            return stored_arrays.tree_map(
                lambda leaf, values: stored_arrays.write(leaf, row, values), stored, new
            )

        if self.flags is None:
            return self.replace(steps=write(self.steps, steps, written.row))
        new = _stored(steps)
        if self.layout.rows_per_step == 2:  # of a final row, only the observation is read
            pairs = written.row.reshape(-1, 2, self.layout.num_envs)
            rest = write(self.steps.replace(obs=()), new.replace(obs=()), pairs[:, 0])
            stored = rest.replace(obs=write(self.steps.obs, _with_final_obs(steps), written.row))
        else:
            stored = write(self.steps, new, written.row)
        return self.replace(
            steps=stored,
            flags=write(self.flags, written.flags, written.row),
            candidate_number=write(self.candidate_number, written.candidate_number, written.row),
        )

    def has(self, row: jax.Array, flag: int) -> jax.Array:
        """Return whether each row has a flag, or one of several: bool[...]. Items have no flags."""
        return (
            jnp.zeros(row.shape, bool) if self.flags is None else (_at(self.flags, row) & flag) != 0
        )

    def candidate_number_of(self, row: jax.Array) -> jax.Array:
        """Return the candidate number of each stored row, in `[0, capacity)`: uint32[...]."""
        if self.candidate_number is not None:
            return _at(self.candidate_number, row)
        _, position = self.layout.split(row)
        return self.layout.number(self.index(row).lap, position)

    def rows_before(self, row: jax.Array, most: int) -> jax.Array:
        """Count the rows before each row that belong to its episode, up to `most`: int32[...]. It
        is 0 for an episode's first row."""
        places = ring.arange(most).reshape((most,) + (1,) * row.ndim)
        goes_on = ~self.has(self.layout.ahead(row, -places), row_flags.FIRST)
        return jnp.cumprod(goes_on, axis=0, dtype=jnp.int32).sum(axis=0, dtype=jnp.int32)

    def age(self, row: jax.Array) -> jax.Array:
        """Count the rows of its stream that were written after each row: int32[...].

        It is 0 for the newest row, and at least `filled` for a row that is not written.
        """
        env, position = self.layout.split(row)
        return self.layout.wrap(of_stream(self.head, env) - 1 - position)

    def is_written(self, row: jax.Array) -> jax.Array:
        """Return whether each row, in `[0, capacity)`, holds a step: bool[...]."""
        env, _ = self.layout.split(row)
        return self.age(row) < of_stream(self.filled, env)

    def index(self, row: jax.Array) -> Index:
        """Return the index of each row: row and lap."""
        env, position = self.layout.split(row)
        # Such a row was written before the head last went round.
        ahead = position >= of_stream(self.head, env)
        return Index(row=row, lap=of_stream(self.lap, env) - ahead.astype(jnp.uint32))


def of_stream(per_stream: jax.Array, env: jax.Array) -> jax.Array:
    """Return the value of each stream `env`. A scalar is the value of all streams."""
    return per_stream if per_stream.ndim == 0 else _at(per_stream, env)


def from_each_on(is_one: jax.Array) -> jax.Array:
    """Count the True values from each row on, itself included: uint32[K, E]."""
    return jnp.flip(jnp.cumsum(jnp.flip(is_one, axis=0), axis=0, dtype=jnp.uint32), axis=0)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return values.at[index].get(mode="promise_in_bounds")


def _stored(step: Step) -> Step:
    """Return a step as it is stored: without done flags, which are stored in `flags`, and without
    its final observation, which is stored in the `obs` of a final row."""
    return step.replace(terminated=None, truncated=None, final_obs=None)


def _with_final_obs(steps: Step) -> Any:
    """Return the observations of a block, each followed by the final one of its step: leaves
    [2 T, E, ...]."""

    def joined(obs: jax.Array, final_obs: jax.Array) -> jax.Array:
        return jnp.stack([obs, final_obs], axis=1).reshape((-1, *obs.shape[1:]))

    return jax.tree.map(joined, steps.obs, steps.final_obs)


def written_row(streams: Streams, high: jax.Array, low: jax.Array) -> jax.Array:
    """Sample a row uniformly from all that are written: int32[...]. If none is, return any row.

    Args:
      streams: The streams to sample from.
      high: uint32[...], random bits.
      low: uint32[...], more random bits.
    """
    layout, filled = streams.layout, streams.filled
    if layout.lockstep:  # all streams hold the same number of rows: no search for the stream
        age, env = ring.split(random.below(high, low, filled * layout.num_envs), layout.num_envs)
    else:
        env, age = split_by(
            filled, random.below(high, low, filled.sum(dtype=jnp.int32)), layout.traits
        )
    return layout.row(env, layout.wrap(of_stream(streams.head, env) - 1 - age))

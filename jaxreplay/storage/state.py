"""State of a buffer: rows, counters of each stream, and the sampler's state.

Each env has a ring of rows of its own, its stream. All streams share an array per leaf, `[num_envs
* length, ...]`, env-major: row = env * length + position. So a stream's neighbours in time are
neighbours in memory.

For each row the state has a step's leaves, flags (`row_flags.py`) and a candidate number, from
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

import operator
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.hints import no_state_attribute
from jaxreplay._util.names import has_shapes
from jaxreplay._util.struct import Node, static_field
from jaxreplay.storage import ring, row_flags, stored_arrays
from jaxreplay.storage.layout import NUM_PARTS, Layout
from jaxreplay.storage.search import split_by
from jaxreplay.types import Index, Step


class EpisodeTable(Node):
    """Arrays with N rows that find the ends of episodes (`episodes.py`)."""

    ordinal: jax.Array  # int32[N], in [0, length): each row's episode
    # int32[N]: env * length + ordinal -> position of that episode's last row
    end_position: jax.Array
    start_position: jax.Array  # int32[N]: the same for that episode's first row


class Rows(Node):
    """Arrays with N rows. A write changes them in place."""

    # stored leaves [N, ...]: of a Step, without done flags, which are in `flags`; or of an item
    steps: PyTree
    flags: Any  # uint8[N]: bits of `row_flags`; None for plain items
    # uint32[N], modulo 2^32: candidates of the stream before each row; None for plain items
    candidate_number: Any
    table: Any  # `EpisodeTable`, or None without `layout.has_table`


class _Counter:
    """A counter of each stream, [E]; None if it is not in `layout.counter_names`."""

    def __init__(self, dtype: Any = jnp.int32):
        self.dtype = dtype

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, counters: Any, owner: type) -> Any:
        if counters is None:
            return self
        if self.name not in counters.layout.counter_names:
            return None
        nth, stored = counters.layout.counter_names.index(self.name), counters.stored
        is_packed = not isinstance(stored, tuple)
        row = jax.lax.index_in_dim(stored, nth, -2, False) if is_packed else stored[nth]
        return row.astype(self.dtype)


class Counters(Node):
    """Counters of each stream. Those that are not in `layout.counter_names` are None.

    The first three are equal for all streams if these always step together. They are stored for
    each stream all the same: a GPU counts a step in one kernel if all numbers are [E].
    """

    # uint32[C, E]: the counters in `layout.counter_names`, in one array, since each array of a
    # state takes 2 us of a call; on a GPU C arrays [E], which one kernel counts
    stored: jax.Array | tuple[jax.Array, ...]
    layout: Layout = static_field()
    # int32[e]: the streams that the counters are of, while some alone are written; None for all
    some: jax.Array | None = None

    position = _Counter()  # in [0, length): position of the next write
    filled = _Counter()  # in [0, length]: number of rows that are stored
    lap = _Counter(jnp.uint32)  # number of times that the head went round
    last_flags = _Counter(jnp.uint8)  # flags of the newest row; None for plain items
    # modulo 2^32: number of candidates that were ever written, which is the candidate number of the
    # next row; None for plain items
    num_candidates = _Counter(jnp.uint32)
    # in [0, period): number of transitions since the newest candidate, itself included, modulo the
    # period; None if every transition is a candidate
    phase = _Counter()
    # number of newest rows whose window is not complete yet; None if the episode table has it
    num_pending = _Counter()
    # number of oldest rows whose look-back is overwritten; None without a bounded one
    num_expired = _Counter()
    ordinal = _Counter()  # in [0, length): episode of the next row; None without an episode table
    is_open = _Counter(jnp.bool_)  # the newest row's episode has not ended; None likewise
    # hash of all writes to stored rows of each part of the ring, 0 before the first, and the number
    # of those that were ignored; None without `layout.allow_write`
    vars().update({f"write_stamp_{part}": _Counter(jnp.uint32) for part in range(NUM_PARTS)})
    num_ignored_writes = _Counter(jnp.uint32)

    @classmethod
    def zeros(cls, layout: Layout) -> "Counters":
        """Return counters of a layout, all 0."""
        shape = len(layout.counter_names), layout.num_envs
        return cls(jnp.zeros(shape, jnp.uint32), layout).set()

    def set(self, **new: Any) -> "Counters":
        """Replace counters, each by an array [E] or one value for all streams.

        None keeps a counter. Values of counters outside of `layout.counter_names` are ignored.
        """
        shape, rows = self.layout.envs(self.some).shape, []
        for name in self.layout.counter_names:
            value = getattr(self, name) if new.get(name) is None else new[name]
            rows.append(jnp.broadcast_to(jnp.asarray(value, vars(Counters)[name].dtype), shape))
        if self.layout.traits.in_line:
            return self.replace(stored=tuple(rows))
        return self.replace(stored=jnp.stack([row.astype(jnp.uint32) for row in rows]))

    def of(self, envs: jax.Array) -> "Counters":
        """Return the counters of some streams.

        Args:
          envs: int32[e]. A stream from E on is one that has no rows.
        """
        read = lambda leaf: leaf.at[..., envs].get(mode="fill", fill_value=0)
        return self.replace(stored=jax.tree.map(read, self.stored), some=envs)

    def put(self, own: "Counters") -> "Counters":
        """Return the counters with those that `of` returned, after they were changed."""
        write = lambda leaf, new: leaf.at[..., own.some].set(new, mode="drop", unique_indices=True)
        return self.replace(stored=jax.tree.map(write, self.stored, own.stored))


class ReplayState(Node):
    """State of a buffer: a pytree of arrays, made by `buffer.init`.

    Methods that return a new state reuse the old one's memory: jit them with `donate_argnums=0`,
    and use the returned state instead. E is the number of envs, N the number of rows.

    Attributes:
      rows: The stored steps, and what is known of each: arrays [N, ...].
      counters: Counters of each env's ring of rows: arrays [E].
      sampler: The sampler's own state: any pytree.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(capacity=1000, num_envs=4, batch_size=8, autoreset="next_step")
      >>> zero, false = jnp.float32(0), jnp.bool_(False)
      >>> example = jr.Step(
      ...     obs=jnp.zeros(3), action=zero, reward=zero, terminated=false, truncated=false
      ... )
      >>> state = buffer.init(example)
      >>> state
      ReplayState(4 envs x 250 rows, obs f32[3], 25.1 kB)
      >>> state.layout.capacity
      1000
    """

    rows: Rows
    counters: Counters
    sampler: Any

    if not TYPE_CHECKING:  # a type checker knows the fields
        __getattr__ = no_state_attribute

    @classmethod
    def empty(cls, layout: Layout, example: PyTree, sampler: PyTree) -> "ReplayState":
        """Return a state without rows.

        Args:
          layout: Layout of the state.
          example: Shapes and dtypes of one env's step, or of one item.
          sampler: The sampler's state.
        """
        capacity, has_flags = layout.capacity, layout.autoreset is not None
        stored = example
        if has_flags:
            agents = jax.ShapeDtypeStruct(example.terminated.shape, jnp.uint8)
            stored = stored_step(example, agents if agents.shape else None)
        rows = Rows(
            steps=jax.tree.map(
                lambda leaf: stored_arrays.zeros(capacity, leaf, layout.traits.has_tiles), stored
            ),
            flags=jnp.zeros((capacity,), jnp.uint8) if has_flags else None,
            candidate_number=jnp.zeros((capacity,), jnp.uint32) if has_flags else None,
            table=EpisodeTable(*(jnp.zeros((capacity,), jnp.int32) for _ in range(3)))
            if layout.has_table
            else None,
        )
        # As if a final row had been written: the first row opens an episode.
        counters = Counters.zeros(layout).set(last_flags=row_flags.FINAL)
        return cls(rows, counters, sampler)

    layout: ClassVar[Any] = property(
        operator.attrgetter("counters.layout"), doc="Layout that the state was made for; static."
    )

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
        return self.layout.number(self.counters.lap, self.counters.position)

    @property
    def next_candidate_number(self) -> jax.Array:
        """Candidate number of the next candidate that is written to each stream: uint32[E]. Every
        item is a candidate."""
        number = self.counters.num_candidates
        return self.next_number if number is None else number

    def clear(self) -> "ReplayState":
        """Forget every row. The stored steps stay as they are; indices of earlier samples become
        stale, and unfinished episodes do not continue.

        If the newest row is done and its final row is not written yet (`autoreset="next_step"`),
        the next row is that final row. Otherwise it would count as a transition into the next
        episode.

        Returns:
          The state. Its sampler still has to forget the rows: use `buffer.clear`.
        """
        # Add two laps: rows from the head on count as written in the lap before the head's, and no
        # earlier index has that lap.
        counters, last_flags = self.counters, self.counters.last_flags
        if last_flags is not None:
            last_flags = row_flags.after_clear(self.layout.autoreset, last_flags)
        names = "position", "filled", "phase", "num_pending", "num_expired", "ordinal", "is_open"
        lap = counters.lap + jnp.uint32(2)
        new = counters.set(lap=lap, last_flags=last_flags, **dict.fromkeys(names, 0))
        return self.replace(counters=new)

    def has(self, row: jax.Array, flag: int) -> jax.Array:
        """Return whether each row has a flag: bool[...]. Items have no flags.

        Args:
          row: int32[...], in [0, N).
          flag: Bit of `jaxreplay.storage.row_flags`. If several are joined by `|`, one is enough.
        """
        flags = self.rows.flags
        return jnp.zeros(row.shape, bool) if flags is None else (at(flags, row) & flag) != 0

    def candidate_number_of(self, row: jax.Array) -> jax.Array:
        """Return the candidate number of each stored row: uint32[...].

        Args:
          row: int32[...], in [0, N).
        """
        if self.rows.candidate_number is not None:
            return at(self.rows.candidate_number, row)
        _, position = self.layout.split(row)
        return self.layout.number(self.index(row).lap, position)

    def rows_before(self, row: jax.Array, most: int) -> jax.Array:
        """Return the number of rows before each row in its episode: int32[...].

        It is 0 for an episode's first row.

        Args:
          row: int32[...], in [0, N).
          most: Number of rows that are examined.
        """
        places = ring.arange(most).reshape((most,) + (1,) * row.ndim)
        continues = ~self.has(self.layout.ahead(row, -places), row_flags.FIRST)
        return jnp.cumprod(continues, axis=0, dtype=jnp.int32).sum(axis=0, dtype=jnp.int32)

    def age(self, row: jax.Array) -> jax.Array:
        """Return the number of rows of its stream that were written after each row: int32[...].

        It is 0 for the newest row, and at least `filled` for a row that is not written.

        Args:
          row: int32[...], in [0, N).
        """
        env, position = self.layout.split(row)
        return self.layout.wrap(of_stream(self.head, env) - 1 - position)

    def is_written(self, row: jax.Array) -> jax.Array:
        """Return whether each row holds a step: bool[...].

        Args:
          row: int32[...], in [0, N).
        """
        env, _ = self.layout.split(row)
        return self.age(row) < of_stream(self.filled, env)

    def index(self, row: jax.Array, is_valid: jax.Array | bool = True) -> Index:
        """Return the index of each row, as `batch.index` of a sample.

        Args:
          row: int32[...], in [0, N).
          is_valid: bool[...]; where it is False, the index gets a lap that no row has, so that
            later updates by it are ignored. Default: True.
        """
        env, position = self.layout.split(row)
        # Such a row was written before the head last went round.
        ahead = position >= of_stream(self.head, env)
        lap = of_stream(self.lap, env) - ahead.astype(jnp.uint32)
        if is_valid is not True:
            lap = jnp.where(is_valid, lap, lap ^ jnp.uint32(2**31))
        return Index(row=row, lap=lap)

    def random_row(self, high: jax.Array, low: jax.Array) -> jax.Array:
        """Return a row that is chosen uniformly from all written ones: int32[...].

        If none is written, return any row.

        Args:
          high: uint32[...], random bits.
          low: uint32[...], more random bits.
        """
        layout, filled = self.layout, self.filled
        if layout.lockstep:  # all streams hold the same number of rows: no search for the stream
            age, env = ring.divide(
                random.below(high, low, filled * layout.num_envs), layout.num_envs
            )
        else:
            env, age = split_by(
                filled, random.below(high, low, filled.sum(dtype=jnp.int32)), layout.traits
            )
        return layout.row(env, layout.wrap(of_stream(self.head, env) - 1 - age))

    def __repr__(self) -> str:
        """Show sizes, such as `ReplayState(4 envs x 250 rows, obs f32[3], 16 kB)`. For states that
        are stacked by `vmap`, their number comes first."""
        if not has_shapes(self):
            return super().__repr__()
        layout, steps = self.layout, self.rows.steps
        population = jax.tree.leaves(self.counters)[0].shape[: -1 if layout.traits.in_line else -2]
        rows = ("item", steps) if layout.autoreset is None else ("obs", steps.obs)
        sizes = layout.num_envs, layout.length
        return stored_arrays.shown(self, population, sizes, *rows)


def of_stream(per_stream: jax.Array, env: jax.Array) -> jax.Array:
    """Return the value of each stream `env`. A scalar is the value of all streams."""
    return per_stream if per_stream.ndim == 0 else at(per_stream, env)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return values at indices, which must be in bounds."""
    return values.at[index].get(mode="promise_in_bounds")


def stored_step(step: Step, agents: Any = None) -> Step:
    """Return a step as it is stored: without done flags, which are stored in `flags`, and without
    its final observation, which is stored in the `obs` of a final row. `terminated` has the bytes
    of several agents."""
    return step.replace(terminated=agents, truncated=None, final_obs=None)

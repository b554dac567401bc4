"""The buffers of flashbax, over this library's storage.

`import jaxreplay.compat.flashbax as fbx` in place of `import flashbax as fbx` is the only line that
changes. Arguments, methods and fields of samples are those of flashbax 0.1.3. Axes: E is
`add_batch_size`, T time, L `sample_sequence_length`, B batch.

>>> import jax, jax.numpy as jnp
>>> import jaxreplay.compat.flashbax as fbx
>>> buffer = fbx.make_flat_buffer(max_length=8, min_length=1, sample_batch_size=2)
>>> state = buffer.init({"obs": jnp.float32(0)})
>>> for obs in (3.0, 4.0):
...     state = buffer.add(state, {"obs": jnp.float32(obs)})
>>> pairs = buffer.sample(state, jax.random.key(0)).experience
>>> pairs.first["obs"].tolist(), pairs.second["obs"].tolist()
([3.0, 3.0], [4.0, 4.0])
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.names import kind_of
from jaxreplay._util.struct import Node, Static
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.step_checks import check_block
from jaxreplay.compat._stacked import for_each, num_written
from jaxreplay.samplers import Prioritized, Uniform
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.layout import Window
from jaxreplay.storage.sampleable import ReplayState
from jaxreplay.storage.streams import Streams
from jaxreplay.views import Item, RowReader, View

__all__ = [
    "ExperiencePair",
    "Mixer",
    "PrioritisedTrajectoryBuffer",
    "PrioritisedTrajectoryBufferSample",
    "PrioritisedTrajectoryBufferState",
    "PrioritisedTransitionSample",
    "TrajectoryBuffer",
    "TrajectoryBufferSample",
    "TrajectoryBufferState",
    "TrajectoryQueue",
    "TrajectoryQueueSample",
    "TrajectoryQueueState",
    "TransitionSample",
    "make_flat_buffer",
    "make_item_buffer",
    "make_mixer",
    "make_prioritised_flat_buffer",
    "make_prioritised_item_buffer",
    "make_prioritised_trajectory_buffer",
    "make_trajectory_buffer",
    "make_trajectory_queue",
]


class TrajectoryBufferState(Node):
    """State of a buffer without priorities.

    Attributes:
      rows: The stored rows, as jaxreplay keeps them.
    """

    rows: ReplayState

    @property
    def experience(self) -> PyTree:
        """Stored rows: pytree with leaves [E, max_length_time_axis, ...]; 0 where none is written.

        Outside of `jit` it is a copy of all rows.
        """
        return for_each(_stored, self)

    @property
    def current_index(self) -> jax.Array:
        """Time index of the next write: int32[]."""
        return self.rows.streams.counters.position[..., 0]

    @property
    def is_full(self) -> jax.Array:
        """True if every time index is written: bool[]."""
        return num_written(self) == self.rows.streams.layout.length


class PrioritisedTrajectoryBufferState(TrajectoryBufferState):
    """State of a buffer with priorities. `rows.sampler` has these."""


class TrajectoryBufferSample(Node):
    """Sample of a buffer without priorities.

    Attributes:
      experience: Pytree with leaves [B, L, ...]; [B, ...] for item buffers; an `ExperiencePair` for
        flat buffers.
    """

    experience: PyTree


class PrioritisedTrajectoryBufferSample(Node):
    """Sample of a buffer with priorities.

    Attributes:
      experience: As for `TrajectoryBufferSample`.
      indices: int32[B]. Numbers of the sampled items, for `set_priorities`.
      probabilities: float32[B]. Probability of each item; 0 if the buffer cannot be sampled.
    """

    experience: PyTree
    indices: jax.Array
    probabilities: jax.Array


TransitionSample = TrajectoryBufferSample
PrioritisedTransitionSample = PrioritisedTrajectoryBufferSample


class ExperiencePair(NamedTuple):
    """Two rows that follow each other: pytrees with leaves [B, ...].

    `second` may belong to the next episode.
    """

    first: PyTree
    second: PyTree


class TrajectoryQueueState(Node):
    """State of a queue.

    Attributes:
      rows: The stored rows, as jaxreplay keeps them.
      num_unread: int32[]. Number of time steps that are not sampled yet.
    """

    rows: ReplayState
    num_unread: jax.Array

    @property
    def experience(self) -> PyTree:
        """Stored rows: pytree with leaves [E, max_length_time_axis, ...]."""
        return for_each(_stored, self)

    @property
    def write_index(self) -> jax.Array:
        """Time index of the next write: int32[]."""
        return self.rows.streams.counters.position[..., 0]

    @property
    def read_index(self) -> jax.Array:
        """Time index of the next step that is sampled: int32[]."""
        length = self.rows.streams.layout.length
        return ring.wrap(self.write_index - self.num_unread, length)

    @property
    def is_full(self) -> jax.Array:
        """True if no step fits before a sample: bool[]."""
        return self.num_unread == self.rows.streams.layout.length


TrajectoryQueueSample = TrajectoryBufferSample


@dataclasses.dataclass(frozen=True)
class TrajectoryBuffer:
    """Pure functions of a buffer without priorities.

    Attributes:
      init: Function from one time step, leaves [...], to a state.
      add: Function from a state and new steps to a state. Jit it with `donate_argnums=0`.
      sample: Function from a state and a random key to a sample.
      can_sample: Function from a state to bool[]: whether the minimum length is stored. Before
        that, samples mean nothing.
    """

    init: Callable[[PyTree], Any]
    add: Callable[[Any, PyTree], Any]
    sample: Callable[[Any, Key], Any]
    can_sample: Callable[[Any], jax.Array]

    def replace(self, **changes: Any) -> Any:
        """Return a buffer with other functions, such as `add=jax.jit(buffer.add)`.

        Args:
          changes: Functions by name.
        """
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class PrioritisedTrajectoryBuffer(TrajectoryBuffer):
    """Pure functions of a buffer with priorities.

    Attributes:
      set_priorities: Function from a state, `sample.indices` and new priorities float[B] to a
        state. Priorities that are NaN, infinite or negative are ignored. If an index occurs more
        than once, its largest priority counts.
    """

    set_priorities: Callable[[Any, jax.Array, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class TrajectoryQueue:
    """Pure functions of a queue, which hands out each time step once, in order.

    Attributes:
      init: Function from one time step, leaves [...], to a state.
      add: Function from a state and steps [E, T, ...] to a state. If there is no room, the oldest
        steps are lost.
      sample: Function from a state to a state and a sample with leaves [E, L, ...]. If fewer than L
        steps are unread, none is consumed, and the sample means nothing.
      can_sample: Function from a state to bool[]: whether L steps are unread.
      can_add: Function from a state to bool[]: whether `add_sequence_length` steps fit.
    """

    init: Callable[[PyTree], TrajectoryQueueState]
    add: Callable[[TrajectoryQueueState, PyTree], TrajectoryQueueState]
    sample: Callable[[TrajectoryQueueState], tuple[TrajectoryQueueState, TrajectoryQueueSample]]
    can_sample: Callable[[TrajectoryQueueState], jax.Array]
    can_add: Callable[[TrajectoryQueueState], jax.Array]

    def replace(self, **changes: Any) -> "TrajectoryQueue":
        """Return a queue with other functions.

        Args:
          changes: Functions by name.
        """
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Pure functions that sample several buffers at once.

    Attributes:
      sample: Function from a list of states and a random key to a sample: the parts of the buffers,
        in their order.
      can_sample: Function from a list of states to bool[]: whether each buffer can be sampled.
    """

    sample: Callable[[Sequence[Any], Key], Any]
    can_sample: Callable[[Sequence[Any]], jax.Array]


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
) -> TrajectoryBuffer:
    """Make a buffer of sequences, which are sampled uniformly. They may cross episodes.

    Args:
      add_batch_size: Number of envs E. `add` takes leaves [E, T, ...], with any T.
      sample_batch_size: Number of sequences B in a sample.
      sample_sequence_length: Number of time steps L of a sequence.
      period: Number of time steps between possible starts, counted from the oldest step.
      min_length_time_axis: Number of time steps from which on `can_sample` is True; at least L.
      max_size: Number of steps of all envs, in place of `max_length_time_axis`. Default: not given.
      max_length_time_axis: Number of time steps that are kept. Default: `max_size // E`.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_trajectory_buffer"
    length = _length(where, add_batch_size, max_size, max_length_time_axis)
    view = _Sequence(length=_checked(where, "sample_sequence_length", sample_sequence_length))
    return _functions(
        min_length=_least(where, length, min_length_time_axis, sample_sequence_length),
        storage=_storage(where, add_batch_size, length, sample_batch_size, view),
        period=_checked(where, "period", period),
    )


def make_prioritised_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    priority_exponent: float = 0.6,
    device: str | None = None,
) -> PrioritisedTrajectoryBuffer:
    """Make a buffer of sequences, which are sampled in proportion to priority ** exponent.

    Args:
      add_batch_size: Number of envs E. `add` takes leaves [E, T, ...], with any T.
      sample_batch_size: Number of sequences B in a sample.
      sample_sequence_length: Number of time steps L of a sequence.
      period: Number of time steps between possible starts, counted from the first step ever.
      min_length_time_axis: Number of time steps from which on `can_sample` is True; at least L.
      max_size: Number of steps of all envs, in place of `max_length_time_axis`. Default: not given.
      max_length_time_axis: Number of time steps that are kept, rounded down to a multiple of
        `period`. Default: `max_size // E`.
      priority_exponent: Exponent of priorities, in [0, 1]. Default: 0.6.
      device: Ignored: the layout is that of JAX's default device. Default: not given.

    Raises:
      ValueError: A size or the exponent is wrong.
    """
    del device
    where = "make_prioritised_trajectory_buffer"
    length = _length(where, add_batch_size, max_size, max_length_time_axis)
    length = length // _checked(where, "period", period) * period
    view = _Sequence(length=_checked(where, "sample_sequence_length", sample_sequence_length))
    return _functions(
        min_length=_least(where, length, min_length_time_axis, sample_sequence_length),
        storage=_storage(where, add_batch_size, length, sample_batch_size, view, priority_exponent),
        period=period,
    )


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
) -> TrajectoryBuffer:
    """Make a buffer of pairs of time steps that follow each other, which are sampled uniformly.

    Args:
      max_length: Number of steps of all envs that are kept, rounded down to a multiple of E.
      min_length: Number of steps from which on `can_sample` is True.
      sample_batch_size: Number of pairs B in a sample.
      add_sequences: Let `add` take leaves [E, T, ...] in place of [E, ...]. Default: False.
      add_batch_size: Number of envs E. Default: one env, and leaves without the axis E.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_flat_buffer"
    length, minimum = _flat_sizes(where, max_length, min_length, add_batch_size)
    return _functions(
        min_length=minimum,
        storage=_storage(where, add_batch_size or 1, length, sample_batch_size, _Pair()),
        has_envs=add_batch_size is not None,
        has_time=add_sequences,
    )


def make_prioritised_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float = 0.6,
    device: str | None = None,
) -> PrioritisedTrajectoryBuffer:
    """Make a buffer of pairs, which are sampled in proportion to priority ** exponent.

    Args:
      max_length: Number of steps of all envs that are kept, rounded down to a multiple of E.
      min_length: Number of steps from which on `can_sample` is True.
      sample_batch_size: Number of pairs B in a sample.
      add_sequences: Let `add` take leaves [E, T, ...] in place of [E, ...]. Default: False.
      add_batch_size: Number of envs E. Default: one env, and leaves without the axis E.
      priority_exponent: Exponent of priorities, in [0, 1]. Default: 0.6.
      device: Ignored: the layout is that of JAX's default device. Default: not given.

    Raises:
      ValueError: A size or the exponent is wrong.
    """
    del device
    where = "make_prioritised_flat_buffer"
    length, minimum = _flat_sizes(where, max_length, min_length, add_batch_size)
    return _functions(
        min_length=minimum,
        storage=_storage(
            where, add_batch_size or 1, length, sample_batch_size, _Pair(), priority_exponent
        ),
        has_envs=add_batch_size is not None,
        has_time=add_sequences,
    )


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
) -> TrajectoryBuffer:
    """Make a buffer of independent items, which are sampled uniformly.

    Args:
      max_length: Number of items that are kept.
      min_length: Number of items from which on `can_sample` is True.
      sample_batch_size: Number of items B in a sample.
      add_sequences: Let `add` take items with an axis of time. Default: False.
      add_batches: Let `add` take items with an axis of any number of envs, before that of time.
        Default: False.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_item_buffer"
    length = _checked(where, "max_length", max_length)
    return _functions(
        min_length=_least(where, length, min_length, 1),
        storage=_storage(where, 1, length, sample_batch_size, Item()),
        has_envs=add_batches,
        has_time=add_sequences,
        is_flat=True,
    )


def make_prioritised_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    priority_exponent: float = 0.6,
    device: str | None = None,
) -> PrioritisedTrajectoryBuffer:
    """Make a buffer of independent items, which are sampled in proportion to priority ** exponent.

    Args:
      max_length: Number of items that are kept.
      min_length: Number of items from which on `can_sample` is True.
      sample_batch_size: Number of items B in a sample.
      add_sequences: Let `add` take items with an axis of time. Default: False.
      add_batches: Let `add` take items with an axis of any number of envs, before that of time.
        Default: False.
      priority_exponent: Exponent of priorities, in [0, 1]. Default: 0.6.
      device: Ignored: the layout is that of JAX's default device. Default: not given.

    Raises:
      ValueError: A size or the exponent is wrong.
    """
    del device
    where = "make_prioritised_item_buffer"
    length = _checked(where, "max_length", max_length)
    return _functions(
        min_length=_least(where, length, min_length, 1),
        storage=_storage(where, 1, length, sample_batch_size, Item(), priority_exponent),
        has_envs=add_batches,
        has_time=add_sequences,
        is_flat=True,
    )


def make_trajectory_queue(
    max_length_time_axis: int,
    add_batch_size: int,
    add_sequence_length: int,
    sample_sequence_length: int,
    max_size: int | None = None,
) -> TrajectoryQueue:
    """Make a queue of time steps, which hands out each step once, in order.

    Args:
      max_length_time_axis: Number of time steps that the queue holds.
      add_batch_size: Number of envs E.
      add_sequence_length: Number of time steps of an `add`, for `can_add`.
      sample_sequence_length: Number of time steps L of a sample.
      max_size: Number of steps of all envs, in place of `max_length_time_axis`. Default: not given.

    Raises:
      ValueError: A size is wrong.
    """
    where = "make_trajectory_queue"
    if max_size is not None:
        max_length_time_axis = max_size // _checked(where, "add_batch_size", add_batch_size)
    length = _checked(where, "max_length_time_axis", max_length_time_axis)
    for name, size in (
        ("add_sequence_length", add_sequence_length),
        ("sample_sequence_length", sample_sequence_length),
    ):
        if _checked(where, name, size) > length:
            raise ValueError(f"{where}: {name}={size} exceeds max_length_time_axis={length}")
    config = _Queue(
        storage=_storage(where, add_batch_size, length, 1, Item()),
        add_length=add_sequence_length,
        sample_length=sample_sequence_length,
    )
    return TrajectoryQueue(
        config.init, config.add, config.sample, config.can_sample, config.can_add
    )


def make_mixer(
    buffers: Sequence[Any], sample_batch_size: int, proportions: Sequence[float]
) -> Mixer:
    """Make a mixer, which samples several buffers at once.

    Args:
      buffers: Buffers of one kind.
      sample_batch_size: Number of items of all buffers together in a sample. Each buffer's own
        batch must have at least its part of them.
      proportions: Part of each buffer, in any unit. What rounding down leaves goes to the first.

    Raises:
      ValueError: There is not one proportion for each buffer, or one is negative.
    """
    where = "make_mixer"
    _checked(where, "sample_batch_size", sample_batch_size)
    if len(buffers) != len(proportions) or not buffers:
        raise ValueError(
            f"{where}: each buffer needs one proportion, got {len(buffers)} buffers and "
            f"{len(proportions)} proportions"
        )
    total = sum(proportions)
    if min(proportions) < 0 or not total > 0:
        raise ValueError(
            f"{where}: proportions must be at least 0, and one positive, got {proportions}"
        )
    sizes = [int(part / total * sample_batch_size) for part in proportions]
    sizes[0] += sample_batch_size - sum(sizes)

    def sample(states: Sequence[Any], key: Key) -> Any:
        keys = jax.random.split(key, 2 * len(buffers))
        parts = [
            _part(buffer.sample(state, sample_key), part_key, size)
            for buffer, state, sample_key, part_key, size in zip(
                buffers, states, keys[::2], keys[1::2], sizes, strict=True
            )
        ]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

    def can_sample(states: Sequence[Any]) -> jax.Array:
        return jnp.stack(
            [buffer.can_sample(state) for buffer, state in zip(buffers, states, strict=True)]
        ).all()

    return Mixer(sample, can_sample)


def _part(batch: Any, key: Key, size: int) -> Any:
    """Return `size` different items of a batch, spread evenly over it from a random place on.

    A batch with priorities is stratified: its first items are those of the first rows.
    """
    found = len(jax.tree.leaves(batch)[0])
    if size > found:
        raise ValueError(
            f"make_mixer: a part of {size} items needs a buffer with sample_batch_size of at "
            f"least {size}, got {found}"
        )
    if size == found:
        return batch
    place = (ring.arange(size) + jax.random.uniform(key)) * (found / max(size, 1))
    chosen = jnp.minimum(place.astype(jnp.int32), found - 1)
    return jax.tree.map(lambda leaf: leaf[chosen], batch)


class _Sequence(View[PyTree]):
    """Read `length` rows, the sampled one first."""

    length: int

    @property
    def window(self) -> Window:
        return Window(after=self.length - 1)

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> PyTree:
        return reader.item(ring.arange(self.length))


class _Pair(View[ExperiencePair]):
    """Read the sampled row and the next."""

    @property
    def window(self) -> Window:
        return Window(after=1)

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> ExperiencePair:
        both = reader.item(ring.arange(2))
        return ExperiencePair(*(jax.tree.map(operator.itemgetter(nth), both) for nth in (0, 1)))


class _Storage(Static):
    """Storage of all buffers: steps [E, T, ...] go to E streams."""

    storage: ReplayBuffer
    has_envs: bool = True
    has_time: bool = True
    is_flat: bool = False  # one stream for the steps of all envs, however many

    def _extend(self, state: Any, batch: PyTree) -> ReplayState:
        if not isinstance(state, TrajectoryBufferState | TrajectoryQueueState):
            raise ValueError(
                f"add: the state must be one that init or add returned, got {kind_of(state)}"
            )
        first = jax.tree.leaves(batch)[:1]
        given = iter(jnp.shape(first[0]) if first else ())
        envs = (next(given, 0),) if self.has_envs else ()
        time = (next(given, 0),) if self.has_time else ()
        if self.has_envs and not self.is_flat:
            envs = (self.storage.num_envs,)
        names = ["add_batch_size"] * self.has_envs + ["time"] * self.has_time
        check_block(
            "add",
            batch,
            state.rows.streams.steps,
            (*envs, *time),
            f"steps with leaves [{', '.join([*names, '...'])}]",
        )

        def by_time(leaf: Any) -> jax.Array:
            """Return leaves [T, E, ...]."""
            leaf = jnp.asarray(leaf)
            own = leaf.shape[len(envs) + len(time) :]
            if self.is_flat:
                return leaf.reshape((-1, 1, *own))
            leaf = leaf.reshape((*(envs or (1,)), *(time or (1,)), *own))
            return leaf.swapaxes(0, 1)

        block = jax.tree.map(by_time, batch)
        return self.storage.extend(
            state.rows, block, priority=self._priority(state, len(jax.tree.leaves(block)[0]))
        )

    def _priority(self, state: Any, num_steps: int) -> jax.Array | None:
        """Return the priorities of new rows: float32[T, E]; None for those of the sampler."""
        del state, num_steps


class _Trajectories(_Storage):
    """Uniform sampling."""

    min_length: int
    period: int = 1

    def init(self, experience: PyTree) -> TrajectoryBufferState:
        return TrajectoryBufferState(self.storage.init(experience))

    def add(self, state: TrajectoryBufferState, batch: PyTree) -> TrajectoryBufferState:
        rows = self._extend(state, batch)
        return state.replace(rows=rows)

    def sample(self, state: TrajectoryBufferState, rng_key: Key) -> Any:
        if self.period == 1:
            return TrajectoryBufferSample(self.storage.sample(state.rows, rng_key).experience)
        # All streams are equally long, so that each start is computed.
        streams, layout = state.rows.streams, state.rows.streams.layout
        num_later = layout.window.after or 0  # steps of a sequence after the first
        last, _ = ring.split(jnp.maximum(streams.filled - 1 - num_later, 0), self.period)
        bounds = jnp.stack([last + 1, jnp.int32(layout.num_envs)])[:, None]
        nth, env = jax.random.randint(rng_key, (2, self.storage.batch_size), 0, bounds, jnp.int32)
        oldest = streams.head - streams.filled
        row = layout.row(env, layout.wrap(oldest + nth * self.period))
        return TrajectoryBufferSample(_read(self.storage.view, streams, row))

    def can_sample(self, state: TrajectoryBufferState) -> jax.Array:
        return num_written(state) >= self.min_length


class _Prioritised(_Trajectories):
    """Prioritized sampling. With a period, rows between possible starts have priority 0."""

    def init(self, experience: PyTree) -> PrioritisedTrajectoryBufferState:
        return PrioritisedTrajectoryBufferState(self.storage.init(experience))

    def sample(self, state: Any, rng_key: Key) -> PrioritisedTrajectoryBufferSample:
        batch = self.storage.sample(state.rows, rng_key)
        indices, _ = ring.split(batch.index.row, self.period)
        return PrioritisedTrajectoryBufferSample(batch.experience, indices, batch.probability)

    def can_sample(self, state: Any) -> jax.Array:
        has_mass = for_each(lambda one: self.storage.can_sample(one.rows), state)
        return super().can_sample(state) & has_mass

    def set_priorities(self, state: Any, indices: jax.Array, priorities: jax.Array) -> Any:
        index = state.rows.streams.index(jnp.asarray(indices) * self.period)
        return state.replace(rows=self.storage.update_priorities(state.rows, index, priorities))

    def _priority(self, state: Any, num_steps: int) -> jax.Array | None:
        if self.period == 1:
            return None  # the largest so far
        # The length is a multiple of the period, so that starts keep their positions.
        _, place = ring.split(state.rows.streams.head + ring.arange(num_steps), self.period)
        priority = jnp.where(place == 0, state.rows.sampler.max_priority, 0)
        return jnp.broadcast_to(priority[:, None], (num_steps, self.storage.num_envs))


class _Queue(_Storage):
    """Sequences of all streams, one after another."""

    add_length: int
    sample_length: int

    def init(self, experience: PyTree) -> TrajectoryQueueState:
        return TrajectoryQueueState(self.storage.init(experience), jnp.int32(0))

    def add(self, state: TrajectoryQueueState, batch: PyTree) -> TrajectoryQueueState:
        rows = self._extend(state, batch)
        num_steps = jax.tree.leaves(batch)[0].shape[1]
        num_unread = jnp.minimum(state.num_unread + num_steps, self.storage.length)
        return state.replace(rows=rows, num_unread=num_unread)

    def sample(
        self, state: TrajectoryQueueState
    ) -> tuple[TrajectoryQueueState, TrajectoryQueueSample]:
        streams, layout = state.rows.streams, state.rows.streams.layout
        row = layout.row(layout.envs(), state.read_index)
        steps = _read(_Sequence(length=self.sample_length), streams, row)
        num_read = jnp.where(self.can_sample(state), self.sample_length, 0)
        state = state.replace(num_unread=state.num_unread - num_read)
        return state, TrajectoryQueueSample(steps)

    def can_sample(self, state: TrajectoryQueueState) -> jax.Array:
        return state.num_unread >= self.sample_length

    def can_add(self, state: TrajectoryQueueState) -> jax.Array:
        return state.num_unread + self.add_length <= self.storage.length


def _functions(**options: Any) -> Any:
    """Return the functions of a buffer, with priorities if its storage has them."""
    if not isinstance(options["storage"].sampler, Prioritized):
        config = _Trajectories(**options)
        return TrajectoryBuffer(config.init, config.add, config.sample, config.can_sample)
    config = _Prioritised(**options)
    functions = config.init, config.add, config.sample, config.can_sample, config.set_priorities
    return PrioritisedTrajectoryBuffer(*functions)


def _read(view: View, streams: Streams, row: jax.Array) -> PyTree:
    """Return what a view reads at rows int32[B]: leaves [B, ...]."""
    return jax.vmap(lambda one: view.read(RowReader(streams, one)))(row)


def _storage(
    where: str,
    num_envs: int,
    length: int,
    batch_size: int,
    view: View,
    exponent: float | None = None,
) -> ReplayBuffer:
    if exponent is not None and not 0 <= exponent <= 1:
        raise ValueError(f"{where}: priority_exponent must be in [0, 1], got {exponent}")
    return ReplayBuffer(
        capacity=_checked(where, "add_batch_size", num_envs) * length,
        num_envs=num_envs,
        batch_size=_checked(where, "sample_batch_size", batch_size),
        sampler=Uniform() if exponent is None else Prioritized(alpha=exponent),
        view=view,
    )


def _checked(where: str, name: str, size: Any) -> int:
    checks.check_size(where, name, size)
    return int(size)


def _length(where: str, num_envs: int, max_size: int | None, length: int | None) -> int:
    """Return the number of time steps that are kept."""
    if (max_size is None) == (length is None):
        raise ValueError(
            f"{where}: give one of max_size and max_length_time_axis, got max_size={max_size} and "
            f"max_length_time_axis={length}"
        )
    if max_size is not None:
        length = max_size // _checked(where, "add_batch_size", num_envs)
    return _checked(where, "max_length_time_axis", length)


def _flat_sizes(
    where: str, max_length: int, min_length: int, num_envs: int | None
) -> tuple[int, int]:
    """Return the number of time steps that are kept, and that from which on a flat buffer can be
    sampled."""
    num_envs = 1 if num_envs is None else _checked(where, "add_batch_size", num_envs)
    length = _checked(where, "max_length", max_length) // num_envs
    if length < 2:
        raise ValueError(
            f"{where}: max_length={max_length} has no room for 2 steps of each of {num_envs} envs"
        )
    return length, _least(where, length, min_length // num_envs + 1, 2)


def _least(where: str, length: int, minimum: int, num_steps: int) -> int:
    """Return the number of time steps from which on a buffer can be sampled."""
    minimum = max(minimum, num_steps)
    if minimum > length:
        raise ValueError(
            f"{where}: {minimum} time steps are needed before a sample, but {length} are kept"
        )
    return minimum


def _stored(state: Any) -> PyTree:
    streams = state.rows.streams

    def by_env(leaf: Any) -> jax.Array:
        axes = (streams.layout.num_envs, streams.layout.length)
        return stored_arrays.values(leaf).reshape((*axes, *leaf.shape[1:]))

    return stored_arrays.tree_map(by_env, streams.steps)

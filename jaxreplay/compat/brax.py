"""The replay buffers of Brax, over this library's storage.

`from jaxreplay.compat import brax as replay_buffers` in place of
`from brax.training import replay_buffers` is the only line that changes. The methods are those of
Brax 0.14.2. Each leaf keeps its dtype, and an insert into a full buffer moves no rows.

>>> import jax, jax.numpy as jnp
>>> from jaxreplay.compat import brax as replay_buffers
>>> buffer = replay_buffers.Queue(
...     max_replay_size=4, dummy_data_sample=jnp.int32(0), sample_batch_size=2
... )
>>> state = buffer.insert(buffer.init(jax.random.key(0)), jnp.array([3, 5, 8]))
>>> state, samples = buffer.sample(state)
>>> samples.tolist(), int(buffer.size(state))
([3, 5], 1)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.struct import Node
from jaxreplay.buffers.replay_buffer import ReplayBuffer as _Storage
from jaxreplay.buffers.step_checks import check_block
from jaxreplay.compat._stacked import for_each, num_written
from jaxreplay.samplers import Uniform
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.state import ReplayState
from jaxreplay.views import Item

__all__ = [
    "PjitWrapper",
    "PmapWrapper",
    "Queue",
    "ReplayBuffer",
    "ReplayBufferState",
    "TrajectoryUniformSamplingQueue",
    "UniformSamplingQueue",
]

State = TypeVar("State")
Sample = TypeVar("Sample")


class ReplayBufferState(Node):
    """State of a buffer.

    Attributes:
      replay: The stored rows, as jaxreplay keeps them.
      sample_position: int32[]. Number of stored rows before the one that a queue samples next, the
        oldest first.
      key: Random key of the next sample.
    """

    replay: ReplayState
    sample_position: jax.Array
    key: Key

    @property
    def insert_position(self) -> jax.Array:
        """Number of stored rows: int32[]."""
        return num_written(self)

    @property
    def data(self) -> jax.Array:
        """Copy of the stored rows, the oldest first, each as one flat array: [max_replay_size, D].

        Rows that are not written are 0. It takes the dtype that all leaves promote to.
        """
        return for_each(_flat_rows, self)


class ReplayBuffer(Generic[State, Sample]):
    """Base class of buffers with Brax's methods."""

    def init(self, key: Key) -> Any:
        """Return the state of an empty buffer.

        Args:
          key: Random key, kept in the state.
        """
        raise NotImplementedError

    def insert(self, buffer_state: Any, samples: PyTree) -> Any:
        """Return the state with more rows; if the buffer is full, they replace the oldest.

        Args:
          buffer_state: Donate it, else the whole buffer is copied.
          samples: Pytree with leaves [N, ...], with any N up to `max_replay_size`.

        Raises:
          ValueError: `samples` do not fit.
        """
        self.check_can_insert(buffer_state, samples, 1)
        return self.insert_internal(buffer_state, samples)

    def sample(self, buffer_state: Any) -> tuple[Any, Any]:
        """Return the state with a new key or position, and a batch: leaves [B, ...].

        Args:
          buffer_state: The state.

        Raises:
          ValueError: Outside of `jit`, a queue has too few rows.
        """
        self.check_can_sample(buffer_state, 1)
        return self.sample_internal(buffer_state)

    def size(self, buffer_state: Any) -> jax.Array:
        """Return the number of rows that can be sampled: int32[].

        Args:
          buffer_state: The state.
        """
        raise NotImplementedError

    def check_can_insert(self, buffer_state: Any, samples: PyTree, shards: int) -> None:
        """Raise a ValueError if there are more samples than the buffer holds.

        Args:
          buffer_state: The state.
          samples: Pytree with leaves [N, ...].
          shards: Number of devices that the samples are divided among.
        """

    def check_can_sample(self, buffer_state: Any, shards: int) -> None:
        """Raise a ValueError if a queue has too few rows. Under `jit` it does nothing.

        Args:
          buffer_state: The state, of all devices.
          shards: Number of devices.
        """

    def insert_internal(self, buffer_state: Any, samples: PyTree) -> Any:
        """Insert without a check; see `insert`.

        Args:
          buffer_state: The state.
          samples: Pytree with leaves [N, ...].
        """
        raise NotImplementedError

    def sample_internal(self, buffer_state: Any) -> tuple[Any, Any]:
        """Sample without a check; see `sample`.

        Args:
          buffer_state: The state.
        """
        raise NotImplementedError


class _Rows(ReplayBuffer[ReplayBufferState, Sample]):
    """Storage of all buffers: rows [N, ...] go to one ring, or rows [N, E, ...] to E rings."""

    def __init__(
        self,
        max_replay_size: int,
        dummy_data_sample: Sample,
        sample_batch_size: int,
        num_envs: int | None = None,
    ):
        where = type(self).__name__
        sizes = {"max_replay_size": max_replay_size, "sample_batch_size": sample_batch_size}
        self._env_axis = () if num_envs is None else (num_envs,)
        num_envs = 1 if num_envs is None else num_envs
        for name, size in {**sizes, "num_envs": num_envs}.items():
            checks.check_size(where, name, size)
        self._batch_size = sample_batch_size
        self._example = checks.specs(where, jax.tree.map(jnp.asarray, dummy_data_sample))
        self._storage = _Storage(
            capacity=max_replay_size * num_envs,
            num_envs=num_envs,
            batch_size=sample_batch_size,
            sampler=Uniform(),
            view=Item(),
        )

    def init(self, key: Key) -> ReplayBufferState:
        return ReplayBufferState(self._storage.init(self._example), jnp.int32(0), key)

    def check_can_insert(self, buffer_state: Any, samples: PyTree, shards: int) -> None:
        num_rows = _num_rows(samples) // shards
        if num_rows > self._storage.length:
            raise ValueError(
                f"insert: got {num_rows} rows, but the maximum replay size is "
                f"{self._storage.length}"
            )

    def insert_internal(self, buffer_state: ReplayBufferState, samples: PyTree) -> Any:
        num_rows = _num_rows(samples)
        axes, steps = (num_rows, *self._env_axis), buffer_state.replay.rows.steps
        what = f"rows with leaves [N, {'num_envs, ' if self._env_axis else ''}...]"
        check_block("insert", samples, steps, axes, what)
        if not self._env_axis:
            samples = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], samples)
        num_lost = jnp.maximum(num_written(buffer_state) + num_rows - self._storage.length, 0)
        return buffer_state.replace(
            replay=self._storage.extend(buffer_state.replay, samples),
            sample_position=jnp.maximum(buffer_state.sample_position - num_lost, 0),
        )

    def size(self, buffer_state: ReplayBufferState) -> jax.Array:
        return num_written(buffer_state) - buffer_state.sample_position

    def _read(self, state: ReplayBufferState, env: jax.Array, nth: jax.Array) -> PyTree:
        """Return the `nth` stored rows of envs, the oldest first: leaves [..., ...].

        Args:
          state: The state.
          env: int32[...].
          nth: int32[...], in [0, max_replay_size).
        """
        replay, layout = state.replay, state.replay.layout
        row = layout.row(env, layout.wrap(replay.head - replay.filled + nth))
        return stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, row), replay.rows.steps)


class UniformSamplingQueue(_Rows[Sample]):
    """Buffer of independent rows that are sampled uniformly, with replacement.

    Args:
      max_replay_size: Number of rows that are kept.
      dummy_data_sample: One row: arrays or numbers, of which shapes and dtypes are read.
      sample_batch_size: Number of rows B in a sample.

    Raises:
      ValueError: A size is wrong.
    """

    def sample_internal(self, buffer_state: ReplayBufferState) -> tuple[Any, Any]:
        key, sample_key = jax.random.split(buffer_state.key)
        batch = self._storage.sample(buffer_state.replay, sample_key)
        return buffer_state.replace(key=key), batch.experience


class Queue(_Rows[Sample]):
    """Buffer of independent rows that are handed out in order, the oldest first.

    Args:
      max_replay_size: Number of rows that are kept.
      dummy_data_sample: One row: arrays or numbers, of which shapes and dtypes are read.
      sample_batch_size: Number of rows B in a sample.
      cyclic: After the newest row, go on with the oldest. Default: False, each row is handed out
        once.

    Raises:
      ValueError: A size is wrong.
    """

    def __init__(
        self,
        max_replay_size: int,
        dummy_data_sample: Sample,
        sample_batch_size: int,
        cyclic: bool = False,
    ):
        super().__init__(max_replay_size, dummy_data_sample, sample_batch_size)
        self._cyclic = cyclic

    def check_can_sample(self, buffer_state: Any, shards: int) -> None:
        size = self.size(buffer_state)
        if not isinstance(size, Tracer) and size.min() < self._batch_size:
            raise ValueError(
                f"sample: Trying to sample {self._batch_size * shards} elements, but only "
                f"{size.sum()} available."
            )

    def sample_internal(self, buffer_state: ReplayBufferState) -> tuple[Any, Any]:
        num_rows, first = num_written(buffer_state), buffer_state.sample_position

        def again(nth: jax.Array) -> jax.Array:
            """Go on with the oldest row after the newest."""
            nth = jnp.where(nth < num_rows, nth, nth - num_rows)
            return jnp.clip(nth, 0, jnp.maximum(num_rows - 1, 0))

        nth = again(first + ring.arange(self._batch_size))
        next_first = first + self._batch_size
        first = again(next_first) if self._cyclic else jnp.minimum(next_first, num_rows)
        batch = self._read(buffer_state, jnp.zeros_like(nth), nth)
        return buffer_state.replace(sample_position=first), batch

    def size(self, buffer_state: ReplayBufferState) -> jax.Array:
        return num_written(buffer_state) if self._cyclic else super().size(buffer_state)


class TrajectoryUniformSamplingQueue(_Rows[Sample]):
    """Buffer of the steps of several envs, of which sequences are sampled, as JaxGCRL's.

    `insert` takes leaves [T, E, ...]. A sample has one sequence of each env, in random order:
    leaves [E, L, ...]. Sequences may cross episodes.

    Args:
      max_replay_size: Number of time steps that are kept.
      dummy_data_sample: One step of one env: arrays or numbers, of which shapes and dtypes are
        read.
      sample_batch_size: Ignored, as by JaxGCRL.
      num_envs: Number of envs E.
      episode_length: Number of time steps L of a sequence.

    Raises:
      ValueError: A size is wrong.
    """

    def __init__(
        self,
        max_replay_size: int,
        dummy_data_sample: Sample,
        sample_batch_size: int,
        num_envs: int,
        episode_length: int,
    ):
        super().__init__(max_replay_size, dummy_data_sample, sample_batch_size, num_envs)
        checks.check_size(type(self).__name__, "episode_length", episode_length)
        if episode_length > max_replay_size:
            raise ValueError(
                f"{type(self).__name__}: episode_length={episode_length} exceeds "
                f"max_replay_size={max_replay_size}"
            )
        self.num_envs, self.episode_length = num_envs, episode_length

    def sample_internal(self, buffer_state: ReplayBufferState) -> tuple[Any, Any]:
        key, env_key, start_key = jax.random.split(buffer_state.key, 3)
        env = jax.random.permutation(env_key, ring.arange(self.num_envs))
        num_starts = jnp.maximum(num_written(buffer_state) - self.episode_length + 1, 1)
        start = jax.random.randint(start_key, (self.num_envs,), 0, num_starts, jnp.int32)
        nth = start[:, None] + ring.arange(self.episode_length)
        return buffer_state.replace(key=key), self._read(buffer_state, env[:, None], nth)


class _Wrapper(ReplayBuffer[State, Sample]):
    """Base of buffers that lie on several devices, each with a part of its own."""

    def __init__(self, buffer: Any, num_devices: int):
        self._buffer, self._num_devices = buffer, num_devices

    def insert(self, buffer_state: Any, samples: PyTree) -> Any:
        self._buffer.check_can_insert(buffer_state, samples, self._num_devices)
        return self._insert(buffer_state, samples)

    def sample(self, buffer_state: Any) -> tuple[Any, Any]:
        self._buffer.check_can_sample(buffer_state, self._num_devices)
        return self._sample(buffer_state)

    _insert: Callable[[Any, PyTree], Any]
    _sample: Callable[[Any], tuple[Any, Any]]

    def _split(self, samples: PyTree) -> PyTree:
        """Deal rows [N, ...] to the devices: leaves [devices, N / devices, ...]."""
        shape = (-1, self._num_devices)
        return jax.tree.map(
            lambda leaf: jnp.reshape(leaf, shape + jnp.shape(leaf)[1:]).swapaxes(0, 1), samples
        )


def _joined(samples: PyTree) -> PyTree:
    """Return rows [devices, N / devices, ...] as [N, ...], in the order before they were dealt."""
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1).reshape((-1, *leaf.shape[2:])), samples)


class PmapWrapper(_Wrapper[State, Sample]):
    """Buffer with a part on each device, by `jax.pmap`. Use it outside of `pmap`.

    Args:
      buffer: Buffer of one device. All sizes are multiples of its own.
      local_device_count: Number of devices. Default: all of this process.
    """

    def __init__(self, buffer: Any, local_device_count: int | None = None):
        super().__init__(buffer, local_device_count or jax.local_device_count())

    def init(self, key: Key) -> Any:
        key = jax.random.fold_in(key, jax.process_index())
        return jax.pmap(self._buffer.init)(jax.random.split(key, self._num_devices))

    def _insert(self, buffer_state: Any, samples: PyTree) -> Any:
        return jax.pmap(self._buffer.insert_internal)(buffer_state, self._split(samples))

    def _sample(self, buffer_state: Any) -> tuple[Any, Any]:
        buffer_state, samples = jax.pmap(self._buffer.sample_internal)(buffer_state)
        return buffer_state, _joined(samples)

    def size(self, buffer_state: Any) -> jax.Array:
        return self._buffer.size(buffer_state).sum()


class PjitWrapper(_Wrapper[State, Sample]):
    """Buffer with a part on each device of some axes of a mesh.

    Args:
      buffer: Buffer of one device. All sizes are multiples of its own.
      mesh: Devices.
      axis_names: Axes of the mesh that rows are divided over.
    """

    def __init__(self, buffer: Any, mesh: Mesh, axis_names: Sequence[str]):
        super().__init__(buffer, math.prod(mesh.shape[name] for name in axis_names))
        by_device = NamedSharding(mesh, PartitionSpec(tuple(axis_names)))

        def init(key: Key) -> Any:
            return jax.vmap(buffer.init)(jax.random.split(key, self._num_devices))

        def insert(buffer_state: Any, samples: PyTree) -> Any:
            return jax.vmap(buffer.insert_internal)(buffer_state, self._split(samples))

        def sample(buffer_state: Any) -> tuple[Any, Any]:
            buffer_state, samples = jax.vmap(buffer.sample_internal)(buffer_state)
            return buffer_state, _joined(samples)

        self.init = jax.jit(init, out_shardings=by_device)
        self._insert = jax.jit(insert, out_shardings=by_device)
        self._sample = jax.jit(sample, out_shardings=by_device)

    def size(self, buffer_state: Any) -> jax.Array:
        return self._buffer.size(buffer_state).sum()


def _num_rows(samples: PyTree) -> int:
    """Return the first axis of the first leaf, 0 without one: the block's check names what is
    wrong."""
    return next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(samples) if jnp.ndim(leaf)), 0)


def _flat_rows(state: ReplayBufferState) -> jax.Array:
    """Return the rows of a state without leading axes, the oldest first: [max_replay_size, ...]."""
    replay, layout = state.replay, state.replay.layout
    position = layout.wrap(replay.head - replay.filled + ring.arange(layout.length))
    row = layout.row(layout.envs(), position[:, None])  # [T, E]
    rows = stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, row), replay.rows.steps)
    flat = jax.vmap(jax.vmap(lambda one: ravel_pytree(one)[0]))(rows)
    return flat[:, 0] if layout.num_envs == 1 else flat

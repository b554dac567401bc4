"""One buffer whose envs and rows are divided among the devices of a mesh's axis."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Generic, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util import checks, xla
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.names import kind_of
from jaxreplay._util.struct import Static
from jaxreplay.buffers import memory, step_checks
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.distributed.local import Local, part_of, shard_of
from jaxreplay.samplers import Sampler
from jaxreplay.storage import platforms, stored_arrays
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Index, Sample, SampleOptions, T

# In older versions, JAX's own `searchsorted` fails the check of types inside of a `shard_map`.
_HAS_TYPES = jax.__version_info__ >= (0, 10)


class Sharded(Static, Generic[T]):
    """A buffer over the D devices of an axis; `jaxreplay.sharded` makes it.

    Its methods are those of a `ReplayBuffer`, for the inside of your `jit`, on global arrays: env
    and batch axes are divided along the mesh's axis. The state is a `ReplayState` whose leaves are
    those of the shards one after another; scalars are [D]. A row's number in `index` is that of its
    place in the stored leaves.

    Args:
      buffer: The buffer as a whole: all envs, rows and items of a batch.
      mesh: The mesh.
      axis: Name of its axis, or a tuple of names. Along its other axes the buffer is replicated.
        Default: "data".

    Raises:
      ValueError: As for `jaxreplay.sharded`.
    """

    buffer: ReplayBuffer[T]
    mesh: Mesh
    axis: Any = "data"

    def _check(self) -> None:
        if xla.shard_map is None:
            raise ValueError(
                f"sharded: needs JAX 0.6.2 or newer, for jax.shard_map; this is {jax.__version__}"
            )
        object.__setattr__(self, "buffer", buffer_of("sharded", self.buffer))
        if not isinstance(self.mesh, Mesh):
            raise ValueError(
                f"sharded: mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), "
                f'("data",)), got {kind_of(self.mesh)}'
            )
        if unknown := [name for name in self._axes if name not in self.mesh.axis_names]:
            raise ValueError(
                f"sharded: the mesh has no axis {unknown[0]!r}, but "
                f"{', '.join(map(repr, self.mesh.axis_names))}"
            )
        if self._is_explicit and not hasattr(jax.sharding, "reshard"):
            raise ValueError(
                "sharded: a mesh with explicit axes needs a newer JAX, with jax.sharding.reshard; "
                f"this is {jax.__version__}"
            )
        sampler = self.buffer.sampler
        if sampler.consumes:
            raise ValueError(
                f"sharded: {type(sampler).__name__} hands out each row once, in an order of all "
                "rows, which no shard knows; give each device a buffer of its own in a shard_map"
            )
        if type(sampler).mass is Sampler.mass:
            raise ValueError(
                f"sharded: {type(sampler).__name__} does not say how probable a shard is: it lacks "
                "mass(state, sampleable); use jaxreplay.Prioritized() or jaxreplay.Uniform()"
            )
        self.local  # noqa: B018, its parts are checked

    @property
    def _axes(self) -> tuple[str, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def _is_explicit(self) -> bool:
        return any(kind.name == "Explicit" for kind in self.mesh.axis_types)

    @property
    def num_shards(self) -> int:
        """D, the number of devices along the axis."""
        return math.prod(self.mesh.shape[name] for name in self._axes)

    @functools.cached_property
    def local(self) -> Local[T]:
        """The methods of one shard, for the inside of a `jax.shard_map`."""
        own = shard_of("sharded", self.buffer, self.num_shards)
        platform = own.platform or platforms.platform_of(self.mesh.devices.flat[0])
        return Local(
            buffer=dataclasses.replace(own, platform=platform),
            num_shards=self.num_shards,
            axis=self.axis,
            min_size=self.buffer.min_size,
        )

    def init(self, example: PyTree) -> ReplayState:
        """Make an empty state, each device its own part.

        Args:
          example: One env's step or one item, as for `ReplayBuffer.init`.

        Returns:
          The state, on the devices of the mesh.

        Raises:
          ValueError: As for `ReplayBuffer.init`.
          MemoryError: A device has too little memory for its part.
        """
        local = self.local
        if not checks.is_tracing():
            memory.check_fits("init", self._memory_here(example))
        specs = checks.specs("init", example)
        make = self._mapped(lambda: local.stacked(local.buffer.init(specs)), (), P(self.axis))
        return jax.jit(make)()

    def _memory_here(self, example: PyTree) -> memory.Memory:
        """Return the memory that `init` takes where one device's free memory is known: that of one
        part or, as the CPU devices of a process share the host's, of all its parts."""
        of_part = self.local.buffer.memory(example)
        here = self.mesh.local_devices
        num = len(here) if here and here[0].platform == "cpu" else 1
        leaves = {name: num * size for name, size in of_part.leaves.items()}
        return memory.Memory(leaves, num * of_part.capacity)

    def from_local(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Return global arrays of which this process has its own envs' part.

        With several processes (`jax.distributed`), each steps the envs of its own devices, and
        passes what they return to `add` in this form.

        Args:
          tree: Pytree with leaves [E / number of processes, ...]: of the envs of this process's
            devices, in the order of the mesh.
          axis: Axis of the envs; 1 for `extend`. Default: 0.

        Returns:
          Pytree with leaves [E, ...].
        """
        sharding = NamedSharding(self.mesh, P(*[None] * axis, self.axis))
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree
        )

    def add(
        self,
        state: ReplayState,
        step: PyTree,
        mask: Any = None,
        priority: Any = None,
        *,
        envs: Any = None,
    ) -> ReplayState:
        """Append one step of every env, or of some envs.

        Args:
          state: Donated.
          step: Leaves [E, ...], as for `ReplayBuffer.add`.
          mask: bool[E]. Default: every env took a step.
          priority: float[E]. Default: as for `ReplayBuffer.add`, the largest of any shard.
          envs: int32[E], as for `ReplayBuffer.add`; each device gets all of these steps, and
            writes those of its own envs. Default: all envs.

        Returns:
          The new state.
        """
        own = self._own_specs("add", state)
        given, envs = self.buffer._checked("add", own, step, mask, priority, envs)
        spec = P(self.axis) if envs is None else P()
        return self._change(self.local.add, state, (*given, envs), spec)

    def extend(
        self,
        state: ReplayState,
        steps: PyTree,
        mask: Any = None,
        priority: Any = None,
        *,
        envs: Any = None,
    ) -> ReplayState:
        """Append a block of steps.

        Args:
          state: Donated.
          steps: Leaves [T, E, ...], as for `ReplayBuffer.extend`.
          mask: bool[T, E]. Default: every env took every step.
          priority: float[T, E]. Default: as for `ReplayBuffer.add`, the largest of any shard.
          envs: int32[E], as for `add`. Default: all envs.

        Returns:
          The new state.
        """
        own = self._own_specs("extend", state)
        given = steps, mask, priority, envs
        given, envs = self.buffer._checked("extend", own, *given, is_block=True)
        spec = P(None, self.axis) if envs is None else P()
        return self._change(self.local.extend, state, (*given, envs), spec)

    def end_streams(self, state: ReplayState, mask: Any = None) -> ReplayState:
        """End the unfinished episodes, after a reset that no step tells.

        Args:
          state: Donated.
          mask: bool[E], False for envs that go on. Default: every env was reset.

        Returns:
          The new state.
        """
        self._own_specs("end_streams", state)
        if mask is not None:
            step_checks.check_mask("end_streams", mask, True, (self.buffer.num_envs,))
        return self._change(self.local.end_streams, state, (mask,), P(self.axis))

    def drop(self, state: ReplayState, mask: Any) -> ReplayState:
        """Give up the unfinished episodes of some envs, as `ReplayBuffer.drop` does.

        Args:
          state: Donated.
          mask: bool[E], True for the envs whose episode is given up.

        Returns:
          The new state.
        """
        self._own_specs("drop", state)
        step_checks.check_mask("drop", mask, True, (self.buffer.num_envs,))
        return self._change(self.local.drop, state, (mask,), P(self.axis))

    def clear(self, state: ReplayState) -> ReplayState:
        """Remove all rows.

        Args:
          state: Donated.

        Returns:
          The new state.
        """
        self._own_specs("clear", state)
        return self._change(self.local.clear, state, (), P())

    def adopt(self, state: ReplayState) -> ReplayState:
        """Make the state of another sharded buffer this buffer's, as `ReplayBuffer.adopt` does.
        Streams stay on their device.

        Args:
          state: The state of a buffer over the same devices, which may differ as for
            `ReplayBuffer.adopt`.

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.adopt`, or the state has another number of shards.
        """
        found = stored_arrays.stored_leaves(state.rows.steps)[0].shape[0]
        if found != self.num_shards * state.layout.capacity:
            raise ValueError(
                f"adopt: the state has {found / state.layout.capacity:g} shards, and this buffer "
                f"{self.num_shards}; save it, and restore it for this buffer"
            )
        local = self.local
        adopt = lambda state: local.stacked(local.adopt(state))
        return self._mapped(adopt, (P(self.axis),), P(self.axis))(state)

    def sample(
        self,
        state: ReplayState,
        key: Key,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> Sample[T]:
        """Sample a batch, with replacement, divided among the devices.

        Args:
          state: The buffer's state.
          key: Random key, consumed.
          batch_size: Number of items B, static, a multiple of D. Default: the buffer's.
          options: As for `ReplayBuffer.sample`.

        Returns:
          The items, their indices, probabilities and weights, leaves [B, ...].

        Raises:
          ValueError: `batch_size` cannot be divided.
        """
        self._own_specs("sample", state)
        self.buffer.check_given("sample", options)
        local = self.local
        if batch_size is not None:
            part_of("sample", "batch_size", batch_size, self.num_shards)

        def sample(state: ReplayState, key: Key, options: Any) -> Sample[T]:
            return local.sample(local.own(state), key, batch_size, **options)

        of_items = jax.tree.map(lambda x: P(self.axis) if np.ndim(x) else P(), dict(options))
        specs = (P(self.axis), P(), of_items)
        return self._mapped(sample, specs, P(self.axis))(state, key, dict(options))

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        """Set the priorities of sampled rows, such as absolute TD errors.

        An item must be where `sample` put it in the batch: on the device of its row. Elsewhere it
        counts as stale.

        Args:
          state: Donated.
          index: `batch.index` of a sample, leaves [B].
          priority: float[B], at least 0.

        Returns:
          The new state.
        """
        self._own_specs("update_priorities", state)
        if isinstance(index, Index):
            part_of("update_priorities", "items", jax.numpy.size(index.row), self.num_shards)
        return self._change(self.local.update_priorities, state, (index, priority), P(self.axis))

    def write(self, state: ReplayState, index: Index, values: Any) -> ReplayState:
        """Overwrite leaves of sampled rows, as `ReplayBuffer.write` does.

        An item must be where `sample` put it in the batch, as for `update_priorities`.

        Args:
          state: Donated.
          index: `batch.index` of a sample, leaves [B], or `batch.experience.index`, [B, T].
          values: As for `ReplayBuffer.write`.

        Returns:
          The new state.
        """
        self._own_specs("write", state)
        if isinstance(index, Index):
            part_of("write", "items", len(index.row), self.num_shards)
        return self._change(self.local.write, state, (index, values), P(self.axis))

    def map_rows(
        self, state: ReplayState, function: Any, *arguments: Any, block: int = 65_536
    ) -> ReplayState:
        """Compute leaves of all rows anew, each on its device, as `ReplayBuffer.map_rows` does.

        Args:
          state: Donated.
          function: As for `ReplayBuffer.map_rows`.
          arguments: Further arguments of the function, which all devices get.
          block: Number of rows that a device computes at once. Default: 65,536.

        Returns:
          The new state.
        """
        self._own_specs("map_rows", state)
        mapped = lambda own, *arguments: self.local.map_rows(own, function, *arguments, block=block)
        return self._change(mapped, state, arguments, P())

    def size(self, state: ReplayState) -> jax.Array:
        """Return the number of sampleable rows of all shards, int32[].

        Args:
          state: The buffer's state.
        """
        return self._ask("size", state)

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Return whether a sample is valid, bool[].

        Args:
          state: The buffer's state.
        """
        return self._ask("can_sample", state)

    def metrics(self, state: ReplayState) -> dict[str, jax.Array]:
        """Return figures to log, as `ReplayBuffer.metrics` does, of all shards together. Of a
        sampler of your own, those that its `counts` names are added up; others are left out.

        Args:
          state: The buffer's state.
        """
        return self._ask("metrics", state)

    def _ask(self, name: str, state: ReplayState, **options: Any) -> Any:
        self._own_specs(name, state)
        local = self.local

        def ask(state: ReplayState, options: Any) -> Any:
            return getattr(local, name)(local.own(state), **options)

        return self._mapped(ask, (P(self.axis), P()), P())(state, options)

    def _change(
        self, function: Callable[..., Any], state: ReplayState, given: tuple[Any, ...], spec: P
    ) -> ReplayState:
        local = self.local

        def change(state: ReplayState, given: Any) -> ReplayState:
            return local.stacked(function(local.own(state), *given))

        return self._mapped(change, (P(self.axis), spec), P(self.axis))(state, given)

    def _mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        mapped = xla.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=_HAS_TYPES,
        )
        if not self._is_explicit:
            return mapped

        def resharded(*arguments: Any) -> Any:
            return mapped(
                *(
                    jax.tree.map(lambda leaf, spec=spec: self._placed(leaf, spec), argument)
                    for argument, spec in zip(arguments, in_specs, strict=True)
                )
            )

        return resharded

    def _placed(self, leaf: Any, spec: P) -> jax.Array:
        return jax.sharding.reshard(leaf, NamedSharding(self.mesh, spec))

    def _own_specs(self, where: str, state: Any) -> ReplayState:
        """Return the shapes of a shard's state, or raise a ValueError."""
        if not isinstance(state, ReplayState):
            raise ValueError(
                f"{where}: the state must be a ReplayState, as init returns it, got "
                f"{kind_of(state)}"
            )
        if state.layout != self.local.buffer.layout():
            raise ValueError(
                f"{where}: this state is not of this sharded buffer, with {self.num_shards} shards "
                f"of {self.local.buffer.capacity} rows; init makes it"
            )
        own = self.local.specs(state)

        def of_all(spec: Any) -> Any:
            first, *others = spec.shape or (1,)
            return jax.ShapeDtypeStruct((self.num_shards * first, *others), spec.dtype)

        hint = f"The state must have the leaves of {self.num_shards} shards, as init returns it."
        checks.check_leaves(where, state, jax.tree.map(of_all, own), hint)
        return own


def sharded(buffer: ReplayBuffer[T], mesh: Mesh, axis: Any = "data") -> Sharded[T]:
    """Divide a buffer among the devices of a mesh's axis.

    Each device has a part of the envs and their rows. D is the number of devices along the axis,
    and B the batch size.

    Each device samples B / D items from its own rows. No item moves: a sample sends 12 bytes a
    device. Where devices hold different shares of the distribution, an item's weight has the factor
    D * share, so that the mean of `weight * f` is that of one buffer; its variance is
    `D / B * sum(share ** 2 * variance of the share's f)`.

    Args:
      buffer: A `ReplayBuffer` with all envs, rows and items of a batch.
      mesh: The mesh, with automatic or explicit axes.
      axis: Name of the axis, or a tuple of names. Default: "data".

    Returns:
      The sharded buffer, whose methods go into your `jit`.

    Raises:
      ValueError: `capacity`, `num_envs` or `batch_size` cannot be divided; a sampler's distribution
        is not a sum over shards (`Queue`, `jr.blend`); the mesh has no such axis;
        JAX is older than 0.6.2; or it has no `jax.sharding.reshard`, and the mesh explicit axes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> buffer = jr.sharded(jr.items(capacity=64, num_envs=8, batch_size=16), mesh)
      >>> state = jax.jit(buffer.add, donate_argnums=0)(buffer.init(0.0), jnp.ones(8))
      >>> batch = jax.jit(buffer.sample)(state, jax.random.key(0))
      >>> batch.experience.shape, float(batch.experience.mean())
      ((16,), 1.0)
    """
    return Sharded(buffer=buffer, mesh=mesh, axis=axis)

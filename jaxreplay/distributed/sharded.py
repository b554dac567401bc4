"""One buffer whose envs and rows are divided among the devices of a mesh's axis."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util import checks, xla
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import kind_of
from jaxreplay._util.struct import Static
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.memory import Memory, check_fits
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import of_another_kind
from jaxreplay.buffers.verbs import VERBS
from jaxreplay.distributed.shard import Shard, part_of, shard_of
from jaxreplay.samplers import Sampler
from jaxreplay.storage import platforms, stored_arrays
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Index, T

# In older versions, JAX's own `searchsorted` fails the check of types inside of a `shard_map`.
_HAS_TYPES = jax.__version_info__ >= (0, 10)


if TYPE_CHECKING:
    _Base = ReplayBuffer
else:

    class _Base(Static, Generic[T]):
        pass


# arguments that are no arrays
_STATIC = frozenset(("self", "function")).union(*(verb.static for verb in VERBS.values()))


class Sharded(_Base[T]):
    """A buffer over the D devices of an axis; `jaxreplay.sharded` makes it.

    Its methods are those of a `ReplayBuffer`, for the inside of your `jit`, on global arrays: env
    and batch axes are divided along the mesh's axis. The state is a `ReplayState` whose leaves are
    those of the shards one after another; scalars are [D]. A row's number in `index` is that of its
    place in the stored leaves. Its other members are those of the buffer as a whole.

    They differ in these points. `batch_size` is a multiple of D. An item of an `index` must be
    where `sample` put it in the batch, on the device of its row: elsewhere, `get` returns it as
    invalid, `update_priorities` and `write` count it as stale, and its `age` has no meaning. New
    rows get the largest priority of any shard. All devices get the whole `envs`, `step`, `mask`
    and `priority` of a call with `envs`, and the arguments of `map_rows`. The states of `adopt` and
    `merge` are of sharded buffers with as many shards, and streams stay on their device. `metrics`
    are of all shards; of a sampler of your own, those that its `counts` names are added up, and
    others are left out. There is no `episode_table`, and no `pop`.

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
    def local(self) -> Shard[T]:
        """The buffer of one shard, for the inside of a `jax.shard_map`."""
        own = shard_of("sharded", self.buffer, self.num_shards)
        platform = own.platform or platforms.platform_of(self.mesh.devices.flat[0])
        given = {"platform": platform, "min_size": self.buffer.min_size}
        fields = own._fields() | given
        return Shard(**fields, num_shards=self.num_shards, axis=self.axis)

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
            check_fits("init", self._memory_here(example))
        specs = checks.specs("init", example)
        make = self._mapped(lambda: local.stacked(local.init(specs)), (), P(self.axis))
        return jax.jit(make)()

    def _memory_here(self, example: PyTree) -> Memory:
        """Return the memory that `init` takes where one device's free memory is known: that of one
        part or, as the CPU devices of a process share the host's, of all its parts."""
        of_part = self.local.memory(example)
        here = self.mesh.local_devices
        num = len(here) if here and here[0].platform == "cpu" else 1
        leaves = {name: num * size for name, size in of_part.leaves.items()}
        return Memory(leaves, num * of_part.capacity)

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

    def __dir__(self) -> list[str]:
        return [*{*super().__dir__(), *(name for name in dir(self.buffer) if name[0] != "_")}]

    if not TYPE_CHECKING:  # a type checker knows the methods of a `ReplayBuffer`

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            found = getattr(self.buffer, name)
            if name not in VERBS:
                return found
            if VERBS[name].is_compiled:
                return _method_of(self, name)
            raise AttributeError(
                f"a sharded buffer has no {name}; inside of a jax.shard_map, each shard has it: "
                f"S = buffer.local; S.{name}(S.own(state))"
            )

    def _call(self, name: str, *given: Any, **options: Any) -> Any:
        """Call a method of all shards, with global arrays."""
        verb, local = VERBS[name], self.local
        method = getattr(Shard, name)
        bound = inspect.signature(method).bind(local, *given, **options)
        bound.apply_defaults()
        known = bound.arguments

        # Check what the shards see a part of.
        if name == "adopt" or "other" in known:
            self._check_shards(name, known["state" if name == "adopt" else "other"])
        if name != "adopt":
            own = self._own_specs(name, known["state"])
            if verb.takes_steps:
                names = [*known][2:]
                steps = map(known.__getitem__, names)
                checked, envs = self.buffer._checked(name, own, *steps, is_block=verb.axis == 1)
                known.update(zip(names, (*checked, envs), strict=True))
            elif known.get("mask") is not None:
                step_checks.check_mask(name, known["mask"], True, (self.buffer.num_envs,))
        if isinstance(index := known.get("index"), Index):
            part_of(name, "items", (*np.shape(index.row), 1)[0], self.num_shards)
        self.buffer.check_given(name, known.get("options", {}))

        # Divide the arrays.
        divided, whole, is_of_envs = P(self.axis), P(), known.get("envs") is not None
        of_items = whole if verb.axis is None else P(*[None] * verb.axis, self.axis)
        states = {"state", "other"} & known.keys()
        arrays = {x: leaf for x, leaf in known.items() if leaf is not None and x not in _STATIC}
        specs: dict[str, Any] = dict.fromkeys(arrays, whole if is_of_envs else of_items)
        specs |= dict.fromkeys(states, divided)
        if "key" in arrays:
            specs["key"] = whole
        if "options" in arrays:
            of_option = lambda leaf: of_items if np.ndim(leaf) else whole
            specs["options"] = jax.tree.map(of_option, arrays["options"])
        is_divided = verb.changes is not None or verb.axis is not None

        def call(arrays: dict[str, Any]) -> Any:
            known.update(arrays | {one: local.own(arrays[one]) for one in states})
            found = method(*bound.args, **bound.kwargs)
            return local.stacked(found) if is_divided else found

        return self._mapped(call, (specs,), divided if is_divided else whole)(arrays)

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
            placed = lambda spec, tree: jax.sharding.reshard(tree, NamedSharding(self.mesh, spec))
            is_spec = lambda node: isinstance(node, P)
            return mapped(*jax.tree.map(placed, in_specs, arguments, is_leaf=is_spec))

        return resharded

    def _check_shards(self, where: str, state: Any) -> None:
        """Raise a ValueError unless the rows of a state are divided among as many shards."""
        if not isinstance(state, ReplayState):
            raise of_another_kind(where, state, ReplayState)
        rows = stored_arrays.stored_leaves(state.rows.steps)[0].shape[0]
        if rows != self.num_shards * state.layout.capacity:
            raise ValueError(
                f"{where}: the state has {rows / state.layout.capacity:g} shards, and this buffer "
                f"{self.num_shards}; save it, and restore it for this buffer"
            )

    def _own_specs(self, where: str, state: Any) -> ReplayState:
        """Return the shapes of a shard's state, or raise a ValueError."""
        if not isinstance(state, ReplayState):
            raise of_another_kind(where, state, ReplayState)
        if state.layout != self.local.layout():
            raise ValueError(
                f"{where}: this state is not of this sharded buffer, with {self.num_shards} shards "
                f"of {self.local.capacity} rows; init makes it"
            )
        own = self.local.specs(state)

        def of_all(spec: Any) -> Any:
            first, *others = spec.shape or (1,)
            return jax.ShapeDtypeStruct((self.num_shards * first, *others), spec.dtype)

        hint = f"The state must have the leaves of {self.num_shards} shards, as init returns it."
        checks.check_leaves(where, state, jax.tree.map(of_all, own), hint)
        return own


@functools.lru_cache(maxsize=1024)
def _method_of(buffer: Any, name: str) -> Callable[..., Any]:
    """Return a method of a sharded buffer, the same object each time."""

    @functools.wraps(getattr(buffer.buffer, name))
    def call(*given: Any, **options: Any) -> Any:
        return buffer._call(name, *given, **options)

    return call


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
    return cast(Any, Sharded)(buffer=buffer, mesh=mesh, axis=axis)

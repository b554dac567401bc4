"""Sharded states in the form of one buffer's, in which they are saved: so any number of devices
restores any checkpoint.

Rows of a sharded state lie as those of one buffer, so they are not copied, and each process saves
those of its own devices. Counters are put in another order; the sampler's values per row, and
episode tables, are built again, by each process for all envs. That is computed on the host, where
these numbers take up to 25 bytes a row, and twice that meanwhile.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.checkpoint import resize, rows
from jaxreplay.checkpoint.processes import Processes
from jaxreplay.checkpoint.rows import Part, Parts
from jaxreplay.distributed.local import SUMS
from jaxreplay.distributed.sharded import Sharded
from jaxreplay.storage.state import ReplayState


class Shards:
    """Conversion between the states of a sharded buffer and those of one buffer.

    Attributes:
      buffer: The one buffer.
      processes: The processes whose devices the buffer has.
    """

    def __init__(self, sharded: Sharded):
        self._sharded, self._local = sharded, sharded.local.buffer
        self.buffer: ReplayBuffer = dataclasses.replace(
            sharded.buffer, platform=self._local.platform
        )
        at = [sharded.mesh.axis_names.index(name) for name in sharded._axes]
        devices = np.moveaxis(sharded.mesh.devices, at, range(len(at)))
        self._devices = devices.reshape(sharded.num_shards, -1)  # [D, R]: those of each shard
        self._me = jax.process_index()
        of_each = {one.process_index: one for one in self._devices.flat}
        if self._me not in of_each:
            raise ValueError("Checkpointer: this process has no device of the buffer's mesh")
        numbers = sorted(of_each)
        self.processes = Processes([of_each[number] for number in numbers], numbers.index(self._me))

    def check(self, where: str, state: Any) -> None:
        """Raise a ValueError if a state is not of the sharded buffer."""
        self._sharded._own_specs(where, state)

    def parts(self, state: ReplayState) -> Parts:
        """Return a sharded state's parts: each shard is one, which its device reads alone.

        Args:
          state: The sharded state. It stays valid; its rows are shared, not copied.
        """
        size = self._local.num_envs
        placed = jax.tree.map(self._placed, state.replace(sampler=None))
        leaves, structure = jax.tree.flatten(placed)
        on = [{one.device: one.data for one in leaf.addressable_shards} for leaf in leaves]
        own = [
            Part(at * size, structure.unflatten([of_leaf[device] for of_leaf in on]))
            for at, device in enumerate(self._devices[:, 0])
            if device.process_index == self._me
        ]
        return Parts(own, range(0, self.buffer.num_envs + 1, size), self.processes)

    def joined(self, state: ReplayState) -> ReplayState:
        """Return one buffer's state. Its rows are those of the sharded state.

        Args:
          state: The sharded state. It stays valid.
        """
        jax.block_until_ready(state)
        with _on_host():
            return rows.join(rows.split(state)[0], self._rest(state))

    def _rest(self, state: ReplayState) -> ReplayState:
        """Return one buffer's state without steps, the same in all processes."""
        num = self._sharded.num_shards
        rows = resize.NO_ROWS.replace(
            flags=state.rows.flags, candidate_number=state.rows.candidate_number
        )
        gathered = jax.tree.map(
            lambda leaf: self.processes.gathered(self._placed(leaf)), state.replace(rows=rows)
        )
        layout, sampler = self.buffer.layout(), gathered.sampler
        counters = jax.tree.map(lambda leaf: _of_envs(leaf, num), gathered.counters)
        streams = gathered.replace(
            counters=counters.replace(layout=layout), sampler=None, layout=layout
        )
        per_row = self.buffer.sampler.per_row(sampler)
        values = {name: self._by_place(np.asarray(leaf)) for name, leaf in per_row.items()}
        own = self._whole(self._without(sampler), self._without(self._sampler(self.buffer)))
        return _built(self.buffer, streams, own, values)

    def restored(self, example: Any, read: Callable[[Any], Any]) -> ReplayState:
        """Return a sharded state.

        Args:
          example: As for `init`.
          read: `Reading.state` as a function of `steps`, which it replaces by those that it reads.
        """
        with defer_interrupts():
            steps = self._new_steps(example)
        with _on_host():
            return self._divided(read(steps), [own for _, _, own in steps])

    def _new_steps(self, example: Any) -> list[tuple[int, int, Any]]:
        """Return zeros for the steps of this process's devices: for each run of shards its first
        env, the one after its last, and the steps."""
        mine = [[one for one in row if one.process_index == self._me] for row in self._devices]
        found, size = [], self._local.num_envs
        for num_replicas, run in itertools.groupby(range(len(mine)), lambda at: len(mine[at])):
            shards = [*run]
            if num_replicas:
                mesh = Mesh(np.array([mine[at] for at in shards]), ("shard", "replica"))
                capacity = len(shards) * self._local.capacity
                own = dataclasses.replace(
                    self._local, num_envs=len(shards) * size, capacity=capacity
                )
                init = lambda own=own: own.init(example).rows.steps
                steps = jax.jit(init, out_shardings=NamedSharding(mesh, P("shard")))()
                found.append((shards[0] * size, (shards[-1] + 1) * size, steps))
        return found

    def _divided(self, state: ReplayState, steps: list[Any]) -> ReplayState:
        """Return the sharded state.

        Args:
          state: One buffer's state, without steps.
          steps: The steps, in the memory that `_new_steps` has made. It is shared.
        """
        num, local, parts = self._sharded.num_shards, self._local, []
        kept = {"flags": state.rows.flags, "candidate_number": state.rows.candidate_number}
        old = state.replace(rows=resize.NO_ROWS.replace(**kept), sampler=None)
        old, sampler = jax.device_get((old, state.sampler))
        values = {
            name: leaf[: self.buffer.capacity].reshape(-1, num, local.num_envs)
            for name, leaf in self.buffer.sampler.per_row(sampler).items()
        }
        sampler, specs = self._without(sampler), self._without(self._sampler(local))
        for at, row in enumerate(self._devices):
            if devices := [one for one in row if one.process_index == self._me]:
                own = jax.tree.map(lambda leaf, at=at: np.split(leaf, num, -1)[at], old)
                layout = local.layout()
                own = own.replace(layout=layout, counters=own.counters.replace(layout=layout))
                per_row = {name: leaf[:, at].reshape(-1) for name, leaf in values.items()}
                made = _built(local, own, self._part(sampler, specs, at), per_row)
                made = self._sharded.local.stacked(made)
                parts += [jax.device_put(made, one) for one in devices]
        sharding = NamedSharding(self._sharded.mesh, P(self._sharded.axis))
        made = jax.tree.map(lambda *leaves: _array_of(num, sharding, leaves), *parts)
        shards_of = lambda leaves: [one.data for leaf in leaves for one in leaf.addressable_shards]
        steps = jax.tree.map(lambda *leaves: _array_of(num, sharding, shards_of(leaves)), *steps)
        return made.replace(rows=made.rows.replace(steps=steps))

    def _placed(self, leaf: Any) -> jax.Array:
        """Return a leaf of a sharded state where `init` puts it. One process moves a leaf that lies
        elsewhere; several would have to do so together, and raise a ValueError."""
        sharding = NamedSharding(self._sharded.mesh, P(self._sharded.axis))
        is_there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(
            sharding, leaf.ndim
        )
        if not is_there and self.processes.num > 1:
            raise ValueError(
                "Checkpointer: the state of several processes must lie where init puts it: move it "
                "by jax.device_put(state, NamedSharding(mesh, PartitionSpec(axis)))"
            )
        return leaf if is_there else jax.device_put(leaf, sharding)

    def _sampler(self, buffer: ReplayBuffer) -> Any:
        return jax.eval_shape(lambda: buffer.sampler.init(buffer.layout()))

    def _without(self, sampler: Any) -> Any:
        """Return a sampler's state without its values per row."""
        return resize.with_fields(sampler, dict.fromkeys(self.buffer.sampler.PER_ROW))

    def _by_place(self, values: np.ndarray) -> np.ndarray:
        """Return values per row of all shards in the order of places: position * E + env."""
        num, local = self._sharded.num_shards, self._local
        values = values.reshape(num, -1)[:, : local.capacity]
        return values.reshape(num, local.length, local.num_envs).swapaxes(0, 1).reshape(-1)

    def _whole(self, tree: Any, specs: Any) -> Any:
        """Return leaves of one buffer, of NumPy arrays of the shards' leaves one after another.

        Leaves have an axis of envs, the last; or are counters, which add up; or are equal on all
        shards, or a largest value.
        """
        num = self._sharded.num_shards

        def leaf_of(name: str, values: np.ndarray, spec: Any) -> np.ndarray:
            if values.shape == spec.shape:
                return values
            if len(spec.shape) > 1:
                return _of_envs(values, num).reshape(spec.shape)
            of_each = values.reshape(num, *spec.shape)
            if name in SUMS:  # they stay at their maximum
                most = np.iinfo(values.dtype).max
                return np.minimum(of_each.sum(axis=0, dtype=np.uint64), most).astype(values.dtype)
            return of_each.max(axis=0)

        return _mapped(leaf_of, tree, specs)

    def _part(self, tree: Any, specs: Any, at: int) -> Any:
        """Return the leaves of one shard, of one buffer's leaves."""
        num = self._sharded.num_shards

        def leaf_of(name: str, values: np.ndarray, spec: Any) -> np.ndarray:
            if values.shape == spec.shape:  # what adds up is the first shard's
                return np.zeros_like(values) if name in SUMS and at else values
            axis = next(i for i, size in enumerate(spec.shape) if size != values.shape[i])
            return np.split(values, num, axis)[at]

        return _mapped(leaf_of, tree, specs)


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Compute on the host, where there is memory for what all devices have of each row."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX runs without its CPU backend
        yield
    else:
        with jax.default_device(host):
            yield


def _built(
    buffer: ReplayBuffer, streams: ReplayState, sampler: Any, values: dict[str, Any]
) -> ReplayState:
    """Return a buffer's state, without steps.

    Args:
      buffer: The buffer.
      streams: Its state, without steps and sampler.
      sampler: Its sampler's state without values per row.
      values: Values per row, in the order of places, by name.
    """
    rest = resize.resized(buffer, streams.replace(sampler=sampler), streams)
    stored, _ = rows.split(streams)
    state, sampler = rows.join(stored, rest.replace(sampler=None)), rest.sampler
    none = jnp.zeros((buffer.num_envs, 0), jnp.int32)
    for name, own in values.items():
        sampler = resize.moved(buffer, streams, sampler, state, name, 0, own, (none, none))
    return state.replace(sampler=sampler)


def _mapped(function: Any, tree: Any, specs: Any) -> Any:
    leaves = [
        function(name.rsplit(".", 1)[-1], leaf, spec)
        for (name, leaf), spec in zip(named(tree), jax.tree.leaves(specs), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(specs), leaves)


def _array_of(num: int, sharding: NamedSharding, leaves: Sequence[jax.Array]) -> jax.Array:
    """Return one array of `num` shards, of those on the devices of this process."""
    first, *others = leaves[0].shape
    shape = num * first, *others
    return jax.make_array_from_single_device_arrays(shape, sharding, [*leaves])


def _of_envs(values: np.ndarray, num: int) -> np.ndarray:
    """Return [E] or [n, E], of [E] or [D * n, E / D], where D is `num`."""
    if values.ndim == 1:
        return values
    values = values.reshape(num, -1, values.shape[1]).swapaxes(0, 1)
    return values.reshape(len(values), -1)

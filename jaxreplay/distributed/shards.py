"""Sharded states in the form of one buffer's, in which they are saved: so any number of devices
restores any checkpoint.

Rows of a sharded state lie as those of one buffer, so they are not copied, and each process saves
those of its own devices. So do counters, and numbers of each row; other numbers of the shards are
joined. A restore reads flags and numbers of all envs on the host of each process, and computes the
trees and tables of its own devices there, one shard at a time.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.adopt import canonical, stored
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.distributed.parts import Part, Parts
from jaxreplay.distributed.processes import Processes
from jaxreplay.distributed.sharded import Sharded
from jaxreplay.storage import relayout
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

    def split(self, state: ReplayState) -> tuple[Any, Any]:
        """Return the rows of a sharded state, and the rest as one buffer's.

        Args:
          state: The sharded state. It stays valid.
        """
        local, axis = self._sharded.local, P(self._sharded.axis)
        jax.block_until_ready(state)

        beside = lambda state: local.stacked(canonical(local.own(state)))
        own = jax.tree.map(self._placed, state)
        found = jax.jit(self._sharded._mapped(beside, (axis,), axis))(own)
        found = jax.tree.map(self.processes.gathered, found)
        of_shard = jax.eval_shape(canonical, local.specs(state))["sampler"]
        for name, leaf in found["sampler"].items():
            if not of_shard[name].shape:
                is_count = name in self.buffer.sampler._all_counts()
                found["sampler"][name] = _joined(is_count, np.asarray(leaf))
        return stored(state), found

    def restored(self, example: Any, reading: Any) -> ReplayState:
        """Return a sharded state that is read from a checkpoint.

        Args:
          example: As for `init`.
          reading: A `restoring.Reading`.
        """
        buffer, local, num = self.buffer, self._local, self._sharded.num_shards
        sharding = NamedSharding(self._sharded.mesh, P(self._sharded.axis))

        # The steps: read where they lie, or all dealt to the envs anew, on the host.
        layout, flags, whole = reading.layout_for(buffer), None, None
        if relayout.stays(layout, buffer.layout()):
            with defer_interrupts():
                steps = self._new_steps(example)
            read = [
                reading.rows({"steps": own}, buffer.length, env, stop)["steps"]
                for env, stop, own in steps
            ]
            leaves_of = lambda leaves: [x.data for leaf in leaves for x in leaf.addressable_shards]
            steps = jax.tree.map(lambda *ones: _array_of(num, sharding, leaves_of(ones)), *read)
        else:
            with _on_host():
                whole = reading.state(buffer, example, None)
            steps = jax.tree.map(functools.partial(_placed_from, sharding), whole.rows.steps)
            layout = dataclasses.replace(whole.layout, sampler=None)

        # What is beside them, for all envs.
        with _on_host():
            if whole is not None:
                flags, beside = whole.rows.flags, jax.device_get(canonical(whole))
                counters, numbers = beside["counters"], beside["sampler"]
            else:
                counters, numbers = reading.beside(buffer.length)
            if flags is None and buffer.autoreset is not None:
                new = {"flags": jnp.zeros((buffer.capacity,), jnp.uint8)}
                flags = reading.rows(new, buffer.length)["flags"]
            flags = None if flags is None else np.asarray(flags)

            # Each shard of this process.
            parts = []
            layout = dataclasses.replace(layout, num_envs=local.num_envs)
            of_shard = lambda values, at: np.split(values, num)[at]
            for at, row in enumerate(self._devices):
                if devices := [one for one in row if one.process_index == self._me]:
                    stored = {
                        "steps": None,
                        "flags": None if flags is None else of_shard(flags, at),
                    }
                    own = {name: of_shard(values, at) for name, values in counters.items()}
                    known = {
                        name: of_shard(values, at)
                        if values.ndim
                        else np.zeros_like(values)
                        if name in self.buffer.sampler._all_counts() and at
                        else values
                        for name, values in numbers.items()
                    }
                    made = reading.put_together(local, layout, stored, own, known)
                    made = self._sharded.local.stacked(made)
                    parts += [jax.device_put(made, one) for one in devices]
        made = jax.tree.map(lambda *leaves: _array_of(num, sharding, leaves), *parts)
        return made.replace(rows=made.rows.replace(steps=steps))

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


def _joined(is_count: bool, values: np.ndarray) -> np.ndarray:
    """Return a number of the whole buffer, of those of the shards: their sum, or the largest."""
    if not is_count:
        return values.max()
    most = np.iinfo(values.dtype).max  # where they stay
    return np.minimum(values.sum(dtype=np.uint64), most).astype(values.dtype)


def _placed_from(sharding: NamedSharding, leaf: jax.Array) -> jax.Array:
    """Return an array of the host on the devices of this process."""
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)


def _array_of(num: int, sharding: NamedSharding, leaves: Sequence[jax.Array]) -> jax.Array:
    """Return one array of `num` shards, of those on the devices of this process."""
    first, *others = leaves[0].shape
    shape = num * first, *others
    return jax.make_array_from_single_device_arrays(shape, sharding, [*leaves])

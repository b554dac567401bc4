"""Sharded states in the form of one buffer's, in which they are saved: so any number of devices
restores any checkpoint.

Rows of a sharded state lie as those of one buffer, so they are not copied. Counters are put in
another order; the sampler's values per row, and episode tables, are built again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util.names import named
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.checkpoint import resize, rows
from jaxreplay.distributed.local import SUMS
from jaxreplay.distributed.sharded import Sharded
from jaxreplay.storage.sampleable import ReplayState


class Shards:
    """Conversion between the states of a sharded buffer and those of one buffer.

    Attributes:
      buffer: The one buffer.
    """

    def __init__(self, sharded: Sharded):
        if sharded.mesh.is_multi_process:
            raise ValueError(
                "Checkpointer: a buffer over several processes cannot be saved yet; save the parts "
                "that you can, such as the networks, and collect the rows again"
            )
        self._sharded, self._local = sharded, sharded.local.buffer
        self.buffer: ReplayBuffer = dataclasses.replace(
            sharded.buffer, platform=self._local.platform
        )
        # with automatic axes, whatever those of the user's mesh are
        mesh = Mesh(sharded.mesh.devices, sharded.mesh.axis_names)
        self._divided = NamedSharding(mesh, P(sharded.axis))
        self._replicated = NamedSharding(mesh, P())

    def check(self, where: str, state: Any) -> None:
        """Raise a ValueError if a state is not of the sharded buffer."""
        self._sharded._own_specs(where, state)

    def placement(self, example: Any) -> ReplayState:
        """Return the shardings of one buffer's state, as `restore` makes it."""
        stored, rest = rows.split(jax.eval_shape(self.buffer.init, example))
        same, divided = self._replicated, self._divided
        return rows.join(
            jax.tree.map(lambda _: divided, stored), jax.tree.map(lambda _: same, rest)
        )

    def streams(self, state: ReplayState) -> ReplayState:
        """Return a state with one buffer's rows and counters, and nothing else.

        Args:
          state: The sharded state. It stays valid; its rows are shared, not copied.
        """
        streams = jax.device_put(state.streams, self._divided)
        whole = jax.tree.map(self._of_envs, streams.stored_counters)
        streams = streams.replace(stored_counters=whole, layout=self.buffer.layout())
        return ReplayState(streams=streams, sampler=None, episodes=None)

    def joined(self, state: ReplayState) -> ReplayState:
        """Return one buffer's state.

        Args:
          state: The sharded state. It stays valid; its rows are shared, not copied.
        """
        streams = self.streams(state).streams
        values = {
            name: self._by_place(np.asarray(leaf))
            for name, leaf in self.buffer.sampler.per_row(state.sampler).items()
        }
        sampler = self._without(state.sampler)
        old = self._whole(sampler, self._without(self._sampler(self.buffer)))
        stored, _ = rows.split(ReplayState(streams=streams, sampler=None, episodes=None))
        made = _built(self.buffer, jax.device_get(streams.replace(steps=None)), old, values)
        return rows.join(stored, made)

    def divided(self, state: ReplayState) -> ReplayState:
        """Return the sharded state.

        Args:
          state: One buffer's state, placed as `placement` says. Its rows are shared.
        """
        num, num_envs = self._sharded.num_shards, self._local.num_envs
        sampler = jax.device_get(state.sampler)
        values = {
            name: np.asarray(leaf)[: self.buffer.capacity].reshape(-1, num, num_envs)
            for name, leaf in self.buffer.sampler.per_row(sampler).items()
        }
        sampler = self._without(sampler)
        own_sampler = self._without(self._sampler(self._local))
        stored, _ = rows.split(state)
        counters = jax.device_get(state.streams.stored_counters)
        parts = []
        index = self._divided.addressable_devices_indices_map((num,))
        for device, shard in index.items():
            at = shard[0].start or 0 if shard else 0
            own = jax.tree.map(lambda leaf, on=device: _on(leaf, on), stored)
            streams = state.streams.replace(
                **jax.device_get(own | {"steps": None}),
                stored_counters=jax.tree.map(
                    lambda leaf, at=at: np.split(leaf, num, axis=-1)[at], counters
                ),
                layout=self._local.layout(),
            )
            mine = {name: leaf[:, at].reshape(-1) for name, leaf in values.items()}
            made = _built(self._local, streams, self._part(sampler, own_sampler, at), mine)
            made = jax.device_put(self._sharded.local.stacked(made), device)
            parts.append(rows.join(own, made))
        sharding = NamedSharding(self._sharded.mesh, P(self._sharded.axis))

        def assembled(*leaves: jax.Array) -> jax.Array:
            first, *others = leaves[0].shape
            shape = (num * first, *others)
            return jax.make_array_from_single_device_arrays(shape, sharding, [*leaves])

        return jax.tree.map(assembled, *parts)

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

    def _of_envs(self, leaf: Any) -> np.ndarray:
        """Return [E] or [n, E], of [E] or [D * n, E / D]."""
        values = np.asarray(leaf)
        if values.ndim == 1:
            return values
        values = values.reshape(self._sharded.num_shards, -1, values.shape[1]).swapaxes(0, 1)
        return values.reshape(len(values), -1)

    def _whole(self, tree: Any, specs: Any) -> Any:
        """Return leaves of one buffer, of the shards' leaves one after another.

        Leaves have an axis of envs, the last; or are counters, which add up; or are equal on all
        shards, or a largest value.
        """
        num = self._sharded.num_shards

        def leaf_of(name: str, leaf: Any, spec: Any) -> np.ndarray:
            values = np.asarray(leaf)
            if values.shape == spec.shape:
                return values
            if len(spec.shape) > 1:
                return self._of_envs(values).reshape(spec.shape)
            of_each = values.reshape(num, *spec.shape)
            if name in SUMS:  # they stay at their maximum
                most = np.iinfo(values.dtype).max
                return np.minimum(of_each.sum(axis=0, dtype=np.uint64), most).astype(values.dtype)
            return of_each.max(axis=0)

        return _mapped(leaf_of, tree, specs)

    def _part(self, tree: Any, specs: Any, at: int) -> Any:
        """Return the leaves of one shard, of one buffer's leaves."""
        num = self._sharded.num_shards

        def leaf_of(name: str, leaf: Any, spec: Any) -> np.ndarray:
            values = np.asarray(leaf)
            if values.shape == spec.shape:  # what adds up is the first shard's
                return np.zeros_like(values) if name in SUMS and at else values
            axis = next(i for i, size in enumerate(spec.shape) if size != values.shape[i])
            return np.split(values, num, axis)[at]

        return _mapped(leaf_of, tree, specs)


def _built(buffer: ReplayBuffer, streams: Any, sampler: Any, values: dict[str, Any]) -> ReplayState:
    """Return a buffer's state, without rows.

    Args:
      buffer: The buffer.
      streams: Its streams, without steps.
      sampler: Its sampler's state without values per row.
      values: Values per row, in the order of places, by name.
    """
    old = ReplayState(streams=streams, sampler=sampler, episodes=None)
    rest = resize.resized(buffer, old, streams)
    stored, _ = rows.split(old)
    state, sampler = rows.join(stored, rest.replace(sampler=None)), rest.sampler
    none = jnp.zeros((buffer.num_envs, 0), jnp.int32)
    for name, own in values.items():
        sampler = resize.moved(buffer, streams, sampler, state, name, 0, own, (none, none))
    return rest.replace(sampler=sampler)


def _mapped(function: Any, tree: Any, specs: Any) -> Any:
    leaves = [
        function(name.rsplit(".", 1)[-1], leaf, spec)
        for (name, leaf), spec in zip(named(tree), jax.tree.leaves(specs), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(specs), leaves)


def _on(leaf: jax.Array, device: Any) -> jax.Array:
    """Return a leaf's part on a device."""
    return next(one.data for one in leaf.addressable_shards if one.device == device)

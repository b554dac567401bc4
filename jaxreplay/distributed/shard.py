"""The part of a sharded buffer on one device, inside of `jax.shard_map`.

Each shard is an ordinary buffer. It adds the steps of its own envs, and draws from its own rows;
what all shards must agree on goes through collectives: a few numbers for a batch.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util import checks, xla
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import example_of
from jaxreplay.samplers.sampler import SMALLEST
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Index, Sample, T


class _Whole(NamedTuple):
    """Numbers of all D shards; but for `share` the same on each.

    Attributes:
      share: float32[], this shard's part of the distribution; 0 if nothing is sampleable.
      reference: float32[], the probability whose weight is 1.
      can_sample: bool[].
    """

    share: jax.Array
    reference: jax.Array
    can_sample: jax.Array


class Shard(ReplayBuffer[T]):
    """One shard of a buffer: a `ReplayBuffer` of its part of the envs, the rows and the batch, for
    the inside of a `jax.shard_map`. D is the number of shards.

    `jaxreplay.sharded(...).local` makes it. Its methods take and return what those of a
    `ReplayBuffer` do, of this shard alone: steps of its envs, its part of a batch. Common to all
    shards are the key, `batch_size`, the numbers of `envs`, `size`, `can_sample`, `metrics`, and
    the largest priority. Rows of `index` count through all shards. Rows of other shards are ignored
    by `write` and `update_priorities`, are not valid in a `get`, and have no `age`.

    Args:
      capacity: Rows of this shard.
      num_envs: Number of envs of this shard. Default: 1.
      batch_size: Number of items of this shard in a sample, if `sample` is given no other.
      sampler: Chooses the rows of a sample.
      view: Reads an item around each row.
      autoreset: As for `ReplayBuffer`, as are `allow_mask`, `allow_write`, `track_episodes`,
        `num_agents` and `platform`. Default: None.
      allow_mask: Let `add` and `extend` take a mask. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows of all shards from which on `can_sample` is True.
        Default: 1.
      track_episodes: Keep the table that `episode_table` needs. Default: False.
      num_agents: Number of agents in each env. Default: one flag for each env.
      platform: Memory layout of new states. Default: that of JAX's default device.
      num_shards: D.
      axis: Name of the mesh's axis, or a tuple of names.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
      >>> buffer = jr.sharded(jr.items(capacity=8, num_envs=2, batch_size=4), mesh)
      >>> S = buffer.local
      >>> def step(state, items, key):
      ...     own = S.add(S.own(state), items)
      ...     return S.stacked(own), S.sample(own, key).experience
      >>> P = jax.sharding.PartitionSpec
      >>> specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
      >>> run = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=0)
      >>> state, batch = run(buffer.init(0.0), jnp.ones(2), jax.random.key(0))
      >>> batch.tolist()
      [1.0, 1.0, 1.0, 1.0]
    """

    num_shards: int
    axis: Any

    def _check(self) -> None:
        """Check nothing: `min_size` is of all shards, and `shard_of` has checked the parts."""

    @functools.cached_property
    def buffer(self) -> ReplayBuffer[T]:
        """The buffer of this shard, as it is without the others."""
        names = (field.name for field in dataclasses.fields(ReplayBuffer))
        own: Any = {name: getattr(self, name) for name in names} | {"min_size": 1}
        return ReplayBuffer(**own)

    def own(self, state: ReplayState) -> ReplayState:
        """Return this shard's state, of its part of the global state of a sharded buffer.

        Args:
          state: Leaves as in `ReplayState`, but scalars are [1].
        """
        return jax.tree.map(lambda leaf, spec: leaf.reshape(spec.shape), state, self.specs(state))

    def stacked(self, state: ReplayState) -> ReplayState:
        """Return this shard's part of the global state, of its state: scalars become [1].

        Args:
          state: This shard's state.
        """
        return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], state)

    def specs(self, state: ReplayState) -> ReplayState:
        """Return the shapes and dtypes of a shard's state.

        Args:
          state: The global state, or a part of it. Its layout is read, and the shapes and dtypes of
            its stored rows.
        """
        layout, example = state.layout, example_of(state.layout, state.rows.steps)

        def empty() -> ReplayState:
            sampler = () if layout.sampler is None else layout.sampler.init(layout)
            return ReplayState.empty(layout, example, sampler)

        return jax.eval_shape(empty)

    def get(
        self, state: ReplayState, index: Any, key: Key | None = None, **options: Any
    ) -> Sample[T]:
        if isinstance(index, Index):
            index = self._index("get", index)
        else:
            row, is_there = step_checks.as_rows("get", index, self.num_shards * self.capacity)
            index = jnp.where(is_there, row, -1) - self._first(self.capacity)
        return super().get(state, index, key, **options)

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        return self._agreed(super().update_priorities(state, index, priority))

    def reset_max_priority(self, state: ReplayState) -> ReplayState:
        return self._agreed(super().reset_max_priority(state))

    def adopt(self, state: ReplayState) -> ReplayState:
        return self._agreed(super().adopt(state))

    def merge(self, state: ReplayState, other: ReplayState) -> ReplayState:
        return self._agreed(super().merge(state, other))

    def size(self, state: ReplayState) -> jax.Array:
        return jax.lax.psum(super().size(state), self.axis)

    def metrics(self, state: ReplayState) -> dict[str, jax.Array]:
        own = super().metrics(state)
        counts = ("size", "num_ignored_writes", *self.sampler.counts)
        sums = {name: own[name] for name in counts if name in own}
        sums["fill"] = own["fill"] / self.num_shards
        alpha = getattr(self.sampler, "alpha", 1.0)
        if "mean_priority" in own:
            sums["mean_priority"] = own["mean_priority"] ** alpha * own["size"]
        found = self._summed(sums)
        if "mean_priority" in own:
            mean = found["mean_priority"] / jnp.maximum(found["size"], 1)
            found["mean_priority"] = mean ** (1 / alpha)
        if "max_priority" in own:
            found["max_priority"] = jax.lax.pmax(own["max_priority"], self.axis)
        return found

    def _summed(self, tree: PyTree) -> PyTree:
        """Return the sums of numbers over all shards, in the order of the shards: so they do not
        depend on the number of processes."""
        is_own = jnp.arange(self.num_shards) == jax.lax.axis_index(self.axis)
        each = jax.lax.psum(jax.tree.map(lambda x: jnp.where(is_own, x, 0), tree), self.axis)
        return jax.tree.map(lambda numbers: numbers.sum(dtype=numbers.dtype), each)

    def _checked(self, where, state, steps, mask, priority, envs=None, is_block=False):
        if envs is not None:
            envs = jnp.asarray(envs) - self._first(self.num_envs)
        return super()._checked(where, state, steps, mask, priority, envs, is_block)

    def _write(self, state, steps, mask, priority, envs) -> ReplayState:
        state = super()._write(state, steps, mask, priority, envs)
        return state if priority is None else self._agreed(state)

    def _can_sample(
        self, state: ReplayState, rows: Sampleable, probability: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        if probability is not None:
            whole = self._whole(state, rows, probability)
            return whole.can_sample & (whole.share > 0), whole
        size = self.sampler.size(state.sampler, rows)
        can_sample = (size > 0) & self.sampler.can_sample(state.sampler, rows)
        own = size, can_sample.astype(jnp.int32)
        size, can_sample = jax.lax.psum(own, self.axis)
        return (size >= self.min_size) & (can_sample > 0), None

    def _draw(self, where, state, key, batch_size, options) -> tuple[ReplayState, Sample[T]]:
        """Sample this shard's part of a batch. All shards sample equally many items, though their
        shares of the distribution differ. So an item's weight has the factor D * share."""
        if batch_size is not None:
            batch_size = part_of(where, "batch_size", batch_size, self.num_shards)
        key = jax.random.fold_in(key, jax.lax.axis_index(self.axis))
        return super()._draw(where, state, key, batch_size, options)

    def _read(self, state, row, probability, is_valid, key, reference: Any = None) -> Sample[T]:
        """Read the items of rows of this shard, with their probabilities among those of all.

        Args:
          reference: What `_whole` returned of this draw. Default: it is called.
        """
        whole = reference
        if whole is None:
            whole = self._whole(state, Sampleable.of(state), jnp.where(is_valid, probability, 0))
        share = whole.share
        is_sampled = (probability > 0) & (share > 0)
        probability = jnp.where(is_sampled, jnp.maximum(probability * share, SMALLEST), 0)
        batch = super()._read(state, row, probability, is_valid, key, whole.reference)
        is_index = lambda node: isinstance(node, Index)
        among_all = lambda node: (
            node.replace(row=node.row + self._first(self.capacity)) if is_index(node) else node
        )
        batch = jax.tree.map(among_all, batch, is_leaf=is_index)
        return batch.replace(weight=batch.weight * (self.num_shards * share))

    def _whole(self, state: ReplayState, rows: Sampleable, probability: jax.Array) -> _Whole:
        """Exchange three numbers with the other shards.

        Args:
          state: This shard's state.
          rows: Its sampleable rows.
          probability: float32[...], the probabilities of what was drawn, on this shard alone.
        """
        sampler = self.sampler
        size = sampler.size(state.sampler, rows)
        mass = jnp.where(size > 0, sampler.mass(state.sampler, rows), 0)
        # the smallest positive probability
        reference = jnp.min(jnp.where(probability > 0, probability, jnp.inf), initial=jnp.inf)
        own = [mass, size, reference]
        # one collective, of numbers that keep their bits
        mass, size, reference = jax.lax.all_gather(
            jnp.stack([jax.lax.bitcast_convert_type(number, jnp.int32) for number in own]),
            self.axis,
            axis=1,
        )
        mass, reference = (
            jax.lax.bitcast_convert_type(number, jnp.float32) for number in (mass, reference)
        )
        size = size.sum(dtype=jnp.int32)
        largest = mass.max()
        mass = mass / jnp.where(largest > 0, largest, 1)  # their sum does not overflow
        total = mass.sum()
        share = mass / jnp.where(total > 0, total, 1)
        reference = jnp.min(jnp.where(share > 0, reference * share, jnp.inf))
        own = share[jax.lax.axis_index(self.axis)]
        return _Whole(own, reference, (size >= self.min_size) & (total > 0))

    def _agreed(self, state: ReplayState) -> ReplayState:
        """Give all shards the largest priority of any, which new rows get."""
        largest = getattr(state.sampler, "max_priority", None)
        if largest is None:
            return state
        largest = xla.varying(jax.lax.pmax(largest, self.axis), self.axis)
        return state.replace(sampler=state.sampler.replace(max_priority=largest))

    def _index(self, where: str, index: Any) -> Index:
        """Return an index among all rows as one of this shard's; -1 for rows of others."""
        row = super()._index(where, index).row - self._first(self.capacity)
        is_own = (row >= 0) & (row < self.capacity)
        return index.replace(row=jnp.where(is_own, row, -1))

    def _first(self, num: int) -> jax.Array:
        """Return the number of this shard's first row, or env, among those of all shards, of which
        each has `num`."""
        return jax.lax.axis_index(self.axis) * num


def part_of(where: str, name: str, size: int, num_shards: int) -> int:
    """Return a shard's part of a number.

    Args:
      where: Name of the called function, for errors.
      name: Name of the number, for errors.
      size: The number.
      num_shards: Number of parts.

    Raises:
      ValueError: The number cannot be divided. The error names the next ones that can.
    """
    checks.check_size(where, name, size)
    part, rest = divmod(size, num_shards)
    if rest:
        fits = [part * num_shards] * (part > 0) + [(part + 1) * num_shards]
        raise ValueError(
            f"{where}: {name}={size} cannot be divided among {num_shards} devices; "
            f"{' and '.join(map(str, fits))} can"
        )
    return part


def shard_of(where: str, buffer: ReplayBuffer[T], num_shards: int) -> ReplayBuffer[T]:
    """Return the buffer of one shard.

    Args:
      where: Name of the called function, for errors.
      buffer: The buffer as a whole.
      num_shards: Number of shards.

    Raises:
      ValueError: The envs, the rows or the batch cannot be divided.
    """
    parts = {
        name: part_of(where, name, getattr(buffer, name), num_shards)
        for name in ("num_envs", "capacity", "batch_size")
    }
    return dataclasses.replace(buffer, **parts, min_size=1)

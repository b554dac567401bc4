"""The part of a sharded buffer on one device, inside of `jax.shard_map`.

Each shard is an ordinary buffer. It adds the steps of its own envs, and draws from its own rows;
what all shards must agree on goes through collectives: a few numbers for a batch.
"""

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jaxreplay._util import checks, xla
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.struct import Static
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_state, example_of
from jaxreplay.samplers.prioritized import SMALLEST
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Index, Sample, SampleOptions, T


class _Whole(NamedTuple):
    """Numbers of all D shards, the same on each.

    Attributes:
      share: float32[D], each shard's part of the distribution; 0 for all if nothing is sampleable.
      reference: float32[], the probability whose weight is 1.
      can_sample: bool[].
    """

    share: jax.Array
    reference: jax.Array
    can_sample: jax.Array


class Local(Static, Generic[T]):
    """One shard of a buffer: methods for the inside of a `jax.shard_map`. D is the number of
    shards.

    `jaxreplay.sharded(...).local` makes it.

    Args:
      buffer: The buffer of one shard, with its part of the envs, the rows and the batch.
      num_shards: D.
      axis: Name of the mesh's axis, or a tuple of names.
      min_size: Number of sampleable rows of all shards from which on `can_sample` is True.

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

    buffer: ReplayBuffer[T]
    num_shards: int
    axis: Any
    min_size: int

    def own(self, state: ReplayState) -> ReplayState:
        """Return this shard's state, of its part of the global state.

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
        leaves, structure = jax.tree.flatten(example_of(state.layout, state.rows.steps))
        rows = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return _specs(self.buffer, state.layout.platform, structure, rows)

    def add(
        self,
        state: ReplayState,
        step: PyTree,
        mask: Any = None,
        priority: Any = None,
        envs: Any = None,
    ) -> ReplayState:
        """Append one step of each of this shard's envs, as `ReplayBuffer.add` does.

        Args:
          state: This shard's state, donated.
          step: Leaves [E / D, ...].
          mask: bool[E / D]. Default: every env took a step.
          priority: float[E / D]. Default: as for `ReplayBuffer.add`, the largest of any shard.
          envs: int32[e], numbers among the envs of all shards; with it the leaves are [e, ...].
            Steps of other shards' envs are dropped. Default: all envs of this shard.

        Returns:
          The shard's new state.
        """
        state = self.buffer.add(state, step, mask, priority, envs=self._own_envs(envs))
        return self._agreed(state, priority is not None)

    def extend(
        self,
        state: ReplayState,
        steps: PyTree,
        mask: Any = None,
        priority: Any = None,
        envs: Any = None,
    ) -> ReplayState:
        """Append a block of steps, as `ReplayBuffer.extend` does.

        Args:
          state: This shard's state, donated.
          steps: Leaves [T, E / D, ...].
          mask: bool[T, E / D]. Default: every env took every step.
          priority: float[T, E / D]. Default: as for `ReplayBuffer.add`, the largest of any shard.
          envs: int32[e], as for `add`. Default: all envs of this shard.

        Returns:
          The shard's new state.
        """
        state = self.buffer.extend(state, steps, mask, priority, envs=self._own_envs(envs))
        return self._agreed(state, priority is not None)

    def end_streams(self, state: ReplayState, mask: Any = None) -> ReplayState:
        """End the unfinished episodes, as `ReplayBuffer.end_streams` does.

        Args:
          state: This shard's state, donated.
          mask: bool[E / D], False for envs that go on. Default: every env was reset.

        Returns:
          The shard's new state.
        """
        return self.buffer.end_streams(state, mask)

    def drop(self, state: ReplayState, mask: Any) -> ReplayState:
        """Give up unfinished episodes, as `ReplayBuffer.drop` does.

        Args:
          state: This shard's state, donated.
          mask: bool[E / D], True for the envs whose episode is given up.

        Returns:
          The shard's new state.
        """
        return self.buffer.drop(state, mask)

    def clear(self, state: ReplayState) -> ReplayState:
        """Remove all rows.

        Args:
          state: This shard's state, donated.

        Returns:
          The shard's new state.
        """
        return self.buffer.clear(state)

    def adopt(self, state: ReplayState) -> ReplayState:
        """Make this shard's part of another sharded buffer's state this buffer's, as
        `ReplayBuffer.adopt` does. Streams stay on their device.

        Args:
          state: The part of the global state of a buffer with as many shards.

        Returns:
          This shard's state.
        """
        layout = state.layout
        sampler = () if layout.sampler is None else layout.sampler.init(layout)
        specs = jax.eval_shape(
            lambda: ReplayState.empty(layout, example_of(layout, state.rows.steps), sampler)
        )
        own = jax.tree.map(lambda leaf, spec: leaf.reshape(spec.shape), state, specs)
        return self._agreed(self.buffer.adopt(own), True)

    def sample(
        self,
        state: ReplayState,
        key: Key,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> Sample[T]:
        """Sample this shard's part of a batch.

        Args:
          state: This shard's state.
          key: Random key, the same on all shards; consumed.
          batch_size: Number of items of all shards B, static. Default: the buffer's.
          options: As for `ReplayBuffer.sample`.

        Returns:
          The items, leaves [B / D, ...]. Rows of `index` count through all shards.
        """
        size = self.buffer.batch_size
        if batch_size is not None:
            size = part_of("sample", "batch_size", batch_size, self.num_shards)
        state = check_state("sample", self.buffer, state)
        return self._sampled(state, key, size, step_checks.of_call("sample", self.buffer, options))

    def write(self, state: ReplayState, index: Index, values: Any) -> ReplayState:
        """Overwrite leaves of sampled rows, as `ReplayBuffer.write` does.

        Args:
          state: This shard's state, donated.
          index: `batch.index` of this shard's items.
          values: As for `ReplayBuffer.write`.

        Returns:
          The shard's new state.
        """
        return self.buffer.write(state, self._own_index(index), values)

    def map_rows(
        self, state: ReplayState, function: Any, *arguments: Any, block: int = 65_536
    ) -> ReplayState:
        """Compute leaves of all rows of this shard anew, as `ReplayBuffer.map_rows` does.

        Args:
          state: This shard's state, donated.
          function: As for `ReplayBuffer.map_rows`.
          arguments: Further arguments of the function.
          block: Number of rows that are computed at once. Default: 65,536.

        Returns:
          The shard's new state.
        """
        return self.buffer.map_rows(state, function, *arguments, block=block)

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        """Set the priorities of rows of this shard.

        Rows of other shards are ignored, and count as stale.

        Args:
          state: This shard's state, donated.
          index: `batch.index` of this shard's part of a batch, leaves [B / D].
          priority: float[B / D], at least 0.

        Returns:
          The shard's new state.
        """
        index = self._own_index(index)
        return self._agreed(self.buffer.update_priorities(state, index, priority), True)

    def size(self, state: ReplayState) -> jax.Array:
        """Return the number of sampleable rows of all shards, int32[].

        Args:
          state: This shard's state.
        """
        return jax.lax.psum(self.buffer.size(state), self.axis)

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Return whether a sample of all shards is valid, bool[].

        Args:
          state: This shard's state.
        """
        can_sample = self.buffer.can_sample(state).astype(jnp.int32)
        size, can_sample = jax.lax.psum((self.buffer.size(state), can_sample), self.axis)
        return (size >= self.min_size) & (can_sample > 0)

    def metrics(self, state: ReplayState) -> dict[str, jax.Array]:
        """Return figures to log, of all shards together, as `Sharded.metrics` does.

        Args:
          state: This shard's state.
        """
        own = self.buffer.metrics(state)
        counts = ("size", "num_ignored_writes", *self.buffer.sampler.counts)
        sums = {name: own[name] for name in counts if name in own}
        sums["fill"] = own["fill"] / self.num_shards
        alpha = getattr(self.buffer.sampler, "alpha", 1.0)
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

    def _sampled(
        self, state: ReplayState, key: Key, size: int, buffer: ReplayBuffer[T]
    ) -> Sample[T]:
        """Sample `size` items from this shard's rows, by its buffer with parameters of this call.

        All shards sample equally many, though their shares of the distribution differ. So an item's
        weight has the factor D * share.
        """
        sampler, place = buffer.sampler, jax.lax.axis_index(self.axis)
        key = jax.random.fold_in(key, place)
        rows = Sampleable.of(state)
        _, row, probability = sampler.sample(state.sampler, rows, key, size)
        whole = self._whole(state, rows, probability)
        share = whole.share[place]

        # The probability of each item among the rows of all shards.
        is_sampled = (probability > 0) & (share > 0)
        probability = jnp.where(is_sampled, jnp.maximum(probability * share, SMALLEST), 0)
        is_valid = whole.can_sample & is_sampled
        batch = buffer._read(state, row, probability, is_valid, key, whole.reference)
        is_index = lambda node: isinstance(node, Index)
        among_all = lambda node: (
            node.replace(row=node.row + self._first_row()) if is_index(node) else node
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
        sampler = self.buffer.sampler
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
        return _Whole(share, reference, (size >= self.min_size) & (total > 0))

    def _agreed(self, state: ReplayState, is_changed: bool) -> ReplayState:
        """Give all shards the largest priority of any, which new rows get."""
        largest = getattr(state.sampler, "max_priority", None)
        if not is_changed or largest is None:
            return state
        largest = xla.varying(jax.lax.pmax(largest, self.axis), self.axis)
        return state.replace(sampler=state.sampler.replace(max_priority=largest))

    def _own_index(self, index: Any) -> Any:
        """Return an index among all rows as one of this shard's; -1 for rows of others. Anything
        else stays, for the buffer's error."""
        if not isinstance(index, Index):
            return index
        row = index.row - self._first_row()
        is_own = (row >= 0) & (row < self.buffer.capacity)
        return index.replace(row=jnp.where(is_own, row, -1))

    def _own_envs(self, envs: Any) -> Any:
        """Return numbers among all envs as those of this shard's; others are out of range."""
        return None if envs is None else envs - jax.lax.axis_index(self.axis) * self.buffer.num_envs

    def _first_row(self) -> jax.Array:
        """Return the number of this shard's first row among all rows."""
        return jax.lax.axis_index(self.axis) * self.buffer.capacity


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


@functools.lru_cache(maxsize=256)
def _specs(buffer: ReplayBuffer, platform: str, structure: Any, rows: Any) -> ReplayState:
    leaves = [jax.ShapeDtypeStruct(*row) for row in rows]
    example = jax.tree.unflatten(structure, leaves)
    return jax.eval_shape(functools.partial(buffer._empty, platform=platform), example)

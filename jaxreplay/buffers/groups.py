"""Groups of completions of one prompt, for learners that run beside their actors (GRPO)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.names import has_shapes, named, spec_text
from jaxreplay._util.serialization import tell_flax
from jaxreplay._util.struct import Node, Static
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.memory import Memory, check_fits, memory_of
from jaxreplay.buffers.state_checks import check_state, row_of
from jaxreplay.samplers.sampler import plus
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.views.view import zeroed

STRATEGIES = ("random", "recent", "variance")
_LARGEST = jnp.iinfo(jnp.int32).max


class GroupsState(Node):
    """State of a buffer of groups. C is its capacity in groups, G their size.

    `add`, `close`, `pop` and `clear` donate it: use the state that they return.

    Attributes:
      items: Stored completions, pytree with leaves [C * G, ...].
      group: int32[C], number of the group in each place; -1 for none.
      num_items: int32[C], completions that have come, at most G.
      is_closed: bool[C], True where `close` ended the group with fewer completions.
      num_uses: int32[C], how often the group was returned.
      version: int32[C], the oldest version among the completions.
      variance: float32[C], variance of the rewards that have come; 0 without `reward_key`.
      num_late: int32[], completions that were dropped: their group was overwritten by a newer one,
        or was complete or closed. It stops at 2^31 - 1.
    """

    items: PyTree
    group: jax.Array
    num_items: jax.Array
    is_closed: jax.Array
    num_uses: jax.Array
    version: jax.Array
    variance: jax.Array
    num_late: jax.Array

    def __repr__(self) -> str:
        """Show sizes, such as `GroupsState(4 groups x 8 rows, item f32[3], 16 kB)`."""
        if not has_shapes(self):
            return super().__repr__()
        *population, num_groups = self.group.shape
        num_rows = stored_arrays.stored_leaves(self.items)[0].shape[len(population)]
        sizes = num_groups, num_rows // num_groups
        return stored_arrays.shown(self, population, sizes, "item", self.items, what="group")


class GroupBatch(Node):
    """A batch of B groups of G completions.

    Attributes:
      experience: The completions, pytree with leaves [B, G, ...]; 0 where there is none, so that a
        mask of tokens is False there.
      group: int32[B], numbers of the groups; -1 where not valid.
      version: int32[B], the oldest version among a group's completions; 0 where not valid.
      num_uses: int32[B], how often the group was returned, this time included; 0 where not valid.
      is_valid: bool[B], False where there was no group left to return.
      mask: bool[B, G], True where there is a completion: in groups that are valid, all but those
        that were missing when `close` ended the group.
    """

    experience: Any
    group: jax.Array
    version: jax.Array
    num_uses: jax.Array
    is_valid: jax.Array
    mask: jax.Array


class Groups(Static):
    """Buffer of groups of completions, which come one by one and are returned when complete.

    A group that will not become complete, since workers failed, waits until a newer one takes its
    place, and is never returned; `close` ends it at once, to be returned with the completions that
    have come, or given up.

    Groups have numbers that count upwards, such as those of prompts. Number n lies in place
    `n mod capacity`: a newer group takes the place of an older one. A version counts the updates of
    the policy that made a completion. Each call compares a few numbers of every group, and reads or
    writes its own completions alone. Methods are pure functions of the state. Axes: N completions
    of a call, B groups of a batch, G completions of a group.

    Args:
      group_size: Number G of completions in a group, at least 1.
      capacity: Number of groups, complete and incomplete ones.
      batch_size: Number B of groups in a batch, if `pop` is given no other.
      max_uses: How often a group may be returned, at least 1. Default: 1.
      strategy: Which groups are returned, each at most once a batch. "random": all with the same
        probability. "recent": those with the largest numbers. "variance": in proportion to the
        variance of their rewards, and none without variance. Default: "random".
      reward_key: Name of the leaf with a completion's reward, float[], which "variance" needs.
        Default: "reward" with "variance", else none.

    Raises:
      ValueError: An argument is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> groups = jr.Groups(group_size=2, capacity=4, batch_size=1)
      >>> state = groups.init({"tokens": jnp.zeros(3, jnp.int32)})
      >>> tokens = {"tokens": jnp.arange(9, dtype=jnp.int32).reshape(3, 3)}
      >>> state = groups.add(state, tokens, group=jnp.array([0, 1, 0]), version=jnp.zeros(3, int))
      >>> state, batch = groups.pop(state, jax.random.key(0), version=2, max_staleness=3)
      >>> batch.group.tolist(), batch.experience["tokens"].tolist()  # group 1 waits for a second
      ([0], [[[0, 1, 2], [6, 7, 8]]])

    References:
      Shao et al., "DeepSeekMath" (2024), https://arxiv.org/abs/2402.03300, section 4, for groups.
    """

    group_size: int
    capacity: int
    batch_size: int
    max_uses: int = 1
    strategy: str = "random"
    reward_key: str | None = None
    _kind = GroupsState  # of its states

    def _check(self) -> None:
        for name in ("group_size", "capacity", "batch_size", "max_uses"):
            checks.check_size("Groups", name, getattr(self, name))
        if self.strategy not in STRATEGIES:
            raise ValueError(f"Groups: strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        if self.strategy == "variance" and self.reward_key is None:
            object.__setattr__(self, "reward_key", "reward")

    def init(self, example: PyTree) -> GroupsState:
        """Make an empty state.

        Args:
          example: One completion: any pytree. Arrays or `jax.ShapeDtypeStruct`s: only structure,
            shapes and dtypes are read.

        Returns:
          The state, on JAX's default device.

        Raises:
          ValueError: The example has no leaves, or lacks a reward, float[], that is needed.
          MemoryError: The device has too little memory for the buffer.
        """
        tell_flax()
        example = step_checks.as_example("init", example)
        leaves = dict(named(example))
        reward = leaves.get(self.reward_key or "")
        if self.reward_key is not None and (reward is None or reward.shape):
            has = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in leaves.items())
            raise ValueError(
                f"init: a completion needs its reward, a leaf {self.reward_key!r} with the shape "
                f"[]; it has {has}"
            )
        if not checks.is_tracing():
            check_fits("init", self.memory(example))
        return self._empty(example)

    def memory(self, example: PyTree) -> Memory:
        """Return the memory in bytes that `init` will take, leaf by leaf, and allocate nothing.

        Args:
          example: One completion, as for `init`.
        """
        shapes = jax.eval_shape(self._empty, step_checks.as_example("memory", example))
        return memory_of(shapes, self.group_size * self.capacity)

    def _empty(self, example: PyTree) -> GroupsState:
        rows = lambda leaf: stored_arrays.zeros(self.group_size * self.capacity, leaf)
        zeros = lambda: jnp.zeros((self.capacity,), jnp.int32)
        return GroupsState(
            items=jax.tree.map(rows, example),
            group=zeros() - 1,
            num_items=zeros(),
            is_closed=jnp.zeros((self.capacity,), bool),
            num_uses=zeros(),
            version=zeros(),
            variance=jnp.zeros((self.capacity,), jnp.float32),
            num_late=jnp.int32(0),
        )

    def add(self, state: GroupsState, items: PyTree, group: Any, version: Any) -> GroupsState:
        """Store completions in their groups.

        A completion is dropped and counted if a newer group has taken its group's place, or its
        group is complete or closed.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          items: Completions, pytree with leaves [N, ...] and the dtypes of the example.
          group: int32[N], numbers of their groups, less than 2^31, in any order, several of one
            group too. A negative number is for padding: its completion is dropped.
          version: int32[N] or int32[], that of the policy which made them.

        Returns:
          The new state.

        Raises:
          ValueError: An argument does not fit the buffer; the error names the leaf.
        """
        state = check_state("add", self, state)
        group = jnp.asarray(group)
        is_list = group.ndim == 1 and jnp.issubdtype(group.dtype, jnp.integer)
        if not is_list or jnp.shape(version) not in ((), group.shape):
            raise ValueError(
                "add: group must be int32[N] and version int32[N] or int32[], got "
                f"{spec_text(group)} and {spec_text(jnp.asarray(version))}"
            )
        what = "completions, leaves [len(group), ...]"
        step_checks.check_block("add", items, state.items, group.shape, what)
        group = group.astype(jnp.int32)
        version = jnp.broadcast_to(version, group.shape).astype(jnp.int32)

        # The newest group of each place takes it.
        none, is_one = self.capacity, group >= 0
        _, slot = ring.divide(jnp.maximum(group, 0), self.capacity)
        target = jnp.where(is_one, slot, none)
        newest = state.group.at[target].max(group, mode="drop")
        is_new, zero = newest != state.group, jnp.zeros_like(newest)
        num_items = jnp.where(is_new, zero, state.num_items)
        is_closed = state.is_closed & ~is_new
        # The place of each completion among those of its group, in the order of the call.
        is_kept = is_one & (group == newest[slot])
        kept_slot = jnp.where(is_kept, slot, none)
        order = jnp.argsort(kept_slot, stable=True)
        sorted_slot = kept_slot[order]
        nth = ring.arange(len(group))
        opens = jnp.concatenate([jnp.ones(1, bool), sorted_slot[1:] != sorted_slot[:-1]])
        rank = nth - jax.lax.cummax(jnp.where(opens, nth, 0))
        place = num_items[slot] + jnp.zeros_like(group).at[order].set(rank)
        is_kept &= (place < self.group_size) & ~is_closed[slot]
        target = jnp.where(is_kept, slot, none)
        row = jnp.where(is_kept, slot * self.group_size + place, none * self.group_size)
        items = stored_arrays.tree_map(
            lambda leaf, new: stored_arrays.write(leaf, row, jnp.asarray(new)), state.items, items
        )
        num_items = num_items.at[target].add(1, mode="drop")
        oldest = jnp.where(is_new, _LARGEST, state.version).at[target].min(version, mode="drop")
        num_late, variance = (is_one & ~is_kept).sum(dtype=jnp.int32), state.variance
        if self.reward_key is not None:
            reward = dict(named(items, is_leaf=stored_arrays.is_compound))[self.reward_key]
            rows, is_one = self._rows(slot, jnp.maximum(num_items[slot], 1))
            of_group = stored_arrays.read(reward, rows).astype(jnp.float32)
            # less the first one: the mean of equal numbers is not exactly theirs
            of_group = jnp.where(is_one, of_group - of_group[:, :1], 0)
            of_group = jnp.var(of_group, axis=1, where=is_one)
            variance = variance.at[target].set(of_group, mode="drop")
        return state.replace(
            items=items,
            group=newest,
            num_items=num_items,
            is_closed=is_closed,
            num_uses=jnp.where(is_new, zero, state.num_uses),
            version=oldest,
            variance=variance,
            num_late=plus(state.num_late, num_late),
        )

    def close(self, state: GroupsState, group: Any, min_items: Any = None) -> GroupsState:
        """End groups whose missing completions will not come, as those of workers that failed.

        A group with `min_items` completions is returned with these, as a complete one is; the
        others are masked by `mask` of the batch. A group with fewer is given up, and never
        returned. Completions of both that come later are dropped and counted. Complete groups, and
        numbers of which the buffer has no completion, are left as they are.

        Args:
          state: Donated: jit with `donate_argnums=0`.
          group: int32[N], numbers of the groups, in any order.
          min_items: int32[], number of completions from which on a group is returned, at least 1.
            Default: `group_size`, so that all of them are given up.

        Returns:
          The new state.

        Raises:
          ValueError: `group` is no list of numbers.

        Example:
          >>> import jax, jax.numpy as jnp, jaxreplay as jr
          >>> groups = jr.Groups(group_size=3, capacity=4, batch_size=2)
          >>> state = groups.init({"reward": 0.0})
          >>> rewards = {"reward": jnp.array([1.0, 2.0, 3.0])}
          >>> state = groups.add(state, rewards, group=jnp.array([0, 1, 1]), version=0)
          >>> state = groups.close(state, jnp.array([0, 1]), min_items=2)  # group 0 is given up
          >>> state, batch = groups.pop(state, jax.random.key(0))
          >>> batch.group.tolist(), batch.mask[0].tolist()
          ([1, -1], [True, True, False])
        """
        state = check_state("close", self, state)
        group = jnp.asarray(group)
        if group.ndim != 1 or not jnp.issubdtype(group.dtype, jnp.integer):
            raise ValueError(f"close: group must be int32[N], got {spec_text(group)}")
        least = jnp.maximum(self.group_size if min_items is None else min_items, 1)
        _, slot = ring.divide(jnp.maximum(group, 0).astype(jnp.int32), self.capacity)
        waits = ~state.is_closed & (state.num_items < self.group_size)
        waits = waits[slot] & (state.group[slot] == group)
        target = jnp.where(waits, slot, self.capacity)
        given_up = jnp.where(state.num_items[slot] < least, target, self.capacity)
        return state.replace(
            is_closed=state.is_closed.at[target].set(True, mode="drop"),
            num_uses=state.num_uses.at[given_up].set(self.max_uses, mode="drop"),
        )

    def pop(
        self,
        state: GroupsState,
        key: Key,
        batch_size: int | None = None,
        *,
        version: Any = None,
        max_staleness: Any = None,
    ) -> tuple[GroupsState, GroupBatch]:
        """Return a batch of complete groups, or of those that `close` ended, each at most once, and
        count their uses.

        Args:
          state: Donated: jit with `donate_argnums=0`.
          key: Random key, consumed.
          batch_size: Number of groups B, static. Default: the buffer's.
          version: int32[], that of the learner's policy. Required with `max_staleness`. Default:
            none.
          max_staleness: int32[], how many versions older a group's oldest completion may be.
            Default: any number.

        Returns:
          The new state, and the batch.

        Raises:
          ValueError: `max_staleness` is given without `version`, or `batch_size` exceeds
            `capacity`.
        """
        state = check_state("pop", self, state)
        batch_size = self.batch_size if batch_size is None else batch_size
        checks.check_size("pop", "batch_size", batch_size)
        if batch_size > self.capacity:
            raise ValueError(f"pop: batch_size={batch_size} exceeds capacity={self.capacity}")
        is_left = self._is_left("pop", state, version, max_staleness)
        if self.strategy == "recent":
            order = jnp.where(is_left, state.group, -1)
        else:  # without replacement, by the largest of noisy log probabilities
            order = jax.random.gumbel(key, (self.capacity,))
            order += jnp.log(state.variance) if self.strategy == "variance" else 0
            order = jnp.where(is_left, order, -jnp.inf)
        _, slot = jax.lax.top_k(order, batch_size)
        is_valid = is_left[slot]
        uses = state.num_uses.at[slot].add(is_valid)
        rows, is_there = self._rows(slot, state.num_items[slot])
        items = stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, rows), state.items)
        mask = is_valid[:, None] & is_there
        batch = GroupBatch(
            experience=zeroed(items, mask),
            group=jnp.where(is_valid, state.group[slot], -1),
            version=jnp.where(is_valid, state.version[slot], 0),
            num_uses=jnp.where(is_valid, uses[slot], 0),
            is_valid=is_valid,
            mask=mask,
        )
        return state.replace(num_uses=uses), batch

    def size(self, state: GroupsState, version: Any = None, max_staleness: Any = None) -> jax.Array:
        """Return the number of groups that `pop` may return: int32[].

        Args:
          state: The state.
          version: As for `pop`. Default: none.
          max_staleness: As for `pop`. Default: any number.
        """
        state = check_state("size", self, state)
        return self._is_left("size", state, version, max_staleness).sum(dtype=jnp.int32)

    def clear(self, state: GroupsState) -> GroupsState:
        """Remove all groups: those that have begun are never returned.

        Args:
          state: Donated.

        Returns:
          The new state.
        """
        state = check_state("clear", self, state)
        return state.replace(num_uses=jnp.full_like(state.num_uses, self.max_uses))

    def _is_left(self, where: str, state: GroupsState, version: Any, staleness: Any) -> jax.Array:
        is_left = state.is_closed | (state.num_items == self.group_size)
        is_left &= state.num_uses < self.max_uses
        if self.strategy == "variance":
            is_left &= state.variance > 0
        if staleness is None:
            return is_left
        if version is None:
            raise ValueError(f"{where}: max_staleness needs version=, that of the learner's policy")
        return is_left & (version - state.version <= staleness)

    def _empty_like(self, state: GroupsState) -> GroupsState:
        """Return an empty state for the same leaves."""
        return self._empty(row_of(state.items))

    def _rows(self, slot: jax.Array, num_items: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the rows of groups, int32[B, G], and which of them have a completion, bool[B, G].

        Args:
          slot: int32[B], the places of the groups.
          num_items: int32[B], their numbers of completions.
        """
        nth = ring.arange(self.group_size)
        return slot[:, None] * self.group_size + nth, nth < num_items[:, None]

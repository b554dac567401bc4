"""A sum tree: sample a leaf in proportion to its mass, in O(log capacity).

The sums cannot drift. Every parent is recomputed from its children, never changed by a difference,
so that the total is the sum of the leaves after any number of updates. The tree is wide: a node has
`fan_out` children, which lie side by side, so that a level takes one short read.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util.struct import Node, Static
from jaxreplay.storage import platforms, ring

_LARGEST_FRACTION = 1 - 2.0**-24  # the largest float32 below 1
# a linear congruential step modulo 2^32: fresh top bits for each level
_MULTIPLIER, _INCREMENT = 747796405, 2891336453
_MOST_IN_LINE = 32  # children; with 128, XLA compiled for 12 s
# Prefix sums of up to so many children are unrolled: half the time of the parallel form on a CPU.
_UNROLLED_FAN_OUT = 16


class SumTreeState(Node):
    """Masses of the leaves and of all nodes above them but the root.

    The size of each level is padded to a multiple of the fan-out. Leaves, their parents, and the
    children of the root have an array each. The levels between share one, since each array of a
    state takes 2 us of a call. With the parents in it, XLA would read it with several threads, as
    any array of 512 KiB or more; with the children of the root, which every write reads first
    (`SumTree._is_ready`), XLA would copy it.

    Attributes:
      sums: Tuple of up to four arrays float32[n]: the masses of the leaves; the sums of their
        parents; the sums of the levels above, one after another; the sums of the children of the
        root. A node is the sum of its `fan_out` children in the level before.
    """

    sums: tuple[jax.Array, ...]

    @property
    def fan_out(self) -> int:
        """Number of children of a node."""
        return self.sums[-1].shape[0]


class SumTree(Static):
    """A sum tree over the leaves 0 to `capacity - 1`, whose masses are finite and at least 0.

    Args:
      capacity: Number of leaves, at least 1.
      fan_out: Number of children of a node, at least 2. Default: 0, with which `init` chooses by
        JAX's default device: 8 on a CPU, 32 on a GPU, 128 on a TPU.
      in_line: Read and add the children of a node one after another, without a reduction. A GPU
        then runs one kernel a level instead of three; a CPU takes five times as long. Default:
        False.

    Raises:
      ValueError: `capacity` is below 1, or `fan_out` is 1 or negative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> tree = jr.samplers.SumTree(capacity=1000)
      >>> state = tree.set(tree.init(), jnp.array([3, 500]), jnp.array([2.0, 6.0]))
      >>> leaf, mass = tree.find(state, jax.random.uniform(jax.random.key(0), (256,)))
      >>> sorted(set(leaf.tolist()))
      [3, 500]

    References:
      Schaul et al., "Prioritized Experience Replay" (2016),
      https://arxiv.org/abs/1511.05952, appendix B.2.1, which has the binary
      tree.
    """

    capacity: int
    fan_out: int = 0
    in_line: bool = False

    def _check(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"SumTree: capacity must be at least 1, got {self.capacity}")
        if self.fan_out < 2 and self.fan_out != 0:
            raise ValueError(f"SumTree: fan_out must be at least 2, got {self.fan_out}")

    @classmethod
    def on(cls, traits: platforms.Traits, capacity: int, fan_out: int = 0) -> "SumTree":
        """Make a tree in the form that is fast on a platform.

        Args:
          traits: Traits of the platform, `layout.traits` in a sampler.
          capacity: Number of leaves, at least 1.
          fan_out: Number of children of a node, at least 2. Default: 0, which chooses 8 on a CPU,
            32 on a GPU and 128 on a TPU.

        Returns:
          The tree.
        """
        fan_out = fan_out or traits.fan_out
        in_line = traits.in_line and fan_out <= _MOST_IN_LINE
        return cls(capacity=capacity, fan_out=fan_out, in_line=in_line)

    def init(self) -> SumTreeState:
        """Return a state where all masses are 0."""
        fan_out = self.fan_out or platforms.traits_of(platforms.default()).fan_out
        return SumTreeState(tuple(jnp.zeros((n,), jnp.float32) for n in self._array_sizes(fan_out)))

    def of(self, mass: jax.Array) -> SumTreeState:
        """Return a state with the masses of all leaves.

        Args:
          mass: float32[capacity], finite and at least 0.

        Returns:
          The state.
        """
        state = self.init()
        leaves = jax.lax.dynamic_update_slice(state.sums[0], mass, (0,))
        return self._with_parents(state, leaves, jnp.int32(0), self.capacity)

    def set(
        self, state: SumTreeState, index: jax.Array, mass: jax.Array, are_distinct: bool = False
    ) -> SumTreeState:
        """Set the masses of leaves.

        An index outside of `[0, capacity)` is ignored. So is a mass that is negative or not finite.
        If a leaf appears more than once, its largest mass counts, in any order.

        Args:
          state: The tree's state.
          index: int32[B], the leaves.
          mass: float32[B], their new masses.
          are_distinct: True is faster, and checks less: no leaf appears twice, no index is below 0,
            and all masses are finite and at least 0. Default: False.

        Returns:
          The new state.
        """
        self._check_state("set", state)
        is_valid = (index < self.capacity) & self._is_ready(state)
        if not are_distinct:
            is_valid &= (index >= 0) & jnp.isfinite(mass) & (mass >= 0)
        index, mass = _index(state, is_valid, index), mass.astype(jnp.float32)
        if are_distinct:
            leaves = state.sums[0].at[index].set(mass, unique_indices=True, mode="drop")
        else:
            # Set to zero, then take the maximum. The zeros must depend on the masses: otherwise XLA
            # copies the leaves between the two scatters (measured).
            leaves = state.sums[0].at[index].set(jnp.where(mass < 0, mass, 0), mode="drop")
            leaves = leaves.at[index].max(mass, mode="drop")
        return self._with_parents(state, leaves, jnp.where(is_valid, index, 0))

    def set_range(
        self, state: SumTreeState, start: jax.Array, mass: jax.Array, where: jax.Array
    ) -> SumTreeState:
        """Set the masses of neighbouring leaves `start, start + 1, ...`, which wrap around to 0.

        It is faster than `set`, since neighbours share their parents.

        Args:
          state: The tree's state.
          start: int32[], in `[0, capacity)`, the first leaf.
          mass: float32[L], the new masses, finite and at least 0; L is at most the capacity.
          where: bool[L]. False keeps the mass of a leaf.

        Returns:
          The new state.
        """
        self._check_state("set_range", state)
        length = mass.shape[0]
        index = ring.wrap(start + ring.arange(length), self.capacity)
        index = _index(state, where & self._is_ready(state), index)
        leaves = state.sums[0].at[index].set(mass, unique_indices=True, mode="drop")
        start = jnp.where(self._is_ready(state), start, 0)
        return self._with_parents(state, leaves, start, length)

    def get(self, state: SumTreeState, index: jax.Array) -> jax.Array:
        """Return the masses of leaves.

        Args:
          state: The tree's state.
          index: int32[...], the leaves, in `[0, capacity)`.

        Returns:
          float32[...], of the shape of `index`.
        """
        self._check_state("get", state)
        return state.sums[0].at[index].get(mode="promise_in_bounds")

    def total(self, state: SumTreeState) -> jax.Array:
        """Return the sum of all masses.

        Args:
          state: The tree's state.

        Returns:
          float32[].
        """
        self._check_state("total", state)
        return state.sums[-1].sum()

    def find(
        self, state: SumTreeState, target: jax.Array, word: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Find the leaf in which each target lies if all masses are laid end to end.

        The search never enters a node without mass, whatever the target and the rounding. A float32
        target has 24 bits, too few to reach a million leaves evenly. With the further random bits
        of `word`, each level fills in the bits that the target lacks.

        Args:
          state: The tree's state.
          target: float32[B], in [0, 1], as a fraction of the total.
          word: uint32[B], 32 more random bits for each target. Default: no more bits.

        Returns:
          int32[B], the leaves; float32[B], their masses, 0 if the tree is empty. In the program,
          the leaf depends on the mass. A later write to the leaf is therefore ordered after this
          read, so XLA need not copy the tree.
        """
        node = jnp.zeros(target.shape, jnp.int32)
        mass = jnp.broadcast_to(self.total(state), target.shape)
        rest = target.astype(jnp.float32) * mass
        fan_out = state.fan_out
        for which, start, _ in reversed(self._levels(fan_out)):
            level, first = state.sums[which], start // fan_out
            if word is not None:
                word, rest = _fill_in(word, rest, mass)
            if self.in_line:
                child, rest, mass = self._choose_in_line(
                    [_child(level, first + node, fan_out, kth) for kth in range(fan_out)], rest
                )
            else:
                child, rest, mass = self._choose(
                    level.reshape(-1, fan_out).at[first + node].get(mode="promise_in_bounds"), rest
                )
            node = node * fan_out + child
        return jnp.where(mass >= 0, node, self.capacity), mass

    def _check_state(self, where: str, state: SumTreeState) -> None:
        """Raise a ValueError for the state of a tree of another shape, where leaves lie
        elsewhere."""
        shapes, fan_out = [array.shape for array in state.sums], state.fan_out
        is_own = fan_out > 1 and self.fan_out in (0, fan_out)
        is_own = is_own and shapes == [(size,) for size in self._array_sizes(fan_out)]
        if not is_own:
            raise ValueError(
                f"SumTree.{where}: the state is not of this tree, {self}: its sums have the shapes "
                f"{shapes}; use the state of this tree's init()"
            )

    def _choose(
        self, children: jax.Array, rest: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Choose the last child with mass that begins at or before `rest`.

        Args:
          children: float32[B, fan_out], masses of the children, laid end to end.
          rest: float32[B], the target's distance from the start of the first child.

        Returns:
          int32[B], the child; float32[B], the target's distance from its start; float32[B], its
          mass.
        """
        kth = ring.arange(children.shape[1])
        begins = self._begins(children)
        # XLA does not compute reductions again in each of their uses. Selects unrolled over the
        # children took 5x as long.
        child = jnp.max(jnp.where((children > 0) & (begins <= rest[:, None]), kth, 0), axis=1)
        if children.shape[1] > _UNROLLED_FAN_OUT:  # as on a TPU, which reads elements slowly
            is_chosen = kth == child[:, None]
            begin, mass = (
                jnp.sum(jnp.where(is_chosen, values, 0), axis=1) for values in (begins, children)
            )
        else:  # a CPU reads one element in half the time that it adds eight with a mask
            begin, mass = (
                jnp.take_along_axis(values, child[:, None], axis=1, mode="promise_in_bounds")[:, 0]
                for values in (begins, children)
            )
        return child, jnp.clip(rest - begin, 0, mass * _LARGEST_FRACTION), mass

    def _choose_in_line(
        self, children: list[jax.Array], rest: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the result of `_choose`, computed child by child, without reductions."""
        child, end, begin, mass = jnp.zeros(rest.shape, jnp.int32), *([jnp.zeros_like(rest)] * 3)
        for kth, own in enumerate(children):
            is_later = (own > 0) & (end <= rest)
            child, begin, mass = (
                jnp.where(is_later, kth, child),
                jnp.where(is_later, end, begin),
                jnp.where(is_later, own, mass),
            )
            end = end + own
        return child, jnp.clip(rest - begin, 0, mass * _LARGEST_FRACTION), mass

    def _begins(self, children: jax.Array) -> jax.Array:
        """Return the start of each child if they are laid end to end: [B, fan_out]."""
        if children.shape[1] > _UNROLLED_FAN_OUT:
            return jnp.cumsum(children, axis=1) - children
        begins = [jnp.zeros_like(children[:, 0])]
        for k in range(children.shape[1] - 1):
            begins.append(begins[-1] + children[:, k])
        return jnp.stack(begins, axis=1)

    def _with_parents(
        self,
        state: SumTreeState,
        leaves: jax.Array,
        changed: jax.Array,
        length: int | None = None,
    ) -> SumTreeState:
        """Recompute parents level by level, from changed leaves up.

        Args:
          state: The tree's state before the change.
          leaves: float32[n], the leaves after it.
          changed: int32[B], the leaves that changed, in [0, capacity); or int32[], the first one of
            neighbours.
          length: Number of neighbours. Default: None, the leaves are no neighbours.
        """
        fan_out, levels = state.fan_out, self._levels(state.fan_out)
        sums = [leaves, *state.sums[1:]]
        for (below, first_child, size), (array, start, _) in itertools.pairwise(levels):
            num_parents, first_group = size // fan_out, first_child // fan_out
            changed, _ = ring.divide(changed, fan_out)
            parents = changed
            if length is not None:
                # Up to three parents of the neighbours may be partly covered: one at either end,
                # and the last one of all if the capacity is no multiple of the fan-out.
                length = (length - 1) // fan_out + 3
                parents = ring.wrap(changed + ring.arange(min(length, num_parents)), num_parents)
            group: Any = first_group + parents
            if parents.size >= num_parents:  # all of them: a slice is read, without a gather
                parents, group = (
                    ring.arange(num_parents),
                    slice(first_group, first_group + num_parents),
                )
            new = self._added(sums[below], group, fan_out)
            there = sums[array].at[start + parents]
            sums[array] = there.set(new, mode="promise_in_bounds")
        return state.replace(sums=tuple(sums))

    def _is_ready(self, state: SumTreeState) -> jax.Array:
        """Return True, computed from the state so that XLA cannot know it: bool[].

        The root depends on the reads of all levels below. A write under this condition is therefore
        ordered after every read that produced the state. Otherwise the write of a level would not
        depend on an earlier call's read of it, and XLA would copy the level in between (measured:
        two updates in one program, 100 us more at 1 M leaves).
        """
        return state.sums[-1][0] >= 0

    def _added(self, values: jax.Array, group: jax.Array | slice, fan_out: int) -> jax.Array:
        """Add groups of `fan_out` neighbours: float32[B].

        Args:
          values: float32[n].
          group: int32[B], in `[0, n / fan_out)`; or a slice of B neighbouring groups.
          fan_out: Number of values of a group.
        """
        if not self.in_line:
            children = values.reshape(-1, fan_out)
            is_slice = isinstance(group, slice)
            new = children[group] if is_slice else children.at[group].get(mode="promise_in_bounds")
            while (width := new.shape[1]) > 1:  # a reduction's order would depend on the program
                half = -(-width // 2)
                high = jnp.pad(new[:, half:], ((0, 0), (0, 2 * half - width)))
                new = new[:, :half] + high
            return new[:, 0]
        new = [_child(values, group, fan_out, kth) for kth in range(fan_out)]
        while len(new) > 1:  # by pairs: smaller rounding errors than one by one
            new = [functools.reduce(jnp.add, new[kth : kth + 2]) for kth in range(0, len(new), 2)]
        return new[0]

    def _levels(self, fan_out: int) -> list[tuple[int, int, int]]:
        """Return where each level lies, from the leaves up: its array, its start there, and its
        size."""
        sizes, nodes = [], self.capacity
        while not sizes or nodes > 1:
            nodes = -(-nodes // fan_out)
            sizes.append(nodes * fan_out)
        *below, top = sizes
        levels = [(min(depth, 2), sum(below[2:depth]), n) for depth, n in enumerate(below)]
        return [*levels, (min(len(below), 3), 0, top)]

    def _array_sizes(self, fan_out: int) -> list[int]:
        """Return the size of each array of sums."""
        return list({which: start + size for which, start, size in self._levels(fan_out)}.values())


def _child(level: jax.Array, node: jax.Array | slice, fan_out: int, kth: int) -> jax.Array:
    """Return the value of each node's `kth` child: [B]."""
    if isinstance(node, slice):
        return level.reshape(-1, fan_out)[node, kth]
    return level.at[node * fan_out + kth].get(mode="promise_in_bounds")


def _index(state: SumTreeState, is_valid: jax.Array, index: jax.Array) -> jax.Array:
    """Move invalid indices past the padded leaves, where a write is dropped: int32[B]."""
    return jnp.where(is_valid, index, state.sums[0].size)


def _fill_in(word: jax.Array, rest: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fill in the low bits of `rest`, which is a multiple of about 2^-24 * mass.

    Returns:
      uint32[B], the next word; float32[B], `rest` plus a random part of that step.
    """
    word = word * jnp.uint32(_MULTIPLIER) + jnp.uint32(_INCREMENT)
    return word, rest + mass * ((word >> 8).astype(jnp.float32) * 2.0**-48)

"""A segment tree of float32 masses that cannot drift: draw a leaf in proportion to its mass, in
O(log capacity).

Every parent is recomputed from its children, never moved by a difference, so that the tree's total
is its leaves' sum after any history. The tree is wide: a node has `fan_out` children, which lie
side by side, so a level is one short read. It is usable on its own:

    tree = SumTree(capacity=1_000)
    state = tree.set(tree.init(), index, mass)
    leaf, mass = tree.find(state, jax.random.uniform(key, (256,)))

Source: Schaul et al., "Prioritized Experience Replay" (2016), appendix B.2.1, which has the binary
tree.
"""

import functools

import jax
import jax.numpy as jnp

from jaxreplay._util.struct import Node, Static
from jaxreplay.storage import platforms, ring

_LARGEST_FRACTION = 1 - 2.0**-24  # the largest float32 below 1
# a linear congruential step modulo 2^32: fresh top bits for each level
_MULTIPLIER, _INCREMENT = 747796405, 2891336453
_MOST_IN_LINE = 32  # children; 128 took a compiler 12 s
# up to this, a prefix sum is unrolled: half the time of the parallel form on a CPU
_UNROLLED_FAN_OUT = 16


class SumTreeState(Node):
    """Levels from the leaves to the root's children, each padded to a multiple of the fan-out."""

    # float32[n]: each level's masses; a node of one level is the sum of its fan_out nodes of the
    # level before
    sums: tuple[jax.Array, ...]
    # float32[n]: smallest positive mass below each node, from the leaves' parents on; inf: none
    minima: tuple[jax.Array, ...] | None


class SumTree(Static):
    """A tree over leaves `0 .. capacity - 1`; a mass is finite and at least 0.

    Args:
      capacity: number of leaves.
      fan_out: children a node; with 0 `init` chooses what suits where its state will live: 8 on a
        CPU, 32 on a GPU, 128 on a TPU.
      has_minimum: whether to keep what `minimum` needs.
      in_line: whether a node's children are read and added one after another, without a reduction:
        of that a GPU makes one kernel a level, where it has three, and a CPU takes five times as
        long.
    """

    capacity: int
    fan_out: int = 0
    has_minimum: bool = False
    in_line: bool = False

    def _check(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"SumTree: capacity must be at least 1, got {self.capacity}")
        if self.fan_out < 2 and self.fan_out != 0:
            raise ValueError(f"SumTree: fan_out must be at least 2, got {self.fan_out}")

    @classmethod
    def on(
        cls, traits: platforms.Traits, capacity: int, fan_out: int = 0, *, has_minimum: bool = False
    ) -> "SumTree":
        """As it suits a platform. `fan_out`: 0 chooses."""
        fan_out = fan_out or traits.fan_out
        in_line = traits.in_line and fan_out <= _MOST_IN_LINE
        return cls(capacity=capacity, fan_out=fan_out, has_minimum=has_minimum, in_line=in_line)

    def init(self) -> SumTreeState:
        """All masses 0."""
        sizes = self._level_sizes(self.fan_out or platforms.traits_of(platforms.default()).fan_out)
        return SumTreeState(
            sums=tuple(jnp.zeros((n,), jnp.float32) for n in sizes),
            minima=tuple(jnp.full((n,), jnp.inf, jnp.float32) for n in sizes[1:])
            if self.has_minimum
            else None,
        )

    def set(self, state: SumTreeState, index: jax.Array, mass: jax.Array) -> SumTreeState:
        """Give leaves new masses.

        An index outside `[0, capacity)` is ignored, and so is a mass that is not finite or is
        negative; of several masses for one leaf the largest wins, in whatever order they come.

        Args:
          index: int32[B]. mass: float32[B].
        """
        self._check_state("set", state)
        is_valid = (
            (index >= 0)
            & (index < self.capacity)
            & jnp.isfinite(mass)
            & (mass >= 0)
            & self._is_ready(state)
        )
        index, mass = _index(state, is_valid, index), mass.astype(jnp.float32)
        # Zero, then the maximum. The zeros must depend on the masses, or XLA copies the leaves
        # between the two scatters (measured).
        leaves = state.sums[0].at[index].set(jnp.where(mass < 0, mass, 0), mode="drop")
        leaves = leaves.at[index].max(mass, mode="drop")
        return self._with_parents(state, leaves, jnp.where(is_valid, index, 0))

    def set_unique(self, state: SumTreeState, index: jax.Array, mass: jax.Array) -> SumTreeState:
        """`set` for valid masses and distinct indices, but for those that are `capacity` or more,
        which are ignored."""
        self._check_state("set_unique", state)
        is_valid = (index < self.capacity) & self._is_ready(state)
        leaves = (
            state.sums[0]
            .at[_index(state, is_valid, index)]
            .set(mass, unique_indices=True, mode="drop")
        )
        return self._with_parents(state, leaves, jnp.where(is_valid, index, 0))

    def set_range(
        self, state: SumTreeState, start: jax.Array, mass: jax.Array, where: jax.Array
    ) -> SumTreeState:
        """`set_unique` for the leaves `start, start + 1, ...`, which go on at 0 after the last:
        neighbours share their parents.

        Args:
          start: int32[], in `[0, capacity)`. mass: float32[L], L at most the capacity. where:
            bool[L], False keeps a leaf's mass.
        """
        self._check_state("set_range", state)
        length = mass.shape[0]
        index = ring.wrap(start + ring.arange(length), self.capacity)
        leaves = (
            state.sums[0]
            .at[_index(state, where & self._is_ready(state), index)]
            .set(mass, unique_indices=True, mode="drop")
        )
        fan_out = _fan_out(state)
        nodes = -(-self.capacity // fan_out)
        first, _ = ring.split(jnp.where(self._is_ready(state), start, 0), fan_out)
        # Of `length` neighbours, three parents may be cut: at either end, and the last one of a
        # capacity that is no multiple.
        width = min((length - 1) // fan_out + 3, nodes)
        return self._with_parents(state, leaves, None, first, width)

    def get(self, state: SumTreeState, index: jax.Array) -> jax.Array:
        """Masses of leaves in `[0, capacity)`: float32[...]."""
        self._check_state("get", state)
        return state.sums[0].at[index].get(mode="promise_in_bounds")

    def total(self, state: SumTreeState) -> jax.Array:
        """The sum of all masses: float32[]."""
        self._check_state("total", state)
        return self._sum(state.sums[-1].reshape(1, -1))[0]

    def minimum(self, state: SumTreeState) -> jax.Array:
        """The smallest positive mass: float32[]; inf where there is none."""
        self._check_state("minimum", state)
        if state.minima is None:
            raise ValueError(
                "SumTree.minimum: this tree keeps no minima; make it with has_minimum=True"
            )
        if len(state.sums) == 1:
            return jnp.min(_positive(state.sums[0]))
        return jnp.min(state.minima[-1])

    def find(
        self, state: SumTreeState, target: jax.Array, word: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The leaf in which each target lies when the masses are laid end to end, and its mass.

        The descent never enters a node without mass, whatever the target and the rounding. A
        float32 target has 24 bits, too few to reach a million leaves evenly: with `word`, 32
        further random bits an item, each level fills in the bits below those that are left.

        Args:
          target: float32[B], in [0, 1], as a fraction of the total. word: uint32[B].

        Returns:
          The leaf, int32[B], and its mass, float32[B]; mass 0 where the tree is empty. The leaf
            depends on the mass in the program, so a
          later write to the leaf is ordered after this read, and XLA need not copy the tree in
            between.
        """
        node = jnp.zeros(target.shape, jnp.int32)
        mass = jnp.broadcast_to(self.total(state), target.shape)
        rest = target.astype(jnp.float32) * mass
        fan_out = _fan_out(state)
        for level in reversed(state.sums):
            if word is not None:
                word, rest = _fill_in(word, rest, mass)
            if self.in_line:
                child, rest, mass = self._choose_in_line(
                    [_child(level, node, fan_out, kth) for kth in range(fan_out)], rest
                )
            else:
                child, rest, mass = self._choose(
                    level.reshape(-1, fan_out).at[node].get(mode="promise_in_bounds"), rest
                )
            node = node * fan_out + child
        return jnp.where(mass >= 0, node, self.capacity), mass

    def _check_state(self, where: str, state: SumTreeState) -> None:
        """A ValueError for the state of a tree of another shape, in which a leaf would be sought in
        the wrong place."""
        sizes = [level.shape for level in state.sums]
        fan_out = self.fan_out or _fan_out(state)
        is_own = fan_out > 1 and sizes == [(size,) for size in self._level_sizes(fan_out)]
        if not is_own or (state.minima is not None) != self.has_minimum:
            raise ValueError(
                f"SumTree.{where}: the state is not of this tree, {self}: its levels have "
                f"{[size[0] for size in sizes]} nodes"
            )

    def _choose(
        self, children: jax.Array, rest: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The last child with mass that begins at or before `rest`, what is left of `rest` in it,
        and its mass: [B] each."""
        kth = ring.arange(children.shape[1])
        begins = self._begins(children)
        child = jnp.max(jnp.where((children > 0) & (begins <= rest[:, None]), kth, 0), axis=1)
        # Reductions: XLA does not compute them again in each of their uses. Selects unrolled over
        # the children took 5x as long.
        is_chosen = kth == child[:, None]
        begin, mass = (
            jnp.sum(jnp.where(is_chosen, values, 0), axis=1) for values in (begins, children)
        )
        return child, jnp.clip(rest - begin, 0, mass * _LARGEST_FRACTION), mass

    def _choose_in_line(
        self, children: list[jax.Array], rest: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`_choose`, child by child: [B] each."""
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
        """Where each child begins when they are laid end to end: [B, fan_out]."""
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
        index: jax.Array | None,
        first: jax.Array | None = None,
        width: int = 0,
    ) -> SumTreeState:
        """Recompute the parents of leaves `index`, or of `width` neighbouring parents from `first`
        on, level by level."""
        sums, minima, fan_out = [leaves], [], _fan_out(state)
        for depth in range(1, len(state.sums)):
            nodes = sums[-1].shape[0] // fan_out
            if index is not None:
                index, _ = ring.split(index, fan_out)
                parents = index
            elif width >= nodes:
                parents = ring.arange(nodes)
            else:
                parents = ring.wrap(_not_none(first) + ring.arange(width), nodes)

            def recomputed(values, children, reduce, join, parents=parents):
                if self.in_line:
                    new = [_child(children, parents, fan_out, kth) for kth in range(fan_out)]
                    while len(new) > 1:  # by pairs, which rounds less than one after another
                        new = [
                            functools.reduce(join, new[kth : kth + 2])
                            for kth in range(0, len(new), 2)
                        ]
                    return values.at[parents].set(new[0], mode="promise_in_bounds")
                new = reduce(
                    children.reshape(-1, fan_out).at[parents].get(mode="promise_in_bounds")
                )
                return values.at[parents].set(new, mode="promise_in_bounds")

            sums.append(recomputed(state.sums[depth], sums[-1], self._sum, jnp.add))
            if state.minima is not None:
                below = leaves if depth == 1 else minima[-1]
                smallest = lambda children: jnp.min(_positive(children), axis=1)
                minima.append(
                    recomputed(
                        state.minima[depth - 1],
                        below,
                        smallest,
                        lambda a, b: jnp.minimum(_positive(a), _positive(b)),
                    )
                )
            if index is None:
                first, _ = ring.split(_not_none(first), fan_out)
                width = (width - 1) // fan_out + 3
        return SumTreeState(
            sums=tuple(sums), minima=None if state.minima is None else tuple(minima)
        )

    def _is_ready(self, state: SumTreeState) -> jax.Array:
        """True, in a way that XLA cannot know: what is written where this holds is ordered after
        every read that the tree was made from.

        The root depends on the reads of all levels below. Without this, the write of a level would
        not depend on an earlier call's read of it, and XLA would copy the level in between
        (measured: two updates in one program, 100 us more at 1 M leaves).
        """
        roots = [state.sums[-1][0]] + (
            [] if state.minima is None or not state.minima else [state.minima[-1][0]]
        )
        return jnp.min(jnp.stack(roots)) >= 0

    def _sum(self, children: jax.Array) -> jax.Array:
        return children.sum(axis=1)

    def _level_sizes(self, fan_out: int) -> list[int]:
        sizes, nodes = [], self.capacity
        while not sizes or nodes > 1:
            nodes = -(-nodes // fan_out)
            sizes.append(nodes * fan_out)
        return sizes


def _fan_out(state: SumTreeState) -> int:
    """The root's children: a state remembers how wide it is."""
    return state.sums[-1].shape[0]


def _child(level: jax.Array, node: jax.Array, fan_out: int, kth: int) -> jax.Array:
    """Of each node: [B]."""
    return level.at[node * fan_out + kth].get(mode="promise_in_bounds")


def _index(state: SumTreeState, is_valid: jax.Array, index: jax.Array) -> jax.Array:
    """Invalid indices point past the padded leaves, where a write is dropped."""
    return jnp.where(is_valid, index, state.sums[0].shape[0])


def _fill_in(word: jax.Array, rest: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next word, and `rest`, a multiple of about `2^-24 mass`, with a random part of that step
    added: float32[B]."""
    word = word * jnp.uint32(_MULTIPLIER) + jnp.uint32(_INCREMENT)
    return word, rest + mass * ((word >> 8).astype(jnp.float32) * 2.0**-48)


def _positive(mass: jax.Array) -> jax.Array:
    return jnp.where(mass > 0, mass, jnp.inf)


def _not_none(value: jax.Array | None) -> jax.Array:
    assert value is not None
    return value

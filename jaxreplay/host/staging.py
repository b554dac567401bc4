"""Steps that wait on the host, so that one program adds many of them, and then samples.

A copy of a step of NumPy arrays takes a few microseconds. A program of its own for each step would
take 50 to 100.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.aliases import PyTree

_MOST_STEPS = 64
_MOST_BYTES = 2**22
_FEWEST_ENVS = 8  # in a block of some envs, if there are as many
_OWN_LENGTHS = 4  # lengths of blocks, other than powers of two, that get a program of their own


class BlockLengths:
    """Lengths of blocks that have programs: powers of two, and the first few others.

    Blocks may have any length, as trajectories do, but a program takes a second or more to compile,
    and some MiB for good.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()

    def parts_of(self, length: int) -> list[int]:
        """Return the lengths of the parts that a block is divided into, the largest first."""
        has_program = length in {0, pow2.power_below(length), *self._own}
        if not has_program and len(self._own) < _OWN_LENGTHS:
            self._own.add(length)
            has_program = True
        if has_program:
            return [length]
        powers = (1 << bit for bit in reversed(range(length.bit_length())))
        return [power for power in powers if length & power]


def most_steps(num_bytes: int) -> int:
    """Return how many steps of so many bytes may wait."""
    return min(max(_MOST_BYTES // max(num_bytes, 1), 1), _MOST_STEPS)


def stacked(arrays: Any) -> np.ndarray:
    """Return arrays [...] of one shape and dtype as one [T, ...]. For a few small ones it takes
    half the time of `np.stack`."""
    first = arrays[0]
    block = np.empty((len(arrays), *first.shape), first.dtype)
    for place, array in enumerate(arrays):
        block[place] = array
    return block


class _Place(NamedTuple):
    """Place of a step of some envs in the block that is added later."""

    envs: list[int]  # that took it
    time: int
    at_time: frozenset[int]  # envs that have a step at this time
    seen: frozenset[int]  # envs that have a step in the block

    def size(self, num_envs: int) -> tuple[int, int]:
        """Return the lengths of the block's axes: powers of two, so that few programs are
        compiled."""
        width = pow2.power_above(max(len(self.seen), _FEWEST_ENVS))
        return pow2.power_above(self.time + 1), min(width, num_envs)


class Staging:
    """Steps that are not added yet, in the order of time.

    Either all have a mask, or none has; and likewise for priorities. Either all are of all envs, or
    all are of some envs, without a mask.

    Args:
      example: One env's step or one item, leaves with `shape` and `dtype`.
      num_envs: Number of envs E.
    """

    def __init__(self, example: PyTree, num_envs: int):
        leaves, self._structure = jax.tree.flatten(example)
        self._num_envs = num_envs
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        self._most = most_steps(num_envs * num_bytes)
        self._most_of_some = max(_MOST_BYTES // max(num_bytes, 1), num_envs)  # in a block
        # each a list of leaves, a mask or None, priorities or None, a place or None
        self._steps: list[Any] = []

    def __len__(self) -> int:
        """Return the number of steps that wait."""
        return len(self._steps)

    def has_room(self, mask: Any, priority: Any, envs: list[int] | None = None) -> bool:
        """Return whether a step can wait together with those that wait already."""
        if not self._steps:
            return True
        _, its_mask, its_priority, place = self._steps[-1]
        if (
            (mask is None) != (its_mask is None)
            or (priority is None) != (its_priority is None)
            or (envs is None) != (place is None)
        ):
            return False
        if envs is None:
            return len(self._steps) < self._most
        size = self._place_of(envs).size(self._num_envs)
        return len(self._steps) < _MOST_STEPS and math.prod(size) <= self._most_of_some

    def put(
        self, leaves: list[np.ndarray], mask: Any, priority: Any, envs: list[int] | None = None
    ) -> None:
        """Copy a step to those that wait. An interrupt leaves an intact step or none.

        Args:
          leaves: As `Format.on_host` returns them.
          mask: bool[E], or None; not copied.
          priority: [E], real numbers, or None. [e] with `envs`, or [] for one.
          envs: Different envs that took the step, e of them. Default: all.
        """
        given = None if priority is None else np.atleast_1d(priority).astype(np.float32)
        place = None if envs is None else self._place_of(envs)
        self._steps.append(([leaf.copy() for leaf in leaves], mask, given, place))

    def _place_of(self, envs: list[int]) -> _Place:
        """Return the place of the next step. Steps of other envs share a time, as if one `add` had
        a step of each; no step comes before an earlier one."""
        if not self._steps:
            own = frozenset(envs)
            return _Place(envs, 0, own, own)
        _, time, at_time, seen = self._steps[-1][3]
        if at_time.isdisjoint(envs):
            return _Place(envs, time, at_time.union(envs), seen.union(envs))
        return _Place(envs, time + 1, frozenset(envs), seen.union(envs))

    def waiting(self) -> tuple[Any, ...]:
        """Return the steps that wait, oldest first, their mask and their priorities, leaves
        [T, E, ...]; and if they are of some envs, int32[E], these envs. The arrays are new, since
        JAX may read them after a call has returned."""
        leaves, mask, priority, places = zip(*self._steps, strict=True)
        by_leaf = zip(*leaves, strict=True)
        if places[0] is not None:
            return self._block_of_some(by_leaf, priority, places)
        return (
            jax.tree.unflatten(self._structure, map(stacked, by_leaf)),
            None if mask[0] is None else stacked(mask),
            None if priority[0] is None else stacked(priority),
        )

    def _block_of_some(self, by_leaf: Any, priority: Any, places: Any) -> tuple[Any, ...]:
        size = places[-1].size(self._num_envs)
        envs = np.full(size[1], self._num_envs, np.int32)  # padding has a number that no env has
        seen = np.sort(np.fromiter(places[-1].seen, np.int32))
        envs[: len(seen)] = seen
        of_step = np.repeat([place.time for place in places], [len(place.envs) for place in places])
        column = np.searchsorted(seen, [env for place in places for env in place.envs])

        def block(parts: Any) -> np.ndarray:
            values = np.concatenate(parts)
            found = np.zeros((*size, *values.shape[1:]), values.dtype)
            found[of_step, column] = values
            return found

        mask = np.zeros(size, bool)
        mask[of_step, column] = True
        steps = jax.tree.unflatten(self._structure, map(block, by_leaf))
        return steps, mask, None if priority[0] is None else block(priority), envs

    def drop(self, num_steps: int) -> None:
        """Forget the oldest of the steps that wait: they are added."""
        del self._steps[:num_steps]

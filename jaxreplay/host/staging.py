"""Steps that wait on the host, so that one program adds many of them, and then samples.

A copy of a step of NumPy arrays takes a few microseconds. A program of its own for each step would
take 50 to 100.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.aliases import PyTree

_MOST_STEPS = 64
_MOST_BYTES = 2**22
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


class Staging:
    """Steps of all envs that are not added yet, in the order of time.

    Either all have a mask, or none has; and likewise for priorities.

    Args:
      example: One env's step or one item, leaves with `shape` and `dtype`.
      num_envs: Number of envs E.
    """

    def __init__(self, example: PyTree, num_envs: int):
        specs, self._structure = jax.tree.flatten(example)
        self._num_envs = num_envs
        self._specs = [((num_envs, *spec.shape), np.dtype(spec.dtype)) for spec in specs]
        self._most = most_steps(
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._specs)
        )
        self._steps: list[Any] = []  # each a list of leaves, a mask or None, priorities or None

    def __len__(self) -> int:
        """Return the number of steps that wait."""
        return len(self._steps)

    def leaves_of(self, step: PyTree, cast: Callable[[], PyTree]) -> list[np.ndarray] | None:
        """Return the leaves of a step of all envs as they are stored, or None if it does not fit.
        One env needs no axis.

        Args:
          step: A step or an item.
          cast: Returns the step in NumPy arrays of the stored dtypes, if its values allow.
        """
        leaves, structure = jax.tree.flatten(step)
        if structure != self._structure:
            return None
        if self.is_plain(leaves):
            return leaves
        has_axis = self._num_envs > 1 or np.ndim(leaves[0]) == len(self._specs[0][0])
        for leaf, (shape, _) in zip(leaves, self._specs, strict=True):
            if isinstance(leaf, jax.Array) or np.shape(leaf) != shape[0 if has_axis else 1 :]:
                return None
        leaves = jax.tree.leaves(cast())
        if not has_axis:
            leaves = [leaf[None] for leaf in leaves]
        return leaves if self.is_plain(leaves) else None

    def is_plain(self, leaves: list[Any]) -> bool:
        """Return whether leaves are NumPy arrays as they are stored."""
        for leaf, (shape, dtype) in zip(leaves, self._specs, strict=True):
            if type(leaf) is not np.ndarray or leaf.dtype != dtype or leaf.shape != shape:
                return False
        return True

    def has_room(self, mask: Any, priority: Any) -> bool:
        """Return whether a step can wait together with those that wait already."""
        if not self._steps:
            return True
        _, its_mask, its_priority = self._steps[0]
        return (
            len(self._steps) < self._most
            and (mask is None) == (its_mask is None)
            and (priority is None) == (its_priority is None)
        )

    def put(self, leaves: list[np.ndarray], mask: Any, priority: Any) -> None:
        """Copy a step to those that wait. An interrupt leaves an intact step or none.

        Args:
          leaves: As `leaves_of` returns them.
          mask: bool[E], or None; not copied.
          priority: [E], real numbers, or None; not copied.
        """
        given = None if priority is None else priority.astype(np.float32)
        self._steps.append(([leaf.copy() for leaf in leaves], mask, given))

    def waiting(self) -> tuple[PyTree, np.ndarray | None, np.ndarray | None]:
        """Return the steps that wait, oldest first, their mask and their priorities, leaves
        [T, E, ...]. The arrays are new, since JAX may read them after a call has returned."""
        leaves, mask, priority = zip(*self._steps, strict=True)
        return (
            jax.tree.unflatten(self._structure, map(stacked, zip(*leaves, strict=True))),
            None if mask[0] is None else stacked(mask),
            None if priority[0] is None else stacked(priority),
        )

    def drop(self, num_steps: int) -> None:
        """Forget the oldest of the steps that wait: they are added."""
        del self._steps[:num_steps]

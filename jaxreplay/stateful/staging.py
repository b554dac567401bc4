"""Steps that wait on the host, so that one program adds many of them, and then samples.

A step of NumPy arrays is copied into a block of the host's memory, which takes a few microseconds.
A program of its own for each step would take 50 to 100.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._util.aliases import PyTree

_MOST_STEPS = 64
_MOST_BYTES = 2**22


class Staging:
    """A block of steps of all envs that are not added yet.

    JAX may read arrays of the host after a call has returned. So no part of a block is written
    twice: after the last step comes a new block.

    Args:
      example: One env's step or one item, leaves with `shape` and `dtype`.
      num_envs: Number of envs E.
    """

    def __init__(self, example: PyTree, num_envs: int):
        specs, self._structure = jax.tree.flatten(example)
        self._num_envs = num_envs
        self._shapes = [(num_envs, *spec.shape) for spec in specs]
        self._dtypes = [np.dtype(spec.dtype) for spec in specs]
        num_bytes = sum(
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        )
        self._size = min(max(_MOST_BYTES // max(num_bytes, 1), 1), _MOST_STEPS)
        self._start = self._stop = self._size  # the steps that wait; at first there is no block
        self._num_latest = 1  # number of steps that were added together last
        self._leaves: list[np.ndarray] = []  # [size, E, ...]
        self._mask: np.ndarray | None = None  # bool[size, E]; None if no step has a mask
        self._priority: np.ndarray | None = None  # float32[size, E]; None if no step has one

    def __len__(self) -> int:
        """Return the number of steps that wait."""
        return self._stop - self._start

    def leaves_of(self, step: PyTree, cast: Callable[[], PyTree]) -> list[np.ndarray] | None:
        """Return the leaves of a step of all envs in the dtypes of the block, or None if it does
        not fit. One env needs no axis.

        Args:
          step: A step or an item.
          cast: Returns the step in NumPy arrays of these dtypes, if its values allow.
        """
        leaves, structure = jax.tree.flatten(step)
        if structure != self._structure or not self._has_shapes(leaves):
            return None
        if self._is_plain(leaves):
            return leaves
        leaves = jax.tree.leaves(cast())
        return leaves if self._is_plain(leaves) else None

    def _has_shapes(self, leaves: list[Any]) -> bool:
        """Return whether all leaves are on the host, and are of one step of all envs."""
        shapes = self._shapes
        if self._num_envs == 1 and np.ndim(leaves[0]) < len(shapes[0]):
            shapes = [shape[1:] for shape in shapes]
        return all(
            (
                type(leaf) is np.ndarray
                or (not isinstance(leaf, jax.Array) and not hasattr(leaf, "__jax_array__"))
            )
            and np.shape(leaf) == shape
            for leaf, shape in zip(leaves, shapes, strict=True)
        )

    def _is_plain(self, leaves: list[Any]) -> bool:
        return all(
            type(leaf) is np.ndarray and leaf.dtype == dtype
            for leaf, dtype in zip(leaves, self._dtypes, strict=True)
        )

    def has_room(self, mask: Any, priority: Any) -> bool:
        """Return whether a step can wait together with those that wait already: all have a mask or
        a priority, or none has."""
        if self._stop == self._size:
            return not len(self)
        return not len(self) or (
            (mask is None) == (self._mask is None)
            and (priority is None) == (self._priority is None)
        )

    def put(self, leaves: list[np.ndarray], mask: Any, priority: Any) -> None:
        """Copy a step into the block; there must be room.

        Args:
          leaves: As `leaves_of` returns them.
          mask: bool[E], or None.
          priority: [E], real numbers, or None.
        """
        if not len(self):
            self._begin(mask is not None, priority is not None)
        stop = self._stop
        for block, leaf in zip(self._leaves, leaves, strict=True):
            block[stop] = leaf
        if self._mask is not None:
            self._mask[stop] = mask
        if self._priority is not None:
            self._priority[stop] = priority
        self._stop = stop + 1

    def waiting(self) -> tuple[PyTree, np.ndarray | None, np.ndarray | None]:
        """Return the steps that wait, oldest first, their mask and their priorities, leaves
        [T, E, ...]."""
        part = slice(self._start, self._stop)
        return (
            jax.tree.unflatten(self._structure, [leaf[part] for leaf in self._leaves]),
            None if self._mask is None else self._mask[part],
            None if self._priority is None else self._priority[part],
        )

    def drop(self, num_steps: int) -> None:
        """Forget the oldest of the steps that wait: they are added."""
        self._num_latest = max(num_steps, 1)
        self._start += num_steps

    def _begin(self, has_mask: bool, has_priority: bool) -> None:
        """Make a new block, unless the old one has the same parts, and room for as many steps as
        were added together last."""
        is_alike = has_mask == (self._mask is not None) and has_priority == (
            self._priority is not None
        )
        if self._stop + self._num_latest <= self._size and is_alike:
            return
        self._leaves = [
            np.empty((self._size, *shape), dtype)
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        axes = (self._size, self._num_envs)
        self._mask = np.empty(axes, bool) if has_mask else None
        self._priority = np.empty(axes, np.float32) if has_priority else None
        self._start = self._stop = 0

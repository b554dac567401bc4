"""Rows outside of the device: what a store of them does, and those in the memory of the host."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxreplay._util.aliases import Specs
from jaxreplay._util.aligned import LARGE, aligned_empty, aligned_zeros


class RowStore:
    """Rows of some leaves, by their numbers. A store of your own implements `write` and `take`; the
    other methods have defaults.

    It is made anew for each empty state, and by each restore, which gives up the store before when
    the new one has all rows. One thread may take rows while another one writes others.

    Args:
      capacity: Number of rows N.
      specs: Shape and dtype of a row of each leaf, by name, as NumPy stores them.
    """

    def __init__(self, capacity: int, specs: Mapping[str, Specs]):
        self.capacity, self.specs = capacity, specs

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows of a leaf; of a row that appears twice, the last values stay.

        Args:
          name: Name of the leaf.
          rows: int[K], in [0, N).
          values: [K, ...].
        """
        raise NotImplementedError

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return a copy of rows of a leaf: `[*rows.shape, ...]`. It may become part of a batch, so
        it is never changed. Of rows that were not written it may have any values.

        Args:
          name: Name of the leaf.
          rows: int[...], in [0, N).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up the rows."""

    def rewrite(self, leaves: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        """Write leaves of rows that are there.

        Args:
          leaves: Values of leaves by name, [K, ...].
          rows: int[K], in [0, N).
        """
        for name, values in leaves.items():
            self.write(name, rows, values)

    def begin(self, number: np.ndarray) -> None:
        """Note that rows are about to be written. Those that they overwrite are gone.

        Args:
          number: int64[E], the number of each env's next row after them.
        """

    def whole(self, name: str) -> np.ndarray:
        """Return all rows of a leaf, [N, ...].

        Args:
          name: Name of the leaf.
        """
        return self.take(name, np.arange(self.capacity))


def copied_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a copy of rows of an array. A CPU backend of JAX reads a large one in place."""
    shape = *rows.shape, *array.shape[1:]
    is_large = math.prod(shape) * array.itemsize >= LARGE
    out = aligned_empty(shape, array.dtype) if is_large else None
    return np.take(array, rows, axis=0, mode="clip", out=out)


class HostRows(RowStore):
    """Rows in the memory of the host."""

    def __init__(self, capacity: int, specs: Mapping[str, Specs]):
        super().__init__(capacity, specs)
        # all rows of each leaf, [N, ...], as they are stored
        self.arrays: Any = {
            name: aligned_zeros((capacity, *spec.shape), spec.dtype) for name, spec in specs.items()
        }

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        self.arrays[name][rows] = values

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        return copied_rows(self.arrays[name], rows)

    def whole(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def close(self) -> None:
        self.arrays = {}

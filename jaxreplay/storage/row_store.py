"""Stores of rows outside of the device: in the memory of the host."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from jaxreplay._util.aliases import Specs
from jaxreplay._util.aligned import aligned_zeros


class RowStore(Protocol):
    """Rows of some leaves, by their numbers.

    One thread may write while another one takes other rows.
    """

    arrays: dict[str, np.ndarray]  # all rows of each leaf, [capacity, ...], as they are stored

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows of a leaf; of a row that appears twice, the last values stay.

        Args:
          name: Name of the leaf.
          rows: int64[K], in [0, capacity).
          values: [K, ...].
        """

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return a copy of rows of a leaf: [*rows.shape, ...].

        Args:
          name: Name of the leaf.
          rows: int32[...], in [0, capacity).
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Return when all rows that were written are as safe as the store keeps them."""

    def close(self) -> None:
        """Give up what the store holds."""


class HostRows:
    """Rows in the memory of the host.

    Args:
      capacity: Number of rows.
      specs: Shape and dtype of a row of each leaf, by name.
    """

    def __init__(self, capacity: int, specs: Mapping[str, Specs]):
        self.arrays = {
            name: aligned_zeros((capacity, *spec.shape), spec.dtype) for name, spec in specs.items()
        }

    def write(self, name: str, rows: np.ndarray, values: Any) -> None:
        self.arrays[name][rows] = values

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        return np.take(self.arrays[name], rows, axis=0, mode="clip")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.arrays = {}

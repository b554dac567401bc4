"""Rows outside of the device, in the memory of the host."""

from collections.abc import Mapping

import numpy as np

from jaxreplay._util.aliases import Specs
from jaxreplay._util.aligned import aligned_zeros


class HostRows:
    """Rows of some leaves in the memory of the host, by their numbers.

    One thread may write while another one takes other rows.

    Args:
      capacity: Number of rows.
      specs: Shape and dtype of a row of each leaf, by name.
    """

    def __init__(self, capacity: int, specs: Mapping[str, Specs]):
        # all rows of each leaf, [capacity, ...], as they are stored
        self.arrays = {
            name: aligned_zeros((capacity, *spec.shape), spec.dtype) for name, spec in specs.items()
        }

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows of a leaf; of a row that appears twice, the last values stay.

        Args:
          name: Name of the leaf.
          rows: int64[K], in [0, capacity).
          values: [K, ...].
        """
        self.arrays[name][rows] = values

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return a copy of rows of a leaf: [*rows.shape, ...].

        Args:
          name: Name of the leaf.
          rows: int32[...], in [0, capacity).
        """
        return np.take(self.arrays[name], rows, axis=0, mode="clip")

    def begin(self, number: np.ndarray) -> None:
        """Note that rows are about to be written, up to those before the numbers int64[E] of each
        env. Those that they overwrite are gone."""

    def rewrite(self, leaves: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        """Write leaves, [K, ...] by name, of rows that are there, int64[K]."""
        for name, values in leaves.items():
            self.write(name, rows, values)

    def flush(self) -> str | None:
        """Wait until all rows are where they outlast the process.

        Returns:
          The token of these rows, which a checkpoint of their index has; None if no row does.
        """

    def close(self) -> None:
        """Give up the memory."""
        self.arrays = {}

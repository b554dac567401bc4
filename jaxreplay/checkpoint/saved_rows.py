"""Access to a checkpoint's rows by their place in the order of adding, across groups."""

import math
from typing import Any

import numpy as np

from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.store import array_name
from jaxreplay.checkpoint.zarr_arrays import array_of, described


class RowReader:
    """Reader of a checkpoint's rows by index: stream after stream, each stream's oldest row first.

    It takes eight bytes of memory for each row.

    Args:
      store: The checkpoint's files.
      manifest: The checkpoint's manifest.

    Raises:
      CorruptCheckpointError: A row is in no group, or an array is missing or damaged.
    """

    def __init__(self, store: Files, manifest: Manifest):
        self._store, self._manifest = store, manifest
        self.first, self.end = (
            np.asarray(numbers, np.int64) for numbers in (manifest.first, manifest.end)
        )
        self.num_rows = int((self.end - self.first).sum())
        # int64[E]: the index of each stream's first row
        self._offset = np.cumsum(self.end - self.first) - (self.end - self.first)
        # a forged manifest could ask for any amount of memory: first check that its groups exist
        for group in manifest.groups:
            for leaf in group.leaves[:1]:
                described(store, array_name("rows", group.folder, leaf), group.seals[leaf])
        missing = self.num_rows - int(manifest.groups.num_rows().sum())
        if missing <= 0:
            # each row's group, counted from 1, and its place there
            self._group, self._place = np.zeros((2, self.num_rows), np.int32)
            for at, group in enumerate(manifest.groups, 1):
                env, number = group.rows()
                place = np.flatnonzero((number >= self.first[env]) & (number < self.end[env]))
                row = self._offset[env[place]] + number[place] - self.first[env[place]]
                self._group[row], self._place[row] = at, place
            missing = int((self._group == 0).sum())
        if missing > 0:
            raise CorruptCheckpointError(
                f"{missing:,} rows of the checkpoint are in none of its groups"
            )

    def read(self, name: str, shape: tuple[int, ...], dtype: Any, rows: np.ndarray) -> np.ndarray:
        """Read values of one leaf: `[K, *shape]`.

        Args:
          name: The leaf's name.
          shape: The shape of a row.
          dtype: The leaf's dtype.
          rows: int64[K], the rows' indices.
        """
        groups, parts = self._manifest.groups, []
        for at, chosen in self.by_group(rows) if math.prod(shape) else ():
            array = array_of(self._store, groups[at], name, shape, dtype)
            parts.append((chosen, array.read()[self._place[rows[chosen]]]))
        # only now is it known that the rows have this shape: a forged one could ask for any memory
        values = np.zeros((len(rows), *shape), dtype)
        for chosen, part in parts:
            values[chosen] = part
        return values

    def by_group(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return the groups that have rows, and each one's positions in `rows`, int64[...].

        Args:
          rows: int64[K], the rows' indices.
        """
        if not len(rows):
            return []
        order = np.argsort(self._group[rows], kind="stable")
        groups, starts = np.unique(self._group[rows][order], return_index=True)
        return list(zip((groups - 1).tolist(), np.split(order, starts[1:]), strict=True))

"""`Reader`: rows of files, whose checksums are compared. `verifying.py` compares these alone."""

import functools
import threading
from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxreplay.checkpoint import bundle
from jaxreplay.checkpoint.files import Files, Memory
from jaxreplay.checkpoint.folder import Folder
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.manifest import Member
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.threads import in_turn
from jaxreplay.storage import ring

_AT_ONCE = 2  # groups in memory: one is used, while the next is read


class Reader:
    """Rows of a buffer in a checkpoint.

    Args:
      store: The checkpoint's files.
      member: The buffer's part of the manifest.
      cache_bytes: Bytes of files that `take` keeps; at least one file is. Those on this machine
        that are not compressed are mapped into memory instead. Default: 0.
    """

    def __init__(self, store: Files, member: Member, cache_bytes: int = 0):
        self._store, self._member, self._cache_bytes = store, member, cache_bytes
        self.groups = member.groups
        self.leaves = {leaf.name: leaf for leaf in member.leaves}
        self._count = member.end - member.first
        self.num_rows = int(self._count.sum())
        # arrays of groups, by their numbers: mapped ones, and read ones, the latest last
        self._maps: dict[int, dict[str, np.ndarray]] = {}
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()  # of `_maps` and `_kept`

    def read(self, group: Group, memory: Memory | None) -> dict[str, np.ndarray]:
        """Read a group of K rows: `[K, ...]` each, by array.

        Args:
          group: The group.
          memory: As for `bundle.read`.

        Raises:
          CorruptCheckpointError: The file is missing or damaged, or lacks an array.
        """
        assert group.sums is not None
        whole = {
            leaf.array: jax.ShapeDtypeStruct((group.num_rows, *leaf.shape), leaf.stored)
            for leaf in self.leaves.values()
        }
        of_save = group.save.is_compressed
        return bundle.read(self._store, group.file, group.sums, of_save, whole, memory)

    def parts(
        self, since: np.ndarray, use: Callable[[Picked, dict[str, np.ndarray], int], None]
    ) -> None:
        """Read rows, a group at a time, the newest first; the next one is read meanwhile.

        Args:
          since: int64[E], the number of each stream's oldest row that is read.
          use: Gets the K rows of a group; `[K, ...]` of each array by name, which may be
            overwritten afterwards; and the largest K that there may be.
        """
        chosen, buffers, most = [], bundle.Buffers(), 0
        for group in reversed(self.groups):
            low, high = group.range()
            if (np.maximum(low, since) < high).any():
                chosen.append(group)
                most = max(most, int((high - low).sum()))

        def read(group: Group) -> tuple[Group, dict[str, np.ndarray]]:
            return group, self.read(group, buffers.take)

        def put(read: tuple[Group, dict[str, np.ndarray]]) -> None:
            (env, number), found = read[0].rows(), read[1]
            own = number >= since[env]
            is_whole = bool(own.all())
            values = found if is_whole else {name: leaf[own] for name, leaf in found.items()}
            use(Picked(env[own], number[own]), values, most)
            buffers.give_back(next(iter(found.values())))

        in_turn(read, chosen, put, _AT_ONCE)

    def order_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the places, in order, of rows by their places in the rings: int64[...]; -1 for a
        row that the checkpoint does not have."""
        first, end, length = self._member.first, self._member.end, self._member.length
        env = rows // length
        newest = end[env] - 1
        number = newest - ring.position_of(newest - (rows - env * length), length)
        return np.where(number >= first[env], self._before[env] + number, -1)

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """The distance from a row's number to its place in order, for each stream: int64[E]."""
        return np.cumsum(self._count) - self._count - self._member.first

    @functools.cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """The group of each row in order, and its place there: int32[R + 1]. The last one is that
        of no row, with the group -1."""
        group_of = np.full(self.num_rows + 1, -1, np.int32)
        place_of = np.zeros_like(group_of)
        for nth, group in enumerate(self.groups):
            env, number = group.rows()
            is_left = number >= self._member.first[env]
            at = (self._before[env] + number)[is_left]
            group_of[at], place_of[at] = nth, np.flatnonzero(is_left)
        return group_of, place_of

    def take(self, wanted: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copy rows of leaves, `[..., *shape]` by name, of the dtype that is stored.

        Args:
          wanted: The rows of each leaf by name: int64[...], places in order, stream after stream,
            the oldest row of each first. Of the row -1 the values are 0.

        Raises:
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        group_of, place_of = self._table
        groups = {name: group_of[rows] for name, rows in wanted.items()}
        found_in = {number for own in groups.values() for number in np.unique(own).tolist()}
        numbers = sorted(found_in - {-1})
        if numbers:  # before memory is taken, since a forged manifest may ask for any
            self._arrays_of(numbers[0])
        leaves = {name: self.leaves[name] for name in wanted}
        found = {
            name: np.zeros((*wanted[name].shape, *leaf.shape), leaf.stored)
            for name, leaf in leaves.items()
        }
        for number in numbers:
            arrays = self._arrays_of(number)
            for name, of_group in groups.items():
                is_own = of_group == number
                own = place_of[wanted[name][is_own]]
                found[name][is_own] = arrays[leaves[name].array][own]
        return found

    def _arrays_of(self, number: int) -> dict[str, np.ndarray]:
        """Return the arrays of a group by name, [K, ...] each."""
        group = self.groups[number]
        is_mapped = isinstance(self._store, Folder) and not group.save.is_compressed
        with self._lock:
            held = self._maps if is_mapped else self._kept
            found = held.pop(number, None) or self.read(group, None)
            held[number] = found
            size = sum(values.nbytes for values in found.values())
            while len(self._kept) > max(self._cache_bytes // max(size, 1), 1):
                del self._kept[next(iter(self._kept))]
            return found

    def close(self) -> None:
        """Give up the files."""
        self._maps, self._kept = {}, {}

"""Rows of a checkpoint where they lie: an index on the device, and rows read as a batch needs them.

Files on this machine that are not compressed are mapped into memory. Others are read whole, and the
last ones are kept.
"""

import dataclasses
import functools
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.checkpoint import bundle
from jaxreplay.checkpoint.bundle import Spec
from jaxreplay.checkpoint.contents import example_of, generation_of
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.fits import check_fits
from jaxreplay.checkpoint.folder import Folder, regular
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.manifest import TOKEN, Member
from jaxreplay.checkpoint.restoring import Reading
from jaxreplay.checkpoint.rows import rows_at
from jaxreplay.storage.host_rows import RowStore
from jaxreplay.storage.state import ReplayState


class SavedRows(RowStore):
    """Rows of a checkpoint, by their places in the rings. They are not changed.

    Args:
      store: The checkpoint's files.
      member: The rows.
      cache_bytes: Bytes that are kept of files that cannot be mapped; at least one file is.
    """

    def __init__(self, store: Files, member: Member, cache_bytes: int):
        self._store, self._groups, self._most = store, member.groups, cache_bytes
        self._leaves = {leaf.array: Spec(leaf.shape, leaf.stored) for leaf in member.leaves}
        self._arrays = {leaf.name: leaf.array for leaf in member.leaves}
        # int32[N]: the group of each row, or -1, and its place there
        self._group = np.full(member.length * len(member.end), -1, np.int32)
        self._place = np.zeros_like(self._group)
        for number, group in enumerate(member.groups):
            picked = group.rows()
            is_left = picked.number >= member.first[picked.env]
            row = rows_at(picked, member.length)[is_left]
            self._group[row], self._place[row] = number, np.flatnonzero(is_left)
        # arrays of groups, by their numbers: mapped ones, and read ones, the latest last
        self._maps: dict[int, dict[str, np.ndarray]] = {}
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.taken(f"steps.{name}".rstrip("."), rows)

    def taken(self, leaf: str, rows: np.ndarray) -> np.ndarray:
        """Return a copy of rows of a leaf, by its name in the checkpoint."""
        array = self._arrays[leaf]
        shape, dtype = self._leaves[array]
        rows = np.clip(rows, 0, len(self._group) - 1)
        found, group = np.zeros((*rows.shape, *shape), dtype), self._group[rows]
        for number in np.unique(group[group >= 0]).tolist():
            is_own = group == number
            found[is_own] = self._arrays_of(number)[array][self._place[rows[is_own]]]
        return found

    def _arrays_of(self, number: int) -> dict[str, np.ndarray]:
        """Return the arrays of a group by name, [K, ...] each."""
        with self._lock:
            if number in self._maps:
                return self._maps[number]
            group = self._groups[number]
            if isinstance(self._store, Folder) and not group.save.is_compressed:
                return self._maps.setdefault(number, self._mapped(self._store, group))
            found = self._kept.pop(number, None)
            found = group.read(self._store, self._leaves) if found is None else found
            self._kept[number] = found
            size = sum(values.nbytes for values in found.values())
            while len(self._kept) > max(self._most // max(size, 1), 1):
                del self._kept[next(iter(self._kept))]
            return found

    def _mapped(self, store: Folder, group: Group) -> dict[str, np.ndarray]:
        """Map the arrays of a group into memory, after all of its file is read once. Raises a
        CorruptCheckpointError if it is missing or damaged."""
        try:
            with open(f"{store.name}/{group.file}", "rb", opener=regular) as file:
                content = np.asarray(np.memmap(file, np.uint8, "r"))
        except (OSError, ValueError) as error:  # of an empty file
            raise CorruptCheckpointError(f"{group.file}: {error}") from error
        assert group.sums is not None
        bundle.check(group.file, content, group.sums)
        whole = {
            name: Spec((group.num_rows, *spec.shape), spec.dtype)
            for name, spec in self._leaves.items()
        }
        return bundle.arrays_of(group.file, content, whole)

    def close(self) -> None:
        self._maps, self._kept = {}, {}


class Opened(Tiered):
    """A buffer whose rows are those of a checkpoint, to sample and to read.

    Args:
      path: As for `jaxreplay.open`, as are the other arguments.

    Attributes:
      example: One env's step, or an item, of the checkpoint.
    """

    def __init__(
        self,
        path: Any,
        buffer: ReplayBuffer[Any],
        example: PyTree,
        step: int | None,
        member: str,
        cache_bytes: int,
    ):
        self._look = functools.partial(generation_of, path, step, member, 60.0, "open")
        self._saved, self._manifest = self._look()
        self._name, own = member, self._manifest.members[member]
        if TOKEN in self._manifest.rest:
            raise ValueError(
                f"open: {self._saved.name} has the index of rows in files; open their folder with "
                "jaxreplay.Replay(buffer, rows=folder)"
            )
        self._member, self._cache_bytes = own, cache_bytes
        self.read_only = (
            f"the rows of {self._saved.name} are opened to be read; Replay.load copies them, for "
            "all else"
        )
        self.example = example_of(own) if example is None else example
        if not isinstance(buffer, ReplayBuffer):
            raise ValueError(f"open: buffer must be a ReplayBuffer, got {buffer!r}")
        num_envs, layout = len(own.end), own.layout
        if (buffer.autoreset is None) != (not layout.autoreset):
            kinds = ("items", "steps") if layout.autoreset else ("steps", "items")
            raise ValueError(
                f"open: the buffer is one of {kinds[0]}, but {self._saved.name} has {kinds[1]}"
            )
        super().__init__(
            dataclasses.replace(
                buffer,
                capacity=own.length * num_envs,
                num_envs=num_envs,
                autoreset=layout.autoreset or None,
                allow_mask=layout.allow_mask,
            )
        )

    def init(self, example: PyTree) -> ReplayState:
        """Make the index of the checkpoint's rows.

        Args:
          example: As for `jaxreplay.open`.

        Returns:
          The state, on JAX's default device.

        Raises:
          ValueError: The checkpoint has other leaves than the example, shapes or dtypes.
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        manifest, name = self._manifest, self._name
        check_fits(manifest, self.buffer, {name: self.buffer}, {name: example}, {}, [])
        reading = Reading(self._saved, manifest, name, self._member.first, lambda _: None)
        state, every = self.index.init(example), np.arange(self.buffer.capacity)
        store = SavedRows(self._saved, self._member, self._cache_bytes)
        self._store = store
        steps, flags = state.rows.steps, None
        if self.buffer.autoreset is not None:
            flags = jnp.array(store.taken("flags", every))
        if self.buffer.num_agents is not None:
            steps = steps.replace(terminated=jnp.array(store.taken("steps.terminated", every)))
        counters, numbers = reading.beside(self._member.length)
        layout, own = reading.layout_for(self.index), {"steps": steps, "flags": flags}
        return self._followed(reading.put_together(self.index, layout, own, counters, numbers))

    def is_replaced(self) -> bool:
        """Return whether another save has taken the place of this one, and may have deleted its
        files."""
        return self._look()[1].folder != self._manifest.folder

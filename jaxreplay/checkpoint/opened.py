"""Rows of a checkpoint where they lie: an index on the device, and rows that a batch reads."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.checkpoint.contents import example_of
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.fits import check_fits
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.reader import Reader
from jaxreplay.checkpoint.restoring import CheckpointFiles, Reading
from jaxreplay.storage.host_rows import RowStore
from jaxreplay.storage.state import ReplayState


class SavedRows(RowStore):
    """Rows of a checkpoint, by their places in the rings. They are not changed.

    Args:
      reader: The rows.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self.close = reader.close

    def take(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.taken(f"steps.{name}".rstrip("."), rows)

    def taken(self, leaf: str, rows: np.ndarray) -> np.ndarray:
        """Return a copy of rows of a leaf, by its name in the checkpoint."""
        return self._reader.take({leaf: self._reader.order_of(rows)})[leaf]


class Opened(Tiered):
    """A buffer whose rows are those of a checkpoint, to sample and to read.

    Args:
      saved: The checkpoint's files.
      manifest: Its manifest.
      buffer: As for `jaxreplay.open`, as are the other arguments.

    Attributes:
      example: One env's step, or an item, of the checkpoint.
    """

    def __init__(
        self,
        saved: Files,
        manifest: Manifest,
        buffer: ReplayBuffer[Any],
        example: PyTree,
        member: str,
        cache_bytes: int,
    ):
        self._files, own = CheckpointFiles(saved, manifest), manifest.members[member]
        of_rows = example_of("open", manifest, member)
        self._name, self._member, self._cache_bytes = member, own, cache_bytes
        self.read_only = (
            f"the rows of {saved.name} are opened to be read; Replay.load copies them, for all else"
        )
        self.example = of_rows if example is None else example
        buffer = buffer_of("open", buffer)
        num_envs, layout = len(own.end), own.layout
        if (buffer.autoreset is None) != (not layout.autoreset):
            kinds = ("items", "steps") if layout.autoreset else ("steps", "items")
            raise ValueError(
                f"open: the buffer is one of {kinds[0]}, but {saved.name} has {kinds[1]}"
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
        files, name = self._files, self._name
        check_fits(files.manifest, self.buffer, {name: self.buffer}, {name: example}, {}, [])
        reading = Reading(files, name, self._member.first)
        state, every = self.index.init(example), np.arange(self.buffer.capacity)
        store = SavedRows(Reader(files.store, self._member, self._cache_bytes))
        self._store = store
        steps, flags = state.rows.steps, None
        if self.buffer.autoreset is not None:
            flags = jnp.array(store.taken("flags", every))
        if self.buffer.num_agents is not None:
            steps = steps.replace(terminated=jnp.array(store.taken("steps.terminated", every)))
        layout, own = reading.layout_for(self.index), {"steps": steps, "flags": flags}
        beside = reading.beside(self._member.length)
        return self._followed(reading.put_together(self.index, layout, own, *beside))

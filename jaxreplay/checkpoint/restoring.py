"""Read a checkpoint into a new state, which is filled in place: besides the state this takes only a
few chunks of memory."""

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers import memory
from jaxreplay.checkpoint import resize, rows, salvage, unwritten, zarr_arrays
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.group_reader import Ahead, GroupReader, flags_of, in_turn
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.salvage import Holes
from jaxreplay.checkpoint.store import array_name
from jaxreplay.checkpoint.zarr_arrays import Array
from jaxreplay.storage import platforms
from jaxreplay.storage.stored_arrays import is_plain

# Threads that read large chunks. More of them, or threads for small chunks, wait for each other.
_THREADS = 2


class Reading:
    """Read a checkpoint into a new state.

    Args:
      store: The store to read from.
      manifest: The checkpoint's manifest.
      progress: Called with the number of bytes read.
    """

    def __init__(self, store: Files, manifest: Manifest, progress: Callable[[int], Any]):
        self._store, self._manifest, self._progress = store, manifest, progress
        self.holes = Holes.none(len(manifest.end))

    def state(
        self, buffer: Any, before: Any, example: Any, sharding: Any, damaged: set[str]
    ) -> Any:
        """Return a new state, and set `holes` to the rows that are left out.

        Args:
          buffer: The buffer to restore for.
          before: The buffer that was saved. Only its capacity and platform may differ from
            `buffer`.
          example: One env's step, or an item.
          sharding: Placement of the leaves, as `out_shardings`, or None.
          damaged: Folders of damaged groups. They are not read, and their rows are lost.

        Raises:
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        old = None
        with defer_interrupts():
            shape = jax.eval_shape(buffer.init, example)
            specs = rows.specs_of(shape)
            if specs and (
                before.capacity != buffer.capacity or before.platform != buffer.platform or damaged
            ):
                old = resize.parted(before, rows.split(jax.eval_shape(before.init, example))[1])
                # A sampler that cannot be resized raises its error before anything is read.
                jax.eval_shape(functools.partial(resize.resized, buffer), old[0], shape.streams)
            stored, rest = self._begun(buffer, example, sharding)
        if old is None:
            rest = self._rest(rest)
            stored = self._rows(stored, specs, buffer.length) if specs else stored
        else:
            stored, rest = self._moved(
                buffer, before, self._rest(old[0]), old[1], stored, specs, damaged
            )
        state = rows.join(stored, rest)
        return state if sharding is None else jax.device_put(state, sharding)

    def _moved(
        self,
        buffer: Any,
        before: Any,
        old: Any,
        by_place: dict[str, Any],
        stored: Any,
        specs: Any,
        damaged: set[str],
    ) -> Any:
        """Restore into another capacity or platform, or without damaged rows.

        Args:
          old: The saved rest, without the sampler's values per row.
          by_place: Shapes of the sampler's values per row, by name.

        Returns:
          The rows, and the rest.
        """
        if damaged:
            read_flags = functools.partial(flags_of, self._store, self._manifest)
            self.holes = salvage.holes_of(self._manifest, damaged, before, old, read_flags)
        streams = resize.with_heads(buffer.layout(), old.streams, self.holes.num_lost)
        streams = streams.replace(**self._rows(stored, specs, buffer.length))
        if damaged:
            streams, candidate_numbers = salvage.closed(streams, self.holes)
            if (pending := streams.counters.num_pending) is not None:
                pending = jnp.where(self.holes.is_newest_lost, 0, pending)
                streams = streams.with_counters(num_pending=pending)
            old = old.replace(sampler=before.sampler.after_loss(old.sampler, candidate_numbers.now))
        with defer_interrupts():
            rest = resize.resized(buffer, old, streams)
        sampler, (stored, _) = rest.sampler, rows.split(old.replace(streams=streams))
        state, holes = (
            rows.join(stored, rest.replace(sampler=None)),
            tuple(jnp.asarray(x, jnp.int32) for x in (self.holes.start, self.holes.size)),
        )
        for name, spec in by_place.items():
            for start, values in self._pieces(f"sampler.{name}", spec):
                with defer_interrupts():
                    sampler = jax.block_until_ready(
                        resize.moved(
                            buffer, old.streams, sampler, state, name, start, values, holes
                        )
                    )
        return stored, rest.replace(sampler=sampler)

    def _begun(self, buffer: Any, example: Any, sharding: Any) -> tuple[Any, Any]:
        """Return rows to be filled, and the shapes of the rest."""
        if sharding is None and platforms.default_device().platform == "cpu":
            memory.check_fits("restore", buffer.memory(example))
            stored, rest = rows.split(jax.eval_shape(buffer.init, example))
            if is_plain(stored):
                return unwritten.like(stored), rest
        state = (
            buffer.init(example)
            if sharding is None
            else jax.jit(lambda: buffer.init(example), out_shardings=sharding)()
        )
        stored, rest = rows.split(state)
        return stored, jax.tree.map(_spec, rest)

    def _rest(self, specs: Any) -> Any:
        """Read everything but the rows."""
        return jax.tree.unflatten(
            jax.tree.structure(specs), [self._leaf(name, spec) for name, spec in named(specs)]
        )

    def _leaf(self, name: str, spec: jax.ShapeDtypeStruct) -> Any:
        leaf = jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
        if not leaf.size:
            return leaf
        if not leaf.ndim:
            return rows.put_piece(leaf, 0, self._array(name, leaf).read())
        place = rows.memory_of(leaf)
        for start, values in self._pieces(name, leaf, place):
            if place is None:
                leaf = jax.block_until_ready(rows.put_piece(leaf, start, values))
            self._progress(values.nbytes)
        return leaf

    def _pieces(
        self, name: str, leaf: Any, place: np.ndarray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Read a leaf chunk by chunk, into its memory `place` if that is given; yield each chunk's
        first index and its values."""
        array = self._array(name, leaf)
        for number in range(len(array)):
            start = number * array.chunk_rows
            size = min(array.chunk_rows, leaf.shape[0] - start)
            values = (
                np.empty((size, *leaf.shape[1:]), leaf.dtype)
                if place is None
                else place[start : start + size]
            )
            array.read_chunk(number, lambda values=values: [zarr_arrays.bytes_of(values)])
            yield start, values

    def _array(self, name: str, leaf: Any) -> Array:
        if name not in self._manifest.seals:
            raise CorruptCheckpointError(f"rest/{self._manifest.folder} has no {name}")
        return Array(
            self._store,
            array_name("rest", self._manifest.folder, name),
            leaf.shape,
            leaf.dtype,
            self._manifest.seals[name],
        )

    def _rows(self, stored: Any, specs: Any, length: int) -> Any:
        """Read all rows into `stored`, new rows, which are donated."""
        described = named(specs)
        found = named(stored) if is_plain(stored) else []
        places = [place for _, leaf in found if (place := rows.memory_of(leaf)) is not None]
        is_here = len(places) == len(described)
        # if rows are not read in place, each group that is being read takes memory
        at_once = _THREADS + (is_here and not self._store.is_far)
        ahead = Ahead(self._store, self._manifest, specs, length, self.holes)
        try:
            missing, row_bytes = (
                ahead.num_rows,
                sum(math.prod(spec.shape[1:]) * spec.dtype.itemsize for _, spec in described),
            )
            with ThreadPoolExecutor(_THREADS) as pool:
                read = GroupReader(self._store, described, places if is_here else None, ahead, pool)
                for index, values in in_turn(read, ahead, at_once):
                    if not is_here and len(index):
                        stored = rows.put(
                            stored, index, jax.tree.unflatten(jax.tree.structure(specs), values)
                        )
                    ahead.was_read()
                    missing -= len(index)
                    self._progress(len(index) * row_bytes)
                    del values
        finally:
            ahead.close()
        if missing:
            raise CorruptCheckpointError(
                f"{missing:,} rows of the checkpoint are in none of its groups"
            )
        if is_here:
            ahead.clear_others(places)
        return stored


def _spec(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=leaf.sharding if len(leaf.sharding.device_set) > 1 else None,
    )

"""Read a checkpoint into a new state, which is filled in place: besides the state this takes only a
few chunks of memory."""

import collections
import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.names import description, named, printable
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.adopt import nothing, rebuilt
from jaxreplay.buffers.jitted import program
from jaxreplay.checkpoint import arrays, rows, salvage, schema, verifying
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.fits import check_fits
from jaxreplay.checkpoint.groups import Group, array_of
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.processes import Processes
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.salvage import Holes, MissingRows
from jaxreplay.checkpoint.shards import Shards
from jaxreplay.storage import adopt, ring, row_flags, stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.state import Counters, ReplayState, Rows

_LOG = logging.getLogger("jaxreplay")
_AT_ONCE = 2  # groups in memory: one is put into the state, while the next is read
_T = TypeVar("_T")


class Restored(NamedTuple):
    """A restored state, its checkpoint's manifest, and the rows that were lost."""

    state: Any
    manifest: Manifest
    lost: list[MissingRows]


def restored(
    store: Files,
    chain: Chain,
    buffer: Any,
    shards: Shards | None,
    example: Any,
    step: int | None,
    allow_partial: bool,
    sharding: Any,
    bar: Callable[..., Any],
) -> Restored:
    """Restore the newest intact checkpoint or, for a partial restore, the newest readable one. The
    arguments from `example` to `sharding` are those of `Checkpointer.restore`.

    Args:
      buffer: The buffer.
      shards: For a sharded buffer.
      bar: Makes a progress bar from a title and a number of bytes.
    """
    processes = Processes() if shards is None else shards.processes
    given = step, allow_partial
    if any(other != given for other in processes.told(given)):
        raise ValueError("restore: step and allow_partial must be equal in all processes")
    tried: dict[str, str] = {}  # problems of damaged checkpoints, by folder
    while True:
        found, problems = processes.first(chain.read)  # others may delete and write meanwhile
        problems += [tried[one.folder] for one in found if one.folder in tried]
        untried = [one for one in found if one.folder not in tried and step in (None, one.step)]
        if not untried:
            break
        manifest = untried[0]
        # JAX would report an interrupt during its comparison of buffers as an error of the
        # buffers, here and below
        with defer_interrupts():
            check_fits(manifest, buffer, example, problems)
            num_bytes = buffer.memory(example).total
        look = functools.partial(verifying.damaged_groups, store, manifest)
        damaged = processes.first(look) if allow_partial else {}
        try:
            with bar(f"restore {manifest.step}", num_bytes) as told, processes.agreed():
                reading = Reading(store, manifest, told.update)
                reading.find_holes(set(damaged))
                state = (
                    reading.state(buffer, example, sharding)
                    if shards is None
                    else shards.restored(example, reading)
                )
        except CorruptCheckpointError as error:
            state = None  # frees what this process has read, if another one has failed
            tried[manifest.folder] = f"step {manifest.step}: {error}"
            continue
        lost = reading.holes.lost(np.asarray(manifest.end))
        if lost:
            count = sum(one.last - one.first + 1 for one in lost)
            total = sum(manifest.end) - sum(manifest.first)
            problems += [f"{count:,} of its {total:,} rows are lost:", *damaged.values()]
        if manifest.buffer != description(buffer):
            _LOG.info(
                "step %d of %s was adopted by %s", manifest.step, printable(manifest.buffer), buffer
            )
        if problems:
            what = f"restore: step {manifest.step} was restored; this is damaged:"
            warnings.warn("\n  ".join([what, *problems]), stacklevel=3)
        return Restored(state, manifest, lost)
    what, of_step, others = "nothing", "", ""
    if step is not None:
        steps = ", ".join(str(one.step) for one in reversed(found))
        what, of_step, others = f"no step {step}", f" of step {step}", f" (there are {steps})"
    if not problems:
        raise FileNotFoundError(f"restore: there is no checkpoint{of_step} under {store.name}")
    what = f"restore: {what} under {store.name} can be restored{others}:"
    raise CorruptCheckpointError("\n  ".join([what, *problems]))


class Reading:
    """Read a checkpoint into a new state.

    Args:
      store: The store to read from.
      manifest: The checkpoint's manifest.
      progress: Called with the number of bytes read.
    """

    def __init__(self, store: Files, manifest: Manifest, progress: Callable[[int], Any]):
        self._store, self._manifest, self._progress = store, manifest, progress
        self._first, self._end = (
            np.asarray(numbers, np.int64) for numbers in (manifest.first, manifest.end)
        )
        self.holes = Holes.none(len(manifest.end))

    def find_holes(self, damaged: set[str]) -> None:
        """Set `holes` to the rows that are left out: those of damaged groups."""
        self._manifest.groups.check(self._first, self._end)
        if damaged:
            self.holes = salvage.holes_of(self._manifest, damaged, self._layout("cpu"))

    def state(self, buffer: Any, example: Any, sharding: Any) -> Any:
        """Return a new state.

        Args:
          buffer: The buffer to restore for.
          example: One env's step, or an item.
          sharding: Placement of the leaves, as `out_shardings`, or None.

        Raises:
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        if not self._manifest.rows:
            with defer_interrupts():
                state = buffer.init(example)
            return jax.device_put(self._rest(state), sharding) if sharding else self._rest(state)
        with defer_interrupts():
            layout = self.layout_for(buffer)
            is_there = adopt.stays(layout, buffer.layout())
            make = functools.partial(buffer.init if is_there else _empty, example)
            if not is_there:
                make = functools.partial(make, layout)
            elif sharding is not None:
                make = jax.jit(make, out_shardings=sharding)
            new = make().rows
            stored = {"steps": new.steps, "flags": new.flags}
            del new
        stored = self.rows(stored, layout.length)
        counters, numbers = self.counters(layout.length), self.numbers(layout.length)
        state = self.put_together(buffer, layout, stored, counters, numbers)
        return state if sharding is None else jax.device_put(state, sharding)

    def layout_for(self, buffer: Any) -> Layout:
        """Return the layout in which the rows are read, for a buffer that then adopts them: that of
        the checkpoint, with the buffer's length if it has as many envs."""
        own = buffer.layout()
        layout = self._layout(own.platform)
        longer = dataclasses.replace(layout, length=own.length)
        return longer if adopt.stays(longer, own) else layout

    def _layout(self, platform: str) -> Layout:
        """Return the layout of the stored rows."""
        has_table, stored = "counters.ordinal" in self._manifest.rest, self._manifest.layout
        return stored.layout(len(self._end), self._manifest.length, platform, has_table)

    def put_together(
        self,
        buffer: Any,
        layout: Layout,
        stored: dict[str, Any],
        counters: dict[str, Any],
        numbers: dict[str, Any],
    ) -> Any:
        """Return a buffer's state of rows, counters, and what the sampler knew.

        Args:
          buffer: The buffer.
          layout: Layout of the rows.
          stored: "steps", or None if these are kept apart, and "flags". Donated.
          counters: [E] by name.
          numbers: [N] or other arrays by name.
        """
        with defer_interrupts():
            # If rows stay where they are, steps need not go through a program.
            apart = stored["steps"] if adopt.stays(layout, buffer.layout()) else None
            fresh = Rows(**stored, candidate_number=None, table=None)
            if apart is not None:
                fresh = fresh.replace(steps=None)
            state = ReplayState(fresh, Counters.zeros(layout).set(**counters), None)
            is_intact = not self.holes.folders
            made = jax.block_until_ready(_rebuild(buffer, state, numbers, is_intact=is_intact))
            return made if apart is None else made.replace(rows=made.rows.replace(steps=apart))

    def counters(self, length: int) -> dict[str, np.ndarray]:
        """Return the counters of each stream, for rings of a length: [E] by name."""
        found = {}
        for name in self._manifest.rest:
            if name.startswith("counters."):
                found[name.removeprefix("counters.")] = self._array(name, (len(self._end),))
        filled = self._end - self._first - self.holes.num_lost
        found |= {
            "position": ring.position_of(self._end, length),
            "lap": (self._end // length).astype(np.uint32),
            "filled": np.minimum(filled, length),
        }
        if "last_flags" in found and self.holes.folders:
            last = found["last_flags"]
            cleared = row_flags.after_clear(self._manifest.layout.form, jnp.asarray(last))
            found["last_flags"] = np.where(self.holes.is_newest_lost, np.asarray(cleared), last)
        return found

    def numbers(self, length: int) -> dict[str, np.ndarray]:
        """Return what the sampler knew, by name: [N] for rings of a length, or other arrays."""
        found, before = {}, self._manifest.length
        num_envs = len(self._end)
        for name in self._manifest.rest:
            if not name.startswith("sampler."):
                continue
            values = self._array(name)
            if values.shape[:1] == (num_envs * before,) and (
                length != before or self.holes.folders
            ):
                env, position = np.divmod(np.arange(num_envs * before), before)
                age = ring.position_of(self._end[env] - 1 - position, before)
                now, is_lost = self.holes.age_of(env, age)
                is_kept = ~is_lost & (age < (self._end - self._first)[env]) & (now < length)
                row = rows.rows_at(Picked(env, self._end[env] - 1 - now), length)
                moved = np.full((num_envs * length, *values.shape[1:]), nothing(values))
                moved = moved.astype(values.dtype)
                moved[row[is_kept]] = values[is_kept]
                values = moved
            found[name.removeprefix("sampler.")] = values
        return found

    def _array(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Read an array beside the rows, of a shape that must be as expected."""
        dtype, own = schema.dtype_and_shape(name, self._manifest.rest[name])
        if shape not in (None, own):
            raise CorruptCheckpointError(
                f"{self._manifest.name}: rest: {name} must have the shape {shape}, got {own}"
            )
        if 0 in own:
            return np.zeros(own, dtype)
        parts = [values for _, values in self._chunks(name, jax.ShapeDtypeStruct(own, dtype))]
        values = np.concatenate(parts) if own else parts[0]
        self._progress(values.nbytes)
        return values

    def _rest(self, rest: Any) -> Any:
        """Read a rollout's state into new leaves, which are donated."""
        leaves = []
        for name, leaf in named(rest):
            for start, values in self._chunks(name, leaf) if leaf.size else ():
                leaf = jax.block_until_ready(rows.put_piece(leaf, start, values))
                self._progress(values.nbytes)
            leaves.append(leaf)
        return jax.tree.unflatten(jax.tree.structure(rest), leaves)

    def _chunks(self, name: str, leaf: Any) -> Iterator[tuple[int, np.ndarray]]:
        if name not in self._manifest.chunks:
            raise CorruptCheckpointError(f"rest/{self._manifest.folder} has no {name}")
        return arrays.chunks(
            self._store,
            arrays.array_name("rest", self._manifest.folder, name),
            self._manifest.chunks[name],
            leaf.shape,
            leaf.dtype,
            self._manifest.is_compressed,
        )

    def rows(self, stored: Any, length: int, env: int = 0, env_stop: int | None = None) -> Any:
        """Read rows of the envs `env` to `env_stop - 1`: the newest that fit, or those that are
        left without the lost ones.

        Args:
          stored: New leaves of these envs, which are donated. None for leaves that are not read.
          length: Number of rows of each env in them.
          env: The first env. Default: 0.
          env_stop: The env after the last one. Default: that after all.
        """
        specs = jax.eval_shape(stored_arrays.plain_specs, stored)
        groups, leaves = self._manifest.groups, named(specs)
        if not leaves:
            return stored
        envs, row_of = np.arange(len(self._end)), lambda leaf: leaf.shape[1:]
        is_own = (envs >= env) & (envs < (len(envs) if env_stop is None else env_stop))
        filled = np.where(is_own, self._end - self._first, 0)
        first = self._end - (filled if self.holes.folders else np.minimum(filled, length))
        counts = groups.num_rows(first)
        most = int(groups.num_rows().max(initial=1))
        row_bytes = sum(math.prod(row_of(leaf)) * leaf.dtype.itemsize for _, leaf in leaves)
        buffers = [arrays.Buffers() for _ in leaves]

        def begin(group: Group) -> tuple[Group, list[Future[np.ndarray]]]:
            with defer_interrupts():
                return group, [
                    pool.submit(
                        array_of, self._store, group, name, row_of(leaf), leaf.dtype, own.take
                    )
                    for (name, leaf), own in zip(leaves, buffers, strict=True)
                ]

        chosen = (
            groups[at]
            for at in reversed(range(len(groups)))
            if counts[at] and groups[at].folder not in self.holes.folders
        )
        pool = ThreadPoolExecutor(self._store.num_readers, "jaxreplay-restore")
        try:
            for group, futures in _ahead(begin, chosen):
                found = [future.result() for future in futures]
                is_read, index = self._places(group, first, length, env)
                if len(index):
                    is_whole = len(index) == len(is_read)
                    values = found if is_whole else [leaf[is_read] for leaf in found]
                    values = [
                        self._closed(group, is_read, own) if name == "flags" else own
                        for (name, _), own in zip(leaves, values, strict=True)
                    ]
                    values = jax.tree.unflatten(jax.tree.structure(specs), values)
                    stored = rows.put(stored, index, values, most)
                for own, leaf in zip(buffers, found, strict=True):
                    own.give_back(leaf)
                self._progress(len(index) * row_bytes)
        finally:
            pool.shutdown(cancel_futures=True)
        return stored

    def _places(
        self, group: Group, first: np.ndarray, length: int, first_env: int
    ) -> tuple[Any, np.ndarray]:
        """Return which rows of a group are read, bool[K], and their indices in new leaves, whose
        first rows are those of `first_env`."""
        env, number = group.rows()
        is_read = number >= first[env]
        if self.holes.folders:
            age, is_lost = self.holes.age_of(env, self._end[env] - 1 - number)
            is_read &= ~is_lost & (age < length)
            number = self._end[env] - 1 - age
        return is_read, rows.rows_at(Picked(env[is_read] - first_env, number[is_read]), length)

    def _closed(self, group: Group, is_read: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Return the flags of rows, with those beside holes changed: the row before a hole ends its
        episode without a transition, and the row after it begins one."""
        if not self.holes.folders:
            return flags
        env, number = group.rows()
        age = (self._end[env] - 1 - number)[is_read]
        start, size = (one[env[is_read]] for one in (self.holes.start, self.holes.size))
        is_hole = size > 0
        is_before = (is_hole & (age[:, None] == start + size)).any(axis=1)
        is_after = (is_hole & (age[:, None] == start - 1)).any(axis=1)
        form = self._manifest.layout.form
        assert form is not None
        closes = np.asarray(row_flags.closes_episode(jnp.asarray(flags), form))
        flags = np.where(is_before & ~closes, flags | np.uint8(row_flags.FINAL), flags)
        return np.where(is_after, flags | np.uint8(row_flags.FIRST), flags)


def _empty(example: Any, layout: Layout) -> ReplayState:
    """Return an empty state of a layout, for an example of one env's step or item."""
    return jax.jit(lambda: ReplayState.empty(layout, checks.specs("restore", example), None))()


_rebuild = program(rebuilt, static=("is_intact",))


def _ahead(begin: Callable[[Any], _T], items: Iterable[Any]) -> Iterator[_T]:
    """Iterate over what `begin` returns for each item. It is called for a few items in advance."""
    begun: collections.deque[_T] = collections.deque()
    for item in items:
        if len(begun) == _AT_ONCE:
            yield begun.popleft()
        begun.append(begin(item))
    yield from begun

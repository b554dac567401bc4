"""Read a checkpoint into a new state, which is filled in place: besides the state this takes only a
few chunks of memory."""

import collections
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint import arrays, resize, rows, salvage, verifying
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.groups import Group, array_of
from jaxreplay.checkpoint.identity import check_fits
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.processes import Processes
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.checkpoint.salvage import Holes, MissingRows
from jaxreplay.checkpoint.shards import Shards

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
    resize: bool,
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
    given = step, resize, allow_partial
    if any(other != given for other in processes.told(given)):
        raise ValueError("restore: step, resize and allow_partial must be equal in all processes")
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
            before = check_fits(manifest, buffer, example, resize, problems)
            num_bytes = buffer.memory(example).total
        look = functools.partial(verifying.damaged_groups, store, manifest)
        damaged = processes.first(look) if allow_partial else {}
        try:
            with bar(f"restore {manifest.step}", num_bytes) as told, processes.agreed():
                reading = Reading(store, manifest, told.update)
                read = functools.partial(
                    reading.state, buffer, before, example, sharding, set(damaged)
                )
                state = read() if shards is None else shards.restored(example, read)
        except CorruptCheckpointError as error:
            state = None  # frees what this process has read, if another one has failed
            tried[manifest.folder] = f"step {manifest.step}: {error}"
            continue
        lost = reading.holes.lost(np.asarray(manifest.end))
        if lost:
            count = sum(one.last - one.first + 1 for one in lost)
            total = sum(manifest.end) - sum(manifest.first)
            problems += [f"{count:,} of its {total:,} rows are lost:", *damaged.values()]
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

    def state(
        self,
        buffer: Any,
        before: Any,
        example: Any,
        sharding: Any,
        damaged: set[str],
        steps: list[tuple[int, int, Any]] | None = None,
    ) -> Any:
        """Return a new state, and set `holes` to the rows that are left out.

        Args:
          buffer: The buffer to restore for.
          before: The buffer that was saved. Only its capacity and platform may differ from
            `buffer`.
          example: One env's step, or an item.
          sharding: Placement of the leaves, as `out_shardings`, or None.
          damaged: Folders of damaged groups. They are not read, and their rows are lost.
          steps: As for `_all_rows`, if the steps are not in the state. Default: they are.

        Raises:
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        self._manifest.groups.check(self._first, self._end)
        old = None
        with defer_interrupts():
            shape = jax.eval_shape(buffer.init, example)
            specs = rows.specs_of(shape)
            if specs and (
                before.capacity != buffer.capacity or before.platform != buffer.platform or damaged
            ):
                old = resize.parted(before, rows.split(jax.eval_shape(before.init, example))[1])
                # A sampler that cannot be resized raises its error before anything is read.
                jax.eval_shape(functools.partial(resize.resized, buffer), old[0], shape)
            if steps is not None:
                state = jax.jit(lambda: _without_steps(buffer.init(example)))()
            elif sharding is not None:
                state = jax.jit(lambda: buffer.init(example), out_shardings=sharding)()
            else:
                state = buffer.init(example)
            stored, rest = rows.split(state)
            del state
        read = functools.partial(self._all_rows, buffer, specs, stored, steps or [])
        if old is None:
            state = rows.join(read() if specs else stored, self._rest(rest))
        else:
            rest = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), old[0])
            state = self._moved(buffer, before, self._rest(rest), old[1], read, damaged)
        return state if sharding is None else jax.device_put(state, sharding)

    def _moved(
        self,
        buffer: Any,
        before: Any,
        old: Any,
        by_place: dict[str, Any],
        read: Callable[[], Any],
        damaged: set[str],
    ) -> Any:
        """Restore into another capacity or platform, or without damaged rows.

        Args:
          old: The saved rest, without the sampler's values per row.
          by_place: Shapes of the sampler's values per row, by name.
          read: Returns the rows, without lost ones.
        """
        if damaged:
            self.holes = salvage.holes_of(self._manifest, damaged, before, old, self._flags_of)
        streams = resize.with_heads(buffer.layout(), old, self.holes.num_lost)
        streams = streams.replace(rows=streams.rows.replace(**read()), sampler=None)
        if damaged:
            streams, candidate_number_now = salvage.closed(streams, self.holes)
            sampler = before.sampler.after_loss(old.sampler, candidate_number_now)
            old = old.replace(sampler=sampler)
        with defer_interrupts():
            rest = resize.resized(buffer, old, streams)
        sampler, (stored, _) = rest.sampler, rows.split(streams)
        state, holes = (
            rows.join(stored, rest.replace(sampler=None)),
            tuple(jnp.asarray(x, jnp.int32) for x in (self.holes.start, self.holes.size)),
        )
        for name, spec in by_place.items():
            for start, values in self._chunks(f"sampler.{name}", spec):
                with defer_interrupts():
                    sampler = jax.block_until_ready(
                        resize.moved(
                            buffer,
                            old.replace(sampler=None),
                            sampler,
                            state,
                            name,
                            start,
                            values,
                            holes,
                        )
                    )
        return rows.join(stored, rest.replace(sampler=sampler))

    def _rest(self, rest: Any) -> Any:
        """Read everything but the rows into new leaves, which are donated."""
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

    def _all_rows(
        self, buffer: Any, specs: Any, stored: Any, steps: list[tuple[int, int, Any]]
    ) -> Any:
        """Read all rows into new memory, which is donated.

        Args:
          buffer: The buffer.
          specs: Shapes and dtypes of rows in plain form.
          stored: The new rows.
          steps: New steps apart from them: the first env, the one after the last, and the leaves.
            Each entry is replaced by one with the steps that are read.

        Returns:
          The rows, but those in `steps`.
        """
        for at, (env, stop, own) in enumerate(steps):
            apart = self._rows({"steps": own}, {"steps": specs["steps"]}, buffer, env, stop)
            steps[at] = env, stop, apart["steps"]
        specs = {**specs, "steps": None} if steps else specs
        return self._rows(stored, specs, buffer, 0, buffer.num_envs)

    def _rows(self, stored: Any, specs: Any, buffer: Any, env: int, env_stop: int) -> Any:
        """Read leaves of the envs `env` to `env_stop - 1`: the newest rows that fit into the
        buffer, or those that are left without the lost ones.

        Args:
          stored: New leaves of these envs, which are donated.
          specs: Shapes and dtypes of their rows in plain form.
          buffer: The buffer.
          env: The first env.
          env_stop: The env after the last one.
        """
        groups, leaves, length = self._manifest.groups, named(specs), buffer.length
        if not leaves:
            return stored
        envs = np.arange(len(self._end))
        is_own = (envs >= env) & (envs < env_stop)
        filled = np.where(is_own, self._end - self._first, 0)
        first = self._end - (filled if self.holes.folders else np.minimum(filled, length))
        counts = groups.num_rows(first)
        most = int(groups.num_rows().max(initial=1))
        row_bytes = sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for _, leaf in leaves)
        buffers = [arrays.Buffers() for _ in leaves]

        def begin(group: Group) -> tuple[Group, list[Future[np.ndarray]]]:
            with defer_interrupts():
                return group, [
                    pool.submit(
                        array_of, self._store, group, name, leaf.shape[1:], leaf.dtype, own.take
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

    def _flags_of(self, env: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the flags of rows that the checkpoint has: uint8[K].

        Args:
          env: int64[K], the stream of each row.
          number: int64[K], its number there.
        """
        found = np.zeros(len(env), np.uint8)
        for group in self._manifest.groups:
            low, high = group.range()
            if (wanted := (number >= low[env]) & (number < high[env])).any():
                before = np.cumsum(high - low) - (high - low)
                flags = array_of(self._store, group, "flags", (), np.uint8)
                found[wanted] = flags[(before[env] + number - low[env])[wanted]]
        return found


def _without_steps(state: Any) -> Any:
    return state.replace(rows=state.rows.replace(steps=None))


def _ahead(begin: Callable[[Any], _T], items: Iterable[Any]) -> Iterator[_T]:
    """Iterate over what `begin` returns for each item. It is called for a few items in advance."""
    begun: collections.deque[_T] = collections.deque()
    for item in items:
        if len(begun) == _AT_ONCE:
            yield begun.popleft()
        begun.append(begin(item))
    yield from begun

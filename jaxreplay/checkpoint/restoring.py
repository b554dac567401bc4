"""Read a checkpoint into a new state, which is filled in place: besides the state this takes only a
few chunks of memory."""

import dataclasses
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.names import description, named, printable
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.adopt import nothing, stored
from jaxreplay.buffers.jitted import rebuild
from jaxreplay.buffers.state_checks import example_of
from jaxreplay.checkpoint import bundle, extras as extras_of, rows, verifying
from jaxreplay.checkpoint.bundle import Piece
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.fits import check_fits
from jaxreplay.checkpoint.manifest import TOKEN, Manifest, Member, in_member
from jaxreplay.checkpoint.reader import Reader
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.distributed.processes import Processes
from jaxreplay.inspection.contents import numbers_in_order
from jaxreplay.storage import relayout, ring, row_flags, stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.state import Counters, ReplayState, Rows

_LOG = logging.getLogger("jaxreplay")


class MissingRows(NamedTuple):
    """Rows of one env that a partial restore left out.

    A row's number counts the rows written for its env, from 0 on, including overwritten ones.

    Attributes:
      env: Index of the env.
      first: Number of the oldest of these rows.
      last: Number of the newest of these rows.
      member: Name of the mixture's member. Default: "", without a mixture.
    """

    env: int
    first: int
    last: int
    member: str = ""


class Restored(NamedTuple):
    """Restored states by member and extras, what a `Replay` had beside them, their checkpoint's
    manifest, and the rows that were lost."""

    states: dict[str, Any]
    extras: Any
    beside: dict[str, np.ndarray]
    manifest: Manifest
    lost: list[MissingRows]


class RestoreRequest(NamedTuple):
    """Arguments of a restore.

    Attributes:
      processes: The processes that restore together.
      savers: `StateSaver`s of the buffer's members, by name.
      bar: Makes a progress bar from `desc` and `total`, in bytes.
      buffer: The buffer.
      examples: One env's step, or item, of each.
      sharding: As for `Checkpointer.restore`, as are the others.
    """

    processes: Processes
    savers: Mapping[str, Any]
    bar: Callable[..., Any]
    buffer: Any
    examples: Mapping[str, Any]
    sharding: Any
    extras: Any
    step: int | None
    allow_partial: bool


def restored(chain: Chain, request: RestoreRequest) -> Restored:
    """Restore the newest intact checkpoint. If there is none, a partial restore takes the one of
    which most rows are left.

    Args:
      chain: The checkpoints.
      request: What to restore.
    """
    store, processes = chain.store, request.processes
    given = request.step, request.allow_partial
    if any(other != given for other in processes.told(given)):
        raise ValueError("restore: step and allow_partial must be equal in all processes")
    found, problems = [], []
    for is_partial in (False, *[True] * request.allow_partial):
        tried: dict[str, str] = {}  # problems of damaged checkpoints, by folder
        while True:
            found, problems = processes.first(chain.read)  # others may delete and write meanwhile
            problems += [tried[one.folder] for one in found if one.folder in tried]
            is_wanted = lambda one: request.step in (None, one.step)
            untried = [one for one in found if is_wanted(one) and one.folder not in tried]
            if not untried:
                break
            manifest, damaged = untried[0], {}
            left = {name: own.first for name, own in manifest.members.items()}
            if is_partial:
                sums = {name: own for one in untried for name, own in one.sums().items()}
                groups = {name: own for name, own in sums.items() if name.startswith("rows/")}
                look = functools.partial(verifying.problems_of, store, groups)
                damaged = processes.first(look)
                lefts = [_left(one, damaged) for one in untried]
                num_left = [
                    sum(int((one.members[name].end - first).sum()) for name, first in own.items())
                    for one, own in zip(untried, lefts, strict=True)
                ]
                at = int(np.argmax(num_left))
                manifest, left = untried[at], lefts[at]
            try:
                return _read(store, request, manifest, left, problems, damaged)
            except CorruptCheckpointError as error:
                tried[manifest.folder] = f"step {manifest.step}: {error}"
    what, of_step, others = "nothing", "", ""
    if request.step is not None:
        steps = ", ".join(str(one.step) for one in reversed(found))
        what, of_step = f"no step {request.step}", f" of step {request.step}"
        others = f" (there are {steps})"
    if not problems:
        raise FileNotFoundError(f"restore: there is no checkpoint{of_step} under {store.name}")
    what = f"restore: {what} under {store.name} can be restored{others}:"
    raise CorruptCheckpointError("\n  ".join([what, *problems]))


def _left(manifest: Manifest, damaged: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the number of each stream's oldest row that is left, int64[E], by member: those older
    than the newest damage count as overwritten."""
    found = {}
    for name, member in manifest.members.items():
        first = member.first
        for group in member.groups:
            if group.file in damaged:
                low, high = group.range()
                first = np.where(low < high, np.maximum(first, high), first)
        found[name] = _aligned(member, first)
    return found


def _aligned(member: Member, first: np.ndarray) -> np.ndarray:
    """Return the numbers of oldest rows, int64[E], all equal if the streams step together."""
    is_together = member.layout.layout().lockstep
    return np.full_like(first, first.max(initial=0)) if is_together else first


def _read(
    store: Files,
    request: RestoreRequest,
    manifest: Manifest,
    left: Mapping[str, np.ndarray],
    problems: list[str],
    damaged: Mapping[str, str],
) -> Restored:
    """Read one checkpoint.

    Args:
      store: Its files.
      request: What to restore.
      manifest: Its manifest.
      left: int64[E], the first row of each stream to read, by member.
      problems: Problems of other checkpoints, for the warning.
      damaged: Problems of files with rows, by their names.
    """
    # JAX would report an interrupt during its comparison of buffers as an error of the buffers,
    # here and below
    with defer_interrupts():
        wanted = extras_of.specs_of(request.extras)
        members = {name: saver.buffer for name, saver in request.savers.items()}
        check_fits(manifest, request.buffer, members, request.examples, wanted, problems)
        num_bytes = sum(one.memory(request.examples[name]).total for name, one in members.items())
    states, title = {}, f"restore {manifest.step}"
    with request.bar(desc=title, total=num_bytes) as told, request.processes.agreed():
        files = CheckpointFiles(store, manifest, told.update)
        for name, saver in request.savers.items():
            reading = Reading(files, name, left.get(name))
            states[name] = saver.restored(request.examples[name], reading, request.sharding)
        names = [name for name in manifest.rest if name.startswith(extras_of.BESIDE)]
        found = files.arrays([*wanted, *names])
        extras = extras_of.extras_like(request.extras, found.__getitem__)
        beside = {name.removeprefix(extras_of.BESIDE): found[name] for name in names}
    lost = [
        MissingRows(env, int(member.first[env]), int(left[name][env]) - 1, name)
        for name, member in manifest.members.items()
        for env in np.flatnonzero(left[name] > member.first).tolist()
    ]
    if lost:
        count = sum(one.last - one.first + 1 for one in lost)
        total = sum(int((one.end - one.first).sum()) for one in manifest.members.values())
        own = manifest.sums()
        told_of = [text for name, text in damaged.items() if name in own]
        problems = [*problems, f"{count:,} of its {total:,} rows are lost:", *told_of]
    if manifest.buffer != description(request.buffer):
        before = printable(manifest.buffer)
        _LOG.info("step %d of %s was adopted by %s", manifest.step, before, request.buffer)
    if problems:
        what = f"restore: step {manifest.step} was restored; this is damaged:"
        warnings.warn("\n  ".join([what, *problems]), stacklevel=4)
    return Restored(states, extras, beside, manifest, lost)


class CheckpointFiles(NamedTuple):
    """Files of a checkpoint: its store, its manifest, and what is called with the number of bytes
    that were read."""

    store: Files
    manifest: Manifest
    progress: Callable[[int], Any] = lambda num_bytes: None

    def pieces(self, names: Iterable[str]) -> Iterator[tuple[Piece, np.ndarray]]:
        """Read arrays beside the rows, of these names, piece by piece, each in order."""
        manifest, wanted, specs = self.manifest, {*names}, self.manifest.specs()
        files = [*itertools.islice(manifest.rest_files(), len(manifest.files) + 1)]
        if len(files) != len(manifest.files):
            raise CorruptCheckpointError(
                f"{manifest.name}: files, rest: they do not fit each other"
            )
        for (file, pieces), sums in zip(files, manifest.files, strict=True):
            if wanted.isdisjoint(piece.name for piece in pieces):
                continue
            own = {}
            for name, start, stop in pieces:
                spec = specs[name]
                shape = (stop - start, *spec.shape[1:]) if spec.shape else ()
                own[name] = jax.ShapeDtypeStruct(shape, spec.dtype)
            found = bundle.read(self.store, file, sums, manifest.is_compressed, own)
            for piece in pieces:
                if piece.name in wanted:
                    yield piece, found[piece.name]
                    self.progress(found[piece.name].nbytes)

    def arrays(self, names: list[str]) -> dict[str, np.ndarray]:
        """Read whole arrays beside the rows, by name."""
        specs = self.manifest.specs()
        found = {name: np.zeros(specs[name].shape, specs[name].dtype) for name in names}
        for piece, values in self.pieces(names):
            own = found[piece.name]
            own[slice(piece.start, piece.stop) if own.ndim else ...] = values
        return found


class Reading:
    """Read the rows of a checkpoint into a new state.

    Args:
      files: The checkpoint's files.
      name: Name of the member whose rows are read.
      first: int64[E], the number of each stream's oldest row that is read; None for a rollout.

    Attributes:
      end: int64[E], the number of each stream's newest row, plus 1.
    """

    def __init__(self, files: CheckpointFiles, name: str, first: np.ndarray | None):
        self._files, self._manifest, self._name = files, files.manifest, name
        if first is not None:
            self._member: Member = files.manifest.members[name]
            # int64[E]: numbers of the oldest row to read, and of the newest plus 1
            self._first, self.end = first, self._member.end
            self._is_whole = bool((first == self._member.first).all())

    @property
    def token(self) -> str | None:
        """Token of the files that have the rows; None if the checkpoint has them."""
        own = in_member(self._name, TOKEN)
        has_index = own in self._manifest.rest
        return self._files.arrays([own])[own].tobytes().hex() if has_index else None

    def since(self, first: np.ndarray) -> "Reading":
        """Return the reading of the rows from the numbers int64[E] on."""
        left = np.minimum(np.maximum(self._first, first), self.end)
        return Reading(self._files, self._name, _aligned(self._member, left))

    def state(self, buffer: Any, example: Any, sharding: Any) -> Any:
        """Return a new state.

        Args:
          buffer: The buffer to restore for.
          example: One env's step, or an item.
          sharding: Placement of the leaves, as `out_shardings`, or None.

        Raises:
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        if not self._manifest.members:
            with defer_interrupts():
                state = buffer.init(example)
            state = self._filled(state)
            return jax.device_put(state, sharding) if sharding else state
        with defer_interrupts():
            layout = self.layout_for(buffer)
            is_there = relayout.stays(layout, buffer.layout())
            make = functools.partial(buffer.init, example)
            if not is_there:  # the example of one env's step may be a mapping
                example = example_of(layout, jax.eval_shape(make).rows.steps)
                make = functools.partial(_empty, example, layout)
            elif sharding is not None:
                make = jax.jit(make, out_shardings=sharding)
            new = stored(make())
        new = self.rows(new, layout.length)
        state = self.put_together(buffer, layout, new, *self.beside(layout.length))
        return state if sharding is None else jax.device_put(state, sharding)

    def layout_for(self, buffer: Any) -> Layout:
        """Return the layout in which the rows are read, for a buffer that then adopts them: that of
        the checkpoint, with the buffer's length if it has as many envs."""
        own = buffer.layout()
        has = lambda counter: in_member(self._name, f"counters.{counter}") in self._manifest.rest
        layout = self._member.layout.layout(
            num_envs=len(self.end),
            length=self._member.length,
            platform=own.platform,
            has_table=has("ordinal"),
            allow_write=has("num_ignored_writes"),
        )
        longer = dataclasses.replace(layout, length=own.length)
        return longer if relayout.stays(longer, own) else layout

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
            apart = stored["steps"] if relayout.stays(layout, buffer.layout()) else None
            own = stored if apart is None else {**stored, "steps": None}
            fresh = Rows(**own, candidate_number=None, table=None)
            state = ReplayState(fresh, _counters(layout, counters), None)
            made = rebuild(buffer, state, numbers, is_intact=self._is_whole)
            made = jax.block_until_ready(made)
            return made if apart is None else made.replace(rows=made.rows.replace(steps=apart))

    def beside(self, length: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the counters of each stream, [E] by name, and what the sampler knew, [N] or other
        arrays by name, for rings of a length."""
        kinds = [in_member(self._name, kind) for kind in ("counters.", "sampler.")]
        names = [name for name in self._manifest.rest if name.startswith(tuple(kinds))]
        found = self._files.arrays(names)
        counters, numbers = (
            {name.removeprefix(kind): found[name] for name in names if name.startswith(kind)}
            for kind in kinds
        )
        for name, values in counters.items():
            if values.shape != self.end.shape:
                raise CorruptCheckpointError(
                    f"{self._manifest.name}: rest: counters.{name} must have the shape "
                    f"{self.end.shape}, got {values.shape}"
                )
        span, own = rows.span_of(counters, self._member.length), self._member
        if (span.first != own.first).any() or (span.end != own.end).any():
            raise CorruptCheckpointError(f"{self._manifest.name}: counters do not fit first, end")
        counters |= {
            "position": ring.position_of(self.end, length),
            "lap": (self.end // length).astype(np.uint32),
            "filled": np.minimum(self.end - self._first, length),
        }
        if "last_flags" in counters and not self._is_whole:
            last = counters["last_flags"]
            form = self._member.layout.autoreset or None
            cleared = np.asarray(row_flags.after_clear(form, jnp.asarray(last)))
            is_lost = (self._first == self.end) & (self._member.first < self.end)
            counters["last_flags"] = np.where(is_lost, cleared, last)
        return counters, {name: self._placed(values, length) for name, values in numbers.items()}

    def _placed(self, values: np.ndarray, length: int) -> np.ndarray:
        """Return numbers of rows, [N], at their places in rings of a length. Others stay."""
        before, num_envs = self._member.length, len(self.end)
        is_moved = length != before or not self._is_whole
        if values.shape[:1] != (num_envs * before,) or not is_moved:
            return values
        filled = np.minimum(self.end - self._first, length)
        kept = Picked(*numbers_in_order(self.end - filled, self.end))
        moved = np.full((num_envs * length, *values.shape[1:]), nothing(values), values.dtype)
        old, new = (rows.rows_at(kept, one) for one in (before, length))
        moved[new] = values[old]
        return moved

    def _filled(self, state: Any) -> Any:
        """Read a rollout's state into new leaves, which are donated."""
        leaves = dict(named(state))
        for piece, values in self._files.pieces(leaves):
            made = rows.put_piece(leaves[piece.name], piece.start, values)
            leaves[piece.name] = jax.block_until_ready(made)
        return jax.tree.unflatten(jax.tree.structure(state), leaves.values())

    def rows(self, stored: Any, length: int, env: int = 0, env_stop: int | None = None) -> Any:
        """Read rows of the envs `env` to `env_stop - 1`: the newest that fit.

        Args:
          stored: New leaves of these envs, which are donated. None for leaves that are not read.
          length: Number of rows of each env in them.
          env: The first env. Default: 0.
          env_stop: The env after the last one. Default: that after all.
        """
        specs = jax.eval_shape(stored_arrays.plain_specs, stored)
        leaves = named(specs)
        if not leaves:
            return stored
        envs = np.arange(len(self.end))
        is_own = (envs >= env) & (envs < (len(envs) if env_stop is None else env_stop))
        filled = np.where(is_own, np.minimum(self.end - self._first, length), 0)
        first = self.end - filled

        def put(picked: Picked, found: dict[str, np.ndarray], most: int) -> None:
            nonlocal stored
            index = rows.rows_at(picked._replace(env=picked.env - env), length)
            own = [found[name] for name, _ in leaves]
            values = jax.tree.unflatten(jax.tree.structure(specs), own)
            stored = rows.with_rows(stored, index, values, most)
            self._files.progress(sum(leaf.nbytes for leaf in own))

        Reader(self._files.store, self._member).parts(first, put)
        return stored


def _empty(example: Any, layout: Layout) -> ReplayState:
    """Return an empty state of a layout, for an example of one env's step or item."""
    leaves, structure = jax.tree.flatten(checks.specs("restore", example))
    return _compiled_empty(tuple(leaves), structure, layout)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled_empty(leaves: tuple[Any, ...], structure: Any, layout: Layout) -> ReplayState:
    return ReplayState.empty(layout, jax.tree.unflatten(structure, leaves), None)


@functools.partial(jax.jit, static_argnums=0)
def _counters(layout: Layout, values: dict[str, Any]) -> Counters:
    return Counters.zeros(layout).set(**values)

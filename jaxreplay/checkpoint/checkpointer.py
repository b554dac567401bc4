"""`Checkpointer`: incremental saves of one run, and restores."""

import contextlib
import copy
import functools
import json
import operator
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from tqdm import tqdm

from jaxreplay._util import checks
from jaxreplay._util.checks import check_not_forked
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.rollout import Rollout
from jaxreplay.buffers.state_checks import check_state
from jaxreplay.checkpoint import planning, restoring, rows, schema, verifying
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError
from jaxreplay.checkpoint.fits import check_path
from jaxreplay.checkpoint.manifest import STEPS, Manifest
from jaxreplay.checkpoint.processes import Processes
from jaxreplay.checkpoint.rows import Parts
from jaxreplay.checkpoint.salvage import MissingRows
from jaxreplay.checkpoint.saving import Saving
from jaxreplay.checkpoint.shards import Shards
from jaxreplay.checkpoint.store import store_at
from jaxreplay.checkpoint.verifying import Rounds, Verified
from jaxreplay.distributed.sharded import Sharded
from jaxreplay.storage import row_flags

_MIB = 2**20
_SMALL = 8 * _MIB  # bytes that `advance` copies at a time


class Checkpointer:
    """Save a buffer's state under a path, and restore it bit-identically.

    A save writes the rows added since the previous save. Written completely each time are what the
    sampler knows, such as a priority of each row, the counters of each env, and all of a `Rollout`.
    A checkpoint becomes visible when its manifest is written, as the last file. If a save fails,
    the previous checkpoint is kept. Besides the state, a save or restore takes at most three chunks
    of memory; a save also what it writes completely, and a restore up to 64 bytes a row for what it
    computes. With a sharded buffer, that is on the host of each process.

    After a restore, the attributes `step`, `metadata` and `missing_rows` describe the restored
    checkpoint; before, they are None, {} and [].

    Args:
      path: Where the checkpoints of one run are kept. A folder; a URL that TensorStore opens, such
        as "gs://bucket/replay"; an open `tensorstore.KvStore`; or TensorStore's specification of
        one: {"driver": "s3", "bucket": "runs", "path": "replay",
        "endpoint": "http://127.0.0.1:9000", "aws_region": "us-east-1"}. The first save claims the
        path for this object, until `close` or until the object or its process ends. Reading needs
        no claim.
      buffer: The `ReplayBuffer`, `Rollout` or `jaxreplay.sharded` buffer whose states are saved. A
        sharded state is saved as that of one buffer, so that any number of devices restores it. If
        it is sharded over several processes, all call the methods together, with equal arguments,
        and see one path. An error in one is raised in all.
      max_to_keep: Number of newest checkpoints to keep. Default: 3.
      chunk_bytes: Memory in bytes for rows that are being copied or written. A file holds at most
        half of it, but at least one row. Default: 64 MiB.
      compression_level: Level of zstd compression, from 1 (fast) to 22, or None to write without
        compression. Default: 1.
      progress: Whether to show a progress bar. Default: only if stderr is a terminal.
      timeout: Seconds that a request to an object store may take. Default: 60.

    Raises:
      ValueError: An argument is invalid, or the buffer is sharded over devices of other processes
        only.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> from jaxreplay.checkpoint import Checkpointer
      >>> buffer = jr.items(capacity=4, batch_size=2)
      >>> checkpointer = Checkpointer("memory://example", buffer)
      >>> state = buffer.add(buffer.init(jnp.zeros(())), jnp.ones(1))
      >>> checkpointer.save(state, step=1)
      >>> int(buffer.size(checkpointer.restore(jnp.zeros(()))))
      1
    """

    def __init__(
        self,
        path: Any,
        buffer: Any,
        *,
        max_to_keep: int = 3,
        chunk_bytes: int = 64 * _MIB,
        compression_level: int | None = 1,
        progress: bool | None = None,
        timeout: float = 60.0,
    ):
        if not isinstance(buffer, ReplayBuffer | Rollout | Sharded):
            raise ValueError(
                "Checkpointer: buffer must be a ReplayBuffer, a Rollout or a sharded buffer, got "
                f"{type(buffer).__name__}; instead of jaxreplay.jit(buffer) pass "
                "buffer; for a mixture use one Checkpointer and one path per part"
            )
        checks.check_size("Checkpointer", "max_to_keep", max_to_keep)
        checks.check_size("Checkpointer", "chunk_bytes", chunk_bytes)
        self.buffer: Any = buffer
        self._shards = Shards(buffer) if isinstance(buffer, Sharded) else None
        self._buffer: Any = buffer if self._shards is None else self._shards.buffer
        self._processes = Processes() if self._shards is None else self._shards.processes
        self._pid = os.getpid()
        self._store = store_at(path, timeout)
        self.path: str = self._store.name
        self._chain = Chain(self._store, max_to_keep)
        self._chunk_bytes, self._level, self._bar = chunk_bytes, compression_level, bars(progress)
        self._base: Manifest | None = None  # which the current state continues
        self._origin = ""  # folder of the restored checkpoint
        self._saving: Saving | None = None
        self._has_saved = False
        # number of the newest manifest while this object writes to the path, None if not known
        self._newest: int | None = None
        self._rounds = Rounds(self._store)
        self.step: int | None = None  # of the restored checkpoint
        self.metadata: dict[str, Any] = {}  # of the restored checkpoint
        # rows that a partial restore left out
        self.missing_rows: list[MissingRows] = []

    def all_steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, newest last. Only their manifests are
        checked."""
        return [manifest.step for manifest in reversed(self._chain.read()[0])]

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none."""
        return steps[-1] if (steps := self.all_steps()) else None

    @property
    def is_saving(self) -> bool:
        """True from `save(..., blocking=False)` until `wait_until_finished` or, in one process
        alone, `advance` finds the save complete or failed."""
        return self._saving is not None

    def save(
        self,
        state: Any,
        step: int | None = None,
        *,
        blocking: bool = True,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint.

        A background save that is still running is finished first. If the save fails, the existing
        checkpoints are kept.

        Args:
          state: The buffer's state. It stays valid. Rows that it has in common with the state that
            was last saved or restored here are not written again.
          step: 64-bit integer that names the checkpoint. A checkpoint of the same step is replaced.
            Default: the newest step plus 1, and 0 for the first save.
          blocking: Whether to return only after the checkpoint is written. If False, rows are
            copied step by step: call `advance` before each `add`, and `wait_until_finished` before
            a `clear` and at the end, where several processes commit the save. What is written
            completely is copied first; if a `Rollout` has more than `chunk_bytes`, it is written
            before this returns. Default: True.
          metadata: JSON-compatible dict to store with the checkpoint, nested at most 100 deep.
            After a restore it is the attribute `metadata`. Default: an empty dict.

        Raises:
          PathInUseError: Another process or `Checkpointer` writes to the path.
          OSError: The checkpoint could not be written, for example because the disk is full.
          RuntimeError: Rows were overwritten before they were copied, or the process was forked.
          ValueError: `state` belongs to another buffer, the path has checkpoints of another buffer,
            `step` exceeds 64 bits, or `metadata` is nested too deep. Or several processes pass
            different arguments, or a state that does not lie where `init` puts it.
          TypeError: `step` is no integer, or `metadata` is not JSON-compatible.
        """
        check_not_forked("this Checkpointer", self._pid)
        with self._processes.agreed():
            self._check_state("save", state)
            metadata = _checked_metadata(metadata or {})
            step = None if step is None else _checked_step(step)
        self.wait_until_finished(state)
        with self._ending():
            parts = self._parts_of(state)
            stored, rest = (rows if self._shards is None else self._shards).split(state)
            plan = self._planned(stored, rest, parts, step, blocking, metadata)
            self._begin(plan, rest, parts, blocking)
            if blocking:
                self._finish(parts)
            else:
                self._advance(state, 0)

    def _planned(
        self,
        stored: Any,
        rest: Any,
        parts: Parts,
        step: int | None,
        blocking: bool,
        metadata: dict[str, Any],
    ) -> planning.Plan:
        """Claim the path, and plan a save. All processes return the same plan."""
        first, found, self._newest = self._processes.first, [], None
        options = self._chunk_bytes, self._level, blocking

        def enter() -> tuple[str, int, bool, Any, Any]:
            found.extend(self._chain.read()[0])
            newest = found[0] if found else None
            folders = [one.folder for one in found]
            base = None if self._base is None else self._base.folder
            folder = self._chain.enter(newest, base in folders[:1])
            own = (0 if newest is None else newest.step + 1) if step is None else step
            return folder, _checked_step(own), base in folders, metadata, options

        def check() -> None:
            if damaged:  # or another writer was faster, and has deleted them
                self._chain.check_newest(plan.draft.number - 1)
            goes_on = self._base is not None or self._origin in [one.folder for one in found]
            check_path(self._store.name, found, plan.draft, goes_on)
            self._chain.collect(self._base)

        folder, step, is_base_there, metadata, of_first = first(enter)
        if options != of_first:
            raise ValueError(
                "save: chunk_bytes, compression_level and blocking must be equal in all processes"
            )
        self._chain.check_entered(folder, "is another place for each process: share it")
        self._newest = int(folder[:10]) - 1
        if not is_base_there:
            self._base = None  # it was deleted by another process
        # Some groups are copied while others are written; compressed ones are in memory twice.
        group_bytes = self._chunk_bytes // (2 if self._level is None else 4)
        damaged: dict[str, str] = {}
        planned = functools.partial(
            planning.planned,
            self._store,
            self._buffer,
            stored,
            rest,
            parts,
            self._base,
            folder=folder,
            step=step,
            metadata=metadata,
            group_bytes=group_bytes if blocking else min(group_bytes, _SMALL),
            is_compressed=self._level is not None,
            damaged=damaged,
        )
        plan = planned()
        while more := first(functools.partial(self._rounds.look, plan)):
            damaged |= more
            plan = planned()
        first(check)
        for problem in damaged.values():
            warnings.warn(
                f"save: {problem}: damaged since it was written; its rows are still in the buffer "
                "and are written again",
                stacklevel=3,
            )
        return plan

    def _begin(self, plan: planning.Plan, rest: Any, parts: Parts, blocking: bool) -> None:
        """Start the threads of a save, and let them write everything but the rows."""
        is_rollout = not plan.draft.rows  # whose leaves are not copied yet
        rest_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(rest))
        is_copied = is_rollout and rest_bytes <= self._chunk_bytes and not blocking
        num = self._processes.num
        bar = self._bar(f"save {plan.draft.step}", plan.num_bytes // num)  # about this one's part
        with defer_interrupts():  # an interrupt here would leave threads that nothing ends
            self._saving = Saving(
                self._store,
                plan,
                parts,
                rows.copied(rest) if is_copied else rest,
                is_own=is_copied or not is_rollout,
                chunk_bytes=self._chunk_bytes // 8,
                level=self._level,
                is_alone=num == 1,
                commit=lambda written, chunks: self._commit(plan.manifest(written, chunks), bar),
                progress=bar.update,
            )

    def _commit(self, manifest: Manifest, bar: Any) -> None:
        """Write the manifest of a complete checkpoint, and delete checkpoints that are not kept."""
        self._processes.first(lambda: self._chain.commit(manifest))
        self._base, self._has_saved, self._newest = manifest, True, manifest.number
        bar.close()
        self._processes.first(self._chain.collect)

    def advance(self, state: Any, num_steps: int = 1) -> None:
        """Copy some rows for a background save, those first that will be overwritten first.

        Does nothing if no save is running. An error of the save is raised here, or, if several
        processes save, by `wait_until_finished`.

        Args:
          state: The buffer's state before the next `add` or `extend`. It stays valid.
          num_steps: Number of steps that the next call adds per env. Default: 1.

        Raises:
          OSError: The checkpoint could not be written.
          PathInUseError: Another writer has taken the path.
          RuntimeError: `state` is from another run, or rows were overwritten or cleared before they
            were copied.
        """
        if self._saving is not None:
            with self._ending(is_together=False):
                self._advance(state, num_steps)

    def _advance(self, state: Any, num_steps: int) -> None:
        assert self._saving is not None
        if not self._saving.is_running and self._processes.num == 1:
            self._saving.join()
            self._saving = None
        elif not self._saving.is_copied:
            rows_per_step = row_flags.rows_per_step(self._buffer.autoreset)
            self._saving.advance(lambda: self._parts_of(state), num_steps * rows_per_step)

    def _parts_of(self, state: Any) -> Parts:
        """Return the parts of a state, from which rows can be copied."""
        return Parts.of(state) if self._shards is None else self._shards.parts(state)

    def wait_until_finished(self, state: Any) -> None:
        """Copy all rows that a background save still needs, and wait until it is complete.

        Does nothing if no save is running. An error of the save is raised here.

        Args:
          state: The buffer's current state. It stays valid.

        Raises:
          OSError: The checkpoint could not be written.
          PathInUseError: Another writer has taken the path.
          RuntimeError: `state` is from another run, or rows were overwritten or cleared before they
            were copied.
        """
        if self._saving is not None:
            with self._ending():
                self._finish(self._parts_of(state))

    def _finish(self, parts: Parts) -> None:
        saving = self._saving
        assert saving is not None
        own = saving.finish(parts)
        if self._processes.num > 1:
            written, chunks = {}, {}
            for one, its_chunks in self._processes.told(own):
                written |= one
                chunks |= its_chunks
            saving.commit(written, chunks)
        self._saving = None

    def close(self) -> None:
        """End a background save and release the path to other writers.

        A save whose rows are all copied is completed; any other is cancelled. The object can still
        be used: its next save claims the path again.

        Raises:
          RuntimeError: A save was cancelled, because it needed more rows.
          OSError: The save could not be written.
        """
        try:
            if (saving := self._saving) is not None:
                with self._ending():
                    if not saving.is_copied:
                        raise RuntimeError(
                            "close: a save was incomplete and is cancelled; call "
                            "wait_until_finished(state) first"
                        )
                    self._finish(Parts([], [], self._processes))
        finally:
            self._chain.leave()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Close. After an error, cancel a save that needs more rows, and let the error
        propagate."""
        saving, is_alone = self._saving, self._processes.num == 1  # others know of no error
        if kind is not None and saving is not None and not (saving.is_copied and is_alone):
            self._abandon()
        self.close()

    def restore(
        self,
        example: Any,
        step: int | None = None,
        *,
        allow_partial: bool = False,
        sharding: Any = None,
    ) -> Any:
        """Restore the newest intact checkpoint, or the one of a step, as a new state.

        The buffer adopts the saved rows, as `ReplayBuffer.adopt` does those of another buffer's
        state: its configuration may have changed since. If it has not, everything that later
        operations depend on is bit-identical to what was saved; cleared rows are zeros. If the
        newest checkpoint is damaged, an older one is restored, with a warning. The new state takes
        its own memory: delete an old state first. If `num_envs` changed, the restore takes the
        memory of the saved rows, too.

        The attributes `step`, `metadata` and `missing_rows` are set from the restored checkpoint.

        Args:
          example: One step of one env, or one item, as for `buffer.init`: pytree of arrays or
            `jax.ShapeDtypeStruct`s.
          step: Step of the checkpoint to restore. Default: the newest intact checkpoint.
          allow_partial: Whether a checkpoint with damaged rows may be restored without them, with a
            warning. The gaps are closed, and an episode that lost rows counts as truncated there,
            so steps are paired only if they followed each other. `missing_rows` lists the lost
            rows. Default: False.
          sharding: Placement of the state's leaves, in the form of `out_shardings` of `jax.jit`.
            If it is given, free memory is not checked beforehand. A sharded buffer takes none.
            Default: the default device, or the sharded buffer's mesh.

        Returns:
          A new state.

        Raises:
          FileNotFoundError: There is no checkpoint, or none of that step.
          ValueError: The steps of the checkpoint have other leaves, which the error names, or
            another `autoreset`. Or `sharding` is given for a sharded buffer, or
            several processes pass different arguments.
          CorruptCheckpointError: No checkpoint is intact, or the one of that step is damaged; the
            error names the files.
          RuntimeError: A background save is running, or the process was forked.
        """
        check_not_forked("this Checkpointer", self._pid)
        if self._saving is not None:
            raise RuntimeError(
                "restore: a save is under way; call wait_until_finished(state) first"
            )
        if self._shards is not None and sharding is not None:
            raise ValueError("restore: a sharded buffer's mesh is its own; leave out sharding")
        with self._processes.agreed():
            found = restoring.restored(
                self._store,
                self._chain,
                self._buffer,
                self._shards,
                example,
                step,
                allow_partial,
                sharding,
                self._bar,
            )
        self._base, self.step, self.metadata = (
            None if found.lost else found.manifest,
            found.manifest.step,
            copy.deepcopy(found.manifest.metadata),
        )
        self._origin, self.missing_rows = found.manifest.folder, found.lost
        return found.state

    def verify(self) -> list[Verified]:
        """Read all files of all checkpoints and compare them with their checksums.

        Returns:
          A `Verified` for each checkpoint, newest first, with its problems.
        """
        return verifying.verified(self._store, self._chain, self._bar)

    @contextlib.contextmanager
    def _ending(self, is_together: bool = True) -> Iterator[None]:
        """Cancel the running save on an error.

        Args:
          is_together: Whether all processes come here together.
        """
        check_not_forked("this Checkpointer", self._pid)
        try:
            with self._processes.agreed() if is_together else contextlib.nullcontext():
                try:
                    yield
                except FileNotFoundError as error:  # files of a late writer are deleted
                    if self._newest is not None and not self._processes.is_known(error):
                        self._chain.check_newest(self._newest)
                    raise
        except BaseException:
            self._abandon()
            if not self._has_saved:  # free the path for other writers
                self._chain.leave()
            raise

    def _abandon(self) -> None:
        saving, self._saving = self._saving, None
        self._chain.abandon()
        if saving is not None:
            saving.abandon()

    def _check_state(self, where: str, state: Any) -> None:
        if self._shards is not None:
            self._shards.check(where, state)
        elif isinstance(self.buffer, ReplayBuffer):
            check_state(where, self.buffer, state)
        else:
            self.buffer.steps(state)  # raises the same error


def _checked_step(step: Any) -> int:
    low, high = STEPS
    if not low <= operator.index(step) <= high:
        raise ValueError(f"save: step must be a 64-bit integer, got {step}; call save(state, step)")
    return operator.index(step)


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of the metadata as a restore will return it."""
    try:
        own: dict[str, Any] = json.loads(json.dumps(metadata))
        schema.decoded("save: metadata", schema.Metadata, own)
    except (RecursionError, CorruptCheckpointError):
        raise ValueError(
            f"save: metadata must be JSON, nested at most {schema.MOST_DEPTH} deep"
        ) from None
    return own


def bars(is_shown: bool | None) -> Any:
    """Return a function of a title, a total and a unit that makes a progress bar.

    Args:
      is_shown: Whether to show the bar, or None to show it only if stderr is a terminal.
    """

    def bar(title: str, total: int, unit: str = "B") -> "tqdm[Any]":
        is_hidden = None if is_shown is None else not is_shown
        options = {"unit_scale": True, "disable": is_hidden, "file": sys.stderr}
        return tqdm(total=total, desc=title, unit=unit, **options)

    return bar

"""Saves of one run, each on top of the one before, and the way back."""

import contextlib
import copy
import json
import operator
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxreplay._util import checks
from jaxreplay._util.checks import check_not_forked
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.rollout import Rollout
from jaxreplay.buffers.state_checks import check_state
from jaxreplay.checkpoint import planning, reading, rows, schema, verifying
from jaxreplay.checkpoint.files import CorruptCheckpointError
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.identity import check_path
from jaxreplay.checkpoint.manifest import STEPS, Manifest
from jaxreplay.checkpoint.progress import bars
from jaxreplay.checkpoint.rounds import Rounds
from jaxreplay.checkpoint.salvage import MissingRows
from jaxreplay.checkpoint.saving import Saving
from jaxreplay.checkpoint.store import store_at
from jaxreplay.checkpoint.verifying import Verified

_MIB = 2**20
_SMALL = 8 * _MIB  # bytes that `advance` copies at a time


class Checkpointer:
    """Saves a buffer's state under a path, and restores it exactly.

    A save writes the rows that came since the one before, and everything else whole: priorities,
    heads, episode tables. It is there once its manifest is, which is written last; until then the
    one before it can be restored, whatever happens. Beside the state a save and a restore take at
    most three chunks of memory. A rollout is written whole each time.

    Args:
      path: of one run. From its first save on this object alone writes to it, until `close`, or
        until it or its process is gone; who only reads needs no leave. A folder, or a URL that
        TensorStore opens: "gs://bucket/replay"; or TensorStore's specification of a store:
        {"driver": "s3", "bucket": "runs", "path": "replay", "endpoint": "http://127.0.0.1:9000",
        "aws_region": "us-east-1"}.
      buffer: the buffer whose states are saved, or a rollout.
      max_to_keep: generations that stay, the newest ones.
      chunk_bytes: what rows on their way may take. A file has half of it at the most; one row at
        least.
      compression_level: of zstd compression, from 1 (fast) to 22; None: not compressed.
      progress: whether to show a bar; None: if this is a terminal.
      timeout: seconds that a request to a far store may take.

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
        if not isinstance(buffer, ReplayBuffer | Rollout):
            raise ValueError(
                "Checkpointer: buffer must be a ReplayBuffer or a Rollout, got "
                f"{type(buffer).__name__}; of jaxreplay.jit(buffer) give the "
                "buffer itself, and each part of a mixture has a path of its own"
            )
        checks.check_size("Checkpointer", "max_to_keep", max_to_keep)
        checks.check_size("Checkpointer", "chunk_bytes", chunk_bytes)
        self.buffer: Any = buffer
        self._pid = os.getpid()
        self._store = store_at(path, timeout)
        self.path: str = self._store.name
        self._generations = Generations(self._store, max_to_keep)
        self._chunk_bytes, self._level, self._bar = chunk_bytes, compression_level, bars(progress)
        self._base: Manifest | None = None  # what the state at hand goes on from
        self._saving: Saving | None = None
        self._has_saved = False
        # what is wrong with groups, by their folders, until they are written again
        self._damaged: dict[str, str] = {}
        self._rounds = Rounds(self._store)
        self.step: int | None = None  # of the generation that was restored, and
        self.metadata: dict[str, Any] = {}  # its metadata
        # the rows that it had, and that were not salvaged
        self.missing_rows: list[MissingRows] = []

    def all_steps(self) -> list[int]:
        """Of the generations that there are, the newest last. Only a restore finds out whether one
        is whole."""
        return [manifest.step for manifest in reversed(self._generations.read()[0])]

    def latest_step(self) -> int | None:
        """Return the step of the newest generation; None where there is none."""
        return steps[-1] if (steps := self.all_steps()) else None

    @property
    def is_saving(self) -> bool:
        """Whether a save that does not wait is under way: until an `advance` or
        `wait_until_finished` finds that it is there."""
        return self._saving is not None

    def save(
        self,
        state: Any,
        step: int | None = None,
        *,
        blocking: bool = True,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Write a generation.

        Args:
          state: the more it has of the one that was last saved or restored here, the less is
            written.
          step: an integer of 64 bits; by default one more than the newest one. It takes the place
            of a generation of the same step.
          blocking: False: return soon, and copy the rows by and by: call `advance` before each
            `add`, and `wait_until_finished` before a `clear` and at the end. A save that is under
            way is finished first. Of priorities and episode tables, up to 20 bytes a row, a copy is
            written; where they are more than `chunk_bytes`, they are written before this returns.
          metadata: JSON, nested at most 100 deep; `restore` leaves them in `metadata`.

        Raises:
          PathInUseError: somebody else writes to the path. RuntimeError, OSError, ValueError: it
            could not be written. The generations that
          were there still are.
        """
        self._check_state("save", state)
        metadata, step = (
            _checked_metadata(metadata or {}),
            None if step is None else _checked_step(step),
        )
        self.wait_until_finished(state)
        with self._ending():
            generations, _ = self._generations.read()
            self._store.claim(
                is_successor=self._base is not None
                and _folders(generations[:1]) == [self._base.folder]
            )
            generations, _ = self._generations.read()
            step = (
                _checked_step(generations[0].step + 1 if generations else 0)
                if step is None
                else step
            )
            self._begin(state, step, blocking, metadata, generations)
            if not blocking:
                self.advance(state, 0)
                return
            self.wait_until_finished(state)
            if self._damaged:  # what was written before is, and the state has it still
                self._begin(state, step, blocking, metadata, self._generations.read()[0])
                self.wait_until_finished(state)

    def _begin(
        self,
        state: Any,
        step: int,
        blocking: bool,
        metadata: dict[str, Any],
        generations: list[Manifest],
    ) -> None:
        if self._base is not None and self._base.folder not in _folders(generations):
            self._base = None  # somebody else has deleted it
        places = (
            rows.views_of(rows.split(state)[0]) if blocking and not self._store.is_far else None
        )
        # of rows that are copied, more groups are on their way
        group_bytes = self._chunk_bytes // (4 if places is None else 2)
        known = set(self._damaged)
        plan = planning.planned(
            self._store,
            self.buffer,
            state,
            self._base,
            folder=self._generations.next_folder(),
            step=step,
            metadata=metadata,
            group_bytes=group_bytes if blocking else min(group_bytes, _SMALL),
            damaged=self._damaged,
        )
        self._warn(self._damaged.keys() - known, stacklevel=4)
        check_path(self._store.name, generations, plan.draft, self.buffer, self._base is not None)
        self._generations.collect(generations, self._base)
        rest = rows.split(state)[1]
        is_own = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(rest)) <= self._chunk_bytes and not blocking
        )
        bar = self._bar(f"save {step}", plan.num_bytes)
        try:
            with defer_interrupts():  # threads that are not known of would never end
                self._saving = Saving(
                    self._store,
                    plan,
                    rows.copied(rest) if is_own else rest,
                    is_own=is_own,
                    chunk_bytes=self._chunk_bytes // 2,
                    level=self._level,
                    places=places,
                    check=lambda: self._damaged.update(self._rounds.look(plan)),
                    commit=lambda groups, seals: self._commit(plan.manifest(groups, seals), bar),
                    progress=bar.update,
                )
        finally:
            places = None  # a view that stays, as in an error's traceback, makes the next add copy

    def _commit(self, manifest: Manifest, bar: Any) -> None:
        """What is done once all of a generation is written."""
        self._generations.commit(manifest)
        self._base, self._has_saved = manifest, True
        folders = {group.folder for group in manifest.groups}
        self._damaged = {
            folder: problem for folder, problem in self._damaged.items() if folder in folders
        }
        bar.close()
        others = [other for other in self._generations.read()[0] if other.step != manifest.step]
        self._generations.collect([manifest, *others], None)

    def advance(self, state: Any, num_steps: int = 1) -> None:
        """Copy some rows for a save that does not wait: those first that will be overwritten first.
        Nothing, where there is none.

        Args:
          state: as it is before the next `add` or `extend`. num_steps: what that adds to a stream.

        Raises:
          what the save failed with.
        """
        if self._saving is None:
            return
        with self._ending():
            if not self._saving.is_running:
                self._saving.join()
                self._end()
            elif not self._saving.is_copied:
                self._saving.advance(state, num_steps * state.layout.rows_per_step)

    def wait_until_finished(self, state: Any) -> None:
        """Copy what a save that does not wait still needs, and wait until it is there. Raises what
        it failed with."""
        if self._saving is not None:
            with self._ending():
                self._saving.finish(state)
                self._end()

    def close(self) -> None:
        """Wait for a save whose rows are all copied; one that needs more of them is given up, with
        a RuntimeError. Others may write to the path from then on, and so may this object again, if
        none does."""
        try:
            if self._saving is not None:
                saving, self._saving = self._saving, None
                if not saving.is_copied:
                    saving.abandon()
                    raise RuntimeError(
                        "close: a save was not finished, and is given up; call "
                        "wait_until_finished(state) first"
                    )
                saving.join()
        finally:
            self._release()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """After an error a save that is not copied is given up, and the error goes on."""
        if kind is not None and self._saving is not None and not self._saving.is_copied:
            self._abandon()
        self.close()

    def restore(
        self,
        example: Any,
        step: int | None = None,
        *,
        resize: bool = False,
        allow_partial: bool = False,
        sharding: Any = None,
    ) -> Any:
        """The newest generation, or that of a step, as a new state. Where the newest is broken, an
        older one is read, with a warning.

        `step` and `metadata` are then those of what was read. Let an old state go before: this one
        takes its own memory. The rows that it holds, and what decides the next operations, are as
        they were, to the last bit. Rows that were cleared are zeros.

        Args:
          example: as for `init`: one env's step, or item; arrays, or `jax.ShapeDtypeStruct`s. step:
            of the generation.
          resize: whether the generation may be of another capacity: each stream has the newest rows
            that fit, with their priorities. An index that was drawn before names other rows: drop
            it.
          allow_partial: whether a generation of which rows are damaged may be read without them.
            Their streams close up, and an episode that lost rows is as one that was truncated
            there, so that nothing is paired that did not follow each other. `missing_rows` has
            which are gone.
          sharding: where the state's leaves go, as `jax.jit` takes `out_shardings`: of one device,
            or of many. Whether they fit there is not asked beforehand.

        Raises:
          FileNotFoundError: there is none. ValueError: it is of another buffer, or of other steps;
            every leaf that differs is named.
          CorruptCheckpointError: what is stored is missing or damaged; it is named.
        """
        check_not_forked("this Checkpointer", self._pid)
        if self._saving is not None:
            raise RuntimeError(
                "restore: a save is under way; call wait_until_finished(state) first"
            )
        found = reading.restored(
            self._store,
            self._generations,
            self.buffer,
            example,
            step,
            resize,
            allow_partial,
            sharding,
            self._bar,
        )
        self._base, self.step, self.metadata = (
            None if found.lost else found.manifest,
            found.manifest.step,
            copy.deepcopy(found.manifest.metadata),
        )
        self.missing_rows = found.lost
        return found.state

    def verify(self) -> list[Verified]:
        """Read every file of every generation, the newest first, and compare it with what was
        written."""
        return verifying.verified(self._store, self._generations, self._bar)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """An error ends the save that is under way."""
        check_not_forked("this Checkpointer", self._pid)
        try:
            yield
        except BaseException:
            self._abandon()
            if not self._has_saved:  # somebody else may
                self._release()
            raise

    def _abandon(self) -> None:
        saving, self._saving = self._saving, None
        self._generations.forget()  # it has left files
        if saving is not None:
            saving.abandon()

    def _release(self) -> None:
        self._generations.forget()
        self._store.release()

    def _end(self) -> None:
        """Of a save that is there."""
        self._saving = None
        self._warn(self._damaged.keys(), stacklevel=5)

    def _warn(self, folders: Iterable[str], stacklevel: int) -> None:
        """Warn of damaged groups."""
        for folder in sorted(folders):
            problem = self._damaged[folder]
            warnings.warn(
                f"save: {problem}: damaged since it was written; its rows, which are here, are "
                "written again",
                stacklevel=stacklevel,
            )

    def _check_state(self, where: str, state: Any) -> None:
        check_not_forked("this Checkpointer", self._pid)
        if isinstance(self.buffer, ReplayBuffer):
            check_state(where, self.buffer, state)
        else:
            self.buffer.steps(state)  # which says it, too


def _folders(generations: list[Manifest]) -> list[str]:
    """Names of generations: no two have the same."""
    return [manifest.folder for manifest in generations]


def _checked_step(step: Any) -> int:
    low, high = STEPS
    if not low <= operator.index(step) <= high:
        raise ValueError(
            f"save: step must be an integer of 64 bits, got {step}; give it as save(state, step)"
        )
    return operator.index(step)


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy, as a restore will have it."""
    try:
        own: dict[str, Any] = json.loads(json.dumps(metadata))
        schema.metadata("save: metadata", own)
    except (RecursionError, CorruptCheckpointError):
        raise ValueError(
            f"save: metadata must be JSON, nested at most {schema.MOST_DEPTH} deep"
        ) from None
    return own

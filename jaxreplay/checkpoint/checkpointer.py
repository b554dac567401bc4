"""Saves of one run, each on top of the one before, and the way back."""

import contextlib
import dataclasses
import json
import operator
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import jaxreplay
from jaxreplay import checks, sizes
from jaxreplay.buffer import ReplayBuffer
from jaxreplay.checkpoint import history, restoring, rows
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.identity import check_fits, check_path, described, identity
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.saving import Saving
from jaxreplay.checkpoint.store import BrokenError, store_at
from jaxreplay.operations import ReplayState
from jaxreplay.rollouts import Rollout, RolloutState

_MIB = 2**20
_SMALL = 8 * _MIB  # bytes that `pump` copies at a time
_BOOKKEEPING = 64  # bytes of a row's numbers, while it is on its way


class Checkpointer:
    """Saves a buffer's state under a path, and restores it exactly.

    A save writes the rows that came since the one before, and everything else whole: priorities, heads, episode tables. It is there once
    its manifest is, which is written last; until then the one before it can be restored, whatever happens. Beside the state a save and
    a restore take at most three chunks of memory. A rollout is written whole each time.

    Args:
      path: of one run; one process writes to it. A folder, or a URL that TensorStore opens: "memory://replay", "gs://bucket/replay".
      replay: the buffer whose states are saved, or a rollout.
      keep: generations that stay, the newest ones.
      chunk_bytes: what rows on their way may take. A file has half of it at the most; one row at least.
      level: of zstd compression, from 1 (fast) to 22; None: not compressed.
      progress: whether to show a bar; None: if this is a terminal.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> from jaxreplay.checkpoint import Checkpointer
      >>> replay = jr.items(capacity=4, batch_size=2)
      >>> checkpointer = Checkpointer("memory://example", replay)
      >>> state = replay.add(replay.init(jnp.zeros(())), jnp.ones(1))
      >>> checkpointer.save(state, step=1)
      >>> int(replay.size(checkpointer.restore(jnp.zeros(()))))
      1
    """

    def __init__(
        self,
        path: Any,
        replay: Any,
        *,
        keep: int = 3,
        chunk_bytes: int = 64 * _MIB,
        level: int | None = 1,
        progress: bool | None = None,
    ):
        if not isinstance(replay, ReplayBuffer | Rollout):
            raise ValueError(
                f"Checkpointer: replay must be a ReplayBuffer or a Rollout, got {type(replay).__name__}; of jaxreplay.jit(replay) give the "
                "replay itself, and each part of a mixture has a path of its own"
            )
        checks.check_size("Checkpointer", "keep", keep)
        checks.check_size("Checkpointer", "chunk_bytes", chunk_bytes)
        self.replay: Any = replay
        self._store = store_at(path)
        self._generations = Generations(self._store, keep)
        self._chunk_bytes, self._level, self._progress = chunk_bytes, level, progress
        self._base: Manifest | None = None  # what the state at hand goes on from
        self._saving: Saving | None = None
        self.step: int | None = None  # of the generation that was restored, and
        self.notes: dict[str, Any] = {}  # its notes

    def steps(self) -> list[int]:
        """Of the generations that there are, the newest last. Only a restore finds out whether one is whole."""
        return [manifest.step for manifest in reversed(self._generations.read()[0])]

    @property
    def is_saving(self) -> bool:
        """Whether a save that does not wait is under way: until a `pump` or `finish` finds that it is there."""
        return self._saving is not None

    def save(self, state: Any, step: int | None = None, *, wait: bool = True, notes: dict[str, Any] | None = None) -> None:
        """Write a generation.

        Args:
          state: the more it has of the one that was last saved or restored here, the less is written.
          step: what it is called; by default one more than the newest one. It takes the place of a generation of the same step.
          wait: False: return soon, and copy the rows by and by: call `pump` before each `add`, and `finish` before a `clear` and at the
            end. A save that is under way is finished first. Of priorities and episode tables, up to 20 bytes a row, a copy is written;
            where they are more than `chunk_bytes`, they are written before this returns.
          notes: of JSON; `restore` leaves them in `notes`.

        Raises:
          RuntimeError, OSError, ValueError: it could not be written; the generations that were there still are.
        """
        expected = ReplayState if isinstance(self.replay, ReplayBuffer) else RolloutState
        if not isinstance(state, expected):
            raise ValueError(f"save: expected a {expected.__name__} alone, got {type(state).__name__}; the rest of a carry goes elsewhere")
        self.finish(state)
        generations, _ = self._generations.read()
        step = (generations[0].step + 1 if generations else 0) if step is None else operator.index(step)
        stored, rest = rows.split(state)
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) // self._num_rows(stored)
        places = rows.views_of(stored) if wait and not self._store.is_far else None
        group_bytes = self._chunk_bytes // (4 if places is None else 2)  # of rows that are copied, more groups are on their way
        most = sizes.power_below((group_bytes if wait else min(group_bytes, _SMALL)) // (row_bytes + _BOOKKEEPING))
        draft = self._draft(state, step, json.loads(json.dumps(notes or {})), most)
        base = self._base
        check_path(self._store.name, generations, draft, self.replay, base is not None)
        if base is not None and base.to_bytes() not in {manifest.to_bytes() for manifest in generations}:
            base = self._base = None  # somebody else has deleted it
        self._generations.collect(generations, base)
        span = rows.Span(np.array(draft.first, np.int64), np.array(draft.end, np.int64))
        since, kept = self._on_top_of(base, state, draft, span, most)
        num_rows = int(np.maximum(span.end - np.maximum(since, span.first), 0).sum())
        group_rows = min(most, sizes.power_above(num_rows))
        is_own = (rest_bytes := sum(leaf.nbytes for leaf in jax.tree.leaves(rest))) <= self._chunk_bytes and not wait
        bar = self._bar(f"save {step}", num_rows * row_bytes + rest_bytes)

        def commit(groups: list[Group], seals: dict[str, int]) -> None:
            manifest = dataclasses.replace(draft, groups=[*kept, *groups], seals=seals)
            self._generations.commit(manifest)
            self._base = manifest
            bar.close()
            others = [other for other in self._generations.read()[0] if other.step != step]
            self._generations.collect([manifest, *others], None)

        self._saving = Saving(
            self._store,
            draft.folder,
            rows.copied(rest) if is_own else rest,
            rows.groups_of(span, since, draft.length, group_rows),
            end=span.end,
            length=draft.length,
            group_rows=group_rows,
            is_own=is_own,
            chunk_bytes=self._chunk_bytes // 2,
            level=self._level,
            places=places,
            commit=commit,
            progress=bar.update,
        )
        del places  # a view that stays, as in an error's traceback, makes the next add copy
        if wait:
            self.finish(state)
        else:
            self.pump(state, 0)

    def pump(self, state: Any, num_steps: int = 1) -> None:
        """Copy some rows for a save that does not wait: those first that will be overwritten first. Nothing, where there is none.

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
                self._saving = None
            elif not self._saving.is_copied:
                self._saving.pump(state, num_steps * self.replay.streams.rows_per_step(state.streams.steps))

    def finish(self, state: Any) -> None:
        """Copy what a save that does not wait still needs, and wait until it is there. Raises what it failed with."""
        if self._saving is not None:
            with self._ending():
                self._saving.finish(state)
                self._saving = None

    def close(self) -> None:
        """Wait for a save whose rows are all copied; one that needs more of them is given up, with a RuntimeError."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            if not saving.is_copied:
                saving.abandon()
                raise RuntimeError("close: a save was not finished, and is given up; call finish(state) first")
            saving.join()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """After an error a save that is not copied is given up, and the error goes on."""
        if kind is None or (self._saving is not None and self._saving.is_copied):
            self.close()
        elif self._saving is not None:
            self._saving.abandon()
            self._saving = None

    def restore(self, example: Any, step: int | None = None, *, resize: bool = False, sharding: Any = None) -> Any:
        """The newest generation, or that of a step, as a new state. Where the newest is broken, an older one is read, with a warning.

        `step` and `notes` are then those of what was read. Let an old state go before: this one takes its own memory. The rows that it
        holds, and what decides the next operations, are as they were, to the last bit. Rows that were cleared are zeros.

        Args:
          example: as for `init`: one env's step, or item; arrays, or `jax.ShapeDtypeStruct`s. step: of the generation.
          resize: whether the generation may be of another capacity: each stream has the newest rows that fit, with their priorities. An
            index that was drawn before names other rows: drop it.
          sharding: where the state's leaves go, as `jax.jit` takes `out_shardings`: of one device, or of many. Whether they fit there is
            not asked beforehand.

        Raises:
          FileNotFoundError: there is none. ValueError: it is of another buffer, or of other steps; every leaf that differs is named.
          BrokenError: what is stored is missing or damaged; it is named.
        """
        if self._saving is not None:
            raise RuntimeError("restore: a save is under way; call finish(state) first")
        while True:
            generations, problems = self._generations.read()
            for manifest in generations:
                if step is None or manifest.step == step:
                    before = check_fits(manifest, self.replay, example, resize, problems)
                    try:
                        with self._bar(f"restore {manifest.step}", self.replay.memory(example).total) as bar:
                            reading = restoring.Reading(self._store, manifest, bar.update)
                            state = reading.state(self.replay, before, example, sharding)
                    except BrokenError as error:
                        problems.append(f"step {manifest.step}: {error}")
                        continue
                    if problems:
                        lines = [f"restore: step {manifest.step} was read, since this is broken:", *problems]
                        warnings.warn("\n  ".join(lines), stacklevel=2)
                    self._base, self.step, self.notes = manifest, manifest.step, manifest.notes
                    return state
            if self._generations.read()[0] == generations:  # else another process has just deleted them, for newer ones
                break
        if problems:
            what = "nothing" if step is None else f"no step {step}"
            others = "" if step is None else f" (there are {', '.join(map(str, self.steps()))})"
            raise BrokenError("\n  ".join([f"restore: {what} under {self._store.name} can be restored{others}:", *problems]))
        raise FileNotFoundError(f"restore: there is no generation{'' if step is None else f' of step {step}'} under {self._store.name}")

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """An error ends the save that is under way."""
        try:
            yield
        except BaseException:
            if self._saving is not None:
                self._saving.abandon()
                self._saving = None
            raise

    def _num_rows(self, stored: Any) -> int:
        """Of a state, which must be this buffer's."""
        found = {len(leaf) for leaf in jax.tree.leaves(stored)}
        if found - {getattr(self.replay, "capacity", None)}:
            raise ValueError(f"save: the state is of another buffer, of {found.pop()} rows, not {self.replay.capacity}")
        return found.pop() if found else 1

    def _draft(self, state: Any, step: int, notes: dict[str, Any], most: int) -> Manifest:
        """What is known of a generation before it is written."""
        stored, rest = described(state)
        length, span, probes = 1, rows.Span(np.zeros(0, np.int64), np.zeros(0, np.int64)), []
        if stored:
            length = int(self.replay.streams.length)
            span = rows.span_of(rows.heads_of(state), length, self.replay.num_envs)
            probes = history.probes_of(state, span, length, rows.num_rewritten(self.replay, state), most)
        return Manifest(
            folder=self._generations.next_folder(),
            step=step,
            buffer=identity(self.replay),
            library=jaxreplay.__version__,
            length=length,
            first=span.first.tolist(),
            end=span.end.tolist(),
            rows=stored,
            rest=rest,
            seals={},
            groups=[],
            probes=probes,
            notes=notes,
        )

    def _on_top_of(self, base: Manifest | None, state: Any, draft: Manifest, span: rows.Span, most: int) -> tuple[np.ndarray, list[Group]]:
        """From which number on rows are written, and the groups that have the others: none, where the state does not go on from `base`."""
        if base is None or not draft.rows or not history.is_of_one_history(state, span, draft.length, base.probes):
            return span.first, []
        return history.kept_of(base, span, rows.num_rewritten(self.replay, state), most)

    def _bar(self, what: str, num_bytes: int) -> tqdm:
        hidden = None if self._progress is None else not self._progress
        return tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True, disable=hidden, file=sys.stderr)

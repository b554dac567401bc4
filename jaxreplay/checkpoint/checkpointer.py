"""Saves of one run, each on top of the one before, and the way back."""

import contextlib
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import jaxreplay
from jaxreplay import checks
from jaxreplay.checkpoint import restoring, rows
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.saving import Saving
from jaxreplay.checkpoint.store import BrokenError, Store
from jaxreplay.description import description
from jaxreplay.paths import named

_MIB = 2**20
_SMALL = 8 * _MIB  # bytes that `pump` copies at a time


class Checkpointer:
    """Saves a buffer's state under a path, and restores it exactly.

    A save writes the rows that came since the last one, and everything else whole: priorities, heads, episode tables. It is there once
    its manifest is, which is written last; until then the one before it can be restored, whatever happens. Beside the state a save and
    a restore take at most two chunks of memory, and what they are written with.

    Args:
      path: a folder, or a URL that TensorStore opens, such as "memory://replay" or "gs://bucket/replay".
      replay: the buffer whose states are saved, or a rollout.
      keep: generations that stay, the newest ones.
      chunk_bytes: of the files that rows are written in, at most; one row at least.
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
        checks.check_size("Checkpointer", "keep", keep)
        checks.check_size("Checkpointer", "chunk_bytes", chunk_bytes)
        self.replay = replay
        self._store = Store(path)
        self._keep, self._chunk_bytes, self._level, self._progress = keep, chunk_bytes, level, progress
        self._base: Manifest | None = None  # what the state at hand goes on from
        self._saving: Saving | None = None
        self.notes: dict[str, Any] = {}  # of the generation that was restored

    def steps(self) -> list[int]:
        """Of the generations that can be restored, the newest last."""
        return [manifest.step for manifest in reversed(self._generations()[0])]

    def save(self, state: Any, step: int | None = None, *, wait: bool = True, notes: dict[str, Any] | None = None) -> None:
        """Write a generation.

        Args:
          state: later than the one that was last saved or restored here, of the same run; else all of it is written.
          step: what it is called; by default one more than the newest one. It takes the place of a generation of the same step.
          wait: False: return at once, and copy the rows by and by: call `pump` before each `add`, or `finish`. What is not rows is copied
            at once.
          notes: of JSON; `restore` leaves them in `notes`.

        Raises:
          RuntimeError, OSError, ValueError: it could not be written; the generations that were there still are.
        """
        self.finish(state)
        generations, _ = self._generations()
        self._collect(generations)
        if step is None:
            step = generations[0].step + 1 if generations else 0
        stored, rest = rows.split(state)
        draft, since, kept = self._draft(state, step, notes or {})
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) // max(draft.length * len(draft.end), 1)
        num_rows = sum(max(end - start, 0) for start, end in zip(since, draft.end, strict=True))
        group_bytes = self._chunk_bytes // 2 if wait else min(self._chunk_bytes // 2, _SMALL)
        group_rows = min(rows.power_below(group_bytes // max(row_bytes, 1)), rows.power_above(num_rows))
        bar = self._bar(f"save {step}", num_rows * row_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(rest)))

        def commit(groups: list[Group], seals: dict[str, int]) -> None:
            manifest = dataclasses.replace(draft, groups=[*kept, *groups], seals=seals)
            self._store.put(f"manifests/{manifest.folder}.json", manifest.to_bytes())
            self._base = manifest
            bar.close()
            self._collect(self._generations()[0])

        self._saving = Saving(
            self._store,
            draft.folder,
            rest if wait else rows.copied(rest),
            rows.groups_of(rows.Span(np.array(draft.first), np.array(draft.end)), np.array(since), draft.length, group_rows),
            length=draft.length,
            group_rows=group_rows,
            chunk_bytes=self._chunk_bytes // 2,
            level=self._level,
            commit=commit,
            progress=bar.update,
        )
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
        if self._saving is not None:
            with self._ending():
                if self._saving.is_running:
                    self._saving.pump(state, num_steps * self.replay.streams.rows_per_step(state.streams.steps))
                else:
                    self._saving.join()
                    self._saving = None

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

    def __exit__(self, *_: Any) -> None:
        self.close()

    def restore(self, example: Any, step: int | None = None) -> Any:
        """The newest generation, or that of a step, as a new state. Where the newest is broken, an older one is read, with a warning.

        Args:
          example: as for `init`: one env's step, or item; arrays, or `jax.ShapeDtypeStruct`s. step: of the generation.

        Raises:
          FileNotFoundError: there is none. ValueError: it is of another buffer, or of other steps; every leaf that differs is named.
          BrokenError: what is stored is missing or damaged; it is named.
        """
        if self._saving is not None:
            raise RuntimeError("restore: a save is under way; call finish(state) first")
        generations, problems = self._generations()
        for manifest in generations:
            if step is None or manifest.step == step:
                self._check(manifest, example)
                try:
                    with self._bar(f"restore {manifest.step}", self.replay.memory(example).total) as bar:
                        state = restoring.restore(self._store, manifest, self.replay.init(example), self._chunk_bytes // 2, bar.update)
                except BrokenError as error:
                    problems.append(f"step {manifest.step}: {error}")
                    continue
                if problems:
                    warnings.warn("\n  ".join([f"restore: step {manifest.step} was read, since this is broken:", *problems]), stacklevel=2)
                self._base, self.notes = manifest, manifest.notes
                return state
        if problems:
            raise BrokenError("\n  ".join([f"restore: nothing under {self._store.url} can be restored:", *problems]))
        raise FileNotFoundError(f"restore: there is no generation{'' if step is None else f' of step {step}'} under {self._store.url}")

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

    def _draft(self, state: Any, step: int, notes: dict[str, Any]) -> tuple[Manifest, list[int], list[Group]]:
        """What is known of a generation before it is written, from which number on rows are, and the groups that hold the others."""
        described_rows, described_rest = _described(state)
        stored, _ = rows.split(state)
        draft = Manifest(
            folder=self._next_folder(),
            step=step,
            buffer=description(self.replay),
            library=jaxreplay.__version__,
            length=0,
            first=[],
            end=[],
            rows=described_rows,
            rest=described_rest,
            seals={},
            groups=[],
            notes=notes,
        )
        if not described_rows:
            return draft, [], []
        length = self.replay.streams.length
        if any(len(leaf) != self.replay.capacity for leaf in jax.tree.leaves(stored)):
            raise ValueError(f"save: the state is of another buffer, of {len(jax.tree.leaves(stored)[0])} rows, not {self.replay.capacity}")
        span = rows.span_of(rows.heads_of(state), length, self.replay.num_envs)
        draft = dataclasses.replace(draft, length=length, first=span.first.tolist(), end=span.end.tolist())
        base = self._base
        if base is None or (base.rows, base.buffer) != (draft.rows, draft.buffer) or (span.end < base.end).any():
            return draft, draft.first, []
        since = np.maximum(np.maximum(base.first, np.array(base.end) - rows.REWRITTEN), span.first)
        kept = [group for group in base.groups if _is_needed(group, span.first, since)]
        return draft, since.tolist(), kept

    def _check(self, manifest: Manifest, example: Any) -> None:
        own = description(self.replay)
        if manifest.buffer != own:
            raise ValueError(f"restore: step {manifest.step} is of another buffer:\n  {manifest.buffer}\nthis one is:\n  {own}")
        lines = []
        for got, expected in zip((manifest.rows, manifest.rest), _described(jax.eval_shape(self.replay.init, example)), strict=True):
            names = [name for name in dict.fromkeys([*got, *expected]) if got.get(name) != expected.get(name)]
            lines += [f"{name}: stored {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}" for name in names]
        if lines:
            raise ValueError("\n  ".join([f"restore: step {manifest.step} holds other steps:", *lines]))

    def _generations(self) -> tuple[list[Manifest], list[str]]:
        """Those that are committed, the newest first, one for each step; and what is wrong with others."""
        found: dict[int, Manifest] = {}
        problems = []
        for name in reversed(self._store.entries("manifests")):
            if name.endswith(".json"):
                try:
                    manifest = Manifest.from_bytes(f"manifests/{name}", self._store.get(f"manifests/{name}"))
                    found.setdefault(manifest.step, manifest)
                except BrokenError as error:
                    problems.append(str(error))
        return list(found.values()), problems

    def _collect(self, generations: list[Manifest]) -> None:
        """Delete what no generation that stays has: older ones, and what was left behind by saves that ended on the way."""
        kept = generations[: self._keep]
        manifests = {f"{manifest.folder}.json" for manifest in kept}
        for name in self._store.entries("manifests"):
            if name not in manifests:
                self._store.delete(f"manifests/{name}")
        for kind, used in (("rest", {m.folder for m in kept}), ("rows", {group.folder for m in kept for group in m.groups})):
            for folder in set(self._store.entries(kind)) - used:
                self._store.delete(f"{kind}/{folder}")

    def _next_folder(self) -> str:
        """Later in the order of names than any that is there."""
        names = [name for kind in ("manifests", "rest", "rows") for name in self._store.entries(kind)]
        numbers = [int(number[0]) for name in names if (number := re.match(r"[0-9]+", name))]
        return f"{1 + max(numbers, default=0):010}"

    def _bar(self, what: str, num_bytes: int) -> tqdm:
        hidden = None if self._progress is None else not self._progress
        return tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True, disable=hidden, file=sys.stderr)


def _described(state: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Dtype and shape: of a row of each leaf that has rows, and of each other leaf."""
    stored, rest = rows.split(state)
    return (
        {name: f"{np.dtype(leaf.dtype).name}{list(leaf.shape[1:])}" for name, leaf in named(stored)},
        {name: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for name, leaf in named(rest)},
    )


def _is_needed(group: Group, first: np.ndarray, since: np.ndarray) -> bool:
    """Whether it has rows that are still held, and not written anew."""
    last = rows.from_runs(group.last)
    return bool((np.minimum(last, since[: len(last)] - 1) >= first[: len(last)]).any())

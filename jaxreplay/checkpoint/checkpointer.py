"""`Checkpointer`: incremental saves of one run, and restores."""

import collections
import functools
import json
import operator
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tqdm import tqdm

from jaxreplay._util import checks, pow2
from jaxreplay._util.checks import check_not_forked
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.jitted import unjitted
from jaxreplay.buffers.mixture import Mixture, check_names
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.rollout import Rollout
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.checkpoint import extras as extras_of, planning, restoring, rows, verifying
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.fits import check_path
from jaxreplay.checkpoint.manifest import MOST_DEPTH, STEPS, Manifest, check_depth
from jaxreplay.checkpoint.planning import SaveParts, SavePlan
from jaxreplay.checkpoint.restoring import MissingRows
from jaxreplay.checkpoint.savers import ShardedSaver, StateSaver, TieredSaver
from jaxreplay.checkpoint.saving import NewFile, written
from jaxreplay.checkpoint.store import store_at
from jaxreplay.checkpoint.verifying import Verified
from jaxreplay.distributed.processes import Processes
from jaxreplay.distributed.sharded import Sharded
from jaxreplay.distributed.shards import Shards

_MIB = 2**20


class Checkpointer:
    """Save a buffer's state under a path, and restore it bit-identically; and the agent with it.

    A save writes the rows added since the previous save. Written completely each time are what the
    sampler knows, such as a priority of each row, the counters of each env, the `extras`, and all
    of a `Rollout`. A checkpoint becomes visible when its manifest is written, as the last file. If
    a save fails, the previous checkpoint is kept. Besides the state, a save or restore takes at
    most three chunks of memory; a save also what it writes completely, and a restore up to 64 bytes
    a row for what it computes. With a sharded buffer, that is on the host of each process.

    After a restore, the attributes `step`, `metadata` and `missing_rows` describe the restored
    checkpoint; before, they are None, {} and [].

    Args:
      path: Where the checkpoints of one run are kept. A folder; a URL that TensorStore opens, such
        as "gs://bucket/replay"; an open `tensorstore.KvStore`; or TensorStore's specification of
        one: {"driver": "s3", "bucket": "runs", "path": "replay",
        "endpoint": "http://127.0.0.1:9000", "aws_region": "us-east-1"}. One run writes to a path.
      buffer: The `ReplayBuffer`, `Rollout`, `Mixture`, `jaxreplay.tiered` or `jaxreplay.sharded`
        buffer whose states are saved; of a mixture, a dict of each member's, as of a dict of
        buffers, which may be tiered ones. A sharded state is
        saved as that of one buffer, so that any number of devices restores it. If it is sharded
        over several processes, all call the methods together, with equal arguments, and see one
        path. An error in one is raised in all. A restore of a `jaxreplay.tiered` buffer replaces
        its rows.
      max_to_keep: Number of newest checkpoints to keep; or a function that returns the steps to
        keep beside the newest one. Default: 3.
      overwrite: Whether the first save replaces checkpoints of an earlier run, which was not
        restored. If not, it is refused. Default: False.
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
      >>> checkpointer.save(state, step=1, extras={"params": jnp.ones(3)})
      >>> state, extras = checkpointer.restore(jnp.zeros(()), extras={"params": jnp.zeros(3)})
      >>> int(buffer.size(state)), extras["params"].tolist()
      (1, [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        path: Any,
        buffer: Any,
        *,
        max_to_keep: int | Callable[[], Collection[int]] = 3,
        overwrite: bool = False,
        chunk_bytes: int = 64 * _MIB,
        compression_level: int | None = 1,
        progress: bool | None = None,
        timeout: float = 60.0,
    ):
        buffer = unjitted(buffer)
        members = {"": buffer}
        if isinstance(buffer, Mixture):
            members = {name: one for name, one, _ in buffer.members}
        elif isinstance(buffer, dict):
            members = {name: unjitted(one) for name, one in buffer.items()}
        kinds = ReplayBuffer | Rollout | Tiered | (Sharded if "" in members else Tiered)
        if not all(isinstance(one, kinds) for one in members.values()):
            raise ValueError(
                "Checkpointer: buffer must be a ReplayBuffer, a Rollout, a Mixture, a sharded or a "
                f"tiered buffer, got {', '.join(type(one).__name__ for one in members.values())}; "
                "several go into a dict by their names"
            )
        if not callable(max_to_keep):
            checks.check_size("Checkpointer", "max_to_keep", max_to_keep)
        checks.check_size("Checkpointer", "chunk_bytes", chunk_bytes)
        self.buffer: Any = buffer
        self._processes = Processes()
        # by the names of a mixture's members
        self._savers: dict[str, StateSaver] = {}
        for name, one in members.items():
            if isinstance(one, Sharded):
                shards = Shards(one)
                self._processes, self._savers[name] = shards.processes, ShardedSaver(shards)
            elif isinstance(one, Tiered):
                self._savers[name] = TieredSaver(one)
            else:
                self._savers[name] = StateSaver(one)
        self._named = self._savers[""].buffer if "" in self._savers else buffer
        self._pid = os.getpid()
        self._store = store_at(path, timeout)
        self.path: str = self._store.name
        self._chain, self.max_to_keep = Chain(self._store), max_to_keep
        self._overwrite = overwrite
        self._chunk_bytes, self._level, self._bar = chunk_bytes, compression_level, bars(progress)
        self._base: Manifest | None = None  # which the current state continues
        self.step: int | None = None  # of the restored checkpoint
        self.metadata: dict[str, Any] = {}  # of the restored checkpoint
        # arrays of a `Replay` that the next save writes, too, and those of the restored checkpoint
        self.beside: dict[str, Any] = {}
        self.found_beside: dict[str, Any] = {}
        # rows that a partial restore left out
        self.missing_rows: list[MissingRows] = []

    def all_steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, newest last. Only their manifests are
        checked."""
        # a chain of its own: a save in another thread changes that of this object
        found, _ = Chain(self._store).read()
        return [manifest.step for manifest in reversed(found)]

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none."""
        return steps[-1] if (steps := self.all_steps()) else None

    def save(
        self,
        state: Any,
        step: int | None = None,
        *,
        extras: Any = None,
        copy: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint: of the state, and of all that goes with it.

        If the save fails, the existing checkpoints are kept. One thread at a time may save or
        restore.

        Args:
          state: The buffer's state, or a dict of a mixture's members' states. It stays valid. Rows
            that it has in common with the state that was last saved or restored here are not
            written again.
          step: 64-bit integer that names the checkpoint. A checkpoint of the same step is replaced.
            Default: the newest step plus 1, and 0 for the first save.
          extras: Pytree of arrays, tensors of PyTorch, random keys, numbers and bytes, such as
            parameters, the optimizer's state, envs and observations. One checkpoint has the rows
            and these, or neither. Written completely. Several processes pass equal ones. Default:
            none.
          copy: Whether the checkpoint of a `jaxreplay.tiered` buffer has a copy of rows that are in
            files. If not, all that is in the files is written to the disk, and the checkpoint has
            the index alone: it can be restored while the folder is there, without the rows that
            were overwritten since. Default: False.
          metadata: JSON-compatible dict to store with the checkpoint, nested at most 100 deep.
            After a restore it is the attribute `metadata`. Default: an empty dict.

        Raises:
          PathInUseError: Another run has written the newest checkpoint, and was not restored here.
          OSError: The checkpoint could not be written, for example because the disk is full.
          RuntimeError: The process was forked.
          ValueError: `state` belongs to another buffer, the path has checkpoints of another buffer,
            `step` exceeds 64 bits, or `metadata` is nested too deep. Or several processes pass
            different arguments, or a state that does not lie where `init` puts it.
          TypeError: `step` is no integer, or `metadata` is not JSON-compatible.
        """
        check_not_forked("this Checkpointer", self._pid)
        plan = None
        try:
            with self._processes.agreed():
                if "" not in self._savers:
                    check_names(state, [*self._savers])
                states = {"": state} if "" in self._savers else state
                for name, saver in self._savers.items():
                    saver.check(f"save{': ' * bool(name)}{name}", states[name])
                try:
                    text = json.dumps(metadata or {})
                    check_depth(json.loads(text))
                except (RecursionError, ValueError):
                    raise ValueError(
                        f"save: metadata must be JSON, nested at most {MOST_DEPTH} deep"
                    ) from None
                beside = {extras_of.BESIDE + name: leaf for name, leaf in self.beside.items()}
                extra, self.beside = extras_of.leaves_of(extras) | beside, {}
                splits = {name: x.split(states[name], copy) for name, x in self._savers.items()}
                plan = self._planned(splits, extra, step, text)
                self._write(plan, splits)
        except BaseException:
            if plan is not None:
                self._chain.abandon(plan.manifest.folder)
            raise

    def _planned(
        self,
        splits: dict[str, SaveParts],
        extras: dict[str, Any],
        step: int | None,
        metadata: str,
    ) -> SavePlan:
        """Plan a save. All processes return the same plan."""
        options = self._chunk_bytes, self._level
        found: list[Manifest] = []  # of the first process

        def enter() -> tuple[Any, ...]:
            nonlocal found
            folder, found = self._chain.enter(self._overwrite)
            self._overwrite = False
            default, (low, high) = found[0].step + 1 if found else 0, STEPS
            own = default if step is None else operator.index(step)
            if not low <= own <= high:
                raise ValueError(
                    f"save: step must be a 64-bit integer, got {own}; call save(state, step)"
                )
            base = self._base
            is_base_there = base is not None and any(one.folder == base.folder for one in found)
            return folder, own, is_base_there, metadata, options

        folder, own_step, is_base_there, metadata, of_first = self._processes.first(enter)
        if options != of_first:
            raise ValueError(
                "save: chunk_bytes and compression_level must be equal in all processes"
            )
        goes_on = self._base is not None
        if not is_base_there:
            self._base = None  # it was deleted by another process
        plan = planning.plan_of(
            self._named,
            splits,
            extras,
            self._base,
            # some groups are copied while others are written; compressed ones are in memory twice
            group_bytes=self._chunk_bytes // (2 if self._level is None else 4),
            folder=folder,
            step=own_step,
            is_compressed=self._level is not None,
            piece_bytes=max(self._chunk_bytes // 8, 1),
            text=metadata,
        )
        # of the first process: others have found none
        check_path(self._store.name, found, plan.manifest, goes_on)
        self._processes.first(lambda: self._chain.collect(self.max_to_keep, self._base))
        return plan

    def _write(self, plan: SavePlan, splits: dict[str, SaveParts]) -> None:
        """Write the files of this process, and the manifest when those of all are written. Then
        delete checkpoints that are not kept."""
        manifest = plan.manifest
        with defer_interrupts():
            total = plan.num_bytes // self._processes.num
            bar = self._bar(desc=f"save {manifest.step}", total=total)
        own = written(self._store, self._level, bar, self._files(plan, splits))
        for one in self._processes.told(own):
            own |= one
        manifest.fill(own)
        self._processes.first(lambda: self._chain.commit(manifest))
        self._base = manifest
        self._processes.first(lambda: self._chain.collect(self.max_to_keep))

    def _files(self, plan: SavePlan, splits: dict[str, SaveParts]) -> Iterator[NewFile]:
        """Yield the files that this process writes. The rows of groups are copied."""
        num, index = self._processes.num, self._processes.index
        for name, pieces in [*plan.manifest.rest_files()][index::num]:
            yield NewFile(
                name, {one.name: rows.piece_of(plan.rest[one.name], one) for one in pieces}
            )
        for member, own in plan.manifest.members.items():
            new = [group for group in own.groups if group.save.folder == plan.manifest.folder]
            # all of one size: few programs are compiled, and memory is used again
            size = pow2.power_above(max((group.num_rows for group in new), default=1))
            spares: dict[int, list[Any]] = collections.defaultdict(list)  # of each part
            for group in new:
                if (part := splits[member].parts.having(group.env)) is not None:
                    spare = spares[part.env]
                    last = spare.pop() if spare else None
                    copied, num_rows = rows.copied(part, group.rows(), size, last)
                    yield NewFile(group.file, copied, num_rows, spare)

    def restore(
        self,
        example: Any,
        step: int | None = None,
        *,
        extras: Any = None,
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
            `jax.ShapeDtypeStruct`s. For a mixture a dict of each member's by name, or one for all.
          step: Step of the checkpoint to restore. Default: the newest intact checkpoint.
          extras: Pytree like the saved extras: JAX arrays or `jax.ShapeDtypeStruct`s, to whose
            sharding the restored ones go; NumPy arrays, tensors, numbers and bytes (of any number),
            which become the same; random keys. Default: none, and only the state is returned.
          allow_partial: Whether a checkpoint with damaged rows may be restored if none is intact,
            with a warning. Each env's rows that are older than the newest damaged ones count as
            overwritten; `missing_rows` lists them. Default: False.
          sharding: Placement of the state's leaves, in the form of `out_shardings` of `jax.jit`.
            If it is given, free memory is not checked beforehand. Sharded and tiered buffers take
            none.
            Default: the default device, or the sharded buffer's mesh.

        Returns:
          A new state, or a dict of a mixture's members' states. With `extras`, a tuple of it and
          the extras.

        Raises:
          FileNotFoundError: There is no checkpoint, or none of that step.
          ValueError: The steps of the checkpoint have other leaves, which the error names, or
            another `autoreset`; or other extras. Or `sharding` is given for a sharded or a tiered
            buffer, or several processes pass different arguments.
          CorruptCheckpointError: No checkpoint is intact, or the one of that step is damaged; the
            error names the files.
          RuntimeError: The process was forked.
        """
        check_not_forked("this Checkpointer", self._pid)
        for saver in self._savers.values():
            if sharding is not None and saver.why_no_sharding:
                raise ValueError(f"restore: {saver.why_no_sharding}; leave out sharding")
        examples = dict.fromkeys(self._savers, example)
        if "" not in examples and isinstance(example, dict) and {*example} == {*examples}:
            examples = example

        with self._processes.agreed():
            found = restoring.restored(
                self._chain,
                restoring.RestoreRequest(
                    self._processes,
                    self._savers,
                    self._bar,
                    self._named,
                    examples,
                    sharding,
                    extras,
                    step,
                    allow_partial,
                ),
            )
        self._base, self.step = found.manifest, found.manifest.step
        self.found_beside = found.beside
        self.metadata, self.missing_rows = found.manifest.metadata, found.lost
        self._chain.seen = self._chain.newest_read
        self._overwrite = False  # the next save goes on from what was restored
        states = found.states.get("", found.states)
        return states if extras is None else (states, found.extras)

    def verify(self) -> list[Verified]:
        """Read all files of all checkpoints and compare them with their checksums.

        Returns:
          A `Verified` for each checkpoint, newest first, with its problems.
        """
        return verifying.verified(self._store, self._bar)


def bars(is_shown: bool | None) -> Any:
    """Return a function that makes a progress bar from `desc` and `total`, in bytes.

    Args:
      is_shown: Whether to show the bar, or None to show it only if stderr is a terminal.
    """
    is_hidden = None if is_shown is None else not is_shown
    return functools.partial(tqdm, unit="B", unit_scale=True, disable=is_hidden)

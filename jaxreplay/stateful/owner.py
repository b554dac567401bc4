"""The state of a `Replay`: each change donates it, and an error says so if a change lost it."""

import contextlib
import dataclasses
import functools
import operator
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.adopt import check_adopted
from jaxreplay.buffers.index_buffer import IndexBuffer, Plan, planned
from jaxreplay.buffers.jitted import few_rows, method, program
from jaxreplay.buffers.mixture import Mixture
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import example_of as step_example
from jaxreplay.host.arrays import OUTSIDE, Block, Format, example_of, number_of
from jaxreplay.host.staging import BlockLengths, Staging
from jaxreplay.inspection.resets import FinalObsWatch, ResetWatch
from jaxreplay.stateful.places import OnDevice, OnHost, Pending, consumes_rows, key_of, sampled
from jaxreplay.storage.platforms import default_device
from jaxreplay.types import Sample

if TYPE_CHECKING:
    from jaxreplay.checkpoint import Checkpointer

_METADATA = "replay"  # key of the replay's metadata in a checkpoint


class LastCheckpointer:
    """The `Checkpointer` of the last save or load, which writes only what is new."""

    def __init__(self) -> None:
        self._made: Any = None
        self._path: Any = None

    def at(self, path: Any, buffer: Any, **options: Any) -> "Checkpointer":
        """Return the last one if it is of this path, else a new one.

        A TensorStore specification is compared in full, because the path that it is named by is
        only a part of it.

        Args:
          path: As for `Checkpointer`, as are `buffer` and `options`.
        """
        from jaxreplay.checkpoint import Checkpointer  # an extra

        made = Checkpointer(path, buffer, progress=False, **options)
        where = made.path if isinstance(path, str | bytes | os.PathLike) else path
        if self._made is None or self._path != where:
            self._made, self._path = made, where
        return self._made


@dataclasses.dataclass
class Draws:
    """Seed and number of random draws, of which keys are made.

    Attributes:
      seed: Seed of all keys. Default: NumPy's global generator gives it, at the first draw.
      num: Number of draws so far, modulo 2**32.
    """

    seed: int | None = None
    num: int = 0

    @property
    def next(self) -> tuple[np.uint32, np.uint32]:
        """Seed and number of the next draw, for `key_of`."""
        if self.seed is None:
            self.seed = int(np.random.randint(2**31))
        seed = operator.index(self.seed) & 0xFFFFFFFF
        return np.uint32(seed), np.uint32((self.num + 1) & 0xFFFFFFFF)

    def count(self) -> None:
        """Count a draw."""
        self.num = int(self.next[1])


class Owner:
    """Random draws, and checkpoints, of a buffer's rows.

    It is not thread-safe: `Replay` has the lock.
    """

    def __init__(self, buffer: Any, draws: Draws):
        self.buffer, self.draws = buffer, draws
        self.last_checkpointer = LastCheckpointer()

    @property
    def state(self) -> Any:
        """The state, with all steps added; None before there was an example. It raises
        RuntimeError if it was lost."""
        raise NotImplementedError

    @property
    def saved(self) -> Any:
        """The buffer whose states are saved and loaded."""
        return self.buffer

    @property
    def whole(self) -> tuple[Any, Any]:
        """The buffer, and the state with all its rows."""
        return self.saved, self.state

    def finished(self, batch: Any) -> Sample:
        """Return a batch that `draw` returned."""
        raise NotImplementedError

    @property
    def example(self) -> Any:
        """Shapes and dtypes of one env's step, or None."""
        raise NotImplementedError

    def free(self, when: str) -> None:
        """Drop the rows. `when`: for the error."""
        raise NotImplementedError

    def put_loaded(self, state: Any, example: Any) -> None:
        """Replace the state, and the steps that wait, by a state that was loaded. If there was no
        example yet, begin with this one."""
        raise NotImplementedError

    def example_in(self, path: Any, step: int | None) -> Any:
        """Return shapes and dtypes of one env's step in a checkpoint."""
        raise NotImplementedError

    def shapes(self, example: PyTree) -> tuple[Any, Any]:
        """Return the buffer that samples, and the shapes of its state, given those of one env's
        step."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what others may use."""
        raise NotImplementedError

    def on_device(self) -> Any:
        """Return a context in which new arrays lie where the state does, if a device was named."""
        return contextlib.nullcontext()

    def save(
        self,
        path: Any,
        metadata: dict[str, Any],
        step: int | None,
        extras: Any,
        max_to_keep: int,
        copy: bool,
        ahead: Sequence[Sample],
    ) -> None:
        """Write the state under a path.

        Args:
          path: As for `Replay.save`, as are the other arguments.
          metadata: JSON, stored with the state.
          ahead: Batches that were sampled, and not returned yet.
        """
        state = self.state  # adds the steps that wait
        if self.example is None:
            raise ValueError("save: nothing was added yet, so there is nothing to save")
        checkpointer = self.last_checkpointer.at(path, self.saved, overwrite=True)
        checks.check_size("save", "max_to_keep", max_to_keep)
        checkpointer.max_to_keep = max_to_keep
        own = {"num_draws": self.draws.num, "ahead": [len(ahead), self._places], **metadata}
        checkpointer.beside = {
            f"{nth}.{leaf_nth}": np.asarray(leaf)
            for nth, batch in enumerate(ahead)
            for leaf_nth, leaf in enumerate(jax.tree.leaves(batch))
        }
        checkpointer.save(state, step, extras=extras, copy=copy, metadata={_METADATA: own})

    def load(
        self, path: Any, step: int | None, extras: Any
    ) -> tuple[dict[str, Any], Any, list[Sample]]:
        """Replace the state by the one that was saved under a path.

        If memory has no room for two states, all files are read first. If they are intact, the old
        state is freed before the new one is read.

        Returns:
          The metadata; {} if a `Checkpointer`, not a `Replay`, saved the state. The extras. And the
          batches that were sampled ahead of the save.
        """
        checkpointer = self.last_checkpointer.at(path, self.saved, overwrite=True)
        example = self.example
        if example is None:
            example = self.example_in(path, step)
        restore = functools.partial(checkpointer.restore, example, step, extras=extras)
        with self.on_device():
            try:
                found = restore()
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                is_full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
                if not is_full or self.example is None:  # there is nothing to free
                    raise
                found = None
            if found is None:  # after the handler, whose traceback may keep memory alive
                _check_whole(checkpointer)
                self.free("while saved ones were loaded")
                found = restore()
        state, extras = (found, None) if extras is None else found
        saved = checkpointer.metadata.get(_METADATA)
        metadata = saved if isinstance(saved, dict) else {}
        ahead = self._ahead_in(metadata.get("ahead"), checkpointer.found_beside, example)
        if checkpointer.found_beside and not ahead and consumes_rows(self.buffer):
            warnings.warn(
                "load: the batches that were sampled ahead of the save do not fit this buffer, of "
                "another capacity, view or batch; their rows were consumed, and are not sampled",
                stacklevel=3,
            )
        with defer_interrupts():
            self.put_loaded(state, example)
            if isinstance(num_draws := metadata.get("num_draws"), int):
                self.draws.num = num_draws & 0xFFFFFFFF
        return metadata, extras, ahead

    @property
    def _places(self) -> list[Any]:
        """Return what an index of a batch depends on."""
        buffers = self.buffer.members if isinstance(self.buffer, Mixture) else [("", self.buffer)]
        return [[name, one.capacity, one.num_envs, one.allow_mask] for name, one, *_ in buffers]

    def _ahead_in(
        self, saved: Any, arrays: Mapping[str, np.ndarray], example: PyTree
    ) -> list[Sample]:
        """Return batches that were sampled ahead of a save; none if this buffer's are of another
        kind.

        Args:
          saved: Their number, and what their indices depend on.
          arrays: Their leaves.
          example: Shapes and dtypes of one env's step.
        """
        if not arrays or not isinstance(saved, list) or saved[1:] != [self._places]:
            return []
        if not isinstance(num := saved[0], int):
            return []
        buffer, state = self.shapes(example)
        draw = self.draws.next
        like = jax.eval_shape(lambda state: sampled(buffer, state, draw, {})[1], state)
        specs, structure = jax.tree.flatten(like)
        found = []
        for nth in range(num):
            leaves = [arrays.get(f"{nth}.{place}") for place in range(len(specs))]
            if any(
                leaf is None or (leaf.shape[1:], leaf.dtype) != (spec.shape[1:], spec.dtype)
                for leaf, spec in zip(leaves, specs, strict=True)
            ):
                return []
            found.append(jax.tree.unflatten(structure, jax.device_put(leaves)))
        return found


class StateOwner(Owner):
    """State of a buffer, and the steps that wait to be added to it."""

    # what to do after the rows were lost, for the error
    cure = "restore saved ones with replay.load(path), or make another Replay"

    def __init__(self, place: OnDevice, draws: Draws):
        super().__init__(place.buffer, draws)
        self.place, self._is_closed = place, False
        self._lengths = BlockLengths()
        self.watch, self.final_obs = ResetWatch(), FinalObsWatch()
        self.forget()

    @property
    def state(self) -> Any:
        self.check_not_lost()
        self.flush()
        return self._state

    @property
    def saved(self) -> Any:
        return self.place.saved

    @property
    def whole(self) -> tuple[Any, Any]:
        return self.place.whole_buffer, self.place.whole(self.state)

    def finished(self, batch: Any) -> Sample:
        return self.place.finished(batch)

    def on_device(self) -> Any:
        return jax.default_device(self.place.home)

    def put(self, tree: PyTree) -> Any:
        """Move arrays to the device that stores the rows, if one was named."""
        return tree if self.place.device is None else jax.device_put(tree, self.place.device)

    def taken_out(self, batch: Sample) -> Sample:
        """Move a batch to JAX's default device, if the rows lie on one that was named."""
        return batch if self.place.device is None else jax.device_put(batch, default_device())

    @property
    def has_example(self) -> bool:
        """True if the shapes of a step are known."""
        return self._staging is not None

    @contextlib.contextmanager
    def opened(self) -> Iterator[bool]:
        """Yield whether there are rows. Those that a folder has are there, also if the shapes of a
        step are not known yet."""
        example = None if self.has_example else self.place.example
        if example is None:
            yield self.has_example
            return
        self.init(example)
        try:
            yield True
        finally:  # the first step tells its pytrees
            self.forget()
            self.place.free()

    @property
    def example(self) -> Any:
        return self._example

    def shapes(self, example: PyTree) -> tuple[Any, Any]:
        buffer = self.place.whole_buffer
        return buffer, jax.eval_shape(lambda: buffer.init(example))

    def free(self, when: str) -> None:
        self._state, self._can_sample, self._lost = None, None, when
        self.place.free()

    def close(self) -> None:
        if self.place.outlasts and not self._is_closed and self._lost is None:
            self.flush()
        self._is_closed = self.place.outlasts
        self.place.close()

    def put_loaded(self, state: Any, example: Any) -> None:
        if not self.has_example:
            return self.init(example, state)
        self._state, self._can_sample, self._lost = self.put(state), None, None
        self._staging.drop(len(self._staging))

    def example_in(self, path: Any, step: int | None, member: str = "") -> Any:
        from jaxreplay.checkpoint import contents  # an extra

        in_files = self.place.example
        use = lambda _, manifest: contents.example_of("load", manifest, member, in_files)
        return contents.at_checkpoint("load", use, path, step, member)

    @property
    def is_lost(self) -> bool:
        """True if a call that failed lost the rows."""
        return self._lost is not None

    def check_not_lost(self) -> None:
        if self._is_closed:
            raise RuntimeError("this buffer is closed; its rows are in their folder")
        if self._lost is not None:
            raise RuntimeError(f"the rows were lost {self._lost}; {self.cure}")

    def init(self, example: PyTree, state: Any = None) -> None:
        """Begin with an example of one env's step, and a state, by default an empty one."""
        with self.on_device():
            state = self.place.init(example) if state is None else state
        self._format = Format("init", self.buffer, example)
        self._is_lockstep = self.buffer.layout().lockstep
        self._example = jax.eval_shape(lambda: example)
        self.begin(state, Staging(self._format.specs, self.buffer.num_envs))

    def begin(self, state: Any, staging: Any) -> None:
        """Begin with a state, and a `Staging` of steps that wait to be added to it."""
        self._state = jax.device_put(state, self.place.device)
        self._staging, self._can_sample, self._lost = staging, None, None
        self._few_rows = few_rows(self._state)

    def take(self, state: Any) -> None:
        """Begin with the rows of any buffer's state."""
        state = check_adopted("Replay", self.buffer, state)
        with self.opened() as has_rows:
            if has_rows and self.size():
                raise ValueError(
                    "Replay: the folder of its rows has some already; make it with example=, then "
                    "merge the state"
                )
        example = step_example(state.layout, state.rows.steps)
        with self.on_device():
            self.init(example, self.place.adopt(state))

    def forget(self) -> None:
        """Drop the state and the example: the next step added is the example."""
        self._state: Any = None
        self._example: Any = None  # shapes and dtypes of one env's step
        self._format: Any = None  # Format
        self._staging: Any = None  # Staging, of the steps that wait to be added
        self._can_sample: bool | None = None  # read from the device once after each change
        self._lost: str | None = None  # when, for the error

    def stage(self, step: PyTree, env: Any, envs: Any, mask: Any, priority: Any) -> int | None:
        """Copy one step of all envs, or of some, to those that wait on the host. Return how many
        steps that are over all envs.

        Return None, and copy nothing, if the step is to be added at once: it is not of NumPy arrays
        or tensors on the host, it does not fit, or there is no room.
        """
        is_lost = self._lost is not None or self.place.is_read_only
        if self._staging is None or is_lost or checks.is_tracing():
            return None
        num_steps = self.buffer.num_envs
        axes, numbers, is_taken = (num_steps,), None, None
        if env is not None or envs is not None:
            numbers = _numbers_of(env, envs, num_steps)
            if numbers is None or self._is_lockstep:
                return None
            axes = () if envs is None else (len(numbers),)
        if mask is not None or priority is not None:
            may_mask = self.buffer.allow_mask if numbers is None else axes
            has_priorities = self.buffer.sampler.has_priorities
            for array, may, kinds in ((mask, may_mask, "b"), (priority, has_priorities, "fiu")):
                is_plain = type(array) is np.ndarray and array.shape == axes and may
                if array is not None and not (is_plain and array.dtype.kind in kinds):
                    return None
        if numbers is not None:
            if priority is not None:
                # The largest priority so far takes the place of a bad one. Here steps of other envs
                # may be added together.
                priority = priority.astype(np.float32)
                if not (np.isfinite(priority) & (priority >= 0)).all():
                    return None
            if mask is not None or None in numbers:
                is_taken = np.array([number is not None for number in numbers])
                is_taken, mask = is_taken if mask is None else is_taken & mask, None
                numbers = [one for one, taken in zip(numbers, is_taken, strict=True) if taken]
        if numbers == [] or not self._staging.has_room(mask, priority, numbers):
            return None
        leaves = self._format.on_host("add", axes, step)
        if leaves is None:
            return None
        if is_taken is not None:
            leaves, priority = jax.tree.map(lambda leaf: leaf[is_taken], (leaves, priority))
        self._staging.put(leaves, mask, priority, numbers)
        self._can_sample = None
        if numbers is not None:
            return len(numbers)
        return num_steps if mask is None else int(mask.sum())

    @property
    def has_waiting(self) -> bool:
        """Return whether steps wait on the host."""
        return bool(self._staging)

    def flush(self) -> None:
        """Add the steps that wait."""
        for num_steps, num_rows, part, envs in self._waiting():
            self._add(self._extend_for(num_rows), num_steps, part, **envs)

    def _extend_for(self, num_rows: int) -> Any:
        return self.place.extend(num_rows <= self._few_rows)

    def read(self, reads: Any, adds: Any, num_rows: int, *arguments: Any, **options: Any) -> Any:
        """Return what a program reads, which adds the last of the steps that wait before it does.

        Args:
          reads: `programs` called as function(buffer, state, *arguments, **options), for when no
            step waits; None for `adds`, with None as the block.
          adds: `programs` called as function(buffer, state, block, *arguments, **options), which
            return the new state and the result.
          num_rows: Number of rows that are read.
        """
        *parts, (num_steps, its_rows, last, envs) = self._waiting() or [(0, 0, None, {})]
        for number, of_part, part, its_envs in parts:
            self._add(self._extend_for(of_part), number, part, **its_envs)
        few = max(num_rows, its_rows) <= self._few_rows
        if last is None and reads is not None:
            return self.ask(reads[few], *arguments, **options)
        return self._add(adds[few], num_steps, last, *arguments, **options, **envs)

    def _add(
        self, function: Any, num_steps: int, part: Any, *arguments: Any, **options: Any
    ) -> Any:
        """Replace the state by the one that a program returns, which adds the oldest steps that
        wait: `part`, so many steps. Return the program's other result, or None."""
        other = self._change(function, part, *arguments, **options)
        if num_steps:
            is_some = "envs" in options  # then all that wait are one part
            self._staging.drop(len(self._staging) if is_some else num_steps)
            self.look_at(part[0], part[1], is_some)
        return other

    def look_at(self, steps: Any, mask: Any, is_some: bool) -> None:
        """Look for resets by hand among steps [T, e, ...] that were added, if they are of all
        envs."""
        if is_some:
            self.final_obs.restart()
        else:
            self._look(steps, mask)

    def _look(self, steps: Any, mask: Any) -> None:
        if self.buffer.autoreset == "same_step" and (problem := self.final_obs.look(steps, mask)):
            warnings.warn(f"add: {problem}", stacklevel=5)

    def _waiting(self) -> list[Any]:
        """Return the steps that wait, their masks and their priorities, in parts, as `_parts_of`
        does."""
        if not self._staging:
            return []
        block = self._staging.waiting()
        return self._parts_of(block[:3], *block[3:])

    def block_of(self, given: PyTree, env: Any = None, *about: Any, is_ours: bool = False) -> Block:
        """Return steps as a block, as `Format.block` does; of ours, they are [T, e, ...]. The first
        ones are the example."""
        if not self.has_example:
            first = jax.tree.map(lambda leaf: leaf[0], given) if is_ours else given
            self.init(example_of("add", self.buffer, first, env))
        return self._format.block("add", given, env, *about, is_ours=is_ours)

    def insert(self, block: Block) -> None:
        """Add a block at once, after the steps that wait."""
        for _, num_rows, part, envs in self._parts_of(block[:3], block.envs):
            self.change(self._extend_for(num_rows), part, **envs)

    def _parts_of(self, block: Any, envs: Any = None) -> list[Any]:
        """Return a block, leaves [T, e, ...], in parts whose lengths have programs: for each how
        many times and rows it has, the part, and `envs` if the steps are of some envs."""
        length, width = jax.tree.leaves(block)[0].shape[:2]
        sizes, parts = self._lengths.parts_of(length), [block]
        if len(sizes) > 1:
            block, ends = jax.tree.map(_on_host, block), np.cumsum(sizes).tolist()
            at = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            parts = [jax.tree.map(lambda leaf, at=at: leaf[at], block) for at in at]
        options = {} if envs is None else {"envs": self.put(envs)}
        each = zip(sizes, parts, strict=True)
        return [(size, size * width, self.put(part), options) for size, part in each]

    def change(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Replace the state by the one that a program returns. The old one is donated.

        If the program fails before it uses the donated memory, the rows stay. If it fails later,
        they are lost.

        Args:
          function: Called as function(buffer, state, *arguments, **options); returns a state, or a
            state and another result.

        Returns:
          The other result, or None.
        """
        self.check_not_lost()
        self.flush()
        return self._change(function, *arguments, **options)

    def _change(self, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            made = function(self.buffer, self._state, *arguments, **options)
            state, other = made if isinstance(made, tuple) else (made, None)
            self.replace(state)
        except BaseException as error:
            self.look_whether_lost(error)
            raise
        return other

    def replace(self, state: Any) -> None:
        """Replace the state by the one that a program returned."""
        _check_not_traced(state)
        self._state, self._can_sample = state, None

    def look_whether_lost(self, error: BaseException) -> None:
        """Note that the rows are lost, if a program that raised an error has used their memory."""
        if self.place.is_lost(self._state):
            self._lost = f"in a call that raised {error!r}"

    def ask(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Return the result of a program that only reads the state."""
        answer = function(self.buffer, self.state, *arguments, **options)
        _check_not_traced(answer)
        return answer

    def check_begun(self, where: str) -> None:
        if not self.has_example:
            raise ValueError(f"{where}: nothing was added yet, so there are no rows")

    def get(self, index: Any) -> Sample:
        """Read rows again."""
        self.check_begun("get")
        batch = self.place.read(self, _get, len(jax.tree.leaves(index)[0]), index, self.draws.next)
        if self.buffer.view.is_random:
            self.draws.count()
        return batch

    def draw(
        self, batch_size: int, options: Mapping[str, Any], consume: bool = True
    ) -> Sample | None:
        """Sample a batch, or return None if the buffer cannot sample.

        Unless `consume` is False, a sampler that consumes rows removes the batch's from the state.
        The steps that wait are added by the same program.
        """
        checks.check_size("sample", "batch_size", batch_size)
        self.check_not_lost()
        is_own = options.get("fractions") is None  # else other parts of a blend give the items
        if not self.has_example or (self._can_sample is False and is_own):
            return None
        consumes = consume and self.buffer.sampler.consumes
        batch, can_sample = self.place.sample(self, batch_size, options, consume, consumes)
        if self._can_sample is None and is_own:  # the device is waited for once after each change
            self._can_sample = bool(can_sample)
        if not (self._can_sample if is_own else bool(can_sample)):
            return None
        if consumes:
            self._can_sample = None
        self.draws.count()
        return self.place.begun(batch)

    def has_batch(self) -> bool:
        """Return whether the buffer can sample."""
        if not self.has_example or self._lost is not None:
            return False
        if self._can_sample is None:
            self._can_sample = bool(self.ask(method("can_sample")))
        return self._can_sample

    def size(self) -> int:
        return 0 if self.state is None else int(self.ask(method("size")))


class MixtureOwner(Owner):
    """States of a mixture's members, each a `StateOwner` of its own, that are sampled together.

    Its methods are those of a `StateOwner`, for all members at once.
    """

    def __init__(self, buffer: Mixture, seed: int, places: Mapping[Any, OnDevice]):
        super().__init__(buffer, Draws(seed))
        self.members = {name: StateOwner(place, Draws(seed)) for name, place in places.items()}
        self._all = [*self.members.values()]
        self._on_host = {name: one for name, one in places.items() if isinstance(one, OnHost)}
        # of which programs sample; its members are those of the places
        parts = ((name, places[name].buffer, size) for name, _, size in buffer.members)
        self._sampled = Mixture(members=tuple(parts))

    @property
    def saved(self) -> Any:
        if not self._on_host:
            return self.buffer
        return {name: owner.saved for name, owner in self.members.items()}

    @property
    def whole(self) -> tuple[Any, Any]:
        return self.buffer, {name: owner.whole[1] for name, owner in self.members.items()}

    def put(self, tree: PyTree) -> Any:
        """Move arrays to the device that stores the rows, if one was named for all."""
        return self._all[0].put(tree)

    def taken_out(self, batch: Any) -> Any:
        """Move a batch to JAX's default device, if the rows lie on one that was named for all."""
        return self._all[0].taken_out(batch)

    def on_device(self) -> Any:
        return self._all[0].on_device()

    def close(self) -> None:
        for owner in self._all:
            owner.close()

    @property
    def state(self) -> dict[str, Any]:
        return {name: owner.state for name, owner in self.members.items()}

    @property
    def example(self) -> Any:
        found = {name: owner.example for name, owner in self.members.items()}
        return None if None in found.values() else found

    def shapes(self, example: PyTree) -> tuple[Any, Any]:
        owners = self.members.items()
        return self.buffer, {name: owner.shapes(example[name])[1] for name, owner in owners}

    def free(self, when: str) -> None:
        for owner in self._all:
            owner.free(when)

    def put_loaded(self, state: Any, example: Any) -> None:
        for name, owner in self.members.items():
            owner.put_loaded(state[name], example[name])

    def example_in(self, path: Any, step: int | None) -> Any:
        return {
            name: owner.example if owner.has_example else owner.example_in(path, step, name)
            for name, owner in self.members.items()
        }

    @property
    def has_example(self) -> bool:
        return all(owner.has_example for owner in self._all)

    def init(self, example: PyTree) -> None:
        for owner in self._all:
            owner.init(example)

    def check_begun(self, where: str) -> None:
        for name, owner in self.members.items():
            owner.check_begun(f"{where}: {name}")

    def check_not_lost(self) -> None:
        for owner in self._all:
            owner.check_not_lost()

    def change(self, function: Any, *arguments: Any) -> None:
        self.check_not_lost()
        try:
            states = function(self._sampled, self.state, *arguments)
            for name, owner in self.members.items():
                owner.replace(states[name])
        except BaseException as error:
            for owner in self._all:
                owner.look_whether_lost(error)
            raise

    def draw(self, batch_size: int, options: Mapping[str, Any], consume: bool = True) -> Any:
        del consume  # no member consumes rows
        if batch_size != self.buffer.batch_size:
            raise ValueError(
                f"sample: a batch of this mixture has {self.buffer.batch_size} items, not "
                f"{batch_size}"
            )
        self.check_not_lost()
        if not self.has_batch():
            return None
        sample = _plan_members if self._on_host else _sample_members
        batch = sample(self._sampled, self.state, self.draws.next, options)
        self.draws.count()
        _check_not_traced(batch)
        if not self._on_host:
            return batch
        data = {name: place.gather(batch) for name, place in self._on_host.items()}
        return Pending(batch, data)

    def finished(self, batch: Any) -> Sample:
        return batch.sample if isinstance(batch, Pending) else batch

    def has_batch(self) -> bool:
        return all(owner.has_batch() for owner in self._all)

    def size(self) -> int:
        return sum(owner.size() for owner in self._all)


def _check_whole(checkpointer: "Checkpointer") -> None:
    found = checkpointer.verify()
    if all(one.problems for one in found):
        from jaxreplay.checkpoint import CorruptCheckpointError

        raise CorruptCheckpointError(
            "\n  ".join(
                [
                    f"load: no checkpoint under {checkpointer.path} is intact:",
                    *(p for one in found for p in one.problems),
                ]
            )
        )


def _check_not_traced(result: Any) -> None:
    """Raise a ValueError if `result` has tracers: the call is inside of `jit`."""
    if checks.is_tracing() and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(result)):
        raise ValueError(OUTSIDE)


def _on_host(leaf: Any) -> Any:
    """Return an array as NumPy's, if that takes no copy. A slice of a JAX array would compile a
    program for each length."""
    if isinstance(leaf, jax.Array) and {device.platform for device in leaf.devices()} != {"cpu"}:
        return leaf
    return np.asarray(leaf)


@program
def _sample_members(buffer: Mixture, states: Any, draw: Any, options: Any) -> Sample:
    return buffer.sample(states, key_of(draw), **options)


@functools.partial(program, on_one_core=True)
def _plan_members(buffer: Mixture, states: Any, draw: Any, options: Any) -> Plan:
    """Return the plan of a batch, of which members on the host have the rows."""
    is_on_host = {name: isinstance(one, IndexBuffer) for name, one, _ in buffer.members}
    on_host = {name: state for name, state in states.items() if is_on_host[name]}

    def sample(states: Any, draw: Any, options: Any) -> Any:
        return buffer.sample(states, key_of(draw), **options), None

    return planned(sample, (states, draw, options), on_host)[0]


@program
def _get(buffer: ReplayBuffer, state: Any, index: Any, draw: Any) -> Sample:
    return buffer.get(state, index, key_of(draw))


def _numbers_of(env: Any, envs: Any, num_envs: int) -> list[int | None] | None:
    """Return the numbers of the envs that took a step, with None for padding; None if they are not
    such as a step can wait with: whole numbers on the host, of different envs."""
    if envs is None:
        number = number_of(env, num_envs)
        return None if number is None else [number]
    if env is not None or not isinstance(envs, np.ndarray | list | tuple):
        return None
    given = np.asarray(envs)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        return None
    numbers = [one if 0 <= one < num_envs else None for one in given.tolist()]
    known = [one for one in numbers if one is not None]
    return numbers if len(set(known)) == len(known) else None

"""A buffer in two parts: an index on the device, and rows on the host."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks, transfers
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.names import named, nested
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers import adopt, memory, step_checks
from jaxreplay.buffers.index_buffer import (
    Chosen,
    IndexBuffer,
    Plan,
    made,
    mapped,
    requests_of,
)
from jaxreplay.buffers.jitted import buffer_of, method, program, rebuild
from jaxreplay.buffers.map_rows import block_of, identified, stamped
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_not_deleted, example_of, is_alive
from jaxreplay.buffers.verbs import VERBS
from jaxreplay.storage import (
    file_rows,
    newest_row,
    platforms,
    ring,
    row_flags,
    stored_arrays,
    writes,
)
from jaxreplay.storage.file_rows import END, FIRST, LAST_FLAGS, FileRows
from jaxreplay.storage.host_rows import HostRows, RowStore
from jaxreplay.storage.state import Counters, ReplayState, Rows
from jaxreplay.storage.stored_arrays import BitsArray, HostArray
from jaxreplay.types import Index, Sample, SampleOptions, Step

# methods that touch no values of rows
_OF_INDEX = [n for n, verb in VERBS.items() if verb.changes != "state" and not verb.reads]


@functools.cache
def _index_type_of(kind: type) -> type:
    """Return the class of the indices of a subclass of `ReplayBuffer`, with its own methods."""
    return type(f"{kind.__name__}Index", (IndexBuffer, kind), {})


def _bits(values: np.ndarray, stored: Any) -> np.ndarray:
    """Return values as a store keeps them."""
    values = values.astype(stored.dtype, copy=False)
    if isinstance(stored, BitsArray):
        return stored_arrays.encode(values, stored.dtype)
    return values


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, HostArray)


@dataclasses.dataclass(eq=False)
class _Flight:
    """Rows that a thread gathers."""

    chosen: Chosen
    future: concurrent.futures.Future[Any]


class Tiered:
    """A buffer whose rows lie on the host, and its index on the device: as many rows as the host
    has memory for.

    A batch takes three steps: `draw` chooses its rows, `take` gathers them on the host, `read`
    makes the batch of them. It is the batch that the buffer would sample on a device, with the
    same key: the same rows, weights and values, and only sums of gathered numbers may differ in
    their last bit. `draw` and `read` go into your `jit`, `draw` into a `lax.scan`, too, so that one
    `take` serves several updates. `sample` does all three. The methods of the index that read no
    rows are here, too, for your `jit`: `update_priorities`, `size`, `can_sample`, `can_add`,
    `metrics`, `age`.

    The rows belong to this object, and to the newest state that it returned. If Ctrl-C comes before
    a call has returned it, it is the attribute `newest`; else that is None. A plan is of the state
    that it was drawn from: after `init`, `adopt` or a restore, take none that was drawn before.

    Rows in files stay when the process ends, also if it is killed: `init` opens them again. Then
    all rows of the adds that returned are there, with the priorities of new rows. Unfinished
    episodes end, as `end_streams` ends them.

    Args:
      buffer: A `ReplayBuffer`.
      rows: As for `jaxreplay.tiered`. Default: "host".
      continue_streams: As for `jaxreplay.tiered`. Default: False.

    Raises:
      ValueError: The buffer cannot be divided, or there is no such place.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, jaxreplay as jr
      >>> tier = jr.tiered(jr.items(capacity=8, batch_size=4), rows="host")
      >>> state = tier.init({"x": np.zeros(3, np.float32)})
      >>> state = tier.extend(state, {"x": np.ones((5, 1, 3), np.float32)})
      >>> plan = jax.jit(tier.draw)(state, jax.random.key(0))
      >>> data = tier.take(plan)
      >>> jax.jit(tier.read)(plan, data).experience["x"].sum(axis=1).tolist()
      [3.0, 3.0, 3.0, 3.0]
    """

    read_only: str | None = None  # why the rows cannot be changed
    # the newest state, of a call that was interrupted before it returned it
    newest: ReplayState | None = None

    def __init__(
        self, buffer: ReplayBuffer[Any], rows: Any = "host", continue_streams: bool = False
    ):
        place = os.fspath(rows) if isinstance(rows, str | os.PathLike) else None
        # called with the capacity and the specs of a `RowStore`; None for files
        self._make: Any = HostRows if place == "host" else rows if callable(rows) else None
        if self._make is None and (place is None or (place is rows and os.sep not in place)):
            raise ValueError(
                'tiered: rows must be "host", or the path of a folder such as "/data/run7" or '
                f'"./run7", or a class as jaxreplay.buffers.RowStore, got {rows!r}'
            )
        # a path stays the same if the process goes to another folder
        self.place: str = place or getattr(rows, "__name__", repr(rows))
        if self.is_in_files:
            self.place = os.path.abspath(self.place)
        if continue_streams and not self.is_in_files:
            raise ValueError(
                "tiered: continue_streams=True is for rows in files, such as rows='./run7', got "
                f"rows={place!r}"
            )
        self._continues = continue_streams
        buffer = buffer_of("tiered", buffer)
        if buffer.num_agents is not None and buffer.autoreset == "same_step":
            raise ValueError(
                'tiered: several agents need another autoreset than "same_step", whose final rows '
                "depend on who has ended before"
            )
        self.buffer = buffer
        # Of the device where the index lies, also while the host has the whole state.
        buffer = dataclasses.replace(buffer, platform=buffer.platform or platforms.default())
        fields = {field.name: getattr(buffer, field.name) for field in dataclasses.fields(buffer)}
        kind = IndexBuffer if type(buffer) is ReplayBuffer else _index_type_of(type(buffer))
        self.index, self._whole = kind(**fields), buffer
        self._store: RowStore | None = None
        self._lost: str | None = None  # the error in which a call lost rows
        # int64[E], number of rows that each env got, overwritten ones too
        self.num_written = np.zeros(buffer.num_envs, np.int64)
        self._is_stale = False  # the rows in files are not the state's, and go with the next change
        self._known: set[Any] = set()  # shapes of blocks that fit
        self._flights: list[_Flight] = []
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def _of_member(self, name: str) -> "Tiered":
        """Return this buffer without rows, as a mixture's member of that name."""
        other = copy.copy(self)
        other.index = dataclasses.replace(self.index, member=name)
        other._known, other._flights, other._store, other._thread = set(), [], None, None
        return other

    def __repr__(self) -> str:
        return f"jaxreplay.tiered({self.buffer!r}, rows={self.place!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_INDEX:
            return getattr(self.index, name)
        raise AttributeError(f"a tiered buffer has no {name}")

    def __dir__(self) -> list[str]:
        return [*{*super().__dir__(), *_OF_INDEX}]

    def init(self, example: PyTree) -> ReplayState:
        """Make an empty state, and room for its rows; or the state of the rows that a folder has.

        Args:
          example: One env's step or one item, as for `ReplayBuffer.init`.

        Returns:
          The state, on JAX's default device.

        Raises:
          ValueError: As for `ReplayBuffer.init`; or the folder has the rows of another buffer, or
            is damaged.
          MemoryError: The device has too little memory for the index, or the host for the rows.
          OSError: The disk has too little space, or the folder is in use.
        """
        state = self._prepared(example)
        if not isinstance(self._store, FileRows):
            return self._followed(state)
        state = self._reopened(state, self._store)
        # The envs of a new process begin new episodes.
        has_streams = self.buffer.autoreset is not None and self.num_written.any()
        return self.end_streams(state) if has_streams and not self._continues else state

    def _init_anew(self, example: PyTree) -> ReplayState:
        """Make an empty state. The rows that a folder has stay until the first change, so that a
        checkpoint of their index can be restored.

        Args:
          example: As for `init`.
        """
        state = self._prepared(example)
        self.num_written, self._is_stale = np.zeros_like(self.num_written), self.is_in_files
        return state

    def _prepared(self, example: PyTree) -> ReplayState:
        """Return an empty state, with room for its rows, or with those that a folder has."""
        _check_outside("init", example)
        if self.is_in_files:
            self.close()
        state = self.index.init(example)
        self._known, self._lost, self.newest = set(), None, None
        leaves = jax.tree.leaves(state.rows.steps, is_leaf=_is_absent)
        absent = [leaf for leaf in leaves if _is_absent(leaf)]
        specs = {leaf.name[1]: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in absent}
        if self.is_in_files:
            names = "num_envs", "length", "autoreset", "num_agents"
            about = {name: getattr(self.buffer, name) for name in names}
            journal = {}
            if self.buffer.autoreset is not None:
                journal["flags"] = jax.ShapeDtypeStruct((), np.uint8)
            if self.buffer.num_agents is not None:
                journal["agents"] = jax.ShapeDtypeStruct((self.buffer.num_agents,), np.uint8)
            self._store = FileRows(self.place, about, specs, journal)
            return state
        needs = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in absent)
        free = self.free_bytes() if self._make is HostRows else None
        if free is not None and needs > free:
            raise MemoryError(
                f"init: the rows take {needs:,} bytes on the host, which has {free:,} free"
            )
        self._store = self._make(self.buffer.capacity, specs)
        return state

    def _reopened(self, state: ReplayState, store: FileRows) -> ReplayState:
        """Return the state of the rows in files.

        Args:
          state: An empty state.
          store: The files.
        """
        layout, progress = state.layout, store.progress
        first, end = progress[FIRST], progress[END]
        self.num_written = end.copy()
        if not end.any():
            return self._followed(state)
        if layout.lockstep and (np.ptp(first) or np.ptp(end)):
            self.close()
            raise ValueError(
                f"init: the envs in {self.place} have different numbers of rows, so that the "
                "buffer needs allow_mask=True"
            )
        lap, position = np.divmod(end, layout.length)
        counters = {"lap": lap.astype(np.uint32), "position": position.astype(np.int32)}
        counters["filled"] = (end - first).astype(np.int32)
        counters["last_flags"] = progress[LAST_FLAGS].astype(np.uint8)
        if (form := self.buffer.autoreset) is not None:  # of rows that were overwritten, too
            cleared = np.asarray(row_flags.after_clear(form, jnp.array(counters["last_flags"])))
            is_known = (first < end) | (end == 0)
            counters["last_flags"] = np.where(is_known, counters["last_flags"], cleared)
        kept = {name: jnp.array(rows) for name, rows in store.journal.items()}
        rows = Rows(steps=None, flags=kept.get("flags"), candidate_number=None, table=None)
        before = ReplayState(rows, Counters.zeros(layout).set(**counters), None)
        made = rebuild(self.index, before, {}, is_intact=False)
        steps = state.rows.steps
        if "agents" in kept:
            steps = steps.replace(terminated=kept["agents"])
        return made.replace(rows=made.rows.replace(steps=steps))

    def add(
        self,
        state: ReplayState,
        step: PyTree,
        mask: Any = None,
        priority: Any = None,
        *,
        envs: Any = None,
    ) -> ReplayState:
        """Append one step of every env, or of some envs: its values on the host, its flags on the
        device.

        It is called outside of `jit`.

        Args:
          state: The newest state. Donated.
          step: As for `ReplayBuffer.add`, leaves [E, ...]; NumPy arrays go to no device.
          mask: bool[E], as for `ReplayBuffer.add`. Default: every env took a step.
          priority: float[E], as for `ReplayBuffer.add`. Default: that of new rows.
          envs: int32[E], as for `ReplayBuffer.add`. Default: all envs.

        Returns:
          The new state.

        Raises:
          ValueError: An argument does not fit the buffer; the error names the leaf.
        """
        return self._append("add", state, step, (mask, priority), envs)

    def extend(
        self,
        state: ReplayState,
        steps: PyTree,
        mask: Any = None,
        priority: Any = None,
        *,
        envs: Any = None,
    ) -> ReplayState:
        """Append a block of steps of every env, or of some envs, as `add` does.

        Args:
          state: The newest state. Donated.
          steps: As for `ReplayBuffer.extend`, leaves [T, E, ...].
          mask: bool[T, E], as for `add`. Default: every env took every step.
          priority: float[T, E], as for `add`. Default: that of new rows.
          envs: int32[E], as for `add`. Default: all envs.

        Returns:
          The new state.

        Raises:
          ValueError: An argument does not fit the buffer; the error names the leaf.
        """
        return self._append("extend", state, steps, (mask, priority), envs)

    def _append(
        self,
        where: str,
        state: ReplayState,
        steps: PyTree,
        given: tuple[Any, ...],
        envs: Any = None,
        reopens: Any = None,
    ) -> ReplayState:
        """Append a block of steps.

        Args:
          where: "add" or "extend".
          state: The newest state. Donated.
          steps: As for this method.
          given: The mask and the priority, as for this method.
          envs: As for this method. Default: all envs.
          reopens: The last two arguments of `newest_row.reopen`, which comes first. Default: none.
        """
        _check_outside(where, (state, given))
        given = tuple(None if one is None else np.asarray(one) for one in given)
        store, steps, envs = self._checked(where, state, steps, given, envs)
        if where == "add":
            steps, given = jax.tree.map(lambda leaf: leaf[None], (steps, given))
        time, most = len(jax.tree.leaves(steps)[0]), self.index._most_steps

        def append() -> ReplayState:
            after, of_first = state, reopens
            for start in range(0, time, most):
                part, of_part = jax.tree.map(lambda x, at=start: x[at : at + most], (steps, given))
                after = self._append_part(store, after, part, of_part, envs, of_first)
                of_first = None
            return after

        return self._undivided(state, append) if time else state

    def _append_part(
        self, store: RowStore, state: ReplayState, steps: Any, given: Any, envs: Any, reopens: Any
    ) -> ReplayState:
        """Append as many steps as one call of the index can."""
        # Their values, as they are stored. Until the state is donated, an error loses nothing.
        axes = jax.tree.leaves(steps)[0].shape[:2]
        flags, values, final = np.zeros(axes, bool), steps, {}
        if isinstance(steps, Step):
            flags = steps.terminated, steps.truncated
            values = steps.replace(terminated=None, truncated=None, final_obs=None)
            final = dict(named({"obs": steps.final_obs}))
        stored = dict(named(state.rows.steps, is_leaf=stored_arrays.is_compound))
        leaves = {name: _bits(leaf, stored[name]) for name, leaf in named(values)}
        for name, leaf in final.items():
            both = np.stack([leaves[name], _bits(leaf, stored[name])], axis=1)
            leaves[name] = both.reshape(-1, *leaf.shape[1:])

        before = self.num_written
        after, told = _extend(self.index, state, flags, given, envs, reopens)
        (row, is_written, flags, of_agents), (lap, position, _, last) = jax.device_get(told)
        number = self._number(lap, position)
        self._wait_for_gathers(number)
        store.begin(number)
        for name, leaf in leaves.items():
            every = len(row) // len(leaf)  # the row of a step alone, or that of a final one, too
            kept = is_written[::every]
            is_all = kept.all()
            flat = leaf.reshape(-1, *leaf.shape[2:]) if is_all else leaf[kept]
            store.write(name, row[::every].reshape(-1) if is_all else row[::every][kept], flat)

        # What is known of them.
        self.num_written = number
        if isinstance(store, FileRows):
            is_new, again = is_written, []
            if reopens is not None:  # the newest row is written again, and the one before changes
                mask, was_first = reopens
                is_new = np.concatenate([is_written[:1] & ~mask, is_written[1:]])
                rows = self._newest(before - mask)[mask], row[0][mask]
                known = np.where(was_first, row_flags.FIRST, 0)[mask], flags[0][mask]
                again.append(("flags", np.concatenate(rows), np.concatenate(known)))
            for name, own in store.journal.items():
                own[row[is_new]] = (flags if name == "flags" else of_agents)[is_new]
            store.end(number, last, known=again)
        return after

    def _undivided(self, state: ReplayState, call: Callable[[], ReplayState]) -> ReplayState:
        """Return the state that a call makes of one, which it donates. An interrupt waits for its
        end, and `newest` then has the state.

        If the call fails before it donates the state, nothing is lost.
        """
        self.newest = None
        try:
            with defer_interrupts():
                if self._is_stale and isinstance(store := self._store, FileRows):
                    none = np.zeros_like(self.num_written)
                    store.end(none, None, none, until=none)
                self._is_stale = False
                self.newest = call()
        except Exception as error:
            if self.newest is None and not is_alive(state):
                self._lost = repr(error)
            raise
        made, self.newest = self.newest, None
        return made

    def _check_changeable(self) -> None:
        if self.read_only is not None:
            raise ValueError(self.read_only)

    def _store_to_change(self, where: str, state: ReplayState, given: Any) -> RowStore:
        """Return the store, or raise an error if a call cannot change its rows: they are lost or to
        be read alone, the call is inside of `jit`, or the state was donated."""
        _check_outside(where, (state, given))
        self._check_changeable()
        store = self._store_of(where)
        if self.newest is not None and not is_alive(state):
            raise ValueError(
                f"{where}: this state was donated to a call that was interrupted before it "
                "returned its own: go on with state = tier.newest"
            )
        check_not_deleted(where, state)
        return store

    def _checked(
        self, where: str, state: ReplayState, steps: PyTree, given: tuple[Any, ...], envs: Any
    ) -> tuple[RowStore, PyTree, Any]:
        """Return the store, and steps and envs as arrays of NumPy. Raise a ValueError if something
        does not fit; nothing is written yet."""
        store = self._store_to_change(where, state, (steps, given, envs))
        if self.buffer.autoreset is not None:
            steps = step_checks.step_of(where, steps, self.buffer.autoreset)
        envs = None if envs is None else np.asarray(envs)
        steps = jax.tree.map(np.asarray, steps)
        if envs is not None:
            step_checks.check_envs(where, envs, state.layout, self.buffer.num_envs)
        leaves, structure = jax.tree.flatten(((steps, *given), envs))
        dtype = lambda x: jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        specs = [jax.ShapeDtypeStruct(np.shape(x), dtype(x)) for x in leaves]
        known = where, structure, tuple((spec.shape, spec.dtype) for spec in specs)
        if known not in self._known:
            call = getattr(self.index, where)
            add = lambda state, given, envs: call(state, *given, **_options_of(envs))
            jax.eval_shape(add, state, *jax.tree.unflatten(structure, specs))
            self._known.add(known)
        return store, steps, envs

    def draw(
        self,
        state: ReplayState,
        key: Key | None = None,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> Plan:
        """Choose the rows of a batch, as `ReplayBuffer.sample` does. For your `jit`.

        Args:
          state: The state.
          key: Random key, consumed. Default: an error that says how to make one.
          batch_size: Number of items B, static. Default: the buffer's.
          options: As for `ReplayBuffer.sample`.

        Returns:
          The plan of the batch.

        Raises:
          ValueError: The sampler consumes rows: use `pop`. Or the view reads rows whose numbers
            depend on other rows.
        """
        return self.index.plan("sample", state, key, batch_size=batch_size, **options)[1]

    def pop(
        self,
        state: ReplayState,
        key: Key,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> tuple[ReplayState, Plan]:
        """Choose the rows of a batch and consume them, as `ReplayBuffer.pop` does. For your `jit`.

        Args:
          state: The state. Donated.
          key: Random key, consumed.
          batch_size: Number of items B, static. Default: the buffer's.
          options: As for `draw`.

        Returns:
          The new state, and the plan of the batch.

        Raises:
          ValueError: The sampler does not consume rows, or as for `draw`.
        """
        return self.index.plan("pop", state, key, batch_size=batch_size, **options)

    def get(
        self,
        state: ReplayState,
        index: Index | jax.Array,
        key: Key | None = None,
        **options: Unpack[SampleOptions],
    ) -> Plan:
        """Return the plan of rows that were sampled before, or of rows by number, as
        `ReplayBuffer.get` reads them. For your `jit`.

        Args:
          state: The state.
          index: `batch.index` of a sample, leaves [B], or row numbers, int32[B].
          key: Random key, consumed. Required for a view that is random. Default: None.
          options: As for `draw`.

        Returns:
          The plan.

        Raises:
          ValueError: As for `ReplayBuffer.get` and `draw`.
        """
        return self.index.plan("get", state, index, key, **options)[1]

    def take(self, plan: Plan) -> list[np.ndarray]:
        """Gather the rows of a plan, on the host.

        Args:
          plan: A plan, or several that a `lax.scan` stacked.

        Returns:
          What `read` takes.

        Raises:
          ValueError: A row was overwritten since the plan was drawn: take it before the next add,
            or use `take_later`, for which an add waits.
        """
        _check_outside("take", plan)
        return self._gather(plan, self._store_of("take"), self.num_written)

    def take_later(self, plan: Plan) -> "concurrent.futures.Future[list[np.ndarray]]":
        """Gather the rows of a plan in a thread. An add that would overwrite one of them waits.

        Args:
          plan: As for `take`.

        Returns:
          The future of what `take` returns.
        """
        _check_outside("take_later", plan)
        store = self._store_of("take_later")
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxreplay-rows")
        gather = transfers.allows(self._gather)
        future = self._thread.submit(gather, plan, store, self.num_written)
        self._flights = [one for one in self._flights if not one.future.done()]
        self._flights.append(_Flight(plan.chosen[self.index.member], future))
        return future

    def _gather(self, plan: Plan, store: RowStore, number: np.ndarray) -> list[np.ndarray]:
        """Gather the rows of a plan.

        Args:
          plan: The plan.
          store: The store.
          number: int64[E], number of rows that each env has got.
        """
        member = self.index.member
        if not self._is_whole(chosen := plan.chosen[member], number):
            raise ValueError(
                "take: rows of this plan were overwritten since it was drawn; take it before the "
                "next add, or call take_later at once, for which an add waits"
            )
        rows, taken = np.asarray(chosen.rows), {}
        found, start = [], 0
        for name, request in requests_of(plan, member):
            own = rows[..., start : start + request.size]
            start += request.size
            place = name, own.tobytes()
            if place not in taken:
                taken[place] = store.take(name, own)
            leaf = taken[place]
            found.append(leaf.reshape(*own.shape[:-1], *request.shape, *leaf.shape[own.ndim :]))
        return found

    def _is_whole(self, chosen: Chosen, number: np.ndarray) -> bool:
        """Return whether all rows are still those that were chosen.

        Args:
          chosen: The rows.
          number: int64[E], number of rows that each env got so far.
        """
        length = self.buffer.length
        since = number - self._number(chosen.laps, chosen.positions)
        if not since.any():
            return True
        since %= length * 2**32  # laps go round
        env, place = np.divmod(np.asarray(chosen.rows), length)
        at = lambda values: np.take_along_axis(np.asarray(values), env, axis=-1)
        age = ring.position_of(at(chosen.positions) - 1 - place, length)
        return bool((age + at(since) < length).all())

    def _wait_for_gathers(self, number: np.ndarray) -> None:
        """Wait for gathers of rows that a write would overwrite."""
        for flight in self._flights:
            if not flight.future.done() and not self._is_whole(flight.chosen, number):
                concurrent.futures.wait([flight.future])
        self._flights = [one for one in self._flights if not one.future.done()]

    def read(self, plan: Plan, data: list[Any]) -> Sample[Any]:
        """Make the batch of a plan and its rows. For your `jit`.

        Args:
          plan: The plan.
          data: What `take` returned.

        Returns:
          The batch, as `ReplayBuffer.sample` returns it.
        """
        parts = plan.parts
        made = parts.second(*data, *plan.needed)
        return parts.joined(made, plan.known, [data[place] for place in parts.rows])

    def sample(
        self,
        state: ReplayState,
        key: Key,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> Sample[Any]:
        """Sample a batch, outside of `jit`: `draw`, `take` and `read`.

        Args:
          state: The newest state.
          key: Random key, consumed.
          batch_size: Number of items B. Default: the buffer's.
          options: As for `draw`.

        Returns:
          The batch.

        Raises:
          ValueError: As for `draw`.
        """
        _check_outside("sample", (state, key))
        if options:
            self.index.check_given("sample", options)
        plan = _draw(self.index, state, key, options, batch_size=batch_size)
        return made(plan, self._gather(plan, self._store_of("sample"), self.num_written))

    def write(self, state: ReplayState, index: Index, values: Any) -> ReplayState:
        """Overwrite leaves of rows that were sampled, as `ReplayBuffer.write` does. Outside of
        `jit`. It waits for all gathers.

        Args:
          state: The newest state. Donated.
          index: As for `ReplayBuffer.write`, leaves [B] or [B, T].
          values: Some leaves of a step or of an item, [B, ...] or [B, T, ...].

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.write`.
        """
        store = self._store_to_change("write", state, (index, values))
        stored = dict(named(state.rows.steps, is_leaf=stored_arrays.is_compound))
        concurrent.futures.wait([flight.future for flight in self._flights])

        def write() -> ReplayState:
            after, rows, given = _write(self.index, state, index, values)
            self._put(store, stored, np.asarray(rows), given)
            return after

        return self._undivided(state, write)

    def map_rows(
        self,
        state: ReplayState,
        function: Callable[..., Any],
        *arguments: Any,
        block: int = 65_536,
    ) -> ReplayState:
        """Compute leaves of all rows anew, a block at a time, as `ReplayBuffer.map_rows` does.
        Outside of `jit`. It waits for all gathers.

        Args:
          state: The newest state. Donated.
          function: As for `ReplayBuffer.map_rows`. Each function is compiled once.
          arguments: Further arguments of the function: arrays of JAX or NumPy.
          block: Number of rows that are computed at once. Default: 65,536.

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.map_rows`.
        """
        store = self._store_to_change("map_rows", state, arguments)
        step_checks.check_writable("map_rows", state)
        checks.check_size("map_rows", "block", block)
        size = min(block, self.buffer.capacity)
        stored = dict(named(state.rows.steps, is_leaf=stored_arrays.is_compound))
        concurrent.futures.wait([flight.future for flight in self._flights])
        stamp, function = 0, identified(function)
        for number in range(-(-self.buffer.capacity // size)):
            plan = _block(self.index, state, np.int32(number), arguments, function, size)
            found = jax.device_get(made(plan, self.take(plan)))
            with defer_interrupts():
                self._put(store, stored, *found[:2])
            stamp += int(found[2])
        stamp = np.uint32(stamp & 0xFFFFFFFF)
        return self._undivided(state, lambda: _stamped(self.index, state, stamp))

    def _put(self, store: RowStore, stored: Any, rows: Any, given: dict[str, Any]) -> None:
        """Write leaves of rows, int32[K]. Rows past the end are dropped."""
        kept = rows < self.buffer.capacity
        leaves = {x: _bits(np.asarray(leaf)[kept], stored[x]) for x, leaf in given.items()}
        store.rewrite(leaves, rows[kept])

    def flush(self) -> str | None:
        """Wait until the rows in files are on the disk.

        Returns:
          The token of these files, which a checkpoint of their index has; None without files.
        """
        store = self._store_of("flush")
        return store.flush() if isinstance(store, FileRows) else None

    def resume(
        self, example: PyTree, token: str, end: np.ndarray, restore: Callable[[Any], ReplayState]
    ) -> ReplayState:
        """Return a saved state of the index, for the rows in the files.

        Args:
          example: As for `init`.
          token: What `flush` returned when it was saved.
          end: int64[E], the number of each env's next row at that time.
          restore: Takes the number of each env's oldest row that may be there still, int64[E], and
            returns the state.

        Raises:
          ValueError: The files do not have these rows.
        """
        if not self.is_in_files:
            raise ValueError(
                "restore: the rows of this checkpoint are in files: make the buffer with the path "
                "of their folder as rows"
            )
        if self._store is None:
            self.init(example)
        store = self._store
        assert isinstance(store, FileRows)
        if (first := store.since(token, end)) is None:
            raise ValueError(
                f"restore: the rows of this checkpoint are not in {self.place}: it has others, "
                "such as those of an older copy; or they were replaced after an earlier checkpoint "
                "was restored, or changed by write or map_rows. A checkpoint that has the rows "
                "itself can always be restored: save with copy=True"
            )
        concurrent.futures.wait([flight.future for flight in self._flights])
        state = restore(first)
        self._lost = self.newest = None
        return self._followed(state, until=end)

    def replace(
        self, example: PyTree, fill: Callable[[dict[str, Any], ReplayState], ReplayState]
    ) -> ReplayState:
        """Return a state with all rows new.

        Args:
          example: As for `init`.
          fill: Takes arrays of NumPy to fill, [N, ...]: "steps", a tree of leaves as they are
            stored, and "flags", or None; and an empty state of the index. Returns the state.
        """
        with self._anew(example) as (empty, store):
            is_own = self._make not in (HostRows, None)  # its rows are no arrays
            filled: dict[str, np.ndarray] = {}

            def array(leaf: Any) -> Any:
                if isinstance(leaf, BitsArray):
                    return leaf.replace(bits=array(leaf.bits))
                if isinstance(leaf, HostArray):
                    name = leaf.name[1]
                    rows = np.zeros(leaf.shape, leaf.dtype) if is_own else store.whole(name)
                    return filled.setdefault(name, rows)
                return np.zeros(leaf.shape, leaf.dtype)

            steps = stored_arrays.tree_map(array, empty.rows.steps)
            flags = None if empty.rows.flags is None else np.zeros(self.buffer.capacity, np.uint8)
            state = fill({"steps": steps, "flags": flags}, empty)
            if is_own:
                store.rewrite(filled, np.arange(self.buffer.capacity))
            return self._followed(state, until=np.full_like(self.num_written, -1))

    @contextlib.contextmanager
    def _anew(self, example: PyTree) -> Iterator[tuple[ReplayState, RowStore]]:
        """Yield an empty state, and room for its rows. Those from before stay until the block ends,
        and if it raises an error."""
        self._check_changeable()
        before = self._store, self.num_written, self._lost
        if not self.is_in_files:
            self._store = None
        try:
            empty = self._prepared(example)
            store = self._store_of("restore")
            with store.anew() if isinstance(store, FileRows) else contextlib.nullcontext():
                yield empty, store
        except BaseException:
            if not self.is_in_files:
                self._store, self.num_written, self._lost = before
            raise

    @property
    def is_in_files(self) -> bool:
        """True if the rows are in files."""
        return self._make is None

    @property
    def example_in_files(self) -> PyTree:
        """Shapes and dtypes of one env's step, or of an item, that a folder has rows of, with dicts
        as pytrees; None if there are no rows."""
        leaves = {} if not self.is_in_files else file_rows.leaves_of(self.place)
        if not leaves:
            return None
        values = nested(leaves)
        if self.buffer.autoreset is None:
            return values
        shape = () if self.buffer.num_agents is None else (self.buffer.num_agents,)
        flag = jax.ShapeDtypeStruct(shape, bool)
        return Step(**{**values, "terminated": flag, "truncated": flag})

    def free_bytes(self) -> int | None:
        """Return the free bytes where the rows lie, or None if the system does not report them."""
        if not self.is_in_files:
            return memory.free_host_bytes()
        folder = pathlib.Path(self.place).absolute()
        there = next(one for one in (folder, *folder.parents) if one.exists())
        return shutil.disk_usage(there).free

    @property
    def is_lost(self) -> bool:
        """True if a call that failed has lost rows."""
        return self._lost is not None

    @property
    def whole_buffer(self) -> ReplayBuffer[Any]:
        """The buffer, with the platform of the index."""
        return self._whole

    def end_streams(self, state: ReplayState, mask: Any = None) -> ReplayState:
        """End the unfinished episodes, as `ReplayBuffer.end_streams` does. Outside of `jit`.

        Args:
          state: The newest state. Donated.
          mask: bool[E], False for envs that go on. Default: every env was reset.

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.end_streams`.
        """
        return self._changed("end_streams", state, mask)

    def drop(self, state: ReplayState, mask: Any) -> ReplayState:
        """Give up the unfinished episodes of some envs, as `ReplayBuffer.drop` does. Outside of
        `jit`.

        Args:
          state: The newest state. Donated.
          mask: bool[E], True for the envs whose episode is given up.

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.drop`.
        """
        return self._changed("drop", state, mask)

    def clear(self, state: ReplayState) -> ReplayState:
        """Remove all rows. Outside of `jit`.

        Args:
          state: The newest state. Donated.

        Returns:
          The new state.
        """
        return self._changed("clear", state)

    def whole(self, state: ReplayState) -> ReplayState:
        """Return the state of the buffer with all rows, in the memory of the host: to save it, to
        look at it, or for any method of the buffer. Outside of `jit`.

        It costs no memory for rows: they are those of this object, but for a TPU, which stores them
        in another form. Use it before the next add, and donate it to no call.

        Args:
          state: The newest state.
        """
        self._check_changeable()
        store, cpu = self._store_of("whole"), jax.devices("cpu")[0]

        def present(name: str, leaf: Any) -> Any:
            if isinstance(leaf, BitsArray):
                return leaf.replace(bits=present(name, leaf.bits))
            rows = jax.device_put(store.whole(name), cpu)
            if not state.layout.traits.has_tiles:
                return rows
            row = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            empty = stored_arrays.zeros(len(rows), row, has_tiles=True)
            return stored_arrays.write(empty, ring.arange(len(rows)), rows)

        with jax.default_device(cpu):
            return jax.device_put(mapped(state, present), cpu)

    def adopt(self, state: ReplayState) -> ReplayState:
        """Return the state with the rows of any buffer's state, as `ReplayBuffer.adopt` does; they
        are copied to the host. Outside of `jit`.

        Args:
          state: The state of a `ReplayBuffer` with the same steps.

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.adopt`.
        """
        _check_outside("adopt", state)
        return self._undivided(state, lambda: self._adopted(state))

    def merge(self, state: ReplayState, other: ReplayState) -> ReplayState:
        """Append the rows of another state, as `ReplayBuffer.merge` does; they are copied to the
        host. Outside of `jit`.

        Args:
          state: The newest state. Donated.
          other: The state of a `ReplayBuffer` with the same steps. It stays valid.

        Returns:
          The new state.

        Raises:
          ValueError: As for `ReplayBuffer.merge`.
        """
        store = self._store_to_change("merge", state, other)
        other = adopt.check_adopted("merge", self.buffer, other)

        def merge() -> ReplayState:
            after, row = _merge(self.index, state, mapped(other, self.index.absent))
            row, (lap, position, *_) = jax.device_get((row, _counts(after.counters)))
            number = self._number(lap, position)
            self._wait_for_gathers(number)
            store.begin(number)
            self._copy(store, other, row)
            return self._followed(after, is_new=True)

        return self._undivided(state, merge)

    def _adopted(self, state: ReplayState) -> ReplayState:
        with jax.default_device(jax.devices("cpu")[0]):
            state = method("adopt")(self._whole, state)
        with self._anew(example_of(state.layout, state.rows.steps)) as (empty, store):
            self._copy(store, state, np.arange(self.buffer.capacity))
            index = mapped(state, self.index.absent)
            index = jax.device_put(index, jax.tree.leaves(empty.counters)[0].sharding)
            return self._followed(index, until=np.full_like(self.num_written, -1))

    def _copy(self, store: RowStore, state: ReplayState, rows: np.ndarray) -> None:
        """Write all rows of a state with the same leaves, to rows int32[M]; past the end, none."""
        kept = rows < self.buffer.capacity

        def write(name: str, leaf: Any) -> Any:
            bits = leaf.bits if isinstance(leaf, BitsArray) else leaf
            store.write(name, rows[kept], np.asarray(stored_arrays.values(bits))[kept])
            return leaf

        mapped(state, write)

    def close(self) -> None:
        """Give up the rows, and their memory. Those in files stay there, for another `init`."""
        self.end_gathers()
        if self._store is not None:
            self._store.close()
        self._store = None

    def end_gathers(self) -> None:
        """Wait for all gathers, and end their thread. `take_later` starts another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _changed(self, name: str, state: ReplayState, *arguments: Any) -> ReplayState:
        self._store_to_change(name, state, arguments)
        change = method(name)
        changed = lambda: self._followed(change(self.index, state, *arguments), name == "drop")
        return self._undivided(state, changed)

    def _followed(self, state: ReplayState, is_new: bool = False, until: Any = None) -> ReplayState:
        """Return the state, after counting the rows that it says were written.

        Args:
          state: The state.
          is_new: Whether flags of other rows than the newest ones changed. Default: False.
          until: int64[E], the numbers from which on the rows are others than before. Default: none
            are.
        """
        self._is_stale = False
        lap, position, filled, last = jax.device_get(_counts(state.counters))
        self.num_written = self._number(lap, position)
        if not isinstance(store := self._store, FileRows):
            return state
        kept = {"flags": state.rows.flags, "agents": getattr(state.rows.steps, "terminated", None)}
        known = []
        for name, rows in store.journal.items():
            if is_new or until is not None:
                values = np.asarray(kept[name])
                changed = np.flatnonzero((values != rows).reshape(len(rows), -1).any(axis=1))
                known.append((name, changed, values[changed]))
            else:
                newest = self._newest(self.num_written)
                known.append((name, newest, np.asarray(_rows_at(kept[name], newest))))
        first = self.num_written - filled
        store.end(self.num_written, last, first, known, until)
        return state

    def _number(self, lap: Any, position: Any) -> np.ndarray:
        """Return the number of each env's next row, int64[E], of its place."""
        return np.asarray(lap).astype(np.int64) * self.buffer.length + np.asarray(position)

    def _newest(self, number: np.ndarray) -> np.ndarray:
        """Return the row before each env's next one, int64[E], of the number of that."""
        length = self.buffer.length
        return np.arange(len(number)) * length + ring.position_of(number - 1, length)

    def _store_of(self, where: str) -> RowStore:
        if self._store is None:
            raise ValueError(f"{where}: there are no rows; make a state with init first")
        if self._lost is not None:
            raise RuntimeError(
                f"{where}: rows were lost in a call that raised {self._lost}; make a new "
                "state with init, or adopt one"
            )
        return self._store


def _check_outside(where: str, tree: PyTree) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise ValueError(f"{where}: call it outside of jit, since it moves rows on the host")


@functools.partial(program, changes=True)
def _extend(
    buffer: IndexBuffer, state: ReplayState, flags: Any, given: Any, envs: Any, reopens: Any
) -> tuple[ReplayState, Any]:
    """Append a block of steps of which the flags are known. Return the state; and the rows that
    were written, whether they were, their flags and bytes of agents, and `_counts`."""
    if reopens is not None:
        state = newest_row.reopen(state, *reopens)
    axes = jax.tree.leaves(flags)[0].shape[:2]
    zeros = lambda leaf: jnp.zeros((*axes, *leaf.shape[1:]), leaf.dtype)
    steps = stored_arrays.tree_map(zeros, state.rows.steps)
    if buffer.autoreset is not None:
        final_obs = steps.obs if buffer.autoreset == "same_step" else None
        terminated, truncated = flags
        steps = steps.replace(terminated=terminated, truncated=truncated, final_obs=final_obs)
    of_all = state.counters
    of_envs = of_all if envs is None else of_all.of(step_checks.as_envs(envs, buffer.num_envs))
    _, written = writes.advance(state.replace(counters=of_envs), steps, given[0])
    told = written.row, written.is_written, written.flags, written.agents
    after = buffer.extend(state, steps, *given, **_options_of(envs))
    return after, (told, _counts(after.counters))


def _options_of(envs: Any) -> dict[str, Any]:
    return {} if envs is None else {"envs": envs}


@functools.partial(program, changes=True)
def _write(
    buffer: IndexBuffer, state: ReplayState, index: Index, values: Any
) -> tuple[ReplayState, jax.Array, dict[str, jax.Array]]:
    """Note a write. Return the rows that are written, and their values by name."""
    after = buffer.write(state, index, values)
    given = step_checks.as_values("write", state, values, jnp.shape(index.row))
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1), index)
    return after, writes.written_again(state, flat), given


@functools.partial(program, static=("function", "size"))
def _block(
    index: IndexBuffer, state: ReplayState, number: Any, arguments: Any, function: Any, size: int
) -> Plan:
    """Return the plan of a block of `map_rows`."""

    def new(buffer: Any, state: ReplayState, number: Any, arguments: Any) -> Any:
        return block_of(buffer, state, function, arguments, size, number)

    return index.plan(new, state, number, arguments)[1]


@functools.partial(program, changes=True)
def _stamped(index: IndexBuffer, state: ReplayState, stamp: Any) -> ReplayState:
    del index
    return stamped(state, stamp)


@functools.partial(program, static=("batch_size",), on_one_core=True)
def _draw(index: IndexBuffer, state: ReplayState, key: Key, options: Any, batch_size: Any) -> Plan:
    return index.plan("sample", state, key, batch_size=batch_size, **options)[1]


@functools.partial(program, changes=True)
def _merge(
    index: IndexBuffer, state: ReplayState, other: ReplayState
) -> tuple[ReplayState, jax.Array]:
    return adopt.merged(index, state, other)


@jax.jit
def _counts(counters: Counters) -> tuple[Any, ...]:
    return counters.lap, counters.position, counters.filled, counters.last_flags


@jax.jit
def _rows_at(values: jax.Array, rows: Any) -> jax.Array:
    return values[rows]


def tiered(
    buffer: ReplayBuffer[Any], *, rows: Any = "host", continue_streams: bool = False
) -> Tiered:
    """Divide a buffer: the rows lie on the host, and an index of 5 to 22 bytes a row on the device.

    Args:
      buffer: A `ReplayBuffer`. It is not changed.
      rows: Where the rows lie: "host", in its memory; or the path of a folder on a disk of this
        machine, such as "/data/run7", where they stay when the process ends; or a class of your
        own, as `jaxreplay.buffers.RowStore`. Default: "host".
      continue_streams: With rows in files. If True, the unfinished episodes of the folder continue
        with the next step, so the envs must be where they were at the last one. Default: False;
        they end when the folder is opened, since new envs begin new episodes.

    Returns:
      A `jaxreplay.buffers.Tiered`.

    Raises:
      ValueError: There is no such place, or the buffer cannot be divided.

    Example:
      >>> import numpy as np, jaxreplay as jr
      >>> tier = jr.tiered(jr.items(capacity=8, batch_size=4), rows="host")
      >>> tier.init({"x": np.zeros(3)})
      ReplayState(1 env x 8 rows, item {x: f32[3]}, 16 B)
    """
    return Tiered(buffer, rows, continue_streams)

"""The learner's side of actors: a thread asks each for blocks, and adds them."""

import atexit
import collections
import dataclasses
import inspect
import itertools
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxreplay._util import checks
from jaxreplay.actors.actor import Actor, Setup
from jaxreplay.actors.block import IN_FLIGHT, ActorBlock, Inbox, Line, News, in_turn, joined
from jaxreplay.actors.processes import local

_TICK = 0.1  # seconds between looks whether the actors are stopped
_FIRST, _LONGEST = 0.25, 60.0  # seconds of a pause: the second restart's, and the most
_LONG = 600.0  # seconds after which an actor has run well
_VERSIONS = 8  # newest ones, of which numbers of steps, and those that are logged, are kept


class Engine(Protocol):
    """Runs actors somewhere. One thread calls all methods but `share` and `wake`.

    Attributes:
      run: Name that no other actors have.
      known: Incarnations of actors that another learner has begun, by their index.
    """

    run: str
    known: Mapping[int, int]

    def begin(self, index: int, incarnation: int) -> None:
        """Start an actor, or go on with a known one. `News` tell when it may be asked."""
        ...

    def ask(self, index: int, number: int, added: int, params: Any) -> None:
        """Ask an actor for a block, as `Ask` has it."""
        ...

    def answers(self, seconds: float) -> list[ActorBlock | News]:
        """Return what has arrived, of each actor in order; wait for some as long."""
        ...

    def end(self, index: int) -> None:
        """End an actor that hangs. Nothing more comes from it."""
        ...

    def share(self, data: bytes) -> Any:
        """Put parameters where actors find them. Return what a request says of it."""
        ...

    def wake(self) -> None:
        """Let `answers` return."""
        ...

    def stop(self, seconds: float) -> None:
        """Stop the actors. Those that run after so many seconds are killed."""
        ...


@dataclasses.dataclass
class Offer:
    """Blocks of some actors, joined for one call of `extend`.

    Attributes:
      blocks: The blocks.
      steps: Their steps or items, mask and priorities or None, leaves [T, E, ...].
      envs: int32[E], as for `Replay.add`.
      resets: bool[E], True for the envs whose first step only resets.
      cut: Called right before they are added, and before the mask is read. Returns bool[E] over all
        envs of the buffer, True for envs whose episodes end before.
      note: Called right after they were added.
    """

    blocks: Sequence[ActorBlock]
    steps: Any
    envs: np.ndarray
    resets: np.ndarray
    cut: Callable[[], np.ndarray]
    note: Callable[[], None]

    def mask_after(self, gap: np.ndarray) -> np.ndarray:
        """Return the mask without the steps that only reset an env after a step that is missing.

        Args:
          gap: bool[E + 1], for all envs of the buffer and for padding, True if the step before is
            missing; updated.
        """
        due, mask = np.flatnonzero(gap[self.envs] & self.resets), self.steps[1].copy()
        gap[self.envs] &= ~mask.any(0)
        mask[mask[:, due].argmax(0), due] = False
        return mask


class Host(Protocol):
    """The replay that actors fill, and its lock."""

    lock: Any

    def insert(self, offer: Offer, timeout: float) -> bool:
        """Add blocks, and call `offer.note` while the lock is held.

        Args:
          offer: The blocks.
          timeout: Seconds to wait until they can be added.

        Returns:
          False if nothing was added.
        """
        ...

    def changed(self) -> None:
        """Look whether actors have failed."""
        ...

    def lead(self, num_steps: int) -> int:
        """Return how many blocks of each actor may be under way, of so many steps in all."""
        ...

    def progress(self) -> tuple[float, float, bool]:
        """Return how many more steps were added than samples need; how many a sample waits for;
        and whether the buffer may be filled meanwhile, without a limit."""
        ...


class Actors:
    """The actors that `Replay.start` has started.

    Args:
      act: As for `Replay.start`, as are `params`, `max_restarts`, `max_staleness`, `block_timeout`
        and `on`.
      setup: What all are told.
      host: The replay.
      steps_per_version: Number of steps that are thought to be added for each version, before some
        were published.
      saved: `state` of earlier actors, to continue from, or None.
    """

    def __init__(
        self,
        act: Callable[[Actor], Any],
        setup: Setup,
        host: Host,
        steps_per_version: float,
        saved: dict[str, Any] | None = None,
        params: Any = None,
        max_restarts: int = 3,
        max_staleness: int | None = None,
        block_timeout: float = 300.0,
        on: Any = None,
    ):
        checks.check_callable("start", "act", act, ("actor",))
        given = {"max_restarts": max_restarts, "seed": setup.seed}
        if max_staleness is not None:
            given["max_staleness"] = max_staleness
        for name, value in given.items():
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"start: {name} must be an int of at least 0, got {value!r}")
        self._timeout = checks.checked_seconds("start", block_timeout, name="block_timeout")
        num = setup.num_actors
        self._setup, self._host, self._inbox = setup, host, Inbox(num)
        self._block = setup.block_length * setup.num_envs  # number of steps
        self._block_of_all = self._block * num
        self._max_staleness, self._default = max_staleness, steps_per_version
        data = _pickled("start", params)
        if isinstance(on, str) or inspect.isfunction(on):
            raise ValueError(f"start: on must be actors.local(), ray() or threads(), got {on!r}")
        self._engine: Engine = (on or local())(act, setup)
        before = [] if saved is None else saved["incarnations"]
        for line in self._inbox.lines:
            first = before[line.index] + 1 if len(before) == num else 0
            line.incarnation = self._engine.known.get(line.index, first)
            line.began = time.monotonic()
        self.version = 0  # of the newest parameters
        self.error: BaseException | None = None
        self._figures = collections.Counter()
        self._most_restarts = max_restarts
        self._params: tuple[int, Any] = -1, None  # version of the newest; what the engine says
        self._lead, self._turn = IN_FLIGHT, 0
        # steps that the learner had taken when it published; samples may run ahead of the base
        self._base = 0.0
        self._taken: collections.deque[float] = collections.deque(maxlen=_VERSIONS + 1)
        self._gap = np.ones(
            num * setup.num_envs + 1, bool
        )  # for envs and padding: the step before is missing
        self._joined: Offer | None = None  # blocks that are to be added
        self._recent: collections.deque[Any] = collections.deque(maxlen=4 * num)
        # sums and counts of what actors have logged, by name and version
        self._logged: dict[str, dict[int, tuple[float, int]]] = {}
        try:
            if saved is not None:
                self.resume(saved)
            if params is not None:
                self._params = self.version, self._engine.share(data)
            for line in self._inbox.lines:
                self._engine.begin(line.index, line.incarnation)
        except BaseException:
            self._engine.stop(0.0)
            raise
        self._is_stopped, self._pid = threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="actors", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def publish(self, params: Any) -> int:
        """Send parameters to the actors: they go with the next request for a block, after which
        `actor.params()` returns them.

        Args:
          params: Anything that can be pickled, on the host: arrays of JAX or NumPy, tensors. An
            actor gets JAX arrays on its CPU.

        Returns:
          Their version, one more than the last.
        """
        data = _pickled("publish", params)
        if self.is_stopped:
            raise RuntimeError("publish: the actors are stopped")
        shared = self._engine.share(data)
        with self._host.lock:
            self.version += 1
            self._params, version = (self.version, shared), self.version
            ahead = self._host.progress()[0]
            self._base = self._figures["steps"] - max(ahead, 0)
            self._taken.append(self._figures["steps"] - ahead)
        self._engine.wake()
        return version

    def look(self) -> None:
        """Let more blocks be asked for, if fewer were because samples lagged behind."""
        if self._lead < IN_FLIGHT and self._lead < self._host.lead(self._block_of_all):
            self._engine.wake()

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the actors, until they are stopped."""
        return None if self._is_stopped.is_set() else self.error

    @property
    def is_stopped(self) -> bool:
        """True after `stop`, or a failure."""
        return self._is_stopped.is_set() or self.error is not None

    @property
    def is_done(self) -> bool:
        """True once `act` has returned in all actors, and their steps were added."""
        return all(line.is_done and not line.waiting for line in self._inbox.lines)

    @property
    def state(self) -> dict[str, Any]:
        """Numbers of a checkpoint, to continue from."""
        return {
            "run": self._engine.run,
            "added": [*self._inbox.added],
            "incarnations": [line.incarnation for line in self._inbox.lines],
            "version": self.version,
        }

    def resume(self, state: Any) -> None:
        """Continue after the blocks that a checkpoint has; None if it knows no actors. Those of
        another run are no predecessors: all begin with a cut."""
        added = [(line.incarnation - 1, 0) for line in self._inbox.lines]
        state = state or {"run": None}
        self._inbox.resume(state["added"] if state["run"] == self._engine.run else added)
        self.version = max(self.version, state.get("version", 0))

    def metrics(self) -> dict[str, Any]:
        """Return figures of the actors.

        Returns:
          Numbers by name.
          `steps`: number of steps that were added, over all envs, without masked ones.
          `steps_per_second`: of the newest few blocks of each actor.
          `waiting`: share of their time that the actors were held back, in the same blocks.
          `alive`: number of actors that run.
          `lost`: number of times that an actor was lost; `restarts`: that one was started again.
          `hung`: number of times that a block took longer than `block_timeout`.
          `dropped_blocks`: number of blocks that an interrupt of an actor has lost, or that rows
          which were loaded have.
          `version`: newest version of the parameters.
          `staleness`: mean number of versions from the parameters that acted to the newest ones,
          when a block was added; `largest_staleness`: the largest so far.
          `log`: of each name that actors have logged, and of `episode_return` and `episode_length`,
          the mean and the count for each of the newest versions that acted: `{name: {version:
          (mean, count)}}`.
        """
        recent, now, figures = [*self._recent], time.monotonic(), self._figures
        found = np.array(recent or [(now, 0, 0.0, 0.0, 0)]).T
        (first, *_), num, seconds, waited, stale = found
        return {
            "steps": figures["steps"],
            "steps_per_second": float(num.sum() / max(now - first, 1e-9)),
            "waiting": float(waited.sum() / max(seconds.sum(), 1e-9)),
            "alive": sum(line.is_alive for line in self._inbox.lines),
            "lost": figures["lost"],
            "restarts": figures["restarts"],
            "hung": figures["hung"],
            "dropped_blocks": self._inbox.num_dropped,
            "version": self.version,
            "staleness": float(stale.mean()),
            "largest_staleness": figures["staleness"],
            "log": {
                name: {version: (total / num, num) for version, (total, num) in of.items()}
                for name, of in [*self._logged.items()]
            },
        }

    def stop(self, timeout: float = 10.0) -> None:
        """Stop the actors, also those that a failure has left. Steps that were not added yet are
        lost.

        Args:
          timeout: Seconds after which those that still run are killed. Default: 10.
        """
        self._is_stopped.set()
        if os.getpid() == self._pid:
            if self._thread.is_alive():
                self._engine.wake()
            self._thread.join()
            self._engine.stop(timeout)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                has_next = self._joined is not None or self._inbox.next_blocks()
                for one in self._engine.answers(0.0 if has_next else _TICK):
                    self._hear(one)
                self._heal()
                self._insert()
                self._ask()
        except BaseException as error:
            self.error = error
            self._host.changed()

    def _hear(self, one: ActorBlock | News) -> None:
        line = self._inbox.lines[one.actor]
        line.since = time.monotonic()
        if isinstance(one, ActorBlock):
            self._inbox.receive(one)
        elif one.incarnation != line.incarnation:  # it was given up
            return
        elif one.kind == "ready":
            self._inbox.begin(one.actor, one.incarnation, one.number)
            line.told = -1
        elif one.kind == "gap":
            self._inbox.skip(one.actor, one.number)
        else:
            self._inbox.lose(one.actor)
            line.is_done = one.kind == "done"
            if one.kind == "replaced":
                raise RuntimeError("another learner has these actors now")
            if one.kind == "lost":
                self._lose(line, one.why)
            self._host.changed()

    def _lose(self, line: Line, why: str) -> None:
        """Begin an actor again after a pause, or raise an error."""
        self._figures["lost"] += 1
        line.restarts = 1 if line.since - line.began >= _LONG else line.restarts + 1
        if line.restarts > self._most_restarts:
            raise RuntimeError(f"actor {line.index} failed: {why}")
        self._figures["restarts"] += 1
        line.incarnation += 1
        line.due = line.since + pause_before(line.restarts)

    def _heal(self) -> None:
        """Begin actors that are due; give those up that hang."""
        now = time.monotonic()
        for line in self._inbox.lines:
            if line.due is not None and line.due <= now:
                line.due, line.began = None, now
                self._engine.begin(line.index, line.incarnation)
            elif line.is_alive and line.asked > line.heard and now - line.since > self._timeout:
                self._engine.end(line.index)
                self._figures["hung"] += 1
                why = f"no block came for {self._timeout:g} s; block_timeout= may be longer"
                self._hear(News(line.index, line.incarnation, "lost", why))

    def _insert(self) -> None:
        if self._joined is None:
            if not (blocks := self._inbox.next_blocks()):
                return
            parts = joined(blocks, len(self._gap) - 1)
            self._joined = Offer(blocks, *parts, self._cut, lambda: self._note(blocks))
        if self._host.insert(self._joined, _TICK):
            self._joined = None
        else:
            self._is_stopped.wait(_TICK / 10)

    def _cut(self) -> np.ndarray:
        """Return bool[E], True for the envs whose episodes end before the blocks that are next."""
        ends = np.zeros((self._setup.num_actors, self._setup.num_envs), bool)
        offer: Any = self._joined
        for block in offer.blocks:
            ends[block.actor] = self._inbox.is_cut(block)
        self._gap[:-1] |= ends.reshape(-1)
        step, _, priority = offer.steps
        offer.steps = step, offer.mask_after(self._gap), priority
        return ends.reshape(-1)

    def _note(self, blocks: Sequence[ActorBlock]) -> None:
        """Note that blocks were added, before another call sees their rows."""
        now, offer = time.monotonic(), self._joined
        assert offer is not None
        self._inbox.note(blocks)
        nums = offer.steps[1].sum(0).reshape(-1, self._setup.num_envs).sum(1).tolist()
        for block, num in zip(blocks, nums, strict=False):  # the others are padding
            stale = self.version - block.version
            self._recent.append((now, num, block.seconds, block.waited, stale))
            self._figures["steps"] += num
            self._figures["staleness"] = max(self._figures["staleness"], stale)
            for (version, name), added in block.logged.items():
                of = self._logged.get(name, {})
                before = of.get(version, (0.0, 0))
                of = of | {version: (before[0] + added[0], before[1] + added[1])}
                self._logged[name] = {one: of[one] for one in sorted(of)[-_VERSIONS:]}

    def _ask(self) -> None:
        """Ask for blocks, the actors in turn, up to `IN_FLIGHT` of each that are not added yet."""
        lines = self._inbox.lines
        under_way = sum(line.under_way for line in lines)
        most = self._most_blocks(under_way == 0)
        self._lead = 0  # meanwhile, so that `look` misses no sample
        self._lead = self._host.lead(self._block_of_all)
        order = in_turn(lines, self._turn)
        for limit, line in itertools.product(range(1, self._lead + 1), order):
            if line.is_alive and line.under_way < limit and under_way < most:
                if line.asked == line.heard:
                    line.since = time.monotonic()
                params, line.bases = self._params, (*line.bases, self._base)[-IN_FLIGHT:]
                is_new = params[0] > line.told
                self._engine.ask(
                    line.index, *self._inbox.ask(line.index), params if is_new else None
                )
                line.told = params[0]
                self._turn, under_way = line.index + 1, under_way + 1

    def _most_blocks(self, is_idle: bool) -> float:
        """Return how many blocks may be under way.

        With `max_staleness`, the learner takes m = `max_staleness` + 1 versions' steps until a
        block that was begun now would be too old. So no more than these are asked for after what it
        had taken when the oldest block under way was begun. But if none is, as many are asked for
        as a sample waits for.
        """
        if self._max_staleness is None:
            return math.inf
        block, taken = self._block, [*self._taken]
        mean = (taken[-1] - taken[0]) / (len(taken) - 1) if len(taken) > 1 else self._default
        _, missing, may_fill = self._host.progress()
        lines = [line for line in self._inbox.lines if line.under_way]
        oldest = min((line.bases[-line.under_way] for line in lines), default=self._base)
        left = self._figures["steps"] - oldest
        most = (mean * (self._max_staleness + 1) - (0 if may_fill else left)) // block
        return max(most, may_fill, math.ceil(missing / block)) if is_idle else most


def pause_before(restart: int) -> float:
    """Return the pause in seconds before the first restart in a row, or a later one. Pauses grow,
    so that an actor outlasts what is away for a while."""
    return min(_FIRST * (2.0 ** min(restart - 1, 16) - 1.0), _LONGEST)


def _pickled(where: str, params: Any) -> bytes:
    try:
        return pickle.dumps(params, protocol=5)
    except Exception as error:
        raise ValueError(f"{where}: the parameters cannot be pickled: {error}") from error

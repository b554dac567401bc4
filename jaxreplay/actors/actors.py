"""The learner's side of actors: a thread adds their blocks, and tells each how far it may go on."""

import atexit
import collections
import dataclasses
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxreplay._util import checks
from jaxreplay.actors.actor import IN_FLIGHT, Actor, Setup
from jaxreplay.actors.block import Block, Inbox, News, joined
from jaxreplay.actors.processes import local

_TICK = 0.1  # seconds between looks whether the actors are stopped
_VERSIONS = 8  # newest ones, whose mean number of steps is that of a version


class Engine(Protocol):
    """Runs actors somewhere. One thread calls all methods but `publish` and `wake`. `run` is a name
    that no other actors have; `is_new` says whether these began in the incarnations that were
    asked for."""

    run: str
    is_new: bool

    def receive(self, seconds: float) -> list[Block | News]:
        """Return what has arrived; wait for some as long."""
        ...

    def allow(self, index: int, incarnation: int, acked: int, granted: int) -> None:
        """Tell an actor how many of its blocks were added, and how many it may begin."""
        ...

    def publish(self, version: int, data: bytes) -> None:
        """Let actors find new parameters."""
        ...

    def wake(self) -> None:
        """Let `receive` return."""
        ...

    def stop(self, seconds: float) -> None:
        """Stop the actors."""
        ...


@dataclasses.dataclass
class Offer:
    """Blocks of some actors, joined for one call of `extend`.

    Attributes:
      blocks: The blocks.
      steps: Steps or items, mask and priority, leaves [T, E, ...]; None for what was not given.
      envs: int32[E], as for `Replay.add`.
      cut: Called right before they are added, and before the mask is read: it may mask steps.
        Returns bool[E] over all envs of the buffer, True for envs whose episodes end before, or
        None for none.
      note: Called right after they were added.
    """

    blocks: Sequence[Block]
    steps: Any
    envs: np.ndarray
    cut: Callable[[], np.ndarray | None]
    note: Callable[[], None]

    def mask_of(self, place: int) -> np.ndarray:
        """Return the part of the mask, or of one that is True everywhere, that a block has."""
        (length, num), mask = self.blocks[place].shape, self.steps[1]
        own = slice(place * num, (place + 1) * num)
        return np.ones((length, num), bool) if mask is None else mask[:, own]

    @property
    def num_steps(self) -> int:
        """Number of steps that are not masked, over all envs."""
        return sum(int(self.mask_of(place).sum()) for place in range(len(self.blocks)))


class Host(Protocol):
    """The replay that actors fill, and its lock."""

    lock: Any

    def insert(self, offer: Offer, timeout: float) -> bool:
        """Add blocks, and call `offer.note` while the lock is held.

        Args:
          offer: The blocks.
          timeout: Seconds to wait while samples lag behind.

        Returns:
          False if nothing was added: samples lag behind, or the replay is closed.
        """
        ...

    def changed(self) -> None:
        """Look whether actors have failed."""
        ...

    def progress(self) -> tuple[float, float, bool]:
        """Return how many more steps were added than samples need; how many a sample waits for;
        and whether the buffer may be filled meanwhile, without a limit."""
        ...


class Actors:
    """The actors that `Replay.start` has started.

    Args:
      act: As for `Replay.start`, as are `params`, `max_restarts`, `max_staleness` and `on`.
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
        on: Any = None,
    ):
        checks.check_callable("start", "act", act, ("actor",))
        given = {"max_restarts": max_restarts, "seed": setup.seed}
        if max_staleness is not None:
            given["max_staleness"] = max_staleness
        for name, value in given.items():
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"start: {name} must be an int of at least 0, got {value!r}")
        self._setup, self._host, self._inbox = setup, host, Inbox(setup.num_actors)
        self._max_staleness, self._default = max_staleness, steps_per_version
        self.version = 0  # of the newest parameters
        data = _pickled("start", params)
        added = saved["added"] if saved else []
        begun = (saved or {}).get("incarnations") or [newest for newest, _ in added]
        if len(begun) != setup.num_actors:
            begun = [-1] * setup.num_actors
        self._incarnations = [incarnation + 1 for incarnation in begun]  # the newest
        self._engine: Engine = (on or local())(act, setup, self._incarnations, max_restarts)
        if not self._engine.is_new:
            self._incarnations = [0] * setup.num_actors
        try:
            if saved is not None:
                self.resume(saved)
            if params is not None:
                self._engine.publish(self.version, data)
        except BaseException:
            self._engine.stop(0.0)
            raise
        num = setup.num_actors
        self._alive: list[Any] = [None] * num  # incarnations
        self._begun = [*self._incarnations]  # of which others have the seeds
        self._acked, self._granted = [0] * num, [0] * num
        self._turn = 0
        self._is_done = [False] * num
        self.error: BaseException | None = None
        self._lock = threading.Lock()  # of `publish`
        self._figures = collections.Counter()
        # steps that the learner had taken when it published; samples may run ahead of the base
        self._base = 0.0
        self._taken: collections.deque[float] = collections.deque(maxlen=_VERSIONS + 1)
        self._told: list[Any] = [None] * num  # incarnations, and the two numbers
        # blocks that may be begun, oldest first: actor, incarnation, number, and what the learner
        # had taken
        self._grants: collections.deque[Any] = collections.deque()
        # envs of each actor that took no step since a cut, and whose next one only resets; or None
        self._due: list[Any] = [None] * num
        self._joined: Offer | None = None  # blocks that wait until samples have caught up
        self._recent: collections.deque[Any] = collections.deque(maxlen=4 * num)
        self._is_stopped, self._pid = threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="actors", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def publish(self, params: Any) -> int:
        """Send parameters to the actors: the next `actor.params()` returns them.

        Args:
          params: Anything that can be pickled, on the host: arrays of JAX or NumPy, tensors. An
            actor gets JAX arrays on its CPU.

        Returns:
          Their version, one more than the last.
        """
        data = _pickled("publish", params)
        if self.is_stopped:
            raise RuntimeError("publish: the actors are stopped")
        with self._lock:
            self._engine.publish(self.version + 1, data)
            self.version += 1
            with self._host.lock:
                ahead = self._host.progress()[0]
                self._base = self._figures["steps"] - max(ahead, 0)
                self._taken.append(self._figures["steps"] - ahead)
            self._engine.wake()
            return self.version

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
        return all(self._is_done) and not self._inbox.num_waiting

    @property
    def state(self) -> dict[str, Any]:
        """Numbers of a checkpoint, to continue from."""
        return {
            "run": self._engine.run,
            "added": [*self._inbox.added],
            "incarnations": [*self._begun],
            "version": self.version,
        }

    def resume(self, state: Any) -> None:
        """Continue after the blocks that a checkpoint has; None if it knows no actors. Those of
        another run are no predecessors: all begin with a cut."""
        added, state = [(one - 1, 0) for one in self._incarnations], state or {"run": None}
        self._inbox.resume(state["added"] if state["run"] == self._engine.run else added)
        self.version = max(self.version, state.get("version", 0))

    def metrics(self) -> dict[str, float]:
        """Return figures of the actors.

        Returns:
          Numbers by name.
          `steps`: number of steps that were added, over all envs, without masked ones.
          `steps_per_second`: of the newest few blocks of each actor.
          `waiting`: share of their time that the actors were held back, in the same blocks.
          `alive`: number of actors that run.
          `lost`: number of times that an actor was lost; `restarts`: that one was started again.
          `dropped_blocks`: number of blocks that came twice or too late, or were lost.
          `version`: newest version of the parameters.
          `staleness`: mean number of versions from the parameters that acted to the newest ones,
          when a block was added; `largest_staleness`: the largest so far.
        """
        recent, figures = [*self._recent], self._figures
        first = min((when for when, *_ in recent), default=0.0)
        times = sum(seconds for _, _, seconds, _, _ in recent)
        return {
            "steps": figures["steps"],
            "steps_per_second": sum(num for _, num, *_ in recent)
            / max(time.monotonic() - first, 1e-9),
            "waiting": sum(waited for *_, waited, _ in recent) / max(times, 1e-9),
            "alive": sum(one is not None for one in self._alive),
            "lost": figures["lost"],
            "restarts": figures["restarts"],
            "dropped_blocks": self._inbox.num_dropped,
            "version": self.version,
            "staleness": sum(stale for *_, stale in recent) / max(len(recent), 1),
            "largest_staleness": figures["staleness"],
        }

    def stop(self, timeout: float = 10.0) -> None:
        """Stop the actors, also those that a failure has left. Steps that were not added yet are
        lost.

        Args:
          timeout: Seconds after which those that still run are killed. Default: 10.
        """
        self._is_stopped.set()
        if os.getpid() == self._pid:
            self._thread.join()
            self._engine.stop(timeout)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                has_next = self._joined is not None or self._inbox.next_blocks()
                for one in self._engine.receive(0.0 if has_next else _TICK):
                    self._hear(one)
                self._insert()
                self._allow()
        except BaseException as error:
            self.error = error
            self._host.changed()

    def _hear(self, one: Block | News) -> None:
        if isinstance(one, Block):
            self._inbox.receive(one)
            return
        index, self._is_done[one.actor] = one.actor, one.kind == "done"
        self._incarnations[index] = max(self._incarnations[index], one.incarnation)
        self._begun[index] = max(self._begun[index], one.incarnation + (one.kind == "lost"))
        self._alive[index] = one.incarnation if one.kind == "ready" else None
        self._acked[index], self._granted[index] = one.acked, one.granted
        self._figures["lost"] += one.kind in ("lost", "failed")
        self._figures["restarts"] += one.kind == "lost"
        if one.kind == "failed":
            raise RuntimeError(f"actor {index} failed: {one.why}")
        self._host.changed()

    def _insert(self) -> None:
        if self._joined is None:
            if not (blocks := self._inbox.next_blocks()):
                return
            num_envs = self._setup.num_actors * self._setup.num_envs
            steps, envs = joined(blocks, num_envs)
            self._joined = Offer(blocks, steps, envs, self._cut, lambda: self._note(blocks))
        if self._host.insert(self._joined, _TICK):
            self._joined = None
        else:
            self._is_stopped.wait(_TICK / 10)

    def _cut(self) -> np.ndarray | None:
        """Return bool[E], True for the envs whose episodes end before the blocks that are next. If
        the step before has ended an episode and is missing, mask the one that only resets."""
        ends = np.zeros((self._setup.num_actors, self._setup.num_envs), bool)
        offer: Any = self._joined
        for place, block in enumerate(offer.blocks):
            ends[block.actor] = is_cut = self._inbox.is_cut(block)
            due = block.resets if is_cut else self._due[block.actor]
            if due is not None:
                own = offer.mask_of(place)
                envs, took = np.flatnonzero(due), own.any(0)
                own[own[:, envs].argmax(0), envs] = False
                due = due & ~took if (due & ~took).any() else None
            self._due[block.actor] = due
        return ends.reshape(-1) if self._setup.autoreset and ends.any() else None

    def _note(self, blocks: Sequence[Block]) -> None:
        """Note that blocks were added, before another call sees their rows."""
        now, offer = time.monotonic(), self._joined
        assert offer is not None
        self._inbox.note(blocks)
        for place, block in enumerate(blocks):
            incarnation, number = block.place
            if self._alive[block.actor] == incarnation:
                self._acked[block.actor] = max(self._acked[block.actor], number + 1)
            stale, num = self.version - block.version, int(offer.mask_of(place).sum())
            self._recent.append((now, num, block.seconds, block.waited, stale))
            self._figures["steps"] += num
            self._figures["staleness"] = max(self._figures["staleness"], stale)

    def _allow(self) -> None:
        """Grant blocks, the actors in turn, up to `IN_FLIGHT` of each that are not added yet."""
        num = len(self._alive)
        order = [*range(self._turn, num), *range(self._turn)]
        order = [index for index in order if self._alive[index] is not None]
        under_way = sum(self._granted[index] - self._acked[index] for index in order)
        most = self._most_blocks(under_way == 0)
        for limit in range(1, IN_FLIGHT + 1):
            for index in order:
                if under_way >= most:
                    break
                if self._granted[index] - self._acked[index] < limit:
                    place = self._alive[index], self._granted[index]
                    self._grants.append((index, *place, self._base))
                    self._granted[index] += 1
                    self._turn, under_way = index + 1, under_way + 1
        for index in order:
            allowed = self._alive[index], self._acked[index], self._granted[index]
            if self._told[index] != allowed:
                self._told[index] = allowed
                self._engine.allow(index, *allowed)

    def _most_blocks(self, is_idle: bool) -> float:
        """Return how many blocks may be under way.

        With `max_staleness`, the learner takes m = `max_staleness` + 1 versions' steps until a
        block that was begun now would be too old. So no more than these are granted after what it
        had taken when the oldest block under way was begun. But if none is, as many are granted as
        a sample waits for.
        """
        grants = self._grants
        while grants and (
            grants[0][1] != self._alive[grants[0][0]] or grants[0][2] < self._acked[grants[0][0]]
        ):
            grants.popleft()
        if self._max_staleness is None:
            return math.inf
        block, taken = self._setup.block_length * self._setup.num_envs, [*self._taken]
        mean = (taken[-1] - taken[0]) / (len(taken) - 1) if len(taken) > 1 else self._default
        _, missing, may_fill = self._host.progress()
        left = self._figures["steps"] - (grants[0][3] if grants else self._base)
        most = (mean * (self._max_staleness + 1) - (0 if may_fill else left)) // block
        return max(most, may_fill, math.ceil(missing / block)) if is_idle else most


def _pickled(where: str, params: Any) -> bytes:
    try:
        return pickle.dumps(params, protocol=5)
    except Exception as error:
        raise ValueError(f"{where}: the parameters cannot be pickled: {error}") from error

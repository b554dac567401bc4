"""An actor's side of the protocol: block n is the answer to the request for block n."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class StoppedError(BaseException):
    """The learner has stopped the actor. No `except Exception` of an `act` catches it."""


class Ask(NamedTuple):
    """Request of a learner for a block, which the actor may begin then.

    Attributes:
      learner: Name of the learner.
      number: Number of the block, from 0 in each incarnation.
      added: Number of blocks that the learner has added, or knows to be lost: the actor need not
        keep them.
      params: Version of the newest parameters, and where they are; None if the actor was told.
    """

    learner: str
    number: int
    added: int
    params: tuple[int, Any] | None = None


class Outbox:
    """Blocks of an actor that its learner has not added yet, and what it may do.

    One thread has the actor, others the learner's requests. The same request gets the same answer
    until one says that the block was added.

    Args:
      deliver: Called with each answer, for an engine that does not wait for it by `answer`.
      read: Returns the bytes of parameters of which a request says where they are; None if they
        are gone. Default: these are the bytes.
    """

    def __init__(
        self,
        deliver: Callable[..., Any] = lambda *_: None,
        read: Callable[[Any], Any] = lambda data: data,
    ):
        self.learner, self.added, self.asked = "", 0, 0
        self.is_stopped = False
        self._deliver, self._read = deliver, read
        self._blocks: dict[int, Any] = {}
        self._early: frozenset[int] = frozenset()  # requests that came before earlier ones
        self._num_put = 0  # blocks with smaller numbers were put, or lost by an interrupt
        self._end: tuple[Any, ...] | None = None  # the answer once `act` has ended
        self._version, self._params = -1, None
        self._lock = threading.RLock()  # itself in each `with`: an interrupt never leaves it locked
        self._changed = threading.Condition(self._lock)

    def attach(self, learner: str) -> int:
        """Answer this learner alone from now on. Return the number of blocks that were added."""
        with self._lock:
            self.learner, self._version, self._early = learner, -1, frozenset()
            self._changed.notify_all()
            return self.added

    def hear(self, ask: Ask) -> None:
        """Take a request, unless it is of a learner that was replaced."""
        with self._lock:
            if ask.learner != self.learner:
                return
            self._early |= {ask.number} if ask.number >= self.asked else set()
            while self.asked in self._early:  # in order: an earlier request has the parameters
                self._early, self.asked = self._early - {self.asked}, self.asked + 1
            self.added = max(self.added, ask.added)
            for number in [number for number in self._blocks if number < self.added]:
                del self._blocks[number]
            if ask.params is not None and ask.params[0] > self._version:
                self._version, self._params = ask.params[0], ask.params
            self._changed.notify_all()

    def answer(self, ask: Ask) -> tuple[Any, ...]:
        """Take a request, and wait for the answer to it."""
        self.hear(ask)
        with self._lock:
            self._changed.wait_for(lambda: self.find(ask) is not None)
            return self.find(ask) or ()

    def find(self, ask: Ask) -> tuple[Any, ...] | None:
        """Return the answer to a request, or None if there is none yet.

        Returns:
          ("block", number, about, memory); ("gap", number), if the block before is lost; ("end",
          why), if `act` has ended before the block, with its traceback or ""; or ("replaced",), if
          another learner has the actor.
        """
        if ask.learner != self.learner:
            return ("replaced",)
        if (block := self._blocks.get(ask.number)) is not None:
            return "block", ask.number, *block
        if ask.number < self._num_put:
            return "gap", ask.number + 1
        return ("end", "a learner has stopped it") if self.is_stopped else self._end

    def stop(self, learner: str = "") -> bool:
        """Stop the actor, and return True; unless another learner has it."""
        with self._lock:
            if learner != self.learner:
                return False
            self.is_stopped = True
            self._changed.notify_all()
            return True

    def begin(self, number: int) -> None:
        """Wait until a block is asked for. A `StoppedError` is raised if the actor was stopped."""
        with self._lock:
            self._changed.wait_for(lambda: self.is_stopped or self.asked > number)
            if self.is_stopped:
                raise StoppedError

    def skip(self, number: int) -> None:
        """Note that blocks with smaller numbers that were not put are lost."""
        if number > self._num_put:
            self._deliver("gap", number)
            with self._lock:
                self._num_put = number
                self._changed.notify_all()

    def put(self, number: int, about: Any, memory: Any) -> None:
        """Keep a block, with what is said about it, until it was added."""
        with self._lock:
            self._blocks[number], self._num_put = (about, memory), number + 1
            self._changed.notify_all()
        self._deliver("block", number, about, memory)

    def end(self, why: str) -> None:
        """Note that `act` has returned ("") or raised an error, its traceback."""
        with self._lock:
            self._end = "end", why
            self._changed.notify_all()
        self._deliver("end", why)

    def newest(self) -> tuple[int, Any] | None:
        """Return the version and the bytes of the newest parameters, if they are new."""
        with self._lock:
            found, self._params = self._params, None
        data = None if found is None else self._read(found[1])
        return None if found is None or data is None else (found[0], data)

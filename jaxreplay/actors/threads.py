"""Actors in threads of this process."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxreplay.actors.actor import Actor, Setup, heard, run
from jaxreplay.actors.block import ActorBlock, News, arrived
from jaxreplay.actors.outbox import Ask, Outbox


def threads() -> "Callable[..., Threads]":
    """Return where actors run: in threads of this process.

    For envs that compute without Python's lock, for inference of all actors in one batch, and to
    debug `act`. They share the learner's accelerator and its memory; `act` need not be pickled. An
    actor that takes no step can't be ended: its thread stays.
    """
    return Threads


class Threads:
    """Actors in threads of this process.

    Args:
      act: Function that each runs.
      setup: What all are told.
    """

    known: Mapping[int, int] = {}

    def __init__(self, act: Callable[[Actor], Any], setup: Setup):
        self._act, self._setup, self.run = act, setup, secrets.token_hex(8)
        self._of: dict[int, tuple[Outbox, threading.Thread]] = {}
        self._answers: Any = queue.SimpleQueue()

    def begin(self, index: int, incarnation: int) -> None:
        """Start the thread of an actor."""
        outbox = Outbox(lambda *answer: self._answers.put((outbox, index, incarnation, *answer)))
        of = self._act, index, incarnation, self._setup, outbox
        thread = threading.Thread(target=run, args=of, name=f"actor {index}", daemon=True)
        self._of[index] = outbox, thread
        self._answers.put((outbox, index, incarnation, "ready"))
        thread.start()

    def ask(self, index: int, number: int, added: int, params: Any) -> None:
        """Ask an actor for a block."""
        self._of[index][0].hear(Ask("", number, added, params))

    def answers(self, seconds: float) -> list[ActorBlock | News]:
        """Return what has arrived; wait for some as long."""
        found = filter(None, arrived(self._answers, seconds))
        return [heard(self._setup, *of) for outbox, *of in found if not outbox.is_stopped]

    def share(self, data: bytes) -> bytes:
        """Return what a request has of parameters."""
        return data

    def wake(self) -> None:
        """Let `answers` return."""
        self._answers.put(None)

    def end(self, index: int) -> None:
        """Stop an actor that hangs once it takes a step."""
        self._of[index][0].stop()

    def stop(self, seconds: float) -> None:
        """Stop the actors."""
        end = time.monotonic() + seconds
        for outbox, _ in self._of.values():
            outbox.stop()
        for _, thread in self._of.values():
            thread.join(max(end - time.monotonic(), 0.0))

"""Actors in processes of this machine: blocks and parameters lie in memory that has no name, and
pipes tell of them."""

import contextlib
import dataclasses
import functools
import mmap
import multiprocessing
import os
import pickle
import queue
import secrets
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxreplay.actors.actor import Actor, Setup, heard, run
from jaxreplay.actors.block import IN_FLIGHT, ActorBlock, News
from jaxreplay.actors.outbox import Ask, Outbox, StoppedError

_PATIENCE = 10.0  # seconds for an actor to return once the learner is gone


class SharedMemory:
    """Memory without a name, which other processes map once its file was sent to them. It takes no
    room of `/dev/shm`, and is gone with the last process.

    Args:
      size: Number of bytes.
    """

    def __init__(self, size: int):
        size = max(size, 1)
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("jaxreplay", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file, 0, size)  # else a lack of memory would kill the process
        else:
            os.ftruncate(self.file, size)
        self.map = mmap.mmap(self.file, size)

    def __del__(self) -> None:
        os.close(self.file)

    def send(self, pipe: Any) -> None:
        """Send the file after a message."""
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            socket.send_fds(end, [b"."], [self.file])


def _received(pipe: Any) -> mmap.mmap:
    """Return the memory that was sent after a message."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        _, files, _, _ = socket.recv_fds(end, 1, 1)
    if not files:
        raise EOFError
    try:
        return mmap.mmap(files[0], 0)
    finally:
        os.close(files[0])


def _part(memory: memoryview, size: int, number: int) -> memoryview:
    """Return the part of memory in which a block of so many bytes lies."""
    start = divmod(number, IN_FLIGHT)[1] * size
    return memory[start : start + size]


class _Learner:
    """An actor's end of a pipe to its learner, and the memory of its blocks."""

    def __init__(self, pipe: Any):
        self._pipe, self._size, self._memory = pipe, -1, memoryview(b"")
        self._given: Any = queue.SimpleQueue()  # a bell, of C: an interrupt leaves it whole
        self.outbox = Outbox(self.tell)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, *answer: Any) -> None:
        """Tell an answer, for which the learner has the memory."""
        message = answer[:3] if answer[0] == "block" else answer
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise StoppedError from None

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                ask = self._pipe.recv()
                if isinstance(ask, int):
                    self._memory, self._size = memoryview(_received(self._pipe)), ask
                    self._given.put(None)
                elif ask.params is None:
                    self.outbox.hear(ask)
                else:
                    params = ask.params[0], _received(self._pipe)
                    self.outbox.hear(ask._replace(params=params))
        self.outbox.stop()
        self._given.put(None)
        time.sleep(_PATIENCE)
        os._exit(1)

    def memory(self, size: int, number: int) -> Any:
        """Return memory for a block."""
        if size != self._size:
            self.tell("memory", size)
        while size != self._size:
            self._given.get()
            if self.outbox.is_stopped:
                raise StoppedError
        return _part(self._memory, size, number)


def _main(
    pipe: Any, act: Callable[[Actor], Any], index: int, incarnation: int, setup: Setup
) -> None:
    """Run an actor in its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's
    with contextlib.suppress(StoppedError):
        learner = _Learner(pipe)
        learner.tell("ready")
        run(act, index, incarnation, setup, learner.outbox, learner.memory)


def local(environment: Mapping[str, str] | None = None) -> Callable[..., "WorkerProcesses"]:
    """Return where actors run: in processes of this machine.

    They are spawned, so `act` is a function at the top level of a module, and the learner's script
    starts them below `if __name__ == "__main__":`. They end when the learner ends.

    Args:
      environment: Environment variables of the processes. Default: `{"JAX_PLATFORMS": "cpu"}`, so
        that they leave accelerators to the learner.
    """
    given = {"JAX_PLATFORMS": "cpu"} if environment is None else environment
    return functools.partial(WorkerProcesses, environment=given)


@dataclasses.dataclass
class _Process:
    """The learner's view of an actor's process."""

    process: Any
    incarnation: int
    memory: Any = None  # of its blocks
    size: int = -1  # bytes of a block
    has_begun: bool = False
    end: str | None = None  # why it ended, if it has told


class WorkerProcesses:
    """Actors in processes of this machine, which end when the learner does.

    Args:
      act: Function that each runs.
      setup: What all are told.
      environment: Environment variables of the processes.
    """

    known: Mapping[int, int] = {}

    def __init__(self, act: Any, setup: Setup, environment: Mapping[str, str]):
        try:
            pickle.dumps((act, setup))
        except Exception as error:
            raise ValueError(
                f"start: act cannot be sent to another process: {error}. Define it at the top "
                'level of a module, and start the actors in `if __name__ == "__main__":`'
            ) from error
        self._act, self._setup, self._environment = act, setup, dict(environment)
        self.run = secrets.token_hex(8)
        self._of: dict[int, tuple[Any, _Process]] = {}  # of each actor that runs, with its pipe
        self._selector = selectors.DefaultSelector()
        self._ended: list[Any] = []
        self._bell, self._has_rung = multiprocessing.Pipe(duplex=False), False
        self._selector.register(self._bell[0], selectors.EVENT_READ)
        self._context = multiprocessing.get_context("spawn")

    def begin(self, index: int, incarnation: int) -> None:
        """Start the process of an actor."""
        pipe, its_end = self._context.Pipe()
        process: Any = self._context.Process(
            target=_main,
            args=(its_end, self._act, index, incarnation, self._setup),
            name=f"actor {index}",
        )
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        its_end.close()
        self._of[index] = pipe, _Process(process, incarnation)
        self._selector.register(pipe, selectors.EVENT_READ, index)

    def ask(self, index: int, number: int, added: int, params: Any) -> None:
        """Ask an actor for a block."""
        if index in self._of:  # else `answers` tells
            told = None if params is None else (params[0], None)
            with contextlib.suppress(OSError):  # `answers` notices
                pipe = self._of[index][0]
                pipe.send(Ask("", number, added, told))
                if params is not None:
                    params[1].send(pipe)

    def answers(self, seconds: float) -> list[ActorBlock | News]:
        """Return what has arrived; wait for some as long."""
        found: list[ActorBlock | News] = []
        for process in [one for one in self._ended if not one.is_alive()]:
            process.close()
            self._ended.remove(process)
        for key, _ in self._selector.select(seconds):
            pipe: Any = key.fileobj
            if (index := key.data) is None:
                pipe.recv()
                self._has_rung = False
                continue
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                found.append(self._lost(index))
            else:
                found += self._heard(index, *answer)
        return found

    def _heard(self, index: int, kind: str, *of: Any) -> list[ActorBlock | News]:
        pipe, process = self._of[index]
        process.has_begun = True
        if kind == "memory" and process.size != of[0]:
            process.size = of[0]
            process.memory = SharedMemory(process.size * IN_FLIGHT)
            with contextlib.suppress(OSError):  # `answers` notices
                pipe.send(process.size)
                process.memory.send(pipe)
        if kind == "block":
            of = *of, _part(memoryview(process.memory.map), process.size, of[0])
        if kind == "end":
            process.end = of[0]
        if kind in ("end", "memory"):
            return []
        return [heard(self._setup, index, process.incarnation, kind, *of)]

    def _lost(self, index: int) -> News:
        """Return how a process has ended."""
        process = self._drop(index)
        if process.end == "":
            return News(index, process.incarnation, "done")
        process.process.join(1.0)
        code = process.process.exitcode
        process.process.kill()
        why = process.end or (
            "it closed its connection to the learner, and ran on"
            if code is None
            else f"its process ended with exit code {code}"
        )
        if not process.has_begun:
            why += (
                ", before it began. Each process imports the learner's script: `act` must be above "
                '`if __name__ == "__main__":`, and the main part below it'
            )
        return News(index, process.incarnation, "lost", why)

    def end(self, index: int) -> None:
        """Kill an actor that hangs."""
        if index in self._of:
            self._drop(index).process.kill()

    def _drop(self, index: int) -> _Process:
        pipe, process = self._of.pop(index)
        self._selector.unregister(pipe)
        pipe.close()
        self._ended.append(process.process)
        return process

    def share(self, data: bytes) -> SharedMemory:
        """Put parameters in memory, which goes with the next request of each actor."""
        memory = SharedMemory(len(data))
        memory.map[: len(data)] = data
        return memory

    def wake(self) -> None:
        """Let `answers` return."""
        if not self._has_rung:
            self._has_rung = True
            with contextlib.suppress(OSError):  # stopped
                self._bell[1].send(None)

    def stop(self, seconds: float) -> None:
        """Stop the actors. Those that run after so many seconds are killed."""
        for index in [*self._of]:
            self._drop(index)
        end = time.monotonic() + seconds
        try:
            for process in self._ended:
                process.join(max(end - time.monotonic(), 0.0))
        finally:  # also if a Ctrl-C ends the wait
            while self._ended:
                self._ended[-1].kill()
                self._ended[-1].join()
                self._ended.pop().close()
            for one in (self._selector, *self._bell):
                one.close()

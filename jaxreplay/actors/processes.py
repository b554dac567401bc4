"""Actors in processes of this machine: blocks lie in shared memory, pipes tell of them."""

import contextlib
import dataclasses
import functools
import mmap
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import shutil
import signal
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxreplay.actors.actor import (
    IN_FLIGHT,
    Actor,
    Allowance,
    Setup,
    StoppedError,
    layout,
    run,
    views,
)
from jaxreplay.actors.block import Block, News

_PATIENCE = 10.0  # seconds for an actor to return once the learner is gone
_VERSION = struct.Struct("<q")


def _shared_folder() -> str:
    """Make a folder in memory that processes share, or among the temporary files."""
    memory = "/dev/shm"
    return tempfile.mkdtemp(prefix="jaxreplay-", dir=memory if os.access(memory, os.W_OK) else None)


def _mapped(path: pathlib.Path, size: int) -> mmap.mmap:
    """Make a file of this size and map it; elsewhere if there is no room in the shared memory."""
    with open(path, "wb+") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # else a full one would kill the process
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def _slot(specs: Any, setup: Setup, number: int) -> int:
    """Return where the memory of a block begins."""
    size = layout(specs, setup.block_length, setup.num_envs)[1]
    return (number - number // IN_FLIGHT * IN_FLIGHT) * size


def _tidy(folder: pathlib.Path) -> None:
    """Remove the folder if the learner is gone, in a process of an actor."""
    learner = multiprocessing.parent_process()
    if learner is not None and multiprocessing.connection.wait([learner.sentinel], 0.3):
        shutil.rmtree(folder, ignore_errors=True)


class _PipeLink:
    """An actor's end of a pipe, and the memory of its blocks."""

    def __init__(self, pipe: Any, folder: str, name: str, setup: Setup, allowance: Allowance):
        self._pipe, self._folder, self._name = pipe, pathlib.Path(folder), name
        self._setup, self._allowance = setup, allowance
        self._memory: Any = None
        self._specs: Any = None
        self._num_files = 0
        self._params = os.path.join(folder, "params")
        self._seen: Any = None  # which file of parameters was read
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._allowance.set(*self._pipe.recv())
        self._allowance.stop()
        time.sleep(_PATIENCE)
        _tidy(self._folder)
        os._exit(1)

    def arrays(self, specs: Any, number: int) -> Any:
        setup = self._setup
        size = layout(specs, setup.block_length, setup.num_envs)[1] * IN_FLIGHT
        if self._specs is None or specs != self._specs:
            path = self._folder / f"{self._name}-{self._num_files}"
            self._num_files += 1
            try:
                self._memory = _mapped(path, size)
            except OSError:
                path.unlink(missing_ok=True)
                path = pathlib.Path(tempfile.gettempdir()) / f"jaxreplay-{os.getpid()}-{path.name}"
                self._memory = _mapped(path, size)
            self._specs = specs
            self._tell("memory", str(path), specs)
        return views(self._memory, specs, setup, _slot(specs, setup, number))

    def send(self, number: int, *figures: Any) -> None:
        self._tell("block", number, *figures)

    def newest(self) -> tuple[int, bytes] | None:
        try:
            found = os.stat(self._params)
            if self._seen == (found.st_ino, found.st_mtime_ns):
                return None
            data = pathlib.Path(self._params).read_bytes()
        except FileNotFoundError:
            return None
        self._seen = (found.st_ino, found.st_mtime_ns)
        return _VERSION.unpack_from(data)[0], data[_VERSION.size :]

    def _tell(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise StoppedError from None


def _main(
    pipe: Any, act: Callable[[Actor], Any], folder: str, index: int, incarnation: int, setup: Setup
) -> None:
    """Run an actor in its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's
    allowance = Allowance()
    link = _PipeLink(pipe, folder, f"{index}-{incarnation}", setup, allowance)
    try:
        pipe.send(("ready",))
        run(act, index, incarnation, setup, link, allowance)
        pipe.send(("done", None))
    except BaseException:
        if allowance.is_stopped:
            return
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        _tidy(pathlib.Path(folder))


def local(environment: Mapping[str, str] | None = None) -> Callable[..., "Processes"]:
    """Return where actors run: in processes of this machine.

    They are spawned, so `act` is a function at the top level of a module, and the learner's script
    starts them below `if __name__ == "__main__":`. They end when the learner ends.

    Args:
      environment: Environment variables of the processes. Default: `{"JAX_PLATFORMS": "cpu"}`, so
        that they leave accelerators to the learner.
    """
    given = {"JAX_PLATFORMS": "cpu"} if environment is None else environment
    return functools.partial(Processes, environment=given)


@dataclasses.dataclass
class _Process:
    """The learner's view of an actor's process."""

    process: Any
    index: int
    incarnation: int
    memory: Any = None  # of its blocks
    specs: Any = None
    why: str = ""  # it failed
    has_begun: bool = False
    is_done: bool = False


class Processes:
    """Actors in processes of this machine, which end when the learner does.

    Args:
      act: Function that each runs.
      setup: What all are told.
      incarnations: Of each actor.
      max_restarts: Number of times that an actor is started again.
      environment: Environment variables of the processes.
    """

    is_new = True

    def __init__(
        self,
        act: Any,
        setup: Setup,
        incarnations: Sequence[int],
        max_restarts: int,
        environment: Mapping[str, str],
    ):
        try:
            pickle.dumps((act, setup))
        except Exception as error:
            raise ValueError(
                f"start: act cannot be sent to another process: {error}. Define it at the top "
                'level of a module, and start the actors in `if __name__ == "__main__":`'
            ) from error
        self._act, self._setup, self._environment = act, setup, dict(environment)
        self._alive: dict[Any, _Process] = {}  # by their pipes
        self._ended: list[Any] = []
        self._restarts = [max_restarts] * setup.num_actors
        self._folder = _shared_folder()
        self.run = os.path.basename(self._folder)  # a name that no other run has
        self._bell, self._has_rung = multiprocessing.Pipe(duplex=False), False
        self._context = multiprocessing.get_context("spawn")
        try:
            for place in enumerate(incarnations):
                self._start(*place)
        except BaseException:
            self.stop(0.0)
            raise

    def _start(self, index: int, incarnation: int) -> None:
        pipe, its_end = self._context.Pipe()
        process: Any = self._context.Process(
            target=_main,
            args=(its_end, self._act, self._folder, index, incarnation, self._setup),
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
        self._alive[pipe] = _Process(process, index, incarnation)

    def receive(self, seconds: float) -> list[Block | News]:
        """Return blocks, and news of actors, that have arrived; wait for some as long."""
        found: list[Block | News] = []
        for process in [one for one in self._ended if not one.is_alive()]:
            process.close()
            self._ended.remove(process)
        ready: Any = multiprocessing.connection.wait([self._bell[0], *self._alive], seconds)
        for pipe in ready:
            if pipe is self._bell[0]:
                self._bell[0].recv()
                self._has_rung = False
                continue
            try:
                kind, *of = pipe.recv()
                self._hear(self._alive[pipe], kind, of, found)
            except (EOFError, OSError):
                self._end(pipe, found)
        return found

    def _hear(self, process: _Process, kind: str, of: list[Any], found: list[Any]) -> None:
        index, incarnation, setup = process.index, process.incarnation, self._setup
        if kind == "ready":
            process.has_begun = True
            found.append(News(index, incarnation, kind))
        elif kind == "memory":
            path, process.specs = of
            with open(path, "rb") as file:
                process.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            os.unlink(path)
        elif kind == "block":
            number, length, version, *times = of
            start = _slot(process.specs, setup, number)
            whole = views(process.memory, process.specs, setup, start)
            steps = jax.tree.map(lambda leaf: leaf[:length], whole)
            # a pipe keeps the order: what is missing before the block will not come
            found.append(Block(index, (incarnation, number), number, version, steps, *times))
        else:
            process.is_done, process.why = kind == "done", of[0]

    def _end(self, pipe: Any, found: list[Any]) -> None:
        pipe.close()
        process = self._alive.pop(pipe)
        if not process.is_done:
            process.process.join(1.0)
            process.process.kill()
        self._ended.append(process.process)
        index, incarnation = process.index, process.incarnation
        why = process.why or f"its process ended with exit code {process.process.exitcode}"
        if not process.has_begun:
            why += (
                ", before it began. Each process imports the learner's script, whose main part "
                'must be below `if __name__ == "__main__":`'
            )
        if process.is_done:
            found.append(News(index, incarnation, "done"))
        elif self._restarts[index] > 0:
            self._restarts[index] -= 1
            found.append(News(index, incarnation, "lost", why))
            self._start(index, incarnation + 1)
        else:
            found.append(News(index, incarnation, "failed", why))

    def allow(self, index: int, incarnation: int, acked: int, granted: int) -> None:
        """Tell an actor how many of its blocks were added, and how many it may begin."""
        for pipe, process in self._alive.items():
            if (process.index, process.incarnation) == (index, incarnation):
                with contextlib.suppress(OSError):  # `receive` notices
                    pipe.send((acked, granted))

    def publish(self, version: int, data: bytes) -> None:
        """Let actors find new parameters."""
        path = os.path.join(self._folder, "params")
        with open(path + ".new", "wb") as file:
            file.write(_VERSION.pack(version) + data)
        os.replace(path + ".new", path)

    def wake(self) -> None:
        """Let `receive` return."""
        if not self._has_rung:
            self._has_rung = True
            self._bell[1].send(None)

    def stop(self, seconds: float) -> None:
        """Stop the actors. Those that run after so many seconds are killed."""
        while self._alive:
            pipe, process = self._alive.popitem()
            self._ended.append(process.process)
            pipe.close()
        end = time.monotonic() + seconds
        try:
            for process in self._ended:
                process.join(max(end - time.monotonic(), 0.0))
        finally:  # also if a Ctrl-C ends the wait
            while self._ended:
                self._ended[-1].kill()
                self._ended[-1].join()
                self._ended.pop().close()
            shutil.rmtree(self._folder, ignore_errors=True)
            for end_of_bell in self._bell:
                end_of_bell.close()

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
from jaxreplay.actors.restarts import Restarts

fcntl: Any = None
with contextlib.suppress(ImportError):  # of Windows
    import fcntl

_PATIENCE = 10.0  # seconds for an actor to return once the learner is gone
_VERSION = struct.Struct("<q")
_MEMORY = "/dev/shm"
_PREFIX = "jaxreplay-actors-"


class Folder:
    """A private folder, which is locked while the learner lives.

    Args:
      parent: Where it is made. Others there that no learner has locked are removed: theirs were
        killed with all of their actors.
    """

    def __init__(self, parent: str):
        for other in pathlib.Path(parent).glob(_PREFIX + "*"):
            with contextlib.suppress(OSError):  # it is locked, or another user's
                self.path, self._lock = str(other), _locked(str(other), wait=False)
                self.remove()
        while True:
            self.path, self._lock = tempfile.mkdtemp(prefix=_PREFIX, dir=parent), None
            try:
                self._lock = _locked(self.path, wait=True)
            except FileNotFoundError:  # another learner has removed it before it was locked
                continue
            except OSError:  # the file system has no locks
                pass
            return

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(folder: str, wait: bool) -> int:
    """Return a file that keeps a folder locked while it is open."""
    if fcntl is None:
        raise OSError("this system cannot lock folders")
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        os.stat(folder)
        return file
    except BaseException:
        os.close(file)
        raise


def _mapped(path: pathlib.Path, size: int) -> mmap.mmap:
    """Make a file of this size and map it."""
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


def _tidy(folders: Sequence[str]) -> None:
    """Remove the folders if the learner is gone, in a process of an actor."""
    learner = multiprocessing.parent_process()
    if learner is not None and multiprocessing.connection.wait([learner.sentinel], 0.3):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


class _PipeLink:
    """An actor's end of a pipe, and the memory of its blocks."""

    def __init__(
        self, pipe: Any, folders: Sequence[str], name: str, setup: Setup, allowance: Allowance
    ):
        self._pipe, self._folders, self._name = pipe, folders, name
        self._setup, self._allowance = setup, allowance
        self._memory: Any = None
        self._specs: Any = None
        self._num_files = 0
        self._seen: Any = None  # which file of parameters was read
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._allowance.set(*self._pipe.recv())
        self._allowance.stop()
        time.sleep(_PATIENCE)
        _tidy(self._folders)
        os._exit(1)

    def arrays(self, specs: Any, number: int) -> Any:
        setup = self._setup
        size = layout(specs, setup.block_length, setup.num_envs)[1] * IN_FLIGHT
        if self._specs is None or specs != self._specs:
            name = f"{self._name}-{self._num_files}"
            self._num_files += 1
            path, self._memory = _made(self._folders, name, lambda path: _mapped(path, size))
            self._tell("memory", path, specs)
            self._specs = specs
        return views(self._memory, specs, setup, _slot(specs, setup, number))

    def send(self, number: int, *figures: Any) -> None:
        self._tell("block", number, *figures)

    def newest(self) -> tuple[int, bytes] | None:
        for folder in self._folders:  # the first one that has any has the newest
            path = pathlib.Path(folder, "params")
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                seen = found.st_dev, found.st_ino, found.st_mtime_ns
                if self._seen == seen:
                    return None
                data, self._seen = path.read_bytes(), seen
                return _VERSION.unpack_from(data)[0], data[_VERSION.size :]
        return None

    def _tell(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise StoppedError from None


def _made(folders: Sequence[str], name: str, make: Callable[[pathlib.Path], Any]) -> Any:
    """Make a file of this name in the first folder that has room for it. Return its path, and what
    `make` of it returns."""
    for folder in folders:
        path = pathlib.Path(folder, name)
        try:
            return str(path), make(path)
        except OSError as error:
            path.unlink(missing_ok=True)
            # an error of the system has a number, one of a signal's handler has none
            if folder == folders[-1] or error.errno is None:
                raise
    return None


def _main(
    pipe: Any,
    act: Callable[[Actor], Any],
    folders: Sequence[str],
    index: int,
    incarnation: int,
    setup: Setup,
) -> None:
    """Run an actor in its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's
    allowance = Allowance()
    link = _PipeLink(pipe, folders, f"{index}-{incarnation}", setup, allowance)
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
        _tidy(folders)


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
    began: float
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
      max_restarts: As for `Restarts`.
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
        self._restarts = [Restarts(max_restarts) for _ in range(setup.num_actors)]
        self._due: list[tuple[float, int, int]] = []  # when to start an actor, and its incarnation
        # in memory that processes share, and on a disk for what that has no room for
        parents = [_MEMORY] if os.access(_MEMORY, os.W_OK) else []
        self._folders = [Folder(parent) for parent in (*parents, tempfile.gettempdir())]
        self.run = os.path.basename(self._folders[0].path)  # a name that no other run has
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
            args=(its_end, self._act, self._paths, index, incarnation, self._setup),
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
        self._alive[pipe] = _Process(process, index, incarnation, time.monotonic())

    @property
    def _paths(self) -> list[str]:
        return [folder.path for folder in self._folders]

    def receive(self, seconds: float) -> list[Block | News]:
        """Return blocks, and news of actors, that have arrived; wait for some as long."""
        found: list[Block | News] = []
        for one in [one for one in self._due if one[0] <= time.monotonic()]:
            self._due.remove(one)
            self._start(*one[1:])
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
            except (EOFError, OSError):
                self._end(pipe, found)
            else:
                self._hear(self._alive[pipe], kind, of, found)
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
        code = process.process.exitcode
        if not process.is_done:
            process.process.kill()
        self._ended.append(process.process)
        index, incarnation = process.index, process.incarnation
        why = process.why or (
            "it closed its connection to the learner, and ran on"
            if code is None
            else f"its process ended with exit code {code}"
        )
        if not process.has_begun:
            why += (
                ", before it began. Each process imports the learner's script, whose main part "
                'must be below `if __name__ == "__main__":`'
            )
        if process.is_done:
            found.append(News(index, incarnation, "done"))
            return
        now = time.monotonic()
        pause = self._restarts[index].pause_after(now - process.began)
        found.append(News(index, incarnation, "failed" if pause is None else "lost", why))
        if pause is not None:
            self._due.append((now + pause, index, incarnation + 1))

    def allow(self, index: int, incarnation: int, acked: int, granted: int) -> None:
        """Tell an actor how many of its blocks were added, and how many it may begin."""
        for pipe, process in self._alive.items():
            if (process.index, process.incarnation) == (index, incarnation):
                with contextlib.suppress(OSError):  # `receive` notices
                    pipe.send((acked, granted))

    def publish(self, version: int, data: bytes) -> None:
        """Let actors find new parameters."""
        paths = self._paths
        write = lambda path: path.write_bytes(_VERSION.pack(version) + data)
        made = pathlib.Path(_made(paths, "params.new", write)[0])
        os.replace(made, made.with_name("params"))
        # An actor takes those of the first folder that has any. Those of a later folder stay, so
        # that it finds some at any time.
        for path in paths[: paths.index(str(made.parent))]:
            pathlib.Path(path, "params").unlink(missing_ok=True)

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
            for folder in self._folders:
                folder.remove()
            for end_of_bell in self._bell:
                end_of_bell.close()

"""Threads that read or write files beside the caller's thread."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxreplay._util import transfers
from jaxreplay._util.signals import defer_interrupts


class Threads:
    """Threads that call functions, until one raises an error.

    The caller's thread waits by C functions alone (`SimpleQueue.get`, `Thread.join`), since a
    signal's handler may raise an error there at any time. In the middle of a `Condition`, such as
    those of `Future`, it would leave a lock behind that is never released.

    Args:
      num: Number of threads.
      name: Name of the threads.
    """

    def __init__(self, num: int, name: str):
        self.error: BaseException | None = None  # the first one
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: there are no more
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock, self._num_running = threading.Lock(), num  # for these threads alone
        self._last: Callable[[], None] | None = None
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=name) for _ in range(num)]
        self._num_started = 0  # `put` starts them: an interrupt here would leave unknown threads

    def put(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let a thread call a function."""
        with defer_interrupts():
            for thread in self._threads[self._num_started :]:
                thread.start()
                self._num_started += 1
        self._calls.put((function, arguments))

    def get(self) -> Any:
        """Wait for the end of a call, and return its result, or raise the first error."""
        found = self._results.get()
        self.check()
        return found

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Let the threads end after the calls, of which there was one at least. The last one calls
        `last`, unless there was an error."""
        with defer_interrupts():
            if not self._is_closed:
                self._is_closed, self._last = True, last
                for _ in self._threads:
                    self._calls.put(None)

    def join(self) -> None:
        """Wait until the threads have ended, after `close`."""
        for thread in self._threads[: self._num_started]:
            thread.join()

    def abandon(self) -> None:
        """Skip further calls, and wait for those that run. The threads end even if the wait is
        interrupted."""
        self.error = self.error or RuntimeError("cancelled")
        self.close()
        self.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._results.put(self._try(*call))
            del call  # frees the arguments
        with self._lock:
            self._num_running -= 1
            is_last = not self._num_running
        if is_last and self._last is not None:
            self._try(self._last, ())

    def _try(self, function: Callable[..., Any], arguments: Any) -> Any:
        if self.error is None:
            try:
                return transfers.allows(function)(*arguments)
            except BaseException as error:
                self.error = self.error or error
        return None

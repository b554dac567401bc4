"""Threads that read or write files beside the caller's thread."""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxreplay._util import transfers
from jaxreplay._util.signals import defer_interrupts

_Call = TypeVar("_Call")
_Result = TypeVar("_Result")


def in_turn(
    function: Callable[[_Call], _Result],
    calls: Iterable[_Call],
    use: Callable[[_Result], None],
    num: int,
    name: str,
) -> None:
    """Let threads call a function of each of `calls`, and use the results in the caller's thread.

    No thread is left, and after an error the remaining calls are skipped.

    Args:
      function: What the threads call.
      calls: Its arguments. The next one is taken as soon as less than `num` calls run.
      use: Gets the results, in the order in which the calls end.
      num: Number of threads.
      name: Their name.
    """
    threads, left, num_running = _Threads(function, num, name), iter(calls), 0
    try:
        while (call := next(left, None)) is not None:
            threads.put(call)
            del call  # its memory is freed when its thread has ended it
            num_running += 1
            if num_running == num:
                use(threads.get())
                num_running -= 1
        for _ in range(num_running):
            use(threads.get())
        threads.end()
    except BaseException:  # also an interrupt in the middle of the line above
        threads.end()
        raise


class _Threads:
    """Threads that call a function, until it raises an error.

    The caller's thread waits by C functions alone (`SimpleQueue.get`, `Thread.join`), since a
    signal's handler may raise an error there at any time. In the middle of a `Condition`, such as
    those of `Future`, it would leave a lock behind that is never released.
    """

    def __init__(self, function: Callable[[Any], Any], num: int, name: str):
        self._function = transfers.allows(function)
        self._error: BaseException | None = None  # the first one
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (): there are no more
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name) for _ in range(num)]
        self._num_started = 0  # `put` starts them: an interrupt here would leave unknown threads

    def put(self, call: Any) -> None:
        """Let a thread call the function."""
        with defer_interrupts():
            for thread in self._threads[self._num_started :]:
                thread.start()
                self._num_started += 1
        self._calls.put((call,))

    def get(self) -> Any:
        """Wait for the end of a call, and return its result, or raise the first error."""
        found = self._results.get()
        if self._error is not None:
            raise self._error
        return found

    def end(self) -> None:
        """Skip further calls, and wait for those that run. The threads end even if the wait is
        interrupted."""
        self._error = self._error or RuntimeError("cancelled")
        with defer_interrupts():
            for _ in self._threads:
                self._calls.put(())
        for thread in self._threads[: self._num_started]:
            thread.join()

    def _run(self) -> None:
        while call := self._calls.get():
            self._results.put(self._try(*call))
            del call  # frees the argument

    def _try(self, call: Any) -> Any:
        if self._error is None:
            try:
                return self._function(call)
            except BaseException as error:
                self._error = self._error or error
        return None

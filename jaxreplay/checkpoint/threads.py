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
) -> None:
    """Let threads call a function of each of `calls`, and use the results in the caller's thread.

    No thread is left, and after an error the remaining calls are skipped.

    Args:
      function: What the threads call.
      calls: Its arguments. The next one is taken as soon as less than `num` calls run.
      use: Gets the results, in the order in which the calls end.
      num: Number of threads.
    """
    # The caller's thread waits by C functions alone (`SimpleQueue.get`, `Thread.join`), since a
    # signal's handler may raise an error there at any time. In the middle of a `Condition`, such as
    # those of `Future`, it would leave a lock behind that is never released.
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()  # calls; (): there are no more
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    errors: list[BaseException] = []  # after the first one, calls are skipped

    def run() -> None:
        while call := waiting.get():
            results.put(tried(*call))
            del call  # frees the argument

    def tried(call: _Call) -> _Result | None:
        if not errors:
            try:
                with transfers.allowed():
                    return function(call)
            except BaseException as error:
                errors.append(error)
        return None

    def end() -> None:
        """End the threads, even if the wait for them is interrupted."""
        errors.append(RuntimeError("cancelled"))
        with defer_interrupts():
            for _ in threads:
                waiting.put(())
        for thread in threads[:num_started]:
            thread.join()

    threads = [threading.Thread(target=run, name="jaxreplay-checkpoint") for _ in range(num)]
    left, num_started, num_running = iter(calls), 0, 0
    try:
        while True:
            if num_running < num and (call := next(left, None)) is not None:
                with defer_interrupts():  # an interrupt here would leave unknown threads
                    for thread in threads[num_started:]:
                        thread.start()
                        num_started += 1
                waiting.put((call,))
                del call  # its memory is freed when its thread has ended it
                num_running += 1
            elif num_running:
                found = results.get()
                if errors:
                    raise errors[0]
                use(found)
                del found
                num_running -= 1
            else:
                break
        end()
    except BaseException:  # also an interrupt in the middle of the line above
        end()
        raise

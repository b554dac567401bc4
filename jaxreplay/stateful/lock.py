"""A lock for calls from many threads. Signals wait until a call ends, and `jax_transfer_guard` does
not hold meanwhile; in a forked process, where a call would hang, it raises."""

import os
import threading
from typing import Any

from jaxreplay._util import transfers
from jaxreplay._util.checks import check_not_forked
from jaxreplay._util.signals import defer_interrupts

_TICK = 0.05  # seconds between checks for signals, while the main thread waits


class Monitor:
    """A reentrant lock, used in `with`, and a condition to wait for.

    Args:
      what: Name of the object that it guards, for errors.
    """

    def __init__(self, what: str):
        self._what, self._pid = what, os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # of the thread that has the lock: signals wait, transfers are allowed
        self._blocks: list[tuple[defer_interrupts, Any]] = []

    def without_delay(self) -> Any:
        """Return the lock alone, to use in `with`. Signals do not wait: it is for changes that an
        interrupt cannot tear, and saves 10 us."""
        check_not_forked(self._what, self._pid)
        return self._lock

    def __enter__(self) -> "Monitor":
        check_not_forked(self._what, self._pid)
        block = defer_interrupts()
        block.__enter__()
        try:
            while not self._lock.acquire(timeout=_TICK):
                block.deliver()
            allowed = transfers.allowed()
            allowed.__enter__()
            self._blocks.append((block, allowed))
        except BaseException:
            block.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        block, allowed = self._blocks.pop()
        allowed.__exit__(*error)
        self._lock.release()
        block.__exit__()

    def deliver(self) -> None:
        """Run the handlers of signals that came meanwhile, which may raise."""
        for block, _ in self._blocks:
            block.deliver()

    def wait(self, seconds: float) -> None:
        """Release the lock until another thread calls `notify_all`, or for so many seconds.

        It may return sooner. Signal handlers run meanwhile, and may raise.
        """
        blocks, self._blocks = self._blocks, []
        try:
            self._changed.wait(
                min(seconds, _TICK)
                if threading.current_thread() is threading.main_thread()
                else seconds
            )
        finally:
            self._blocks = blocks
        self.deliver()

    def notify_all(self) -> None:
        self._changed.notify_all()

"""Delay of signals until a state is updated.

Ctrl-C between a donated call and the assignment of its result would lose every row.

After a call that donates a state, its result is the only state. Python may run a signal's handler
between any two bytecodes, so also between the call and the assignment. The handlers, which run in
the main thread only, are therefore delayed until the assignment is done.
"""

import contextlib
import importlib
import signal
import threading
from typing import Any

_NAMES = [
    "SIGINT",
    "SIGTERM",
    "SIGHUP",
    "SIGQUIT",
    "SIGALRM",
    "SIGXCPU",
    "SIGUSR1",
    "SIGUSR2",
    "SIGBREAK",
]
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_TRIES = 1000  # to restore the handlers; each Ctrl-C meanwhile takes one
_handler_of: Any = signal.getsignal
with contextlib.suppress(ImportError):  # makes no enum, and takes a tenth of the time
    _handler_of = importlib.import_module("_signal").getsignal


class defer_interrupts:  # noqa: N801
    """Delay Ctrl-C, and other signals with a handler in Python, until the end of the block.

    Use it in a loop around `jaxreplay.jit`. After a Ctrl-C the rows still exist: save them, or
    continue.

        with jr.defer_interrupts():
            state = buffer.add(state, step)

    The block must contain the assignment. It may be long, and may contain other such blocks. It
    always runs to its end, so keep endless waits out. Outside of the main thread, where Python runs
    no handlers, it has no effect.

    Example:
      >>> import signal, jaxreplay as jr
      >>> try:
      ...     with jr.defer_interrupts():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done = True
      ... except KeyboardInterrupt:
      ...     print("interrupted, and done:", done)
      interrupted, and done: True
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # of the delayed signals, by number
        self._caught: dict[int, Any] = {}  # frames of the signals that came, by number

    def __enter__(self) -> "defer_interrupts":
        if threading.get_ident() == threading.main_thread().ident:
            try:
                numbers = [number for number in _SIGNALS if callable(_handler_of(number))]
                for number in numbers:
                    # Another signal's handler may raise before the next line is done.
                    if len(numbers) > 1:
                        self._handlers[number] = signal.getsignal(number)
                    self._handlers[number] = signal.signal(number, self._catch)
            except ValueError:  # subinterpreters cannot set handlers
                pass
            except BaseException:  # another signal's handler raised
                self._put_back()
                raise
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._put_back()
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of the signals that came so far, each once. They may raise, so call it
        only between updates."""
        if not self._caught:
            return
        caught, self._caught = self._caught, {}
        error = None
        for number, frame in caught.items():
            try:
                if callable(handler := self._handlers[number]):
                    handler(number, frame)
                elif handler == signal.SIG_DFL:
                    signal.raise_signal(number)
            except BaseException as raised:  # the other handlers run, too
                error = raised
        if error is not None:
            raise error

    def _catch(self, number: int, frame: Any) -> None:
        self._caught[number] = frame

    def _put_back(self) -> None:
        """Restore the handlers. Signals are blocked meanwhile, since a restored handler could run,
        and raise, before the others are restored."""
        if len(self._handlers) > 1 and hasattr(signal, "pthread_sigmask"):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # reads the mask
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
            finally:  # the handler of an earlier signal may run here, and raise
                try:
                    self._put_each_back()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        else:
            self._put_each_back()

    def _put_each_back(self) -> None:
        left, error, tries = list(self._handlers), None, 0
        while left and tries < _TRIES:  # at exit of the interpreter restoring may never succeed
            tries += 1
            try:
                replaced = signal.signal(left[-1], self._handlers[left[-1]])
                # The block set another handler, or this is the second try: keep it.
                if replaced != self._catch:
                    signal.signal(left[-1], replaced)
                left.pop()
            except BaseException as caught:
                error = caught
        if error is not None:
            raise error

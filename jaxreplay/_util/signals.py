"""Signals that wait until a change is done: Ctrl-C between a donated call and the binding of its
result would lose every row.

A state is handed over to a call, and its memory used anew; the call's result is the only state
there is. Python runs the handler of a signal between any two of its steps, so also between the end
of the call and the assignment. So the handlers of the main thread, where alone they run, wait until
that is done.
"""

import itertools
import signal
import threading
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_TRIES = 1000  # to put handlers back: more than anybody presses Ctrl-C meanwhile
# blocks, a power of two, after which it is asked anew which signals have handlers: that takes a
# microsecond for each
_EVERY = 128


class defer_interrupts:  # noqa: N801
    """Ctrl-C, or another signal with a handler in Python, is raised after the block, not in the
    middle of it.

    For a loop around `jaxreplay.jit`, so that the rows are there after a Ctrl-C, to be saved or
    gone on with:

        with jr.defer_interrupts():
            state = buffer.add(state, step)

    The assignment must be in the block. It may be long, and have others in it; what happens within
    is done to the end, so keep endless waits out. In another thread than the main one, where Python
    runs no handlers, it does nothing.

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
        self._handlers: dict[int, Any] = {}  # of the signals that wait
        self._caught: dict[int, Any] = {}  # the frames that they came in

    def __enter__(self) -> "defer_interrupts":
        if threading.get_ident() == threading.main_thread().ident:
            try:
                for number in (numbers := _signals()):
                    # that of another signal may raise before the next line is done
                    if len(numbers) > 1:
                        self._handlers[number] = signal.getsignal(number)
                    self._handlers[number] = signal.signal(number, self._catch)
            except ValueError:  # no handler may be set: the interpreter is not the main one
                pass
            except BaseException:  # by the handler of another one
                self._put_back()
                raise
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._put_back()
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of the signals that came so far, each once. They may raise, so that
        nothing may be half done now."""
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
            except BaseException as raised:  # the others are to run, too
                error = raised
        if error is not None:
            raise error

    def _catch(self, number: int, frame: Any) -> None:
        self._caught[number] = frame

    def _put_back(self) -> None:
        """The handlers. One that is there again may be run, and raise, before the others are, so
        that signals are held back meanwhile."""
        if len(self._handlers) > 1 and hasattr(signal, "pthread_sigmask"):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # as it is
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
            finally:  # one that came before may be run here, and raise
                try:
                    self._put_each_back()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        else:
            self._put_each_back()

    def _put_each_back(self) -> None:
        left, error, tries = list(self._handlers), None, 0
        while left and tries < _TRIES:  # at the end of the program none may be put back
            tries += 1
            try:
                replaced = signal.signal(left[-1], self._handlers[left[-1]])
                # somebody has set another one meanwhile, or this is the second try
                if replaced != self._catch:
                    signal.signal(left[-1], replaced)
                left.pop()
            except BaseException as caught:
                error = caught
        if error is not None:
            raise error


_num_blocks = itertools.count()
_handled: tuple[int, ...] = ()


def _signals() -> tuple[int, ...]:
    """The signals that are to wait: those that had handlers when it was last asked."""
    global _handled
    if not next(_num_blocks) & (_EVERY - 1):
        _handled = tuple(number for number in _SIGNALS if callable(signal.getsignal(number)))
    return _handled

"""Interrupt a call at chosen lines by SIGINT, the signal of Ctrl-C, or by another one."""

import _thread
import dis
import random
import signal
import sys
import threading
import time

from tests.conftest import ALL, SOAK

# Python runs no signal handlers at these opcodes.
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


def interrupted_at(call, nth, by_opcode=False, counts=lambda frame: True, number=signal.SIGINT):
    """Return whether a call was interrupted by a signal at its `nth` line or opcode.

    Args:
      call: Function without arguments.
      nth: Number of the line or opcode, from 1.
      by_opcode: Count opcodes, not lines. Default: False.
      counts: Function of a frame that returns whether its lines count. Default: all frames count.
      number: Number of the signal, whose handler raises KeyboardInterrupt. Default: SIGINT.

    Returns:
      True if the call raised KeyboardInterrupt, False if the signal was lost, None if the call has
      fewer lines.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not counts(frame):
            return None
        frame.f_trace_opcodes = by_opcode
        if event == ("opcode" if by_opcode else "line"):
            count += 1
            if count == nth and by_opcode and frame.f_code.co_code[frame.f_lasti] in _RETURNS:
                count -= 1  # at the next opcode
            elif count == nth:
                sys.settrace(None)
                signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    except KeyboardInterrupt:
        return True
    return False if count >= nth else None


def check_each_moment(make_call, *, least, every=5, **options):
    """Interrupt a call at every fifth of its lines in turn, in `make test-all` at each line, and in
    the soak at each opcode.

    Args:
      make_call: Function that returns the call, and a function that checks what is left afterwards.
      least: Fewest lines that the call has.
      every: Lines from one interrupt to the next, unless `make test-all` runs. Default: 5.
      **options: Options of `interrupted_at`.
    """
    for nth in range(1, 10**6, 1 if ALL else every):
        call, check = make_call()
        was = interrupted_at(call, nth, by_opcode=SOAK, **options)
        check()
        if was is None:
            break
        assert was, f"the signal at line {nth} was lost"
    assert nth > least


def check_comparisons(make_calls):
    """Interrupt calls while JAX compares their buffer with an equal one.

    JAX finds a compiled program by comparing buffers, and treats what `__eq__` raises as an error
    of the buffer. JAX itself is not made for interrupts: nothing is lost there, but other errors
    come out.

    Args:
      make_calls: Function that returns a list of calls, on a new buffer that equals those before.
    """

    def compares(frame):
        return frame.f_code.co_name == "__eq__" and frame.f_code.co_filename == "<string>"

    for call in make_calls():  # compiles
        call()
    num_interrupted = 0
    for which in range(len(make_calls())):
        for nth in range(1, 200, 1 if ALL else 3):
            was = interrupted_at(make_calls()[which], nth, counts=compares)
            if not was:
                break
            num_interrupted += 1
        assert was is not False, f"the signal in call {which} was lost"
    assert num_interrupted > 3


def num_calls_until_interrupt(act, seconds):
    """Call `act(t)` until Ctrl-C comes after `seconds`, and return the number of completed
    calls."""
    has_begun, t = threading.Event(), 0

    def interrupt():
        has_begun.wait()
        time.sleep(seconds)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        has_begun.set()
        while True:
            act(t)
            t += 1
    except KeyboardInterrupt:
        return t


def waits_before_interrupts():
    """Yield random times of up to 20 ms before an interrupt; in the soak 2,000 of them."""
    r = random.Random(0)
    for _ in range(2000 if SOAK else 60 if ALL else 15):
        yield r.random() * 0.02

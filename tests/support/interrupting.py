"""Interrupt a call at a chosen line by SIGINT, the signal of Ctrl-C."""

import dis
import signal
import sys

# Python runs no signal handlers at these opcodes.
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


def interrupted_at(call, nth, by_opcode=False, counts=lambda frame: True):
    """Return whether a call was interrupted by SIGINT at its `nth` line or opcode.

    Args:
      call: Function without arguments.
      nth: Number of the line or opcode, from 1.
      by_opcode: Count opcodes, not lines. Default: False.
      counts: Function of a frame that returns whether its lines count. Default: all frames count.

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
                signal.raise_signal(signal.SIGINT)
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

"""A call that is interrupted at a line of its choosing: by a signal, as of a Ctrl-C that comes just
then."""

import dis
import signal
import sys

# Python runs no handlers at these
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


def interrupted_at(call, nth, by_opcode=False, counts=lambda frame: True):
    """Whether a call was interrupted: by a signal that comes at its `nth` line of Python, or
    operation. None, where it has fewer.

    Args:
      counts: whether the lines of a frame do.
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
                count -= 1  # the next one
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

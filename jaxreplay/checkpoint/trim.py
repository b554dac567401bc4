"""Return of freed memory to the system: apart from large arrays, the C allocator may keep more
freed memory than is in use."""

import ctypes
import functools
from typing import Any

_EVERY = 32 * 2**20  # written bytes between two calls, which take some milliseconds each


class Trimmer:
    """Counter of written bytes that returns freed memory from time to time."""

    def __init__(self):
        self._num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= _EVERY:
            self._num_bytes = 0
            _trim()(0)


@functools.cache
def _trim() -> Any:
    """Return `malloc_trim` of the C library, or a function that does nothing."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda _: None

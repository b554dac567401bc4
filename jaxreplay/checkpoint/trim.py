"""Freed memory given back to the system: beside large arrays, what an allocator keeps for later
adds up to more than is in use."""

import ctypes
import functools
from typing import Any

_EVERY = 32 * 2**20  # bytes that pass through; giving back takes some milliseconds


class Trimmer:
    """Counts bytes that were written."""

    def __init__(self):
        self._num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= _EVERY:
            self._num_bytes = 0
            _trim()(0)


@functools.cache
def _trim() -> Any:
    """The C library's, where it has one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda _: None

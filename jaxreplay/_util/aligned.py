"""Memory of NumPy that a CPU backend of JAX reads in place."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# With this alignment a CPU backend reads a NumPy array in place. Otherwise it copies the array
# first, and the chunk takes its memory twice.
_ALIGNMENT = 64
# An array of so many bytes is read in place in less time than a program copies it as an argument.
LARGE = 2**20


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros whose memory begins at a multiple of `_ALIGNMENT` bytes."""
    return _aligned(np.zeros, shape, dtype)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of any values, aligned as `aligned_zeros`."""
    return _aligned(np.empty, shape, dtype)


def _aligned(make: Callable[..., np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = aligned(make(num_bytes + _ALIGNMENT, np.uint8))
    return memory[:num_bytes].view(dtype).reshape(shape)


def aligned(memory: np.ndarray) -> np.ndarray:
    """Return uint8[...] from the first multiple of `_ALIGNMENT` bytes on."""
    return memory[-memory.ctypes.data & (_ALIGNMENT - 1) :]

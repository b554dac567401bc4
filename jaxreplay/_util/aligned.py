"""Memory of NumPy that a CPU backend of JAX reads in place."""

from typing import Any

import numpy as np

# With this alignment a CPU backend reads a NumPy array in place. Otherwise it copies the array
# first, and the chunk takes its memory twice.
_ALIGNMENT = 64


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros whose memory begins at a multiple of `_ALIGNMENT` bytes."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = aligned(np.zeros(num_bytes + _ALIGNMENT, np.uint8))
    return memory[:num_bytes].view(dtype).reshape(shape)


def aligned(memory: np.ndarray) -> np.ndarray:
    """Return uint8[...] from the first multiple of `_ALIGNMENT` bytes on."""
    return memory[-memory.ctypes.data & (_ALIGNMENT - 1) :]

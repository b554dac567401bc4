"""Powers of two: blocks of rows come in few sizes, so that few programs are compiled."""

import numpy as np


def power_below(number: int) -> int:
    """The largest power of two that is not above, and at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def power_above(number: int) -> int:
    """The smallest power of two that is not below, and at least 1."""
    return 1 << (max(number, 1) - 1).bit_length()


def padded(index: np.ndarray, size: int, fill: int) -> np.ndarray:
    """Row numbers, and `fill` from their end on."""
    return np.concatenate([index, np.full(size - len(index), fill, index.dtype)])

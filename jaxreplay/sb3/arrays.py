"""Arrays as Stable-Baselines3 hands them over, checked, and in the dtypes that are stored."""

from typing import Any

import jax
import numpy as np
import torch

# What is stored of numbers that JAX has not, and what hands them back.
NARROW = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32, np.dtype(np.float64): np.float32}
TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.uint64): torch.uint64, np.dtype(np.float64): torch.float64}


def narrow(where: str, array: np.ndarray) -> np.ndarray:
    """In 32 bits; integers that have more are refused."""
    narrow = array.astype(NARROW.get(array.dtype, array.dtype), copy=False)
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise ValueError(f"{where}: {array.dtype} beyond 32 bits cannot be stored")
    return narrow


def shaped(where: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Of that shape, axes of length 1 aside."""
    if array.size != np.prod(shape) or len(array) != shape[0]:
        raise ValueError(f"{where}: got the shape {list(array.shape)}, expected {list(shape)}, one for each environment")
    return array.reshape(shape)


def is_same(announced: Any, obs: Any, n_envs: int) -> np.ndarray:
    """Of which environments the observation is, bit for bit, the one that was announced: bool[n_envs]."""
    same = np.ones(n_envs, bool)
    if announced is not None:
        for before, now in zip(jax.tree.leaves(announced), jax.tree.leaves(obs), strict=True):
            same &= (_bytes(before) == _bytes(now)).all(axis=1)
    return same


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)

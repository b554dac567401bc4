"""Checks of the arrays that Stable-Baselines3 passes, and their dtypes."""

from typing import Any

import jax
import numpy as np
import torch

from jaxreplay._util.aliases import PyTree

# Dtypes of samples, for the 64-bit numbers that are stored in 32 bits.
TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.uint64,
    np.dtype(np.float64): torch.float64,
}


def shaped(where: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array in this shape, if only axes of length 1 differ: one env needs no axis."""
    if array.shape == shape:
        return array
    if [size for size in array.shape if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(
            f"{where}: got the shape {list(array.shape)}, expected {list(shape)}, one for each "
            "environment"
        )
    return array.reshape(shape)


def is_same(announced: Any, obs: PyTree, n_envs: int) -> np.ndarray:
    """Return where an env's observation is bit-identical to the announced one, bool[n_envs];
    True if none was announced."""
    same = np.ones(n_envs, bool)
    if announced is not None:
        for before, now in zip(jax.tree.leaves(announced), jax.tree.leaves(obs), strict=True):
            same &= (_bytes(before) == _bytes(now)).all(axis=1)
    return same


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)

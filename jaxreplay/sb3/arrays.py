"""Checks of the arrays that Stable-Baselines3 passes, and their dtypes."""

from typing import Any

import numpy as np
import torch

from jaxreplay.host.arrays import PLAIN, fit

# Dtypes of samples, for the 64-bit numbers that are stored in 32 bits.
TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.uint64,
    np.dtype(np.float64): torch.float64,
}


def each(function: Any, obs: Any, *rest: Any) -> Any:
    """Map a function over an observation, an array or a dict of arrays: `jax.tree.map` takes some 5
    us more."""
    if isinstance(obs, dict):
        return {key: function(leaf, *(one[key] for one in rest)) for key, leaf in obs.items()}
    return function(obs, *rest)


def fitted(where: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers in a shape, and in a dtype that is cast to the stored one without loss. Axes
    of length 1 may differ: one env needs no axis."""
    if (
        type(array) is np.ndarray
        and array.shape == shape
        and array.dtype == dtype
        and dtype in PLAIN
    ):
        return array
    array = np.array(array, dtype)
    if [size for size in array.shape if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(
            f"{where}: got the shape {list(array.shape)}, expected {list(shape)}, one for each "
            "environment"
        )
    if array.size == 1 and dtype == np.int64 and abs(array.item()) < 2**31:
        return array.reshape(shape)  # a discrete action: `fit` would take five times as long
    return fit(where, array.reshape(shape))

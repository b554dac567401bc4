"""Eight leaves of a batch from JAX to PyTorch, and back."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from cases import BATCH_SIZE, Case
from timing import stopwatch

from jaxreplay.torch import from_torch, to_torch

_ITERATIONS = 200


def prepare(case: Case) -> Callable[[], float]:
    """Prepare a form.

    Forms: "to_torch" and "from_torch" are jaxreplay's. "numpy" and "dlpack" are a user's
    code without it, with no checks. "copied" goes to JAX by `jnp.array`.
    """
    arrays = [
        jax.block_until_ready(jnp.full((BATCH_SIZE, 8), number, jnp.float32)) for number in range(8)
    ]
    tensors = [
        torch.empty(BATCH_SIZE, 8).copy_(torch.from_numpy(np.array(array))) for array in arrays
    ]
    cross = {
        "to_torch": lambda: to_torch(arrays),
        "numpy": lambda: [torch.from_numpy(np.asarray(array)) for array in arrays],
        "dlpack": lambda: [torch.from_dlpack(array) for array in arrays],
        "from_torch": lambda: jax.block_until_ready(from_torch(tensors)),
        "copied": lambda: jax.block_until_ready([jnp.array(tensor.numpy()) for tensor in tensors]),
    }[case.form]

    def run() -> None:
        for _ in range(_ITERATIONS):
            cross()

    return stopwatch(run, _ITERATIONS)

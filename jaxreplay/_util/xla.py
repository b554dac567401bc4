"""Differences between versions of JAX."""

from typing import Any

import jax

# JAX before 0.5 cannot `vmap` it.
barrier: Any = (
    jax.lax.optimization_barrier if jax.__version_info__ >= (0, 5) else lambda operands: operands
)

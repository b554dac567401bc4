"""Names for types that Python cannot write down, or that are long."""

from typing import Any, Literal, TypeAlias

import jax

PyTree: TypeAlias = Any  # nested containers of arrays, or of what stands for arrays
Stored: TypeAlias = Any  # a pytree of stored leaves, [N, ...]: see `storage/stored_arrays.py`
Specs: TypeAlias = Any  # a pytree of `jax.ShapeDtypeStruct`
Key: TypeAlias = jax.Array  # of `jax.random.key`, or uint32[2]

Autoreset: TypeAlias = Literal["next_step", "same_step", "same_step_no_final_obs"]
Framework: TypeAlias = Literal["jax", "numpy", "torch"]

"""Aliases of types that Python cannot express, or that are long."""

from typing import Any, Literal, TypeAlias

import jax

PyTree: TypeAlias = Any  # nested containers of arrays or array specs
Stored: TypeAlias = Any  # pytree of stored leaves [N, ...] (`storage/stored_arrays.py`)
Specs: TypeAlias = Any  # pytree of `jax.ShapeDtypeStruct`
Key: TypeAlias = jax.Array  # from `jax.random.key`, or uint32[2]

Autoreset: TypeAlias = Literal["next_step", "same_step", "same_step_no_final_obs"]
Framework: TypeAlias = Literal["jax", "numpy", "torch"]

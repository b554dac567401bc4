"""Arrays of NumPy, PyTorch and JAX, in and out: what comes in is copied, what goes out is shared."""

import sys
from typing import Any

import jax
import numpy as np

from jaxreplay.paths import name_of

NAMES = ("jax", "numpy", "torch")


def owned(where: str, tree: Any) -> Any:
    """The same tree of arrays that nobody else will write to, 64-bit numbers in the 32 bits that JAX has by default.

    A JAX array never changes, and is taken as it is. NumPy arrays, numbers and tensors of the host are copied: JAX may read an input after
    the call returned, when an env has already written its next observation to it. A tensor on an accelerator is copied there.

    Raises:
      ValueError: an integer does not fit, or a leaf is no array; it is named.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _owned(where, path, leaf), tree)


def narrowed(name: str, array: np.ndarray) -> np.ndarray:
    """64-bit numbers in the 32 bits that JAX has by default. A ValueError names integers that do not fit."""
    if array.dtype.kind not in "biufc":
        return array
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if array.dtype.kind in "iu" and narrow.dtype != array.dtype and not np.array_equal(narrow, array):
        raise ValueError(f"{name}: {array.dtype} beyond the range of {narrow.dtype}, which is what JAX has unless jax_enable_x64 is on")
    return narrow


def given_out(framework: str, tree: Any) -> Any:
    """The same tree in the arrays of a framework, over the same memory: not to be written to."""
    if framework == "jax":
        return tree
    if framework == "numpy":
        return jax.tree.map(np.asarray, tree)
    from jaxreplay.torch import to_torch

    return to_torch(tree)


def _owned(where: str, path: Any, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    if _is_tensor(leaf):
        if leaf.device.type != "cpu" or leaf.dtype == sys.modules["torch"].bfloat16:
            from jaxreplay.torch import from_torch

            return from_torch(leaf, cast=True)
        leaf = leaf.detach().numpy()
    array = np.array(leaf)
    name = f"{where}: {name_of(path) or 'the leaf'}"
    if array.dtype.kind in "OSUMm":
        raise ValueError(f"{name}: a {type(leaf).__name__} cannot be stored, only numbers and arrays of them")
    return narrowed(name, array)


def _is_tensor(leaf: Any) -> bool:
    """Without an import: where torch is not loaded there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)

"""PyTorch batches from a buffer, and tensors as its input, by DLPack on the same device; needs the
extra `jaxreplay[torch]`.

JAX arrays are immutable, and JAX may read an input after the call has returned. Tensors are
mutable. So `to_torch` shares memory, and its tensors must not be written to; `from_torch` copies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import name_of
from jaxreplay.buffers.rollout import RolloutState
from jaxreplay.samplers.sum_tree import SumTreeState
from jaxreplay.storage.state import ReplayState

try:
    import torch
except ImportError as error:
    raise ImportError("jaxreplay.torch needs PyTorch: pip install 'jaxreplay[torch]'") from error

_STATES = (ReplayState, RolloutState, SumTreeState)
_CAST = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
# What the two libraries raise for a dtype that DLPack, or one of them, does not have.
_NO_DLPACK = (BufferError, RuntimeError, TypeError, ValueError)


def to_torch(tree: PyTree) -> Any:
    """Convert arrays to tensors that share their memory, on the same device.

    Use it for batches. Do not write to the tensors, since JAX arrays must not change; clone them
    first. A buffer's state is refused: while a tensor shares a leaf, each donated `add` would copy
    the whole leaf, or fail on a GPU.

    Args:
      tree: Pytree of `jax.Array`s, each on one device. Dtypes are bool, or integers, floats and
        complex numbers of at least 8 bits.

    Returns:
      The same tree, with leaves `torch.Tensor`.

    Raises:
      ValueError: A leaf cannot become a tensor. Names each such leaf, the reason and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxreplay.torch import to_torch
      >>> to_torch({"reward": jnp.arange(3.0)})["reward"]
      tensor([0., 1., 2.])
    """
    _check("to_torch", tree, _reason_against_array)
    return jax.tree.map(_tensor_of, tree)


def from_torch(tree: PyTree, cast: bool = False) -> Any:
    """Copy tensors to arrays on the same device.

    Args:
      tree: Pytree of `torch.Tensor`s of any strides. Gradients are dropped.
      cast: If True, cast 64-bit numbers to 32 bits while `jax_enable_x64` is off, integers modulo
        2**32. If False, they are an error. Default: False.

    Returns:
      The same tree, with leaves `jax.Array`.

    Raises:
      ValueError: A leaf cannot become an array. Names each such leaf, the reason and the cure.

    Example:
      >>> import torch
      >>> from jaxreplay.torch import from_torch
      >>> from_torch({"action": torch.tensor([1, 2])}, cast=True)["action"]
      Array([1, 2], dtype=int32)
    """
    _check("from_torch", tree, functools.partial(_reason_against_tensor, cast=cast))
    tensors, structure = jax.tree.flatten(tree)
    # Copy, so that only the array refers to the memory. (`from_dlpack(copy=True)` still shares it.)
    casts = {} if _has_64_bits() else _CAST
    tensors = [
        torch.empty(one.shape, dtype=casts.get(one.dtype, one.dtype), device=one.device).copy_(
            one.detach()
        )
        for one in tensors
    ]
    # those that NumPy has cross together, in 0.6 of the time
    arrays = [
        tensor.numpy()
        if tensor.device.type == "cpu" and _has_numpy(tensor.dtype)
        else jax.dlpack.from_dlpack(tensor)
        for tensor in tensors
    ]
    devices = [
        jax.local_devices(backend="cpu")[0] if isinstance(array, np.ndarray) else array.sharding
        for array in arrays
    ]
    return jax.tree.unflatten(structure, jax.device_put(arrays, devices))


def _tensor_of(array: jax.Array) -> torch.Tensor:
    """Return a tensor that shares an array's memory."""
    (device,) = array.sharding.device_set
    if device.platform == "cpu" and _passes_numpy(array.dtype):
        return torch.from_dlpack(np.asarray(array))  # takes half the time
    return torch.from_dlpack(array)


@functools.cache
def _passes_numpy(dtype: Any) -> bool:
    """Return whether NumPy hands read-only arrays of this dtype to PyTorch, without a copy."""
    array = np.zeros(1, dtype)
    array.flags.writeable = False
    try:
        return torch.from_dlpack(array).data_ptr() == array.ctypes.data
    except _NO_DLPACK:
        return False


@functools.cache
def _has_numpy(dtype: torch.dtype) -> bool:
    """Return whether NumPy has a tensor's dtype."""
    try:
        torch.empty(0, dtype=dtype).numpy()
        return True
    except TypeError:
        return False


def _check(where: str, tree: PyTree, reason_against: Any) -> None:
    """Raise a ValueError that names each leaf with a reason against it."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_state)
    if not any(map(reason_against, leaves)):
        return
    bad = [
        f"{name_of(path) or 'the leaf'}: {reason}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_state)
        if (reason := reason_against(leaf))
    ]
    raise ValueError("\n  ".join([f"{where}:", *bad]))


def _is_state(node: Any) -> bool:
    return isinstance(node, _STATES)


def _reason_against_array(leaf: Any) -> str | None:
    if isinstance(leaf, _STATES):
        return (
            f"is a {type(leaf).__name__}: while tensors share its leaves, each add would copy "
            "them, or fail on a GPU; pass a batch from sample or get"
        )
    if isinstance(leaf, Tracer):
        return "is being traced; return it from the jitted function and convert it outside"
    if not isinstance(leaf, jax.Array):
        return (
            f"is a {type(leaf).__name__}, not a jax.Array; write jnp.asarray(x), or "
            "torch.from_numpy(x) for a NumPy array"
        )
    if _is_key(leaf.dtype):
        return "is a typed key; pass jax.random.key_data(key)"
    if leaf.is_deleted():
        return "was deleted, such as by donation; use the array that the call returned"
    if len(leaf.sharding.device_set) > 1:
        return (
            f"lies on {len(leaf.devices())} devices; take one with "
            "x.addressable_shards[i].data, or gather it with jax.device_put"
        )
    if not _has_tensors(leaf.dtype):
        return (
            f"is {leaf.dtype.name}, which does not go from JAX {jax.__version__} to torch "
            f"{torch.__version__}; write x.astype(jnp.int8), or another dtype of at least 8 bits"
        )
    return None


@functools.cache
def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.cache
def _has_tensors(dtype: Any) -> bool:
    """Return whether arrays of this dtype become tensors of the dtype of that name."""
    try:
        # of NumPy's own dtypes, some would be narrowed here
        return dtype.isbuiltin == 1 or torch.from_dlpack(
            jax.device_put(np.zeros(1, dtype))
        ).dtype == getattr(torch, dtype.name, None)
    except _NO_DLPACK:
        return False


@functools.cache
def _has_arrays(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype, or of the narrower one, become arrays."""
    try:
        jax.dlpack.from_dlpack(torch.empty(1, dtype=_CAST.get(dtype, dtype)).clone())
        return True
    except _NO_DLPACK:
        return False


def _reason_against_tensor(leaf: Any, *, cast: bool) -> str | None:
    if not isinstance(leaf, torch.Tensor):
        return f"is a {type(leaf).__name__}, not a torch.Tensor"
    if leaf.layout != torch.strided or leaf.is_quantized:
        return f"is {leaf.layout}, not dense; write x.to_dense()"
    if leaf.device.type != "cpu" and jax.default_backend() == "cpu":
        return f"is on {leaf.device}, but JAX has only the CPU here; write x.cpu()"
    if leaf.dtype in _CAST and not _has_64_bits() and not cast:
        return (
            f"is {leaf.dtype}, which JAX would cut to 32 bits; pass cast=True, or call "
            'jax.config.update("jax_enable_x64", True)'
        )
    if not _has_arrays(leaf.dtype):
        return f"is {leaf.dtype}, which JAX {jax.__version__} does not take; cast it before"
    return None


def _has_64_bits() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64

"""Extras of a checkpoint beside the buffer: parameters, optimizer, envs, keys, in any pytree."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._util.names import kind_of, named, spec_text

BESIDE = "beside."  # begins the names of a replay's own arrays
ANY_BYTES = "uint8[any number]"  # the text of bytes, whose number may differ


def leaves_of(extras: Any) -> dict[str, Any]:
    """Return the arrays of extras by name, as they are saved.

    Raises:
      ValueError: A leaf is no array and no number, or another process has a part of it.
    """
    found = {}
    for name, leaf in named({"extras": extras}):
        own = jax.random.key_data(leaf) if _is_key(leaf) else _on_host(leaf)
        if isinstance(own, jax.Array) and not own.is_fully_addressable:
            raise ValueError(
                f"save: {name}: parts of it are on devices of other processes; save it by orbax"
            )
        if not isinstance(own, jax.Array):
            own = np.asarray(own)
            if own.dtype.kind not in "biufcV" or own.dtype.names is not None:
                raise ValueError(
                    f"save: {name}: expected an array or a number, got {kind_of(leaf)}"
                )
        found[name] = own
    return found


def specs_of(extras: Any) -> dict[str, str]:
    """Return the dtypes and shapes of extras that are like these, as they are saved, by name."""
    found = {}
    for name, leaf in named({"extras": extras}):
        own = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else _on_host(leaf)
        text = spec_text(own if hasattr(own, "dtype") else np.asarray(own))
        found[name] = ANY_BYTES if isinstance(leaf, bytes) else text
    return found


def extras_like(extras: Any, read: Callable[[str], np.ndarray]) -> Any:
    """Return extras that are like these, of what was saved.

    Args:
      extras: Pytree of arrays, tensors of PyTorch, `jax.ShapeDtypeStruct`s, numbers and bytes.
      read: Returns the saved array of a name.
    """

    def one(name: str, like: Any) -> Any:
        values = read(name)
        if isinstance(like, bytes):
            return values.tobytes()
        if _is_key(like):
            impl: list[Any] = []  # of an array, or of a `ShapeDtypeStruct`
            jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
            return jax.random.wrap_key_data(jax.numpy.asarray(values), impl=impl[0])
        if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
            return jax.device_put(values, like.sharding)
        if hasattr(like, "new_tensor"):  # PyTorch's
            return like.new_tensor(values)
        return values if hasattr(like, "dtype") else type(like)(values.item())

    leaves = [one(name, leaf) for name, leaf in named({"extras": extras})]
    return jax.tree.unflatten(jax.tree.structure(extras), leaves)


def _on_host(leaf: Any) -> Any:
    """Return a tensor of PyTorch, or bytes, as an array; other leaves as they are."""
    if isinstance(leaf, bytes):
        return np.frombuffer(leaf, np.uint8)
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf


def _is_key(leaf: Any) -> bool:
    kinds = jax.Array | jax.ShapeDtypeStruct
    return isinstance(leaf, kinds) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)

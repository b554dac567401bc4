"""In place or not at all: a warning where a call copies the buffer, and errors for a state that was taken over."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_LARGE_BYTES = 2**24
_warned: set[tuple[Any, str]] = set()


class CopyWarning(UserWarning):
    """An eager `add`, `extend` or `update_priorities` copied a large buffer, which a jitted and donated one would change in place."""


def warn_of_copy(replay: Any, method: str, state: Any, stacklevel: int = 3) -> None:
    """Warn, once for each configuration and method, where a large state is changed outside of `jit`: eager operations donate nothing.

    `stacklevel`: of the user's call, which the warning names.
    """
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, Tracer) for leaf in leaves) or (replay, method) in _warned:
        return
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    if num_bytes >= _LARGE_BYTES:
        _warned.add((replay, method))
        warnings.warn(
            f"{method} was called outside of jit: it copies the whole buffer ({num_bytes / 2**20:,.0f} MiB) on every call. "
            f"Use {method} = jax.jit(replay.{method}, donate_argnums=0), or jaxreplay.jit(replay).{method}, once before the loop.",
            CopyWarning,
            stacklevel=stacklevel,
        )


def check_not_gone(where: str, tree: Any) -> None:
    """A ValueError for arrays that were donated; XLA's own error says nothing of why."""
    if any(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted() for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            f"{where}: this state was handed to a call that took it over, so that its memory is used anew; go on with the one that the "
            "call returned: state = buffer.add(state, step)"
        )


def as_arrays(state: Any) -> Any:
    """Return a state with JAX's arrays in place of NumPy's, which `jax.device_get` and `flax.serialization` give."""
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(state)):
        return state
    return jax.tree.map(jnp.asarray, state)


def is_whole(state: Any) -> bool:
    """Whether a state can still be used after a call that was to take it over failed."""
    try:
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(jax.block_until_ready(state)))
    except Exception:
        return False

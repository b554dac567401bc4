"""Conversion between NumPy, PyTorch and JAX arrays.

Inputs are copied, and cast to the dtypes of the first step. Outputs share memory.
"""

import dataclasses
import sys
from typing import Any, get_args

import jax
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks
from jaxreplay._util.aliases import Framework, PyTree
from jaxreplay._util.names import name_of, named
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.replay_buffer import ReplayBuffer

NAMES: tuple[Framework, ...] = get_args(Framework)
OUTSIDE = (
    "A Replay keeps its own state, so it cannot be called inside of jit, scan or vmap: it would "
    "change once, when the function is traced, and not when it runs. Use the buffer's methods "
    "there, which are pure: state = replay.buffer.add(state, step)"
)
# Dtypes that JAX stores unchanged, and 64-bit ones with their 32-bit dtype in JAX by default.
PLAIN = frozenset(
    map(
        np.dtype,
        (
            "bool",
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "float16",
            "float32",
            "complex64",
        ),
    )
)
_NARROWER = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"))
}
_WHOLE = 2.0**24  # float32 has all smaller whole numbers


def own(where: str, tree: PyTree) -> Any:
    """Return the tree with arrays that the caller cannot change, and with 64-bit numbers in 32 bits
    where JAX's default has those.

    JAX arrays never change, and are returned as they are. NumPy arrays, numbers and tensors on the
    host are copied: JAX may read an input after the call returned, when an env has already written
    its next observation to it. A tensor on an accelerator is copied there.

    Raises:
      ValueError: A number does not fit, or a leaf is not an array. The error names the leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    own = [_own_plainly(leaf) for leaf in leaves]
    if any(leaf is None for leaf in own):  # with key paths, which take longer than all else
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _own(where, path, leaf), tree)
    return jax.tree.unflatten(structure, own)


def fit(name: str, array: np.ndarray) -> np.ndarray:
    """Cast 64-bit numbers to the 32 bits that JAX has by default; a ValueError names a number that
    does not fit."""
    if array.dtype in PLAIN or array.dtype.kind not in "biufc":
        return array
    if (narrow := _own_plainly(array)) is not None:
        return narrow
    return checks.cast(
        name,
        array,
        jax.dtypes.canonicalize_dtype(array.dtype),
        "which is what JAX has unless jax_enable_x64 is on",
    )


def to_framework(framework: Framework, tree: PyTree) -> Any:
    """Return the tree in a framework's arrays, which share its memory: do not write to them."""
    if framework == "jax":
        return tree
    if framework == "numpy":
        return jax.tree.map(np.asarray, tree)
    from jaxreplay.torch import to_torch

    return to_torch(tree)


def _own_plainly(leaf: Any) -> Any:
    """Return a copy of a leaf of the frequent kinds that is known to fit, else None."""
    if type(leaf) is not np.ndarray:
        if not isinstance(leaf, int | float | np.generic):
            return leaf if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) else None
        leaf = np.asarray(leaf)
    if leaf.dtype in PLAIN:
        return leaf.copy()
    target = _NARROWER.get(leaf.dtype)
    if target is None or jax.dtypes.canonicalize_dtype(leaf.dtype) != target:
        return None
    if target == np.float32:
        return leaf.astype(target) if np.abs(leaf).max(initial=0) < _WHOLE else None
    narrow = leaf.astype(target)
    return narrow if (narrow == leaf).all() else None


def _own(where: str, path: Any, leaf: Any) -> Any:
    name = f"{where}: {name_of(path) or 'the leaf'}"
    if isinstance(leaf, Tracer):
        raise ValueError(f"{name} is being traced. {OUTSIDE}")
    if isinstance(leaf, jax.Array):
        return leaf
    if _is_tensor(leaf):
        if leaf.device.type != "cpu" or leaf.dtype == sys.modules["torch"].bfloat16:
            from jaxreplay.torch import from_torch

            return from_torch(leaf, cast=True)
        leaf = _on_host(name, leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        leaf = leaf.astype(leaf.dtype.newbyteorder("="))
    if reason := checks.reason_against(leaf):
        raise ValueError(f"{name}: {reason}")
    return fit(name, np.array(leaf))


def _on_host(name: str, tensor: Any) -> np.ndarray:
    try:
        return tensor.detach().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: this tensor cannot be stored: {error}") from None


def _is_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, without an import: before torch is loaded, none is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


@dataclasses.dataclass(frozen=True)
class StepFormat:
    """Structure and dtypes of one env's step, or of an item."""

    specs: Any  # shapes and dtypes of its leaves
    has_flags: bool  # a step, not an item
    structure: Any  # of the tree
    dtypes: tuple[Any, ...]  # of its leaves
    first_ndim: int  # axes of the first leaf

    @classmethod
    def of(cls, buffer: ReplayBuffer, example: PyTree) -> "StepFormat":
        specs = checks.specs("init", as_stored("init", buffer, example))
        leaves, structure = jax.tree.flatten(specs)
        named(specs)  # raises if two leaves have one name
        return cls(
            specs,
            buffer.autoreset is not None,
            structure,
            tuple(leaf.dtype for leaf in leaves),
            len(leaves[0].shape),
        )

    def fit(self, step: PyTree) -> tuple[Any, tuple[int, ...]]:
        """Return the step in the format's dtypes, and the lengths of its leading axes: (), (E,) or
        (T, E)."""
        leaves, structure = jax.tree.flatten(step)
        if structure == self.structure and any(
            leaf.dtype != dtype for leaf, dtype in zip(leaves, self.dtypes, strict=True)
        ):
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(step)]
            step = jax.tree.unflatten(structure, map(_cast, paths, leaves, self.dtypes))
        if self.has_flags:
            shape = np.shape(step.terminated)
            return step, shape[: len(shape) - len(self.specs.terminated.shape)]
        first = np.shape(leaves[0]) if leaves else ()
        return step, first[: max(len(first) - self.first_ndim, 0)]


def _cast(path: Any, leaf: Any, dtype: Any) -> Any:
    """Cast a leaf to a dtype of the same kind or a wider one; a ValueError names a number that it
    cannot hold. Other leaves are returned as they are."""
    if leaf.dtype == dtype or not np.can_cast(leaf.dtype, dtype, "same_kind"):
        return leaf
    return checks.cast(
        f"add: {name_of(path)}", np.asarray(leaf), dtype, "as the first step or example= has it"
    )


def _floating(reward: Any) -> Any:
    """Return integers as float32, and other numbers as they are."""
    is_integer = np.issubdtype(np.asarray(reward).dtype, np.integer)
    return np.asarray(reward, np.float32) if is_integer else reward


def as_stored(where: str, buffer: ReplayBuffer, step: PyTree) -> Any:
    """Return a `Step`, made of a mapping if it is one, for a buffer of steps; an item as it is."""
    return step if buffer.autoreset is None else step_checks.step_of(where, step, buffer.autoreset)


def example_of(buffer: ReplayBuffer, step: PyTree, env: int | None) -> Any:
    """Return the shapes and dtypes of one env's step, from the first that is added. Integer rewards
    become float32, because later rewards may be fractions."""
    if buffer.autoreset is None:
        num_axes = int(env is None)
    else:
        num_axes = np.ndim(step.terminated) - (buffer.num_agents is not None)
        step = step.replace(reward=jax.tree.map(_floating, step.reward))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[num_axes:], leaf.dtype), step)

"""Callers' arrays and steps, of NumPy, PyTorch and JAX: how they are taken, cast and checked.

Inputs are copied, and cast to the dtypes of the first step. Outputs share memory.
"""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks
from jaxreplay._util.aliases import Framework, PyTree
from jaxreplay._util.names import name_of, named
from jaxreplay.buffers import step_checks
from jaxreplay.types import Step

NAMES: tuple[Framework, ...] = get_args(Framework)
OUTSIDE = (
    "A Replay keeps its own state, so it cannot be called inside of jit, scan or vmap: it would "
    "change once, when the function is traced, and not when it runs. Use the buffer's methods "
    "there, which are pure: state = replay.buffer.add(state, step)"
)
# Dtypes that JAX stores unchanged.
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
_USUAL = PLAIN.union(map(np.dtype, ("int64", "uint64", "float64")))


def owned_tree(where: str, tree: PyTree) -> Any:
    """Return a tree with arrays that the caller cannot change, as `owned` does."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: owned(f"{where}: {name_of(path) or 'the leaf'}", leaf), tree
    )


def owned(name: str, leaf: Any) -> Any:
    """Return an array that the caller cannot change, and with 64-bit numbers in 32 bits where JAX's
    default has those.

    JAX arrays never change, and are returned as they are. NumPy arrays, numbers, lists and tensors
    on the host are copied: JAX may read an input after the call returned, when an env has already
    written its next observation to it. A tensor on an accelerator is copied there.

    Args:
      name: Name of the caller and of the leaf, for errors.
      leaf: The leaf.

    Raises:
      ValueError: A number does not fit, or it is not an array.
    """
    if isinstance(leaf, int | float | np.generic):
        leaf = np.asarray(leaf)
    if type(leaf) is not np.ndarray or leaf.dtype not in _USUAL:
        if isinstance(leaf, Tracer):
            raise ValueError(f"{name} is being traced. {OUTSIDE}")
        torch = sys.modules.get("torch")  # before it is loaded, there are no tensors
        if torch is not None and isinstance(leaf, torch.Tensor):
            leaf = _of_tensor(name, leaf)
        if isinstance(leaf, jax.Array):
            return leaf
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            leaf = leaf.astype(leaf.dtype.newbyteorder("="))
        if reason := checks.reason_against(leaf):
            raise ValueError(f"{name}: {reason}")
    array = np.asarray(leaf)
    fitting = fit(name, array)
    return array.copy() if fitting is array else fitting


def fit(name: str, array: np.ndarray) -> np.ndarray:
    """Cast 64-bit numbers to the 32 bits that JAX has by default; a ValueError names a number that
    does not fit."""
    if array.dtype in PLAIN or array.dtype.kind not in "biufc":
        return array
    return checks.cast(
        name,
        array,
        jax.dtypes.canonicalize_dtype(array.dtype),
        checks.UNLESS_X64,
    )


def to_framework(framework: Framework, tree: PyTree) -> Any:
    """Return the tree in a framework's arrays, which share its memory: do not write to them."""
    if framework == "jax":
        return tree
    if framework == "numpy":
        return jax.tree.map(np.asarray, tree)
    from jaxreplay.torch import to_torch

    return to_torch(tree)


def _of_tensor(name: str, tensor: Any) -> Any:
    """Return a tensor as an array of NumPy that shares its memory, or as a JAX array."""
    if tensor.device.type != "cpu" or tensor.dtype == sys.modules["torch"].bfloat16:
        from jaxreplay.torch import from_torch

        return from_torch(tensor, cast=True)
    try:
        return tensor.detach().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: this tensor cannot be stored: {error}") from None


class Block(NamedTuple):
    """Steps that fit a buffer, in arrays that the caller cannot change.

    Attributes:
      steps: A `Step` or an item, leaves [T, e, ...] of the stored dtypes.
      mask: bool[T, e], or None, as for `ReplayBuffer.extend`.
      priority: [T, e], or None, likewise.
      envs: int[e], or None, likewise.
      num_steps: Number of steps over all envs.
    """

    steps: Any
    mask: Any
    priority: Any
    envs: Any
    num_steps: int


class Format:
    """Structure, shapes and dtypes of one env's step or of an item, by which callers' steps are
    taken.

    Args:
      where: Name of the caller, for errors.
      buffer: The buffer; or, if no `block` is made, what has its `autoreset`.
      example: One env's step or an item, leaves with `shape` and `dtype`.
      made: Called as made(where, *given); returns a step with all its leaves. Default: `as_stored`.
      why: Reason for the dtypes, and the cure, for errors.

    Attributes:
      specs: Shapes and dtypes, a tree.
    """

    def __init__(
        self,
        where: str,
        buffer: Any,
        example: PyTree,
        made: Callable[..., Any] | None = None,
        why: str = "as the first step or example= has it",
    ):
        self._buffer, self._why = buffer, why
        self._made = made or (lambda where, given: as_stored(where, buffer, given))
        self.specs = checks.specs(where, as_stored(where, buffer, example))
        self._names, self._leaves = zip(*named(self.specs), strict=True)
        self._structure = jax.tree.structure(self.specs)
        # Structure of the last step as it was given, and the order of its leaves as they are
        # stored: one value, since an interrupt may come between two.
        self._known: tuple[Any, list[int]] = jax.tree.structure(()), []
        shapes = lambda axes: [((*axes, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self._shapes = functools.lru_cache(shapes)  # and dtypes, by the leading axes

    def on_host(self, where: str, axes: tuple[int, ...], *given: Any) -> list[np.ndarray] | None:
        """Return the leaves of a step in the stored order and dtypes, [e, ...], if they are on the
        host and fit, else None. Arrays of NumPy that are stored as they are are not copied.

        Args:
          where: Name of the caller, for errors.
          axes: (e,), of which one env needs no axis; or (), for a step of one env.
          given: The step, and what `made` takes beside it.
        """
        leaves = self._in_order(where, given)
        if axes == (1,) and np.ndim(leaves[0]) == len(self._leaves[0].shape):
            axes = ()
        shapes = self._shapes(axes)
        for leaf, (shape, dtype) in zip(leaves, shapes, strict=True):
            if type(leaf) is not np.ndarray or leaf.dtype != dtype or leaf.shape != shape:
                are = [np.shape(leaf) for leaf in leaves if not isinstance(leaf, jax.Array)]
                if are != [shape for shape, _ in shapes]:
                    return None
                leaves = self._stored(where, leaves)
                if not self._fit(leaves, axes):
                    return None
                break
        return leaves if axes else [leaf[None] for leaf in leaves]

    def steps(self, where: str, *given: Any, is_ours: bool = False) -> Any:
        """Return steps in arrays that the caller cannot change, of the stored dtypes where values
        allow, or raise a ValueError that names the leaf.

        Args:
          where: As for `on_host`, as is `given`.
          given: The steps.
          is_ours: Whether leaves are arrays of NumPy that no caller has. Default: False.
        """
        leaves = self._stored(where, self._in_order(where, given), is_ours)
        return jax.tree.unflatten(self._structure, leaves)

    def axes_of(self, steps: Any) -> tuple[int, ...]:
        """Return the leading axes of steps: (), (e,) or (T, e). Flags tell, if there are some."""
        leaf, spec = (
            tree.terminated if isinstance(tree, Step) else [*jax.tree.leaves(tree), ()][0]
            for tree in (steps, self.specs)
        )
        shape = np.shape(leaf)
        return shape[: max(len(shape) - len(spec.shape), 0)]

    def check(self, where: str, steps: Any, axes: tuple[int, ...]) -> None:
        """Raise a ValueError that names each leaf which does not have these leading axes, or is of
        other shapes or dtypes."""
        leaves, structure = jax.tree.flatten(steps)
        if structure == self._structure and self._fit(leaves, axes):
            return
        what = "steps whose leaves have the same leading axes"
        step_checks.check_block(where, steps, self.specs, axes, what, 0)

    def block(
        self,
        where: str,
        given: PyTree,
        env: Any = None,
        envs: Any = None,
        mask: Any = None,
        priority: Any = None,
        is_ours: bool = False,
    ) -> Block:
        """Return steps of all envs, of some, or of one, as a block; or raise a ValueError that
        names the leaf.

        Args:
          where: As for `steps`, as are `given` and `is_ours`.
          given: The steps, leaves [E, ...], [T, E, ...], or [...] for one env.
          env: As for `Replay.add`, as are `envs`, `mask` and `priority`, which are arrays that the
            caller cannot change.
        """
        buffer, num_envs = self._buffer, self._buffer.num_envs
        steps = self.steps(where, given, is_ours=is_ours)
        axes = self.axes_of(steps)
        if env is not None:
            if (number := number_of(env, num_envs)) is None:
                raise ValueError(
                    f"{where}: env={env!r}, but this buffer has the envs 0 to {num_envs - 1}"
                )
            if axes or mask is not None or envs is not None:
                raise ValueError(
                    f"{where}: with env= the step is of one env, without an env axis, a mask or "
                    f"envs; got the leading axes {list(axes)}"
                )
            envs = [number]
        elif not axes and num_envs > 1:
            raise ValueError(
                f"{where}: the step has no env axis, but there are {num_envs} envs: say which one "
                "took it by env="
            )
        if envs is not None:
            envs = np.asarray(envs)
            step_checks.check_envs(where, envs, buffer.layout(), num_envs)
        if axes:
            axes = (*axes[:-1][:1], num_envs if envs is None else len(envs))
        self.check(where, steps, axes)
        if mask is not None:
            step_checks.check_mask(where, mask, buffer.allow_mask or envs is not None, axes)
        if priority is not None:
            step_checks.check_priorities(where, buffer)
            if priority.shape != axes or priority.dtype.kind not in "fiu":
                priority = step_checks.as_priority(where, priority, axes)
        is_taken = np.ones(axes, bool) if mask is None else np.asarray(mask)
        if envs is not None:
            is_taken = is_taken & (envs >= 0) & (envs < num_envs)
        for _ in range(2 - len(axes)):
            steps, mask, priority = jax.tree.map(lambda leaf: leaf[None], (steps, mask, priority))
        return Block(steps, mask, priority, envs, int(is_taken.sum()))

    def _in_order(self, where: str, given: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of steps in the stored order, which those of one structure share."""
        found, structure = jax.tree.flatten(given)
        known, order = self._known
        if structure != known and not isinstance(given[0], dict):  # it may be no pytree
            given = as_stored(where, self._buffer, given[0]), *given[1:]
            found, structure = jax.tree.flatten(given)
        if structure != known:
            places = jax.tree.unflatten(structure, range(len(found)))
            order, stored = jax.tree.flatten(self._made(where, *places))
            if stored != self._structure:
                steps = owned_tree(where, self._made(where, *given))
                self.check(where, steps, self.axes_of(steps))
            self._known = structure, order
        return [found[at] for at in order]

    def _stored(self, where: str, leaves: list[Any], is_ours: bool = False) -> list[Any]:
        """Return leaves in arrays that the caller cannot change, of the stored dtypes where those
        are of the same kind or a wider one. A ValueError names a number that does not fit."""
        found = []
        for name, leaf, spec in zip(self._names, leaves, self._leaves, strict=True):
            name, dtype = f"{where}: {name or 'the leaf'}", spec.dtype
            leaf = leaf if is_ours else owned(name, leaf)
            is_like = leaf.dtype != dtype and np.can_cast(leaf.dtype, dtype, "same_kind")
            if is_like or leaf.dtype.kind + dtype.kind == "iu":  # signed, and stored unsigned
                leaf = checks.cast(name, np.asarray(leaf), dtype, self._why)
            found.append(leaf)
        return found

    def _fit(self, leaves: list[Any], axes: tuple[int, ...]) -> bool:
        return [(leaf.shape, leaf.dtype) for leaf in leaves] == self._shapes(axes)


def number_of(env: Any, num_envs: int) -> int | None:
    """Return the number of an env, or None if there is no such env."""
    if isinstance(env, bool) or not hasattr(env, "__index__"):
        return None
    number = operator.index(env)
    return number if 0 <= number < num_envs else None


def as_stored(where: str, buffer: Any, step: PyTree) -> Any:
    """Return a `Step`, made of a mapping if it is one, for a buffer of steps; an item as it is."""
    return step if buffer.autoreset is None else step_checks.step_of(where, step, buffer.autoreset)


def example_of(where: str, buffer: Any, given: PyTree, env: int | None = None) -> Any:
    """Return the shapes and dtypes of one env's step, from the first that is added. Integer rewards
    become float32, because later rewards may be fractions."""
    step, num_axes = owned_tree(where, as_stored(where, buffer, given)), int(env is None)
    if is_step := buffer.autoreset is not None:
        num_axes = np.ndim(step.terminated) - (buffer.num_agents is not None)
    spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[num_axes:], leaf.dtype)
    specs = jax.tree.map(spec, step)
    floating = lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, np.float32 if leaf.dtype.kind in "iu" else leaf.dtype
    )
    return specs.replace(reward=jax.tree.map(floating, specs.reward)) if is_step else specs

"""What a step looks like: found out from the first one, and the others brought into its dtypes where nothing is lost by it."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxreplay import checks, intake
from jaxreplay.buffer import ReplayBuffer
from jaxreplay.paths import name_of, named


@dataclasses.dataclass(frozen=True)
class StepFormat:
    """Of a step, or an item, of one env."""

    has_flags: bool
    structure: Any  # of the tree
    dtypes: tuple[Any, ...]  # of its leaves
    first_rank: int  # axes of the first leaf

    @classmethod
    def of(cls, buffer: ReplayBuffer, example: Any) -> "StepFormat":
        specs = checks.specs("init", as_stored("init", buffer, example))
        leaves, structure = jax.tree.flatten(specs)
        named(specs)  # says where two have one name
        return cls(buffer.autoreset is not None, structure, tuple(leaf.dtype for leaf in leaves), len(leaves[0].shape))

    def fit(self, step: Any) -> tuple[Any, tuple[int, ...]]:
        """The step in the format's dtypes, and its leading axes: `()`, `(num_envs,)` or `(time, num_envs)`."""
        leaves, structure = jax.tree.flatten(step)
        if structure == self.structure and any(leaf.dtype != dtype for leaf, dtype in zip(leaves, self.dtypes, strict=True)):
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(step)]
            step = jax.tree.unflatten(structure, map(_cast, paths, leaves, self.dtypes))
        if self.has_flags:
            return step, np.shape(step.terminated)
        first = np.shape(leaves[0]) if leaves else ()
        return step, first[: max(len(first) - self.first_rank, 0)]


def _cast(path: Any, leaf: Any, dtype: Any) -> Any:
    """A leaf in the dtype, where that is of the same kind or wider; a ValueError for a number that it cannot hold."""
    if leaf.dtype == dtype or not np.can_cast(leaf.dtype, dtype, "same_kind"):
        return leaf
    return checks.cast(f"add: {name_of(path)}", np.asarray(leaf), dtype, "as the first step or example= has it")


def as_stored(where: str, buffer: ReplayBuffer, step: Any) -> Any:
    """A `Step`, from one or from a mapping, where the buffer holds steps; an item as it is."""
    return step if buffer.autoreset is None else intake.step_of(where, step, buffer.autoreset)


def example_of(buffer: ReplayBuffer, step: Any, env: int | None) -> Any:
    """One env's step, from the first that is added. Integer rewards become floating ones: the next may be no integer."""
    if buffer.autoreset is None:
        num_axes = int(env is None)
    else:
        num_axes = np.ndim(step.terminated)
        if np.issubdtype(np.asarray(step.reward).dtype, np.integer):
            step = step.replace(reward=np.asarray(step.reward, np.float32))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[num_axes:], leaf.dtype), step)

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
    dtypes: dict[str, Any]  # by key path
    first_rank: int  # axes of the first leaf

    @classmethod
    def of(cls, buffer: ReplayBuffer, example: Any) -> "StepFormat":
        specs = checks.specs("init", as_stored("init", buffer, example))
        leaves = named(specs)
        return cls(buffer.autoreset is not None, {name: leaf.dtype for name, leaf in leaves}, len(leaves[0][1].shape))

    def fit(self, step: Any) -> tuple[Any, tuple[int, ...]]:
        """The step in the format's dtypes, and its leading axes: `()`, `(num_envs,)` or `(time, num_envs)`."""

        def cast(path, leaf):
            dtype = self.dtypes.get(name_of(path), leaf.dtype)
            if leaf.dtype == dtype or not np.can_cast(leaf.dtype, dtype, "same_kind"):
                return leaf
            with np.errstate(over="ignore"):
                new = np.asarray(leaf.astype(dtype))
            if not checks.holds(new, np.asarray(leaf)):
                number = checks.first_not_held(new, np.asarray(leaf))
                raise ValueError(f"add: {name_of(path)}: {number!r} cannot be stored as {dtype.name}, as the first step or example= has it")
            return new

        step = jax.tree_util.tree_map_with_path(cast, step)
        if self.has_flags:
            return step, np.shape(step.terminated)
        first = np.shape(next(iter(jax.tree.leaves(step)), ()))
        return step, first[: max(len(first) - self.first_rank, 0)]


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

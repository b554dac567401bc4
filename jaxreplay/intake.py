"""What `add` and `extend` take, checked against what the buffer stores."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import checks, leaves
from jaxreplay.paths import spec_text
from jaxreplay.types import Step


def step_of(where: str, step: Any, autoreset: str | None) -> Step:
    """A step, from one or from a mapping, without a `final_obs` where the next row is one."""
    step = checks.as_step(where, step)
    if autoreset == "next_step" and step.final_obs is not None:
        raise ValueError(
            f'{where}: final_obs was given, but with autoreset="next_step" the row after a done is the final observation, and no other is '
            'read. Where the row after a done opens the next episode, and final_obs comes beside it, that is autoreset="same_step"; '
            "else leave final_obs out"
        )
    return step


def check_block(where: str, steps: Any, stored: Any, has_final_obs: bool, axes: tuple[int, ...], what: str) -> None:
    """A ValueError that names every leaf which is not as the stored ones, with `axes` in the place of their rows."""
    expected = leaves.tree_map(lambda leaf: jax.ShapeDtypeStruct(axes + leaf.shape[1:], leaf.dtype), stored)
    hint = f"{where} takes {what}, here {list(axes)}, as the example given to init has them."
    if isinstance(steps, Step):
        if any(jnp.result_type(flag) != jnp.bool_ for flag in jax.tree.leaves((steps.terminated, steps.truncated))):
            hint += f"\n{checks.BOOL_FLAGS}"
        flag = jax.ShapeDtypeStruct(axes, bool)
        final_obs = expected.obs if has_final_obs else None
        expected = expected.replace(terminated=flag, truncated=flag, final_obs=final_obs)
    checks.check_leaves(where, steps, expected, hint)


def check_mask(where: str, mask: Any, is_masked: bool, axes: tuple[int, ...]) -> None:
    if not is_masked:
        raise ValueError(f"{where}: a mask was given, but this buffer was made without masked=True")
    checks.check_leaves(where, {"mask": mask}, {"mask": jax.ShapeDtypeStruct(axes, bool)}, "mask: True where an env took a step.")


def as_priority(where: str, priority: Any, shape: tuple[int, ...]) -> jax.Array:
    """float32[shape], from any real numbers."""
    priority = jnp.asarray(priority)
    if priority.shape != shape or not jnp.issubdtype(priority.dtype, jnp.number) or jnp.iscomplexobj(priority):
        raise ValueError(f"{where}: priority: got {spec_text(priority)}, expected float32{list(shape)}, one for each row")
    return priority.astype(jnp.float32)


def as_rows(where: str, index: Any, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Row numbers of any integer dtype as int32[...] in `[0, capacity)`, and which were in it: bool[...]."""
    row = jnp.asarray(index)
    if not jnp.issubdtype(row.dtype, jnp.integer):
        raise ValueError(f"{where}: index must be a jaxreplay.Index or integer rows, got {row.dtype.name}")
    row = row if row.dtype.itemsize >= 4 else row.astype(jnp.int32)  # a narrow one cannot be compared with the capacity
    is_valid = (row >= 0) & (row < capacity)
    return jnp.where(is_valid, row, 0).astype(jnp.int32), is_valid

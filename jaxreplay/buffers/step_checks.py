"""What `add` and `extend` take, checked against what the buffer stores."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util import checks
from jaxreplay._util.aliases import Autoreset, PyTree, Stored
from jaxreplay._util.names import spec_text
from jaxreplay.storage import stored_arrays
from jaxreplay.types import Step

_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(Step))
_REQUIRED_FIELDS = _STEP_FIELDS[:5]
_DONE = (
    "done is two flags here: terminated, where there is no value beyond, and truncated, where "
    "the episode was cut, as by a time limit"
)
_NEXT = (
    "the next observation is not stored beside each step: it is the next row; that after an "
    "episode's last step is final_obs, with "
    'autoreset="same_step", or with "next_step" the row after it'
)
_WHERE_FINAL_OBS_IS = (
    '  gymnax >= 1.0: info["final_observation"]\n'
    '  Gymnasium, AutoresetMode.SAME_STEP: info["final_obs"]\n'
    '  Jumanji, AutoResetWrapper(env, next_obs_in_extras=True): extras["next_obs"]\n'
    "  an env that you reset yourself: the observation that step returned"
)
BOOL_FLAGS = "write done flags as bool: x.astype(bool)"
# What users of other libraries call a field, and what it is here.
_OTHER_NAMES = (
    dict.fromkeys(("done", "dones", "is_done"), _DONE)
    | dict.fromkeys(("next_obs", "next_observation", "next_observations", "next_state"), _NEXT)
    | dict.fromkeys(("observation", "observations", "state"), "the observation is called obs")
    | dict.fromkeys(
        ("mask", "priority"), "mask and priority are arguments of add and extend, beside the step"
    )
    | {"actions": "the action is called action", "rewards": "the reward is called reward"}
    | {
        "terminal": "a terminal flag is called terminated",
        "terminations": "a terminal flag is called terminated",
    }
    | {
        "timeout": "a time limit's flag is called truncated",
        "truncations": "a time limit's flag is called truncated",
    }
)


def by_field(step: PyTree) -> Any:
    """Return the fields of a dataclass or NamedTuple by name, and anything else as it is. A
    dataclass may be no pytree."""
    if dataclasses.is_dataclass(step) and not isinstance(step, Step | type):
        return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    as_dict = getattr(step, "_asdict", None)
    return step if as_dict is None else as_dict()


def as_step(where: str, step: PyTree) -> Step:
    """Return a `Step`, from one, or from a mapping, dataclass or NamedTuple with its fields."""
    if isinstance(step, Step):
        return step
    step = by_field(step)
    if not isinstance(step, Mapping):
        raise ValueError(
            f"{where}: a step must be a jaxreplay.Step, or a mapping, dataclass or NamedTuple "
            f"with its fields, got {type(step).__name__}"
        )
    missing = [name for name in _REQUIRED_FIELDS if name not in step]
    unknown = [str(name) for name in step if name not in _STEP_FIELDS]
    if missing or unknown:
        problems = [f"missing {', '.join(missing)}"] * bool(missing) + [
            f"unknown {', '.join(unknown)}"
        ] * bool(unknown)
        lines = [
            f"{where}: the step's keys are wrong: {'; '.join(problems)}. A step has "
            f"{', '.join(_REQUIRED_FIELDS)}, and may have final_obs "
            "and extras; further fields go into extras={...}",
            *dict.fromkeys(_OTHER_NAMES[name] for name in unknown if name in _OTHER_NAMES),
        ]
        raise ValueError("\n  ".join(lines))
    return Step(**step)


def check_flags(where: str, step: Step) -> None:
    """`terminated` and `truncated` of an example must be bool scalars: a float 0.0 would pass for
    one unseen."""
    expected = {
        "terminated": jax.ShapeDtypeStruct((), bool),
        "truncated": jax.ShapeDtypeStruct((), bool),
    }
    flags = {"terminated": step.terminated, "truncated": step.truncated}
    found, hints = jax.tree.leaves(checks.specs(where, flags)), []
    if any(flag.shape for flag in found):
        hints.append(
            "an example is one env's step, without the env axis: jax.tree.map(lambda x: x[0], "
            "step), if step is one of every env"
        )
    if any(flag.dtype != bool for flag in found):
        hints.append(BOOL_FLAGS)
    checks.check_leaves(where, flags, expected, "\n".join(hints))
    if not jax.tree_util.all_leaves([step.reward]):
        raise ValueError(
            f"{where}: reward must be one array, got {type(step.reward).__name__}; further "
            f"rewards go into extras={{...}}"
        )
    if step.final_obs is not None:
        checks.check_leaves(
            where,
            {"final_obs": step.final_obs},
            {"final_obs": step.obs},
            "final_obs is an observation: the same leaves as obs",
        )


def step_of(where: str, step: PyTree, autoreset: Autoreset | None) -> Step:
    """Return a step, from one or from a mapping; `final_obs` must come if `autoreset` reads it, and
    only then."""
    step = as_step(where, step)
    if (step.final_obs is not None) == (autoreset == "same_step"):
        return step
    if autoreset == "same_step":
        raise ValueError(
            f'{where}: autoreset="same_step" needs the final_obs of every step: the observation '
            "after its action, read where the episode ended.\n"
            f"It is with\n{_WHERE_FINAL_OBS_IS}\n"
            'An env that resets within the step and loses it is "same_step_no_final_obs".'
        )
    reason = (
        "the row after a done is the final observation, and no other is read"
        if autoreset == "next_step"
        else "no final observation is read"
    )
    raise ValueError(
        f"{where}: final_obs was given, but with autoreset={autoreset!r} {reason}. Where the row "
        "after a done opens the next episode, and final_obs comes beside it, that is "
        'autoreset="same_step"; else leave final_obs out'
    )


def check_block(
    where: str, steps: PyTree, stored: Stored, axes: tuple[int, ...], what: str
) -> None:
    """A ValueError that names every leaf which is not as the stored ones, with `axes` in the place
    of their rows."""
    expected = stored_arrays.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(axes + leaf.shape[1:], leaf.dtype), stored
    )
    hint = f"{where} takes {what}, here {list(axes)}, as the example given to init has them."
    if isinstance(steps, Step):
        if any(
            jnp.result_type(flag) != jnp.bool_
            for flag in jax.tree.leaves((steps.terminated, steps.truncated))
        ):
            hint += f"\n{BOOL_FLAGS}"
        flag = jax.ShapeDtypeStruct(axes, bool)
        final_obs = expected.obs if steps.final_obs is not None else None
        expected = expected.replace(terminated=flag, truncated=flag, final_obs=final_obs)
    checks.check_leaves(where, steps, expected, hint)


def check_mask(where: str, mask: Any, is_masked: bool, axes: tuple[int, ...]) -> None:
    if not is_masked:
        raise ValueError(
            f"{where}: a mask was given, but this buffer was made without allow_mask=True"
        )
    checks.check_leaves(
        where,
        {"mask": mask},
        {"mask": jax.ShapeDtypeStruct(axes, bool)},
        "mask: True where an env took a step.",
    )


def as_priority(where: str, priority: Any, shape: tuple[int, ...]) -> jax.Array:
    """float32[shape], from any real numbers."""
    priority = jnp.asarray(priority)
    if (
        priority.shape != shape
        or not jnp.issubdtype(priority.dtype, jnp.number)
        or jnp.iscomplexobj(priority)
    ):
        raise ValueError(
            f"{where}: priority: got {spec_text(priority)}, expected float32{list(shape)}, one "
            "for each row"
        )
    return priority.astype(jnp.float32)


def as_rows(where: str, index: Any, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Row numbers of any integer dtype as int32[...] in `[0, capacity)`, and which were in it:
    bool[...]."""
    row = jnp.asarray(index)
    if not jnp.issubdtype(row.dtype, jnp.integer):
        raise ValueError(
            f"{where}: index must be a jaxreplay.types.Index or integer rows, got {row.dtype.name}"
        )
    # a narrow one cannot be compared with the capacity
    row = row if row.dtype.itemsize >= 4 else row.astype(jnp.int32)
    is_valid = (row >= 0) & (row < capacity)
    return jnp.where(is_valid, row, 0).astype(jnp.int32), is_valid

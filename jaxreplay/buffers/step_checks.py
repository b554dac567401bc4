"""Checks of what a buffer's methods are given: steps, masks, priorities, envs, values of rows,
indices, and parameters of a call."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks
from jaxreplay._util.aliases import Autoreset, PyTree, Stored
from jaxreplay._util.hints import step_fields
from jaxreplay._util.names import kind_of, named, spec_text
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Step

STEP_FIELDS = tuple(field.name for field in dataclasses.fields(Step))
_REQUIRED_FIELDS = STEP_FIELDS[:5]
_WHERE_FINAL_OBS_IS = (
    '  gymnax >= 1.0: info["final_observation"]\n'
    '  Gymnasium, AutoresetMode.SAME_STEP: info["final_obs"]\n'
    '  Jumanji, AutoResetWrapper(env, next_obs_in_extras=True): extras["next_obs"]\n'
    "  an env that you reset yourself: the observation that env.step returned"
)
BOOL_FLAGS = "write done flags as bool: x.astype(bool)"


def by_field(step: PyTree) -> Any:
    """Return the fields of a dataclass or NamedTuple as a dict, because a dataclass need not be a
    pytree. Anything else is returned unchanged."""
    if isinstance(step, Step | dict):
        return step
    if dataclasses.is_dataclass(step) and not isinstance(step, type):
        return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    as_dict = getattr(step, "_asdict", None)
    return step if as_dict is None else as_dict()


def as_step(where: str, step: PyTree) -> Step:
    """Return a `Step`, made from a `Step`, mapping, dataclass or NamedTuple."""
    if isinstance(step, Step):
        return step
    step = by_field(step)
    if not isinstance(step, Mapping):
        raise ValueError(
            f"{where}: a step must be a jaxreplay.Step, or a mapping, dataclass or NamedTuple "
            f"with its fields, got {type(step).__name__}"
        )
    missing = [name for name in _REQUIRED_FIELDS if name not in step]
    unknown = [str(name) for name in step if name not in STEP_FIELDS]
    if missing or unknown:
        problems = [f"missing {', '.join(missing)}"] * bool(missing) + [
            f"unknown {', '.join(unknown)}"
        ] * bool(unknown)
        lines = [
            f"{where}: the step's keys are wrong: {'; '.join(problems)}. A step has "
            f"{', '.join(_REQUIRED_FIELDS)}, and may have final_obs "
            "and extras; further fields go into extras={...}",
            *step_fields(unknown),
        ]
        raise ValueError("\n  ".join(lines))
    return Step(**step)


def newest_waits(buffer: Any) -> bool:
    """Return whether each env's newest row is always a final one, or waits for the next one. With
    "next_step" it may be terminated, and sampleable at once."""
    return bool(buffer.window.after) and buffer.autoreset == "same_step"


def check_min_size(buffer: Any) -> None:
    """Raise a ValueError if `min_size` rows can never be sampled."""
    capacity, min_size = buffer.capacity, buffer.min_size
    most = capacity - buffer.num_envs * newest_waits(buffer)
    if min_size > most:
        rows = f"the {most} rows that can be sampled of " if most < capacity else ""
        raise ValueError(
            f"ReplayBuffer: min_size={min_size} exceeds {rows}capacity={capacity}: can_sample "
            "would never be True"
        )


def check_flags(where: str, step: Step, num_agents: int | None) -> None:
    """Raise a ValueError if the flags of an example are not bool scalars, or bool[num_agents], or
    `final_obs` differs from `obs` in a leaf. A float flag would otherwise go unnoticed."""
    flag = jax.ShapeDtypeStruct(() if num_agents is None else (num_agents,), bool)
    expected = {"terminated": flag, "truncated": flag}
    flags = {"terminated": step.terminated, "truncated": step.truncated}
    found, hints = jax.tree.leaves(checks.specs(where, flags)), []
    if any(one.shape != flag.shape for one in found):
        hints.append(
            "an example is one env's step, without the env axis: write jax.tree.map(lambda x: "
            "x[0], step). Flags of several agents need a buffer with num_agents"
        )
    if any(flag.dtype != bool for flag in found):
        hints.append(BOOL_FLAGS)
    checks.check_leaves(where, flags, expected, "\n".join(hints))
    if step.final_obs is not None:
        checks.check_leaves(
            where,
            {"final_obs": step.final_obs},
            {"final_obs": step.obs},
            "final_obs is an observation: the same leaves as obs",
        )


def step_of(where: str, step: PyTree, autoreset: Autoreset | None) -> Step:
    """Return a `Step`. Raise a ValueError unless it has `final_obs` exactly if
    `autoreset="same_step"`, which alone reads it."""
    step = as_step(where, step)
    if (step.final_obs is not None) == (autoreset == "same_step"):
        return step
    if autoreset == "same_step":
        raise ValueError(
            f'{where}: autoreset="same_step" needs the final_obs of every step: the observation '
            "after its action, read only where the episode ended.\n"
            f"It is in\n{_WHERE_FINAL_OBS_IS}\n"
            'If your env does not return it, use autoreset="same_step_no_final_obs".'
        )
    reason = (
        "reads the final observation from the row after a done"
        if autoreset == "next_step"
        else "reads no final observation"
    )
    raise ValueError(
        f"{where}: final_obs was given, but autoreset={autoreset!r} {reason}. If your env resets "
        "within the step and returns the final observation separately, use "
        'autoreset="same_step"; otherwise leave out final_obs'
    )


def as_example(
    where: str, example: PyTree, autoreset: Autoreset | None = None, num_agents: int | None = None
) -> Any:
    """Return the shapes and dtypes of one env's step, or of an item; or raise a ValueError.

    Args:
      where: Name of the method, for errors.
      example: A step, or an item.
      autoreset: That of the buffer. Default: None, for items.
      num_agents: Number of agents in each env. Default: one flag for each env.
    """
    if autoreset is not None:
        example = step_of(where, example, autoreset)
        check_flags(where, example, num_agents)
    example = checks.specs(where, example)
    if not jax.tree.leaves(example):
        raise ValueError(f"{where}: the example has no leaves: there is nothing to store")
    return example


def checked_steps(
    where: str,
    buffer: Any,
    steps: PyTree,
    stored: Stored,
    envs: Any = None,
    is_block: bool = False,
) -> tuple[Any, tuple[int, ...]]:
    """Return steps or items of every env, or of some, as arrays, and their leading axes; or raise a
    ValueError that names the leaf.

    Args:
      where: Name of the method, for errors.
      buffer: The buffer.
      steps: Steps or items.
      stored: As for `check_block`.
      envs: int32[e], the envs. Default: every env.
      is_block: Whether the steps have an axis of time before that of the envs. Default: False.
    """
    if buffer.autoreset is not None:
        steps = step_of(where, steps, buffer.autoreset)
    axes, num, every = (buffer.num_envs,), "num_envs", "every env"
    if envs is not None:
        axes, num, every = jnp.shape(envs), "len(envs)", "each of envs"
    what = f"one step of {every}, leaves [{num}, ...]"
    if is_block:
        first = next(map(jnp.shape, jax.tree.leaves(steps)), ())
        time = first[0] if first else 0
        axes, what = (time, *axes), f"a block of steps, leaves [time, {num}, ...]"
    check_block(where, steps, stored, axes, what)
    return jax.tree.map(jnp.asarray, steps), axes


def check_block(
    where: str,
    steps: PyTree,
    stored: Stored,
    axes: tuple[int, ...],
    what: str,
    num_axes: int = 1,
) -> None:
    """Raise a ValueError that names every leaf whose shape or dtype does not fit the stored one.

    Args:
      where: Name of the method, for errors.
      steps: Steps or items.
      stored: The stored leaves, [N, ...].
      axes: Leading axes that the leaves of `steps` must have in place of N.
      what: Description of the expected steps, for errors.
      num_axes: Number of leading axes of the stored leaves. Default: 1, that of N.
    """
    expected = stored_arrays.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(axes + leaf.shape[num_axes:], leaf.dtype), stored
    )
    hint = (
        f"{where} takes {what}, here {list(axes)}; further axes and dtypes are those of the "
        "example given to init."
    )
    if isinstance(steps, Step):
        if any(
            jnp.result_type(flag) != jnp.bool_
            for flag in jax.tree.leaves((steps.terminated, steps.truncated))
        ):
            hint += f"\n{BOOL_FLAGS}"
        agents = () if expected.terminated is None else expected.terminated.shape[len(axes) :]
        flag = jax.ShapeDtypeStruct(axes + agents, bool)
        final_obs = expected.obs if steps.final_obs is not None else None
        expected = expected.replace(terminated=flag, truncated=flag, final_obs=final_obs)
    checks.check_leaves(where, steps, expected, hint)


def check_writable(where: str, state: ReplayState) -> None:
    """Raise a ValueError unless stored rows may be changed."""
    if not state.layout.allow_write:
        raise ValueError(f"{where}: make the buffer with allow_write=True")


def as_values(
    where: str, state: ReplayState, values: PyTree, axes: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Return new values of some leaves of rows, [*axes, ...], as [B, ...] by the name of the stored
    leaf; or raise a ValueError that names the leaf."""
    steps = state.rows.steps
    steps = steps.replace(terminated=None) if isinstance(steps, Step) else steps
    stored = dict(named(steps, is_leaf=stored_arrays.is_compound))
    given = dict(named(values))
    if unknown := [name for name in given if name not in stored]:
        raise ValueError(
            f"{where}: no leaf of a row is named {', '.join(unknown)}; there are "
            f"{', '.join(stored)}"
        )
    like = lambda leaf: jax.ShapeDtypeStruct(axes + leaf.shape[1:], leaf.dtype)
    expected = {name: like(stored[name]) for name in given}
    hint = f"{where} takes values [{', '.join(map(str, axes))}, ...], with the axes of a row's leaf"
    checks.check_leaves(where, given, expected, hint)
    return {
        name: jnp.asarray(leaf).reshape(-1, *jnp.shape(leaf)[len(axes) :])
        for name, leaf in given.items()
    }


def check_mask(where: str, mask: Any, is_masked: bool, axes: tuple[int, ...]) -> None:
    """Raise a ValueError unless the buffer takes masks and the mask is bool[axes]."""
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


def check_envs(where: str, envs: Any, layout: Layout, num_envs: int) -> None:
    """Raise a ValueError unless a write to some envs is possible: they are integers [e], none
    appears twice as far as is known, and each env has a write position of its own."""
    if layout.lockstep:
        raise ValueError(
            f"{where}: envs= writes to some envs, but all envs of this buffer share one write "
            "position; make the buffer with allow_mask=True"
        )
    if jnp.ndim(envs) != 1 or not jnp.issubdtype(jnp.result_type(envs), jnp.integer):
        raise ValueError(f"{where}: envs must be int32[e], numbers of envs, got {kind_of(envs)}")
    if not isinstance(envs, Tracer):
        known = np.asarray(envs)
        known = np.sort(known[(known >= 0) & (known < num_envs)])
        if len(twice := known[1:][known[1:] == known[:-1]]):
            raise ValueError(
                f"{where}: envs has {twice[0]} twice; write one step of an env in a call, or a "
                "block of steps by extend"
            )


def as_envs(envs: Any, num_envs: int) -> jax.Array:
    """Return the numbers of some envs as int32[e], `num_envs` for those that do not exist."""
    envs = jnp.asarray(envs)
    return jnp.where((envs >= 0) & (envs < num_envs), envs, num_envs).astype(jnp.int32)


def check_priorities(where: str, buffer: Any) -> None:
    """Raise a ValueError if a buffer's sampler has no priorities."""
    if not buffer.sampler.has_priorities:
        raise ValueError(
            f"{where}: the sampler {type(buffer.sampler).__name__} has no priorities; use "
            "jaxreplay.prioritized"
        )


def as_priority(where: str, priority: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return real numbers of this shape as float32[shape], or raise a ValueError."""
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
    """Return row numbers as int32[...] in [0, capacity), and True where they were in that range,
    bool[...]. Numbers out of range become 0."""
    try:
        row = jnp.asarray(index)
    except TypeError:
        row = None
    if row is None or not jnp.issubdtype(row.dtype, jnp.integer):
        raise ValueError(
            f"{where}: index must be a jaxreplay.types.Index or integer rows, got {kind_of(index)}"
        )
    # narrower dtypes cannot hold the capacity, which they are compared with
    row = row if row.dtype.itemsize >= 4 else row.astype(jnp.int32)
    is_valid = (row >= 0) & (row < capacity)
    return jnp.where(is_valid, row, 0).astype(jnp.int32), is_valid


def of_call(where: str, buffer: Any, options: Mapping[str, Any]) -> Any:
    """Return a buffer with parameters of one call.

    Args:
      where: Name of the called method, for the error.
      buffer: The buffer.
      options: Values by name; None for the buffer's own.

    Raises:
      TypeError: The buffer takes no such parameter.
      ValueError: A value that is known is out of range.
    """
    known = buffer.all_takes()
    if unknown := [name for name in options if name not in known]:
        kinds = " and ".join(type(part).__name__ for part in (buffer.sampler, buffer.view))
        raise TypeError(
            f"{where}: {unknown[0]} is for another buffer: with {kinds} a call may give "
            f"{', '.join(sorted(known))}"
        )
    known = lambda x: np.asarray(x) if _is_known(x) else x
    buffer.check_given(where, jax.tree.map(known, dict(options)))
    return buffer.with_given({name: one for name, one in options.items() if one is not None})


def _is_known(value: Any) -> bool:
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and value.is_fully_addressable


def of_items(given: Any, names: set[str], shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Return parameters of a call, one for each item.

    Args:
      given: Values by name.
      names: The names that are wanted.
      shape: Shape of the items.

    Raises:
      ValueError: A value has another shape, or `n_step` is not of integers.
    """
    found = {name: value for name, value in given.items() if name in names}
    for name, value in found.items():
        if jnp.shape(value) not in ((), shape):
            raise ValueError(
                f"{name} must be one number, or one for each of {math.prod(shape)} items, got an "
                f"array of shape {list(jnp.shape(value))}"
            )
        if name == "n_step" and not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise ValueError(f"n_step must be of integers, got {jnp.result_type(value)}")
    return {name: jnp.broadcast_to(value, shape) for name, value in found.items()}

"""Check that a checkpoint fits a buffer, leaf by leaf."""

import dataclasses
import re
from typing import Any

import jax

from jaxreplay._util.names import description, named, printable, spec_text
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.storage import platforms, stored_arrays


def identity(buffer: Any) -> str:
    """Return the text of the configuration that decides a state's meaning.

    It leaves out the batch size, the minimum size, the importance weights and the platform.
    """
    sizes = {
        field.name: 1
        for field in dataclasses.fields(buffer)
        if field.name in ("batch_size", "min_size")
    }
    return re.sub(
        r", (batch_size=1\b|min_size=1\b|(platform|normalize_weights)=(None|'\w+')|beta=[^,)]+)",
        "",
        description(dataclasses.replace(buffer, **sizes)),
    )


def described(state: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the dtype and shape of a row of each leaf with rows, and of each other leaf."""
    stored, rest = rows.split(state)
    stored_leaves = named(stored, is_leaf=stored_arrays.is_compound)
    return (
        {name: spec_text(leaf, 1) for name, leaf in stored_leaves},
        {name: spec_text(leaf) for name, leaf in named(rest)},
    )


def at_capacity_of(manifest: Manifest, buffer: Any) -> Any:
    """Return the buffer with the checkpoint's capacity, if its configuration allows that."""
    if not manifest.rows or not isinstance(buffer, ReplayBuffer):
        return buffer
    try:
        return dataclasses.replace(buffer, capacity=manifest.length * buffer.num_envs, min_size=1)
    except ValueError:  # too few rows for its view
        return buffer


def check_fits(
    manifest: Manifest, buffer: Any, example: Any, resize: bool, problems: list[str]
) -> Any:
    """Return the buffer that wrote a checkpoint: the given one, or that of another capacity.

    Args:
      manifest: The checkpoint's manifest.
      buffer: The buffer that restores.
      example: One env's step or item, as for `init`.
      resize: Whether the checkpoint may be of another capacity.
      problems: Problems of checkpoints that could not be read before, for the error.

    Raises:
      ValueError: The checkpoint is of another buffer, or has other leaves, shapes or dtypes.
    """
    own, before = buffer, at_capacity_of(manifest, buffer)
    if manifest.buffer == identity(before) and (resize or identity(own) == identity(before)):
        buffer = before
    else:
        found = printable(manifest.buffer)
        lines = [
            f"restore: step {manifest.step} is of another buffer:",
            f"  {found}",
            "this one is:",
            f"  {identity(own)}",
        ]
        if manifest.buffer == identity(before):
            lines.append(
                "the capacity differs: restore(..., resize=True) keeps the newest rows that fit"
            )
        raise ValueError(
            "\n".join(
                [
                    *lines,
                    *(["these checkpoints are damaged:"] if problems else []),
                    *(f"  {problem}" for problem in problems),
                ]
            )
        )
    before = _on_its_platform(manifest, buffer, example)
    if before is not None:
        return before
    lines = []
    for got, expected in zip(
        (manifest.rows, manifest.rest), described(jax.eval_shape(buffer.init, example)), strict=True
    ):
        names = [
            name for name in dict.fromkeys([*got, *expected]) if got.get(name) != expected.get(name)
        ]
        lines += [
            f"{printable(name)}: stored {got.get(name, 'nothing')}, expected "
            f"{expected.get(name, 'nothing')}"
            for name in names
        ]
    raise ValueError(
        "\n  ".join(
            [f"restore: step {manifest.step} has leaves of other shapes or dtypes:", *lines]
        )
    )


def _on_its_platform(manifest: Manifest, buffer: Any, example: Any) -> Any:
    """Return the buffer for the platform of a checkpoint's layout, or None if no platform fits.

    The buffer's own platform is tried first. Rows are stored in a form common to all platforms, but
    the width of a sampler's tree depends on the platform.
    """
    if described(jax.eval_shape(buffer.init, example)) == (manifest.rows, manifest.rest):
        return buffer
    for platform in platforms.PLATFORMS if isinstance(buffer, ReplayBuffer) else ():
        other = dataclasses.replace(buffer, platform=platform)
        if described(jax.eval_shape(other.init, example)) == (manifest.rows, manifest.rest):
            return other
    return None


def check_path(
    where: str, generations: list[Manifest], draft: Manifest, buffer: Any, goes_on: bool
) -> None:
    """Check that a path has no checkpoints of another buffer, which a save would delete.

    Args:
      where: The path.
      generations: The path's checkpoints, newest first.
      draft: The checkpoint to be saved.
      buffer: The buffer that saves.
      goes_on: Whether the state continues from one of them. Its capacity may then differ.

    Raises:
      ValueError: The path has checkpoints of another buffer.
    """
    own = {
        draft.buffer,
        *([identity(at_capacity_of(generations[0], buffer))] if goes_on and generations else []),
    }
    if generations and (generations[0].rows != draft.rows or generations[0].buffer not in own):
        raise ValueError(
            f"save: {where} has checkpoints of another buffer, or of steps with other leaves; use "
            "another path for each buffer:\n"
            f"  {printable(generations[0].buffer)}, {generations[0].rows}\nthis one is:\n  "
            f"{draft.buffer}, {draft.rows}"
        )

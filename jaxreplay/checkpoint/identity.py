"""Whether a generation and a buffer belong together: compared leaf by leaf."""

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
    """What decides the meaning of a state: not how many items are drawn, when, and with which
    weights, nor what it is laid out for."""
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
    """Dtype and shape: of a row of each leaf that has rows, and of each other leaf."""
    stored, rest = rows.split(state)
    stored_leaves = named(stored, is_leaf=stored_arrays.is_compound)
    return (
        {name: spec_text(leaf, 1) for name, leaf in stored_leaves},
        {name: spec_text(leaf) for name, leaf in named(rest)},
    )


def at_capacity_of(manifest: Manifest, buffer: Any) -> Any:
    """The buffer with the capacity that a generation has."""
    if not manifest.rows or not isinstance(buffer, ReplayBuffer):
        return buffer
    try:
        return dataclasses.replace(buffer, capacity=manifest.length * buffer.num_envs, min_size=1)
    except ValueError:  # too few rows for its view
        return buffer


def check_fits(
    manifest: Manifest, buffer: Any, example: Any, resize: bool, problems: list[str]
) -> Any:
    """The buffer that a generation is of: this one or, where `resize` allows it, one of another
    capacity. Else a ValueError. `problems`: why no newer generation was taken."""
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
            lines.append("of another capacity, resize=True takes the newest rows that fit")
        raise ValueError(
            "\n".join(
                [
                    *lines,
                    *(["and this is broken:"] if problems else []),
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
    raise ValueError("\n  ".join([f"restore: step {manifest.step} holds other steps:", *lines]))


def _on_its_platform(manifest: Manifest, buffer: Any, example: Any) -> Any:
    """The buffer, for the platform that a generation was laid out for, this one's first; None where
    its leaves are others on each. Rows are written in their plain form, but a tree is as wide as
    its platform wants it."""
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
    """A ValueError, where a path has another buffer's generations: they are not deleted for this
    one's. `goes_on`: from one of them, so that they may be of other capacities."""
    own = {
        draft.buffer,
        *([identity(at_capacity_of(generations[0], buffer))] if goes_on and generations else []),
    }
    if generations and (generations[0].rows != draft.rows or generations[0].buffer not in own):
        raise ValueError(
            f"save: {where} has the generations of another buffer, or of other steps; give each a "
            "path of its own:\n"
            f"  {printable(generations[0].buffer)}, {generations[0].rows}\nthis one is:\n  "
            f"{draft.buffer}, {draft.rows}"
        )

"""Whether a generation and a buffer belong together: compared leaf by leaf."""

import dataclasses
import re
from typing import Any

import jax

from jaxreplay import leaves
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.description import description
from jaxreplay.paths import named


def identity(replay: Any) -> str:
    """What decides the meaning of a state: not how many items are drawn, or when."""
    sizes = {field.name: 1 for field in dataclasses.fields(replay) if field.name in ("batch_size", "min_size")}
    return re.sub(r", (batch_size|min_size)=1\b", "", description(dataclasses.replace(replay, **sizes)))


def described(state: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Dtype and shape: of a row of each leaf that has rows, and of each other leaf."""
    stored, rest = rows.split(state)
    stored_leaves = named(stored, is_leaf=lambda leaf: isinstance(leaf, leaves.Narrow))
    return (
        {name: leaves.spec_text(leaf.shape[1:], leaf.dtype) for name, leaf in stored_leaves},
        {name: leaves.spec_text(leaf.shape, leaf.dtype) for name, leaf in named(rest)},
    )


def check_fits(manifest: Manifest, replay: Any, example: Any) -> None:
    """A ValueError, where a generation cannot be restored into the buffer."""
    own = identity(replay)
    if manifest.buffer != own:
        raise ValueError(f"restore: step {manifest.step} is of another buffer:\n  {manifest.buffer}\nthis one is:\n  {own}")
    lines = []
    for got, expected in zip((manifest.rows, manifest.rest), described(jax.eval_shape(replay.init, example)), strict=True):
        names = [name for name in dict.fromkeys([*got, *expected]) if got.get(name) != expected.get(name)]
        lines += [f"{name}: stored {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}" for name in names]
    if lines:
        raise ValueError("\n  ".join([f"restore: step {manifest.step} holds other steps:", *lines]))


def check_path(where: str, generations: list[Manifest], draft: Manifest) -> None:
    """A ValueError, where a path has another buffer's generations: they are not deleted for this one's."""
    if generations and (generations[0].rows, generations[0].buffer) != (draft.rows, draft.buffer):
        raise ValueError(
            f"save: {where} has the generations of another buffer, or of other steps; give each a path of its own:\n"
            f"  {generations[0].buffer}, {generations[0].rows}\nthis one is:\n  {draft.buffer}, {draft.rows}"
        )

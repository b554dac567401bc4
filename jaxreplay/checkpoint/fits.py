"""Check that the rows of a checkpoint fit a buffer, leaf by leaf."""

from typing import Any

import jax

from jaxreplay._util.names import description, named, printable, spec_text
from jaxreplay.buffers.adopt import are_alike
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.storage import stored_arrays


def described(stored: Any, rest: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the dtype and shape of a row of each leaf with rows, and of each other leaf.

    Args:
      stored: The rows, as `rows.split` returns them.
      rest: The rest of the state.
    """
    stored_leaves = named(stored, is_leaf=stored_arrays.is_compound)
    return (
        {name: spec_text(leaf, 1) for name, leaf in stored_leaves},
        {name: spec_text(leaf) for name, leaf in named(rest)},
    )


def check_fits(manifest: Manifest, buffer: Any, example: Any, problems: list[str]) -> None:
    """Check that a buffer can take the rows of a checkpoint.

    Args:
      manifest: The checkpoint's manifest.
      buffer: The buffer that restores.
      example: One env's step or item, as for `init`.
      problems: Problems of checkpoints that could not be read before, for the error.

    Raises:
      ValueError: The checkpoint has other leaves, shapes or dtypes, or is no such buffer's.
    """
    own_rows, own_rest = described(*jax.eval_shape(lambda: rows.split(buffer.init(example))))
    lines = _differences(manifest.rows, own_rows)
    if not own_rows:  # a rollout has no rows: its state is restored as it is
        lines += _differences(manifest.rest, own_rest)
    form, own_form = manifest.layout.autoreset or None, getattr(buffer, "autoreset", None)
    if own_rows and not are_alike(form, own_form):
        lines.append(f"autoreset: stored {form!r}, expected {own_form!r}")
    if lines or bool(own_rows) != bool(manifest.rows):
        text = [
            f"restore: step {manifest.step} has steps with other leaves, shapes or dtypes:",
            *lines,
            f"it is of {printable(manifest.buffer)}",
            f"this buffer is {description(buffer)}",
            *(["these checkpoints are damaged:", *problems] if problems else []),
        ]
        raise ValueError("\n  ".join(text))


def _differences(got: dict[str, str], expected: dict[str, str]) -> list[str]:
    names = [
        name for name in dict.fromkeys([*got, *expected]) if got.get(name) != expected.get(name)
    ]
    return [
        f"{printable(name)}: stored {got.get(name, 'nothing')}, expected "
        f"{expected.get(name, 'nothing')}"
        for name in names
    ]


def check_path(where: str, generations: list[Manifest], draft: Manifest, goes_on: bool) -> None:
    """Check that a path has no checkpoints of another buffer, which a save would delete.

    Args:
      where: The path.
      generations: The path's checkpoints, newest first.
      draft: The checkpoint to be saved.
      goes_on: Whether the state continues from one of them. The buffer may then differ.

    Raises:
      ValueError: The path has checkpoints of another buffer.
    """
    if not generations:
        return
    newest = generations[0]
    kind = lambda one: (one.layout, one.length, len(one.end))
    if newest.rows != draft.rows or not (goes_on or kind(newest) == kind(draft)):
        raise ValueError(
            f"save: {where} has checkpoints of another buffer, or of steps with other leaves; use "
            "another path for each buffer, or restore one of them first, to go on from it:\n"
            f"  {printable(newest.buffer)}, {newest.rows}\nthis one is:\n  "
            f"{draft.buffer}, {draft.rows}"
        )

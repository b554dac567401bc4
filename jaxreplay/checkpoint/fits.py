"""Check that the rows of a checkpoint fit a buffer, leaf by leaf."""

import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxreplay._util.names import description, named, printable, spec_text
from jaxreplay.buffers.adopt import are_alike, stored
from jaxreplay.checkpoint.extras import ANY_BYTES
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.state import ReplayState
from jaxreplay.storage.stored_arrays import HostArray


def check_fits(
    manifest: Manifest,
    buffer: Any,
    members: Mapping[str, Any],
    examples: Mapping[str, Any],
    extras: Mapping[str, str],
    problems: list[str],
) -> None:
    """Check that a buffer can take the rows of a checkpoint.

    Args:
      manifest: The checkpoint's manifest.
      buffer: The buffer that restores.
      members: Its members; one, named "", for a buffer that is no mixture.
      examples: One env's step or item of each, as for `init`.
      extras: Dtypes and shapes of the extras that are asked for, by name.
      problems: Problems of checkpoints that could not be read before, for the error.

    Raises:
      ValueError: The checkpoint has other leaves, shapes or dtypes, or is no such buffer's.
    """
    lines, with_rows = [], set()
    for name, own in members.items():
        state = jax.eval_shape(lambda own=own, name=name: own.init(examples[name]))
        if not isinstance(state, ReplayState):  # a rollout's, which is restored as it is
            expected = {name: spec_text(leaf) for name, leaf in named(state)}
            got = {name: text for name, text in manifest.rest.items() if name in expected}
            lines += _differences(got, expected)
            continue
        with_rows.add(name)
        if (member := manifest.members.get(name)) is not None:
            is_elsewhere = manifest.has_index(name)
            expected = {
                own: spec_text(leaf, 1)
                for own, leaf in named(stored(state), is_leaf=stored_arrays.is_compound)
                if not (is_elsewhere and isinstance(leaf, HostArray))
            }
            lines += [
                f"{name}{':' * bool(name)} {line}".strip()
                for line in _differences(member.rows, expected)
            ]
            if is_elsewhere and lines:
                lines.append("its rows are in files: restore it with the buffer that has them")
            form = member.layout.autoreset or None
            if not are_alike(form, own.autoreset):
                lines.append(f"autoreset: stored {form!r}, expected {own.autoreset!r}")
    if lines or {*manifest.members} != with_rows:
        what = "has steps with other leaves, shapes or dtypes:"
        if not lines:
            what = f"has the members {', '.join(map(repr, manifest.members)) or 'of a rollout'}:"
        _refuse(manifest, buffer, [what, *lines], problems)
    # "extras/..." is of a mixture's member
    is_extra = lambda name: name.startswith("extras") and not name.startswith("extras/")
    got = {name: text for name, text in manifest.rest.items() if is_extra(name)}
    for name, text in extras.items():
        if text == ANY_BYTES and re.fullmatch(r"uint8\[[0-9]+\]", got.get(name, "")):
            got[name] = text
    if lines := _differences(got, extras) if extras else []:
        cure = (
            "give extras= of the form that was saved; of an optimizer, whose state_dict() is empty "
            "before its first step, save the bytes of torch.save, and give b''"
        )
        _refuse(manifest, buffer, ["has other extras:", *lines, cure], problems)


def _refuse(manifest: Manifest, buffer: Any, lines: list[str], problems: list[str]) -> None:
    """Raise the error for a checkpoint that does not fit. `lines`: what is wrong, and details."""
    of, this = printable(manifest.buffer), description(buffer)
    text = [
        f"restore: step {manifest.step} {lines[0]}",
        *lines[1:],
        *([f"it is of {of}", f"this buffer is {this}"] if of != this else []),
        *(["these checkpoints are damaged:", *problems] if problems else []),
    ]
    raise ValueError("\n  ".join(text))


def _differences(got: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    return [
        f"{printable(name)}: stored {got.get(name, 'nothing')}, expected "
        f"{expected.get(name, 'nothing')}"
        for name in dict.fromkeys([*got, *expected])
        if got.get(name) != expected.get(name)
    ]


def check_path(where: str, found: list[Manifest], draft: Manifest, goes_on: bool) -> None:
    """Check that a path has no checkpoints of another buffer, which a save would delete.

    Args:
      where: The path.
      found: The path's checkpoints, newest first.
      draft: The checkpoint to be saved.
      goes_on: Whether the state continues from one of them. The buffer may then differ.

    Raises:
      ValueError: The path has checkpoints of another buffer.
    """
    if not found:
        return
    newest = found[0]
    # a buffer with rows in files saves its index to one path with copies, which have the steps, too
    are_of_one_kind = newest.buffer.partition("(")[0] == draft.buffer.partition("(")[0]
    has_index = lambda name: newest.has_index(name) or draft.has_index(name)
    left_out = lambda name: "steps" if are_of_one_kind and has_index(name) else None
    rows_of = lambda one: {
        name: {leaf: own.rows[leaf] for leaf in own.rows if leaf.split(".")[0] != left_out(name)}
        for name, own in one.members.items()
    }
    kind = lambda one: [(own.layout, own.length, len(own.end)) for own in one.members.values()]
    if rows_of(newest) != rows_of(draft) or not (goes_on or kind(newest) == kind(draft)):
        raise ValueError(
            f"save: {where} has checkpoints of another buffer, or of steps with other leaves; use "
            "another path for each buffer, or restore one of them first, to go on from it:\n"
            f"  {printable(newest.buffer)}, {rows_of(newest)}\nthis one is:\n  "
            f"{draft.buffer}, {rows_of(draft)}"
        )

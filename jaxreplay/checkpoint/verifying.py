"""Verification: compare stored files with their checksums."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxreplay.checkpoint import bundle
from jaxreplay.checkpoint.bundle import Sums
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.manifest import Manifest


class Verified(NamedTuple):
    """Result of verifying one checkpoint.

    Attributes:
      step: The checkpoint's step. None for the entry that collects all unreadable manifests.
      problems: One line for each missing or damaged file; empty if the checkpoint is intact.
    """

    step: int | None
    problems: list[str]


def _groups(manifest: Manifest) -> dict[str, Sums]:
    """Return the checksums of the files with rows, by name."""
    groups = [one for own in manifest.members.values() for one in own.groups]
    return {one.file: one.sums for one in groups if one.sums is not None}


def _problems(store: Files, files: Iterable[tuple[str, Sums]]) -> dict[str, str]:
    """Read files. Return the problem of each damaged one, by its name."""
    found = {}
    for name, sums in files:
        try:
            bundle.checked(store, name, sums)
        except CorruptCheckpointError as error:
            found[name] = str(error)
    return found


def damaged_groups(store: Files, manifests: Iterable[Manifest]) -> dict[str, str]:
    """Read all rows of checkpoints. Return the problem of each damaged file, by its name."""
    groups = {name: sums for one in manifests for name, sums in _groups(one).items()}
    return _problems(store, groups.items())


def verified(store: Files, chain: Chain, bar: Callable[..., Any]) -> list[Verified]:
    """Verify each checkpoint, newest first. Files that several share are read once.

    Args:
      bar: Makes a progress bar from a title, a total and a unit.
    """
    while True:
        manifests, problems = chain.read()
        read = _read(store, manifests, bar)
        found = {one.folder: wrong for one, wrong in zip(manifests, read, strict=True)}
        # leave out checkpoints that a run has deleted meanwhile
        if any(one.problems for one in found.values()):
            left = {manifest.folder for manifest in chain.read()[0]}
            found = {
                folder: one for folder, one in found.items() if not one.problems or folder in left
            }
            if left and not found:
                continue
        return [*found.values(), *([Verified(None, problems)] if problems else [])]


def _read(store: Files, manifests: list[Manifest], bar: Callable[..., Any]) -> list[Verified]:
    rest = [
        {one.file_name(number): sums for number, sums in enumerate(one.files)} for one in manifests
    ]
    files = [own | _groups(one) for one, own in zip(manifests, rest, strict=True)]
    every = {name: sums for own in files for name, sums in own.items()}
    with bar("verify", len(every), unit="file") as told:

        def each() -> Iterable[tuple[str, Sums]]:
            for one in every.items():
                yield one
                told.update(1)

        wrong = _problems(store, each())
    return [
        Verified(one.step, [wrong[name] for name in own if name in wrong])
        for one, own in zip(manifests, files, strict=True)
    ]

"""Verification: compare all stored files with their checksums."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.store import array_name
from jaxreplay.checkpoint.zarr_arrays import check_files


class Verified(NamedTuple):
    """Result of verifying one checkpoint.

    Attributes:
      step: The checkpoint's step. None for the entry that collects all unreadable manifests.
      problems: One line for each missing or damaged file (of a group of rows only for the first
        one); empty if the checkpoint is intact.
    """

    step: int | None
    problems: list[str]


def problem_of_group(store: Files, group: Group) -> str | None:
    """Read all files of a group, and return the first problem, or None if it is intact."""
    return _problem(store, "rows", group.folder, group.seals)


def verified(store: Files, generations: Generations, bar: Callable[..., Any]) -> list[Verified]:
    """Verify each checkpoint, newest first. Files that several share are read once.

    Args:
      bar: Makes a progress bar from a title, a total and a unit.
    """
    while True:
        manifests, problems = generations.read()
        found = dict(
            zip(
                (manifest.folder for manifest in manifests),
                _read(store, manifests, bar),
                strict=True,
            )
        )
        # leave out checkpoints that a run has deleted meanwhile
        if any(one.problems for one in found.values()):
            left = {manifest.folder for manifest in generations.read()[0]}
            found = {
                folder: one for folder, one in found.items() if not one.problems or folder in left
            }
            if left and not found:
                continue
        return [*found.values(), *([Verified(None, problems)] if problems else [])]


def _read(store: Files, manifests: list[Manifest], bar: Callable[..., Any]) -> list[Verified]:
    groups = {group.folder: group for manifest in manifests for group in manifest.groups}
    wrong: dict[str, str | None] = {}
    found = []
    with bar("verify", len(groups) + len(manifests), unit="part") as told:
        for folder, group in groups.items():
            wrong[folder] = problem_of_group(store, group)
            told.update(1)
        for manifest in manifests:
            own = [
                _problem(store, "rest", manifest.folder, manifest.seals),
                *(wrong[group.folder] for group in manifest.groups),
            ]
            found.append(Verified(manifest.step, [problem for problem in own if problem]))
            told.update(1)
    return found


def _problem(store: Files, kind: str, folder: str, seals: dict[str, list[int]]) -> str | None:
    try:
        for leaf, own in seals.items():
            check_files(store, array_name(kind, folder, leaf), own)
    except CorruptCheckpointError as error:
        return str(error)
    finally:
        store.forget(f"{kind}/{folder}")
    return None

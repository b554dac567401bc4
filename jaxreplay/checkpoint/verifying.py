"""Whether what is stored is still as it was written."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.store import array_name
from jaxreplay.checkpoint.zarr_arrays import check_files


class Verified(NamedTuple):
    """A generation whose files were all read."""

    step: int | None  # None of those whose manifests cannot be read
    # nothing, where it is whole; else each file that is missing or damaged, or the first of a group
    # of rows
    problems: list[str]


def problem_of_group(store: Files, group: Group) -> str | None:
    """What is wrong with the files of a group; None, if nothing is. All of them are read."""
    return _problem(store, "rows", group.folder, group.seals)


def verified(store: Files, generations: Generations, bar: Callable[..., Any]) -> list[Verified]:
    """What is wrong with each generation, the newest first. Files that they share are read once.

    Args:
      bar: makes a progress bar of a title, a total and a unit.
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
        # of those that a run has deleted meanwhile nothing is known
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

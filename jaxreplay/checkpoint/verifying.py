"""Verification: compare stored files with their checksums."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxreplay.checkpoint import arrays, schema
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.planning import Plan

_LITTLE = 8 * 2**20  # bytes that any save may read
_SAVES = 4  # saves after which a larger group is checked, even if they wrote little


class Verified(NamedTuple):
    """Result of verifying one checkpoint.

    Attributes:
      step: The checkpoint's step. None for the entry that collects all unreadable manifests.
      problems: One line for each missing or damaged file (of a group of rows only for the first
        one); empty if the checkpoint is intact.
    """

    step: int | None
    problems: list[str]


def damaged_groups(store: Files, manifest: Manifest) -> dict[str, str]:
    """Read all groups. Return the first problem of each damaged one, by its folder."""
    found = {group.folder: problem_of_group(store, manifest, group) for group in manifest.groups}
    return {folder: problem for folder, problem in found.items() if problem}


def problem_of_group(store: Files, manifest: Manifest, group: Group) -> str | None:
    """Read all files of a group, and return the first problem, or None if it is intact."""
    ndims = {leaf.array: 1 + len(leaf.shape) for leaf in manifest.leaves}
    return _problem(
        store,
        (
            (arrays.array_name("rows", group.folder, name), ndims.get(name, 1), [checksum])
            for name, checksum in group.checksums.items()
        ),
    )


def _problem(store: Files, found: Iterable[tuple[str, int, list[int]]]) -> str | None:
    """Return the first problem of arrays, given by their names, numbers of axes, and the checksums
    of their chunks."""
    try:
        for name, ndim, checksums in found:
            for number, checksum in enumerate(checksums):
                arrays.checked(store, arrays.chunk_name(name, ndim, number), checksum)
    except CorruptCheckpointError as error:
        return str(error)
    return None


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
    wrong: dict[str, str | None] = {}
    found = []
    groups = {group.folder: (one, group) for one in manifests for group in one.groups}
    with bar("verify", len(groups) + len(manifests), unit="part") as told:
        for folder, (manifest, group) in groups.items():
            wrong[folder] = problem_of_group(store, manifest, group)
            told.update(1)
        for manifest in manifests:
            rest = (
                (
                    arrays.array_name("rest", manifest.folder, name),
                    len(schema.dtype_and_shape(name, manifest.rest.get(name, "bool[]"))[1]),
                    sums[1:],
                )
                for name, sums in manifest.chunks.items()
            )
            own = [_problem(store, rest), *(wrong[group.folder] for group in manifest.groups)]
            found.append(Verified(manifest.step, [problem for problem in own if problem]))
            told.update(1)
    return found


class Rounds:
    """Checks of the groups that a new checkpoint shares with older ones, so that damage is found
    while the buffer still has the rows: one group at a save, in turn.

    A large group waits until as many bytes were written as it has, or for the fourth save. So small
    saves do not read large groups each time.
    """

    def __init__(self, store: Files):
        self._store = store
        # folders of groups; a checked or new group goes to the end
        self._turns: list[str] = []
        self._num_saves = self._num_bytes = 0  # since the last check

    def look(self, plan: Plan) -> dict[str, str]:
        """Return the problem of a damaged group, by its folder: empty if the checked group is
        intact or no group is due."""
        groups = {group.folder: group for group in plan.kept}
        if not groups:
            return {}
        before = [folder for folder in self._turns if folder in groups]
        self._turns = [*before, *sorted(groups.keys() - set(before))]
        group = groups[self._turns[0]]
        self._num_saves, self._num_bytes = self._num_saves + 1, self._num_bytes + plan.num_bytes
        if (
            self._num_saves < _SAVES
            and max(self._num_bytes, _LITTLE) < group.num_rows * plan.row_bytes
        ):
            return {}
        self._num_saves = self._num_bytes = 0
        if problem := problem_of_group(self._store, plan.draft, group):
            return {group.folder: problem}
        self._turns = [*self._turns[1:], group.folder]
        return {}

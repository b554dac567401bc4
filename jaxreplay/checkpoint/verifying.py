"""Verification: compare stored files with their checksums."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxreplay.checkpoint import bundle
from jaxreplay.checkpoint.bundle import Sums
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files


class Verified(NamedTuple):
    """Result of verifying one checkpoint.

    Attributes:
      step: The checkpoint's step. None for the entry that collects all unreadable manifests.
      problems: One line for each missing or damaged file; empty if the checkpoint is intact.
    """

    step: int | None
    problems: list[str]


def problems_of(
    store: Files, files: Mapping[str, Sums], note: Callable[[int], Any] = lambda num_read: None
) -> dict[str, str]:
    """Read files. Return the problem of each damaged one, by its name."""
    found = {}
    for name, sums in files.items():
        try:
            bundle.checked(store, name, sums)
        except CorruptCheckpointError as error:
            found[name] = str(error)
        note(1)
    return found


def verified(store: Files, bar: Callable[..., Any]) -> list[Verified]:
    """Verify each checkpoint, newest first. Files that several share are read once.

    Args:
      bar: Makes a progress bar, as the function that `checkpointer.bars` returns.
    """
    chain = Chain(store)
    while True:
        manifests, unreadable = chain.read()
        every = {name: sums for one in manifests for name, sums in one.sums().items()}
        with bar(desc="verify", total=len(every), unit="file") as told:
            wrong = problems_of(store, every, told.update)
        found = {
            one.folder: Verified(one.step, [wrong[name] for name in one.sums() if name in wrong])
            for one in manifests
        }
        # leave out checkpoints that a run has deleted meanwhile
        left = {one.folder for one in chain.read()[0]} if wrong else {*found}
        kept = [one for folder, one in found.items() if not one.problems or folder in left]
        if kept or not left:
            return [*kept, *([Verified(None, unreadable)] if unreadable else [])]

"""Files of a save: the caller's thread gathers the arrays of one file after another, and threads
write them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint import bundle, rows
from jaxreplay.checkpoint.bundle import Sums
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.threads import in_turn

_WRITERS = 3  # threads: one alone does not keep a disk busy


class NewFile(NamedTuple):
    """A file to write."""

    name: str
    arrays: Any  # pytree
    num_rows: int | None = None  # rows that are written of each array; None for all
    spare: list[Any] | None = None  # gets the arrays afterwards, whose memory may be used again


def written(store: Files, level: int | None, bar: Any, files: Iterable[NewFile]) -> dict[str, Sums]:
    """Write files, each of which is made when there is room for it.

    Args:
      store: The store to write to.
      level: Level of zstd compression, or None.
      bar: Progress bar, of bytes.
      files: The files.

    Returns:
      What the manifest will say of each file, by its name.
    """
    sums: dict[str, Sums] = {}

    def write(file: NewFile) -> tuple[NewFile, Sums, int]:
        own = {key: rows.on_host(leaf) for key, leaf in named(file.arrays)}
        if file.num_rows is not None:
            own = {key: leaf[: file.num_rows] for key, leaf in own.items()}
        content, its_sums = bundle.packed(own, level)
        store.write(file.name, content)
        return file, its_sums, sum(leaf.nbytes for leaf in own.values())

    def note(result: tuple[NewFile, Sums, int]) -> None:
        file, sums[file.name], num_bytes = result
        if file.spare is not None:
            file.spare.append(file.arrays)
        with defer_interrupts():
            bar.update(num_bytes)

    in_turn(write, files, note, _WRITERS)
    with defer_interrupts():
        bar.close()
    return sums

"""The checkpoints under a path: list, commit, and delete what is no longer needed."""

import re
import secrets
import warnings
from collections.abc import Iterable

from jaxreplay.checkpoint.files import MOST_BYTES, CorruptCheckpointError, Files, MissingError
from jaxreplay.checkpoint.manifest import Manifest, checksum_of

# Files with other names are never deleted. Format 1 had no second part.
_OWN = re.compile(r"([0-9]{10})(-[0-9a-f]{8})?(-[0-9]{6}|\.json.*)?")
_MANIFEST = re.compile(r"[0-9]{10}(-[0-9a-f]{8})?\.json")
_TRIES = 20


class Generations:
    """Checkpoints under a path. Each becomes visible with its manifest, which is written last."""

    def __init__(self, store: Files, max_to_keep: int):
        self._store, self._keep = store, max_to_keep
        # part of file names, so that two runs never use the same ones
        self._run = secrets.token_hex(4)
        self._number = 0  # the last one used in a name
        # checksums and manifests of the last `read`, by file name
        self._known: dict[str, tuple[bytes, Manifest]] = {}
        # files and folders, by kind; None if others may have written since they were listed
        self._listed: dict[str, set[str]] | None = None

    def read(self) -> tuple[list[Manifest], list[str]]:
        """Read all manifests.

        Returns:
          The manifests, newest first, one for each step; and a line for each damaged one.

        Raises:
          OSError: A manifest cannot be read at the moment; it may be intact.
          ValueError: A manifest has another format.
        """
        names, tries = self._manifests(), 0
        while True:
            found: dict[int, Manifest] = {}
            problems, is_gone = [], False
            for name in names:
                try:
                    manifest = self._manifest(f"manifests/{name}")
                    found.setdefault(manifest.step, manifest)
                except CorruptCheckpointError as error:
                    # If it was deleted since it was listed, a newer one has replaced it: list
                    # again. (A name may also be listed without a file, such as a broken link.)
                    is_gone |= isinstance(error, MissingError)
                    problems.append(str(error))
            before, tries = names, tries + 1
            if not is_gone or tries == _TRIES or (names := self._manifests()) == before:
                self._known = {
                    name: known
                    for name, known in self._known.items()
                    if name.removeprefix("manifests/") in before
                }
                return list(found.values()), problems

    def _manifest(self, name: str) -> Manifest:
        """Read a manifest's file each time, since it may be damaged meanwhile; parse it once."""
        content = self._store.get(name)
        checksum, (known, manifest) = checksum_of(name, content), self._known.get(name, (b"", None))
        if manifest is None or checksum != known:
            manifest = Manifest.from_bytes(name, content)
            self._known[name] = checksum, manifest
        return manifest

    def _manifests(self) -> list[str]:
        """Return the manifests' names, newest first."""
        return [
            name for name in reversed(self._store.entries("manifests")) if _MANIFEST.fullmatch(name)
        ]

    def next_folder(self) -> str:
        """Return a folder name that sorts after all manifests and all folders of this run."""
        numbers = (
            int(own[1])
            for name in self._store.entries("manifests")
            if (own := _OWN.fullmatch(name))
        )
        self._number = 1 + max(self._number, *numbers, 0)
        return f"{self._number:010}-{self._run}"

    def commit(self, manifest: Manifest) -> None:
        """Write a manifest, which makes its checkpoint visible, and read it back.

        Older checkpoints are deleted only after this.

        Raises:
          ValueError: The manifest is too large to be read, or holds values that cannot be read.
          CorruptCheckpointError: The store returns other bytes than were written.
        """
        name, content = f"manifests/{manifest.folder}.json", manifest.to_bytes()
        if len(content) > MOST_BYTES:
            raise ValueError(
                f"save: the manifest would have {len(content):,} bytes, more than the limit of "
                f"{MOST_BYTES:,} bytes"
            )
        self._known[name] = checksum_of(name, content), Manifest.from_bytes(name, content)
        self._store.check_claim()
        self._store.put(name, content, after=("rest", "rows"))
        if self._store.get(name) != content:
            raise CorruptCheckpointError(f"{name} is not as it was written")

    def forget(self) -> None:
        """Make the next `collect` list the store again: others may have written, or a save has left
        files."""
        self._listed = None

    def collect(self, generations: Iterable[Manifest], base: Manifest | None) -> None:
        """Delete older checkpoints, and files that incomplete saves have left.

        A file that cannot be deleted now stays until the next call, with a warning.

        Args:
          generations: All manifests, newest first; the newest `max_to_keep` are kept.
          base: A manifest to keep in any case, or None.
        """
        kept = [*list(generations)[: self._keep], *([] if base is None else [base])]
        used = {
            "manifests": {f"{manifest.folder}.json" for manifest in kept},
            "rest": {manifest.folder for manifest in kept},
            "rows": {group.folder for manifest in kept for group in manifest.groups},
        }
        # List before the claim is checked: files that another writer adds afterwards are not listed
        # and so not deleted. The list is kept, since only this writer adds files from then on, and
        # listing an object store may take hundreds of requests.
        if self._listed is None:
            self._listed = {kind: set(self._store.entries(kind)) for kind in used}
        self._store.check_claim()
        for kind, names in used.items():  # manifests first: each needs the files that it names
            for name in sorted(self._listed[kind] - names):
                if _OWN.fullmatch(name):
                    try:
                        self._store.delete(f"{kind}/{name}")
                        self._listed[kind].discard(name)
                    except (OSError, ValueError, RuntimeError) as error:
                        warnings.warn(
                            f"{kind}/{name} is no longer needed, but cannot be deleted: {error}",
                            stacklevel=2,
                        )
            self._listed[kind] |= names

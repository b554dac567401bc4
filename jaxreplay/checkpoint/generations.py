"""The generations under a path: which there are, which stay, and what belongs to none of them."""

import re
import secrets
import warnings
from collections.abc import Iterable

from jaxreplay.checkpoint.files import MOST_BYTES, CorruptCheckpointError, Files, MissingError
from jaxreplay.checkpoint.manifest import Manifest, checksum_of

# What is named otherwise is somebody else's. Format 1 had no second part.
_OWN = re.compile(r"([0-9]{10})(-[0-9a-f]{8})?(-[0-9]{6}|\.json.*)?")
_MANIFEST = re.compile(r"[0-9]{10}(-[0-9a-f]{8})?\.json")
_TRIES = 20


class Generations:
    """Each is there once its manifest is, which is written last."""

    def __init__(self, store: Files, max_to_keep: int):
        self._store, self._keep = store, max_to_keep
        # in the names of its files, so that no two runs' are alike
        self._run = secrets.token_hex(4)
        self._number = 0  # the last one that was in a name
        # by the names of those that were read last, with their checksums
        self._known: dict[str, tuple[bytes, Manifest]] = {}
        # files and folders, by kind; None where another one may have written since
        self._listed: dict[str, set[str]] | None = None

    def read(self) -> tuple[list[Manifest], list[str]]:
        """Those that are committed, the newest first, one for each step; and what is wrong with
        others.

        Where a manifest cannot be read now, and so nothing is known of it, that is an error.
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
                    # Deleted since it was listed, for a newer one: then that is to be read. (A name
                    # may also stand for nothing.)
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
        """Read the file each time, since it may be damaged meanwhile, and parse it once."""
        content = self._store.get(name)
        checksum, (known, manifest) = checksum_of(name, content), self._known.get(name, (b"", None))
        if manifest is None or checksum != known:
            manifest = Manifest.from_bytes(name, content)
            self._known[name] = checksum, manifest
        return manifest

    def _manifests(self) -> list[str]:
        """Names, the newest first."""
        return [
            name for name in reversed(self._store.entries("manifests")) if _MANIFEST.fullmatch(name)
        ]

    def next_folder(self) -> str:
        """Later in the order of names than any manifest, and than any folder of this run."""
        numbers = (
            int(own[1])
            for name in self._store.entries("manifests")
            if (own := _OWN.fullmatch(name))
        )
        self._number = 1 + max(self._number, *numbers, 0)
        return f"{self._number:010}-{self._run}"

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes it a generation, and read it back: nothing older is
        deleted before that.

        Raises:
          ValueError: this library could not read the manifest. CorruptCheckpointError: the store
            gives other bytes back.
        """
        name, content = f"manifests/{manifest.folder}.json", manifest.to_bytes()
        if len(content) > MOST_BYTES:
            raise ValueError(
                f"save: the manifest would have {len(content):,} bytes, more than the "
                f"{MOST_BYTES:,} that are read"
            )
        self._known[name] = checksum_of(name, content), Manifest.from_bytes(name, content)
        self._store.check_claim()
        self._store.put(name, content, after=("rest", "rows"))
        if self._store.get(name) != content:
            raise CorruptCheckpointError(f"{name} is not as it was written")

    def forget(self) -> None:
        """Have the next `collect` list what is there: others may write meanwhile, or a save has
        left files."""
        self._listed = None

    def collect(self, generations: Iterable[Manifest], base: Manifest | None) -> None:
        """Delete what neither the newest ones have nor `base`: older ones, and what saves that
        ended on the way have left.

        What cannot be deleted now stays until the next time, with a warning.
        """
        kept = [*list(generations)[: self._keep], *([] if base is None else [base])]
        used = {
            "manifests": {f"{manifest.folder}.json" for manifest in kept},
            "rest": {manifest.folder for manifest in kept},
            "rows": {group.folder for manifest in kept for group in manifest.groups},
        }
        # Listed before it is known that nobody else writes here: what another one has written since
        # is not in these. Later on there is nothing more than what this one wrote: of what a far
        # store has, a listing may be hundreds of requests.
        if self._listed is None:
            self._listed = {kind: set(self._store.entries(kind)) for kind in used}
        self._store.check_claim()
        for kind, names in used.items():  # manifests first: none may lack what it names
            for name in sorted(self._listed[kind] - names):
                if _OWN.fullmatch(name):
                    try:
                        self._store.delete(f"{kind}/{name}")
                        self._listed[kind].discard(name)
                    except (OSError, ValueError, RuntimeError) as error:
                        warnings.warn(
                            f"{kind}/{name} is not needed any more, but cannot be deleted: {error}",
                            stacklevel=2,
                        )
            self._listed[kind] |= names

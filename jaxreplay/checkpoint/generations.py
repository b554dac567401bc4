"""The generations under a path: which there are, which stay, and what belongs to none of them."""

import re
import secrets
import warnings
from collections.abc import Iterable

from jaxreplay.checkpoint.files import BrokenError, Files
from jaxreplay.checkpoint.manifest import Manifest

# What is named otherwise is somebody else's. Format 1 had no second part.
_OWN = re.compile(r"([0-9]{10})(-[0-9a-f]{8})?(-[0-9]{6}|\.json.*)?")
_MANIFEST = re.compile(r"[0-9]{10}(-[0-9a-f]{8})?\.json")
_TRIES = 20


class Generations:
    """Each is there once its manifest is, which is written last."""

    def __init__(self, store: Files, keep: int):
        self._store, self._keep = store, keep
        self._run = secrets.token_hex(4)  # in the names of its files, so that no two runs' are alike

    def read(self) -> tuple[list[Manifest], list[str]]:
        """Those that are committed, the newest first, one for each step; and what is wrong with others.

        Where a manifest cannot be read now, and so nothing is known of it, that is an error.
        """
        names, tries = self._manifests(), 0
        while True:
            found: dict[int, Manifest] = {}
            problems, is_gone = [], False
            for name in names:
                try:
                    manifest = Manifest.from_bytes(f"manifests/{name}", self._store.get(f"manifests/{name}"))
                    found.setdefault(manifest.step, manifest)
                except BrokenError as error:
                    # Deleted since it was listed, for a newer one: then that is to be read. (A name may also stand for nothing.)
                    is_gone |= str(error) == f"manifests/{name} is missing"
                    problems.append(str(error))
            before, tries = names, tries + 1
            if not is_gone or tries == _TRIES or (names := self._manifests()) == before:
                return list(found.values()), problems

    def _manifests(self) -> list[str]:
        """Names, the newest first."""
        return [name for name in reversed(self._store.entries("manifests")) if _MANIFEST.fullmatch(name)]

    def next_folder(self) -> str:
        """Later in the order of names than any that is there."""
        names = [name for kind in ("manifests", "rest", "rows") for name in self._store.entries(kind)]
        number = 1 + max((int(own[1]) for name in names if (own := _OWN.fullmatch(name))), default=0)
        return f"{number:010}-{self._run}"

    def commit(self, manifest: Manifest) -> None:
        self._store.check_claim()
        self._store.put(f"manifests/{manifest.folder}.json", manifest.to_bytes(), after=("rest", "rows"))

    def collect(self, generations: Iterable[Manifest], base: Manifest | None) -> None:
        """Delete what neither the newest ones have nor `base`: older ones, and what saves that ended on the way have left.

        What cannot be deleted now stays until the next time, with a warning.
        """
        kept = [*list(generations)[: self._keep], *([] if base is None else [base])]
        used = {
            "manifests": {f"{manifest.folder}.json" for manifest in kept},
            "rest": {manifest.folder for manifest in kept},
            "rows": {group.folder for manifest in kept for group in manifest.groups},
        }
        # Listed before it is known that nobody else writes here: what another one has written since is not in these.
        listed = {kind: self._store.entries(kind) for kind in used}
        self._store.check_claim()
        for kind, names in used.items():  # manifests first: none may lack what it names
            for name in listed[kind]:
                if name not in names and _OWN.fullmatch(name):
                    try:
                        self._store.delete(f"{kind}/{name}")
                    except (OSError, ValueError, RuntimeError) as error:
                        warnings.warn(f"{kind}/{name} is not needed any more, but cannot be deleted: {error}", stacklevel=2)

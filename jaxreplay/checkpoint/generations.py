"""The generations under a path: which there are, which stay, and what belongs to none of them."""

import re
import warnings
from collections.abc import Iterable

from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.store import BrokenError, Store

_OWN = re.compile(r"([0-9]{10})(-[0-9]{6}|\.json.*)?")  # what is named otherwise is somebody else's


class Generations:
    """Each is there once its manifest is, which is written last."""

    def __init__(self, store: Store, keep: int):
        self._store, self._keep = store, keep

    def read(self) -> tuple[list[Manifest], list[str]]:
        """Those that are committed, the newest first, one for each step; and what is wrong with others.

        Where a manifest cannot be read now, and so nothing is known of it, that is an error.
        """
        found: dict[int, Manifest] = {}
        problems = []
        for name in reversed(self._store.entries("manifests")):
            if re.fullmatch(r"[0-9]{10}\.json", name):
                try:
                    manifest = Manifest.from_bytes(f"manifests/{name}", self._store.get(f"manifests/{name}"))
                    found.setdefault(manifest.step, manifest)
                except BrokenError as error:
                    problems.append(str(error))
        return list(found.values()), problems

    def next_folder(self) -> str:
        """Later in the order of names than any that is there."""
        names = [name for kind in ("manifests", "rest", "rows") for name in self._store.entries(kind)]
        return f"{1 + max((int(own[1]) for name in names if (own := _OWN.fullmatch(name))), default=0):010}"

    def commit(self, manifest: Manifest) -> None:
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
        for kind, names in used.items():  # manifests first: none may lack what it names
            for name in self._store.entries(kind):
                if name not in names and _OWN.fullmatch(name):
                    try:
                        self._store.delete(f"{kind}/{name}")
                    except (OSError, ValueError, RuntimeError) as error:
                        warnings.warn(f"{kind}/{name} is not needed any more, but cannot be deleted: {error}", stacklevel=2)

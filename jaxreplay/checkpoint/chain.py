"""The chain of checkpoints under a path, which is also the lock of its writers.

A checkpoint becomes visible with its manifest, which is written last. Manifests are numbered, and
each number is created once: of two writers that save at the same time, the second gets an error. A
writer that has neither written nor restored the newest one is refused. All other files carry the
number, and a token of their save, in their names. Once there is a manifest of that number, or of a
later one, a file that no kept manifest names is garbage.
"""

import contextlib
import datetime
import errno
import os
import re
import secrets
import socket
import sys
import warnings
import zlib
from collections.abc import Callable, Collection

from jaxreplay._util.names import printable
from jaxreplay.checkpoint.files import (
    MOST_BYTES,
    CorruptCheckpointError,
    Files,
    MissingError,
    PathInUseError,
    new_memory,
)
from jaxreplay.checkpoint.manifest import Manifest

_KINDS = ("manifests", "rest", "rows")
# Files with other names are never deleted.
_OWN = re.compile(
    r"(?:manifests/([0-9]{10})\.json.*|(?:rest|rows)/([0-9]{10})-[0-9a-f]{8}-[0-9]{6}\.safetensors.*)"
)
_MANIFEST = re.compile(r"manifests/([0-9]{10})\.json")
_TRIES = 20


def whoami() -> dict[str, str]:
    """Describe this process for the errors of other processes."""
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "program": program,
        "since": since,
    }


class Chain:
    """Checkpoints under a path, and this writer among others.

    Args:
      store: The files.
    """

    def __init__(self, store: Files):
        self.store = store
        # contents' sizes and checksums, and manifests, by file name
        self._known: dict[str, tuple[int, int, Manifest]] = {}
        self._found: list[Manifest] = []  # of the last `read` or `commit`, newest first
        # files; None if others may have written since they were listed
        self._listed: set[str] | None = None
        # names of the newest manifest at the last `read`, and of the newest one that this writer
        # continues; "" for none
        self.newest_read = self.seen = ""
        self._asked = ""  # folder of the last checkpoint that the store was asked to commit

    def read(self, again: bool = True) -> tuple[list[Manifest], list[str]]:
        """Read all manifests.

        Args:
          again: Whether to read those again that were read before, since they may be damaged
            meanwhile. If not, and the newest one is as it was, the others are not read. Default:
            True.

        Returns:
          The manifests, newest first, one for each step; and a line for each damaged one.

        Raises:
          OSError: A manifest cannot be read at the moment; it may be intact.
          ValueError: A manifest has another format.
        """
        names, tries = self._manifests(), 0
        known = {} if again else dict(self._known)
        while True:
            found: dict[int, Manifest] = {}
            problems, is_gone = [], False
            for name in names:
                _, _, before = known.get(name, (0, 0, None))
                try:
                    manifest = before if found and before else self._manifest(name)
                    if manifest is not before:  # others may be new, too
                        known = {}
                    found.setdefault(manifest.step, manifest)
                except CorruptCheckpointError as error:
                    # If it was deleted since it was listed, a newer one has replaced it: list
                    # again. (A name may also be listed without a file, such as a broken link.)
                    is_gone |= isinstance(error, MissingError)
                    problems.append(str(error))
            listed, tries = names, tries + 1
            if not is_gone or tries == _TRIES or (names := self._manifests()) == listed:
                self._known = {name: one for name, one in self._known.items() if name in listed}
                self.newest_read = max(listed, default="")
                if self.newest_read < self.seen:
                    problems.append(f"{self.seen}, written or read here, is gone")
                self._found = [*found.values()]
                return self._found, problems

    def _manifest(self, name: str) -> Manifest:
        """Read a manifest's file each time; parse it once."""
        if name in self._known:
            size, checksum, manifest = self._known[name]
            with contextlib.suppress(CorruptCheckpointError):
                if zlib.crc32(self.store.read(name, size, new_memory, True).data) == checksum:
                    return manifest
        content = self.store.read(name, MOST_BYTES).tobytes()
        manifest = Manifest.from_bytes(name, content)
        self._known[name] = len(content), zlib.crc32(content), manifest
        return manifest

    def _manifests(self) -> list[str]:
        """Return the manifests' names, newest first."""
        names = self.store.entries("manifests")
        return [name for name in reversed(names) if _MANIFEST.fullmatch(name)]

    def enter(self, overwrite: bool) -> tuple[str, list[Manifest]]:
        """Begin a save. Return the name of the new checkpoint's folder, and the manifests.

        Args:
          overwrite: Whether another writer's checkpoints may be replaced.

        Raises:
          PathInUseError: Another writer has written the newest checkpoint.
        """
        found, _ = self.read(False)
        if overwrite:
            self.seen = self.newest_read
        self._check_newest(self.seen, self.newest_read)
        newest = _MANIFEST.fullmatch(self.newest_read)
        return f"{int(newest[1]) + 1 if newest else 1:010}-{secrets.token_hex(4)}", found

    def commit(self, manifest: Manifest) -> None:
        """Create a manifest, which makes its checkpoint visible, and read it back.

        Older checkpoints are deleted only after this.

        Raises:
          ValueError: The manifest is too large to be read, or holds values that cannot be read.
          CorruptCheckpointError: The store returns other bytes than were written.
          OSError: The path was deleted meanwhile.
          PathInUseError: Another writer was faster.
        """
        name, content = manifest.name, manifest.to_bytes()
        if len(content) > MOST_BYTES:
            raise ValueError(
                f"save: the manifest would have {len(content):,} bytes, more than the limit of "
                f"{MOST_BYTES:,} bytes"
            )
        self._known[name] = len(content), zlib.crc32(content), Manifest.from_bytes(name, content)
        if missing := self.store.missing(manifest.sums()):
            self._check_newest(self.newest_read)  # one that was faster may have deleted it
            raise OSError(
                errno.ENOENT,
                f"{missing[0]} is missing: {self.store.name} was deleted, or replaced, while it "
                "was written to, or is another place for each process",
            )
        self._asked = manifest.folder
        is_created = self.store.create(name, content)
        found, most = b"", len(content) if is_created else MOST_BYTES
        with contextlib.suppress(MissingError):  # others may have deleted it since
            found = self.store.read(name, most, new_memory, is_created).tobytes()
        if is_created and found not in (b"", content):
            raise CorruptCheckpointError(f"{name} is not as it was written")
        # The answer to a request may be lost: it is this writer's, if its content is.
        is_own = found == content
        try:
            self._check_newest(name if is_own else self.newest_read)
        except PathInUseError:
            if is_own:  # the number of a checkpoint that the other one has deleted
                self.store.delete(name)
                self._asked = ""
            raise
        self.seen = name
        self._found = [manifest, *(one for one in self._found if one.step != manifest.step)]

    def _check_newest(self, last: str, newest: str | None = None) -> None:
        """Raise a PathInUseError if there is a later manifest than `last`: another writer's.

        Args:
          last: Name of a manifest; "" for none.
          newest: Name of the newest manifest. Default: the newest in a new list.
        """
        newest = max(self._manifests(), default="") if newest is None else newest
        if newest > last:
            writer: dict[str, str] = {}
            with contextlib.suppress(CorruptCheckpointError):
                manifest = self._manifest(newest)
                if manifest.folder == self._asked:  # whose answer was lost
                    self.seen = newest
                    return
                writer = manifest.writer
            raise _held_by(self.store.name, writer)

    def abandon(self, folder: str) -> None:
        """Delete the files of a save that failed, as far as that can be done now."""
        self._listed = None  # a later save deletes the others
        if folder and folder != self._asked:  # the store may still commit what it was asked to
            for kind in _KINDS[1:]:
                with contextlib.suppress(Exception):
                    for name in self.store.entries(kind):
                        if name.startswith(f"{kind}/{folder}"):
                            self.store.delete(name)

    def collect(
        self, keep: int | Callable[[], Collection[int]], base: Manifest | None = None
    ) -> None:
        """Delete older checkpoints, and files that incomplete saves have left, after a `read`.

        A file that cannot be deleted now stays until the next call, with a warning.

        Args:
          keep: Number of newest checkpoints to keep, or a function that returns the steps to keep
            beside the newest one.
          base: A manifest to keep beside these. Default: none.
        """
        # The list is kept: this writer knows what it adds, and listing an object store may take
        # hundreds of requests.
        if self._listed is None:
            self._listed = {name for kind in _KINDS for name in self.store.entries(kind)}
        num, steps = (1, keep()) if callable(keep) else (keep, ())
        kept = self._found[:num] + [one for one in self._found[num:] if one.step in steps]
        kept += [] if base is None else [base]
        newest = max((manifest.folder[:10] for manifest in kept), default="")
        named = {name for manifest in kept for name in (manifest.name, *manifest.sums())}
        for name in sorted(self._listed - named):  # manifests first: each needs its files
            own = _OWN.fullmatch(name)
            if own is not None and name not in named and (own[1] or own[2]) <= newest:
                try:
                    self.store.delete(name)
                    self._listed.discard(name)
                except (OSError, ValueError, RuntimeError) as error:
                    if name in self._known:  # a manifest that stays needs the files it names
                        named |= self._known[name][-1].sums().keys()
                    warnings.warn(
                        f"{name} is no longer needed, but cannot be deleted: {error}", stacklevel=2
                    )
        self._listed |= named


def _held_by(where: str, writer: dict[str, str]) -> PathInUseError:
    """Return the error for a second writer. `writer`: the first writer's `whoami()`."""
    known = {name: printable(str(value)[:100]) for name, value in writer.items()}
    who = ", ".join(f"{name} {value}" for name, value in known.items()) or "an unknown process"
    mine = whoami()
    is_own = (known.get("host"), known.get("pid")) == (mine["host"], mine["pid"])
    return PathInUseError(
        f"{where} has a newer checkpoint, by {'this process, ' if is_own else ''}{who}; two runs "
        "would delete each other's: restore it first, to go on from it, give each run a path of "
        "its own, or pass overwrite=True to replace it"
    )

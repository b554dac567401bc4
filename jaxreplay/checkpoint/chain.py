"""The chain of checkpoints under a path, which is also the lock of its writers.

A checkpoint becomes visible with its manifest, which is written last. Manifests are numbered, and
each number is created once: of two writers that save at the same time, the second gets an error.
All other files carry the number and the token of their writer in their names. A file that no kept
manifest names is garbage if its writer is gone, or if there is a manifest two numbers later.

A writer has a file that tells others who it is, from its first save until it is closed.
"""

import contextlib
import datetime
import errno
import json
import os
import re
import secrets
import socket
import sys
import warnings
import weakref
from typing import Any

from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint.files import (
    MOST_BYTES,
    CorruptCheckpointError,
    Files,
    MissingError,
    PathInUseError,
)
from jaxreplay.checkpoint.manifest import Manifest, checksum_of, manifest_name

# Files with other names are never deleted.
_OWN = re.compile(r"(?:manifests|rest|rows)/([0-9]{10})(?:-([0-9a-f]{8}))?(-[0-9]{6}|\.json.*)?")
_MANIFEST = re.compile(r"[0-9]{10}(-[0-9a-f]{8})?\.json")
_TRIES = 20
_PROCESS = secrets.token_hex(8)  # the system may reuse a process's pid
_OURS: set[str] = set()  # tokens of this process's writers that have not left
_GONE: dict[str, Any] = {}  # in place of a holder that is gone


def whoami() -> dict[str, Any]:
    """Describe this process for the errors of other processes."""
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    return {"host": socket.gethostname(), "pid": os.getpid(), "program": program, "since": since}


class Chain:
    """Checkpoints under a path, and this writer among others.

    Args:
      store: The files.
      max_to_keep: Number of newest checkpoints to keep.
    """

    def __init__(self, store: Files, max_to_keep: int):
        self._store, self._keep = store, max_to_keep
        # A save that failed may leave files, so the next one has another token. Only the last one
        # is in use.
        self._tokens: list[str] = []
        # checksums and manifests of the last `read`, by file name
        self._known: dict[str, tuple[bytes, Manifest]] = {}
        # files and folders; None if others may have written since they were listed
        self._listed: set[str] | None = None
        self._newest_read = 0  # number of the newest manifest at the last `read`
        self._pid = os.getpid()
        weakref.finalize(self, _leave, store, self._tokens, self._pid)

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
                self._newest_read = max((int(name[:10]) for name in before), default=0)
                return list(found.values()), problems

    def _manifest(self, name: str) -> Manifest:
        """Read a manifest's file each time, since it may be damaged meanwhile; parse it once."""
        content = self._store.read(name, MOST_BYTES).tobytes()
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

    def _newest(self) -> int:
        return max((int(name[:10]) for name in self._manifests()), default=0)

    def enter(self, newest: Manifest | None, is_successor: bool) -> str:
        """Begin a save, as the one writer of the path, after a `read`.

        Args:
          newest: The newest checkpoint.
          is_successor: Whether this writer continues that checkpoint. It may then take the place of
            a writer on another machine, which may be dead or alive.

        Returns:
          The name of the new checkpoint's folder.

        Raises:
          PathInUseError: Another writer has written the newest checkpoint, and is still there.
        """
        with defer_interrupts():
            if newest is not None and newest.writer not in self._tokens:
                holder = self._holder(newest.writer)
                if holder is not _GONE and (_is_here(holder) or not is_successor):
                    raise _held_by(self._store.name, holder)
                self._store.delete(_file_of(newest.writer))
            if not self._tokens:
                self._tokens.append(secrets.token_hex(4))
            content = json.dumps(whoami() | {"process": _PROCESS}).encode()
            _OURS.add(self._tokens[-1])
            self._store.create(_file_of(self._tokens[-1]), content)
        return f"{self._newest_read + 1:010}-{self._tokens[-1]}"

    def _holder(self, token: str) -> Any:
        """Return who a writer is; `_GONE` if it has left, or its process ended on this machine."""
        try:
            holder = json.loads(self._store.read(_file_of(token), MOST_BYTES).tobytes())
        except MissingError:
            return _GONE
        except ValueError:
            return None
        if not _is_here(holder):
            return holder
        if holder.get("process") == _PROCESS:
            return holder if token in _OURS else _GONE
        pid = holder.get("pid")
        is_there = isinstance(pid, int) and pid != os.getpid() and _is_running(pid)
        return holder if is_there else _GONE

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
        self._known[name] = checksum_of(name, content), Manifest.from_bytes(name, content)
        self.check_newest(manifest.number - 1)
        self.check_entered(manifest.folder, "was deleted, or replaced, while it was written to")
        is_created = self._store.create(name, content)
        found = self._store.read(name, MOST_BYTES).tobytes()
        if is_created and found != content:
            raise CorruptCheckpointError(f"{name} is not as it was written")
        # The answer to a request may be lost: it is this writer's, if its content is. And others
        # may have taken the number, and have deleted it since.
        self.check_newest(manifest.number if found == content else -1)

    def check_newest(self, number: int) -> None:
        """Raise a PathInUseError if there is another writer's manifest of a higher number."""
        if (newest := self._newest()) > number:
            writer = self._manifest(manifest_name(newest)).writer
            if writer not in self._tokens:
                raise _held_by(self._store.name, self._holder(writer))

    def check_entered(self, folder: str, cause: str) -> None:
        """Raise an OSError if this process does not find the file of the writer of a checkpoint.

        Args:
          folder: The checkpoint's folder.
          cause: What is wrong with the path then.
        """
        try:
            self._store.read(_file_of(folder[11:]), MOST_BYTES)
        except MissingError:
            raise OSError(errno.ENOENT, f"{self._store.name} {cause}") from None

    def abandon(self) -> None:
        """Take another token: a save has failed, and may have left files or still write some."""
        self._listed = None
        if self._tokens:
            self._tokens.append(secrets.token_hex(4))

    def leave(self) -> None:
        """Release the path to other writers."""
        self._listed = None
        with defer_interrupts():
            _leave(self._store, self._tokens, self._pid)

    def collect(self, base: Manifest | None = None) -> None:
        """Delete older checkpoints, and files that incomplete saves have left.

        A file that cannot be deleted now stays until the next call, with a warning.

        Args:
          base: A manifest to keep beside the newest `max_to_keep`. Default: none.
        """
        # The list is kept: this writer knows what it adds, and listing an object store may take
        # hundreds of requests.
        if self._listed is None:
            kinds = ("manifests", "rest", "rows")
            self._listed = {
                f"{kind}/{name}" for kind in kinds for name in self._store.entries(kind)
            }
        found = {name: own for name in sorted(self._listed) if (own := _OWN.fullmatch(name))}
        is_gone = {
            token: token in self._tokens or self._holder(token) is _GONE
            for token in {own[2] for own in found.values()} - {None}
        }
        # Read after that: the manifest of a writer who has left is there.
        kept = [*self.read()[0][: self._keep], *([] if base is None else [base])]
        newest = max((manifest.number for manifest in kept), default=0)
        named = {name for manifest in kept for name in manifest.files()}
        for name, own in found.items():  # manifests first: each needs the files that it names
            number, token = int(own[1]), own[2]
            is_late = number + (token is not None) < newest
            if name not in named and (is_late or is_gone.get(token)):
                try:
                    self._store.delete(name)
                    self._listed.discard(name)
                except (OSError, ValueError, RuntimeError) as error:
                    if name in self._known:  # a manifest that stays needs the files it names
                        named |= self._known[name][1].files()
                    warnings.warn(
                        f"{name} is no longer needed, but cannot be deleted: {error}", stacklevel=2
                    )
        self._listed |= named


def _file_of(token: str) -> str:
    return f"writers/{token}.json"


def _leave(store: Files, tokens: list[str], pid: int) -> None:
    """Delete a writer's files, unless this is a forked child."""
    while tokens and pid == os.getpid():
        with contextlib.suppress(Exception):  # others see when the process has ended
            store.delete(_file_of(tokens[-1]))
        _OURS.discard(tokens.pop())


def _held_by(where: str, holder: Any) -> PathInUseError:
    """Return the error for a second writer. `holder`: the first writer's `whoami()`, or whatever
    was read in its place."""
    known = {
        name: str(holder[name])[:100]
        for name in ("host", "pid", "program", "since")
        if isinstance(holder, dict) and name in holder
    }
    who = ", ".join(f"{name} {value}" for name, value in known.items()) or "an unknown process"
    mine = whoami()
    is_own = (known.get("host"), known.get("pid")) == (mine["host"], str(mine["pid"]))
    cure = "close() that Checkpointer first" if is_own else "give each run a path of its own"
    return PathInUseError(
        f"{where} is being written to by {'this process, ' if is_own else ''}{who}; two writers "
        f"would mix their files: {cure}"
    )


def _is_here(holder: Any) -> bool:
    return isinstance(holder, dict) and holder.get("host") == socket.gethostname()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True

"""Files in a store that TensorStore opens, such as a bucket of Google Cloud Storage or S3."""

import contextlib
import functools
import json
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorstore as ts

from jaxreplay.checkpoint.files import CorruptCheckpointError, Files, MissingError
from jaxreplay.checkpoint.lock import held_by, whoami

_WRITER = "writer.json"
_TRANSIENT = (
    *(
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "RESOURCE_EXHAUSTED",
        "CANCELLED",
        "ABORTED",
        "INTERNAL",
    ),
    *("FAILED_PRECONDITION", "UNKNOWN", "UNIMPLEMENTED"),
)
# Enough for a short outage, and then an error with its cause: by default TensorStore retries for a
# quarter of an hour.
_RETRIES = {"max_retries": 6, "initial_delay": "200ms", "max_delay": "8s"}


class Objects(Files):
    """Files of a TensorStore key-value store. Writes and expected reads run in the background.

    Args:
      spec: A URL, an open `ts.KvStore`, or TensorStore's specification of a key-value store, which
        has options that a URL lacks.
      timeout: Seconds that a request may take.
    """

    is_far: ClassVar[bool] = True

    def __init__(self, spec: Any, timeout: float):
        self._timeout = timeout
        if isinstance(spec, str):
            self.name, spec = spec, f"{spec.removesuffix('/')}/"
        elif not isinstance(spec, ts.KvStore):
            path = str(spec.get("path", ""))
            spec = {**spec, "path": path if path.endswith("/") or not path else f"{path}/"}
            place = "/".join(filter(None, (str(spec.get("bucket", "")), path)))
            self.name = f"{spec.get('driver')}://{place}"
        else:
            self.name = spec.url if spec.spec().base is None else str(spec)
        self._files = (
            spec
            if isinstance(spec, ts.KvStore)
            else self._wait("to open it", ts.KvStore.open(spec, context=_context()))
        )
        self._written: dict[str, Any] = {}  # futures, by name
        self._expected: dict[str, Any] = {}
        self._token = secrets.token_hex(8)  # of this writer
        self._claim: bytes | None = None  # version of the file with this writer's claim
        self._has_none = False  # True where the store cannot detect a second writer
        self._must_ask = self.name.lower().startswith("s3:")
        _live[self._token] = self

    def claim(self, is_successor: bool) -> None:
        """Claim the store by a file with this writer's token.

        If the last writer ended without `release`, only its own machine can tell whether it is
        alive. A successor, which has restored its checkpoint, replaces it; any other writer is
        refused. The replaced writer gets an error before its next checkpoint becomes visible.
        """
        if self._has_none:
            return
        holder, version = self._holder()
        if self._claim is not None:
            if holder is None or holder.get("token") != self._token:
                raise held_by(self.name, holder)
        elif is_successor or self._is_free(holder):
            self._claim = self._write_claim({}, version)
        else:
            raise held_by(self.name, holder)

    def check_claim(self) -> None:
        if not self._has_none:
            self.claim(is_successor=False)

    def release(self) -> None:
        version, self._claim = self._claim, None
        if version is not None:
            with contextlib.suppress(Exception):  # another writer has the claim or will replace it
                self._write_claim({"has_ended": True}, version)

    def _is_free(self, holder: Any) -> bool:
        """Return whether no other process writes here. `holder`: the claim that the last writer
        left, or None."""
        # an equal token: this writer's own claim, which was interrupted
        if holder is None or holder.get("has_ended") or holder.get("token") == self._token:
            return True
        if holder.get("process") == _PROCESS:
            return holder.get("token") not in _live
        mine = whoami()
        if holder.get("host") != mine["host"] or not isinstance(holder.get("pid"), int):
            return False
        return holder["pid"] == mine["pid"] or not _is_running(holder["pid"])

    def write(self, name: str, parts: Sequence[Any]) -> None:
        self._written[name] = self._files.write(name, b"".join(parts))

    def expect(self, name: str) -> None:
        """Begin to read a file. Its content is held in memory until it is read."""
        self._expected[name] = self._files.read(name)

    def forget(self, name: str) -> None:
        for other in _under(name, self._expected):
            self._expected.pop(other).cancel()

    def read(
        self,
        name: str,
        parts_of: Callable[[int], Sequence[Any]],
        tell: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        found = self._fetch(name, self._expected.pop(name, None))
        if found.state != "value":
            raise MissingError(f"{name} is missing")
        content, start = np.frombuffer(found.value, np.uint8), 0
        for part in parts_of(len(content)):
            if start + len(part) > len(content):
                raise CorruptCheckpointError(f"{name} is cut short")
            part[:] = content[start : start + len(part)]
            tell(part)
            start += len(part)

    def sync(self, folder: str) -> None:
        futures = {name: self._written.pop(name) for name in _under(folder, self._written)}
        errors = []
        for name, future in futures.items():  # after an error, wait for the others too
            try:
                self._wait(f"to write {name}", future)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        """Write a file at once: names are used only once, so no older file is replaced."""
        del after
        self._wait(f"to write {name}", self._files.write(name, content))

    def entries(self, folder: str) -> list[str]:
        # in TensorStore, two listings without credentials block all later S3 requests of the
        # process, so the first request is a read
        if self._must_ask:
            self._fetch(_WRITER)
            self._must_ask = False
        keys = self._wait(
            f"to list {folder}", self._files.list(ts.KvStore.KeyRange(f"{folder}/", f"{folder}0"))
        )
        return sorted(
            {key.decode(errors="replace").removeprefix(f"{folder}/").split("/")[0] for key in keys}
        )

    def delete(self, name: str) -> None:
        with contextlib.suppress(Exception):  # writes of an abandoned save
            self.sync(name)
        self._wait(f"to delete {name}", self._files.write(name, None))
        self._wait(
            f"to delete {name}",
            self._files.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")),
        )

    def _holder(self) -> tuple[Any, bytes]:
        """Return the claim of the current or last writer, or None, and the version of its file."""
        found = self._fetch(_WRITER)
        if found.state != "value":
            return None, found.stamp.generation
        try:
            holder = json.loads(found.value)
        except ValueError:
            holder = None
        return holder if isinstance(holder, dict) else {}, found.stamp.generation

    def _write_claim(self, more: dict[str, Any], version: bytes) -> bytes:
        """Write the claim if the file still has this version. Return the new version."""
        content = json.dumps(
            {**whoami(), "process": _PROCESS, "token": self._token, **more}
        ).encode()
        try:
            written = self._wait(
                f"to write {_WRITER}", self._files.write(_WRITER, content, if_equal=version)
            ).generation
        except OSError as error:
            if "UNIMPLEMENTED" not in str(error) and "NotImplemented" not in str(error):
                raise
            warnings.warn(
                f"{self.name}: this store has no conditional writes, so a second writer is not "
                "detected; make sure that only one process writes here",
                stacklevel=2,
            )
            self._has_none = True
            return b""
        if written:
            return written
        holder, found = self._holder()  # its own claim, if the answer to a first try was lost
        if holder is None or holder.get("token") != self._token:
            raise held_by(self.name, holder)
        return found

    def _fetch(self, name: str, future: Any = None) -> Any:
        """Read a file. Raises a CorruptCheckpointError if the store refuses it permanently."""
        try:
            return self._wait(f"for {name}", future or self._files.read(name))
        except _RefusedError as error:
            raise CorruptCheckpointError(f"{name}: {error.__cause__}") from error.__cause__

    def _wait(self, what: str, future: Any) -> Any:
        """Wait for the result of a request. `what`: the request, for the error."""
        try:
            return future.result(timeout=self._timeout)
        except TimeoutError as error:
            future.cancel()
            raise TimeoutError(
                f"{self.name}: no answer {what} within {self._timeout:g} s: check the "
                "server and the credentials, or raise timeout="
            ) from error
        except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
            kind = OSError if any(word in str(error) for word in _TRANSIENT) else _RefusedError
            hint = (
                "; a checkpoint needs a store that can list its files"
                if "does not support listing" in str(error)
                else ""
            )
            raise kind(f"{self.name}: {what}: {error}{hint}") from error


class _RefusedError(OSError):
    """Failure of a request that would fail again."""


_PROCESS = secrets.token_hex(8)  # the system may reuse a process's pid
# open stores of this process, by token
_live: weakref.WeakValueDictionary[str, Objects] = weakref.WeakValueDictionary()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _under(folder: str, names: dict[str, Any]) -> list[str]:
    return [name for name in list(names) if name == folder or name.startswith(f"{folder}/")]


@functools.cache
def _context() -> Any:
    """Return the one shared context, so that "memory://" is the same memory everywhere."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
        }
    )

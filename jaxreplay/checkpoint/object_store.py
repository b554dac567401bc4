"""Files in a store that TensorStore opens, such as a bucket of Google Cloud Storage or S3."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorstore as ts

from jaxreplay.checkpoint.files import (
    CorruptCheckpointError,
    Files,
    Memory,
    MissingError,
    new_memory,
)

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
    """Files of a TensorStore key-value store.

    Args:
      spec: A URL, an open `ts.KvStore`, or TensorStore's specification of a key-value store, which
        has options that a URL lacks.
      timeout: Seconds that a request may take.
    """

    num_readers: ClassVar[int] = 16

    def __init__(self, spec: Any, timeout: float):
        self._timeout = timeout
        _no_value()  # an ImportError if TensorStore is too old
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
        self._is_warned = False
        self._must_ask = self.name.lower().startswith("s3:")

    def write(self, name: str, parts: Sequence[Any]) -> None:
        self._wait(f"to write {name}", self._files.write(name, b"".join(parts)))

    def create(self, name: str, content: bytes) -> bool:
        what, unless_there = f"to write {name}", {"if_equal": _no_value()}
        try:
            written = self._wait(what, self._files.write(name, content, **unless_there))
            return bool(written.generation)
        except OSError as error:
            if "UNIMPLEMENTED" not in str(error) and "NotImplemented" not in str(error):
                raise
        if self._fetch(name, slice(0, 0)).state == "value":
            return False
        if not self._is_warned:
            warnings.warn(
                f"{self.name}: this store has no conditional writes, so a second writer may not be "
                "detected; make sure that only one process writes here",
                stacklevel=2,
            )
        self._is_warned = True
        self._wait(what, self._files.write(name, content))
        return True

    def read(
        self, name: str, most: int, memory: Memory | None = new_memory, has_size: bool = False
    ) -> np.ndarray:
        del memory
        if has_size:
            found = self._fetch(name, slice(0, most))
            if found is None:
                raise CorruptCheckpointError(f"{name} is cut short")
        # asked before it is read as a whole: is there a byte beyond the most?
        elif (found := self._fetch(name, slice(most, most + 1))) is None:
            found = self._fetch(name)
        elif found.state == "value":
            raise CorruptCheckpointError(f"{name} has more bytes, expected at most {most:,}")
        if found.state != "value":
            raise MissingError(f"{name} is missing")
        return np.frombuffer(found.value, np.uint8)

    def entries(self, folder: str) -> list[str]:
        # in TensorStore, two listings without credentials block all later S3 requests of the
        # process, so the first request is a read
        if self._must_ask:
            self._fetch("manifests")
            self._must_ask = False
        keys = self._wait(
            f"to list {folder}", self._files.list(ts.KvStore.KeyRange(f"{folder}/", f"{folder}0"))
        )
        names = (key.decode(errors="replace") for key in keys)
        return sorted(name for name in names if name.count("/") == 1)

    def delete(self, name: str) -> None:
        self._wait(f"to delete {name}", self._files.write(name, None))

    def _fetch(self, name: str, part: slice | None = None) -> Any:
        """Read a file, or a part of its bytes; None if it ends before. Raises a
        CorruptCheckpointError if the store refuses it permanently."""
        try:
            return self._wait(f"for {name}", self._files.read(name, byte_range=part))
        except _RefusedError as error:
            if part is not None and "OUT_OF_RANGE" in str(error):
                return None
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


@functools.cache
def _no_value() -> bytes:
    """Return what a write must find where there is no object yet. Raises an ImportError if
    TensorStore cannot read a part of an object."""
    empty = ts.KvStore.open("memory://", context=ts.Context()).result()
    try:
        return empty.read("none", byte_range=slice(0, 0)).result().stamp.generation
    except TypeError:
        raise ImportError(
            "an object store needs tensorstore 0.1.81 or newer, which reads a part of an object"
        ) from None


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

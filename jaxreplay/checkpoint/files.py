"""`Files`: the interface of a store of files.

It is implemented by local folders (`folder.py`) and by what TensorStore opens (`object_store.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

LARGE = 2**20  # bytes from which on a file is worth a thread
MOST_BYTES = 2**28  # largest file that is read completely into memory


class CorruptCheckpointError(ValueError):
    """A stored file is missing, truncated or changed since it was written; the error names it."""


class MissingError(CorruptCheckpointError):
    """A stored file does not exist."""


class PathInUseError(RuntimeError):
    """Another process or `Checkpointer` writes to the path; the error names it."""


class Files:
    """A store of files, whose names are paths relative to the store's own path.

    A file that holds an array is never changed.
    """

    # True if each request takes long, so that several files are requested at once
    is_far: ClassVar[bool] = False
    name: str

    def claim(self, is_successor: bool) -> None:
        """Claim the store for this writer until `release`. Does nothing if it is claimed already.

        Args:
          is_successor: Whether this writer continues the newest checkpoint of another writer. If
            that writer may be dead, its claim is then replaced.

        Raises:
          PathInUseError: Another writer has claimed the store.
        """
        raise NotImplementedError

    def check_claim(self) -> None:
        """Check that the claim still holds.

        Raises:
          OSError: The claimed store is gone.
          PathInUseError: Another writer has taken the claim over.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Release the claim, so that others may write."""
        raise NotImplementedError

    def write(self, name: str, parts: Sequence[Any]) -> None:
        """Write a new file from buffers of bytes, one after another. It is durable after `sync`."""
        raise NotImplementedError

    def expect(self, name: str) -> None:
        """Prefetch a file that will be read soon."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        """Cancel `expect` for a file, or for all files in a folder."""
        raise NotImplementedError

    def read(
        self,
        name: str,
        parts_of: Callable[[int], Sequence[Any]],
        tell: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        """Read a file into arrays of bytes, one after another.

        Args:
          parts_of: Function from the file's size in bytes to the arrays to fill.
          tell: Called with each piece right after it was read, in order, while it is still in the
            CPU's cache.

        Raises:
          CorruptCheckpointError: The file is missing, or shorter than the arrays.
          OSError: The file cannot be read at the moment.
        """
        raise NotImplementedError

    def get(self, name: str) -> bytes:
        """Return the content of a short file."""
        content = np.empty(0, np.uint8)

        def parts_of(size: int) -> list[np.ndarray]:
            nonlocal content
            if size > MOST_BYTES:
                raise CorruptCheckpointError(
                    f"{name} has {size:,} bytes, more than the limit for such a file"
                )
            content = np.empty(size, np.uint8)
            return [content]

        self.read(name, parts_of)
        return content.tobytes()

    def sync(self, folder: str) -> None:
        """Wait until all files written in a folder are durable."""
        raise NotImplementedError

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        """Write a file atomically.

        Args:
          name: Name of the file.
          content: Its bytes.
          after: Folders whose lists of names are made durable first; `sync` does not cover them.
        """
        raise NotImplementedError

    def entries(self, folder: str) -> list[str]:
        """List the files and folders in a folder, sorted by name, including incomplete ones of
        killed processes."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Delete a file, or a folder and all that it contains."""
        raise NotImplementedError

"""`Files`: the interface of a store of files.

It is implemented by local folders (`folder.py`) and by what TensorStore opens (`object_store.py`).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

MOST_BYTES = 2**28  # largest file that is read for its text


class CorruptCheckpointError(ValueError):
    """A stored file is missing, truncated or changed since it was written; the error names it."""


class MissingError(CorruptCheckpointError):
    """A stored file does not exist."""


class PathInUseError(RuntimeError):
    """Another process or `Checkpointer` writes to the path; the error names it."""


Memory = Callable[[int], np.ndarray]  # function from a size to uint8[size]
new_memory: Memory = functools.partial(np.empty, dtype=np.uint8)  # of arbitrary content


class Files:
    """A store of files, whose names are paths relative to the store's own path.

    A file is never changed.
    """

    num_readers: ClassVar[int] = 2  # threads that read at the same time
    name: str

    def write(self, name: str, parts: Sequence[Any]) -> None:
        """Write a new file from buffers of bytes, one after another. It is durable when it
        returns."""
        raise NotImplementedError

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of some written files that are not there, if that can be told quickly."""
        del names
        return []

    def create(self, name: str, content: bytes) -> bool:
        """Write a file as a whole, unless there is one of that name.

        Folders of the store that other files were written to are durable before it.

        Returns:
          Whether the file was written.
        """
        raise NotImplementedError

    def read(
        self, name: str, most: int, memory: Memory | None = new_memory, has_size: bool = False
    ) -> np.ndarray:
        """Read a file.

        Args:
          name: Name of the file.
          most: Largest number of bytes that it may have.
          memory: Memory that may be used for the file, once its size is known; None to map it, if
            it lies on this machine. Default: new memory.
          has_size: Whether it should have so many. An object store then reads so many bytes in one
            request, and does not look for more. Default: False.

        Returns:
          The file's content, uint8[size].

        Raises:
          CorruptCheckpointError: The file is missing, or larger than `most`.
          OSError: The file cannot be read at the moment.
        """
        raise NotImplementedError

    def entries(self, folder: str) -> list[str]:
        """List the names of the files and folders in a folder, sorted, including incomplete ones of
        killed processes."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Delete a file, or a folder and all that it contains."""
        raise NotImplementedError

"""What a store of files has: those of a local folder (`folder.py`), and of anything that
TensorStore opens (`object_store.py`)."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

LARGE = 2**20  # bytes of a file that is worth a thread
MOST_BYTES = 2**28  # of a file that is read whole


class CorruptCheckpointError(ValueError):
    """Something stored is missing, cut short, or other than it was written; it is named."""


class MissingError(CorruptCheckpointError):
    """A file that does not exist."""


class PathInUseError(RuntimeError):
    """Somebody else writes under the path; the message says who."""


class Files:
    """Names are paths below the store's own. A file that holds an array is never changed."""

    # whether each file takes a while to come, so that those that belong together are asked for
    # together
    is_far: ClassVar[bool] = False
    name: str

    def claim(self, is_successor: bool) -> None:
        """Be the only one that writes here, until `release`. Nothing, if that is so already.

        Args:
          is_successor: whether what another one wrote is gone on with, which that one's claim must
            not hinder if it may be dead.

        Raises:
          PathInUseError: another one writes here.
        """
        raise NotImplementedError

    def check_claim(self) -> None:
        """Raises an OSError or a PathInUseError, if what was claimed is another one's by now, or
        gone."""
        raise NotImplementedError

    def release(self) -> None:
        """Others may write here again."""
        raise NotImplementedError

    def write(self, name: str, parts: Sequence[Any]) -> None:
        """A new file, of buffers of bytes one after another. It is safe after `sync`."""
        raise NotImplementedError

    def expect(self, name: str) -> None:
        """Say that a file will be read soon."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        """A file that was expected, or all in a folder, will not be read after all."""
        raise NotImplementedError

    def read(
        self,
        name: str,
        parts_of: Callable[[int], Sequence[Any]],
        tell: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        """Fill arrays of bytes, one after another, with a file's.

        Args:
          parts_of: gives them, told how many bytes the file has. tell: called with each piece that
            was read, in turn, while a cache has it.

        Raises:
          CorruptCheckpointError: there is no such file, or it is shorter now. OSError: it cannot be
            read at the moment.
        """
        raise NotImplementedError

    def get(self, name: str) -> bytes:
        """A short file."""
        content = np.empty(0, np.uint8)

        def parts_of(size: int) -> list[np.ndarray]:
            nonlocal content
            if size > MOST_BYTES:
                raise CorruptCheckpointError(
                    f"{name} has {size:,} bytes, more than such a file can have"
                )
            content = np.empty(size, np.uint8)
            return [content]

        self.read(name, parts_of)
        return content.tobytes()

    def sync(self, folder: str) -> None:
        """Wait until all that was written in a folder is safe."""
        raise NotImplementedError

    def put(self, name: str, content: bytes, after: Sequence[str]) -> None:
        """Write a file, whole or not at all, once what is in some folders is there: their names
        alone, which are not in `sync`."""
        raise NotImplementedError

    def entries(self, folder: str) -> list[str]:
        """Files and folders in a folder, in the order of names; also what a killed process left
        unfinished."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """A file, or a folder with all that is in it."""
        raise NotImplementedError

"""Communication between the processes that save or restore one sharded buffer together.

All of them call the same methods in the same order, since each method waits for all.
"""

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.experimental.multihost_utils as multihost
import numpy as np

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Processes:
    """One process among others.

    Attributes:
      num: Number of processes. Default: 1.
      index: Number of this one. Default: 0.
    """

    num: int = 1
    index: int = 0

    def told(self, value: _T) -> list[_T]:
        """Return the values of all processes, in order."""
        if self.num == 1:
            return [value]
        content = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = multihost.process_allgather(np.int32(len(content)))
        padded = np.resize(content, int(sizes.max()))
        return [pickle.loads(one) for one in multihost.process_allgather(padded)]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an error in all processes if the block raises one in any."""
        if self.num == 1:
            yield
            return
        error = None
        try:
            yield
        except Exception as own:
            error = own
        for nth, other in enumerate(self.told(_sendable(error))):
            if error is None and other is not None:
                error = other
                error.add_note(f"This is an error of process {nth}.")
        if error is not None:
            raise error

    def first(self, function: Callable[[], _T]) -> _T:
        """Call a function in the first process, and return its result in all."""
        if self.num == 1:
            return function()
        found: Any = None
        with self.agreed():
            if self.index == 0:
                found = function()
        content = np.frombuffer(pickle.dumps(found), np.uint8)
        size = self.told(len(content))[0]
        return pickle.loads(multihost.broadcast_one_to_all(np.resize(content, size)))


def _sendable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

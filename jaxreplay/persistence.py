"""What a replay of its own saves under a path, and takes from there, with `jaxreplay.checkpoint`."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxreplay.checkpoint import Checkpointer

_NOTES = "replay"  # what all of it is noted under


class Persistence:
    """Of one buffer. A save on top of what was last saved or loaded writes only what is new; between two of them the path is free."""

    def __init__(self, buffer: Any):
        self._buffer = buffer
        self._last: Checkpointer | None = None
        self._where: Any = None  # its path

    def save(self, path: Any, state: Any, notes: dict[str, Any]) -> None:
        """`notes`: of JSON."""
        checkpointer = self._at(path)
        with checkpointer:
            checkpointer.save(state, notes={_NOTES: notes})

    def load(self, path: Any, example: Any, let_go: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """A state, and its notes; none, where something else than a replay has saved it.

        Args:
          let_go: frees the memory of the state that is to be replaced. Called where there is no room for two, and only after all of what is
            stored was read, and found whole.
        """
        checkpointer = self._at(path)
        try:
            state = checkpointer.restore(example)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            state = None
        if state is None:  # outside of the handler, whose traceback may hold on to memory
            _check_whole(checkpointer)
            let_go()
            state = checkpointer.restore(example)
        notes = checkpointer.notes.get(_NOTES)
        return state, notes if isinstance(notes, dict) else {}

    def _at(self, path: Any) -> "Checkpointer":
        """The one of before, where the path is the same. A specification has more in it than the path that it is named by."""
        from jaxreplay.checkpoint import Checkpointer  # an extra

        made = Checkpointer(path, self._buffer, keep=1, progress=False)
        where = made.path if isinstance(path, str | bytes | os.PathLike) else path
        if self._last is None or self._where != where:
            self._last, self._where = made, where
        return self._last


def _check_whole(checkpointer: "Checkpointer") -> None:
    found = checkpointer.verify()
    if all(one.problems for one in found):
        from jaxreplay.checkpoint import BrokenError

        raise BrokenError("\n  ".join([f"load: nothing under {checkpointer.path} is whole:", *(p for one in found for p in one.problems)]))

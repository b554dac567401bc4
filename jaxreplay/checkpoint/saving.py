"""A running save: the caller's thread copies what is to be written, a file at a time, and threads
write the copies."""

import atexit
import threading
import warnings
from collections.abc import Callable
from typing import Any

from jaxreplay._util.names import named
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint import bundle, rows
from jaxreplay.checkpoint.bundle import Sums
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.threads import Threads

_WRITERS = 3  # threads: one alone does not keep a disk busy
_ROOM = 3  # files that are copied, and not written yet


class Saving:
    """A running save.

    Attributes:
      written: What the manifest will say of each written file, by its name.

    Args:
      store: The store to write to.
      level: Level of zstd compression, or None.
      bar: Progress bar, of bytes.
    """

    def __init__(self, store: Files, level: int | None, bar: Any):
        self._store, self._level, self._bar = store, level, bar
        self.written: dict[str, Sums] = {}
        self._lock = threading.Lock()  # of `written` and the bar
        self._room, self._is_alone = _ROOM, True
        self._threads = Threads(_WRITERS, "jaxreplay-checkpoint")
        atexit.register(self._at_exit)

    def put(
        self,
        name: str,
        copy: Callable[[], Any],
        count: int | None = None,
        spare: list[Any] | None = None,
    ) -> None:
        """Copy arrays, once there is room for them, and let a thread write them.

        Args:
          name: Name of the file.
          copy: Returns copies of the arrays, a pytree.
          count: Number of rows that are written of each. Default: all.
          spare: Gets the copies afterwards, whose memory may be used again. Default: none.
        """
        if self._room:
            self._room -= 1
        else:
            self._threads.get()
        self._threads.check()
        self._threads.put(self._write, name, copy(), count, spare)

    def close(self, last: Callable[[], None] | None) -> None:
        """Let the threads end when all is written, and then call `last`: None if the processes
        that save together commit after `join`."""
        self._is_alone = last is not None
        self._threads.close(last)

    def join(self) -> None:
        """Wait for the threads, after `close`, and raise the save's error."""
        self._threads.join()
        atexit.unregister(self._at_exit)
        with defer_interrupts():
            self._bar.close()
        self._threads.check()

    def abandon(self) -> None:
        """Cancel the save."""
        atexit.unregister(self._at_exit)
        self._threads.abandon()

    def _at_exit(self) -> None:
        """Warn of a save that was not completed. The threads have ended by then."""
        if self._threads.error is not None:
            text = f"the last checkpoint was not written: {self._threads.error}"
            warnings.warn(text, stacklevel=1)
        elif not self._is_alone:
            text = (
                "the last checkpoint of several processes was not committed: call "
                "wait_until_finished() before the program ends"
            )
            warnings.warn(text, stacklevel=1)

    def _write(self, name: str, arrays: Any, count: int | None, spare: list[Any] | None) -> None:
        own = {key: rows.on_host(leaf) for key, leaf in named(arrays)}
        if count is not None:
            own = {key: leaf[:count] for key, leaf in own.items()}
        content, sums = bundle.packed(own, self._level)
        self._store.write(name, content)
        num_bytes = sum(leaf.nbytes for leaf in own.values())
        if spare is not None:
            del own, content  # views, of memory that is donated
            spare.append(arrays)
        with self._lock:
            self.written[name] = sums
            self._bar.update(num_bytes)

"""Batches drawn ahead on a thread, which ends when it is told to, or when what it draws for is there no more."""

import atexit
import collections
import threading
import weakref
from typing import Any

from jaxreplay.monitor import Monitor
from jaxreplay.types import Sample

_LOOK = 1.0  # seconds after which a thread without work looks whether its owner is still there


class Prefetcher:
    """Keeps some batches ready. All but `close` is called with the monitor held.

    Args:
      monitor: the owner's. size: batches that are kept.
    """

    def __init__(self, monitor: Monitor, size: int):
        self.size = size
        self.error: BaseException | None = None  # that the thread ended with
        self._monitor, self._batches = monitor, collections.deque[Sample]()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, owner: Any) -> None:
        """Begin to draw. `owner`: has `draw_ahead`, which returns a batch, or None where there is none to be drawn; it is not kept."""
        self._is_over, self.error = False, None
        self._thread = threading.Thread(target=_run, args=(self, weakref.ref(owner)), name="jaxreplay-prefetch", daemon=True)
        self._thread.start()
        _running.add(self)

    def pop(self) -> Sample | None:
        """The next batch, if one is ready."""
        return self._batches.popleft() if self._batches else None

    def __len__(self) -> int:
        return len(self._batches)

    def start_anew(self, owner: Any) -> None:
        """Forget the batches. A thread that ended with an error has a successor."""
        self._batches.clear()
        if self.error is not None:
            self.start(owner)

    def close(self) -> None:
        """End the thread, and wait until it has. The monitor must not be held."""
        with self._monitor:
            self._is_over = True
            self._monitor.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def step(self, owner: Any) -> bool:
        """Draw a batch, if there is room for one and something to draw. Returns whether it did."""
        if len(self._batches) >= self.size or (batch := owner.draw_ahead()) is None:
            return False
        self._batches.append(batch)
        self._monitor.notify_all()
        return True

    @property
    def is_over(self) -> bool:
        return self._is_over


def _run(prefetcher: Prefetcher, owner_ref: Any) -> None:
    """What the thread does. While it waits it holds nothing of the owner, whose rows are freed once nobody else has it."""
    monitor = prefetcher._monitor
    while True:
        with monitor:
            if prefetcher.is_over or (owner := owner_ref()) is None:
                return
            try:
                has_drawn = prefetcher.step(owner)
            except BaseException as error:
                prefetcher.error = error
                monitor.notify_all()
                return
            finally:
                del owner
            if not has_drawn:
                monitor.wait(_LOOK)


_running: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Before JAX ends: a thread in the middle of a draw would crash then."""
    for prefetcher in list(_running):
        if not prefetcher._monitor.is_forked:
            prefetcher.close()

"""Signs that an online queue lags: rows become new faster than batches take them."""

from collections.abc import Callable
from typing import Any


class LagWatch:
    """Report once that new rows come faster than batches take them.

    It reads the figures after 16 batches, and again after twice as many. If the rows that were new
    and are not sampled grow by an eighth of each batch in two such intervals, the queue lags.
    """

    def __init__(self) -> None:
        self._num_batches, self._next_look = 0, 16.0
        self._unsampled, self._has_grown = float("inf"), False

    def look(self, batch_size: int, figures: Callable[[], dict[str, Any]]) -> str | None:
        """Count a batch. Return the evidence in one line if a look is due and finds some, or None.

        Args:
          batch_size: Number of items in a batch.
          figures: Returns those of `ReplayBuffer.metrics`.
        """
        self._num_batches += 1
        if self._num_batches < self._next_look:
            return None
        found = figures()
        num_new, before = int(found["num_new"]), self._unsampled
        self._unsampled = num_new + int(found["num_lost"])
        grows = self._unsampled - before >= self._num_batches / 2 * batch_size / 8
        lags = grows and self._has_grown and num_new > batch_size
        self._has_grown, self._next_look = grows, 2.0 * self._num_batches
        if not lags:
            return None
        self._next_look = float("inf")
        return (
            f"the online queue lags: {num_new:,} rows are new, more than one batch takes, and they "
            "become more, so that batches have new rows alone, which are ever older; sample more "
            "often, or let fewer rows be new: jaxreplay.OnlineQueue(period=the sequences' length)"
        )

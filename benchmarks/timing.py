"""Timing of repeated work."""

import math
import time
from collections.abc import Callable

# A measurement lasts at least this long, which limits the effect of the clock's resolution and of
# single interruptions.
_MIN_SECONDS = 0.05


def stopwatch(run: Callable[[], None], iterations: int) -> Callable[[], float]:
    """Return a function that measures microseconds per iteration of `run`.

    `run` does `iterations` of them, and waits for the last.
    """
    run()  # compiles
    start = time.perf_counter()
    run()
    repeats = math.ceil(_MIN_SECONDS / (time.perf_counter() - start))

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / (repeats * iterations) * 1e6

    return measure

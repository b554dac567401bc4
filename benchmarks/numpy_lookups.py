"""The same pairs from the same arrays, in NumPy.

All ends are known before, and a batch is computed at once.

Forms: "sort", which is common, finds the next ends of each sampled row by sorting its distances to
all ends. "search" is a binary search, the best way that we know for rows in one stream that never
wraps.
"""

from collections.abc import Callable

import numpy as np
from cases import BATCH_SIZE, Case
from steps import episode_steps
from timing import stopwatch

DISCOUNT = 0.99


class Lookup:
    def __init__(self, case: Case):
        steps = episode_steps(case)
        self.obs, self.action = steps["obs"][:, 0], steps["action"][:, 0]
        # rows of the final observations
        self.ends = np.flatnonzero((steps["terminated"] | steps["truncated"])[:, 0]) + 1
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        self.rng = np.random.default_rng(0)
        self.num_ahead = 2 if case.buffer == "two terminals" else 1
        self.find = self._by_sort if case.form == "sort" else self._by_search

    def sample(self) -> tuple[np.ndarray, ...]:
        episode = self.rng.integers(len(self.ends), size=BATCH_SIZE)
        row = self.rng.integers(self.starts[episode], self.ends[episode])
        num_ahead = self.find(row) - row
        # Inverse of the truncated geometric distribution function.
        drawn = np.log1p(
            self.rng.random(BATCH_SIZE) * np.expm1(num_ahead * np.log(DISCOUNT))
        ) / np.log(DISCOUNT)
        horizon = np.clip(np.floor(drawn).astype(int) + 1, 1, num_ahead)
        return self.obs[row], self.action[row], self.obs[row + horizon], horizon

    def _by_sort(self, row: np.ndarray) -> np.ndarray:
        """Return the row of the end that bounds each horizon: the last of the next `num_ahead`
        ends, or of those that exist."""
        distance = self.ends - row[:, None]
        ahead = np.sort(np.where(distance > 0, distance, len(self.obs)), axis=1)[
            :, : self.num_ahead
        ]
        return row + np.where(ahead < len(self.obs), ahead, 0).max(axis=1)

    def _by_search(self, row: np.ndarray) -> np.ndarray:
        number = np.searchsorted(self.ends, row, side="right") + self.num_ahead - 1
        return self.ends[np.minimum(number, len(self.ends) - 1)]


def prepare(case: Case) -> Callable[[], float]:
    lookup = Lookup(case)

    def run() -> None:
        for _ in range(case.iterations):
            lookup.sample()

    return stopwatch(run, case.iterations)

"""The host's record of the rows: which steps continue an episode, and how many rows are stored.

A step continues the episode if its observation equals the next observation of the step before. So
after a reset in the middle of an episode, no transition pairs observations of two episodes.
"""

import collections
import math
from typing import Any

import numpy as np

from jaxreplay.stateful.staging import stacked


class Record:
    """Record of the steps of E envs, each in a ring of `length` rows.

    Each step writes a row, and after it a final row, whose place the next step of the same episode
    takes.

    Attributes:
      num_steps: Number of steps of each env so far.
      may_go_on: bool[E]; the newest step's episode may continue with the next step.
    """

    def __init__(self, num_envs: int, length: int):
        self.num_steps, self.may_go_on = 0, np.zeros(num_envs, bool)
        self._length = length
        self._announced: list[np.ndarray] = []  # leaves [E, ...]: the newest next observation
        self._num_rows = np.zeros(num_envs, np.int64)  # that were written, final rows included
        # of each env, the numbers of its stored final rows but the newest, in order of time
        self._final_rows: list[collections.deque[int]] = [
            collections.deque() for _ in range(num_envs)
        ]

    @property
    def num_transitions(self) -> np.ndarray:
        """Number of transitions in each env's ring: int32[E]."""
        num_final = np.array([len(rows) for rows in self._forgotten()], np.int64)
        num_others = np.minimum(self._num_rows, self._length) - num_final - 1
        return np.maximum(num_others, 0).astype(np.int32)

    @property
    def newest(self) -> tuple[Any, ...]:
        """The newest steps, for `restore`."""
        return self.num_steps, self.may_go_on, self._announced, self._num_rows

    def restore(self, newest: tuple[Any, ...]) -> None:
        """Forget the step that was recorded since `newest` was read."""
        self.num_steps, self.may_go_on, self._announced, self._num_rows = newest
        for rows, num_rows in zip(self._final_rows, self._num_rows, strict=True):
            while rows and rows[-1] >= num_rows - 1:
                rows.pop()

    def _forgotten(self) -> list[Any]:
        """Return the final rows, after those that are overwritten were forgotten."""
        for rows, num_rows in zip(self._final_rows, self._num_rows, strict=True):
            while rows and rows[0] < num_rows - self._length:
                rows.popleft()
        return self._final_rows

    @property
    def newest_rows(self) -> np.ndarray:
        """Rows of the newest transitions: int64[E]."""
        return np.arange(len(self._num_rows)) * self._length + (self._num_rows - 2) % self._length

    def extended(self, steps: list[list[np.ndarray]]) -> tuple[list[np.ndarray], np.ndarray]:
        """Record steps, and return them as one block.

        Args:
          steps: Leaves of each step, [E, ...]: K of obs, K of next_obs, action, reward, done and
            timeout, bool[E] both. There is at least one step.

        Returns:
          These leaves, [T, E, ...]; bool[T, E], whether a step continues the episode of the step
          before.
        """
        columns = list(zip(*steps, strict=True))
        leaves = [stacked(column) for column in columns]
        ends = leaves[-2] | leaves[-1]
        goes_on = np.concatenate([self.may_go_on[None], ~ends[:-1]])
        num_leaves = len(columns) // 2 - 2
        announced = self._announced or steps[0][:num_leaves]  # no episode goes on at first
        for obs, before, after in zip(
            leaves, announced, columns[num_leaves : 2 * num_leaves], strict=False
        ):
            goes_on &= _is_same(stacked([before, *after[:-1]]), obs)
        num_rows = self._num_rows + np.cumsum(2 - goes_on, axis=0)
        final_rows = self._forgotten()
        if not goes_on.all():
            for nth, env in np.argwhere(~goes_on):
                if num_before := int(num_rows[nth, env]) - 2:  # rows before this step
                    final_rows[env].append(num_before - 1)
        self._num_rows, self.num_steps = num_rows[-1], self.num_steps + len(steps)
        self._announced = steps[-1][num_leaves : 2 * num_leaves]
        self.may_go_on = ~ends[-1]
        return leaves, goes_on


def _is_same(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Return where observations [T, E, ...] are bit-identical: bool[T, E]."""
    return (_bytes(before) == _bytes(now)).all(axis=2)


def _bytes(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:])).view(np.uint8)

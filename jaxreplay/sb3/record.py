"""The host's record of the rows: which steps continue an episode, and how many rows are stored.

A step continues the episode if its observation equals the next observation of the step before. So
after a reset in the middle of an episode, no transition pairs observations of two episodes.
"""

import collections
import math
from typing import Any

import jax
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay.stateful.staging import stacked
from jaxreplay.types import Step


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

    def extended(self, steps: list[Any]) -> tuple[Step, np.ndarray]:
        """Record steps, and return them as one block.

        Args:
          steps: obs and next_obs, pytrees with leaves [E, ...]; action [E, ...]; reward, done and
            timeout, [E] each. There is at least one step.

        Returns:
          The block, leaves [T, E, ...]; bool[T, E], whether a step continues the episode of the
          step before.
        """
        obs, after, action, reward, done, timeout = (
            jax.tree.map(lambda *leaves: stacked(leaves), *column)
            for column in zip(*steps, strict=True)
        )
        goes_on = ~(done | timeout)
        goes_on = np.concatenate([self.may_go_on[None], goes_on[:-1]])
        newest = jax.tree.leaves(after)
        announced = self._announced or [leaf[0] for leaf in newest]  # nothing before goes on
        for now, then, before in zip(jax.tree.leaves(obs), newest, announced, strict=True):
            goes_on[0] &= _is_same(before[None], now[:1])[0]
            goes_on[1:] &= _is_same(then[:-1], now[1:])
        num_rows = self._num_rows + np.cumsum(2 - goes_on, axis=0)
        final_rows = self._forgotten()
        for nth, env in np.argwhere(~goes_on):
            if num_before := int(num_rows[nth, env]) - 2:  # rows before this step
                final_rows[env].append(num_before - 1)
        self._num_rows, self.num_steps = num_rows[-1], self.num_steps + len(steps)
        self._announced = [leaf[-1] for leaf in newest]
        self.may_go_on = ~(done[-1] | timeout[-1])
        step = Step(
            obs=obs,
            action=action,
            reward=reward,
            terminated=done & ~timeout,
            truncated=timeout | ~done,
            final_obs=after,
        )
        return step, goes_on


def _is_same(before: PyTree, now: PyTree) -> np.ndarray:
    """Return where observations [T, E, ...] are bit-identical: bool[T, E]."""
    return (_bytes(before) == _bytes(now)).all(axis=2)


def _bytes(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:])).view(np.uint8)

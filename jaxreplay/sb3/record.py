"""The host's record of the rows: which steps continue an episode, and how many rows are stored.

A step continues the episode if its observation equals the next observation of the step before. So
after a reset in the middle of an episode, no transition pairs observations of two episodes.
"""

import collections
import math
from typing import Any

import jax
import numpy as np

from jaxreplay.stateful.staging import most_steps
from jaxreplay.types import Step


class Record:
    """Record of the steps of E envs, each in a ring of `length` rows, and the newest steps.

    Each step writes a row, and after it a final row, whose place the next step of the same episode
    takes.

    Args:
      example: One env's step, leaves with `shape` and `dtype`.
      num_envs: Number of envs E.
      length: Number of rows in each env's ring.

    Attributes:
      num_steps: Number of steps of each env so far, without those that wait.
      num_waiting: Number of the newest steps, which wait to be recorded.
      most_waiting: Largest number of steps that may wait.
      may_go_on: bool[E]; the newest step's episode may continue with the next step.
    """

    def __init__(self, example: Step, num_envs: int, length: int):
        self.num_steps, self.may_go_on = 0, np.zeros(num_envs, bool)
        leaves = jax.tree.leaves(example)
        self.num_waiting = 0
        self.most_waiting = most_steps(num_envs * sum(leaf.nbytes for leaf in leaves))

        def rows(tree: Any, num_rows: int = self.most_waiting) -> Any:
            return jax.tree.map(
                lambda leaf: np.zeros((num_rows, num_envs, *leaf.shape), leaf.dtype), tree
            )

        # Steps that wait; of next observations also the newest one that is recorded, which is first
        self._obs, self._next_obs = rows(example.obs), rows(example.obs, self.most_waiting + 1)
        self._rest = rows((example.action, example.reward, np.bool_(0), np.bool_(0)))
        self._length = length
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

    def put(self, obs: list[Any], next_obs: list[Any], rest: list[Any]) -> None:
        """Copy a step to those that wait. An interrupt leaves an intact step or none.

        Args:
          obs: Leaves [E, ...].
          next_obs: Leaves [E, ...].
          rest: Action, reward, done and timeout, [E, ...].
        """
        nth = self.num_waiting
        for target, leaf in zip(jax.tree.leaves(self._obs), obs, strict=True):
            target[nth] = leaf
        for target, leaf in zip(jax.tree.leaves(self._next_obs), next_obs, strict=True):
            target[nth + 1] = leaf
        for target, leaf in zip(self._rest, rest, strict=True):
            target[nth] = leaf
        self.num_waiting = nth + 1

    @property
    def newest(self) -> tuple[Any, ...]:
        """What `restore` needs, of the newest step."""
        announced = jax.tree.map(lambda leaf: leaf[0].copy(), self._next_obs)
        return announced, self.num_steps, self.may_go_on, self._num_rows

    def restore(self, newest: tuple[Any, ...]) -> None:
        """Forget the steps since `newest` was read, of which at most one was recorded."""
        announced, self.num_steps, self.may_go_on, self._num_rows = newest
        self.num_waiting = 0
        jax.tree.map(lambda leaf, row: leaf.__setitem__(0, row), self._next_obs, announced)
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

    def take(self) -> tuple[Step, np.ndarray]:
        """Record the steps that wait, at least one. Return them as one block.

        Returns:
          Leaves [T, E, ...], in memory of their own; bool[T, E], whether a step continues the
          episode of the step before.
        """
        num = self.num_waiting
        obs, action, reward, done, timeout = jax.tree.map(
            lambda leaf: leaf[:num].copy(), (self._obs, *self._rest)
        )
        final_obs = jax.tree.map(lambda leaf: leaf[1 : num + 1].copy(), self._next_obs)
        terminated, ends = done & ~timeout, done | timeout
        goes_on = np.concatenate([self.may_go_on[None], ~ends[:-1]])
        for now, before in zip(jax.tree.leaves(obs), jax.tree.leaves(self._next_obs), strict=True):
            goes_on &= _is_same(before[:num], now)
            before[0] = before[num]
        num_rows = self._num_rows + np.cumsum(2 - goes_on, axis=0)
        final_rows = self._forgotten()
        if not goes_on.all():
            for nth, env in np.argwhere(~goes_on):
                if num_before := int(num_rows[nth, env]) - 2:  # rows before this step
                    final_rows[env].append(num_before - 1)
        self._num_rows, self.num_steps = num_rows[-1], self.num_steps + num
        self.may_go_on, self.num_waiting = ~ends[-1], 0
        # Each step ends its episode provisionally.
        flags = {"terminated": terminated, "truncated": ~terminated}
        return Step(obs, action, reward, **flags, final_obs=final_obs), goes_on


def _is_same(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Return where observations [T, E, ...] are bit-identical: bool[T, E]."""
    return (_bytes(before) == _bytes(now)).all(axis=2)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:])).view(np.uint8)

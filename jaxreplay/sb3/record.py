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
from jaxreplay.storage import ring
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

        def rows(leaf: Any, more: int = 0) -> np.ndarray:
            return np.zeros((self.most_waiting + more, num_envs, *leaf.shape), leaf.dtype)

        obs, self._structure = jax.tree.flatten(example.obs)
        # Steps that wait. The first next observation is that of the newest step that is recorded.
        self._obs, self._next_obs = [rows(leaf) for leaf in obs], [rows(leaf, 1) for leaf in obs]
        self._rest = [  # action, reward, done, timeout
            rows(leaf) for leaf in (example.action, example.reward, np.bool_(), np.bool_())
        ]
        self._targets = [  # of the leaves of a step: an array, and its row for the first step
            *((leaf, 0) for leaf in self._obs),
            *((leaf, 1) for leaf in self._next_obs),
            *((leaf, 0) for leaf in self._rest),
        ]
        self._length = length
        self._num_rows = np.zeros(num_envs, np.int64)  # that were written, final rows included
        # of each env, the numbers of its stored final rows but the newest, in order of time
        self._final_rows: list[collections.deque[int]] = [
            collections.deque() for _ in range(num_envs)
        ]

    @property
    def num_transitions(self) -> np.ndarray:
        """Number of transitions in each env's ring: int32[E]."""
        num_final = np.array([len(rows) for rows in self._stored_final_rows()], np.int64)
        num_others = np.minimum(self._num_rows, self._length) - num_final - 1
        return np.maximum(num_others, 0).astype(np.int32)

    def put(self, step: list[Any]) -> None:
        """Copy a step to those that wait. An interrupt leaves an intact step or none.

        Args:
          step: Leaves of obs, leaves of next_obs, action, reward, done and timeout, [E, ...].
        """
        nth = self.num_waiting
        for (target, offset), leaf in zip(self._targets, step, strict=True):
            target[nth + offset] = leaf
        self.num_waiting = nth + 1

    @property
    def newest(self) -> tuple[Any, ...]:
        """Record of the newest step, for `restore`."""
        announced = [leaf[0].copy() for leaf in self._next_obs]
        return announced, self.num_steps, self.may_go_on, self._num_rows

    def restore(self, newest: tuple[Any, ...]) -> None:
        """Forget the steps since `newest` was read, of which at most one was recorded."""
        announced, self.num_steps, self.may_go_on, self._num_rows = newest
        self.num_waiting = 0
        for leaf, row in zip(self._next_obs, announced, strict=True):
            leaf[0] = row
        for rows, num_rows in zip(self._final_rows, self._num_rows, strict=True):
            while rows and rows[-1] >= num_rows - 1:
                rows.pop()

    def _stored_final_rows(self) -> list[collections.deque[int]]:
        """Drop the final rows that are overwritten, and return the others of each env."""
        for rows, num_rows in zip(self._final_rows, self._num_rows, strict=True):
            while rows and rows[0] < num_rows - self._length:
                rows.popleft()
        return self._final_rows

    @property
    def newest_rows(self) -> np.ndarray:
        """Rows of the newest transitions: int64[E]."""
        return np.arange(len(self._num_rows)) * self._length + ring.position_of(
            self._num_rows - 2, self._length
        )

    def take(self) -> tuple[Step, np.ndarray]:
        """Record the steps that wait, at least one. Return them as one block.

        Returns:
          Leaves [T, E, ...], in memory of their own, without `truncated`; bool[T, E], whether a
          step continues the episode of the step before.
        """
        num = self.num_waiting
        obs, final_obs = (
            [leaf[first : num + first].copy() for leaf in leaves]
            for first, leaves in enumerate((self._obs, self._next_obs))
        )
        action, reward, done, timeout = (leaf[:num].copy() for leaf in self._rest)
        ends = done | timeout
        goes_on = np.concatenate([self.may_go_on[None], ~ends[:-1]])
        for now, before in zip(obs, self._next_obs, strict=True):
            goes_on &= (_bytes(before[:num]) == _bytes(now)).all(axis=2)
            before[0] = before[num]
        num_rows = self._num_rows + np.cumsum(2 - goes_on, axis=0)
        final_rows = self._stored_final_rows()
        if not goes_on.all():
            for nth, env in np.argwhere(~goes_on):
                if num_before := int(num_rows[nth, env]) - 2:  # rows before this step
                    final_rows[env].append(num_before - 1)
        self._num_rows, self.num_steps = num_rows[-1], self.num_steps + num
        self.may_go_on, self.num_waiting = ~ends[-1], 0
        obs, final_obs = (
            jax.tree.unflatten(self._structure, leaves) for leaves in (obs, final_obs)
        )
        flags = {"terminated": done & ~timeout, "truncated": None}
        return Step(obs, action, reward, **flags, final_obs=final_obs), goes_on


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of each observation: uint8[T, E, N]."""
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:])).view(np.uint8)

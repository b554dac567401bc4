"""The host's record of the rows: which steps continue an episode, and how many rows are stored.

A step continues the episode if its observation equals the next observation of the step before. So
after a reset in the middle of an episode, no transition pairs observations of two episodes.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxreplay.host.staging import most_steps
from jaxreplay.storage import ring
from jaxreplay.types import Step


class Record:
    """Record of the steps of E envs, each in a ring of `length` rows, and the newest steps, which
    wait to be added to the rows. It is the `Staging` of a drop-in buffer.

    Each step writes a row, and after it a final row, whose place the next step of the same episode
    takes.

    Args:
      example: One env's step, leaves with `shape` and `dtype`.
      num_envs: Number of envs E.
      length: Number of rows in each env's ring.

    Attributes:
      most_waiting: Largest number of steps that may wait.
      may_go_on: bool[E]; the newest recorded step's episode may continue with the next step.
      num_transitions: int64[E], number of transitions in each env's ring, without new steps.
    """

    def __init__(self, example: Step, num_envs: int, length: int):
        self.may_go_on = np.zeros(num_envs, bool)
        self._is_first = np.zeros(num_envs, bool)  # the newest recorded step, of its episode
        self._num_recorded = self._num_new = 0  # steps; new ones are not recorded yet
        # Recorded steps that are not added yet, a part for each `settle`, oldest first.
        self._parts: list[Any] = []
        leaves = jax.tree.leaves(example)
        self.most_waiting = most_steps(num_envs * sum(leaf.nbytes for leaf in leaves))

        def rows(leaf: Any, more: int = 0) -> np.ndarray:
            return np.zeros((self.most_waiting + more, num_envs, *leaf.shape), leaf.dtype)

        obs, self._structure = jax.tree.flatten(example.obs)
        # New steps. The first next observation is that of the newest step that is recorded.
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
        # Of each env's stored final rows but the newest, in order of time, the number of
        # transitions before each; and how many final rows were overwritten.
        self._final_rows = [np.arange(0)] * num_envs
        self._num_gone = np.zeros(num_envs, np.int64)
        self.num_transitions = np.zeros(num_envs, np.int64)

    def __len__(self) -> int:
        """Return the number of steps that wait."""
        return self._num_new + sum(len(goes_on) for _, goes_on, _ in self._parts)

    @property
    def num_steps(self) -> int:
        """Number of steps of each env so far."""
        return self._num_recorded + self._num_new

    def put(self, step: list[Any]) -> None:
        """Copy a step to those that wait. An interrupt leaves an intact step or none.

        Args:
          step: Leaves of obs, leaves of next_obs, action, reward, done and timeout, [E, ...].
        """
        nth = self._num_new
        for (target, offset), leaf in zip(self._targets, step, strict=True):
            target[nth + offset] = leaf
        self._num_new = nth + 1

    def rows_of(self, envs: np.ndarray, nth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of transitions, and the rows after them: int64[B] both.

        Args:
          envs: int64[B], their streams.
          nth: int64[B], their numbers in the rings; 0 is the oldest one.
        """
        number = nth + np.maximum(self._num_rows - self._length, 0)[envs]
        for env, final_rows in enumerate(self._final_rows):
            own = envs == env
            before = number[own] - self._num_gone[env]  # transitions before each one, so far
            number[own] += np.searchsorted(final_rows, before, side="right")
        start = envs * self._length
        row, after = (start + ring.position_of(number + k, self._length) for k in (0, 1))
        return row, after

    @property
    def newest_rows(self) -> np.ndarray:
        """Rows of the newest transitions: int64[E]."""
        return np.arange(len(self._num_rows)) * self._length + ring.position_of(
            self._num_rows - 2, self._length
        )

    def waiting(self) -> tuple[Step, np.ndarray, np.ndarray]:
        """Record new steps, and return all that wait as one block, in memory of their own.

        Returns:
          Leaves [T, E, ...], without `truncated`; bool[T, E], whether a step continues the episode
          of the step before; bool[T, E], whether the step before was its episode's first.
        """
        self.settle()
        if len(self._parts) > 1:
            self._parts = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._parts)]
        return self._parts[0]

    def drop(self, num_steps: int) -> None:
        """Forget the oldest of the steps that wait, of the block that `waiting` returned: they are
        added."""
        block = self._parts[0]
        is_rest = num_steps < len(block[1])
        self._parts = [jax.tree.map(lambda leaf: leaf[num_steps:], block)] if is_rest else []

    def settle(self) -> None:
        """Record the new steps. Signals must wait meanwhile."""
        if not (num := self._num_new):
            return
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
        if not goes_on.all():
            for nth, env in np.argwhere(~goes_on):
                if num_before := int(num_rows[nth, env]) - 2:  # rows before this step
                    rows = self._final_rows[env]
                    before = num_before - 1 - len(rows)
                    self._final_rows[env] = np.append(rows, before - self._num_gone[env])
        was_first = np.concatenate([self._is_first[None], ~goes_on[:-1]])
        self._num_rows, self._num_recorded = num_rows[-1], self._num_recorded + num
        # forget the final rows that are overwritten, and count the transitions
        first = (self._num_rows - self._length - self._num_gone).tolist()
        for env, rows in enumerate(self._final_rows):
            while len(rows) and rows[0] < first[env]:
                rows = self._final_rows[env] = rows[1:]
                self._num_gone[env] += 1
                first[env] -= 1
        num_final = np.array([*map(len, self._final_rows)])
        num_others = np.minimum(self._num_rows, self._length) - num_final - 1
        self.num_transitions = np.maximum(num_others, 0)
        self.may_go_on, self._is_first, self._num_new = ~ends[-1], ~goes_on[-1], 0
        obs, final_obs = (
            jax.tree.unflatten(self._structure, leaves) for leaves in (obs, final_obs)
        )
        flags = {"terminated": done & ~timeout, "truncated": None}
        step = Step(obs, action, reward, **flags, final_obs=final_obs)
        self._parts.append((step, goes_on, was_first))


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of each observation: uint8[T, E, N]."""
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:])).view(np.uint8)

"""Where each transition lies: known on the host, so that a draw needs no search and an add brings nothing back from the device."""

import numpy as np


class Places:
    """The rows of the transitions that a provisional buffer holds (`provisional.py`): E streams of `length` rows.

    Every add writes a step and the tail behind it; where an episode goes on, the step takes the place of the tail before it.
    """

    def __init__(self, num_envs: int, length: int):
        self._length = length
        self._heads = [0] * num_envs  # the row after the newest tail of each stream
        self._positions = np.zeros((length, num_envs), np.int32)  # of the last `length` transitions, by their number
        self._next = 0  # the number of the next transition, modulo `length`
        self.held = np.zeros(num_envs, np.int64)  # transitions of each stream

    def add(self, goes_on: np.ndarray) -> list[int]:
        """Note a transition of every stream. Returns their rows."""
        rows = []
        for env, follows in enumerate(goes_on.tolist()):
            position = self._wrap(self._heads[env] - follows)
            tail = self._wrap(position + 1)
            for _ in range(2):  # what is overwritten is the oldest, and the one after it
                if self.held[env] and self._positions[self._wrap(self._next - int(self.held[env])), env] in (position, tail):
                    self.held[env] -= 1
            self._heads[env] = self._wrap(tail + 1)
            self._positions[self._next, env] = position
            rows.append(env * self._length + position)
        self._next = self._wrap(self._next + 1)
        self.held += 1
        return rows

    def rows(self, env: np.ndarray, nth: np.ndarray) -> np.ndarray:
        """The row of each stream's `nth` transition, 0 the oldest that is held: int32[...]."""
        number = self._next - self.held[env] + nth
        number += self._length * (number < 0)
        return (env * self._length + self._positions[number, env]).astype(np.int32)

    def _wrap(self, position: int) -> int:
        if position < 0:
            return position + self._length
        return position - self._length if position >= self._length else position

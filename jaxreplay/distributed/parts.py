"""Parts of a state: those of several devices and processes, or one of a plain buffer's."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxreplay.distributed.processes import Processes
from jaxreplay.storage.state import ReplayState


class Part(NamedTuple):
    """Consecutive envs of a state, with all their rows: those of one device of this process, or
    all of a buffer."""

    env: int  # the first env
    state: ReplayState  # of these envs alone

    @property
    def env_stop(self) -> int:
        """The env after the last one."""
        return self.env + self.state.layout.num_envs


class Parts(NamedTuple):
    """The parts of a state, among all processes that save it."""

    own: Sequence[Part]  # those that this process saves
    bounds: Sequence[int]  # the first env of each part of any process, and the number of envs
    processes: Processes

    def having(self, env: int) -> Part | None:
        """Return the part of an env, or None if another process has it."""
        return next((part for part in self.own if part.env <= env < part.env_stop), None)

    def lie_in_one(self, env: int, env_stop: int) -> bool:
        """Return whether the envs `env` to `env_stop - 1` are in one part, of any process."""
        pairs = itertools.pairwise(self.bounds)
        return any(start <= env and env_stop <= stop for start, stop in pairs)

    @classmethod
    def of(cls, state: Any) -> "Parts":
        """Return a state as one part; a `Rollout`'s has none."""
        is_replay = isinstance(state, ReplayState)
        bounds = [0, state.layout.num_envs] if is_replay else []
        return cls([Part(0, state)] if is_replay else [], bounds, Processes())

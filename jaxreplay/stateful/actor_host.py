"""The replay as its actors see it."""

import warnings
from typing import Any

import numpy as np

from jaxreplay.actors.actors import Offer
from jaxreplay.actors.block import IN_FLIGHT
from jaxreplay.stateful.owner import StateOwner


class ActorHost:
    """Adds what actors send to a replay.

    Args:
      replay: The replay.
      owner: The owner of the rows.

    Attributes:
      others: Owners of the members that may get steps, too, by name. And bool[E + 1], for each env
        and for padding, whether a step there would not follow its last one.
    """

    def __init__(self, replay: Any, owner: StateOwner):
        self._replay, self._owner, self.lock = replay, owner, replay._monitor
        of = lambda one: (one.num_envs, one.autoreset, one.num_agents, one.layout().lockstep)
        self.others = {
            name: (one, np.ones(one.buffer.num_envs + 1, bool))
            for name, one in replay._owners.items()
            if one is not owner and of(one.buffer) == of(owner.buffer)
        }

    def insert(self, offer: Offer, timeout: float) -> bool:
        replay, owner, members = self._replay, self._owner, offer.blocks[0].members
        with self.lock:
            owners = owner, *(self.others[name][0] for name in members)
            if replay._is_closed or any(one.is_lost for one in owners):
                return False
            for name in members:
                if name in replay._actors and not replay._actors[name].is_stopped:
                    raise ValueError(f"actor.add: members: {name!r} has actors of its own")
            ends = offer.cut()  # first: it masks steps
            problem = self._add(owner, offer.steps, offer.envs, ends)
            for name, (other, gap) in self.others.items():
                gap[:-1] |= ends
                if name in members:
                    cut = gap & np.isin(np.arange(len(gap)), offer.envs)
                    steps = offer.steps[0], offer.mask_after(gap), None
                    self._add(other, steps, offer.envs, cut[:-1], num_steps=0)
                else:
                    gap[offer.envs] = True
            offer.note()
            if problem is not None:
                warnings.warn(f"actor.add: {problem}", stacklevel=2)
            return True

    def _add(
        self, owner: StateOwner, steps: Any, envs: np.ndarray, ends: np.ndarray, **counted: int
    ) -> str | None:
        """Add steps, after the episodes of some envs have ended. Return what is suspicious of the
        rows, or None."""
        step, mask, priority = steps
        block = owner.block_of(step, None, envs, mask, priority, is_ours=True)
        if ends.any() and owner.buffer.autoreset is not None:
            self._replay._change(owner, "end_streams", ends)
        return self._replay._add(owner, block._replace(**counted))

    def changed(self) -> None:
        with self._replay._monitor:
            self._replay._monitor.notify_all()

    def lead(self, num_steps: int) -> int:
        if self._replay._limiter is None:
            return IN_FLIGHT
        with self.lock:  # two while inserts lag behind, one while they are at most a block ahead
            ahead = [num_steps * (1 - more) for more in range(IN_FLIGHT)]
            return sum(map(self._replay._may_insert, ahead))

    def progress(self) -> tuple[float, float, bool]:
        replay, buffer = self._replay, self._owner.buffer
        with replay._monitor:
            limiter, missing = replay._limiter, 0.0
            ahead = (
                0.0
                if limiter is None
                else limiter.num_inserts - limiter.num_samples / limiter.ratio
            )
            is_hungry = replay._is_hungry
            if is_hungry and not replay._may_sample():
                is_short = not self._owner.has_batch()
                rows = max(buffer.min_size, buffer.batch_size) - self._owner.size()
                missing = max(rows if is_short else -ahead, 1.0)
        return ahead, missing, limiter is None and is_hungry

"""The replay as its actors see it."""

import warnings
from typing import Any

import jax

from jaxreplay.actors.actors import Offer
from jaxreplay.actors.block import IN_FLIGHT
from jaxreplay.stateful.owner import StateOwner


class ActorHost:
    """Adds what actors send to a replay.

    Args:
      replay: The replay.
      owner: The owner of the rows.
    """

    def __init__(self, replay: Any, owner: StateOwner):
        self._replay, self._owner, self.lock = replay, owner, replay._monitor

    def insert(self, offer: Offer, timeout: float) -> bool:
        replay, owner = self._replay, self._owner
        with self.lock:
            if replay._is_closed or owner.is_lost:
                return False
            if not owner.has_example:
                spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype)
                owner.init(jax.tree.map(spec, offer.steps[0]))
            ends = offer.cut()  # first: it masks steps, of which the next call may make a copy
            step, mask, priority = offer.steps
            num_steps, calls = owner.calls_of(step, None, offer.envs, mask, priority)
            if ends is not None:
                calls = [(owner.method("end_streams"), ends), *calls]
            problem = replay._add(owner, num_steps, calls)
            offer.note()
            if problem is not None:
                warnings.warn(f"actor.add: {problem}", stacklevel=2)
            return True

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

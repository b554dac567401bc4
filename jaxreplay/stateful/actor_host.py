"""The replay as its actors see it."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay.actors import Actors, local
from jaxreplay.actors.actor import Setup
from jaxreplay.actors.block import Inbox
from jaxreplay.stateful.owner import StateOwner


class ActorHost:
    """Adds what actors send to a replay.

    Args:
      replay: The replay.
      owner: The owner of the rows.
    """

    def __init__(self, replay: Any, owner: StateOwner):
        self._replay, self._owner, self.lock = replay, owner, replay._monitor
        self.num_envs = 0  # of each actor

    def insert(
        self,
        steps: PyTree,
        envs: Any,
        cut: Callable[[], list[int]],
        note: Callable[[], None],
        timeout: float,
    ) -> bool:
        replay, owner = self._replay, self._owner
        with replay._monitor:
            if replay._is_closed or owner.is_lost:
                return False
            try:
                replay._wait("add", replay._may_insert, timeout, str)
            except TimeoutError:
                return False
            if not owner.has_example:
                spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype)
                owner.init(jax.tree.map(spec, steps[0]))
            num_steps, calls = owner.calls_of(steps[0], None, envs, *steps[1:])
            if owner.buffer.autoreset is not None and (actors := cut()):
                ends = np.zeros((owner.buffer.num_envs // self.num_envs, self.num_envs), bool)
                ends[actors] = True
                calls = [(owner.method("end_streams"), ends.reshape(-1)), *calls]
            replay._add(owner, num_steps, calls)
            note()
        return True

    def changed(self) -> None:
        with self._replay._monitor:
            self._replay._monitor.notify_all()

    def progress(self) -> tuple[float, float]:
        replay, buffer = self._replay, self._owner.buffer
        with replay._monitor:
            limiter, missing = replay._limiter, 0.0
            ahead = (
                0.0
                if limiter is None
                else limiter.num_inserts - limiter.num_samples / limiter.ratio
            )
            if replay._num_waiting and not replay._may_sample():
                is_short = not self._owner.has_batch()
                rows = max(buffer.min_size, buffer.batch_size) - self._owner.size()
                missing = max(rows if is_short else -ahead, 1.0)
        return ahead, missing

    def start(
        self,
        act: Any,
        setup: Setup,
        saved: Any,
        params: Any,
        max_restarts: int,
        max_staleness: int | None,
        on: Any,
    ) -> Actors:
        """Start actors, as `Replay.start` does.

        Args:
          act: As for `Replay.start`, as are the others.
          setup: What the actors are told.
          saved: Numbers of a checkpoint, or None.
        """
        buffer, num_envs = self._owner.buffer, self._owner.buffer.num_envs
        checks.check_size("start", "num_actors", setup.num_actors)
        checks.check_size("start", "block_length", setup.block_length)
        self.num_envs = setup.num_envs
        if self.num_envs == 0 or self.num_envs * setup.num_actors != num_envs:
            raise ValueError(
                f"start: {num_envs} envs cannot be divided among num_actors={setup.num_actors}"
            )
        if buffer.layout().lockstep:
            raise ValueError(
                "start: actors need a write position for each env; make the buffer with "
                "allow_mask=True"
            )
        checks.check_callable("start", "act", act, ("actor",))
        if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
            raise ValueError(
                f"start: max_staleness must be None or an int of at least 0, got {max_staleness!r}"
            )
        inbox, version = Inbox(setup.num_actors), 0
        if saved is not None:
            inbox.resume(saved["added"])
            version = saved["version"]
        limiter = self._replay._limiter
        default = self._replay.buffer.batch_size / (limiter.ratio if limiter else 1.0)
        incarnations = [incarnation + 1 for incarnation, _ in inbox.added]
        engine = (on or local())(act, setup, incarnations, max_restarts)
        if params is not None:
            engine.publish(version, pickle.dumps(params, protocol=5))
        return Actors(engine, setup, self, inbox, version, max_staleness, default)

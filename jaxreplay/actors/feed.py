"""Steps of actors for a state that the caller has: a loop in `jit`, or one of several processes."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay.actors.actor import Actor, Setup
from jaxreplay.actors.actors import Actors, Offer
from jaxreplay.actors.block import IN_FLIGHT
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.host.arrays import as_stored


class Feed:
    """Blocks of steps from actors, each of one shape, for `extend` of a buffer with a mask.

    Several learners' processes (`jax.distributed`, `jaxreplay.sharded`) each have a `Feed` for
    their own envs, and make the same calls, whatever has arrived where: see docs/actors.md.
    Otherwise `Replay.start` is simpler.

    Args:
      buffer: Buffer of the actors' envs, with `allow_mask=True`; of several processes one with the
        envs of this process alone.
      example: One env's step or item; only structure, shapes and dtypes are read.
      block_length: Number of steps T of a block. Default: 64.

    Raises:
      ValueError: The buffer takes no mask.
    """

    def __init__(self, buffer: ReplayBuffer, example: PyTree, *, block_length: int = 64):
        buffer = buffer_of("Feed", buffer)
        if not buffer.allow_mask:
            raise ValueError("Feed: a block may have no steps of an env; use allow_mask=True")
        self._buffer, self._length = buffer, block_length
        self._example = checks.specs("Feed", as_stored("Feed", buffer, example))
        self.lock: Any = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._offer: Offer | None = None
        self._actors: Any = None
        self._is_waiting = False  # the last `take` found nothing

    def start(
        self,
        act: Callable[[Actor], Any],
        num_actors: int,
        *,
        saved: Any = None,
        seed: int = 0,
        version_key: str | None = None,
        **options: Any,
    ) -> Actors:
        """Start actors in other processes, as `jaxreplay.Replay.start` does.

        Args:
          act: Function `act(actor)`.
          num_actors: Number of actors.
          saved: `actors.state` of a checkpoint, to continue after. Default: that of the actors
            before, if there were any.
          seed: Seed from which each actor's is made; another one in each process. Default: 0.
          version_key: As for `jaxreplay.Replay.start`. Default: none.
          **options: `params`, `max_restarts`, `max_staleness`, `block_timeout` and `on`, likewise.

        Returns:
          The actors.

        Raises:
          ValueError: As for `jaxreplay.Replay.start`.
          RuntimeError: The actors before are not stopped, and have not failed.
        """
        before = self._actors
        if before is not None and before.failure is not None:
            before.stop()
        if before is not None and not before.is_stopped:
            raise RuntimeError("start: the actors before are not stopped; call their stop() first")
        saved = before.state if saved is None and before is not None else saved
        setup = Setup.of(self._buffer, self._example, num_actors, self._length, seed, version_key)
        self._actors = Actors(act, setup, self, self._buffer.batch_size, saved, **options)
        return self._actors

    def take(self, timeout: float = 0.0) -> tuple[PyTree, np.ndarray, np.ndarray]:
        """Return the steps of some blocks, at most one of each actor.

        Before they are added, `end_streams` must end the episodes of the envs that the last array
        names: their previous steps are lost.

        Args:
          timeout: Seconds to wait for a block. Default: 0.

        Returns:
          Steps or items [T, E, ...] of NumPy; a mask bool[T, E], False where there is no step; and
          bool[E], True for envs whose episodes end before. If nothing has arrived in time, the mask
          is False everywhere.

        Raises:
          RuntimeError: An actor has failed, or none was started.
          ValueError: Actors give priorities, which a `Feed` does not pass on.
        """
        if self._actors is None:
            raise RuntimeError("take: start actors first")
        num_envs = self._buffer.num_envs
        empty = lambda spec: np.zeros((self._length, num_envs, *spec.shape), spec.dtype)
        steps, mask = jax.tree.map(empty, self._example), np.zeros((self._length, num_envs), bool)
        ends = np.zeros(num_envs, bool)
        with self.lock:
            has_some = lambda: self._offer is not None or self._actors.failure is not None
            self._is_waiting = not has_some()
            self._is_waiting = not self._changed.wait_for(has_some, timeout)
            if (error := self._actors.failure) is not None:
                raise RuntimeError(f"the actors have stopped: {error}") from error
            if self._offer is not None:
                if self._offer.steps[2] is not None:
                    raise ValueError("take: actors of a Feed add steps without priority=")
                ends = self._offer.cut()
                given, its_mask, _ = self._offer.steps
                is_there = self._offer.envs < num_envs
                length, envs = len(its_mask), self._offer.envs[is_there]

                def put(into: np.ndarray, leaf: np.ndarray) -> None:
                    into[:length, envs] = leaf[:, is_there]

                jax.tree.map(put, (steps, mask), (given, its_mask))
                self._offer.note()
                self._offer = None
                self._changed.notify_all()
        return steps, mask, ends

    def insert(self, offer: Offer, timeout: float) -> bool:
        """Offer blocks to `take`; return False if it has not taken them for so many seconds."""
        with self.lock:
            self._offer = offer
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._offer is None, timeout)
            is_taken, self._offer = self._offer is None, None
            return is_taken

    def lead(self, num_steps: int) -> int:
        """Return how many blocks of each actor may be under way."""
        return IN_FLIGHT

    def changed(self) -> None:
        """Let `take` look whether actors have failed."""
        with self.lock:
            self._changed.notify_all()

    def progress(self) -> tuple[float, float, bool]:
        """Return 0: steps that were taken are learned from; 1 if the last `take` found nothing; and
        False."""
        return 0.0, float(self._is_waiting), False

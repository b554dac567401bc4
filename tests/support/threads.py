"""Actors in threads of this process: no process starts, and an error takes the place of a kill."""

import queue
import secrets
import threading
import traceback

import jax

from jaxreplay.actors.actor import IN_FLIGHT, Allowance, layout, run, views
from jaxreplay.actors.block import Block, News


class _Actor(threading.Thread):
    """An actor, and its link. Blocks lie in memory that is used again, as those of a process do."""

    def __init__(self, engine, index, incarnation):
        super().__init__(daemon=True)
        self._engine, self._place, self.allowance = engine, (index, incarnation), Allowance()
        self._specs = self._seen = None
        with engine.lock:  # a stop joins only what was started, and nothing starts after it
            if not engine.is_stopped:
                engine.actors[index] = self
                self.start()

    def run(self):
        engine, (index, incarnation) = self._engine, self._place
        tell = lambda *news: engine.found.put(News(*self._place, *news))
        tell("ready")
        try:
            run(engine.act, *self._place, engine.setup, self, self.allowance)
            if not self.allowance.is_stopped:
                tell("done")
        except BaseException:
            may_restart = engine.restarts[index] > 0
            engine.restarts[index] -= 1
            tell("lost" if may_restart else "failed", traceback.format_exc())
            if may_restart:
                _Actor(engine, index, incarnation + 1)

    def arrays(self, specs, number):
        setup = self._engine.setup
        if specs != self._specs:
            size = layout(specs, setup.block_length, setup.num_envs)[1]
            self._memory, self._specs = [bytearray(size) for _ in range(IN_FLIGHT)], specs
        self._whole = views(self._memory[number % IN_FLIGHT], specs, setup)
        return self._whole

    def send(self, number, length, version, *figures):
        index, incarnation = self._place
        steps = jax.tree.map(lambda leaf: leaf[:length], self._whole)
        # none is lost: what is missing before the block will not come
        block = Block(index, (incarnation, number), number, version, steps, *figures)
        self._engine.found.put(block)

    def newest(self):
        before, self._seen = self._seen, self._engine.params
        return self._seen if self._seen is not before else None


class Threads:
    """Engine of `jaxreplay.actors.Actors`, as `on=Threads`."""

    is_new = True

    def __init__(self, act, setup, incarnations, max_restarts):
        self.act, self.setup, self.run = act, setup, secrets.token_hex(4)
        self.found, self.params, self.is_stopped = queue.SimpleQueue(), None, False
        self.restarts, self.actors = [max_restarts] * setup.num_actors, {}
        self.lock = threading.Lock()
        for place in enumerate(incarnations):
            _Actor(self, *place)

    def receive(self, seconds):
        found = []
        try:
            found.append(self.found.get(timeout=seconds) if seconds else self.found.get_nowait())
            while True:
                found.append(self.found.get_nowait())
        except queue.Empty:
            return [one for one in found if one is not None]

    def allow(self, index, incarnation, acked, granted):
        actor = self.actors[index]
        if actor._place[1] == incarnation:
            actor.allowance.set(acked, granted)

    def publish(self, version, data):
        self.params = version, data

    def wake(self):
        self.found.put(None)

    def stop(self, seconds):
        with self.lock:
            self.is_stopped, actors = True, list(self.actors.values())
        for actor in actors:
            actor.allowance.stop()
            actor.join(seconds)

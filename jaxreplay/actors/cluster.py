"""Actors on a Ray cluster: blocks lie in its object store, and a mailbox has references to them.

The mailbox is an actor of Ray beside the learner. It starts the actors, again if they are lost, and
survives a learner if it has a name. What it has given to a learner it keeps until that says that
the steps were added.
"""

import asyncio
import contextlib
import dataclasses
import functools
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxreplay.actors.actor import Allowance, Setup, layout, run, views
from jaxreplay.actors.block import Block, News
from jaxreplay.actors.restarts import Restarts

_REST = 0.02  # seconds between looks of an actor that need not wait for an answer
_NAMESPACE = "jaxreplay"


def ray(
    *, name: str | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> Callable[..., "Cluster"]:
    """Return where actors run: on the Ray cluster that this process is connected to.

    If it is not connected, `ray.init()` does so, or starts one. It needs `jaxreplay[ray]`, on all
    nodes. The learner is a driver in the cluster, not one at `ray://`.

    Args:
      name: Name under which the actors survive the learner. If it is killed, a new one that starts
        actors under the same name goes on with these. Default: they end with the learner.
      environment: Environment variables of the actors. Default: `{"JAX_PLATFORMS": "cpu"}`, so that
        they leave accelerators to the learner.
      **options: Options of each actor, as `num_cpus=1` or `resources={"robot": 1}`, as for
        `ray.remote`.
    """
    runtime_env = dict(options.pop("runtime_env", {}))
    variables = {"JAX_PLATFORMS": "cpu"} if environment is None else dict(environment)
    runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **variables}
    return lambda *of: Cluster(*of, name=name, options={**options, "runtime_env": runtime_env})


class _RayLink:
    """An actor's connection to the mailbox."""

    def __init__(self, mailbox: Any, place: tuple[int, int], setup: Setup, allowance: Allowance):
        self._mailbox, self._place, self._setup, self._allowance = mailbox, place, setup, allowance
        self._memory: Any = None  # of a block
        self._specs: Any = None
        self._told = b""  # these, pickled once
        self._params: Any = None  # version and reference of the newest
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        import ray
        from ray.exceptions import RayError

        known = None
        try:
            while (found := ray.get(self._mailbox.watch.remote(*self._place, known))) is not None:
                known, allowed, params = found
                self._params = params
                self._allowance.set(*allowed)
                self._allowance.rest(_REST)
        except RayError:
            pass
        self._allowance.stop()

    def arrays(self, specs: Any, number: int) -> Any:
        if specs != self._specs:
            size = layout(specs, self._setup.block_length, self._setup.num_envs)[1]
            self._memory, self._specs = np.zeros(size, np.uint8), specs
            self._told = pickle.dumps(specs)
        return views(self._memory, specs, self._setup)

    def send(self, number: int, *figures: Any) -> None:
        import ray

        reference = None
        try:
            reference = ray.put(self._memory)
        finally:  # None, should an interrupt come: the learner does not wait for the block
            of = self._told, *figures
            self._mailbox.put.remote(*self._place, number, of, [reference])

    def newest(self) -> tuple[int, bytes] | None:
        import ray
        from ray.exceptions import RayError

        params, self._params = self._params, None
        try:
            return None if params is None else (params[0], ray.get(params[1][0]))
        except RayError:  # of a learner that is gone
            return None


class Worker:
    """An actor, as an actor of Ray."""

    def run(self, act: bytes, index: int, incarnation: int, setup: Setup, mailbox: Any) -> str:
        """Run it until it is done, and return ""; or the error that it raised."""
        from ray import cloudpickle

        allowance = Allowance()
        link = _RayLink(mailbox, (index, incarnation), setup, allowance)
        mailbox.begin.remote(index, incarnation)
        try:
            run(cloudpickle.loads(act), index, incarnation, setup, link, allowance)
        except Exception:
            return traceback.format_exc()
        return ""


class Mailbox:
    """Actors, and what they have sent and the learner has not acknowledged.

    Args:
      act: Function that each actor runs, pickled.
      setup: What all are told.
      max_restarts: As for `Restarts`.
      options: Options of each actor.
    """

    def __init__(self, act: bytes, setup: Setup, max_restarts: int, options: dict[str, Any]):
        num = setup.num_actors
        self._act, self._setup, self._options = act, setup, options
        self._restarts = [Restarts(max_restarts) for _ in range(num)]
        self._is_stopped = asyncio.Event()
        self._news: list[News] = []
        self._last: dict[int, News] = {}  # of each actor
        self._incarnations = [-1] * num
        self._blocks: list[dict[Any, Any]] = [{} for _ in range(num)]  # not acknowledged
        self._unread: list[Any] = []  # those that the learner has not got
        self._allowed = [(0, 0)] * num  # numbers of blocks, acknowledged and granted
        self._counts = [0] * num  # of changes of these, or of the parameters
        self._changed = [asyncio.Event() for _ in range(num)]
        self._params: Any = None
        self._run = ""
        self._learner: Any = None
        self._arrived = asyncio.Event()
        self._workers: dict[int, Any] = {}

    async def attach(self, learner: str, incarnations: Sequence[int], setup: Setup) -> str | None:
        """Give all to this learner from now on. The first one says which incarnations begin.

        Returns:
          The run of these actors, which is the first learner; None if they have other settings.
        """
        own, others = (dataclasses.replace(one, example=None) for one in (self._setup, setup))
        if own != others:
            return None
        is_first, self._learner = self._learner is None, learner
        self._run = learner if is_first else self._run
        self._unread = [(actor, place) for actor, of in enumerate(self._blocks) for place in of]
        self._news = [
            dataclasses.replace(one, acked=self._allowed[actor][0], granted=self._allowed[actor][1])
            for actor, one in self._last.items()
        ]
        if is_first:
            for place in enumerate(incarnations):
                self._start(*place)
        return self._run

    def _start(self, index: int, incarnation: int) -> None:
        import ray

        self._incarnations[index], self._allowed[index] = incarnation, (0, 0)
        worker: Any = ray.remote(Worker).options(**self._options).remote()
        mailbox = ray.get_runtime_context().current_actor
        done = worker.run.remote(self._act, index, incarnation, self._setup, mailbox)
        self._workers[index] = worker, asyncio.ensure_future(self._end(done, index, incarnation))

    async def _end(self, done: Any, index: int, incarnation: int) -> None:
        """Wait for the end of an actor; start it again if it was lost."""
        began = time.monotonic()
        try:
            why = await done
        except Exception as error:
            why = str(error) or repr(error)
        pause = self._restarts[index].pause_after(time.monotonic() - began) if why else None
        kind = "done" if not why else "failed" if pause is None else "lost"
        self._incarnations[index] = incarnation + 1
        self._change(index)
        self._tell(News(index, incarnation, kind, why))
        if pause is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_stopped.wait(), pause)
            if not self._is_stopped.is_set():
                self._start(index, incarnation + 1)

    def _tell(self, one: News) -> None:
        self._news.append(one)
        self._last[one.actor] = one
        self._arrived.set()

    def _change(self, index: int) -> None:
        self._counts[index] += 1
        self._changed[index].set()

    async def begin(self, index: int, incarnation: int) -> None:
        """Note that an actor has begun."""
        if incarnation == self._incarnations[index]:
            self._tell(News(index, incarnation, "ready"))

    async def put(
        self, index: int, incarnation: int, number: int, figures: Any, reference: list[Any]
    ) -> None:
        """Keep a block for the learner."""
        self._blocks[index][incarnation, number] = figures, reference
        self._unread.append((index, (incarnation, number)))
        self._arrived.set()

    async def watch(self, index: int, incarnation: int, known: int | None) -> Any:
        """Wait for what an actor does not know. Return a count of changes, what it is allowed, and
        the newest parameters; None if it is to stop."""
        while incarnation == self._incarnations[index] and known == self._counts[index]:
            self._changed[index].clear()
            await self._changed[index].wait()
        if incarnation != self._incarnations[index]:
            return None
        return self._counts[index], self._allowed[index], self._params

    async def take(self, learner: str, allowed: list[Any], seconds: float) -> Any:
        """Return news, and blocks that the learner has not got; wait for some as long.

        Args:
          learner: Name of the learner.
          allowed: For some actors their index and incarnation, how many of their blocks were added,
            and how many they may begin.
          seconds: Most seconds to wait.
        """
        if learner != self._learner:
            raise RuntimeError("another learner has these actors now")
        for index, incarnation, acked, granted in allowed:
            if incarnation == self._incarnations[index]:
                self._allowed[index] = acked, granted
                blocks = self._blocks[index]
                for place in [one for one in blocks if one < (incarnation, acked)]:
                    del blocks[place]
                self._change(index)
        if not (self._unread or self._news):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
        self._arrived.clear()
        (unread, self._unread), (news, self._news) = (self._unread, []), (self._news, [])
        found = []
        for index, place in unread:
            if place in self._blocks[index]:
                is_now = place[0] == self._incarnations[index]
                oldest = self._allowed[index][0] if is_now else 0
                found.append((index, place, oldest, *self._blocks[index][place]))
        return news, found

    async def publish(self, params: Any) -> None:
        """Tell all actors of parameters: their version, and a reference."""
        self._params = params
        for index in range(len(self._counts)):
            self._change(index)

    async def wake(self) -> None:
        """Let `take` return."""
        self._arrived.set()

    async def stop(self, seconds: float) -> None:
        """Stop the actors. Those that run after so many seconds are killed."""
        import ray

        self._is_stopped.set()
        for index in range(len(self._counts)):
            self._incarnations[index] += 1
            self._change(index)
        tasks = [task for _, task in self._workers.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for worker, _ in self._workers.values():
            ray.kill(worker)


class Cluster:
    """Actors on a Ray cluster.

    Args:
      act: Function that each runs.
      setup: What all are told.
      incarnations: Of each actor, unless the mailbox has them.
      max_restarts: As for `Restarts`.
      name: As for `ray`.
      options: Options of each actor.
    """

    def __init__(
        self,
        act: Any,
        setup: Setup,
        incarnations: Sequence[int],
        max_restarts: int,
        name: str | None,
        options: dict[str, Any],
    ):
        import ray
        from ray.cloudpickle import dumps  # type: ignore
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not ray.is_initialized():
            ray.init()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self._learner = uuid.uuid4().hex
        kept = {"name": name, "namespace": _NAMESPACE, "lifetime": "detached"}
        made: Any = ray.remote(Mailbox)
        self._mailbox = made.options(
            num_cpus=0,
            max_concurrency=4 * setup.num_actors + 100,
            max_task_retries=-1,
            scheduling_strategy=here,
            runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
            **({} if name is None else {**kept, "get_if_exists": True}),
        ).remote(dumps(act), setup, max_restarts, options)
        run: Any = ray.get(self._mailbox.attach.remote(self._learner, incarnations, setup))
        if run is None:
            raise ValueError(
                f"start: there are actors of the name {name!r} with other settings; stop them: "
                f"ray.kill(ray.get_actor({name!r}, namespace={_NAMESPACE!r}))"
            )
        self.run, self.is_new = run, run == self._learner
        self._setup, self._allowed = setup, []

    def receive(self, seconds: float) -> list[Block | News]:
        """Return blocks, and news of actors, that have arrived; wait for some as long."""
        import ray

        allowed, self._allowed = self._allowed, []
        news, blocks = ray.get(self._mailbox.take.remote(self._learner, allowed, seconds))
        memories = _fetched([reference for *_, [reference] in blocks])
        found = []
        for (index, place, oldest, of, _), memory in zip(blocks, memories, strict=True):
            told, length, version, *times = of
            steps = None  # lost with its actor
            if memory is not None:
                whole = views(memory, _specs_of(told), self._setup)
                steps = jax.tree.map(lambda leaf, length=length: leaf[:length], whole)
            found.append(Block(index, place, oldest, version, steps, *times))
        return [*found, *news]

    def allow(self, index: int, incarnation: int, acked: int, granted: int) -> None:
        """Tell an actor how many of its blocks were added, and how many it may begin; by the next
        `receive`."""
        self._allowed.append((index, incarnation, acked, granted))

    def publish(self, version: int, data: bytes) -> None:
        """Let actors find new parameters."""
        import ray

        self._params = ray.put(data)  # kept until the next: the store drops what nobody holds
        ray.get(self._mailbox.publish.remote((version, [self._params])))

    def wake(self) -> None:
        """Let `receive` return."""
        self._mailbox.wake.remote()

    def stop(self, seconds: float) -> None:
        """Stop the actors. Those that run after so many seconds are killed."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            ray.get(self._mailbox.stop.remote(seconds))
        ray.kill(self._mailbox)


_specs_of = functools.lru_cache(pickle.loads)


def _fetched(references: list[Any]) -> list[Any]:
    """Return what references refer to, or None for what is lost with its actor."""
    import ray
    from ray.exceptions import RayError

    try:
        if None not in references:
            return ray.get(references)
    except RayError:
        pass
    if len(references) == 1:
        return [None]
    return [_fetched([one])[0] for one in references]

"""Actors on a Ray cluster: each is an actor of Ray, whose answers are objects in Ray's store."""

import collections
import contextlib
import dataclasses
import hashlib
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from jaxreplay.actors.actor import Setup, heard, run
from jaxreplay.actors.block import IN_FLIGHT, ActorBlock, News, arrived
from jaxreplay.actors.outbox import Ask, Outbox

_NAMESPACE = "jaxreplay"


def ray(
    *, name: str | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> Callable[..., "Cluster"]:
    """Return where actors run: on the Ray cluster that this process is connected to.

    If it is not connected, `ray.init()` does so, or starts one. It needs `jaxreplay[ray]`, on all
    nodes. The learner is a driver in the cluster, not one at `ray://`.

    Args:
      name: Name under which the actors survive the learner. If it is killed, a new one that starts
        actors under the same name goes on with these; a learner that is replaced in this way gets
        an error. Default: they end with the learner.
      environment: Environment variables of the actors. Default: `{"JAX_PLATFORMS": "cpu"}`, so that
        they leave accelerators to the learner.
      **options: Options of each actor, as `num_cpus=1` or `resources={"robot": 1}`, as for
        `ray.remote`.
    """
    runtime_env = dict(options.pop("runtime_env", {}))
    variables = {"JAX_PLATFORMS": "cpu"} if environment is None else dict(environment)
    runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **variables}
    return lambda *of: Cluster(*of, name=name, options={**options, "runtime_env": runtime_env})


def _fetched(reference: list[Any]) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(reference[0])
    except RayError:  # of a learner that is gone
        return None


class Worker:
    """An actor, as an actor of Ray. A thread of it runs `act`, others its methods."""

    def __init__(self, act: bytes, index: int, incarnation: int, setup: Setup):
        from ray import cloudpickle

        self._outbox = Outbox(read=_fetched)
        of = cloudpickle.loads(act), index, incarnation, setup, self._outbox
        self._thread = threading.Thread(target=run, args=of, daemon=True)
        self._thread.start()

    def attach(self, learner: str) -> tuple[Any, ...]:
        """Answer this learner from now on."""
        return "ready", self._outbox.attach(learner)

    def answer(self, ask: Ask) -> tuple[Any, ...]:
        """Take a request, and wait for the answer to it."""
        return self._outbox.answer(ask)

    def stop(self, learner: str, seconds: float) -> bool:
        """Stop the actor, and wait until it has ended; return whether this learner has it."""
        if not self._outbox.stop(learner):
            return False
        self._thread.join(seconds)
        return True


@dataclasses.dataclass
class _Handle:
    """The learner's view of a worker; `pending` are its answers, in the order of the requests."""

    worker: Any
    incarnation: int
    pending: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)


class Cluster:
    """Actors on a Ray cluster.

    Args:
      act: Function that each runs.
      setup: What all are told.
      name: As for `ray`.
      options: Options of each actor.
    """

    def __init__(self, act: Any, setup: Setup, name: str | None, options: dict[str, Any]):
        import ray
        from ray.cloudpickle import dumps  # type: ignore
        from ray.util import list_named_actors

        if not ray.is_initialized():
            ray.init()
        self._act, self._setup, self._options = dumps(act), setup, options
        self._learner = self.run = uuid.uuid4().hex
        self._of: dict[int, _Handle] = {}
        self._bell: Any = queue.SimpleQueue()  # of actors whose answers have come
        self.known: dict[int, int] = {}
        self._is_replaced, self._name = False, name
        if name is None:
            return
        told = repr(dataclasses.replace(setup, example=None)).encode()
        kind = hashlib.sha256(told).hexdigest()[:8]
        named: list[Any] = list_named_actors(all_namespaces=True)
        for one in named:
            before, *of = one["name"].rsplit("/", 4)
            if (one["namespace"], before, len(of)) != (_NAMESPACE, name, 4):
                continue
            if of[1] != kind:
                raise ValueError(
                    f"start: there are actors of the name {name!r} with other settings; choose "
                    "another name, or stop them: for one in "
                    "ray.util.list_named_actors(all_namespaces=True): "
                    f"if one['name'].startswith({name + '/'!r}): ray.kill(ray.get_actor(**one))"
                )
            self.run, index = of[0], int(of[2])
            self.known[index] = max(self.known.get(index, 0), int(of[3]))
        self._name = f"{name}/{self.run}/{kind}"

    def begin(self, index: int, incarnation: int) -> None:
        """Start a worker, or go on with a known one."""
        import ray

        options = {**self._options, "max_concurrency": 4 * (IN_FLIGHT + 2)}
        if self._name is not None:
            options |= {"name": f"{self._name}/{index}/{incarnation}", "namespace": _NAMESPACE}
            options |= {"lifetime": "detached", "get_if_exists": True}
        made: Any = ray.remote(Worker)
        worker = made.options(**options).remote(self._act, index, incarnation, self._setup)
        self._of[index] = _Handle(worker, incarnation)
        self._call(index, worker.attach, self._learner)

    def _call(self, index: int, method: Any, *of: Any) -> None:
        """Call a method of a worker, whose answer comes by `answers`."""
        future = method.remote(*of).future()
        self._of[index].pending.append(future)
        future.add_done_callback(lambda _: self._bell.put(index))

    def ask(self, index: int, number: int, added: int, params: Any) -> None:
        """Ask an actor for a block."""
        if index in self._of:  # else `answers` tells
            self._call(
                index, self._of[index].worker.answer, Ask(self._learner, number, added, params)
            )

    def answers(self, seconds: float) -> list[ActorBlock | News]:
        """Return what has arrived, of each actor in the order of the requests; wait for some as
        long."""
        found = []
        for index in {*arrived(self._bell, seconds)}:
            handle = self._of.get(index)
            while handle and handle.pending and handle.pending[0].done():
                found.append(self._heard(index, handle, handle.pending.popleft()))
        return found

    def _heard(self, index: int, handle: _Handle, future: Any) -> ActorBlock | News:
        from ray.exceptions import RayError

        try:
            kind, *of = future.result()
        except RayError as error:
            kind, of = "end", [str(error) or repr(error)]
        if kind == "end":
            handle.pending.clear()
            if of[0]:
                self.end(index)
        self._is_replaced |= kind == "replaced"
        return heard(self._setup, index, handle.incarnation, kind, *of)

    def share(self, data: bytes) -> list[Any]:
        """Put parameters in Ray's store. Return a reference, which keeps them there."""
        import ray

        return [ray.put(data)]

    def wake(self) -> None:
        """Let `answers` return."""
        self._bell.put(None)

    def end(self, index: int) -> None:
        """Kill a worker that hangs."""
        import ray

        if index in self._of:
            ray.kill(self._of.pop(index).worker)

    def stop(self, seconds: float) -> None:
        """Stop the actors that no other learner has. Those that run after so many seconds are
        killed."""
        import ray
        from ray.exceptions import RayError

        workers = [handle.worker for handle in self._of.values()]
        stopped = [worker.stop.remote(self._learner, seconds) for worker in workers]
        ready = (
            ray.wait(stopped, num_returns=len(stopped), timeout=seconds + 1.0)[0] if stopped else []
        )
        for worker, one in zip(workers, stopped, strict=True):
            with contextlib.suppress(RayError):  # it is gone
                if ray.get(one) if one in ready else not self._is_replaced:
                    ray.kill(worker)
        self._of.clear()

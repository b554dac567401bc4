"""The state of a `Replay` whose rows lie on the host."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.index_buffer import Plan, made as made_of
from jaxreplay.buffers.jitted import method, program
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import example_of
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.samplers import ConsumingSampler
from jaxreplay.stateful.owner import Draws, StateOwner, key_of
from jaxreplay.storage.platforms import default_device
from jaxreplay.types import Sample

_ON_HOST = ("add", "extend", "clear", "end_streams", "drop", "write")


@dataclasses.dataclass
class Pending:
    """A batch that is chosen, and whose rows may be still gathered.

    Attributes:
      plan: Its plan.
      data: Its rows, or the future of them.
    """

    plan: Plan
    data: Any

    @property
    def is_valid(self) -> Any:
        return self.plan.batch.is_valid


class TieredOwner(StateOwner):
    """State of an index, and the rows on the host.

    Args:
      tier: The buffer.
      draws: As for `StateOwner`.
      ahead: Gather rows in a thread.
    """

    def __init__(self, tier: Tiered, draws: Draws, ahead: bool):
        self.tier, self._ahead = tier, ahead
        self._home, self._is_closed = default_device(), False
        # Functions of an index, a state and arguments; made once, since they are compared.
        made: dict[str, Any] = {name: _of(self.tier, name) for name in _ON_HOST}
        extend = made["extend"]
        made["extend"] = lambda index, state, block, **envs: extend(index, state, *block, **envs)
        self._methods = made | {"merge": self._merged}
        super().__init__(self.tier.index, draws, None)

    @property
    def saved(self) -> Tiered:
        return self.tier

    @property
    def whole(self) -> tuple[ReplayBuffer, Any]:
        state = self.state
        return self.tier.whole_buffer, state if state is None else self.tier.whole(state)

    @property
    def whole_buffer(self) -> ReplayBuffer:
        return self.tier.whole_buffer

    def on_device(self) -> Any:
        """Return a context in which the index lies where it did."""
        return jax.default_device(self._home)

    def method(self, name: str) -> Any:
        return self._methods.get(name) or method(name)

    def map_rows(self, buffer: Any, state: Any, function: Any, *arguments: Any, block: int) -> Any:
        return self.tier.map_rows(state, function, *arguments, block=block)

    def _merged(self, buffer: Any, state: Any, other: Any) -> Any:
        own = jax.tree.map(jax.numpy.copy, self.tier.whole(state))
        return self.tier.adopt(method("merge")(self.tier.whole_buffer, own, other))

    def stage(self, step: PyTree, env: Any, envs: Any, mask: Any, priority: Any) -> int | None:
        if self.tier.is_read_only:
            return None
        return super().stage(step, env, envs, mask, priority)

    def _extend_for(self, num_rows: int) -> Any:
        return self._methods["extend"]

    def _empty(self, example: PyTree) -> Any:
        return self.tier.init(example)

    @contextlib.contextmanager
    def opened(self) -> Iterator[bool]:
        example = None if self.has_example else self.tier.example_in_files
        if example is None:
            yield self.has_example
            return
        self.init(example)
        try:
            yield True
        finally:  # the first step tells its pytrees
            self.forget()
            self.tier.close()

    def free(self, when: str) -> None:
        super().free(when)
        self.tier.close()

    def close(self) -> None:
        self.tier.end_gathers()
        if self.tier.is_in_files and not self._is_closed:
            self.keep_waiting()
            self._is_closed = True
            self.tier.close()

    def check_not_lost(self) -> None:
        if self._is_closed:
            raise RuntimeError("this buffer is closed; its rows are in their folder")
        super().check_not_lost()

    def look_whether_lost(self, error: BaseException) -> None:
        super().look_whether_lost(error)
        if self.tier.is_lost:
            self._lost = f"in a call that raised {error!r}"

    def take(self, state: Any) -> None:
        self.init(example_of(state.layout, state.rows.steps))
        if self.tier.is_in_files and self.tier.num_written.any():
            raise ValueError(
                "Replay: the folder of its rows has some already; make it with example=, then "
                "merge the state"
            )
        self.put_loaded(self.tier.adopt(state), self.example)

    def get(self, index: Any) -> Sample:
        self.check_begun("get")
        plan = self.ask(_get_plan, index, self.draws.next)
        if self.buffer.view.is_random:
            self.draws.count()
        return made_of(plan, self.tier.take(plan))

    def drawn(self, function: Any, *arguments: Any) -> Any:
        """Return what a function of a buffer, a state and arguments reads of rows."""
        plan = self.ask(_plan, arguments, reads=function)
        return made_of(plan, self.tier.take(plan))

    def draw(self, batch_size: int, options: Mapping[str, Any], consume: bool = True) -> Any:
        """Return a `Pending` batch, or None if the buffer cannot sample."""
        checks.check_size("sample", "batch_size", batch_size)
        if not self.has_example or not self.can_draw(options):
            return None
        call, draw = self.ask, _draw_plan
        if isinstance(self.buffer.sampler, ConsumingSampler):
            call, draw = (self.change, _pop_plan) if consume else (self.ask, _look_plan)
        plan = call(draw, self.draws.next, options, batch_size=batch_size)
        self.draws.count()
        gather = self.tier.take_later if self._ahead else self.tier.take
        return Pending(plan, gather(plan))

    def finished(self, batch: Any) -> Sample:
        if isinstance(batch, Sample):  # of a checkpoint
            return batch
        data = batch.data if isinstance(batch.data, list) else batch.data.result()
        return made_of(batch.plan, data)


def _of(tier: Tiered, name: str) -> Any:
    """Return a method of a tiered buffer as a function of its index, too."""
    return lambda index, *given, **options: getattr(tier, name)(*given, **options)


@functools.partial(program, static=("batch_size",), on_one_core=True)
def _draw_plan(index: Any, state: Any, draw: Any, options: Any, batch_size: int) -> Plan:
    return index.plan("sample", state, key_of(draw), batch_size=batch_size, **options)[1]


@functools.partial(program, changes=True, static=("batch_size",), on_one_core=True)
def _pop_plan(index: Any, state: Any, draw: Any, options: Any, batch_size: int) -> tuple[Any, Plan]:
    return index.plan("pop", state, key_of(draw), batch_size=batch_size, **options)


@functools.partial(program, static=("batch_size",), on_one_core=True)
def _look_plan(index: Any, state: Any, draw: Any, options: Any, batch_size: int) -> Plan:
    return index.plan("pop", state, key_of(draw), batch_size=batch_size, **options)[1]


@functools.partial(program, static=("reads",))
def _plan(index: Any, state: Any, arguments: Any, reads: Any) -> Plan:
    return index.plan(reads, state, *arguments)[1]


@program
def _get_plan(index: Any, state: Any, of: Any, draw: Any) -> Plan:
    return index.plan("get", state, of, key_of(draw))[1]

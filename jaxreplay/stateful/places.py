"""The place of a `Replay`'s rows: its state on a device, or the host."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.buffers.index_buffer import Plan, gathered, made
from jaxreplay.buffers.jitted import method, program, programs
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import is_alive
from jaxreplay.buffers.step_checks import of_call
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.buffers.verbs import VERBS
from jaxreplay.storage.platforms import default_device
from jaxreplay.types import Sample


def key_of(draw: tuple[Any, Any]) -> Key:
    """Return the key of a draw, from its seed and number."""
    seed, number = draw
    return jax.random.fold_in(jax.random.key(seed), number)


class OnDevice:
    """Rows in the state, on a device.

    Args:
      buffer: The buffer.
      device: Where the state lies. Default: JAX's default device.

    Attributes:
      buffer: The buffer with which programs are called.
      saved: The buffer of which a `Checkpointer` saves states.
      whole_buffer: The buffer of states with all rows.
      device: As above, or None.
      home: Where new states lie, or None.
      is_read_only: Whether no rows can be added.
      outlasts: Whether the rows stay when the process ends.
      example: Shapes and dtypes of one env's step, of rows that are there before a state is; or
        None.
    """

    is_read_only = outlasts = False
    example: Any = None

    def __init__(self, buffer: ReplayBuffer, device: Any = None):
        self.buffer: Any = buffer
        self.saved: Any = buffer
        self.whole_buffer = buffer
        self.device = self.home = jax.devices(device)[0] if isinstance(device, str) else device

    def init(self, example: PyTree) -> Any:
        """Return the state at the beginning."""
        return self.buffer.init(example)

    def adopt(self, state: Any) -> Any:
        """Return the state with the rows of another buffer's state."""
        return method("adopt")(self.buffer, state)

    def whole(self, state: Any) -> Any:
        """Return the state with all rows."""
        return state

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method that changes the state, called as function(buffer, state, ...)."""
        return method(name)

    def extend(self, is_few: bool) -> Callable[..., Any]:
        """Return what adds a block: a function of a buffer, a state and a block, and `envs`."""
        return _extend[is_few]

    def is_lost(self, state: Any) -> bool:
        """Return whether a call that failed has lost rows."""
        return state is not None and not is_alive(state)

    def read(self, owner: Any, function: Any, num_rows: int, *arguments: Any) -> Any:
        """Return what a function of a buffer, a state and arguments reads of so many rows, after
        the steps that wait were added."""
        reads, adds = _reading(function)
        return owner.read(reads, adds, num_rows, *arguments)

    def sample(
        self, owner: Any, batch_size: int, options: Mapping[str, Any], consume: bool, consumes: bool
    ) -> tuple[Any, Any]:
        """Return a batch, and whether the buffer can sample.

        Args:
          owner: Its state.
          batch_size: Number of items.
          options: Of `ReplayBuffer.sample`.
          consume: Whether the batch is one of those that are learned from.
          consumes: Whether it removes rows.
        """
        if not consume:
            owner.flush()  # one program for all looks
        draw, reads = owner.draws.next, None if consumes else _sample
        return owner.read(reads, _add_and_sample, batch_size, draw, options, batch_size=batch_size)

    def begun(self, batch: Any) -> Any:
        """Return a batch that `sample` returned, whose rows are on their way."""
        return batch

    def finished(self, batch: Any) -> Sample:
        """Return the batch of what `begun` returned."""
        return batch

    def free(self) -> None:
        """Give up the rows."""

    def close(self) -> None:
        """Give back what others may use."""


@dataclasses.dataclass
class Pending:
    """A batch that is chosen, and whose rows may be still gathered.

    Attributes:
      plan: Its plan.
      data: The rows of each buffer by name, or the futures of them.
    """

    plan: Plan
    data: dict[str, Any]

    @property
    def is_valid(self) -> Any:
        return self.plan.batch.is_valid

    @property
    def sample(self) -> Sample:
        found = {
            member: data if isinstance(data, list) else data.result()
            for member, data in self.data.items()
        }
        return made(self.plan, gathered(self.plan, found))


class OnHost(OnDevice):
    """Rows on the host, and an index of them on JAX's default device.

    Args:
      tier: The buffer.
      ahead: Whether a thread gathers the rows of batches.
    """

    def __init__(self, tier: Tiered, ahead: bool):
        super().__init__(tier.index)
        self.tier = self.saved = tier
        self.whole_buffer, self.home, self.ahead = tier.whole_buffer, default_device(), ahead
        self.is_read_only, self.outlasts = tier.read_only is not None, tier.is_in_files

    @property
    def example(self) -> Any:
        return self.tier.example_in_files

    def init(self, example: PyTree) -> Any:
        return self.tier.init(example)

    def adopt(self, state: Any) -> Any:
        return self.tier.adopt(state)

    def whole(self, state: Any) -> Any:
        return None if state is None else self.tier.whole(state)

    def method(self, name: str) -> Callable[..., Any]:
        if VERBS[name].changes != "state":
            return method(name)
        call = getattr(self.tier, name)
        return lambda index, *given, **options: call(*given, **options)

    def extend(self, is_few: bool) -> Callable[..., Any]:
        return self._extend

    def _extend(self, buffer: Any, state: Any, block: Any, **envs: Any) -> Any:
        return self.tier.extend(state, *block, **envs)

    def is_lost(self, state: Any) -> bool:
        return super().is_lost(state) or self.tier.is_lost

    def read(self, owner: Any, function: Any, num_rows: int, *arguments: Any) -> Any:
        plan = owner.ask(_plan, arguments, reads=function)
        return made(plan, self.tier.take(plan))

    def sample(
        self, owner: Any, batch_size: int, options: Mapping[str, Any], consume: bool, consumes: bool
    ) -> tuple[Any, Any]:
        given = owner.draws.next, options
        if consumes:
            return owner.change(_pop_plan, *given, batch_size=batch_size)
        what = "pop" if self.buffer.sampler.consumes else "sample"
        return owner.ask(_sample_plan, *given, what=what, batch_size=batch_size)

    def begun(self, batch: Plan) -> Pending:
        return Pending(batch, {self.buffer.member: self.gather(batch)})

    def gather(self, plan: Plan) -> Any:
        """Return rows of a plan, or their future."""
        return (self.tier.take_later if self.ahead else self.tier.take)(plan)

    def finished(self, batch: Any) -> Sample:
        return batch.sample if isinstance(batch, Pending) else batch  # else of a checkpoint

    def free(self) -> None:
        self.tier.close()

    def close(self) -> None:
        self.tier.end_gathers()
        if self.outlasts:
            self.tier.close()


@functools.cache
def _reading(function: Any) -> tuple[Any, Any]:
    """Return `programs` of a function that reads rows, and of one that adds a block before."""

    def adding(buffer: ReplayBuffer, state: Any, block: Any, *given: Any, **envs: Any) -> Any:
        state = state if block is None else buffer.extend(state, *block, **envs)
        return state, function(buffer, state, *given)

    return programs(function), programs(adding, changes=True)


@functools.partial(programs, changes=True)
def _extend(buffer: ReplayBuffer, state: Any, block: Any, **envs: Any) -> Any:
    return buffer.extend(state, *block, **envs)


@functools.partial(programs, static=("batch_size",))
def _sample(
    buffer: ReplayBuffer, state: Any, draw: Any, options: Any, batch_size: int
) -> tuple[Sample, jax.Array]:
    """Return a batch that consumes nothing, and whether the buffer can sample with the options."""
    _, batch = sampled(buffer, state, draw, options, batch_size=batch_size)
    return batch, of_call("sample", buffer, options).can_sample(state)


@functools.partial(programs, changes=True, static=("batch_size",))
def _add_and_sample(
    buffer: ReplayBuffer,
    state: Any,
    block: Any,
    draw: Any,
    options: Any,
    batch_size: int,
    **envs: Any,
) -> tuple[Any, tuple[Sample, jax.Array]]:
    """Add a block of steps, or None, then sample, or `pop` if the sampler consumes rows.

    Returns:
      The state; a batch, and whether the buffer could sample.
    """
    if block is not None:
        state = buffer.extend(state, *block, **envs)
    can_sample = of_call("sample", buffer, options).can_sample(state)
    state, batch = sampled(buffer, state, draw, options, batch_size=batch_size)
    return state, (batch, can_sample)


def consumes_rows(buffer: Any) -> bool:
    """Return whether samples consume rows: not those of a mixture."""
    return getattr(getattr(buffer, "sampler", None), "consumes", False)


def sampled(buffer: Any, state: Any, draw: Any, options: Any, **size: int) -> tuple[Any, Sample]:
    """Return the state after a batch, and the batch."""
    key = key_of(draw)
    if consumes_rows(buffer):
        return buffer.pop(state, key, **size, **options)
    return state, buffer.sample(state, key, **size, **options)


@functools.partial(program, static=("what", "batch_size"), on_one_core=True)
def _sample_plan(
    index: Any, state: Any, draw: Any, options: Any, what: str, batch_size: int
) -> tuple[Plan, jax.Array]:
    can_sample = of_call("sample", index, options).can_sample(state)
    return index.plan(what, state, key_of(draw), batch_size=batch_size, **options)[1], can_sample


@functools.partial(program, changes=True, static=("batch_size",), on_one_core=True)
def _pop_plan(index: Any, state: Any, draw: Any, options: Any, batch_size: int) -> Any:
    can_sample = of_call("sample", index, options).can_sample(state)
    state, plan = index.plan("pop", state, key_of(draw), batch_size=batch_size, **options)
    return state, (plan, can_sample)


@functools.partial(program, static=("reads",))
def _plan(index: Any, state: Any, arguments: Any, reads: Any) -> Plan:
    return index.plan(reads, state, *arguments)[1]

"""The index of a buffer whose rows lie on the host: it chooses rows, and reads none."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import named
from jaxreplay._util.struct import Node, static_field
from jaxreplay.buffers.jitted import program
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.split_programs import Request, Split, split
from jaxreplay.storage.state import ReplayState
from jaxreplay.storage.stored_arrays import BitsArray, HostArray
from jaxreplay.types import Sample, Step


class Chosen(Node):
    """Rows of one buffer that are chosen, and not gathered yet.

    Attributes:
      rows: int32[R], the numbers of all rows to gather, one request after another.
      laps: uint32[E], number of times that each env's ring had wrapped.
      positions: int32[E], position of each env's next write.
    """

    rows: jax.Array
    laps: jax.Array
    positions: jax.Array


class Plan(Node):
    """A batch whose rows are chosen, and not gathered yet.

    Attributes:
      chosen: The rows, by the name of the buffer that has them: "", or that of a mixture's member.
      needed: What else is needed to make the batch of them: arrays [B, ...].
      known: The leaves of the batch that depend on no row: indices, probabilities, weights, [B].
      parts: The program that reads the batch, in two parts.
    """

    chosen: dict[str, Chosen]
    needed: list[jax.Array]
    known: list[jax.Array]
    parts: Split = static_field()

    @property
    def batch(self) -> Sample[Any]:
        """The batch as far as it is known, with None in place of what depends on the rows."""
        none = itertools.repeat(None)
        return self.parts.joined(none, self.known, none)


def requests_of(plan: Plan, member: str) -> list[tuple[str, Request]]:
    """Return what is gathered of a buffer: the names of leaves, and requests."""
    return [(one.name[1], one) for one in plan.parts.requests if one.name[0] == member]


def gathered(plan: Plan, found: Mapping[str, list[Any]]) -> list[Any]:
    """Return the rows in the order of all requests, from those of each buffer by name."""
    left = {member: iter(leaves) for member, leaves in found.items()}
    return [next(left[request.name[0]]) for request in plan.parts.requests]


def planned(
    function: Callable[..., Any], arguments: Any, states: Mapping[str, ReplayState]
) -> tuple[Plan, Any]:
    """Return the plan of a function's result, and its other result, as `split` has them.

    Args:
      function: As for `split`.
      arguments: Its arguments.
      states: The states among these whose rows lie on the host, by the names of their buffers.
    """
    parts = split(function, *arguments)
    numbers, needed, known, other = parts.first(*jax.tree.leaves(arguments))
    chosen = {}
    for member, state in states.items():
        own = [
            jnp.asarray(number, jnp.int32).reshape(-1)
            for number, request in zip(numbers, parts.requests, strict=True)
            if request.name[0] == member
        ]
        rows = jnp.concatenate([jnp.zeros(0, jnp.int32), *own])
        chosen[member] = Chosen(rows, state.counters.lap, state.counters.position)
    return Plan(chosen, needed, known, parts), other


class IndexBuffer(ReplayBuffer[Any]):
    """A buffer whose states have no rows, but what is known of them: flags, counters, priorities.

    It is a `ReplayBuffer`; its samples can be drawn by a `Tiered` alone.

    Args:
      member: Its name in a mixture, which tells the rows of several members apart. Default: "".
    """

    member: str = ""

    def _empty(self, example: PyTree, platform: str | None = None) -> ReplayState:
        return mapped(super()._empty(example, platform), self.absent)

    def absent(self, name: str, leaf: Any) -> Any:
        """Return a stored leaf as one whose rows lie on the host."""
        if isinstance(leaf, BitsArray):
            return leaf.replace(bits=self.absent(name, leaf.bits))
        return HostArray((self.member, name), tuple(leaf.shape), np.dtype(leaf.dtype))

    def plan(
        self, what: Any, state: ReplayState, *rest: Any, **options: Any
    ) -> tuple[ReplayState, "Plan"]:
        """Return the state after a call that reads rows, and the plan of its result.

        Args:
          what: "sample", "pop" or "get", the method that is called; or another function of a buffer
            and a state.
          state: The state.
          rest: Its further arguments.
          options: Its options.
        """
        method: Any = what if callable(what) else getattr(type(self), what)
        self.check_given("sample" if callable(what) else what, options)
        size = {"batch_size": options.pop("batch_size")} if "batch_size" in options else {}

        def call(state: ReplayState, rest: Any, options: Any) -> Any:
            found = method(self, state, *rest, **size, **options)
            after, batch = found if what == "pop" else (state, found)
            return batch, after.sampler if what == "pop" else None

        plan, sampler = planned(call, (state, rest, options), {self.member: state})
        return state.replace(sampler=sampler) if what == "pop" else state, plan


def mapped(state: ReplayState, function: Callable[[str, Any], Any]) -> ReplayState:
    """Return a state whose rows are those that a function returns, given the name and the stored
    leaf of each; flags of several agents stay."""
    steps = state.rows.steps
    flags = steps.terminated if isinstance(steps, Step) else None
    if flags is not None:
        steps = steps.replace(terminated=None)
    leaves, structure = jax.tree.flatten(steps, is_leaf=stored_arrays.is_compound)
    names = [name for name, _ in named(steps, is_leaf=stored_arrays.is_compound)]
    steps = jax.tree.unflatten(structure, map(function, names, leaves))
    steps = steps if flags is None else steps.replace(terminated=flags)
    return state.replace(rows=state.rows.replace(steps=steps))


def made(plan: Plan, data: list[Any]) -> Sample[Any]:
    """Return the batch of a plan and its rows, as `Tiered.read` does, outside of `jit`. What is not
    computed goes through no program."""
    parts = plan.parts
    rows = [jax.device_put(data[place]) for place in parts.rows]
    return parts.joined(_second(parts, data, plan.needed), plan.known, rows)


@functools.partial(program, on_one_core=True)
def _second(parts: Split, data: Any, needed: Any) -> list[Any]:
    return parts.second(*data, *needed)

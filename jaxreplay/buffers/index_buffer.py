"""The index of a buffer whose rows lie on the host: it chooses rows, and reads none."""

import functools
import itertools
from collections.abc import Callable
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
from jaxreplay.storage.split_programs import Split, split
from jaxreplay.storage.state import ReplayState
from jaxreplay.storage.stored_arrays import BitsArray, HostArray
from jaxreplay.types import Sample, Step


class Plan(Node):
    """A batch whose rows are chosen, and not gathered yet.

    Attributes:
      rows: int32[R], the numbers of all rows to gather, one request after another.
      laps: uint32[E], number of times that each env's ring had wrapped.
      positions: int32[E], position of each env's next write.
      needed: What else is needed to make the batch of them: arrays [B, ...].
      known: The leaves of the batch that depend on no row: indices, probabilities, weights, [B].
      parts: The program that reads the batch, in two parts.
    """

    rows: jax.Array
    laps: jax.Array
    positions: jax.Array
    needed: list[jax.Array]
    known: list[jax.Array]
    parts: Split = static_field()

    @property
    def batch(self) -> Sample[Any]:
        """The batch as far as it is known, with None in place of what depends on the rows."""
        return self.parts.joined(itertools.repeat(None), self.known)


class IndexBuffer(ReplayBuffer[Any]):
    """A buffer whose states have no rows, but what is known of them: flags, counters, priorities.

    It is a `ReplayBuffer`; its samples can be drawn by a `Tiered` alone.
    """

    def _empty(self, example: PyTree, platform: str | None = None) -> ReplayState:
        return mapped(super()._empty(example, platform), absent)

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

        arguments = state, rest, options
        parts = split(call, *arguments)
        numbers, needed, known, sampler = parts.first(*jax.tree.leaves(arguments))
        flat = [jnp.asarray(number, jnp.int32).reshape(-1) for number in numbers]
        plan = Plan(
            rows=jnp.concatenate([jnp.zeros(0, jnp.int32), *flat]),
            laps=state.counters.lap,
            positions=state.counters.position,
            needed=needed,
            known=known,
            parts=parts,
        )
        return state.replace(sampler=sampler) if what == "pop" else state, plan


def absent(name: str, leaf: Any) -> Any:
    """Return a stored leaf as one whose rows lie on the host."""
    if isinstance(leaf, BitsArray):
        return leaf.replace(bits=absent(name, leaf.bits))
    return HostArray(name, tuple(leaf.shape), np.dtype(leaf.dtype))


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
    """Return the batch of a plan and its rows, as `Tiered.read` does, outside of `jit`. What is
    known of it goes through no program."""
    return plan.parts.joined(_second(plan.parts, data, plan.needed), plan.known)


@functools.partial(program, on_one_core=True)
def _second(parts: Split, data: Any, needed: Any) -> list[Any]:
    return parts.second(*data, *needed)

"""What goes into a buffer and what comes out: every field's axes, dtype and unit.

Axes: T time, E env, B batch. A pytree of observations may hold any number of leaves, each with its
own trailing axes.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.hints import unknown_field
from jaxreplay._util.struct import Node

T = TypeVar("T")  # what a view makes of a row: a `Transition`, say


class Step(Node):
    """One step of every env: `add` takes leaves `[E, ...]`, `extend` takes `[T, E, ...]`, and
    `init` takes one env's step `[...]`.

    A mapping, dataclass or NamedTuple with these fields is taken wherever a `Step` is.

    Fields:
      obs: pytree; the observation that the action was chosen from, so not the one that the env's
        step returned.
      action: pytree.
      reward: float or int [E, ...]; received for this action, undiscounted.
      terminated: bool[E]; the episode ended here by the task's own rules: there is no value beyond.
      truncated: bool[E]; the episode was cut here, as by a time limit: its value goes on.
      final_obs: pytree as obs; the observation after this action, read only where the episode
        ended; with `autoreset="same_step"`, which needs it.
      extras: pytree of further fields, handed back from the candidate row.

    The flags, and all fields after them, are keyword arguments: their order cannot be confused.
    """

    obs: PyTree
    action: PyTree
    reward: Any
    _: dataclasses.KW_ONLY
    terminated: Any
    truncated: Any
    final_obs: PyTree = None
    extras: PyTree = None


class Transition(Node):
    """An n-step transition, leaves `[B, ...]`: a target is `reward + discount * value(next_obs)`.

    Source: Sutton and Barto, "Reinforcement Learning" (2018), section 7.1; `num_steps` is below n
    where the episode ended sooner.

    Fields:
      obs: pytree; where the window starts. action: pytree; taken there.
      reward: floating [B, ...]; the sum of gamma^j r_j over the window.
      discount: float32[B], in [0, 1]; gamma^num_steps, and 0 where the window reached a
        termination.
      next_obs: pytree as obs; the observation after `num_steps` steps, the true final one at an
        episode's end.
      num_steps: int32[B], in 1 .. n.
      extras: pytree; the candidate step's own.
    """

    obs: PyTree
    action: PyTree
    reward: jax.Array
    discount: jax.Array
    next_obs: PyTree
    num_steps: jax.Array
    extras: PyTree


class Index(Node):
    """Names one stored row for good: an index drawn before its row was overwritten is known to be
    stale.

    Fields:
      row: int32[B], in [0, capacity); env * (rows per stream) + position.
      lap: uint32[B]; how often the stream had gone round when the row was written, modulo 2^32.
    """

    row: jax.Array
    lap: jax.Array


class Sample(Generic[T], Node):  # in this order: `flax` before 0.12 ends the chain of bases
    """A batch of B items, and where they came from.

    Fields:
      experience: pytree [B, ...]; the items, as the view makes them.
      index: for `update_priorities` and `get`; of an item that is not valid, it names no row.
      probability: float32[B]; what one draw has for this item, normalized over the buffer; 0 where
        not valid.
      weight: float32[B]; what to multiply each item's loss by: 1 for samplers without priorities,
        the importance weight for those with them, 0 where not valid.
      is_valid: bool[B]; False where there was nothing to draw: the item is finite and must weigh
        nothing.
      source: int32[B], of a mixture's batch; the number of each item's member, in the order in
        which they were given. Index and probability are those in the member. None of one buffer.
    """

    experience: T
    index: Index
    probability: jax.Array
    weight: jax.Array
    is_valid: jax.Array
    source: jax.Array | None = None

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(unknown_field(name, vars(self).get("experience")))


class SequenceBatch(Node):
    """Steps in a row, leaves `[B, T, ...]`, T = burn_in + length; of `obs` and `is_first` T + 1,
    the last being what the last step led to.

    Unroll a recurrent network from `recurrent_state`, or its initial one, and reset it before each
    step where `is_first`: so the steps before an episode's start, which are 0, leave no trace.
    Learn where `mask`: the burn-in has real steps that only warm the memory up. A truncated step is
    bootstrapped from `obs[:, t + 1]`, as any other.

    Fields:
      obs: pytree [B, T + 1, ...]; the true final one after an episode's last step, then 0.
      action: pytree [B, T, ...]. reward: [B, T, ...]. terminated, truncated: bool[B, T]. All are 0
        where no step is.
      is_first: bool[B, T + 1]; the step opens an episode.
      mask: bool[B, T]; a step to learn from: no burn-in, no padding, no final observation.
      recurrent_state: pytree [B, ...]; the one stored with the first step; None unless asked for.
      extras: pytree [B, T, ...], without the recurrent state.
    """

    obs: PyTree
    action: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    is_first: jax.Array
    mask: jax.Array
    recurrent_state: PyTree
    extras: PyTree


class Pair(Node):
    """An observation and a later one, leaves `[B, ...]`.

    Fields:
      obs: pytree. action: pytree; taken there.
      future_obs: pytree as obs; the observation `num_steps` rows later, an episode's final one
        included.
      num_steps: int32[B], at least 1; 0, with the same observation, where none is known (see
        `FutureView`). It counts rows: across episodes, final observations too.
      extras: pytree; the candidate step's own.
    """

    obs: PyTree
    action: PyTree
    future_obs: PyTree
    num_steps: jax.Array
    extras: PyTree

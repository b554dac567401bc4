"""What goes into a buffer and what comes out: every field's axes, dtype and unit.

Axes: T time, E env, B batch. A pytree of observations may hold any number of leaves, each with its own trailing axes.
"""

from typing import Any

import jax

from jaxreplay.struct import Node


class Step(Node):
    """One step of every env: `add` takes leaves `[E, ...]`, `extend` takes `[T, E, ...]`, and `init` takes one env's step `[...]`.

    A mapping, dataclass or NamedTuple with these fields is taken wherever a `Step` is.

    Fields:
      obs: pytree; the observation that the action was chosen from, so not the one that the env's step returned.
      action: pytree.
      reward: float or int [E, ...]; received for this action, undiscounted.
      terminated: bool[E]; the episode ended here by the task's own rules: there is no value beyond.
      truncated: bool[E]; the episode was cut here, as by a time limit: its value goes on.
      final_obs: pytree as obs; the observation after this action, read only where the episode ended; for `autoreset="same_step"`.
      extras: pytree of further fields, handed back from the anchor row.
    """

    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any = None
    extras: Any = None


class Transition(Node):
    """An n-step transition, leaves `[B, ...]`: a target is `reward + discount * value(next_obs)`.

    Source: Sutton and Barto, "Reinforcement Learning" (2018), section 7.1; `num_steps` is below n where the episode ended sooner.

    Fields:
      obs: pytree; where the window starts. action: pytree; taken there.
      reward: floating [B, ...]; the sum of gamma^j r_j over the window.
      discount: float32[B], in [0, 1]; gamma^num_steps, and 0 where the window reached a termination.
      next_obs: pytree as obs; the observation after `num_steps` steps, the true final one at an episode's end.
      num_steps: int32[B], in 1 .. n.
      extras: pytree; the anchor step's own.
    """

    obs: Any
    action: Any
    reward: jax.Array
    discount: jax.Array
    next_obs: Any
    num_steps: jax.Array
    extras: Any


class Index(Node):
    """Names one stored row for good: an index drawn before its row was overwritten is known to be stale.

    Fields:
      row: int32[B], in [0, capacity); env * (rows per stream) + position.
      lap: uint32[B]; how often the stream had gone round when the row was written, modulo 2^32.
    """

    row: jax.Array
    lap: jax.Array


class Sample(Node):
    """A batch: `items` as the view makes them, and where they came from.

    Fields:
      items: pytree [B, ...].
      index: for `update_priorities` and `get`; of an item that is not valid, it names no row.
      probability: float32[B]; what one draw has for this item, normalized over the buffer; 0 where not valid.
      is_valid: bool[B]; False where there was nothing to draw: the item is finite and must weigh nothing.
      source: int32[B], of a mixture's batch; the number of each item's member, in the order in which they were given. Index and
        probability are those in the member. None of one buffer.
    """

    items: Any
    index: Index
    probability: jax.Array
    is_valid: jax.Array
    source: jax.Array | None = None

"""What goes into a buffer and what comes out: every field's axes, dtype and unit.

Axes: T time, E env, B batch. A pytree of observations may hold any number of leaves, each with its own trailing axes.
"""

from typing import Any

import flax.struct
import jax


class Step(flax.struct.PyTreeNode):
    """One step of every env: `add` takes leaves `[E, ...]`, `extend` takes `[T, E, ...]`, and `init` takes one env's step `[...]`.

    A mapping with these keys is taken wherever a `Step` is.
    """

    obs: Any  # pytree: the observation that the action was chosen from, so not the one that the env's step returned
    action: Any  # pytree
    reward: Any  # float or int [E, ...]: received for this action, undiscounted
    terminated: Any  # bool[E]: the episode ended here by the task's own rules: there is no value beyond
    truncated: Any  # bool[E]: the episode was cut here (a time limit): its value goes on
    final_obs: Any = None  # pytree as obs: the observation after this action, read only where the episode ended; None: not known
    extras: Any = None  # pytree of further fields, handed back from the anchor row


class Transition(flax.struct.PyTreeNode):
    """An n-step transition, leaves `[B, ...]`: a target is `reward + discount * value(next_obs)`.

    Source: Sutton and Barto, "Reinforcement Learning" (2018), section 7.1; `num_steps` is below n where the episode ended sooner.
    """

    obs: Any  # pytree: where the window starts
    action: Any  # pytree: taken there
    reward: jax.Array  # floating [B, ...]: sum of gamma^j r_j over the window
    discount: jax.Array  # float32[B], in [0, 1]: gamma^num_steps; 0 where the window reached a termination
    next_obs: Any  # pytree as obs: the observation after `num_steps` steps; the true final one at an episode's end
    num_steps: jax.Array  # int32[B], in 1 .. n
    extras: Any  # pytree: the anchor step's own


class Index(flax.struct.PyTreeNode):
    """Names one stored row for good: an index drawn before its row was overwritten is known to be stale."""

    row: jax.Array  # int32[B], in [0, capacity): env * (rows per stream) + position
    lap: jax.Array  # uint32[B]: how often the stream had gone round when the row was written, modulo 2^32


class Sample(flax.struct.PyTreeNode):
    """A batch: `items` as the view makes them, and where they came from."""

    items: Any  # pytree [B, ...]
    index: Index  # for `update_priorities` and `get`; of an item that is not valid, it names no row
    probability: jax.Array  # float32[B]: what one draw has for this item, normalised over the buffer; 0 where not valid
    is_valid: jax.Array  # bool[B]: False where there was nothing to draw; the item is finite and must weigh nothing

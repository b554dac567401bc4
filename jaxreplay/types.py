"""Types of a buffer's input and output, with each field's axes, dtype and unit.

Axes: T time, E env, B batch. An observation is a pytree of any number of leaves, each with its own
trailing axes.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

import jax

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.hints import no_item_field, no_items, unknown_field
from jaxreplay._util.struct import Node

T = TypeVar("T")  # the type of a view's items, such as `Transition`


class Step(Node):
    """One step of every env, the input of a buffer.

    `add` takes leaves [E, ...] and `extend` takes leaves [T, E, ...]. `init` takes one env's step,
    with leaves [...]. A mapping, dataclass or NamedTuple with these fields is accepted in place of
    a `Step`.

    Args:
      obs: Pytree with leaves [E, ...]. The observation that the action was chosen from, which is
        not the one that the env's step returned.
      action: Pytree with leaves [E, ...].
      reward: Pytree with float or int leaves [E, ...], often one array. The reward for this action,
        undiscounted.
      terminated: bool[E], keyword only. True where the task ended the episode: the value of later
        states is 0. With `num_agents`, bool[E, A]: an agent's flag stays True until the env's
        episode ends, which is where all agents have ended.
      truncated: bool[E] or bool[E, A], keyword only. True where the episode was cut, such as by a
        time limit: the value of the final observation is bootstrapped.
      final_obs: Pytree like `obs`, keyword only. The observation after this action. Required with
        `autoreset="same_step"`, and read only where the episode ended. Default: not given.
      extras: Pytree with leaves [E, ...], keyword only. Further fields, which samples return from
        the candidate row. Default: no further fields.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> flag = jnp.zeros(2, bool)
      >>> jr.Step(jnp.zeros((2, 3)), jnp.zeros(2), jnp.ones(2), terminated=flag, truncated=flag)
      Step(obs f32[2,3], action f32[2], reward f32[2], terminated bool[2], truncated bool[2])
    """

    obs: PyTree
    action: PyTree
    reward: PyTree
    _: dataclasses.KW_ONLY
    terminated: Any
    truncated: Any
    final_obs: PyTree = None
    extras: PyTree = None


class _Items(Node):
    """Base class of a batch's items."""

    if not TYPE_CHECKING:  # a type checker knows the fields
        __getattr__ = no_item_field
        __getitem__ = no_items


class Transition(_Items):
    """An n-step transition. Its value target is `reward + discount * value(next_obs)`.

    Attributes:
      obs: Pytree with leaves [B, ...]. The observation of the candidate row.
      action: Pytree with leaves [B, ...]. The action taken there.
      reward: Pytree like `Step.reward` with leaves floating[B, ...]. The sum of gamma**j * r_j over
        `num_steps` steps.
      discount: float32[B] in [0, 1]. gamma**num_steps, or 0 if one of these steps terminated. An
        agent that multiplies by its own gamma takes `discount / gamma**num_steps` for its mask,
        which is 1 - terminal; a buffer of one step and `gamma=1.0` has that mask as `discount`.
      next_obs: Pytree like `obs`. The observation after `num_steps` steps: the true final
        observation where the episode was truncated. After a termination (discount 0) it may be a
        placeholder.
      num_steps: int32[B] in [1, n]. Less than n where the episode ended sooner.
      extras: Pytree with leaves [B, ...]. The extras of the candidate row.
      alive: bool[B, A]. True for the agents that acted. `discount` is float32[B, A] then, and
        rewards [B, A, ...] are sums up to each agent's own end. Default: None, without
        `num_agents`.

    References:
      Sutton and Barto, "Reinforcement Learning" (2018),
      http://incompleteideas.net/book/the-book-2nd.html, section 7.1.
    """

    obs: PyTree
    action: PyTree
    reward: jax.Array
    discount: jax.Array
    next_obs: PyTree
    num_steps: jax.Array
    extras: PyTree
    alive: jax.Array | None = None


class Index(Node):
    """A permanent name of a stored row. It becomes stale when its row is overwritten, and the
    buffer detects that.

    Attributes:
      row: int32[B] in [0, capacity). Equals env * (rows per env) + position.
      lap: uint32[B]. Number of times that the env's ring had wrapped when the row was written,
        modulo 2**32.
      source: int32[B]. Number of each row's member, if a mixture was given `fractions`. Default:
        None, for all other samples.
    """

    row: jax.Array
    lap: jax.Array
    source: jax.Array | None = None


class Sample(Node, Generic[T]):
    """A batch of B items, with their indices, probabilities and weights.

    Attributes:
      experience: The items, a pytree with leaves [B, ...], such as a `Transition`.
      index: `Index` with leaves [B], for `update_priorities` and `get`. The index of an invalid
        item matches no row.
      probability: float32[B]. Probability that the sampler picks the item's row, normalized over
        the buffer; 0 where invalid.
      weight: float32[B]. Factor for the item's loss: the importance weight of samplers with
        priorities, 1 for other samplers, 0 where invalid.
      is_valid: bool[B]. False where the buffer had no row to sample: the item has finite values and
        must not count.
      source: int32[B]. Number of each item's member in a mixture, in the order of the members.
        `index` and `probability` refer to this member. Default: absent, for samples of one
        buffer.
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

        __getitem__ = no_items


class SequenceBatch(_Items):
    """Sequences of T = burn_in + length consecutive steps, leaves [B, T, ...].

    `obs` and `is_first` have T + 1 entries: the last one follows the last step.

    Start the recurrent network from `recurrent_state`, or from its initial state. Reset it before
    each step where `is_first`: this discards the zero steps before an episode's start. Compute the
    loss where `mask`: burn-in steps are real steps that only warm up the recurrent state. Bootstrap
    every step, truncated ones too, from `obs[:, t + 1]`.

    Attributes:
      obs: Pytree with leaves [B, T + 1, ...]. The entry after an episode's last step is the true
        final observation; later ones are 0.
      action: Pytree with leaves [B, T, ...]; 0 where there is no step.
      reward: Pytree with leaves [B, T, ...]; 0 where there is no step.
      terminated: bool[B, T]; False where there is no step.
      truncated: bool[B, T]; False where there is no step.
      is_first: bool[B, T + 1]. True where the step opens an episode.
      mask: bool[B, T]. True for steps to learn from: no burn-in, padding or final observation.
        False for all steps of an invalid item.
      recurrent_state: Pytree with leaves [B, ...]. The state stored with the first step; None
        without `recurrent_state_key`.
      extras: Pytree with leaves [B, T, ...], without the recurrent state; 0 where there is no step.
      index: `Index` of each step, leaves [B, T], for `write`; where there is no step, it matches no
        row. Default: None, without `allow_write`.
      alive: bool[B, T, A]. True for the agents that acted; `terminated` and `truncated` have their
        axis, too. Default: None, without `num_agents`.
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
    index: Index | None = None
    alive: jax.Array | None = None


class Pair(_Items):
    """An observation and a later one of the same stream.

    Attributes:
      obs: Pytree with leaves [B, ...].
      action: Pytree with leaves [B, ...]. The action taken at `obs`.
      future_obs: Pytree like `obs`. The observation `num_steps` rows later, which may be an
        episode's final one.
      num_steps: int32[B]. At least 1, or 0 with `future_obs` equal to `obs` where no later
        observation is known (see `FutureView`). Counts rows, so that across episodes final
        observations count too.
      extras: Pytree with leaves [B, ...]. The extras of the candidate row.
    """

    obs: PyTree
    action: PyTree
    future_obs: PyTree
    num_steps: jax.Array
    extras: PyTree


class Chunk(_Items):
    """A history of observations, and a chunk of the actions that follow. h is the number of
    observations, H that of actions.

    Attributes:
      obs: Pytree with leaves [B, h, ...].
      action: Pytree with leaves [B, H, ...].
      obs_is_pad: bool[B, h]. True where there is no step: it lies beyond the episode.
      action_is_pad: bool[B, H]. The same for actions; True for all actions of an invalid item.
      extras: Pytree with leaves [B, ...]. The extras of the candidate row.
      alive: bool[B, H, A]. True for the agents that acted, False in padding. Default: None, without
        `num_agents`.
    """

    obs: PyTree
    action: PyTree
    obs_is_pad: jax.Array
    action_is_pad: jax.Array
    extras: PyTree
    alive: jax.Array | None = None


class SampleOptions(TypedDict, total=False):
    """Parameters of one call of `sample`, in place of the buffer's. All may be traced, so that a
    new value compiles nothing, and a population may give each member its own. Numbers out of range
    are refused, unless they are traced; those of `n_step` count as the nearest in range.

    Args:
      beta: float[], at least 0: how far `weight` corrects the bias of prioritized sampling or of a
        blend, 0 not at all, 1 fully. Other samplers ignore it. Default: the sampler's.
      n_step: int32[] or int32[B], from 1 to the buffer's: number of steps of transitions. Default:
        the buffer's.
      gamma: float[] or float[B], in [0, 1]: discount of one step of transitions. Default: the
        buffer's.
      fractions: Mapping of float[], at least 0, by name: what part of a batch each sampler of a
        `jaxreplay.blend`, or each member of a `jaxreplay.mix`, gives. They are divided by their
        sum. Those of a blend inside have its name before theirs, `{"old.uniform": 1,
        "old.priority": 3}`. Default: those of the blend, or the numbers of the mixture.
    """

    beta: Any
    n_step: Any
    gamma: Any
    fractions: Any

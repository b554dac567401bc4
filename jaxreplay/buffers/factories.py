"""Named buffers. Each composes storage, a sampler and a view in a few lines."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Required, TypedDict, TypeVar, Unpack, cast, get_args, get_type_hints

from jaxreplay._util.aliases import Autoreset, PyTree
from jaxreplay._util.hints import unknown_arguments
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.rollout import Rollout
from jaxreplay.samplers import Sampler
from jaxreplay.samplers.episodes import UniformEpisodes
from jaxreplay.samplers.prioritized import Prioritized
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.types import Chunk, Pair, SequenceBatch, Transition
from jaxreplay.views.chunk import ChunkView
from jaxreplay.views.future import FutureView
from jaxreplay.views.item import Item
from jaxreplay.views.sequence import SequenceView
from jaxreplay.views.transition import TransitionView

F = TypeVar("F", bound=Callable[..., Any])
_UNIFORM = Uniform()


class ItemOptions(TypedDict, total=False):
    """Options of `jaxreplay.items`, with the meaning and defaults that `ReplayBuffer` has."""

    capacity: Required[int]
    batch_size: Required[int]
    num_envs: int
    allow_mask: bool
    allow_write: bool
    min_size: int
    platform: str | None


class BufferOptions(ItemOptions, total=False):
    """Options of every named buffer of steps, likewise."""

    autoreset: Required[Autoreset]
    track_episodes: bool
    num_agents: int | None


def _spelled_out(make: F) -> F:
    """Show the options of `shared` in a function's signature, those that are required first, and
    refuse others by the function's name."""
    signature = inspect.signature(make)
    *own, shared = signature.parameters.values()
    (options,) = get_args(shared.annotation)
    fields = ReplayBuffer.__dataclass_fields__
    given = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=shared.empty if name in options.__required_keys__ else fields[name].default,
            annotation=annotation,
        )
        for name, annotation in get_type_hints(options).items()
    ]
    has_default = lambda parameter: parameter.default is not shared.empty
    parameters = [one for one in given if not has_default(one)] + own
    parameters += filter(has_default, given)
    parameters.sort(key=has_default)
    names = [one.name for one in parameters]

    @functools.wraps(make)
    def made(**options: Any) -> Any:
        if unknown := [name for name in options if name not in names]:
            raise TypeError(unknown_arguments(make.__name__, unknown, names))
        return make(**options)

    vars(made)["__signature__"] = signature.replace(parameters=parameters)
    return cast(F, made)


def _composed(sampler: Any, view: Any, shared: Any) -> ReplayBuffer[Any]:
    """Return the buffer. Warn if a batch is larger than it."""
    buffer = ReplayBuffer(sampler=sampler, view=view, **shared)
    if buffer.batch_size > buffer.capacity:
        warnings.warn(
            f"batch_size={buffer.batch_size} exceeds capacity={buffer.capacity}, so each batch "
            "repeats rows; were the two swapped?",
            stacklevel=4,
        )
    return buffer


@_spelled_out
def items(*, sampler: Sampler = _UNIFORM, **shared: Unpack[ItemOptions]) -> ReplayBuffer[PyTree]:
    """Make a buffer of independent items: any pytree, each sampleable at once.

    Args:
      capacity: Number of items that the buffer holds. A multiple of `num_envs`.
      batch_size: Number of items in a sample.
      sampler: Chooses the items of a sample. Default: `Uniform()`.
      num_envs: Number of items that one `add` brings; each goes to a ring of its own. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the items that are to be stored. Default:
        False.
      allow_write: Let `write` change stored items. Default: False.
      min_size: Number of items from which on `can_sample` is True. Default: 1.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold items, leaves [B, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=100, num_envs=2, batch_size=4)
      >>> state = buffer.init({"image": jax.ShapeDtypeStruct((8, 8), jnp.uint8)})
      >>> state = buffer.add(state, {"image": jnp.ones((2, 8, 8), jnp.uint8)})
      >>> buffer.sample(state, jax.random.key(0)).experience["image"].shape
      (4, 8, 8)
    """
    return _composed(sampler, Item(), shared)


@_spelled_out
def transitions(
    *,
    n_step: int = 1,
    gamma: float = 0.99,
    discount_key: str | None = None,
    sampler: Sampler = _UNIFORM,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Transition]:
    """Make a buffer of n-step transitions that are sampled by any sampler.

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      batch_size: Number of items in a sample.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Required.
      n_step: Number of steps n of a transition, at least 1. Default: 1.
      gamma: Discount of one step, in [0, 1]. Default: 0.99.
      discount_key: Key in `extras` of a step's own discount, float[E], which multiplies gamma.
        Default: none.
      sampler: Chooses the transitions of a sample. Default: `Uniform()`.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]. Default: one flag for
        each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold `Transition`s, leaves [B, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.transitions(
      ...     capacity=64,
      ...     num_envs=1,
      ...     batch_size=3,
      ...     autoreset="same_step_no_final_obs",
      ...     sampler=jr.Recent(decay=0.5),
      ... )
      >>> zeros = jnp.zeros((1,))
      >>> step = jr.Step(
      ...     obs=zeros, action=zeros, reward=zeros, terminated=zeros > 0, truncated=zeros > 0
      ... )
      >>> state = buffer.init(jax.tree.map(lambda x: x[0], step))
      >>> for _ in range(3):
      ...     state = buffer.add(state, step)
      >>> buffer.sample(state, jax.random.key(0)).is_valid.tolist()
      [True, True, True]
    """
    view = TransitionView(n_step=n_step, gamma=gamma, discount_key=discount_key)
    return _composed(sampler, view, shared)


@_spelled_out
def uniform(
    *,
    n_step: int = 1,
    gamma: float = 0.99,
    discount_key: str | None = None,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Transition]:
    """Make a buffer of n-step transitions that are sampled uniformly.

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      batch_size: Number of items in a sample.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Required.
      n_step: Number of steps n of a transition, at least 1. Default: 1.
      gamma: Discount of one step, in [0, 1]. Default: 0.99.
      discount_key: Key in `extras` of a step's own discount, float[E], which multiplies gamma.
        Default: none.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]. Default: one flag for
        each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold `Transition`s, leaves [B, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(
      ...     capacity=64,
      ...     num_envs=1,
      ...     batch_size=3,
      ...     autoreset="same_step_no_final_obs",
      ...     n_step=2,
      ...     gamma=0.5,
      ... )
      >>> zeros = jnp.zeros((1,))
      >>> step = jr.Step(
      ...     obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0
      ... )
      >>> state = buffer.init(jax.tree.map(lambda x: x[0], step))
      >>> for _ in range(3):
      ...     state = buffer.add(state, step)
      >>> buffer.sample(state, jax.random.key(0)).experience.reward.tolist()
      [1.5, 1.5, 1.5]
    """
    return transitions(n_step=n_step, gamma=gamma, discount_key=discount_key, **shared)


@_spelled_out
def prioritized(
    *,
    n_step: int = 1,
    gamma: float = 0.99,
    discount_key: str | None = None,
    alpha: float = 0.6,
    beta: float = 0.4,
    stratified: bool = True,
    new_priority: float | None = None,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Transition]:
    """Make a buffer of n-step transitions that are sampled in proportion to priority ** alpha.

    A new row gets the priority that `add` is given, or `new_priority`.

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      batch_size: Number of items in a sample.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Required.
      n_step: Number of steps n of a transition, at least 1. Default: 1.
      gamma: Discount of one step, in [0, 1]. Default: 0.99.
      discount_key: Key in `extras` of a step's own discount, float[E], which multiplies gamma.
        Default: none.
      alpha: Exponent of priorities, at least 0. With 0, all rows of positive priority are equally
        probable. Default: 0.6.
      beta: Exponent of importance weights, at least 0: 0 corrects nothing, 1 corrects the bias of
        prioritized sampling fully. `sample` takes another value. Default: 0.4.
      stratified: Sample once from each of B equal parts of the total, as in the paper. Batches then
        come in the order of rows in the rings. False: B independent samples. Default: True.
      new_priority: Priority of rows that are added without one, at least 0. Default: the largest so
        far, by which one outlier rules until `reset_max_priority`.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]. Default: one flag for
        each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold `Transition`s, leaves [B, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.prioritized(
      ...     capacity=64, num_envs=2, batch_size=4, autoreset="same_step_no_final_obs"
      ... )
      >>> zeros = jnp.zeros((2,))
      >>> step = jr.Step(
      ...     obs=zeros, action=zeros, reward=zeros, terminated=zeros > 0, truncated=zeros > 0
      ... )
      >>> state = buffer.init(jax.tree.map(lambda x: x[0], step))
      >>> state = buffer.add(buffer.add(state, step), step, priority=jnp.array([0.0, 2.0]))
      >>> batch = buffer.sample(state, jax.random.key(0))
      >>> td_error = batch.experience.reward
      >>> loss = jnp.mean(batch.weight * td_error**2)
      >>> state = buffer.update_priorities(state, batch.index, jnp.abs(td_error) + 0.01)
      >>> batch.weight.tolist()
      [1.0, 1.0, 1.0, 1.0]

    References:
      Schaul et al., "Prioritized Experience Replay" (2016), https://arxiv.org/abs/1511.05952
    """
    sampler = Prioritized(
        alpha=alpha,
        beta=beta,
        stratified=stratified,
        new_priority=new_priority,
    )
    view = {"n_step": n_step, "gamma": gamma, "discount_key": discount_key}
    return transitions(**view, sampler=sampler, **shared)


@_spelled_out
def sequences(
    *,
    length: int,
    burn_in: int = 0,
    period: int = 1,
    cross_episodes: bool = False,
    recurrent_state_key: str | None = None,
    sampler: Sampler = _UNIFORM,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[SequenceBatch]:
    """Make a buffer of sequences of steps, for recurrent agents (R2D2) and world models (Dreamer).

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      batch_size: Number of items in a sample.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Required.
      length: Number of steps to learn from, at least 1.
      burn_in: Number of steps before them that warm a recurrent state up. Default: 0.
      period: Number of transitions from one possible start to the next, counted from each episode's
        start, or without a break if `cross_episodes`. Default: 1.
      cross_episodes: True: a sequence continues into the next episode, whose first step is flagged
        by `is_first`; a final row takes one step, which is masked. False: a sequence stops at the
        end of its episode, and the rest is 0 and masked. Default: False.
      recurrent_state_key: Key in `extras` of the recurrent state, which is read at a sequence's
        first step alone. Default: no recurrent state is read.
      sampler: Chooses the starts of sequences: `Uniform()`, or `Prioritized()` with priorities from
        `sequence_priority`. Default: `Uniform()`.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]. Default: one flag for
        each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold `SequenceBatch`es, leaves [B, T, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.sequences(
      ...     capacity=64,
      ...     num_envs=1,
      ...     batch_size=2,
      ...     length=3,
      ...     burn_in=2,
      ...     autoreset="same_step_no_final_obs",
      ... )
      >>> zeros = jnp.zeros((1,))
      >>> step = jr.Step(
      ...     obs=zeros, action=zeros, reward=zeros, terminated=zeros == 0, truncated=zeros > 0
      ... )
      >>> state = buffer.init(jax.tree.map(lambda x: x[0], step))
      >>> state = buffer.add(buffer.add(state, step), step)
      >>> batch = buffer.sample(state, jax.random.key(0))
      >>> batch.experience.obs.shape
      (2, 6)
      >>> batch.experience.mask[0].tolist()  # episodes of one step: no burn-in, nothing after it
      [False, False, True, False, False]

    References:
      Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning"
      (2019), https://openreview.net/forum?id=r1lyTjAqYX
    """
    view = SequenceView(
        length=length,
        burn_in=burn_in,
        period=period,
        cross_episodes=cross_episodes,
        recurrent_state_key=recurrent_state_key,
    )
    return _composed(sampler, view, shared)


@_spelled_out
def chunks(
    *,
    obs: Sequence[int] = (0,),
    action: int | Sequence[int] = 16,
    pad: str = "repeat",
    sampler: Sampler = _UNIFORM,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Chunk]:
    """Make a buffer of chunks of actions with a history of observations, for cloning robots' demos.

    Every row with an action is sampleable, an episode's last one too.

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      batch_size: Number of items in a sample.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Required.
      obs: Offsets of the observations, rows forward in time, such as (-1, 0). Default: (0,).
      action: Offsets of the actions, or a number H for 0 .. H - 1. Default: 16.
      pad: Values beyond the episode: "repeat" for those of its first or last step, "zero" for
        zeros. Default: "repeat".
      sampler: Chooses the rows of a sample. Default: `Uniform()`.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]. Default: one flag for
        each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold `Chunk`s, leaves [B, h, ...] and [B, H, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.chunks(
      ...     capacity=8, batch_size=2, obs=(-1, 0), action=3, autoreset="same_step_no_final_obs"
      ... )
      >>> time = jnp.arange(4.0)[:, None]
      >>> steps = jr.Step(
      ...     obs=time, action=time, reward=time, terminated=time < 0, truncated=time == 3
      ... )
      >>> state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
      >>> chunks = buffer.get(state, jnp.array([0, 3])).experience
      >>> chunks.obs.tolist(), chunks.action.tolist()
      ([[0.0, 0.0], [2.0, 3.0]], [[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]])
      >>> chunks.action_is_pad.tolist()
      [[False, False, False], [False, True, True]]

    References:
      Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (2023),
      https://arxiv.org/abs/2304.13705
    """
    as_tuple: Any = lambda offsets: tuple(offsets) if isinstance(offsets, list) else offsets
    view = ChunkView(obs=as_tuple(obs), action=as_tuple(action), pad=pad)
    return _composed(sampler, view, shared)


@_spelled_out
def future_pairs(
    *,
    gamma: float = 0.99,
    beyond: str = "truncate",
    max_terminals: int | None = None,
    unfinished: bool = False,
    sampler: Sampler | None = None,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Pair]:
    """Make a buffer of pairs: a step, and an observation from later in its episode.

    A sample chooses an episode uniformly, then a step of it uniformly, then a later row at a
    geometric horizon. Until an episode has ended, `can_sample` is False, and a batch has zeros
    alone, which are not valid; with `unfinished`, until an env has a step and the next one.

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      batch_size: Number of items in a sample.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Required.
      gamma: Parameter of the geometric distribution, in [0, 1]: P(k rows later) is in proportion to
        `gamma ** (k - 1)`. With 0, it is always the next observation. Default: 0.99.
      beyond: "truncate" leaves out horizons beyond the episode's end; "clip" replaces them with the
        end. Default: "truncate".
      max_terminals: Number of episode ends up to which horizons may reach, into later episodes of
        the env. Unfinished episodes, and those whose first rows are overwritten, are then sampled
        too. Default: horizons end with their episode, which must be complete.
      unfinished: Also sample unfinished episodes, with horizons up to their newest row, and those
        whose first rows are overwritten. Default: False.
      sampler: Chooses the steps. With `jaxreplay.Uniform()` each step is equally probable, as in
        JaxGCRL; else the few steps of an episode that has just begun are as probable together as
        those of a whole one. Default: `UniformEpisodes()`, of unfinished episodes, too, where these
        are sampled.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]. Default: one flag for
        each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device.

    Returns:
      A buffer whose samples hold `Pair`s, leaves [B, ...].

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.future_pairs(
      ...     capacity=64, num_envs=1, batch_size=2, gamma=0.0, autoreset="next_step"
      ... )
      >>> time = jnp.arange(3.0)[:, None]
      >>> steps = jr.Step(
      ...     obs=time, action=time, reward=time, terminated=time == 1, truncated=time < 0
      ... )
      >>> state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
      >>> pairs = buffer.sample(state, jax.random.key(0)).experience
      >>> (pairs.future_obs - pairs.obs).tolist()
      [1.0, 1.0]
    """
    view = FutureView(
        gamma=gamma, beyond=beyond, max_terminals=max_terminals, unfinished=unfinished
    )
    if sampler is None:
        sampler = UniformEpisodes(unfinished=unfinished or max_terminals is not None)
    return _composed(sampler, view, shared)


def rollout(
    *,
    length: int,
    num_envs: int,
    autoreset: Autoreset | None = None,
    num_agents: int | None = None,
) -> Rollout:
    """Make a buffer for on-policy learning: fill it with the steps of one policy, learn, clear it.

    Args:
      length: Number of rows of each env, one a step. With `autoreset="next_step"`, final rows take
        some of them.
      num_envs: Number of parallel envs.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Default: an error that explains the three.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]: they may end one by
        one. Values, rewards, advantages and the mask are [T, E, A] then. Default: one flag for each
        env.

    Returns:
      A `Rollout`, whose `init` makes the state.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> rollout = jr.rollout(length=3, num_envs=2, autoreset="same_step_no_final_obs")
      >>> zeros = jnp.zeros((3, 2))
      >>> steps = jr.Step(
      ...     obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0
      ... )
      >>> state = rollout.extend(rollout.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
      >>> value = rollout.steps(state).obs  # the critic's
      >>> got, mask = rollout.advantages(state, value, jnp.zeros(2), gamma=0.5, lambda_=1.0)
      >>> got.advantage[:, 0].tolist()
      [1.75, 1.5, 1.0]
    """
    return Rollout(length=length, num_envs=num_envs, autoreset=autoreset, num_agents=num_agents)

"""Named buffers: each composes storage, a sampler and a view in a few lines; compose a new one in
the same way."""

from typing import Literal, Unpack

from jaxreplay._util.aliases import Autoreset, PyTree
from jaxreplay.buffers.replay_buffer import BufferOptions, ReplayBuffer
from jaxreplay.buffers.rollout import Rollout
from jaxreplay.samplers import Sampler
from jaxreplay.samplers.episodes import UniformEpisodes
from jaxreplay.samplers.prioritized import Prioritized
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.types import Pair, SequenceBatch, Transition
from jaxreplay.views.future import FutureView
from jaxreplay.views.item import Item
from jaxreplay.views.sequence import SequenceView
from jaxreplay.views.transition import TransitionView

_UNIFORM = Uniform()


def items(*, sampler: Sampler = _UNIFORM, **shared: Unpack[BufferOptions]) -> ReplayBuffer[PyTree]:
    """Independent items, any pytree, each sampleable at once.

    Args:
      sampler: which are drawn.
      shared: `capacity`, items held; `num_envs`, items that one `add` brings, each in a stream of
        its own; `batch_size`, and the others of `BufferOptions` but `autoreset` and
        `track_episodes`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=100, num_envs=2, batch_size=4)
      >>> state = buffer.init({"image": jax.ShapeDtypeStruct((8, 8), jnp.uint8)})
      >>> state = buffer.add(state, {"image": jnp.ones((2, 8, 8), jnp.uint8)})
      >>> buffer.sample(state, jax.random.key(0)).experience["image"].shape
      (4, 8, 8)
    """
    return ReplayBuffer(sampler=sampler, view=Item(), **shared)


def transitions(
    *,
    n_step: int = 1,
    gamma: float = 0.99,
    sampler: Sampler = _UNIFORM,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Transition]:
    """n-step transitions from streams of steps, drawn by any sampler.

    Args:
      n_step, gamma: see `TransitionView`. sampler: which transitions are drawn.
      shared: `capacity`, `batch_size`, `autoreset`, and the others of `BufferOptions`.

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
    return ReplayBuffer(sampler=sampler, view=TransitionView(n_step=n_step, gamma=gamma), **shared)


def uniform(
    *, n_step: int = 1, gamma: float = 0.99, **shared: Unpack[BufferOptions]
) -> ReplayBuffer[Transition]:
    """n-step transitions from streams of steps, drawn uniformly over all that are complete.

    Args:
      n_step, gamma: see `TransitionView`.
      shared: `capacity`, `batch_size`, `autoreset`, and the others of `BufferOptions`.

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
    return transitions(n_step=n_step, gamma=gamma, **shared)


def prioritized(
    *,
    n_step: int = 1,
    gamma: float = 0.99,
    alpha: float = 0.6,
    beta: float = 0.4,
    normalize_weights: Literal["batch", "buffer"] | None = "batch",
    stratified: bool = True,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Transition]:
    """n-step transitions from streams of steps, drawn in proportion to priority ** alpha.

    Args:
      alpha, beta, normalize_weights, stratified: see `Prioritized`.
      n_step, gamma: see `TransitionView`.
      shared: `capacity`, `batch_size`, `autoreset`, and the others of `BufferOptions`.

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
    """
    sampler = Prioritized(
        alpha=alpha, beta=beta, normalize_weights=normalize_weights, stratified=stratified
    )
    return transitions(n_step=n_step, gamma=gamma, sampler=sampler, **shared)


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
    """Sequences of steps, for recurrent agents (R2D2) and world models (Dreamer).

    Args:
      length, burn_in, period, cross_episodes, recurrent_state_key: see `SequenceView`.
      sampler: over starts: `Uniform()`, or `Prioritized()`, with `sequence_priority` for the
        priorities.
      shared: `capacity`, `batch_size`, `autoreset`, and the others of `BufferOptions`.

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
    """
    view = SequenceView(
        length=length,
        burn_in=burn_in,
        period=period,
        cross_episodes=cross_episodes,
        recurrent_state_key=recurrent_state_key,
    )
    return ReplayBuffer(sampler=sampler, view=view, **shared)


def future_pairs(
    *,
    gamma: float = 0.99,
    beyond: str = "truncate",
    max_terminals: int | None = None,
    **shared: Unpack[BufferOptions],
) -> ReplayBuffer[Pair]:
    """Pairs at a geometric horizon: uniform over complete episodes, then over the steps of the one
    drawn, then a later row of it.

    Args:
      gamma, beyond, max_terminals: see `FutureView`. With `max_terminals`, episodes are drawn too
        that have not ended, or whose first rows are overwritten.
      shared: `capacity`, `batch_size`, `autoreset`, and the others of `BufferOptions`.

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
    sampler = UniformEpisodes(unfinished=max_terminals is not None)
    return ReplayBuffer(
        sampler=sampler,
        view=FutureView(gamma=gamma, beyond=beyond, max_terminals=max_terminals),
        **shared,
    )


def rollout(*, length: int, num_envs: int, autoreset: Autoreset | None = None) -> Rollout:
    """The steps that one policy took, for on-policy learning: filled, learned from, and cleared.

    Args:
      length, num_envs, autoreset: see `Rollout`. `autoreset` must be given.

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
    return Rollout(length=length, num_envs=num_envs, autoreset=autoreset)

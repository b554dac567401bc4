"""Named buffers: each composes storage, a sampler and a view in a few lines; compose a new one in the same way."""

from jaxreplay.buffer import ReplayBuffer
from jaxreplay.samplers import Prioritized, Uniform
from jaxreplay.views import Item, TransitionView


def items(*, capacity: int, batch_size: int, num_envs: int = 1, masked: bool = False, min_size: int = 1) -> ReplayBuffer:
    """Independent items, any pytree, drawn uniformly; each is drawable at once.

    Args:
      capacity: items held. num_envs: items that one `add` brings, each in a stream of its own.
      batch_size, masked, min_size: see `ReplayBuffer`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> replay = jr.items(capacity=100, num_envs=2, batch_size=4)
      >>> state = replay.init({"image": jax.ShapeDtypeStruct((8, 8), jnp.uint8)})
      >>> state = replay.add(state, {"image": jnp.ones((2, 8, 8), jnp.uint8)})
      >>> replay.sample(state, jax.random.key(0)).items["image"].shape
      (4, 8, 8)
    """
    return ReplayBuffer(
        capacity=capacity,
        num_envs=num_envs,
        batch_size=batch_size,
        sampler=Uniform(),
        view=Item(),
        autoreset=None,
        masked=masked,
        min_size=min_size,
    )


def uniform(
    *,
    capacity: int,
    num_envs: int,
    batch_size: int,
    autoreset: str | None = None,
    n_step: int = 1,
    discount: float = 0.99,
    masked: bool = False,
    min_size: int = 1,
    keep_episodes: bool = False,
) -> ReplayBuffer:
    """n-step transitions from streams of steps, drawn uniformly over all that are complete.

    Args:
      n_step, discount: see `TransitionView`.
      capacity, num_envs, batch_size, autoreset, masked, min_size, keep_episodes: see `ReplayBuffer`. `autoreset` must be given.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> replay = jr.uniform(capacity=64, num_envs=1, batch_size=3, autoreset="same_step", n_step=2, discount=0.5)
      >>> zeros = jnp.zeros((1,))
      >>> step = jr.Step(obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0)
      >>> state = replay.init(jax.tree.map(lambda x: x[0], step))
      >>> for _ in range(3):
      ...     state = replay.add(state, step)
      >>> replay.sample(state, jax.random.key(0)).items.reward.tolist()
      [1.5, 1.5, 1.5]
    """
    return ReplayBuffer(
        capacity=capacity,
        num_envs=num_envs,
        batch_size=batch_size,
        sampler=Uniform(),
        view=TransitionView(n_step=n_step, discount=discount),
        autoreset=autoreset,
        masked=masked,
        min_size=min_size,
        keep_episodes=keep_episodes,
    )


def prioritized(
    *,
    capacity: int,
    num_envs: int,
    batch_size: int,
    autoreset: str | None = None,
    n_step: int = 1,
    discount: float = 0.99,
    exponent: float = 0.6,
    stratified: bool = True,
    keep_minimum: bool = False,
    masked: bool = False,
    min_size: int = 1,
    keep_episodes: bool = False,
) -> ReplayBuffer:
    """n-step transitions from streams of steps, drawn in proportion to priority ** exponent.

    Args:
      exponent, stratified, keep_minimum: see `Prioritized`.
      n_step, discount: see `TransitionView`.
      capacity, num_envs, batch_size, autoreset, masked, min_size, keep_episodes: see `ReplayBuffer`. `autoreset` must be given.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> replay = jr.prioritized(capacity=64, num_envs=2, batch_size=4, autoreset="same_step")
      >>> zeros = jnp.zeros((2,))
      >>> step = jr.Step(obs=zeros, action=zeros, reward=zeros, terminated=zeros > 0, truncated=zeros > 0)
      >>> state = replay.init(jax.tree.map(lambda x: x[0], step))
      >>> state = replay.add(replay.add(state, step), step, priority=jnp.array([0.0, 2.0]))
      >>> batch = replay.sample(state, jax.random.key(0))
      >>> weight = jr.importance_weights(batch, replay.size(state), exponent=0.4)
      >>> state = replay.update_priorities(state, batch.index, jnp.abs(batch.items.reward) + 0.01)
      >>> weight.tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    return ReplayBuffer(
        capacity=capacity,
        num_envs=num_envs,
        batch_size=batch_size,
        sampler=Prioritized(exponent=exponent, stratified=stratified, keep_minimum=keep_minimum),
        view=TransitionView(n_step=n_step, discount=discount),
        autoreset=autoreset,
        masked=masked,
        min_size=min_size,
        keep_episodes=keep_episodes,
    )

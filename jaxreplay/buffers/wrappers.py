"""Wrappers that change how a buffer's items are read. Each wraps the buffer's view in another."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from jaxreplay._util.aliases import Key
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.types import Step, T
from jaxreplay.views.frame_stack import FrameStack
from jaxreplay.views.hindsight import Hindsight
from jaxreplay.views.relabelled import Relabelled
from jaxreplay.views.transformed import Transformed

S = TypeVar("S")


def frame_stack(
    buffer: ReplayBuffer[T],
    num_frames: int,
    *,
    pad: str = "zero",
    key: str | None = None,
    axis: int = -1,
) -> ReplayBuffer[T]:
    """Store single frames, and stack the newest ones in every observation of a sample.

    A stack ends at its episode's start. Rows whose earlier frames are overwritten are not sampled.

    Args:
      buffer: A buffer of steps. It is not changed.
      num_frames: Number of frames in a stack, at least 1. The oldest comes first.
      pad: Frames before the episode's start: "zero" for zeros, or "repeat" for copies of its first
        frame. Default: "zero".
      key: Name of the one leaf of the observation to stack, such as "image", or "camera.left" for a
        nested one. Default: all leaves are stacked.
      axis: Axis of the frames in the stacked leaf. -1 puts it after the frame's axes, as flax's
        convolutions take them, 0 before them, as PyTorch's do. Default: -1.

    Returns:
      A new buffer. Its `init`, `add` and `extend` take single frames.

    References:
      Mnih et al., "Human-level control through deep reinforcement learning" (2015), methods,
      "Preprocessing".

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(
      ...     capacity=1_000_000, num_envs=1, batch_size=32, autoreset="next_step", n_step=3
      ... )
      >>> buffer = jr.frame_stack(buffer, 4)
      >>> done, reward = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
      >>> frame, action = (
      ...     jax.ShapeDtypeStruct((84, 84), jnp.uint8),
      ...     jax.ShapeDtypeStruct((), jnp.int32),
      ... )
      >>> example = jr.Step(
      ...     obs=frame, action=action, reward=reward, terminated=done, truncated=done
      ... )
      >>> buffer.memory(example).total / 1e9 < 7.1 + 0.024  # GB; stacks stored twice would take 56
      True
    """
    given = {"num_frames": num_frames, "pad": pad, "key": key, "axis": axis}
    return _wrapped("frame_stack", buffer, FrameStack, **given)


def hindsight(
    buffer: ReplayBuffer[T],
    reward_fn: Callable[[Any, Any, Step], Any],
    *,
    terminated_fn: Callable[[Any, Any, Step], Any] | None = None,
    strategy: str = "future",
    unfinished: bool = False,
    relabel_fraction: float = 0.8,
    achieved_key: str = "achieved_goal",
    desired_key: str = "desired_goal",
) -> ReplayBuffer[T]:
    """Hindsight experience replay: relabel a fraction of the samples with goals that were achieved.

    Observations are mappings, as in Gymnasium's goal envs. Each sample has one goal, in all of its
    observations. Rewards of relabeled samples are computed again for the new goal.

    Args:
      buffer: A buffer of steps within one episode, such as transitions, with another `autoreset`
        than "same_step_no_final_obs". It is not changed.
      reward_fn: Pure function `reward_fn(achieved, goal, step)` that returns the reward of one
        step: achieved is the goal that the step achieved, goal the new goal, and step the stored
        `Step` with its former goal. The result has the stored reward's shape, and a dtype that the
        stored dtype can hold.
      terminated_fn: Pure function like `reward_fn` that returns whether the step terminates the
        episode, bool[]. n-step targets and sequences then stop at that step. Default: terminations
        stay as stored, so steps that reach the new goal are bootstrapped from.
      strategy: Row where the new goal was achieved, chosen uniformly. "future": among later rows of
        the episode; "episode": among all its rows; "random": among all stored rows; "final": always
        the episode's last row. Default: "future".
      unfinished: Also sample rows of episodes that go on, and of those whose first rows are
        overwritten, with goals from the rows that are stored. A row of an episode that goes on gets
        other goals later. Samplers with priorities need it, unless goals are "random". Default:
        False, a row waits for the end of its episode, and with "episode" its first row must be
        stored.
      relabel_fraction: Fraction of samples to relabel, in [0, 1]; k / (k + 1) in the paper's terms.
        Default: 0.8.
      achieved_key: Key in the observation of the goal that was achieved. Default: "achieved_goal".
      desired_key: Key in the observation of the goal. Default: "desired_goal".

    Returns:
      A new buffer.

    References:
      Andrychowicz et al., "Hindsight Experience Replay" (2017),
      https://arxiv.org/abs/1707.01495, sections 3.2 and 4.5. The paper
      stores relabeled copies; here samples are relabeled.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(capacity=1000, num_envs=1, batch_size=32, autoreset="next_step")
      >>> buffer = jr.hindsight(
      ...     buffer, lambda achieved, goal, step: -jnp.float32(jnp.any(achieved != goal))
      ... )
    """
    return _wrapped(
        "hindsight",
        buffer,
        Hindsight,
        reward_fn=reward_fn,
        terminated_fn=terminated_fn,
        strategy=strategy,
        unfinished=unfinished,
        relabel_fraction=relabel_fraction,
        achieved_key=achieved_key,
        desired_key=desired_key,
    )


def relabel(buffer: ReplayBuffer[T], reward_fn: Callable[[Step, Any], Any]) -> ReplayBuffer[T]:
    """Compute the reward of every step anew as it is sampled: by a learned reward, or for another
    task.

    n-step sums, sequences and hindsight get the new rewards. What is stored stays as it is. The
    rows are those of `buffer`, so that either may read and change a state. Parameters that change
    are closed over: call `relabel` in the jitted function that gets them.

    Args:
      buffer: A buffer of steps. It is not changed.
      reward_fn: Pure function `reward_fn(step, next_obs)` that returns the reward of one step:
        `step` is the stored `Step`, `next_obs` the observation after it, without env and batch
        axes. After a termination whose final observation is not stored, `next_obs` is `step.obs`.
        The result has the stored reward's shape, and a dtype that the stored dtype can hold.

    Returns:
      A new buffer.

    References:
      Lee et al., "PEBBLE: Feedback-Efficient Interactive Reinforcement Learning via Relabeling
      Experience and Unsupervised Pre-training" (2021),
      https://arxiv.org/abs/2106.05091, section 4.2. There, stored rewards are
      overwritten.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(capacity=8, batch_size=4, autoreset="next_step", n_step=2, gamma=0.5)
      >>> @jax.jit
      ... def sample(params, state, key):
      ...     learned = jr.relabel(buffer, lambda step, next_obs: params["scale"] * next_obs)
      ...     return learned.sample(state, key)
      >>> x, no = jnp.ones((3, 1)), jnp.zeros((3, 1), bool)
      >>> steps = jr.Step(obs=x, action=x, reward=x, terminated=no, truncated=no)
      >>> state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
      >>> sample({"scale": 10.0}, state, jax.random.key(0)).experience.reward.tolist()
      [15.0, 15.0, 15.0, 15.0]
    """
    return _wrapped("relabel", buffer, Relabelled, reward_fn=reward_fn)


def transform(buffer: ReplayBuffer[S], function: Callable[[S, Key], T]) -> ReplayBuffer[T]:
    """Change every item as it is sampled: augment, normalize or cast it.

    Args:
      buffer: The buffer to sample from. It is not changed.
      function: Pure function `function(item, key)` that returns the new item. The item has no batch
        axis; the key is its own. It is applied last: the item has its frame stacks and new goals,
        even if `frame_stack` or `hindsight` wraps the result. The reward of an n-step transition is
        a sum: `relabel` changes the rewards of single steps before.

    Returns:
      A new buffer.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> def shift(item, key):  # up to 4 pixels, as in DrQ (Yarats et al. 2021)
      ...     image = jnp.pad(item["image"], ((4, 4), (4, 4)), mode="edge")
      ...     row, column = jax.random.randint(key, (2,), 0, 9)
      ...     return {"image": jax.lax.dynamic_slice(image, (row, column), item["image"].shape)}
      >>> buffer = jr.transform(jr.items(capacity=10, batch_size=4), shift)
      >>> state = buffer.init({"image": jax.ShapeDtypeStruct((16, 16), jnp.uint8)})
      >>> state = buffer.add(state, {"image": jnp.ones((1, 16, 16), jnp.uint8)})
      >>> buffer.sample(state, jax.random.key(0)).experience["image"].shape
      (4, 16, 16)
    """
    return _wrapped("transform", buffer, Transformed, transform=function)


def _wrapped(where: str, buffer: Any, kind: Any, **options: Any) -> Any:
    """Return a buffer with its view in another one."""
    is_mixture = hasattr(buffer, "members")
    hint = "; change how each member is read before they are mixed" if is_mixture else ""
    own = buffer_of(where, buffer, hint)
    return dataclasses.replace(own, view=kind(inner=own.view, **options))

"""A buffer whose items are read in another way: each puts a view around that of any buffer."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxreplay._util.aliases import Key
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.types import Step, T
from jaxreplay.views import View
from jaxreplay.views.frame_stack import FrameStack
from jaxreplay.views.hindsight import Hindsight
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
    """The same buffer, with frames stored once and stacked in every observation that is read.

    Args:
      num_frames, pad, key, axis: see `FrameStack`.

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
    view = FrameStack(
        num_frames=num_frames, inner=_view_of("frame_stack", buffer), pad=pad, key=key, axis=axis
    )
    return dataclasses.replace(buffer, view=view)


def hindsight(
    buffer: ReplayBuffer[T],
    reward_fn: Callable[[Any, Any, Step], Any],
    *,
    terminated_fn: Callable[[Any, Any, Step], Any] | None = None,
    strategy: str = "future",
    relabel_fraction: float = 0.8,
    achieved_key: str = "achieved_goal",
    desired_key: str = "desired_goal",
) -> ReplayBuffer[T]:
    """The same buffer, where a part of the items has a goal that was reached.

    Args:
      reward_fn, terminated_fn, strategy, relabel_fraction, achieved_key, desired_key: see
        `Hindsight`.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.uniform(capacity=1000, num_envs=1, batch_size=32, autoreset="next_step")
      >>> buffer = jr.hindsight(
      ...     buffer, lambda achieved, goal, step: -jnp.float32(jnp.any(achieved != goal))
      ... )
    """
    view = Hindsight(
        inner=_view_of("hindsight", buffer),
        reward_fn=reward_fn,
        terminated_fn=terminated_fn,
        strategy=strategy,
        relabel_fraction=relabel_fraction,
        achieved_key=achieved_key,
        desired_key=desired_key,
    )
    return dataclasses.replace(buffer, view=view)


def transform(buffer: ReplayBuffer[S], function: Callable[[S, Key], T]) -> ReplayBuffer[T]:
    """The same buffer, with every item changed as it is drawn: augmented, normalized, cast.

    Args:
      function: pure; `function(item, key)` for one item, without a batch axis, and a key of its
        own. It comes last: also where `frame_stack` or `hindsight` is put around the result, the
        item has its stacks and new goals.

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
    view: View[Any] = Transformed(inner=_view_of("transform", buffer), transform=function)
    return dataclasses.replace(cast(ReplayBuffer[Any], buffer), view=view)


def _view_of(where: str, buffer: ReplayBuffer) -> View:
    if not isinstance(buffer, ReplayBuffer):
        hint = (
            "; change how each member is read before they are mixed"
            if hasattr(buffer, "members")
            else ""
        )
        raise ValueError(f"{where}: takes a ReplayBuffer, got a {type(buffer).__name__}{hint}")
    return buffer.view

"""States with leading axes, which `vmap` and `pmap` add, outside of these."""

from collections.abc import Callable
from typing import Any

import jax


def for_each(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Map a function over the leading axes of a state.

    Args:
      function: Function of a state without leading axes, and of `others`.
      state: A node with a `ReplayState` as `rows`, whose leaves may have leading axes.
      others: Pytrees whose leaves have the same leading axes.
    """
    for _ in range(state.replay.counters.position.ndim - 1):
        function = jax.vmap(function)
    return function(state, *others)


def num_written(state: Any) -> jax.Array:
    """Return the number of rows that are stored in each env's ring: int32[...], with the leading
    axes of the state. All envs step together.

    Args:
      state: As for `for_each`.
    """
    return state.replay.counters.filled[..., 0]

"""Statistics and likely mistakes of a buffer's contents: `jaxreplay.inspect`, and for checkpoints
`python -m jaxreplay inspect PATH`."""

from typing import Any

from jaxreplay.inspection.contents import contents_of
from jaxreplay.inspection.inspection import Inspection as Inspection, inspection_of
from jaxreplay.inspection.plan import MemoryPlan as MemoryPlan


def inspect(buffer: Any, state: Any = None, *, max_bytes: int = 2**28) -> Inspection:
    """Return statistics of a buffer's contents, and a list of what is suspicious about them.

    They cover streams, leaves, episodes and the sampler. NaN values, or resets at other steps than
    `autoreset` says, are among what is suspicious. Do not call it under `jit`.

    Args:
      buffer: A `ReplayBuffer`, or a `Replay`, which has its own state.
      state: The buffer's state, which is not donated. Default: for a `Replay`, its own state.
      max_bytes: Bound on the bytes of steps that are read and held in host memory. Beyond it, a
        subset of rows is read, spread over the whole buffer. Flags, scalar rewards and
        probabilities are read for every row: about 100 bytes of host memory a row. Default: 2**28.

    Returns:
      The figures. `print` shows a text; `to_figure` draws a page with plots.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=8, batch_size=2)
      >>> state = buffer.extend(buffer.init({"x": 0.0}), {"x": jnp.array([[1.0], [jnp.nan]])})
      >>> found = jr.inspect(buffer, state)
      >>> found.streams["rows"], found.suspicious
      (2, ['steps.x has 1 values that are NaN or infinite, in 2 rows'])
    """
    if state is None and hasattr(buffer, "inspect"):
        return buffer.inspect(max_bytes=max_bytes)
    return inspection_of(contents_of(buffer, state, max_bytes))

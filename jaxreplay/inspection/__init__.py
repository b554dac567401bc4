"""A look inside a buffer: `jaxreplay.inspect`, and `python -m jaxreplay inspect PATH` for a
checkpoint."""

from typing import Any

from jaxreplay.inspection.contents import contents_of
from jaxreplay.inspection.inspection import Inspection as Inspection, inspection_of
from jaxreplay.inspection.plan import Plan as Plan


def inspect(buffer: Any, state: Any = None, *, max_bytes: int = 2**28) -> Inspection:
    """What a buffer holds: streams, episodes, leaves, how rows are drawn, and what is suspicious
    about it, such as resets that are not where `autoreset` says. Not for use under `jit`.

    Args:
      buffer: a `ReplayBuffer`. state: of it; it stays as it is. Or a `Replay` alone, which has its
        own.
      max_bytes: of the steps' values; at most so many are read and held in memory, from rows spread
        over the whole buffer. Flags, scalar rewards and probabilities are read of every row: that
        takes some 100 bytes of the host's memory a row.

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

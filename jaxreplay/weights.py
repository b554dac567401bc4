"""Numbers around prioritized draws: importance-sampling weights, and priorities of sequences."""

from typing import Any

import jax
import jax.numpy as jnp


def importance_weights(
    batch: Any,
    size: jax.Array,
    exponent: jax.Array | float,
    normalize: str | None = "batch_max",
    min_probability: jax.Array | None = None,
) -> jax.Array:
    """Weights `(size * probability) ** -exponent` that undo the bias of prioritized draws.

    Computed by logarithms, so that no intermediate value overflows. Invalid items weigh 0.

    Args:
      batch: the `Sample` that `sample` gave, that of a mixture too.
      size: int32[], `replay.size(state)`; of a mixture int32[B], `replay.sizes(states)`.
      exponent: beta, in [0, 1]: 0 corrects nothing, 1 fully; usually raised to 1 over the run. It may be traced.
      normalize: "batch_max" divides by the largest weight of the batch, in a mixture by that of the member's own part; "buffer_max" by
        the largest that any row of the buffer could have, which needs `min_probability`, and is the paper's; None leaves them as they are.
      min_probability: float32[], `replay.min_probability(state)`.

    Returns:
      float32[B], at most 1 where normalized.

    Source: Schaul et al., "Prioritized Experience Replay" (2016), section 3.4.
    """
    if normalize not in ("batch_max", "buffer_max", None):
        raise ValueError(f'importance_weights: normalize must be "batch_max", "buffer_max" or None, got {normalize!r}')
    if (normalize == "buffer_max") != (min_probability is not None):
        raise ValueError(
            f"importance_weights: normalize={normalize!r} with min_probability={'given' if min_probability is not None else None}; "
            'pass min_probability=replay.min_probability(state) with normalize="buffer_max", and only there'
        )
    if not hasattr(batch, "probability"):
        raise ValueError(f"importance_weights: batch must be what sample gave, got a {type(batch).__name__}; pass batch, not batch.items")
    is_valid = batch.is_valid & (batch.probability > 0)
    log_size = jnp.log(jnp.maximum(size, 1).astype(jnp.float32))

    def log_weight(probability):
        return -exponent * (log_size + jnp.log(probability))

    log_weights = log_weight(jnp.where(is_valid, batch.probability, 1))
    if normalize == "batch_max":
        largest = _largest(jnp.where(is_valid, log_weights, -jnp.inf), batch.source)
        log_weights = log_weights - jnp.where(jnp.isfinite(largest), largest, 0)
    elif min_probability is not None:
        log_weights = log_weights - log_weight(min_probability)
    return jnp.where(is_valid, jnp.exp(log_weights), 0)


def _largest(log_weights: jax.Array, source: jax.Array | None) -> jax.Array:
    """The largest of all, or for each item that of its source: a member with priorities must not silence another one's items."""
    if source is None:
        return jnp.max(log_weights, initial=-jnp.inf)
    return jax.ops.segment_max(log_weights, source, num_segments=len(source))[source]


def sequence_priority(td_error: jax.Array, mask: jax.Array, max_weight: float = 0.9) -> jax.Array:
    """`max_weight * max + (1 - max_weight) * mean` of the absolute errors of each sequence's steps.

    Args:
      td_error: float[B, T].
      mask: bool[B, T], the steps that count: `batch.items.mask`, where the burn-in is False already. What lies outside may be NaN.
      max_weight: eta, in [0, 1]; a mean alone would be near the same for all long sequences.

    Returns:
      float32[B]; 0 where no step counts.

    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning" (2019), section 2.3.
    """
    if td_error.shape != mask.shape:
        raise ValueError(f"sequence_priority: td_error{list(td_error.shape)} and mask{list(mask.shape)} must have the same axes [B, T]")
    error = jnp.where(mask, jnp.abs(td_error), 0).astype(jnp.float32)
    mean = error.sum(axis=-1) / jnp.maximum(mask.sum(axis=-1), 1)
    return max_weight * error.max(axis=-1, initial=0) + (1 - max_weight) * mean

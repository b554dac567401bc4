"""Targets and weights for a loss: advantages and value targets for on-policy learning, importance
weights and priorities of sequences.

Pure functions of arrays, with time first.

One convention for all of them. Arrays are `[T, E]`, or any other shapes that are equal, with time
as axis 0. `value[t]` is what the critic says of the observation that action t was chosen from,
`next_value[t]` of the one that it led to, at an episode's end the true final one: `next_values` and
`Rollout.bootstrap` build it. `terminated` says that nothing lies beyond, `truncated` that the value
goes on though the stream does not. Where `mask` is False there is no step: such a row gets 0,
passes nothing on, and whatever it holds, NaN too, stays there. The results are constants to the
learner: no gradient flows through them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from jaxreplay._util.names import spec_text

# Keeps a division by the spread of equal numbers finite; far below the spread of any advantages
# worth learning from.
_SMALLEST_DEVIATION = 1e-8


class Advantages(NamedTuple):
    """What a policy and a critic learn from: floating, at least float32, of the shape of the
    values."""

    # [T, E]: how much better the action was than the critic expected; for a policy gradient
    advantage: jax.Array
    target: jax.Array  # [T, E]: what the critic should have said


export.register_namedtuple_serialization(Advantages, serialized_name="jaxreplay.targets.Advantages")


def gae(
    reward: Any,
    value: Any,
    next_value: Any,
    *,
    terminated: Any,
    truncated: Any,
    gamma: Any,
    lambda_: Any = 0.95,
    mask: Any = None,
) -> Advantages:
    """Generalized advantage estimates, and the lambda-returns that belong to them.

    Args:
      reward: number[T, E], undiscounted.
      value, next_value: float[T, E], see above; `next_value` is not read where `terminated`.
      terminated, truncated: bool[T, E].
      gamma: in [0, 1]. lambda_: in [0, 1]: 0 looks one step ahead, 1 to the episode's end.
      mask: bool[T, E]; by default all rows are steps.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxreplay.targets import gae, next_values
      >>> flag = jnp.zeros(3, bool)
      >>> value = jnp.array([1.0, 2.0, 3.0])
      >>> next_value = next_values(value, last_value=jnp.array(4.0))
      >>> terminated = flag.at[1].set(True)
      >>> gae(
      ...     jnp.ones(3),
      ...     value,
      ...     next_value,
      ...     terminated=terminated,
      ...     truncated=flag,
      ...     gamma=0.5,
      ...     lambda_=0.5,
      ... ).advantage.tolist()
      [0.75, -1.0, 0.0]

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (2016), equation 16; the target is the lambda-return, advantage plus value.
    """
    reward, value, next_value, mask = _checked(
        "gae", reward, value, next_value, terminated, truncated, mask
    )
    delta = reward + gamma * jnp.where(terminated, 0, next_value) - value
    carry = jnp.where(terminated | truncated | ~mask, 0, gamma * lambda_)
    advantage = _sum_backwards(jnp.where(mask, delta, 0), carry)
    return _constants(mask, advantage, advantage + value)


def vtrace(
    log_ratio: Any,
    reward: Any,
    value: Any,
    next_value: Any,
    *,
    terminated: Any,
    truncated: Any,
    gamma: Any,
    lambda_: Any = 1.0,
    rho_clip: Any = 1.0,
    c_clip: Any = 1.0,
    mask: Any = None,
) -> Advantages:
    """V-trace: value targets and policy-gradient advantages from steps that an older policy took.

    Args:
      log_ratio: float[T, E], log probability of each action under the policy that learns less that
        under the one that acted.
      reward, value, next_value, terminated, truncated, gamma, lambda_, mask: as in `gae`.
      rho_clip: the largest weight of a step's own error, which decides the policy whose value is
        learned; inf for no bound.
      c_clip: the largest weight of what comes after it, at most `rho_clip`; it decides how fast
        targets settle, and their spread.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxreplay.targets import vtrace
      >>> flag, value, next_value = jnp.zeros(2, bool), jnp.zeros(2), jnp.array([0.0, 1.0])
      >>> vtrace(
      ...     jnp.log(jnp.array([0.5, 3.0])),
      ...     jnp.ones(2),
      ...     value,
      ...     next_value,
      ...     terminated=flag,
      ...     truncated=flag,
      ...     gamma=1.0,
      ... ).target.tolist()
      [1.5, 2.0]

    Source: Espeholt et al., "IMPALA" (2018), equation 1 and section 4.2, with `lambda_` as in its
    remark 2; the advantage is rho (r + gamma v' - V), where v' is the next step's target, or the
    value of the observation where the stream was cut.
    """
    reward, value, next_value, mask = _checked(
        "vtrace", reward, value, next_value, terminated, truncated, mask, log_ratio=log_ratio
    )
    log_ratio = jnp.where(mask, _at_least_float32(log_ratio), 0)
    # Clipped as logarithms, where a ratio cannot overflow.
    rho, c = (
        jnp.exp(jnp.minimum(log_ratio, jnp.log(jnp.asarray(clip, value.dtype))))
        for clip in (rho_clip, c_clip)
    )
    next_value = jnp.where(terminated, 0, next_value)
    is_expired = terminated | truncated | ~mask
    delta = jnp.where(mask, rho * (reward + gamma * next_value - value), 0)
    correction = _sum_backwards(delta, jnp.where(is_expired, 0, gamma * lambda_ * c))
    following = jnp.where(
        is_expired, 0, jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    )
    return _constants(
        mask, rho * (reward + gamma * (next_value + following) - value), correction + value
    )


def next_values(
    value: Any, last_value: Any, truncated: Any = None, final_value: Any = None
) -> jax.Array:
    """The value of what each step led to: the next row's, and of the true final observation where
    an episode was cut: `[T, E]`.

    Args:
      value: float[T, E], of the observation of each row.
      last_value: float[E], of the observation after the last row.
      truncated: bool[T, E]. final_value: float[T, E], of each final observation, read only where
        truncated. Leave both out where the row after a cut holds the final observation
        (`autoreset="next_step"`).
    """
    value, last_value = jnp.asarray(value), jnp.asarray(last_value)
    _check_shapes("next_values", value.shape[1:], last_value=last_value)
    following = jnp.concatenate([value[1:], last_value[None].astype(value.dtype)])
    if (truncated is None) != (final_value is None):
        raise ValueError(
            "next_values: truncated and final_value belong together; pass both or neither"
        )
    if final_value is None:
        return following
    _check_shapes("next_values", value.shape, truncated=truncated, final_value=final_value)
    return jnp.where(truncated, final_value, following)


def normalize(advantage: Any, mask: Any = None) -> jax.Array:
    """Shift and scale to mean 0 and standard deviation 1 over the rows of `mask`; 0 elsewhere, and
    where all are equal.

    Args:
      advantage: float[...]. mask: bool[...] of the same shape; by default all count.
    """
    advantage = _at_least_float32(advantage)
    mask = jnp.ones(advantage.shape, bool) if mask is None else jnp.asarray(mask)
    _check_shapes("normalize", advantage.shape, mask=mask)
    centered = advantage - masked_mean(advantage, mask)
    # again: the mean of large equal numbers is off by their rounding, which is all that would be
    # left
    centered = centered - masked_mean(centered, mask)
    deviation = jnp.sqrt(masked_mean(jnp.square(centered), mask))
    return jnp.where(mask, centered / (deviation + _SMALLEST_DEVIATION), 0)


def masked_mean(x: Any, mask: Any) -> jax.Array:
    """Return the mean over the elements where `mask` is True; 0 where none is.

    Args:
      x: number[...]; what lies outside of the mask may be NaN.
      mask: bool[...] of the same shape.

    Returns:
      floating[], at least float32.

    Example:
      >>> import jax.numpy as jnp, jaxreplay as jr
      >>> float(jr.masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])))
      2.0
    """
    x, mask = _at_least_float32(x), jnp.asarray(mask)
    if x.shape != mask.shape or mask.dtype != bool:
        raise ValueError(
            f"masked_mean: mask must be bool{list(x.shape)}, as x is, got {spec_text(mask)}"
        )
    return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)


def _checked(where, reward, value, next_value, terminated, truncated, mask, **more):
    """Reward, value and next value, at least float32, and the mask; or a ValueError for shapes that
    would broadcast into nonsense."""
    value = _at_least_float32(value)
    _check_shapes(
        where,
        value.shape,
        reward=reward,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
        **more,
    )
    mask = jnp.ones(value.shape, bool) if mask is None else jnp.asarray(mask)
    _check_shapes(where, value.shape, mask=mask)
    for name, flag in {"terminated": terminated, "truncated": truncated, "mask": mask}.items():
        if jnp.asarray(flag).dtype != bool:
            raise ValueError(
                f"{where}: {name} must be bool, got {jnp.asarray(flag).dtype.name}; write "
                "x.astype(bool)"
            )
    return _at_least_float32(reward), value, _at_least_float32(next_value), mask


def _check_shapes(where: str, expected: tuple[int, ...], **arrays: Any) -> None:
    bad = [
        f"{name}: got {list(jnp.shape(array))}"
        for name, array in arrays.items()
        if jnp.shape(array) != expected
    ]
    if bad:
        raise ValueError(
            f"{where}: {'; '.join(bad)}, expected {list(expected)}, to go with the values; a "
            "critic's last axis of 1 is taken off by "
            "x.squeeze(-1), and further axes by vmap"
        )


def _at_least_float32(array: Any) -> jax.Array:
    array = jnp.asarray(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _constants(mask, advantage, target):
    return Advantages(*(jax.lax.stop_gradient(jnp.where(mask, x, 0)) for x in (advantage, target)))


def _sum_backwards(delta: jax.Array, carry: jax.Array) -> jax.Array:
    """`sum[t] = delta[t] + carry[t] * sum[t + 1]` along axis 0; where carry is 0 nothing comes
    through, not even NaN.

    A CPU takes a million steps one by one in 10 ms, in parallel in 23 after 4 s of compilation
    (measured); an accelerator needs microseconds for each step of a loop.
    """
    if not delta.shape[0]:
        return delta
    return jax.lax.platform_dependent(
        delta, carry.astype(delta.dtype), cpu=_sum_in_order, default=_sum_in_parallel
    )


def _sum_in_order(delta, carry):
    def step(later, now):
        total = _link(later, now[1], now[0])
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, carry), reverse=True)[1]


def _sum_in_parallel(delta, carry):
    def join(later, earlier):
        return _link(later[0], earlier[1], earlier[0]), jnp.where(
            earlier[1] == 0, 0, earlier[1] * later[1]
        )

    return jax.lax.associative_scan(join, (delta, carry), reverse=True)[0]


def _link(later, carry, delta):
    return jnp.where(carry == 0, delta, delta + carry * later)


def importance_weights(batch: Any, beta: Any, *, reference: Any = None) -> jax.Array:
    """Compute the weights of a batch, `(reference / probability) ** beta`, for a beta or a
    normalization other than that of `batch.weight`. They undo the bias of prioritized draws.

    Args:
      batch: the `Sample` that `sample` gave, that of a mixture too.
      beta: number[], at least 0: 0 corrects nothing, 1 fully; usually raised to 1 over the run. It
        may be traced.
      reference: number[] or number[B], the probability that weighs 1. By default the batch's
        smallest, in a mixture that of each item's member, so that the largest weight is 1.
        `1 / size` does not normalize.

    Returns:
      float32[B]; 0 where not valid.

    Source: Schaul et al., "Prioritized Experience Replay" (2016), section 3.4.
    """
    if not hasattr(batch, "probability"):
        raise ValueError(
            f"importance_weights: batch must be what sample gave, got a {type(batch).__name__}; "
            "pass batch, not batch.experience"
        )
    if reference is None and batch.source is not None:
        possible = jnp.where(_is_drawn(batch.probability, batch.is_valid), batch.probability, 1)
        reference = jax.ops.segment_min(possible, batch.source, num_segments=len(possible))
        reference = reference[batch.source]
    return weights_of(batch.probability, batch.is_valid, beta, reference)


def weights_of(
    probability: jax.Array, is_valid: jax.Array, beta: Any, reference: Any = None
) -> jax.Array:
    """Return `importance_weights` of probabilities: float32[...].

    Computed by logarithms, so that no intermediate value overflows.
    """
    if jnp.ndim(beta) != 0:
        raise ValueError(
            f"beta must be one number, got an array of shape {list(jnp.shape(beta))}; one for each "
            "buffer of a population goes through vmap"
        )
    is_drawn = _is_drawn(probability, is_valid)
    log_probability = jnp.log(jnp.where(is_drawn, probability, 1))
    log_reference = (
        log_probability.min(initial=0) if reference is None else jnp.log(jnp.asarray(reference))
    )
    weight = jnp.exp(beta * (log_reference - log_probability))
    return jnp.where(is_drawn, weight, 0).astype(jnp.float32)


def _is_drawn(probability: jax.Array, is_valid: jax.Array) -> jax.Array:
    return is_valid & (probability > 0)


def sequence_priority(td_error: jax.Array, mask: jax.Array, max_weight: float = 0.9) -> jax.Array:
    """`max_weight * max + (1 - max_weight) * mean` of the absolute errors of each sequence's steps.

    Args:
      td_error: float[B, T].
      mask: bool[B, T], the steps that count: `batch.experience.mask`, where the burn-in is False
        already. What lies outside may be NaN.
      max_weight: eta, in [0, 1]; a mean alone would be near the same for all long sequences.

    Returns:
      float32[B]; 0 where no step counts.

    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning"
    (2019), section 2.3.
    """
    if td_error.shape != mask.shape:
        raise ValueError(
            f"sequence_priority: td_error{list(td_error.shape)} and mask{list(mask.shape)} must "
            "have the same axes [B, T]"
        )
    error = jnp.where(mask, jnp.abs(td_error), 0).astype(jnp.float32)
    mean = error.sum(axis=-1) / jnp.maximum(mask.sum(axis=-1), 1)
    return max_weight * error.max(axis=-1, initial=0) + (1 - max_weight) * mean

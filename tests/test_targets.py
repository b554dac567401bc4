"""Advantages and targets compared with float64 sums that are written out as in the papers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxreplay import gae, targets, vtrace
from jaxreplay.targets import masked_mean, next_values, normalize
from tests.conftest import ALL

T, E = 9, 2
DISCOUNT, DECAY = 0.9, 0.7
MIXED = "..T.-.C-..-..T..-."  # T * E rows, see `stream_of`
INF = math.inf


def both(log_ratio, stream, clips):
    """Return what `gae` and `vtrace` say of a stream."""
    shared = stream | {"gamma": DISCOUNT, "lambda_": DECAY}
    rho_clip, c_clip = clips
    return gae(**shared), vtrace(log_ratio, **shared, rho_clip=rho_clip, c_clip=c_clip)


jitted = jax.jit(both)


def stream_of(kinds, seed=0):
    """Return a stream of T * E rows. ".": a step; "T": terminated; "C": truncated; "B": both; "-":
    masked out.

    Numbers that must not be read are NaN.
    """
    kinds = np.array(list(kinds)).reshape(T, E)
    numbers = np.random.default_rng(seed).normal(size=(3, T, E)).astype(np.float32)
    reward, value, next_value = np.where(kinds == "-", np.float32(np.nan), numbers)
    terminated = np.isin(kinds, ["T", "B"])
    return {
        "reward": reward,
        "value": value,
        "next_value": np.where(terminated, np.float32(np.nan), next_value),
        "terminated": terminated,
        "truncated": np.isin(kinds, ["C", "B"]),
        "mask": kinds != "-",
    }


def ratios_of(stream, scale, seed=0):
    log_ratio = scale * np.random.default_rng(seed).normal(size=(T, E)).astype(np.float32)
    return np.where(stream["mask"], log_ratio, np.float32(np.nan))


streams = st.lists(st.sampled_from("...TCB-"), min_size=T * E, max_size=T * E).map(stream_of)


def oracle(stream, rho=None, c=None):
    """Return advantages and targets as sums of errors over the rest of an episode.

    Without `rho` and `c` they are those of `gae`, with them those of `vtrace`.
    """
    reward, value, next_value = (
        stream[name].astype(float) for name in ("reward", "value", "next_value")
    )
    terminated, truncated, mask = stream["terminated"], stream["truncated"], stream["mask"]
    target, advantage, ones = np.zeros(mask.shape), np.zeros(mask.shape), np.ones(mask.shape)
    weight, trace = (ones, ones) if rho is None else (rho, c)

    def follows(t, env):
        """Return whether step t + 1 exists and belongs to the episode of step t."""
        is_over = terminated[t, env] or truncated[t, env]
        return not is_over and t + 1 < len(mask) and mask[t + 1, env]

    def one_step(t, env, more=0.0):
        beyond = 0 if terminated[t, env] else DISCOUNT * (next_value[t, env] + more)
        return weight[t, env] * (reward[t, env] + beyond - value[t, env])

    for t, env in reversed(list(np.argwhere(mask))):
        total, factor, at = one_step(t, env), 1.0, t
        while follows(at, env):
            factor *= DISCOUNT * DECAY * trace[at, env]
            at += 1
            total += factor * one_step(at, env)
        target[t, env] = value[t, env] + total
        # V-trace adds (the next step's target - its value) to the next value.
        is_plain = rho is None or not follows(t, env)
        more = 0.0 if is_plain else target[t + 1, env] - value[t + 1, env]
        advantage[t, env] = total if rho is None else one_step(t, env, more)
    return advantage, target


# The scale of the ratios' logarithms, and the bounds of the ratios. With equal policies, V-trace
# has the targets of GAE; ratios of e^200 must not overflow.
@given(streams, st.sampled_from([(0, 1.5, 1.1), (1, 1.5, 1.1), (200, 1.5, 1.1), (0.3, INF, INF)]))
def test_advantages_and_targets_are_sums_of_errors_over_the_steps_alone(stream, ratios):
    scale, *clips = ratios
    log_ratio = ratios_of(stream, scale)
    rho, c = (np.minimum(np.exp(log_ratio.astype(float)), clip) for clip in clips)
    expected = oracle(stream), oracle(stream, rho, c)
    for got, right in zip(jitted(log_ratio, stream, clips), expected, strict=True):
        np.testing.assert_allclose(got.advantage, right[0], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(got.target, right[1], rtol=1e-5, atol=2e-5)


@jax.jit
def backwards(delta, carry):
    return targets._sum_in_order(delta, carry), targets._sum_in_parallel(delta, carry)


@given(streams, st.sampled_from([np.nan, np.inf]))
def test_both_ways_to_sum_backwards_agree_and_pass_nothing_through_a_carry_of_zero(stream, bad):
    delta = np.where(stream["mask"], stream["reward"], np.float32(bad))
    carry = np.where(stream["terminated"] | stream["truncated"], 0, np.float32(0.8))
    expected = np.zeros((T + 1, E))
    for t in reversed(range(T)):
        later = np.where(carry[t] == 0, 0, expected[t + 1])
        expected[t] = delta[t] + carry[t] * later
    for got in backwards(delta, carry):
        np.testing.assert_allclose(got, expected[:T], atol=1e-5)


@pytest.mark.no_xla
def test_no_steps_have_no_advantages():
    empty = {name: leaf[:0] for name, leaf in stream_of(MIXED).items()}
    found = jax.eval_shape(both, empty["reward"], empty, (1.0, 1.0))
    assert {leaf.shape for leaf in jax.tree.leaves(found)} == {(0, E)}


def test_next_values_by_hand():
    """Three steps; the second is truncated, with a final value of 10."""
    value, final_value = np.float32([1, 2, 3]), np.float32([7, 10, 7])
    truncated = np.array([False, True, False])
    found = jax.jit(next_values)(value, np.float32(4), truncated, final_value)
    assert found.tolist() == [2, 10, 4]


def test_each_step_may_have_a_discount_of_its_own():
    """A discount of 0 ends what a termination ends."""
    stream = stream_of(MIXED)
    ends = np.random.default_rng(1).random((T, E)) < 0.3
    flags = {"terminated": stream["terminated"] | ends, "truncated": stream["truncated"] & ~ends}
    next_value = np.nan_to_num(stream["next_value"])

    @jax.jit
    def run(gamma, stream):
        ratio = jnp.where(stream["mask"], 0.3, 0.0)
        options = {"gamma": gamma, "lambda_": DECAY}
        return gae(**stream, **options), vtrace(ratio, **stream, **options)

    own = run(np.where(ends, 0, np.float32(DISCOUNT)), stream | {"next_value": next_value})
    plain = run(np.full((T, E), DISCOUNT, np.float32), stream | flags | {"next_value": next_value})
    scalar = run(np.float32(DISCOUNT), stream | flags | {"next_value": next_value})
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(same, plain, scalar)
    jax.tree.map(same, own, plain)


def test_vmap_over_envs_equals_one_call_and_so_does_a_call_without_jit():
    stream = stream_of(MIXED)
    arguments = ratios_of(stream, 1), stream, (1.5, 1.1)
    by_env = jax.jit(jax.vmap(both, in_axes=(1, 1, None), out_axes=1))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for other in (by_env, both) if ALL else (by_env,):
        jax.tree.map(same, jitted(*arguments), other(*arguments))


def test_narrow_numbers_are_computed_with_in_float32():
    stream = stream_of("." * T * E)
    narrow = {
        name: leaf if leaf.dtype == bool else leaf.astype(jnp.bfloat16)
        for name, leaf in stream.items()
    }
    got, _ = jitted(ratios_of(stream, 0), narrow, (1.5, 1.1))
    np.testing.assert_allclose(got.advantage, oracle(narrow)[0], atol=1e-5)
    whole = jax.eval_shape(
        functools.partial(gae, gamma=1.0), **stream | {"reward": np.ones((T, E), int)}
    )
    assert {leaf.dtype for leaf in (*got, *whole)} == {np.dtype(np.float32)}


def test_no_gradient_flows_through_advantages_and_targets():
    stream = stream_of(MIXED)

    def loss(value):
        found = both(value, stream | {"value": value, "next_value": value}, (1.5, 1.1))
        return sum(leaf.sum() for leaf in jax.tree.leaves(found))

    assert not np.asarray(jax.jit(jax.grad(loss))(stream["value"])).any()


def test_normalize_counts_the_masked_in_rows_alone():
    advantage = np.float32([[1, np.nan], [3, 5], [np.inf, 7]])
    mask = np.array([[True, False], [True, True], [False, True]])
    jitted = jax.jit(normalize)
    got = np.asarray(jitted(advantage, mask))
    assert (got[~mask] == 0).all()
    np.testing.assert_allclose(got[mask], (np.array([1, 3, 5, 7]) - 4) / math.sqrt(5), rtol=1e-6)
    assert not np.asarray(jitted(advantage, mask & False)).any()


def test_normalize_has_mean_0_and_deviation_1_but_zeros_for_equal_numbers():
    equal = [np.full(1000, value, np.float32) for value in (0.0, 1.0, 123.456, -1e6)]
    *zeros, got = jax.jit(jax.vmap(normalize))(np.stack([*equal, np.float32([1, 3] * 500)]))
    np.testing.assert_allclose(zeros, np.zeros((4, 1000)), atol=1e-3)
    np.testing.assert_allclose(got, [-1, 1] * 500, rtol=1e-6)


def test_the_masked_mean_of_nothing_is_zero():
    x, mask = np.float32([[1, np.nan], [4, np.inf]]), np.array([[True, False], [True, False]])
    mean = jax.jit(jax.value_and_grad(masked_mean))
    value, gradient = mean(x, mask)
    assert (float(value), gradient.tolist()) == (2.5, [[0.5, 0], [0.5, 0]])
    assert float(mean(x, mask & False)[0]) == 0
    assert float(jax.jit(masked_mean)(np.array([1, 2]), np.array([True, True]))) == 1.5
    narrow = jax.ShapeDtypeStruct(mask.shape, jnp.bfloat16)
    assert jax.eval_shape(masked_mean, narrow, mask).dtype == jnp.float32

"""Advantages and targets compared with float64 sums that are written out as in the papers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxreplay import gae, targets, vtrace
from jaxreplay.targets import masked_mean, next_values, normalize

T, E = 9, 2
DISCOUNT, DECAY = 0.9, 0.7
MIXED = "..T.-.C-..-..T..-."  # T * E rows, see `streams`
FORMS = {"in order": targets._sum_in_order, "in parallel": targets._sum_in_parallel}


def of_stream(function, *stream, **options):
    """Call `gae` or `vtrace` with the flags as keyword arguments."""
    *numbers, terminated, truncated = stream
    return function(*numbers, terminated=terminated, truncated=truncated, **options)


jitted_gae = jax.jit(
    lambda *stream, mask: of_stream(gae, *stream, gamma=DISCOUNT, lambda_=DECAY, mask=mask)
)
jitted_vtrace = jax.jit(
    lambda *stream, mask: of_stream(
        vtrace, *stream, gamma=DISCOUNT, lambda_=DECAY, rho_clip=1.5, c_clip=1.1, mask=mask
    ),
)


def stream_of(kinds, seed=0):
    """Return reward, value, next value, terminated, truncated and mask from T * E characters."""
    kinds = np.array(list(kinds)).reshape(T, E)
    reward, value, next_value = (
        np.random.default_rng(seed).normal(size=(3, T, E)).astype(np.float32)
    )
    return (
        reward,
        value,
        next_value,
        np.isin(kinds, ["T", "B"]),
        np.isin(kinds, ["C", "B"]),
        kinds != "-",
    )


# ".": a step; "T": terminated; "C": truncated; "B": both; "-": masked out.
streams = st.lists(st.sampled_from("...TCB-"), min_size=T * E, max_size=T * E).map(stream_of)


def follows(t, env, terminated, truncated, mask):
    """Return whether step t + 1 exists and belongs to the episode of step t."""
    return (
        not terminated[t][env] and not truncated[t][env] and t + 1 < len(mask) and mask[t + 1][env]
    )


def oracle(reward, value, next_value, terminated, truncated, mask, rho=None, c=None):
    """Return advantages and targets as sums of errors over the rest of an episode.

    Without `rho` and `c` they are those of `gae`, with them those of `vtrace`.
    """
    target, advantage = np.zeros((T, E)), np.zeros((T, E))
    ones = np.ones((T, E))
    weight, trace = (ones, ones) if rho is None else (rho, c)

    def one_step(t, env, beyond):
        return weight[t][env] * (
            reward[t][env] + (0 if terminated[t][env] else DISCOUNT * beyond) - value[t][env]
        )

    for env in range(E):
        for start in reversed(range(T)):
            if not mask[start][env]:
                continue
            total, factor, t = 0.0, 1.0, start
            while True:
                total += factor * one_step(t, env, float(next_value[t][env]))
                factor *= DISCOUNT * DECAY * trace[t][env]
                if not follows(t, env, terminated, truncated, mask):
                    break
                t += 1
            target[start][env] = value[start][env] + total
            advantage[start][env] = total
            if rho is not None:
                # V-trace adds (the next step's target - its value) to the next value.
                more = (
                    target[start + 1][env] - value[start + 1][env]
                    if follows(start, env, terminated, truncated, mask)
                    else 0.0
                )
                advantage[start][env] = one_step(start, env, float(next_value[start][env]) + more)
    return advantage, target


@given(streams)
def test_gae_is_the_sum_of_discounted_errors(stream):
    got = jitted_gae(*stream[:5], mask=stream[5])
    for name, array, expected in zip(got._fields, got, oracle(*stream), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-5, err_msg=name)


@given(streams, st.integers(0, 99))
def test_vtrace_is_the_sum_of_weighted_errors(stream, seed):
    log_ratio = np.random.default_rng(seed).normal(size=(T, E)).astype(np.float32)
    got = jitted_vtrace(log_ratio, *stream[:5], mask=stream[5])
    ratio = np.exp(log_ratio.astype(float))
    expected = oracle(*stream, rho=np.minimum(ratio, 1.5), c=np.minimum(ratio, 1.1))
    for name, array, right in zip(got._fields, got, expected, strict=True):
        np.testing.assert_allclose(array, right, atol=1e-5, err_msg=name)


@given(streams)
def test_vtrace_of_the_policy_that_acted_has_the_targets_of_gae(stream):
    got = jitted_vtrace(np.zeros((T, E), np.float32), *stream[:5], mask=stream[5])
    np.testing.assert_allclose(
        got.target, jitted_gae(*stream[:5], mask=stream[5]).target, atol=1e-5
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(streams)
def test_the_two_ways_to_sum_backwards_agree(form, stream):
    delta, carry = stream[0], np.where(stream[3] | stream[4], 0, np.float32(0.8))
    expected = np.zeros((T + 1, E))
    for t in reversed(range(T)):
        expected[t] = delta[t] + carry[t] * expected[t + 1]
    np.testing.assert_allclose(jax.jit(form)(delta, carry), expected[:T], atol=1e-5)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nothing_comes_through_a_carry_of_zero(form):
    delta = jnp.array([1.0, 2.0, jnp.nan, jnp.inf, 5.0])
    carry = jnp.array([0.5, 0.0, 0.5, 0.0, 0.5])
    np.testing.assert_array_equal(form(delta, carry), [2.0, 2.0, np.nan, np.inf, 5.0])


def test_no_steps_have_no_advantages():
    no, flag = np.zeros((0, E), np.float32), np.zeros((0, E), bool)
    assert gae(
        no, no, no, terminated=flag, truncated=flag, gamma=0.9, lambda_=0.9
    ).advantage.shape == (0, E)
    assert vtrace(no, no, no, no, terminated=flag, truncated=flag, gamma=0.9).target.shape == (0, E)


def test_by_hand():
    """Three steps; the second is truncated, with a final value of 10."""
    no = jnp.zeros(3, bool)
    value = jnp.array([1.0, 2.0, 3.0])
    cut = no.at[1].set(True)
    next_value = next_values(value, jnp.array(4.0), cut, jnp.array([7.0, 10.0, 7.0]))
    assert next_value.tolist() == [2.0, 10.0, 4.0]
    got = gae(jnp.ones(3), value, next_value, terminated=no, truncated=cut, gamma=0.5, lambda_=0.5)
    assert got.advantage.tolist() == [1 + 0.25 * 4, 4.0, 0.0]
    assert got.target.tolist() == [3.0, 6.0, 3.0]


def test_what_a_masked_row_holds_stays_there():
    reward, value, next_value, terminated, truncated, mask = stream_of("..T.-.C-..-..T..-.")
    log_ratio = np.zeros((T, E), np.float32)
    bad = [np.where(mask, x, np.nan) for x in (log_ratio, reward, value, next_value)]
    with jax.debug_nans(False):
        for function, inputs, clean in (
            (jitted_gae, bad[1:], (reward, value, next_value)),
            (jitted_vtrace, bad, (log_ratio, reward, value, next_value)),
        ):
            got, expected = (
                function(*inputs, terminated, truncated, mask=mask),
                function(*clean, terminated, truncated, mask=mask),
            )
            for array, right in zip(got, expected, strict=True):
                np.testing.assert_array_equal(array, right)
                assert (np.asarray(array)[~mask] == 0).all()


def test_what_lies_beyond_a_termination_is_not_read():
    reward, value, next_value, terminated, truncated, _ = stream_of("T" * T * E)
    got = gae(
        reward,
        value,
        np.full_like(next_value, np.nan),
        terminated=terminated,
        truncated=truncated,
        gamma=1.0,
        lambda_=1.0,
    )
    np.testing.assert_allclose(got.advantage, reward - value, rtol=1e-6)


def test_ratios_neither_overflow_nor_need_a_bound():
    flag, one, log_ratio = np.zeros(1, bool), np.ones(1, np.float32), np.array([200.0], np.float32)
    got = vtrace(log_ratio, one, one, one, terminated=flag, truncated=flag, gamma=0.5)
    assert (got.advantage.tolist(), got.target.tolist()) == ([0.5], [1.5])
    unbounded = vtrace(
        np.log(7 * one),
        one,
        one,
        one,
        terminated=flag,
        truncated=flag,
        gamma=0.5,
        rho_clip=math.inf,
        c_clip=math.inf,
    )
    np.testing.assert_allclose(unbounded.advantage, [3.5], rtol=1e-6)


def test_jit_equals_eager_and_vmap_a_loop():
    *stream, mask = stream_of("..T.-.C-..-..T..-.")
    log_ratio = np.linspace(-1, 1, T * E).astype(np.float32).reshape(T, E)
    for function, inputs in ((jitted_gae, stream), (jitted_vtrace, [log_ratio, *stream])):
        together = function(*inputs, mask=mask)
        eager = function.__wrapped__(*inputs, mask=mask)
        by_env = jax.vmap(
            lambda mask, *inputs, function=function: function(*inputs, mask=mask),
            in_axes=1,
            out_axes=1,
        )(mask, *inputs)
        for array, other, vmapped in zip(together, eager, by_env, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(array, vmapped, rtol=1e-6, atol=1e-6)


def test_narrow_numbers_are_computed_with_in_float32():
    *stream, mask = stream_of("." * T * E)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in stream[:3]]
    got = jitted_gae(*narrow, *stream[3:], mask=mask)
    assert (got.advantage.dtype, got.target.dtype) == (jnp.float32, jnp.float32)
    expected = oracle(*(np.asarray(x, float) for x in narrow), *stream[3:], mask)
    np.testing.assert_allclose(got.advantage, expected[0], atol=1e-5)
    whole = of_stream(gae, jnp.ones((T, E), jnp.int32), *stream[1:], gamma=1.0, lambda_=1.0)
    assert whole.advantage.dtype == jnp.float32


def test_no_gradient_flows_through_advantages_and_targets():
    *stream, mask = stream_of("..T.-.C-..-..T..-.")

    def loss(value):
        got = of_stream(
            gae, stream[0], value, value, *stream[3:], gamma=0.9, lambda_=0.9, mask=mask
        )
        return (got.advantage + got.target).sum()

    assert (jax.grad(loss)(jnp.asarray(stream[1])) == 0).all()


def test_normalize_counts_the_masked_in_rows_alone():
    advantage = jnp.array([[1.0, jnp.nan], [3.0, 5.0], [jnp.inf, 7.0]])
    mask = jnp.array([[True, False], [True, True], [False, True]])
    got = jax.jit(normalize)(advantage, mask)
    assert (got[~mask] == 0).all()
    np.testing.assert_allclose(got[mask], (np.array([1, 3, 5, 7]) - 4) / math.sqrt(5), rtol=1e-6)
    np.testing.assert_allclose(normalize(jnp.array([1.0, 3.0])), [-1, 1], rtol=1e-6)


def test_normalize_of_equal_numbers_is_zero():
    for value in (0.0, 1.0, 123.456, -1e6):
        np.testing.assert_allclose(normalize(jnp.full(1000, value)), 0, atol=1e-3)
    assert normalize(jnp.ones(4), jnp.zeros(4, bool)).tolist() == [0] * 4


def test_the_masked_mean_of_nothing_is_zero():
    x = jnp.array([[1.0, jnp.nan], [4.0, jnp.inf]])
    mask = jnp.array([[True, False], [True, False]])
    assert float(jax.jit(masked_mean)(x, mask)) == 2.5
    assert float(masked_mean(x, jnp.zeros_like(mask))) == 0
    assert float(masked_mean(jnp.array([1, 2]), jnp.array([True, True]))) == 1.5
    assert masked_mean(jnp.ones(3, jnp.bfloat16), jnp.ones(3, bool)).dtype == jnp.float32
    gradient = jax.grad(lambda x: masked_mean(x, mask))(x)
    assert gradient.tolist() == [[0.5, 0], [0.5, 0]]
    for bad in (mask[0], jnp.ones_like(x)):
        with pytest.raises(ValueError, match=r"masked_mean: mask must be bool\[2, 2\]"):
            masked_mean(x, bad)


def test_shapes_that_would_broadcast_are_refused():
    *stream, _ = stream_of("." * T * E)
    reward, value, next_value, terminated, truncated = stream
    with pytest.raises(
        ValueError,
        match=r"gae: reward: got \[9, 2, 1\]; terminated: got \[2\], expected \[9, 2\].*squeeze",
    ):
        gae(
            reward[..., None],
            value,
            next_value,
            terminated=terminated[0],
            truncated=truncated,
            gamma=1.0,
            lambda_=1.0,
        )
    with pytest.raises(ValueError, match=r"vtrace: log_ratio: got \[2\], expected \[9, 2\]"):
        of_stream(vtrace, reward[0], *stream, gamma=1.0)
    with pytest.raises(
        ValueError, match=r"gae: terminated must be bool, got float32; write x\.astype\(bool\)"
    ):
        gae(
            reward,
            value,
            next_value,
            terminated=reward,
            truncated=truncated,
            gamma=1.0,
            lambda_=1.0,
        )
    with pytest.raises(ValueError, match=r"next_values: last_value: got \[9, 2\], expected \[2\]"):
        next_values(value, value)
    with pytest.raises(ValueError, match="truncated and final_value belong together"):
        next_values(value, value[0], final_value=value)
    with pytest.raises(ValueError, match=r"normalize: mask: got \[2\]"):
        normalize(value, truncated[0])

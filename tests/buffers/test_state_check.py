"""A buffer accepts only its own states: for any other state, each method names the difference."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.buffers import test_verbs as verbs
from tests.support.refusals import refused

SHARED = {"capacity": 64, "num_envs": 2, "batch_size": 8, "autoreset": "next_step"}
ZERO = np.zeros(2, np.float32)
STEP, BLOCK, EXAMPLE = verbs.STEP, verbs.BLOCK, verbs.EXAMPLE
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))


def uniform(**changes):
    return jr.uniform(**SHARED | changes)


METHODS = [name for name in verbs.ALL if name != "adopt"]  # which takes states of others


def call(method, buffer, state):
    got = getattr(buffer, method)(state, *verbs.given_to(method, state))
    return got.state if method == "episode_table" else got


def buffer_for(method, **sizes):
    """Return a buffer that has the method."""
    sampler = jr.Queue() if method in verbs.NO_QUEUE else jr.Prioritized()
    return dataclasses.replace(verbs.BUFFER, sampler=sampler, **sizes)


def spec_of(buffer):
    return jax.eval_shape(buffer.init, EXAMPLE)


def on_host(spec):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)


def check_refused(buffer, state, message, method="sample"):
    """Check the error of a method, in `jit` and outside of it."""
    run = functools.partial(call, method, buffer)
    for way in (lambda: jax.eval_shape(run, state), lambda: run(on_host(state))):
        with refused(f"(?s){method}: {message}"):
            way()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.no_xla
def test_every_method_refuses_a_state_of_another_capacity(method):
    small, large = buffer_for(method), buffer_for(method, capacity=32)
    jax.eval_shape(functools.partial(call, method), small, spec_of(small))
    message = "this state is not of this buffer: .*length: the state's is 8, this buffer's 16"
    check_refused(large, spec_of(small), message, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.no_xla
def test_every_method_takes_a_state_of_numpy_arrays(method):
    """`jax.device_get` and `flax.serialization.from_bytes` return such states. That they give the
    same is in `test_donation.py`."""
    run = functools.partial(call, method, buffer_for(method))
    state = spec_of(buffer_for(method))
    # What a traced function closes over stays a NumPy array; its arguments are tracers.
    assert jax.eval_shape(lambda: run(on_host(state))) == jax.eval_shape(run, state)


@pytest.mark.no_xla
def test_a_rollout_takes_a_state_of_numpy_arrays():
    rollout = jr.rollout(length=4, num_envs=2, autoreset="next_step")
    run = lambda state: (
        rollout.steps(state),
        rollout.clear(state),
        rollout.add(state, STEP),
        rollout.bootstrap(state, np.zeros((4, 2), np.float32), ZERO),
        rollout.can_add(state),
    )
    state = jax.eval_shape(rollout.init, EXAMPLE)
    assert jax.eval_shape(lambda: run(on_host(state))) == jax.eval_shape(run, state)


@pytest.mark.no_xla
def test_what_does_not_change_a_states_meaning_may_differ():
    for other in (
        uniform(batch_size=3, min_size=2, gamma=0.5),
        dataclasses.replace(uniform(), sampler=jr.Recent(decay=0.5)),
    ):
        batch = jax.eval_shape(other.sample, spec_of(uniform()), KEY)
        assert batch.is_valid.shape == (other.batch_size,)


def test_a_state_that_was_handed_over_says_so():
    buffer = buffer_for("add")
    state = buffer.init(EXAMPLE)
    jr.jit(buffer).add(state, STEP)
    calls = [(buffer, name) for name in METHODS if name not in verbs.NO_QUEUE]
    # A jitted method is compiled before it fails.
    calls += [(jr.jit(buffer), name) for name in ("add", "size", "update_priorities")]
    for which, name in calls:
        cure = r"Use that one: state = buffer.add\(state, step\)"
        with refused(f"{name}: this state was donated to an earlier call, .*{cure}"):
            call(name, which, state)
    mixture = jr.jit(jr.mix(a=(buffer, 4)))
    with refused("sample: this state was donated to an earlier call"):
        mixture.sample({"a": state}, KEY)
    rollout = jr.jit(jr.rollout(length=4, num_envs=2, autoreset="next_step"))
    state = rollout.init(EXAMPLE)
    rollout.add(state, STEP)
    with refused("extend: this state was donated to an earlier call"):
        rollout.extend(state, BLOCK)
    with refused("add: a step must be"):  # another error stays what it is
        rollout.add(rollout.init(EXAMPLE), [1, 2])


@pytest.mark.no_xla
def test_an_error_of_a_sampler_is_not_taken_for_one_of_the_state(monkeypatch):
    class Own(jr.Uniform):
        def init(self, layout):
            return {"count": np.int32(0)}

    def fails(self, layout):
        raise TypeError("an error of its own")

    buffer = jr.items(capacity=8, batch_size=2, sampler=Own())
    state = jax.eval_shape(buffer.init, np.float32(0))
    monkeypatch.setattr(Own, "init", fails)
    with refused("an error of its own", TypeError):
        jax.eval_shape(buffer.size, state)

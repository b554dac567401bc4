"""Shared by the tests of samplers: buffers of plain steps, their methods jitted once, random
histories, and common checks."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.views.transition import TransitionView
from tests.support.hlo import check_in_place

# A buffer is a pytree without leaves: its methods are jitted once for all equal buffers.
add, clear, size = (jax.jit(getattr(ReplayBuffer, name)) for name in ("add", "clear", "size"))
pop, sample = (jax.jit(getattr(ReplayBuffer, name), static_argnums=3) for name in ("pop", "sample"))
can_add = jax.jit(ReplayBuffer.can_add, static_argnums=2)


@jax.jit
def probability_of_all(buffer, state):
    """Return the probability of every row; meaningful for sampleable rows only."""
    rows = jnp.arange(buffer.capacity, dtype=jnp.int32)
    return buffer.sampler.probability(state.sampler, Sampleable.of(state), rows)


def step_of(values):
    """Return a step of `len(values)` envs, in an episode without end."""
    values = jnp.asarray(values, jnp.float32)
    return jr.Step(
        obs=values, action=values, reward=values, terminated=values < -99, truncated=values < -99
    )


def make_buffer(
    sampler, *, num_envs=1, length=8, n_step=1, allow_mask=False, batch_size=4, min_size=1
):
    buffer = ReplayBuffer(
        capacity=num_envs * length,
        num_envs=num_envs,
        batch_size=batch_size,
        sampler=sampler,
        view=TransitionView(n_step=n_step, gamma=0.5),
        autoreset="same_step_no_final_obs",
        allow_mask=allow_mask,
        min_size=min_size,
    )
    return buffer, buffer.init(jax.tree.map(lambda leaf: leaf[0], step_of([0.0])))


def fed(buffer, state, times):
    """Return a state after steps whose rewards are 10 * time + env."""
    for time in times:
        state = add(buffer, state, step_of(10.0 * time + np.arange(buffer.num_envs)))
    return state


def rewards(batch):
    return np.asarray(batch.experience.reward)[np.asarray(batch.is_valid)].tolist()


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def check_jit_and_vmap(buffer, states, batch_size=4):
    """Check that samples are the same with and without jit, and with vmap the same as for each
    state alone."""

    def draw(state):
        return buffer.sampler.sample(
            state.sampler, Sampleable.of(state), jax.random.key(1), batch_size
        )

    one = jax.jit(draw)
    assert_same(one(states[0]), draw(states[0]))
    together = jax.jit(jax.vmap(draw))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    for which, state in enumerate(states):
        assert_same(jax.tree.map(lambda leaf, which=which: leaf[which], together), one(state))


def check_all_in_place(sampler, functions):
    """Check functions of (replay, state, key) that return (state, anything): alone, in a scan, and
    under vmap in a scan."""
    capacity, population = 1 << 17, 16
    large, state = make_buffer(sampler, num_envs=4, length=capacity // 4)
    small, one = make_buffer(sampler, num_envs=4, length=capacity // 4 // population)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * population), one)
    keys, all_keys = (
        jax.random.split(jax.random.key(0), 3),
        jax.random.split(jax.random.key(0), population),
    )
    for function in functions:
        alone = functools.partial(function, large)
        vmapped = jax.vmap(functools.partial(function, small))
        check_in_place(alone, (state, keys[0]), num_elements=capacity, donated=0)
        check_in_place(
            lambda state, keys, f=alone: jax.lax.scan(f, state, keys),
            (state, keys),
            num_elements=capacity,
            donated=0,
        )
        repeated = lambda states, keys, f=vmapped: jax.lax.scan(
            lambda states, _: f(states, keys), states, None, 3
        )
        check_in_place(repeated, (states, all_keys), num_elements=capacity, donated=0)


def add_and_pop(buffer, state, key):
    """Add and pop, in the order of a training loop, with all that the buffer tells about the
    state."""
    step = step_of(jax.random.uniform(key, (4,)))
    state, batch = buffer.pop(buffer.add(state, step), key)
    return state, (batch, buffer.size(state), buffer.can_add(state))


@st.composite
def histories(draw, pool, batch_size=3):
    config = draw(st.sampled_from(pool))
    # Mostly plain steps, so that streams fill up with episodes of several rows. Code 1: no step; 2
    # and 4: the episode ends.
    codes = st.lists(
        st.sampled_from((0, 0, 0, 0, 0, 1, 2, 4)),
        min_size=config.num_envs,
        max_size=config.num_envs,
    )
    adds = st.tuples(st.just("add"), codes, st.none())
    pops = st.tuples(st.just("pop"), st.just(batch_size))
    operation = st.one_of(adds, adds, adds, adds, pops, st.tuples(st.just("check")))
    history = draw(st.lists(operation, min_size=2 * config.length, max_size=5 * config.length))
    if draw(st.integers(0, 3)) == 0:
        history.insert(len(history) // 2, ("clear",))
    return config, history

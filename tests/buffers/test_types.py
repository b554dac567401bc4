"""Types that a type checker infers: `make lint` checks this file, and the tests run it."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp

import jaxreplay as jr

SIZES: Any = {"capacity": 16, "num_envs": 1, "batch_size": 2}


def filled(buffer):
    zeros, flags = jnp.zeros(1), jnp.zeros(1, bool)
    step = jr.Step(obs=zeros, action=zeros, reward=zeros, terminated=~flags, truncated=flags)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], step))
    return buffer.add(buffer.add(buffer.add(state, step), step), step)


def test_a_batch_of_each_named_buffer_has_a_type():
    key = jax.random.key(0)
    pairs = jr.future_pairs(**SIZES, autoreset="next_step")
    sequences = jr.sequences(**SIZES, autoreset="next_step", length=1)
    for buffer in (
        jr.uniform(**SIZES, autoreset="next_step"),
        jr.prioritized(**SIZES, autoreset="next_step"),
        jr.transitions(**SIZES, autoreset="next_step", sampler=jr.Recent(decay=0.5)),
    ):
        batch = assert_type(buffer.sample(filled(buffer), key), jr.Sample[jr.Transition])
        assert assert_type(batch.experience.reward, jax.Array).shape == (2,)
        got = buffer.get(filled(buffer), batch.index)
        assert assert_type(got.experience.num_steps, jax.Array).dtype == jnp.int32
    sequence = sequences.sample(filled(sequences), key).experience
    assert assert_type(sequence.mask, jax.Array).dtype == bool
    pair = pairs.sample(filled(pairs), key).experience
    assert assert_type(pair.num_steps, jax.Array).dtype == jnp.int32


def test_what_wraps_a_buffer_keeps_the_type_of_its_batches():
    key = jax.random.key(0)
    buffer = jr.frame_stack(jr.uniform(**SIZES, autoreset="next_step"), 2)
    assert_type(buffer, jr.ReplayBuffer[jr.Transition])
    batch = jr.jit(buffer).sample(filled(buffer), key)
    assert assert_type(batch.experience.discount, jax.Array).dtype == jnp.float32

    def reward(item: jr.Transition, key: jax.Array) -> jax.Array:
        return item.reward

    rewards = jr.transform(buffer, reward)
    assert assert_type(rewards.sample(filled(rewards), key).experience, jax.Array).shape == (2,)
    queue = jr.transitions(**SIZES, autoreset="next_step", sampler=jr.Queue())
    _, popped = queue.pop(filled(queue), key)
    assert assert_type(popped.experience.reward, jax.Array).shape == (2,)

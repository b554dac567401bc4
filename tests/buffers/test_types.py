"""Types that a type checker infers: `make lint` checks this file, and the tests trace it."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

SIZES: Any = {"capacity": 16, "num_envs": 1, "batch_size": 2, "autoreset": "next_step"}


def empty(buffer) -> Any:
    zero, flag = np.float32(0), np.bool_(0)
    return buffer.init(jr.Step(zero, zero, zero, terminated=flag, truncated=flag))


def named():
    key = jax.random.key(0)
    pairs, sequences = jr.future_pairs(**SIZES), jr.sequences(**SIZES, length=1)
    for buffer in (
        jr.uniform(**SIZES),
        jr.prioritized(**SIZES),
        jr.transitions(**SIZES, sampler=jr.Recent(decay=0.5)),
    ):
        batch = assert_type(buffer.sample(empty(buffer), key), jr.Sample[jr.Transition])
        assert assert_type(batch.experience.reward, jax.Array).shape == (2,)
        got = buffer.get(empty(buffer), batch.index)
        assert assert_type(got.experience.num_steps, jax.Array).dtype == jnp.int32
    sequence = sequences.sample(empty(sequences), key).experience
    assert assert_type(sequence.mask, jax.Array).dtype == bool
    pair = pairs.sample(empty(pairs), key).experience
    assert assert_type(pair.num_steps, jax.Array).dtype == jnp.int32


def wrapped():
    def reward(item: jr.Transition, key: jax.Array) -> jax.Array:
        return item.reward

    key = jax.random.key(0)
    buffer = jr.frame_stack(jr.uniform(**SIZES), 2)
    assert_type(buffer, jr.ReplayBuffer[jr.Transition])
    batch = jr.jit(buffer).sample(empty(buffer), key)
    assert assert_type(batch.experience.discount, jax.Array).dtype == jnp.float32
    rewards = jr.transform(buffer, reward)
    assert assert_type(rewards.sample(empty(rewards), key).experience, jax.Array).shape == (2,)
    queue = jr.transitions(**SIZES, sampler=jr.Queue())
    _, popped = queue.pop(empty(queue), key)
    assert assert_type(popped.experience.reward, jax.Array).shape == (2,)


@pytest.mark.parametrize("typed", [named, wrapped])
def test_batches_have_types(typed):
    """Also those of a buffer that is wrapped."""
    jax.eval_shape(typed)

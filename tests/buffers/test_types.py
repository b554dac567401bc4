"""Types that a type checker infers: `make lint` checks this file, and the tests trace it."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import TYPE_CHECKING, Any, assert_type

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay._util import xla

SIZES: Any = {"capacity": 16, "num_envs": 1, "batch_size": 2, "autoreset": "next_step"}


if TYPE_CHECKING:  # errors, each of which a type checker must find
    jr.uniform(capacity=16, batch_size=2)  # pyright: ignore[reportCallIssue]
    jr.items(batch_size=2)  # pyright: ignore[reportCallIssue]
    jr.items(capacity=16, batch_size=2, autoreset="next_step")  # pyright: ignore[reportCallIssue]
    jr.uniform(capacity=16, batch_size=2, autoreset="next")  # pyright: ignore[reportArgumentType]


def empty(buffer) -> Any:
    zero, flag = np.float32(0), np.bool_(0)
    return buffer.init(jr.Step(zero, zero, zero, terminated=flag, truncated=flag))


def named(key):
    pairs, sequences = jr.future_pairs(**SIZES), jr.sequences(**SIZES, length=1)
    for buffer in (jr.uniform(**SIZES), jr.transitions(**SIZES, sampler=jr.Recent(decay=0.5))):
        batch = assert_type(buffer.sample(empty(buffer), key), jr.Sample[jr.Transition])
        assert_type(batch.experience.reward, jax.Array)
        assert_type(buffer.get(empty(buffer), batch.index).experience.num_steps, jax.Array)
    assert_type(sequences.sample(empty(sequences), key).experience.mask, jax.Array)
    assert_type(pairs.sample(empty(pairs), key).experience.num_steps, jax.Array)


def wrapped(key):
    def reward(item: jr.Transition, key: jax.Array) -> jax.Array:
        return item.reward

    buffer = jr.frame_stack(jr.prioritized(**SIZES), 2)
    assert_type(buffer, jr.ReplayBuffer[jr.Transition])
    assert_type(jr.jit(buffer).sample(empty(buffer), key).experience.discount, jax.Array)
    if xla.shard_map is not None:
        divided = jr.sharded(buffer, jax.make_mesh((1,), ("data",)))
        assert_type(divided.sample(empty(divided), key).experience.discount, jax.Array)
    rewards = jr.transform(buffer, reward)
    assert_type(rewards.sample(empty(rewards), key).experience, jax.Array)
    queue = jr.transitions(**SIZES, sampler=jr.Queue())
    assert_type(queue.pop(empty(queue), key)[1].experience.reward, jax.Array)


@pytest.mark.parametrize("typed", [named, wrapped])
def test_batches_have_types(typed):
    """Also those of a buffer that is wrapped."""
    jax.eval_shape(lambda: typed(jax.random.key(0)))

"""Shared by the tests of samplers: buffers of plain steps, and their methods jitted once."""

import jax
import numpy as np

from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.views.transition import TransitionView
from tests.support.steps import begun, plain_step

# A buffer is a pytree without leaves: its methods are jitted once for all equal buffers.
init, add, extend, size, get, adopt, update, clear, metrics, can_sample = (
    jax.jit(getattr(ReplayBuffer, name))
    for name in (
        *("init", "add", "extend", "size", "get", "adopt", "update_priorities", "clear"),
        *("metrics", "can_sample"),
    )
)
pop, sample = (jax.jit(getattr(ReplayBuffer, name), static_argnums=3) for name in ("pop", "sample"))
begin = jax.jit(begun)  # of a buffer, steps [T, E, ...], a mask and priorities


def step_of(values):
    """Return a step of `len(values)` envs, in an episode without end."""
    return plain_step(np.float32(values))


def make_buffer(sampler, *, num_envs=1, length=8, allow_mask=False, batch_size=4, min_size=1):
    buffer = ReplayBuffer(
        capacity=num_envs * length,
        num_envs=num_envs,
        batch_size=batch_size,
        sampler=sampler,
        view=TransitionView(gamma=0.5),
        autoreset="same_step_no_final_obs",
        allow_mask=allow_mask,
        min_size=min_size,
    )
    return buffer, init(buffer, step_of(0))


def fed(buffer, state, times):
    """Return a state after steps whose rewards are 10 * time + env."""
    for time in times:
        state = add(buffer, state, step_of(10.0 * time + np.arange(buffer.num_envs)))
    return state


def rewards(batch):
    return np.asarray(batch.experience.reward)[np.asarray(batch.is_valid)].tolist()


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)

"""Ragged trajectories into preallocated arrays: streamed in chunks, or concatenated and copied."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from timing import stopwatch

import jaxreplay as jr

_NUM_TRAJECTORIES = 64
_WIDTH = 64


def prepare(case: Case) -> Callable[[], float]:
    """Prepare a form: "streamed" by jaxreplay, or "joined": `np.concatenate` of each leaf, and a
    copy to the device."""
    many = _trajectories(case.capacity)
    return stopwatch(
        _streaming(many) if case.form == "streamed" else lambda: _join(many), iterations=1
    )


def num_bytes(capacity: int) -> int:
    return sum(leaf.nbytes for one in _trajectories(capacity) for leaf in one.values())


def _trajectories(num_steps: int) -> list[dict[str, np.ndarray]]:
    weight = np.random.default_rng(0).uniform(0.1, 2, _NUM_TRAJECTORIES)
    return [_trajectory(int(share * num_steps)) for share in weight / weight.sum()]


def _trajectory(num_steps: int) -> dict[str, np.ndarray]:
    return {
        "obs": np.ones((num_steps + 1, _WIDTH), np.float32),
        "action": np.ones(num_steps, np.int32),
        "reward": np.ones(num_steps, np.float32),
        "terminated": np.zeros(num_steps, bool),
        "truncated": np.zeros(num_steps, bool),
    }


def _streaming(many: list[dict[str, np.ndarray]]) -> Callable[[], None]:
    rollout = jr.rollout(
        length=sum(len(one["obs"]) for one in many), num_envs=1, autoreset="next_step"
    )
    state = rollout.init(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), many[0])
    )

    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(rollout.from_trajectories(state, many))

    return run


def _join(many: list[dict[str, np.ndarray]]) -> None:
    jax.block_until_ready(
        {name: jnp.array(np.concatenate([one[name] for one in many])) for name in many[0]}
    )

"""The drop-in buffers and Stable-Baselines3's own: one call of `add` or `sample` after another."""

from collections.abc import Callable

import numpy as np
import torch
from cases import BATCH_SIZE, Case
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from timing import stopwatch

from jaxreplay import sb3

_ITERATIONS = 100
_VECTOR = spaces.Box(-1, 1, (31,), np.float32)
_GOAL = spaces.Box(-1, 1, (3,), np.float32)
_SPACES = {
    "ReplayBuffer": _VECTOR,
    "NStepReplayBuffer": _VECTOR,
    "DictReplayBuffer": spaces.Dict(
        image=spaces.Box(0, 255, (84, 84, 3), np.uint8), vector=_VECTOR
    ),
    "HerReplayBuffer": spaces.Dict(observation=_VECTOR, achieved_goal=_GOAL, desired_goal=_GOAL),
}
_ACTION = spaces.Box(-1, 1, (8,))


class _Env:
    def env_method(self, name, achieved, goal, infos, indices):
        return [-(np.abs(achieved - goal).max(axis=1) > 0.05).astype(np.float32)]


def prepare(case: Case) -> Callable[[], float]:
    """Prepare a form: "ours" or "theirs"."""
    torch.set_num_threads(1)
    needed = {"HerReplayBuffer": {"env": _Env()}, "NStepReplayBuffer": {"gamma": 0.99}}
    options: dict = needed.get(case.buffer, {})
    theirs = (
        HerReplayBuffer if case.buffer == "HerReplayBuffer" else getattr(buffers, case.buffer, None)
    )
    buffer = (getattr(sb3, case.buffer) if case.form == "ours" else theirs)(
        case.capacity, _SPACES[case.buffer], _ACTION, **options
    )
    add = _adder(buffer)
    for _ in range(case.capacity // 2):
        add()
    once = add if case.operation == "sb3 add" else lambda: buffer.sample(BATCH_SIZE)

    def run() -> None:
        for _ in range(_ITERATIONS):
            once()

    return stopwatch(run, _ITERATIONS)


def _adder(buffer) -> Callable[[], None]:
    """Return a call that adds a step of one env; episodes have 100 steps, and observations are
    consecutive."""
    space = buffer.observation_space
    space.seed(0)
    two = [
        {k: v[None] for k, v in space.sample().items()}
        if isinstance(space, spaces.Dict)
        else space.sample()[None]
        for _ in range(2)
    ]
    action, reward, time = np.zeros((1, 8), np.float32), np.zeros(1, np.float32), 0

    def add() -> None:
        nonlocal time
        time += 1
        buffer.add(two[time & 1], two[~time & 1], action, reward, np.array([time % 100 == 0]), [{}])

    return add

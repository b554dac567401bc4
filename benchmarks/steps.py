"""Random steps as NumPy arrays with leaves `[time, num_envs, ...]`, the same for every library."""

from typing import Any

import numpy as np
from cases import IMAGE_STEPS, NUM_ENVS, Case

_DONE_FRACTION = 0.01  # half of the dones are terminations, half truncations


def random_steps(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    axes = (IMAGE_STEPS if case.obs == "image" else case.iterations, NUM_ENVS)
    if case.buffer == "items":
        return {"obs": random_obs(rng, case, axes)}
    done = rng.random(axes)
    steps = {
        "obs": random_obs(rng, case, axes),
        "action": rng.integers(4, size=axes, dtype=np.int32),
        "reward": rng.normal(size=axes).astype(np.float32),
        "terminated": done < _DONE_FRACTION / 2,
        "truncated": (done >= _DONE_FRACTION / 2) & (done < _DONE_FRACTION),
    }
    return steps | {"final_obs": random_obs(rng, case, axes)} if case.form == "final_obs" else steps


def episode_steps(case: Case) -> dict[str, Any]:
    """Return as many rows as the buffer has, in episodes of one length, each with its final
    observation.

    Half of the episodes are truncated.
    """
    rng = np.random.default_rng(0)
    axes = (case.capacity // case.num_envs, case.num_envs)
    time = np.broadcast_to(np.arange(axes[0])[:, None], axes)
    number, position = np.divmod(time, case.episode_length + 1)
    is_end = position == case.episode_length - 1
    obs = random_obs(rng, case, axes)
    return {
        "obs": {"observation": obs, "achieved_goal": obs[..., :2], "desired_goal": obs[..., 2:4]}
        if case.buffer == "hindsight"
        else obs,
        "action": rng.integers(4, size=axes, dtype=np.int32),
        "reward": rng.normal(size=axes).astype(np.float32),
        "terminated": is_end & (number % 2 == 0),
        "truncated": is_end & (number % 2 == 1),
    }


def random_obs(rng: np.random.Generator, case: Case, axes: tuple[int, ...]) -> np.ndarray:
    if case.obs == "image":
        return rng.integers(256, size=(*axes, 84, 84, 4), dtype=np.uint8)
    return rng.normal(size=(*axes, 8)).astype(np.float32)

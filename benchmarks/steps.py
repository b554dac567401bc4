"""Random steps of 64 envs, the same for every library, as NumPy arrays with leaves `[time, num_envs, ...]`."""

import numpy as np
from cases import NUM_ENVS, Case

_DONE_FRACTION = 0.01  # half of them terminations, half truncations
_IMAGE_STEPS = 24  # 43 MB


def random_steps(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    axes = (_IMAGE_STEPS if case.obs == "image" else case.iterations, NUM_ENVS)
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


def random_obs(rng: np.random.Generator, case: Case, axes: tuple[int, ...]) -> np.ndarray:
    if case.obs == "image":
        return rng.integers(256, size=(*axes, 84, 84, 4), dtype=np.uint8)
    return rng.normal(size=(*axes, 8)).astype(np.float32)

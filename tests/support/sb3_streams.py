"""Arguments that Stable-Baselines3's algorithms pass to a buffer, and comparisons with its
buffers."""

import copy

import jax
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers as theirs

from jaxreplay import sb3

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
NUMBER = spaces.Box(-np.inf, np.inf, (1,))
IMAGE = spaces.Box(0, 255, (5, 4, 3), np.uint8)
DICT = spaces.Dict(
    image=IMAGE,
    vector=VECTOR,
    count=spaces.Discrete(5),
    wide=spaces.Box(-1, 1, (2,), np.float64),
    binary=spaces.MultiBinary(4),
)
OBSERVATIONS = {
    "vector": VECTOR,
    "image": IMAGE,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "discrete": spaces.Discrete(7),
    "binary": spaces.MultiBinary(4),
    "multi": spaces.MultiDiscrete([3, 4]),
    "dict": DICT,
}
ACTIONS = {
    "box": spaces.Box(-1, 1, (2,)),
    "double": spaces.Box(-1, 1, (1,), np.float64),
    "wide": spaces.Box(-1, 1, (2, 3)),
    "discrete": spaces.Discrete(4),
}


BOX = ACTIONS["box"]


def stack(space, n_envs):
    """Return an observation, or an action, of every env."""
    if isinstance(space, spaces.Dict):
        return {key: stack(inner, n_envs) for key, inner in space.spaces.items()}
    # 32-bit numbers, so that nothing is rounded.
    samples = [np.asarray(space.sample()) for _ in range(n_envs)]
    return np.stack(
        [x.astype(np.float32).astype(x.dtype) if x.dtype == np.float64 else x for x in samples]
    )


def choose(mask, new, old):
    """Return the new observations where the mask is True, else the old ones."""
    return jax.tree.map(
        lambda a, b: np.where(mask.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), new, old
    )


def stream(observation_space, action_space, n_envs, steps, seed=0, reset=0.05):
    """Yield arguments of `add`, with terminations, timeouts, and resets that no step announces."""
    r = np.random.default_rng(seed)
    observation_space.seed(seed)
    action_space.seed(seed)
    obs = stack(observation_space, n_envs)
    for _ in range(steps):
        next_obs = stack(observation_space, n_envs)
        done = r.random(n_envs) < 0.1
        timeout = done & (r.random(n_envs) < 0.5)
        infos = [{"TimeLimit.truncated": True} if x else {} for x in timeout]
        yield obs, next_obs, stack(action_space, n_envs), r.normal(size=n_envs), done, infos
        obs = choose(done | (r.random(n_envs) < reset), stack(observation_space, n_envs), next_obs)


def sampled(buffer, size, seed=0, env=None):
    """Sample, with NumPy's generator seeded."""
    np.random.seed(seed)
    return buffer.sample(size, env)


def check_same(a, b, tolerance=0.0):
    """Check that two batches are bit-identical, or differ by at most a tolerance."""
    leaves, others = jax.tree.leaves(a._asdict()), jax.tree.leaves(b._asdict())
    for x, y in zip(leaves, others, strict=True):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(x, y)


def added_to(buffers, steps):
    """Add steps to buffers. Stable-Baselines3's modify their arguments."""
    for step in steps:
        for buffer in buffers:
            buffer.add(*copy.deepcopy(step))


def pair(kind, observation_space, action_space, size=2000, **options):
    """Return this library's buffer, and Stable-Baselines3's."""
    return [
        getattr(module, kind)(size, observation_space, action_space, **options)
        for module in (sb3, theirs)
    ]


def kind_of(space):
    return "DictReplayBuffer" if isinstance(space, spaces.Dict) else "ReplayBuffer"


def numbered(n_envs, steps, seed=0):
    """Yield steps whose observations count up, distinct for each (env, step), with random dones:
    each transition can then be recognized."""
    r = np.random.default_rng(seed)
    for t in range(steps):
        obs = (1000 * np.arange(n_envs) + t + 0.0)[:, None]
        done = r.random(n_envs) < 0.2
        yield obs, obs + 1, np.zeros((n_envs, 2)), obs[:, 0], done, [{} for _ in range(n_envs)]


def params_of(model):
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])

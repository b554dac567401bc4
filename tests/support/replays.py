"""`Replay` objects, and steps for them that count up."""

import jax
import numpy as np

import jaxreplay as jr

NUM_ENVS = 3


def make(
    num_envs=NUM_ENVS, sampler=None, capacity=60, batch_size=8, autoreset="next_step", **options
):
    names = ("example", "seed", "framework", "device", "prefetch", "samples_per_insert", "timeout")
    own = {name: options.pop(name) for name in names if name in options}
    sizes = {
        "capacity": capacity,
        "num_envs": num_envs,
        "batch_size": batch_size,
        "autoreset": autoreset,
    }
    return jr.Replay(jr.transitions(**sizes, sampler=sampler or jr.Uniform(), **options), **own)


def step(t, axes=(NUM_ENVS,)):
    flags = np.zeros(axes, bool)
    reward = (
        np.full(axes, t, np.float32)
        + np.arange(axes[-1] if axes else 1, dtype=np.float32)[0 if not axes else slice(None)] / 8
    )
    return {
        "obs": {"x": np.stack([reward, -reward], axis=-1), "n": np.full(axes, t, np.int32)},
        "action": np.full(axes, t % 3, np.int32),
        "reward": reward,
        "terminated": flags,
        "truncated": flags | (t % 5 == 4),
    }


def rows_of(replay):
    """Return all stored leaves."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(replay._owner.state)]


def check_same(a, b):
    for x, y in zip(rows_of(a), rows_of(b), strict=True):
        np.testing.assert_array_equal(x, y)

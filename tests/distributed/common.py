"""Meshes, and the catalog's buffers with 8 envs."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxreplay as jr
from jaxreplay.samplers import Sampler
from tests.conftest import ALL
from tests.support.buffers import CATALOG, jitted

NUM_ENVS = 8
HAS_EXPLICIT = hasattr(jax.sharding, "reshard")  # of a mesh's axes, which older JAX lacks
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit if HAS_EXPLICIT else AxisType.Auto}
# a shard knows neither the order of all rows, nor what a part of a blend weighs elsewhere
CASES = [case for case in CATALOG if type(case.replay().sampler).mass is not Sampler.mass]
REFUSED = [case for case in CATALOG if case not in CASES]
_NAMED = {case.name: case for case in CASES}
PRIORITIZED, MASKED = _NAMED["prioritized same_step, 3 steps"], _NAMED["uniform masked, episodes"]
PAIRS, SEQUENCES = _NAMED["future_pairs"], _NAMED["sequences prioritized, every second start"]
# One buffer is enough for most tests, the explicit axes for those of types.
THREE = pytest.mark.parametrize(
    "case",
    [PRIORITIZED, *[MASKED, PAIRS] * ALL],
    ids=lambda case: case.name,
)
KINDS = pytest.mark.parametrize("kind", ["explicit", *["auto"] * ALL])


def mesh_of(num, kind="auto", first=0):
    devices = jax.devices()[first : first + num]
    return jax.make_mesh((num,), ("data",), axis_types=(AXES[kind],), devices=devices)


@functools.cache
def four(case, kind="explicit"):
    """Return the buffer over four devices, without the default one."""
    return jr.sharded(whole(case), mesh_of(4, kind, first=3))


def whole(case, **options):
    return case.make({"capacity": 256, "num_envs": NUM_ENVS, "batch_size": 16} | options)


def steps(case, seed, time=None):
    """Return a step of 8 envs, or a block of `time`."""
    parts = [case.step(seed, time), case.step(seed + 100, time)]
    axis = 0 if time is None else 1
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis), *parts)


def mask(buffer, seed, time=None):
    """Return a mask, or None. Envs differ in how many steps they take."""
    if not buffer.allow_mask:
        return None
    shape = (NUM_ENVS,) if time is None else (time, NUM_ENVS)
    return np.random.default_rng(seed).random(shape) < np.linspace(0.2, 1, NUM_ENVS)


def items(num, sampler):
    """Return a sharded buffer of numbers: `num` shards, each of one env and 64 rows."""
    buffer = jr.items(
        capacity=64 * num, num_envs=num, batch_size=8 * num, allow_mask=True, sampler=sampler
    )
    return jr.sharded(buffer, mesh_of(num))


def filled(buffer, sizes, priorities=None):
    """Return a state in which each env has so many rows: row `r` of all rows holds `r`."""
    time = np.arange(64)[:, None]
    rows = time + 64 * np.arange(len(sizes))
    given = [] if priorities is None else [priorities[rows].astype(np.float32)]
    return jitted(buffer, "extend")(
        buffer.init(np.float32(0)), rows.astype(np.float32), time < np.asarray(sizes), *given
    )

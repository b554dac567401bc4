"""Meshes, and the catalog's buffers with 8 envs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxreplay as jr
from jaxreplay.samplers import ConsumingSampler, RankBased
from tests.support.buffers import CATALOG

NUM_ENVS = 8
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [
    case for case in CATALOG if not isinstance(case.replay().sampler, (ConsumingSampler, RankBased))
]
REFUSED = [case for case in CATALOG if case not in CASES]


def mesh_of(num_devices, kind="auto"):
    return jax.make_mesh(
        (num_devices,),
        ("data",),
        axis_types=(AXES[kind],),
        devices=jax.devices()[:num_devices],
    )


def whole(case, **options):
    return case.make({"capacity": 256, "num_envs": NUM_ENVS, "batch_size": 16} | options)


def steps(case, seed, time=None):
    """Return a step of 8 envs, or a block of `time`."""
    parts = [case.step(seed, time), case.step(seed + 100, time)]
    axis = 0 if time is None else 1
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *parts)


def mask(buffer, seed, time=None):
    """Return a mask, or None. Envs differ in how many steps they take."""
    if not buffer.allow_mask:
        return None
    shape = (NUM_ENVS,) if time is None else (time, NUM_ENVS)
    r = np.random.default_rng(seed)
    return jnp.asarray(r.random(shape) < np.linspace(0.2, 1, NUM_ENVS))


def divided(tree, num_shards, axis=0):
    """Return leaves whose axis of envs is divided among shards, which come first."""

    def leaf_of(leaf):
        shape = (*leaf.shape[:axis], num_shards, -1, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(leaf.reshape(shape), axis, 0)

    return jax.tree.map(leaf_of, tree)


def joined(states):
    """Return vmapped states in the form of a sharded one."""
    return jax.tree.map(
        lambda leaf: leaf if leaf.ndim == 1 else leaf.reshape(-1, *leaf.shape[2:]), states
    )


def items(sizes, priorities=None, capacity=64, draw="even", **options):
    """Return a buffer of numbers over one device an entry of `sizes`, and a state in which each
    shard, of one env, has so many rows: row `r` of all rows holds `r`."""
    num = len(sizes)
    sampler = jr.Uniform() if priorities is None else jr.Prioritized(alpha=1.0, **options)
    buffer = jr.sharded(
        jr.items(
            capacity=capacity * num,
            num_envs=num,
            batch_size=8 * num,
            allow_mask=True,
            sampler=sampler,
        ),
        mesh_of(num),
        draw=draw,
    )
    time = jnp.arange(capacity)[:, None]
    rows = time + capacity * jnp.arange(num)
    given = None if priorities is None else jnp.asarray(priorities, jnp.float32)[rows]
    state = jax.jit(buffer.extend)(
        buffer.init(jnp.float32(0)),
        rows.astype(jnp.float32),
        time < jnp.asarray(sizes),
        *([] if given is None else [given]),
    )
    return buffer, state

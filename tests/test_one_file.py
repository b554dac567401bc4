"""`examples/one_file.py` agrees with the package row by row and writes in place, and a property of
`benchmarks/conformance` finds each of some faults in it."""

import functools
import importlib.util
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import thorough

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "examples" / "one_file.py"
LENGTH, TURNS, LAG, UPDATED = 9, 60, 5, 4
PRIORITIES = [0.0, 0.5, 1.0, 3.0, 7.0, 20.0, np.nan, np.inf, -1.0]


def loaded(path, source=None):
    """Return the module of a file, or of a changed text of it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    exec(compile(source or path.read_text(), str(path), "exec"), module.__dict__)
    return module


one_file = loaded(SOURCE)


def history(seed, num_envs):
    """Return random turns of a loop, leaves [TURNS, E, ...]. Each observation has its own number,
    so that none passes for another. With seed 0 all envs take every step."""
    random = np.random.default_rng(seed)
    shape = (TURNS, num_envs)
    number = np.arange(2 * TURNS * num_envs, dtype=np.float32).reshape(2, *shape)
    obs, final_obs = ({"x": n[..., None], "n": n.astype(np.uint16)} for n in number)
    return {
        "obs": obs,
        "action": random.integers(0, 5, shape).astype(np.int32),
        "reward": random.normal(size=shape).astype(np.float32),
        "terminated": random.random(shape) < 0.15,
        "truncated": random.random(shape) < 0.15,
        "final_obs": final_obs,
        "mask": random.random(shape) < (0.7 if seed else 1.1),
        # an update of priorities after each turn, of rows as they are and as they were before
        "row": random.integers(0, LENGTH * num_envs, (TURNS, UPDATED)).astype(np.int32),
        "priority": random.choice(PRIORITIES, (TURNS, 2 * UPDATED)).astype(np.float32),
    }


def step_of(turn, autoreset):
    names = ["obs", "action", "reward", "terminated", "truncated"]
    return {name: turn[name] for name in names + ["final_obs"] * (autoreset == "same_step")}


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.vmap, in_axes=(None, None, 0))
def both(config, buffer, turns):
    """Return what the file and the package say of every row after each turn of a history."""
    every = jnp.arange(config.capacity)

    def turn_of(carry, turn):
        mine, its, late = carry
        mine = one_file.add(mine, **step_of(turn, config.autoreset), mask=turn["mask"])
        its = buffer.add(its, jr.Step(**step_of(turn, config.autoreset)), turn["mask"])
        now = index_of(mine, turn["row"]), buffer.get(its, turn["row"]).index
        if config.prioritized:  # the newest indices, and those of LAG turns ago
            some = jax.tree.map(lambda new, old: jnp.append(new, old[0]), now, late)
            mine = one_file.update_priorities(mine, some[0], turn["priority"])
            its = buffer.update_priorities(its, some[1], turn["priority"])
        late = jax.tree.map(lambda old, new: jnp.append(old[1:], new[None], axis=0), late, now)
        sampled = one_file.sample(mine, jax.random.key(0), 32)
        got = {
            **one_file.get(mine, every)._asdict(),
            "is_valid": one_file.is_sampleable(mine, every),
            "size": one_file.size(mine),
            "probability": probabilities(mine),
        }
        item = buffer.get(its, every)
        expected = {name: getattr(item.experience, name) for name in one_file.Transition._fields}
        expected |= {"is_valid": item.is_valid, "size": buffer.size(its)}
        return (mine, its, late), (got, expected | {"probability": item.probability}, sampled)

    first = jax.tree.map(lambda leaf: leaf[0, 0], step_of(turns, config.autoreset))
    mine, its = one_file.init(config, first["obs"], first["action"]), buffer.init(jr.Step(**first))
    now = index_of(mine, turns["row"][0]), buffer.get(its, turns["row"][0]).index
    late = jax.tree.map(lambda leaf: jnp.stack([leaf] * LAG), now)
    return jax.lax.scan(turn_of, (mine, its, late), turns)[1]


def index_of(state, row):
    """Return the index that a sample of these rows would have."""
    is_valid = one_file.is_sampleable(state, row)
    return one_file.Index(
        jnp.where(is_valid, row, state.config.capacity), one_file._lap_of(state, row)
    )


def probabilities(state):
    """Return the probability of every row, by enumeration."""
    if state.config.prioritized:
        mass = state.tree[0].reshape(-1)[: state.config.capacity]
    else:
        row = jnp.arange(state.config.capacity)
        mass = one_file.is_sampleable(state, row).astype(jnp.float32)
    return mass / jnp.maximum(mass.sum(), 1e-9)


CASES = [*itertools.product(one_file.AUTORESETS, (1, 3), (1, 3), (False, True))]


def is_quick(autoreset, n_step, num_envs, prioritized):
    return n_step == num_envs and prioritized == (n_step == 3 or autoreset == "next_step")


@pytest.mark.parametrize(
    ("autoreset", "n_step", "num_envs", "prioritized"),
    [case if is_quick(*case) else thorough(*case) for case in CASES],
)
def test_every_row_is_that_of_the_package(autoreset, n_step, num_envs, prioritized):
    shared = {"capacity": LENGTH * num_envs, "num_envs": num_envs, "autoreset": autoreset}
    shared |= {"n_step": n_step, "gamma": 0.5}
    config = one_file.Config(**shared, prioritized=prioritized, alpha=0.7)
    make = functools.partial(jr.prioritized, alpha=0.7) if prioritized else jr.uniform
    buffer = make(**shared, batch_size=1, allow_mask=True)
    turns = jax.tree.map(lambda *leaf: np.stack(leaf), *[history(s, num_envs) for s in range(4)])
    got, expected, sampled = jax.device_get(both(config, buffer, turns))
    is_valid = expected["is_valid"]  # bool[seeds, TURNS, capacity]
    assert 0.2 < is_valid[:, LENGTH * 2 :].mean() < 0.95
    for name in ("is_valid", "size"):
        np.testing.assert_array_equal(got[name], expected[name], name)
    np.testing.assert_allclose(got["probability"], expected["probability"], rtol=1e-4)
    for name in one_file.Transition._fields:
        for mine, its in zip(*map(jax.tree.leaves, (got[name], expected[name])), strict=True):
            assert mine.dtype == its.dtype
            np.testing.assert_allclose(mine[is_valid], its[is_valid], rtol=1e-5, err_msg=name)

    # Samples are rows that have a probability, and invalid while there is none.
    law = expected["probability"]
    has_some = law.sum(axis=2) > 0
    assert has_some.any()
    assert not has_some.all()
    np.testing.assert_array_equal(
        sampled.is_valid, np.broadcast_to(has_some[..., None], sampled.is_valid.shape)
    )
    assert (sampled.weight[~has_some] == 0).all()
    assert np.isfinite(sampled.weight).all()
    row = np.minimum(sampled.index.row, config.capacity - 1)
    of_row = np.take_along_axis(law, row, axis=2)
    assert (of_row[has_some] > 0).all()
    np.testing.assert_allclose(sampled.probability[has_some], of_row[has_some], rtol=1e-4)

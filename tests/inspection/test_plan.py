"""The plan: its total is what `init` allocates."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL
from tests.support.buffers import CATALOG, FEW, each
from tests.support.refusals import refused
from tests.support.steps import num_bytes

pytestmark = pytest.mark.no_xla


def step_of(obs, action):
    rest = {"reward": np.float32(0), "terminated": np.False_, "truncated": np.False_}
    return {"obs": obs, "action": action, **rest}


@each(CATALOG if ALL else FEW)
def test_the_total_is_what_init_allocates(case):
    buffer = case.replay()
    made, state = jr.plan(buffer, case.example()), jax.eval_shape(buffer.init, case.example())
    assert made.memory.total == num_bytes(state)
    obs = None if case.is_items else state.rows.steps.obs
    assert made.naive == made.memory.total + num_bytes(obs)
    assert made.fits
    assert all(name in str(made) for name in (f"{made.memory.total:,}", *made.memory.leaves))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_rows_elsewhere_count_there(place, tmp_path, monkeypatch):
    buffer = jr.uniform(capacity=1000, num_envs=4, batch_size=8, autoreset="next_step")
    example = step_of(np.zeros(100, np.float32), np.int32(0))
    tier = jr.tiered(buffer, rows="host" if place == "host" else tmp_path / "rows")
    monkeypatch.setattr("jaxreplay.buffers.tiered.Tiered.free_bytes", lambda _: 42_000)
    made, whole = jr.plan(tier, example), jr.plan(buffer, example)
    assert made.rows == 408 * 1000
    assert made.memory.total + made.rows == whole.memory.total
    assert made.naive == whole.naive
    assert (made.fits, whole.fits) == (False, True)
    assert made.largest_capacity == 100  # 102 rows of 408 bytes, for 4 envs
    assert not (tmp_path / "rows").exists()
    assert re.search(rf"rows, on the {place} +408,000 bytes", str(made))
    with refused("a buffer whose rows lie on the host has one device"):
        jr.plan(tier, example, devices=2)


@pytest.mark.parametrize(("min_size", "free"), [(1, 0), (30, 1000), (1, 100_003)])
def test_the_largest_capacity_is_the_largest(min_size, free, monkeypatch):
    buffer = jr.prioritized(
        capacity=64, num_envs=4, batch_size=8, min_size=min_size, autoreset="next_step"
    )
    example = step_of(np.zeros(100, np.float32), np.int32(0))
    takes = lambda capacity: dataclasses.replace(buffer, capacity=capacity).memory(example).total
    monkeypatch.setattr("jaxreplay.buffers.memory.free_bytes", lambda: free)
    made = jr.plan(buffer, example)
    least = max(8, -(-min_size // 4) * 4)
    assert takes(max(made.largest_capacity + 4, least)) > free
    assert not made.largest_capacity or takes(made.largest_capacity) <= free
    assert made.fits == (made.memory.total <= free)
    monkeypatch.setattr("jaxreplay.buffers.memory.free_bytes", lambda: None)
    made = jr.plan(buffer, example)
    assert (made.fits, made.largest_capacity) == (None, None)
    assert "Whether it fits is not known." in str(made)


def test_each_device_of_a_sharded_buffer_holds_a_part(monkeypatch):
    buffer, example = jr.items(capacity=4096, num_envs=16, batch_size=32), np.zeros(3, np.float32)
    monkeypatch.setattr("jaxreplay.buffers.memory.free_bytes", lambda: 100_000)
    made, one = jr.plan(buffer, example, devices=8), jr.plan(buffer, example)
    part = jr.items(capacity=512, num_envs=2, batch_size=4)
    assert made.memory == part.memory(example)
    assert "each of 8 devices holds" in str(made)
    assert "each of" not in str(one)
    assert made.largest_capacity == 8 * jr.plan(part, example).largest_capacity
    sharded = jr.plan(jr.sharded(buffer, jax.make_mesh((1,), ("data",))), example)
    assert (sharded.memory, sharded.num_devices) == (one.memory, 1)


@pytest.mark.parametrize("shape", [(10**6,) * 4, (10**20 - 1,)])
def test_sizes_beyond_64_bits_are_counted_exactly(shape):
    buffer = jr.items(capacity=100, batch_size=1)
    made = jr.plan(buffer, jax.ShapeDtypeStruct(shape, np.uint8))
    assert made.memory.leaves["rows.steps"] == 100 * math.prod(shape)
    assert (made.fits, made.largest_capacity) == (False, 0)

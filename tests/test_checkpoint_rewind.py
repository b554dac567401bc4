"""A state that went back and took another way: what was saved of the first way is never taken for the second one's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SOAK

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer


def run(replay, add, state, seed, num_steps, num_values):
    """Steps of few distinct values, so that two ways have most rows in common."""
    r = np.random.default_rng(seed)
    for _ in range(num_steps):
        values = r.integers(0, num_values, replay.num_envs).astype(np.float32)
        flags = np.zeros(replay.num_envs, bool)
        step = {"obs": values, "action": values, "reward": values, "terminated": flags, "truncated": values == num_values - 1}
        state = add(state, step if replay.autoreset else values)
    return state


def rows_of(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("kind", ["items", "uniform", "prioritized", "masked"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_rewind_saves_the_second_way(kind, num_envs, tmp_path):
    """A copy, ten steps, a save; back to the copy, ten other steps, a save: the second is restored, in each of many rounds."""
    sizes = {"capacity": 32 * num_envs, "num_envs": num_envs, "batch_size": 4}
    if kind == "items":
        replay = jr.items(**sizes)
    else:
        make = jr.prioritized if kind == "prioritized" else jr.uniform
        replay = make(**sizes, autoreset="same_step", n_step=2, masked=kind == "masked")
    add, r = jr.jit(replay).add, np.random.default_rng(0)
    zero = np.zeros((), np.float32)
    example = {"obs": zero, "action": zero, "reward": zero, "terminated": np.False_, "truncated": np.False_} if replay.autoreset else zero
    checkpointer = Checkpointer(tmp_path, replay, keep=2, progress=False)
    for number in range(200 if SOAK else 10):
        num_before, num_after, num_values = int(r.integers(0, 50)), int(r.integers(1, 12)), int(r.integers(2, 4))
        start = run(replay, add, replay.init(example), 3 * number, num_before, num_values)
        checkpointer.save(start, 3 * number)
        one = run(replay, add, jax.tree.map(jnp.copy, start), 3 * number + 1, num_after, num_values)
        checkpointer.save(one, 3 * number + 1)
        other = run(replay, add, start, 3 * number + 2, int(r.integers(1, num_after + 1)), num_values)
        checkpointer.save(other, 3 * number + 2)
        for got, wanted in zip(rows_of(checkpointer.restore(example)), rows_of(other), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_run_that_goes_on_shares_what_it_has_saved(tmp_path):
    """The fingerprint tells ways apart, and does not take one way for two: saves of one run stay small."""
    replay = jr.items(capacity=64, batch_size=4)
    add, state = jr.jit(replay).add, replay.init(np.zeros((), np.float32))
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=2000, progress=False)
    for number in range(20):
        state = run(replay, add, state, number, 7, 2)
        checkpointer.save(state, number)
        if number > 5:
            assert len({group.folder[:19] for group in checkpointer._base.groups}) > 1
    np.testing.assert_array_equal(rows_of(checkpointer.restore(np.zeros((), np.float32)))[0], rows_of(state)[0])


def test_without_a_history_all_is_written(tmp_path):
    replay = dataclasses.replace(jr.items(capacity=64, batch_size=4), keep_history=False)
    add, state = jr.jit(replay).add, replay.init(np.zeros((), np.float32))
    checkpointer = Checkpointer(tmp_path, replay, progress=False)
    for number in range(3):
        state = run(replay, add, state, number, 7, 2)
        checkpointer.save(state, number)
        assert len({group.folder[:19] for group in checkpointer._base.groups}) == 1
    for got, wanted in zip(rows_of(checkpointer.restore(np.zeros((), np.float32))), rows_of(state), strict=True):
        np.testing.assert_array_equal(got, wanted)

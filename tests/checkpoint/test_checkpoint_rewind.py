"""Tests of states that were rewound and continued differently: saved rows of the first branch are
never restored as rows of the second."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import SOAK

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from tests.support.buffers import add_step


def run(buffer, add, state, seed, num_steps, num_values):
    """Add steps with few distinct values, so that two branches share many rows by chance."""
    r = np.random.default_rng(seed)
    for _ in range(num_steps):
        values = r.integers(0, num_values, buffer.num_envs).astype(np.float32)
        flags = np.zeros(buffer.num_envs, bool)
        step = {
            "obs": values,
            "action": values,
            "reward": values,
            "terminated": flags,
            "truncated": values == num_values - 1,
        }
        step |= {"final_obs": values} if buffer.autoreset == "same_step" else {}
        state = add(state, step if buffer.autoreset else values)
    return state


def rows_of(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("kind", ["items", "uniform", "prioritized", "masked", "final_obs"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_rewind_saves_the_second_way(kind, num_envs, tmp_path):
    """Save two branches from one state, each up to 11 steps long: the second is restored, in every
    round."""
    sizes = {"capacity": 32 * num_envs, "num_envs": num_envs, "batch_size": 4}
    if kind == "items":
        buffer = jr.items(**sizes)
    else:
        make = jr.prioritized if kind == "prioritized" else jr.uniform
        autoreset = "same_step" if kind == "final_obs" else "same_step_no_final_obs"
        buffer = make(**sizes, autoreset=autoreset, n_step=2, allow_mask=kind == "masked")
    add, r = jr.jit(buffer).add, np.random.default_rng(0)
    zero = np.zeros((), np.float32)
    example = (
        {
            "obs": zero,
            "action": zero,
            "reward": zero,
            "terminated": np.False_,
            "truncated": np.False_,
        }
        if buffer.autoreset
        else zero
    )
    example = example | {"final_obs": zero} if kind == "final_obs" else example
    checkpointer = Checkpointer(tmp_path, buffer, max_to_keep=2, progress=False)
    for number in range(200 if SOAK else 10):
        num_before, num_after, num_values = (
            int(r.integers(0, 50)),
            int(r.integers(1, 12)),
            int(r.integers(2, 4)),
        )
        start = run(buffer, add, buffer.init(example), 3 * number, num_before, num_values)
        checkpointer.save(start, 3 * number)
        one = run(buffer, add, jax.tree.map(jnp.copy, start), 3 * number + 1, num_after, num_values)
        checkpointer.save(one, 3 * number + 1)
        other = run(
            buffer, add, start, 3 * number + 2, int(r.integers(1, num_after + 1)), num_values
        )
        checkpointer.save(other, 3 * number + 2)
        for got, wanted in zip(rows_of(checkpointer.restore(example)), rows_of(other), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_run_that_goes_on_shares_what_it_has_saved(tmp_path):
    """Save one run repeatedly: the fingerprint recognizes its saved rows, so saves stay small."""
    buffer = jr.items(capacity=64, batch_size=4)
    add, state = jr.jit(buffer).add, buffer.init(np.zeros((), np.float32))
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=2000, progress=False)
    for number in range(20):
        state = run(buffer, add, state, number, 7, 2)
        checkpointer.save(state, number)
        if number > 5:
            assert len({group.folder[:19] for group in checkpointer._base.groups}) > 1
    np.testing.assert_array_equal(
        rows_of(checkpointer.restore(np.zeros((), np.float32)))[0], rows_of(state)[0]
    )


def test_a_newer_group_that_happens_to_be_the_same_is_not_kept_alone(tmp_path):
    """Save states whose last rows are equal and whose earlier rows differ."""
    buffer, example = jr.items(capacity=64, num_envs=2, batch_size=4), np.zeros((), np.float32)
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=2000, progress=False)
    for way in range(3):
        values = jnp.asarray([way] * 20 + [7] * 6, jnp.float32)
        state = buffer.extend(buffer.init(example), jnp.stack([values, values], axis=1))
        checkpointer.save(state, way)
        assert len(checkpointer._base.groups) > 3
        np.testing.assert_array_equal(rows_of(checkpointer.restore(example))[0], rows_of(state)[0])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rows_that_are_taken_back_are_saved_as_they_became(num_envs, tmp_path):
    """Save after each step while provisional episode ends are revoked: the newest final row of one
    save becomes another row in the next."""
    buffer = jr.uniform(
        capacity=16 * num_envs, num_envs=num_envs, batch_size=4, autoreset="same_step"
    )
    r, add, flag = (
        np.random.default_rng(0),
        jax.jit(add_step, static_argnums=0),
        np.zeros(num_envs, bool),
    )
    zero = np.zeros((), np.float32)
    example = jr.Step(zero, zero, zero, terminated=np.False_, truncated=np.False_, final_obs=zero)
    checkpointer, state = (
        Checkpointer(tmp_path, buffer, chunk_bytes=2000, max_to_keep=2, progress=False),
        buffer.init(example),
    )
    may_go_on = was_first = flag
    for number in range(30):
        goes_on, done = may_go_on & (r.random(num_envs) < 0.8), r.random(num_envs) < 0.2
        obs, final = (r.integers(0, 3, num_envs).astype(np.float32) for _ in range(2))
        state = add(
            buffer,
            state,
            jr.Step(obs, obs, obs, terminated=done, truncated=~done, final_obs=final),
            goes_on,
            was_first,
        )
        may_go_on, was_first = ~done, ~goes_on
        checkpointer.save(state, number)
        for got, wanted in zip(rows_of(checkpointer.restore(example)), rows_of(state), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_what_both_ways_have_is_written_once(tmp_path):
    """Rewind a run by a copy or a checkpoint, and save: groups older than the fork are reused."""
    buffer, example = jr.items(capacity=512, batch_size=4), np.zeros((), np.float32)
    add, state = jr.jit(buffer).add, buffer.init(example)
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=2000, progress=False)
    state = run(buffer, add, state, 0, 600, 3)
    checkpointer.save(state, 0)
    copy = jax.tree.map(jnp.copy, state)
    checkpointer.save(run(buffer, add, state, 1, 100, 3), 1)
    for number, start in ((2, copy), (3, checkpointer.restore(example, 0))):
        other = run(buffer, add, start, number, 20, 3)
        checkpointer.save(other, number)
        shared = [
            group
            for group in checkpointer._base.groups
            if group.save.folder.startswith("0000000001")
        ]
        assert sum(group.num_rows for group in shared) > 400
        np.testing.assert_array_equal(
            rows_of(checkpointer.restore(example, number))[0], rows_of(other)[0]
        )

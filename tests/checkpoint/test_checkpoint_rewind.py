"""Tests of states that were rewound and continued differently: saved rows of the first branch are
never restored as rows of the second."""

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, rows
from tests.checkpoint.runs import groups_of
from tests.conftest import ALL, SOAK
from tests.support.buffers import add_step, bits

ZERO = np.zeros((), np.float32)


def step_of(buffer, values, done):
    """Return a step, or an item."""
    if buffer.autoreset is None:
        return values
    final = values if buffer.autoreset == "same_step" else None
    flags = {"terminated": np.zeros_like(done), "truncated": done}
    return jr.Step(values, values, values, final_obs=final, **flags)


def example_of(buffer):
    return step_of(buffer, ZERO, np.False_)


def start_of(buffer):
    return jr.jit(buffer).init(example_of(buffer))


def run(buffer, state, seed, num_steps, num_values):
    """Add steps with few distinct values, so that two branches share many rows by chance."""
    r, add = np.random.default_rng(seed), jr.jit(buffer).add
    for _ in range(num_steps):
        values = r.integers(0, num_values, buffer.num_envs).astype(np.float32)
        state = add(state, step_of(buffer, values, values == num_values - 1))
    return state


def saver(path, buffer, **options):
    return Checkpointer(path, buffer, chunk_bytes=2000, **options)


def check_saved(checkpointer, state, step):
    """Save, and check that the newest checkpoint is the state."""
    checkpointer.save(state, step)
    assert bits(checkpointer.restore(example_of(checkpointer.buffer))) == bits(state)


FEW = [("items", 3), ("masked", 1), ("final_obs", 3)]
MANY = [
    (kind, num_envs)
    for kind in ("items", "uniform", "prioritized", "masked", "final_obs")
    for num_envs in (1, 3)
]


@pytest.mark.parametrize(("kind", "num_envs"), MANY if ALL else FEW)
def test_a_rewind_saves_the_second_way(kind, num_envs, tmp_path):
    """Save a fresh run and two branches of it, each up to 11 steps long, in every round."""
    sizes = {"capacity": 32 * num_envs, "num_envs": num_envs, "batch_size": 4}
    if kind == "items":
        buffer = jr.items(**sizes)
    else:
        make = jr.prioritized if kind == "prioritized" else jr.uniform
        autoreset = "same_step" if kind == "final_obs" else "same_step_no_final_obs"
        buffer = make(**sizes, autoreset=autoreset, n_step=2, allow_mask=kind == "masked")
    r = np.random.default_rng(0)
    checkpointer = Checkpointer(tmp_path, buffer, max_to_keep=2)
    for number in range(0, 600 if SOAK else 30, 3):
        num_before, num_after, num_values = r.integers((0, 1, 2), (50, 12, 4))
        start = run(buffer, start_of(buffer), number, num_before, num_values)
        check_saved(checkpointer, start, number)
        one = run(buffer, rows.copied(start), number + 1, num_after, num_values)
        check_saved(checkpointer, one, number + 1)
        other = run(buffer, start, number + 2, r.integers(1, num_after + 1), num_values)
        check_saved(checkpointer, other, number + 2)


def test_a_newer_group_that_happens_to_be_the_same_is_not_kept_alone(tmp_path):
    """Save states whose last rows are equal and whose earlier rows differ."""
    buffer = jr.items(capacity=96, num_envs=3, batch_size=4)
    checkpointer, add = saver(tmp_path, buffer), jr.jit(buffer).add
    for way in range(3):
        state = start_of(buffer)
        for value in [way] * 20 + [7] * 6:
            state = add(state, np.full(3, value, np.float32))
        check_saved(checkpointer, state, way)
        assert len(groups_of(checkpointer)) > 3


@pytest.mark.parametrize("num_envs", [1, 3] if ALL else [3])
def test_rows_that_are_taken_back_are_saved_as_they_became(num_envs, tmp_path):
    """Save after each step while provisional episode ends are revoked: the newest final row of one
    save becomes another row in the next."""
    buffer = jr.uniform(
        capacity=16 * num_envs, num_envs=num_envs, batch_size=4, autoreset="same_step"
    )
    r, add = np.random.default_rng(0), jax.jit(add_step, static_argnums=0)
    checkpointer, state = saver(tmp_path, buffer, max_to_keep=2), start_of(buffer)
    may_go_on = was_first = np.zeros(num_envs, bool)
    for number in range(30):
        goes_on, done = may_go_on & (r.random(num_envs) < 0.8), r.random(num_envs) < 0.2
        obs, final = (r.integers(0, 3, num_envs).astype(np.float32) for _ in range(2))
        step = step_of(buffer, obs, ~done).replace(terminated=done, final_obs=final)
        state = add(buffer, state, step, goes_on, was_first)
        may_go_on, was_first = ~done, ~goes_on
        check_saved(checkpointer, state, number)


def test_a_rewind_by_a_checkpoint_writes_only_what_is_new(tmp_path):
    """A rewind in memory writes all rows, one by a restore those since that checkpoint."""
    buffer = jr.items(capacity=512, batch_size=4)
    checkpointer = saver(tmp_path, buffer)
    state = run(buffer, start_of(buffer), 0, 600, 3)
    checkpointer.save(state, 0)
    copy = rows.copied(state)
    checkpointer.save(run(buffer, state, 1, 100, 3), 1)
    for number, start in ((2, lambda: copy), (3, lambda: checkpointer.restore(ZERO, 0))):
        state = run(buffer, start(), number, 20, 3)
        checkpointer.save(state, number)
        folders = {group.save.folder[:10] for group in groups_of(checkpointer)}
        assert ("0000000001" in folders) == (number == 3)
        assert bits(checkpointer.restore(ZERO, number)) == bits(state)


def sprite_steps(buffer, seed, num_steps):
    """Return images that differ in a 4 x 4 sprite alone."""
    r = np.random.default_rng(seed)
    images = np.zeros((num_steps, buffer.num_envs, 84, 84), np.uint8)
    for step in range(num_steps):
        for env in range(buffer.num_envs):
            top, left = r.integers(0, 80, 2)
            images[step, env, top : top + 4, left : left + 4] = 255
    return images


def test_images_that_differ_in_few_pixels_differ(tmp_path):
    """Save two ways from one state, whose images differ in few pixels, again and again."""
    buffer = jr.items(capacity=64, num_envs=2, batch_size=4)
    extend, example = jr.jit(buffer).extend, np.zeros((84, 84), np.uint8)
    checkpointer = Checkpointer(tmp_path, buffer, max_to_keep=1)
    for seed in range(1000 if SOAK else 20):
        start = extend(jr.jit(buffer).init(example), sprite_steps(buffer, 3 * seed, 10))
        checkpointer.save(extend(rows.copied(start), sprite_steps(buffer, 3 * seed + 1, 8)))
        state = extend(start, sprite_steps(buffer, 3 * seed + 2, 8))
        checkpointer.save(state)
        assert bits(checkpointer.restore(example)) == bits(state)

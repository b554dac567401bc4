"""A run is resumed after its buffer was changed: the new one adopts what was saved. What an adopt
makes of rows is tested in tests/buffers/test_adopt.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from tests.checkpoint.runs import files_of, groups_of
from tests.support.buffers import bits, jitted, jitted_draw
from tests.support.checkpointed_run import EXAMPLE as ITEM, added, begun, expected, items, numbers
from tests.support.refusals import refused
from tests.support.steps import nth

NUM_ENVS, TIME = 2, 70


def steps_of():
    time = np.arange(TIME, dtype=np.float32)[:, None] + np.float32([0, 100])
    done = np.random.default_rng(0).random(time.shape)
    obs = {"at": time[..., None] % 5, "time": time}
    return jr.Step(
        obs=obs,
        action=time,
        reward=time,
        terminated=done < 0.08,
        truncated=done > 0.95,
        final_obs=jax.tree.map(lambda leaf: leaf + 0.5, obs),
    )


STEPS = steps_of()
EXAMPLE = nth(STEPS, (0, 0))


def transitions(capacity=60, num_envs=NUM_ENVS, autoreset="same_step", **options):
    sizes = {"capacity": capacity, "num_envs": num_envs, "batch_size": 16}
    return jr.transitions(**sizes, autoreset=autoreset, **{"track_episodes": True} | options)


PRIORITIZED = {"sampler": jr.Prioritized()}
OLD = transitions(**PRIORITIZED)
NEW = {  # the rest are read as the first two; the test below has another number of envs
    "larger, of a TPU": transitions(200, sampler=jr.Prioritized(alpha=0.9), platform="tpu"),
    "smaller, n_step, mask, without priorities": transitions(40, n_step=3, allow_mask=True),
    "fewer envs": transitions(num_envs=1),
    "of a GPU": transitions(**PRIORITIZED, platform="gpu"),
    "no table": transitions(track_episodes=False, **PRIORITIZED),
    "more envs": transitions(240, num_envs=4, **PRIORITIZED),
}


@functools.cache
def fed():
    """Return a state after many steps, some of whose priorities were updated. 22 episodes of env 1
    have begun, and a ring of a smaller buffer has 20 rows."""
    state = jitted(OLD, "init")(EXAMPLE)
    while int(state.counters.ordinal.max()) < 20:
        state = jitted(OLD, "extend")(state, STEPS)
    index = jitted(OLD, "get")(state, np.arange(9)).index
    return jitted(OLD, "update_priorities")(state, index, np.arange(9, dtype=np.float32))


@functools.partial(jax.jit, static_argnums=0)
def told(buffer, state):
    """Return what an episode table tells of each row."""
    if not buffer.has_table:
        return ()
    table, row = buffer.episode_table(state), jnp.arange(buffer.capacity, dtype=jnp.int32)
    return table.steps_to_end(row), table.steps_from_start(row), table.is_complete(row)


@jax.jit
def of_rows(state):
    """Leave out the episode table, whose arrays and ordinals may differ for equal episodes."""
    rows = state.rows.replace(table=None)
    return state.replace(rows=rows, counters=state.counters.set(ordinal=0))


def check_adopts(path, old, new, state, example=EXAMPLE):
    """Check that a buffer restores what it adopts of a state that another one has saved."""
    checkpoint.save(path, old, state)
    found, adopted = checkpoint.restore(path, new, example), jitted(new, "adopt")(state)
    assert bits(told(new, found)) == bits(told(new, adopted))
    assert jax.tree.structure(found) == jax.tree.structure(adopted)
    assert bits(of_rows(found)) == bits(of_rows(adopted))
    return found, adopted


@pytest.mark.parametrize(
    "change",
    [*list(NEW)[:2], *(pytest.param(name, marks=pytest.mark.thorough) for name in list(NEW)[2:])],
)
def test_a_changed_buffer_restores_what_it_adopts(change, tmp_path):
    new = NEW[change]
    states = check_adopts(tmp_path / "there", OLD, new, fed())
    if new.platform:
        check_adopts(tmp_path / "back", new, OLD, states[0])
    if new.capacity < OLD.capacity:
        assert int(states[0].counters.ordinal.max()) < 20  # else its entries are the next env's
        for steps in (nth(STEPS, slice(9)), nth(STEPS, slice(9, 18))):
            states = [jitted(new, "extend")(one, steps) for one in states]
            assert bits(told(new, states[0])) == bits(told(new, states[1]))


def test_a_final_row_that_is_owed_does_not_come_with_another_autoreset(tmp_path):
    """And with fewer envs."""
    last = np.arange(TIME)[:, None] == TIME - 1
    steps = STEPS.replace(
        terminated=(STEPS.terminated & ~last) | (last & np.array([False, True])),
        truncated=STEPS.truncated & ~last,
        final_obs=None,
    )
    old, new = transitions(autoreset="next_step"), transitions(num_envs=1, n_step=2)
    state = jitted(old, "extend")(jitted(old, "init")(nth(steps, (0, 0))), steps)
    check_adopts(tmp_path, old, new, state)


SMALL, BUFFER, LARGE = (items(capacity=capacity) for capacity in (16, 64, 256))


def test_a_changed_run_goes_on_under_its_path(tmp_path):
    checkpoint.save(tmp_path, BUFFER, begun(BUFFER, 40), step=40)
    said = "of another buffer, or of steps with other leaves; use another path for each buffer"
    with refused(f"has checkpoints {said}"):
        checkpoint.save(tmp_path, LARGE, begun(LARGE, 0))
    wide, narrow = (Checkpointer(tmp_path, other) for other in (LARGE, SMALL))
    state = wide.restore(ITEM)
    assert numbers(LARGE, state) == expected(BUFFER, 40)
    wide.save(added(LARGE, state, 40, 10), 50)
    assert len(groups_of(wide)) == 2  # the restored rows are not written again
    assert numbers(LARGE, checkpoint.restore(tmp_path, LARGE, ITEM)) == [
        row[-26:] for row in expected(LARGE, 50)
    ]
    for end in (50, 40):
        state = narrow.restore(ITEM, end)
        assert numbers(SMALL, state) == expected(SMALL, end)
    narrow.save(added(SMALL, state, 40, 13), 53)  # of the older step
    assert numbers(SMALL, checkpoint.restore(tmp_path, SMALL, ITEM)) == expected(SMALL, 53)


def test_after_a_clear_and_when_the_laps_begin_anew(tmp_path):
    state = added(BUFFER, jitted(BUFFER, "clear")(begun(BUFFER, 40)), 40, 5)
    checkpoint.save(tmp_path / "clear", BUFFER, state)
    late = begun(BUFFER, 40)
    late = late.replace(counters=late.counters.set(lap=np.uint32(2**32 - 1)))
    checkpoint.save(tmp_path / "late", BUFFER, late)
    for other in (SMALL, LARGE):
        length = other.capacity // 4
        got = checkpoint.restore(tmp_path / "clear", other, ITEM)
        assert numbers(other, got) == [row[-min(5, length) :] for row in expected(BUFFER, 45)]
        got = checkpoint.restore(tmp_path / "late", other, ITEM)
        rows_of_70 = expected(items(capacity=4 * 46), 70)
        assert numbers(other, added(other, got, 40, 30)) == [row[-length:] for row in rows_of_70]


def test_what_is_handed_out_once_is_not_handed_out_again(tmp_path):
    """Popped rows stay popped in another capacity. The queue counts rows that do not fit as lost,
    but not popped ones."""
    sizes = {"num_envs": 2, "batch_size": 4, "sampler": jr.Queue()}
    buffer, values = jr.items(capacity=40, **sizes), np.arange(40, dtype=np.int32).reshape(20, 2)
    state = jitted(buffer, "extend")(jr.jit(buffer).init(values[0, 0]), values)
    state, first = jitted(buffer, "pop")(state, jax.random.key(0))
    checkpoint.save(tmp_path, buffer, state)
    for capacity, left in ((100, 36), (20, 20)):
        other, seen = jr.items(capacity=capacity, **sizes), []
        got = checkpoint.restore(tmp_path, other, values[0, 0])
        for seed in range(left // 4 - 1):
            got, batch = jax.device_get(jitted(other, "pop")(got, jax.random.key(seed)))
            seen += batch.experience[batch.is_valid].tolist()
        assert len({*seen}) == len(seen) > left // 2
        kept = {*values[-capacity // 2 :].ravel().tolist()}
        assert {*seen} <= kept - {*np.asarray(first.experience).tolist()}
        assert int(jitted(other, "size")(got)) == left - len(seen) == 4
        assert int(got.sampler.lost) == 36 - left


@pytest.mark.parametrize("capacities", [(1, 5), (5, 1)])
def test_nothing_and_one_row(capacities, tmp_path):
    buffer, other = (jr.items(capacity=capacity, batch_size=1) for capacity in capacities)
    state = jr.jit(buffer).init(np.int32(0))
    for values in ([0], [7]):
        checkpoint.save(tmp_path, buffer, state)
        got = checkpoint.restore(tmp_path, other, np.int32(0))
        batch = jitted_draw(other)(got, jax.random.key(0))
        assert (batch.experience.tolist(), *batch.is_valid.tolist()) == (values, values == [7])
        state = jitted(buffer, "add")(state, np.full(1, 7, np.int32))


def test_what_differs_is_named(tmp_path):
    checkpoint.save(tmp_path / "steps", OLD, fed())
    checkpoint.save(tmp_path / "items", BUFFER, begun(BUFFER, 4))
    other = transitions(autoreset="same_step_no_final_obs")
    narrow = {"a": np.zeros(3, jnp.float8_e5m2)}
    checkpoint.save(tmp_path / "narrow", SMALL, jr.jit(SMALL).init(narrow))
    for path, buffer, example, said in (
        ("narrow", SMALL, {"a": np.zeros(3, jnp.float8_e4m3fn)}, r"a: stored float8_e5m2\[3\], ex"),
        ("steps", OLD, EXAMPLE.replace(action=np.zeros(2, "f4")), "steps.action: stored flo"),
        ("steps", other, EXAMPLE.replace(final_obs=None), "autoreset"),
        ("items", OLD, EXAMPLE, "autoreset: stored None, expected 'same_step'"),
        ("items", SMALL, ITEM | {"more": 0.0}, r"steps.more: stored nothing, expected float32\[\]"),
    ):
        with refused(said):
            checkpoint.restore(tmp_path / path, buffer, example)
    for file in files_of(tmp_path / "items" / "rows"):
        file.unlink()
    with refused(r"rows/.* is missing", CorruptCheckpointError):
        checkpoint.restore(tmp_path / "items", SMALL, ITEM)

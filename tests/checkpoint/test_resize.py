"""Tests of restores into a buffer of another capacity: the newest rows that fit are kept, with all
that belongs to them."""

import dataclasses
import functools
import itertools
import os

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from tests.checkpoint.runs import files_of, groups_of, span_of
from tests.conftest import ALL
from tests.support.buffers import KINDS, bits, everything, jitted, jitted_draw
from tests.support.checkpointed_run import EXAMPLE, added, begun, expected, items, numbers
from tests.support.hlo import AS_FOR_USERS
from tests.support.refusals import refused
from tests.support.replays import output_of
from tests.support.steps import nth

# Priorities with pending rows; masks, final rows and episodes; rows that are handed out once.
FEW = ("prioritized same_step, 3 steps", "uniform masked, episodes", "transitions queue")
CASES = [case for case in KINDS if ALL or case.name in FEW]
kinds = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def at(buffer, capacity):
    return dataclasses.replace(buffer, capacity=capacity)


def moved(path, before, state, after, example):
    """Save a state, and restore it into another buffer."""
    checkpoint.save(path, before, state)
    return checkpoint.restore(path, after, example)


def fed(case, buffer, blocks, state=None, step=None):
    """Return a state after blocks of ten steps, with random priorities where the sampler has any.

    Steps and priorities depend on the blocks' numbers alone, not on the capacity. `step` makes a
    block's steps. Default: random ones.
    """
    state = jr.jit(buffer).init(case.example()) if state is None else state
    for number in blocks:
        given = [(step or case.step)(number, time=10), *(case.mask(buffer, number, 10) or [None])]
        if isinstance(buffer.sampler, PrioritySampler):
            given.append(np.random.default_rng(number).random((10, 4), np.float32))
        state = jitted(buffer, "extend")(state, *given)
    return state


def names(buffer, state):
    """Return the names of sampleable rows: pairs (stream, number in it)."""
    is_valid = np.asarray(everything(buffer)(state, 1).is_valid)
    env, position = np.divmod(np.flatnonzero(is_valid), buffer.length)
    first = span_of(buffer, state).first[env]
    number = first + (position - first) % buffer.length
    return sorted(zip(env.tolist(), number.tolist(), strict=True))


def items_of(buffer, state, which):
    """Return the items and the probabilities of rows, by their names."""
    env, number = np.array(which, int).reshape(-1, 2).T
    batch, index = everything(buffer)(state, 1), env * buffer.length + number % buffer.length
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], (batch.experience, batch.probability))


@kinds
@pytest.mark.thorough  # test_adopt.py changes capacities, too
@pytest.mark.parametrize("num_blocks", [3, 13])
def test_a_smaller_buffer_is_as_if_it_had_been_fed_the_same(case, num_blocks, tmp_path):
    """Compare rows, items and probabilities with a buffer that had the smaller capacity from the
    first step on."""
    large, small = case.replay(capacity=240), case.replay(capacity=96)
    state, wanted = (fed(case, buffer, range(num_blocks)) for buffer in (large, small))
    got = moved(tmp_path, large, state, small, case.example())
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    counters = [its.counters.set(ordinal=0) for its in (got, wanted)]  # it has no meaning alone
    assert bits(counters[0]) == bits(counters[1])
    which = names(small, wanted)
    assert names(small, got) == which
    if not isinstance(small.sampler, ConsumingSampler):
        assert bits(items_of(small, got, which)) == bits(items_of(small, wanted, which))
        for seed in range(3):
            batches = [jitted_draw(small)(its, jax.random.key(seed)) for its in (got, wanted)]
            assert bits(batches[0]) == bits(batches[1])
    got, wanted = (fed(case, small, [99], its) for its in (got, wanted))
    assert names(small, got) == names(small, wanted)


@kinds
def test_a_larger_buffer_has_every_row_and_keeps_more(case, tmp_path):
    small, large = case.replay(capacity=96), case.replay(capacity=240)
    state = fed(case, small, range(13))
    got = moved(tmp_path, small, state, large, case.example())
    which = names(small, state)
    assert which
    assert names(large, got) == which
    assert int(jitted(large, "size")(got)) == int(jitted(small, "size")(state))
    found, wanted = items_of(large, got, which), items_of(small, state, which)
    if not small.view.is_random:
        assert bits(found[0]) == bits(wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)
    assert set(which) <= set(names(large, fed(case, large, [98, 99], got)))


def steps_of(time, terminated, truncated, final=None):
    leaf = time.astype(np.float32)
    return jr.Step(leaf, leaf, leaf, terminated=terminated, truncated=truncated, final_obs=final)


def example_of(step):
    return nth(step, (0, 0))


@pytest.mark.parametrize("capacity", [16, *[400] * ALL])
def test_priorities_come_along(capacity, tmp_path):
    """Restore updated priorities, and priorities of pending rows."""
    buffer = jr.prioritized(
        capacity=100,
        num_envs=2,
        batch_size=32,
        autoreset="same_step_no_final_obs",
        n_step=3,
    )
    never = np.zeros((80, 2), bool)
    step = steps_of(never, never, never)
    given = np.random.default_rng(0).uniform(0.1, 9, (80, 2)).astype(np.float32)
    state = jitted(buffer, "extend")(jr.jit(buffer).init(example_of(step)), step, None, given)
    which = names(buffer, state)
    env, number = np.array(which, np.int32).T
    index = jitted(buffer, "get")(state, env * 50 + number % 50).index
    priority = np.linspace(0.0, 9.0, len(which), dtype=np.float32)
    state = jitted(buffer, "update_priorities")(state, index, priority)
    other = at(buffer, capacity)
    got = moved(tmp_path, buffer, state, other, example_of(step))
    kept = names(other, got)
    assert set(kept) <= set(which)
    assert len(kept) == (len(which) if capacity > 100 else 2 * 5)  # of each 8 rows, 3 pending
    for field in ("max_priority", "num_stale_updates", "num_bad_priorities"):
        assert bits(getattr(got.sampler, field)) == bits(getattr(state.sampler, field))
    assert np.asarray(jitted_draw(other)(got, jax.random.key(0)).is_valid).all()
    # The least probable row has weight 1, so the smallest priority came along.
    assert np.max(everything(other)(got, 1).weight) == pytest.approx(1, rel=1e-5)

    def check_shares(which):
        was, now = (items_of(*pair, which)[1] for pair in ((buffer, state), (other, got)))
        np.testing.assert_allclose(now / now.sum(), was / was.sum(), rtol=1e-5)

    check_shares(kept)
    # Pending rows have their window now, and their own priorities.
    more = nth(step, slice(3))
    state, got = (jitted(one, "extend")(its, more) for one, its in ((buffer, state), (other, got)))
    both = sorted(set(names(buffer, state)) & set(names(other, got)))
    assert {(env, number) for env in range(2) for number in (77, 78, 79)} <= set(both)
    check_shares(both)


@functools.cache
def looks_up(buffer):
    """Return a jitted function of a state and rows: all that the episode table says of them."""

    def run(state, row):
        found = buffer.episode_table(state)
        names = ("steps_to_end", "steps_from_start", "ends_ahead", "is_complete")
        counts = found.num_episodes(), found.num_unfinished(), found.num_headless()
        of_rows = [getattr(found, name)(row) for name in names]
        return counts, of_rows, [found.kth_end(row, k) for k in (1, 2, 3)]

    return jax.jit(run)


def looked_up(buffer, state):
    """Return what the episode table says of all stored rows, oldest first."""
    first, end = span_of(buffer, state)
    number = [np.arange(*its) for its in zip(first, end, strict=True)]
    row = [env * buffer.length + own % buffer.length for env, own in enumerate(number)]
    return bits(looks_up(buffer)(state, np.concatenate(row).astype(np.int32)))


FORMS_AND_CAPACITIES = [*itertools.product(jr.autoreset.FORMS, (34, 120))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("autoreset", "capacity"),
    FORMS_AND_CAPACITIES if ALL else [("same_step", 34), ("next_step", 120)],
)
def test_episodes_are_as_before(autoreset, capacity, tmp_path):
    """Compare the episode table at every stored row. Final rows may come first."""
    buffer = jr.uniform(
        capacity=60, num_envs=2, batch_size=4, autoreset=autoreset, track_episodes=True
    )
    other, done = at(buffer, capacity), np.random.default_rng(1).random((41, 2))
    time = np.arange(41.0)[:, None] + np.zeros(2)
    final = time.astype(np.float32) if autoreset == "same_step" else None
    step = steps_of(time, done < 0.1, done > 0.7, final)

    def after(buffer):
        return jitted(buffer, "extend")(jr.jit(buffer).init(example_of(step)), step)

    got = moved(tmp_path, buffer, after(buffer), other, example_of(step))
    reference = min(other, buffer, key=lambda buffer: buffer.capacity)
    wanted = after(reference)
    assert looked_up(other, got) == looked_up(reference, wanted)
    if reference is other:
        got, wanted = (jitted(other, "extend")(its, step) for its in (got, wanted))
        assert looked_up(other, got) == looked_up(other, wanted)


SMALL, BUFFER, LARGE = (items(capacity=capacity) for capacity in (16, 64, 256))


def test_after_a_clear_and_when_the_laps_begin_anew(tmp_path):
    state = added(BUFFER, jitted(BUFFER, "clear")(begun(BUFFER, 40)), 40, 5)
    checkpoint.save(tmp_path / "clear", BUFFER, state)
    late = begun(BUFFER, 40)
    late = late.replace(counters=late.counters.set(lap=np.uint32(2**32 - 1)))
    checkpoint.save(tmp_path / "late", BUFFER, late)
    for other in (SMALL, LARGE):
        length = other.capacity // 4
        got = checkpoint.restore(tmp_path / "clear", other, EXAMPLE)
        assert numbers(other, got) == [row[-min(5, length) :] for row in expected(BUFFER, 45)]
        got = checkpoint.restore(tmp_path / "late", other, EXAMPLE)
        rows_of_70 = expected(items(capacity=4 * 46), 70)
        assert numbers(other, added(other, got, 40, 30)) == [row[-length:] for row in rows_of_70]


@pytest.mark.parametrize("sampler", [jr.Queue(), jr.WithoutReplacement()])
def test_what_is_handed_out_once_is_not_handed_out_again(sampler, tmp_path):
    """Restore after a pop: popped rows stay popped. A queue counts rows that do not fit as lost,
    but not popped ones."""
    buffer = jr.items(capacity=40, num_envs=2, batch_size=4, sampler=sampler)
    values = np.arange(20, dtype=np.int32)[:, None] + np.array([0, 100], np.int32)
    state = jitted(buffer, "extend")(jr.jit(buffer).init(values[0, 0]), values)
    state, first = jitted(buffer, "pop")(state, jax.random.key(0))
    checkpoint.save(tmp_path, buffer, state)
    for capacity, left in ((100, 36), (20, 20)):
        other, seen = at(buffer, capacity), []
        got = checkpoint.restore(tmp_path, other, values[0, 0])
        for seed in range(left // 4 - 1):
            got, batch = jax.device_get(jitted(other, "pop")(got, jax.random.key(seed)))
            seen += batch.experience[batch.is_valid].tolist()
        assert len(set(seen)) == len(seen) > left // 2
        kept = set(values[-capacity // 2 :].ravel().tolist())
        assert set(seen) <= kept - set(np.asarray(first.experience).tolist())
        if isinstance(sampler, jr.Queue):
            assert int(jitted(other, "size")(got)) == left - len(seen) == 4
            assert int(got.sampler.lost) == 36 - left


def test_a_resized_run_goes_on_under_its_path(tmp_path):
    checkpoint.save(tmp_path, BUFFER, begun(BUFFER, 40), step=40)
    said = "of another buffer, or of steps with other leaves; use another path for each buffer"
    with refused(f"has checkpoints {said}"):
        checkpoint.save(tmp_path, LARGE, begun(LARGE, 0))
    wide, narrow = (Checkpointer(tmp_path, other) for other in (LARGE, SMALL))
    state = wide.restore(EXAMPLE)
    assert numbers(LARGE, state) == expected(BUFFER, 40)
    wide.save(added(LARGE, state, 40, 10), 50)
    assert len(groups_of(wide)) == 2  # the restored rows are not written again
    assert numbers(LARGE, checkpoint.restore(tmp_path, LARGE, EXAMPLE)) == [
        row[-26:] for row in expected(LARGE, 50)
    ]
    for end in (50, 40):
        state = narrow.restore(EXAMPLE, end)
        assert numbers(SMALL, state) == expected(SMALL, end)
    state = added(SMALL, state, 40, 13)  # of the older step
    wide.close()
    narrow.save(state, 53, blocking=False)
    narrow.wait_until_finished()
    state = checkpoint.restore(tmp_path, SMALL, EXAMPLE)
    assert numbers(SMALL, state) == expected(SMALL, 53)


@pytest.mark.parametrize("values", [[], [7]])
@pytest.mark.parametrize("capacities", [(1, 5), (5, 1)])
def test_nothing_and_one_row(capacities, values, tmp_path):
    buffer, other = (jr.items(capacity=capacity, batch_size=1) for capacity in capacities)
    state = jr.jit(buffer).init(np.int32(0))
    for value in values:
        state = jitted(buffer, "add")(state, np.full(1, value, np.int32))
    got = moved(tmp_path, buffer, state, other, np.int32(0))
    assert int(jitted(other, "size")(got)) == len(values)
    assert jitted_draw(other)(got, jax.random.key(0)).experience.tolist() == (values or [0])


def test_other_differences_are_refused(tmp_path):
    checkpoint.save(tmp_path, BUFFER, begun(BUFFER, 4))
    restore = functools.partial(checkpoint.restore, tmp_path)
    with refused("autoreset: stored None, expected 'next_step'"):
        never = np.zeros((1, 1), bool)
        step = example_of(steps_of(never, never, never))
        restore(jr.uniform(capacity=64, batch_size=4, autoreset="next_step"), step)
    with refused(r"steps.more: stored nothing, expected float32\[\]"):
        restore(SMALL, EXAMPLE | {"more": 0.0})
    for file in files_of(tmp_path / "rows"):
        file.unlink()
    with refused(r"rows/.* is missing", CorruptCheckpointError):
        restore(SMALL, EXAMPLE)


@kinds
def test_no_program_takes_memory_for_each_row(case):
    """Compile from shapes, and bound the memory beside arguments and results."""
    old = case.replay(capacity=240 * 8000)
    new = dataclasses.replace(old, allow_mask=True, track_episodes=not case.is_items)
    state = jax.eval_shape(old.init, case.example())
    program = jax.jit(new.adopt).lower(state)
    memory = program.compile(AS_FOR_USERS).memory_analysis()
    assert memory.temp_size_in_bytes < 64 * new.capacity


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer


def shardings(replay, example, num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("envs",))
    over = lambda leaf: (
        PartitionSpec("envs")
        if leaf.ndim and leaf.shape[0] == replay.capacity
        else PartitionSpec()
    )
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, over(leaf)), jax.eval_shape(replay.init, example)
    )


assert len(jax.devices()) == 4
replay = jr.prioritized(capacity=64, num_envs=4, batch_size=8, autoreset="next_step")
step = jr.Step(
    jnp.arange(12.0).reshape(4, 3),
    jnp.zeros(4),
    jnp.arange(4.0),
    terminated=jnp.zeros(4, bool),
    truncated=jnp.zeros(4, bool),
)
example = jax.tree.map(lambda leaf: leaf[0], step)
wide = shardings(replay, example, 4)
state = jax.jit(lambda: replay.init(example), out_shardings=wide)()
add = jax.jit(replay.add, donate_argnums=0, out_shardings=wide)
for t in range(21):
    state = add(
        state, jax.tree.map(lambda leaf: leaf + t if leaf.dtype == jnp.float32 else leaf, step)
    )
assert len(state.rows.steps.obs.sharding.device_set) == 4
path = "run"
checkpointer = Checkpointer(path, replay, chunk_bytes=4096)
checkpointer.save(state, 1)
state = add(state, step)
checkpointer.save(state, 2, blocking=False)
checkpointer.wait_until_finished()
same = lambda a, b: jax.tree.map(
    np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b)
)
for num_devices in (4, 2, 1):
    where = shardings(replay, example, num_devices)
    got = checkpoint.restore(path, replay, example, sharding=where, chunk_bytes=4096)
    same(got, state)
    assert jax.tree.all(
        jax.tree.map(lambda leaf, to: leaf.sharding.is_equivalent_to(to, leaf.ndim), got, where)
    )
same(checkpoint.restore(path, replay, example), state)
small = jr.prioritized(capacity=32, num_envs=4, batch_size=8, autoreset="next_step")
where = shardings(small, example, 2)
got = checkpoint.restore(path, small, example, sharding=where)
same(got, checkpoint.restore(path, small, example))
assert jax.tree.all(
    jax.tree.map(lambda leaf, to: leaf.sharding.is_equivalent_to(to, leaf.ndim), got, where)
)
"""


def test_states_over_several_devices(tmp_path):
    """Save from four devices; restore to four, two and one, and to two with another capacity."""
    environment = os.environ | {
        "PYTHONWARNINGS": "error::UserWarning",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    output_of(PROGRAM, env=environment, cwd=tmp_path)

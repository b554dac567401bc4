"""Brax's interface over our storage, beside a list. `make compat` runs Brax's own tests over it."""

import functools

import jax
import numpy as np
import pytest

from jaxreplay.compat import brax
from tests.conftest import ALL
from tests.support.hlo import check_in_place
from tests.support.refusals import check_table, refused

KEY = jax.random.key(0)
EXAMPLE = {"name": 0, "frame": np.zeros((4, 4), np.uint8)}


def rows(first, num_rows):
    name = np.arange(first, first + num_rows, dtype=np.int32)
    return {"name": name, "frame": np.ones((num_rows, 4, 4), np.uint8)}


@pytest.mark.parametrize("kind", ["uniform", "queue", "cyclic"])
@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), *[(7, 7), (1, 1)] * ALL])
def test_rows_are_those_of_a_list(kind, size, batch_size):
    """Under jit, as Brax's, a sample of too few rows has no error, and a queue is empty then."""
    is_uniform, is_cyclic = kind == "uniform", kind == "cyclic"
    queue = functools.partial(brax.Queue, cyclic=is_cyclic)
    buffer = (brax.UniformSamplingQueue if is_uniform else queue)(size, EXAMPLE, batch_size)

    @jax.jit
    def turn(state, block):
        state = buffer.insert(state, block)
        after, batch = buffer.sample(state)
        shown = state.insert_position, after.sample_position, buffer.size(after)
        return state, state.data, after, batch, shown

    empty = jax.jit(buffer.init)(KEY)
    state, batch = jax.jit(buffer.sample)(empty)
    assert (np.asarray(batch["name"]) == 0).all()
    state, stored, first, written = empty if is_cyclic else state, [], 0, 0
    for num_rows in (1, 3, 1, 7, 3, 1, 1, 7):
        num_rows = min(num_rows, size)
        inserted, data, after, batch, shown = turn(state, rows(written, num_rows))
        stored += range(written, written + num_rows)
        written += num_rows
        lost = max(len(stored) - size, 0)
        stored, first = stored[lost:], max(first - lost, 0)
        assert data.shape == (size, 17)
        assert data[: len(stored), -1].tolist() == stored
        if is_cyclic and len(stored) < batch_size:
            state = inserted
            continue
        assert batch["frame"].shape == (batch_size, 4, 4)
        assert batch["frame"].dtype == np.uint8
        assert not is_uniform or after.key != inserted.key
        got, state = batch["name"].tolist(), after
        assert set(got) <= set(stored)
        if kind == "queue" and len(stored) - first < batch_size:
            with refused(f"only {len(stored) - first} available"):
                buffer.sample(inserted)
        elif not is_uniform:
            assert got == (stored * 2)[first : first + batch_size]
        first += 0 if is_uniform else batch_size
        first = first % len(stored) if is_cyclic else min(first, len(stored))
        left = len(stored) - (0 if is_cyclic else first)
        assert [*map(int, shown)] == [len(stored), first, left]


@pytest.mark.parametrize("sizes", [(12, 3, 4), (5, 1, 5), (6, 4, 1)][: 3 if ALL else 1])
def test_jaxgcrls_sequences(sizes):
    """One sequence of each env, of steps that follow each other and are all stored."""
    size, num_envs, span = sizes
    buffer = brax.TrajectoryUniformSamplingQueue(size, {"name": 0}, 7, num_envs, span)

    @jax.jit
    def turn(state, names):
        state = buffer.insert(state, {"name": names})
        state, drawn = jax.lax.scan(lambda state, _: buffer.sample(state), state, length=20)
        return state, buffer.size(state), drawn["name"]

    state, written, found = jax.jit(buffer.init)(KEY), 0, set()
    for time in (5, 2, size, 2, 2):
        time = min(time, size)
        names = written + np.arange(time)[:, None] + 1000 * np.arange(num_envs)
        state, stored, drawn = turn(state, names.astype(np.int32))
        written += time
        assert stored == min(written, size)
        if written < span:
            continue
        assert drawn.shape == (20, num_envs, span)
        assert (np.diff(drawn) == 1).all()
        env, start = np.divmod(np.asarray(drawn)[..., 0], 1000)
        assert (np.sort(env) == np.arange(num_envs)).all()
        oldest = max(written - size, 0)
        assert start.max() <= written - span
        found |= {*(start - oldest).ravel().tolist()}
    assert found == {*range(size - span + 1)}


@pytest.mark.thorough  # tests/buffers/test_in_place.py has what lies beneath
@pytest.mark.parametrize("kind", [brax.UniformSamplingQueue, brax.Queue])
def test_everything_is_in_place(kind):
    """Brax's own moves all rows with each insert into a full buffer."""
    size = 1 << 17
    buffer, block = kind(size, EXAMPLE, 8), rows(0, 8)
    train = lambda state, _: buffer.sample(buffer.insert(state, block))
    loop = lambda state: jax.lax.scan(train, state, length=5)
    state = jax.eval_shape(buffer.init, KEY)
    check_in_place(loop, (state,), num_elements=size, donated=0)


@pytest.mark.parametrize("is_pmapped", [False, *[True] * ALL])
def test_wrappers_deal_rows_to_devices(is_pmapped):
    inner = brax.Queue(8, {"name": 0}, 4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    buffer = brax.PmapWrapper(inner, 1) if is_pmapped else brax.PjitWrapper(inner, mesh, ("x",))
    state = buffer.insert(buffer.init(KEY), {"name": np.arange(6, dtype=np.int32)})
    assert buffer.size(state) == 6
    state, batch = buffer.sample(state)
    assert batch["name"].tolist() == [0, 1, 2, 3]
    with refused("only 2 available"):
        buffer.sample(state)
    with refused("got 9 rows, but the maximum replay size is 8"):
        buffer.insert(state, {"name": np.arange(9, dtype=np.int32)})


QUEUE = brax.Queue(8, EXAMPLE, 1)  # compiles, the first time in a process
BAD = {
    "brax.Queue(0, EXAMPLE, 1)": "Queue: max_replay_size must be an int of at least 1",
    "brax.TrajectoryUniformSamplingQueue(8, EXAMPLE, 1, 2, 9)": """
        episode_length=9 exceeds max_replay_size=8""",
    "QUEUE.insert(state, {})": "insert:\nname: missing",
    "QUEUE.insert(state, wrong)": "got float32[1], expected int32[1]",
}


@pytest.mark.no_xla
def test_a_bad_call_says_why():
    wrong = rows(0, 1) | {"name": np.zeros(1, np.float32)}
    state = jax.eval_shape(QUEUE.init, KEY)
    check_table(BAD, globals(), given={"state": state, "wrong": wrong})

"""Steps of NumPy arrays wait on the host until a program adds them all: nobody can tell."""

import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.host.staging import Staging
from jaxreplay.stateful import owner, places
from tests.conftest import ALL
from tests.support.compilations import count_programs
from tests.support.replays import check_same, entered_by, make, step


def test_a_loop_runs_one_program_for_its_adds_and_its_sample(monkeypatch):
    replay, seen = make(steps=4), []

    def loop(num_rounds):
        for t in range(4 * num_rounds):
            replay.add(step(t))
            if t % 4 == 3:
                replay.sample()

    with count_programs("_add_and_sample") as sampled, count_programs("_extend") as extended:
        loop(20)
        assert sampled() <= 3
        assert extended() <= 3
    monkeypatch.setattr(replay._owner.watch, "_next_look", np.inf)  # it reads the rows now and then

    def noted(name, real):
        return lambda *arguments, **options: seen.append(name) or real(*arguments, **options)

    for module in (owner, places):
        monkeypatch.setattr(module, "method", noted("method", module.method))
    for name in ("_extend", "_sample", "_add_and_sample"):
        both = [noted(name, real) for real in getattr(places, name)]
        monkeypatch.setattr(places, name, both)
    loop(20)
    assert seen == ["_add_and_sample"] * 20


def test_a_plain_step_enters_few_functions():
    replay, given = make(steps=4), step(4)
    assert 3 < len(entered_by(lambda: replay.add(given))) <= 14


@pytest.mark.parametrize("rows", ["device", "host"])
def test_steps_of_one_env_or_of_some_wait_too(rows, monkeypatch):
    buffer = jr.items(capacity=48, num_envs=4, batch_size=8, allow_mask=True)
    replay = jr.Replay(buffer, example=np.float32(0), rows=rows)
    monkeypatch.setattr(replay._owner.watch, "_next_look", np.inf)  # it reads the rows now and then

    def loop(length):
        for t in range(length):
            replay.add(np.float32(t), env=t % 4)
            assert len(replay._owner._staging) == 2 * t % 64 + 1
            replay.add(np.array([t, -t], np.float32), envs=[(t + 1) % 4, (t + 2) % 4])
        len(replay)

    loop(64)  # 32 steps of one env, and 32 of two others, wait for each program
    with count_programs() as compiled:
        loop(64)
    assert compiled() == 0
    calls = []
    monkeypatch.setattr(replay._owner, "_change", lambda *given, **options: calls.append(given))
    loop(64)
    assert len(calls) == 2


def test_steps_of_other_envs_share_a_time_and_none_comes_before_an_earlier_one():
    staging = Staging(np.float32(0), num_envs=3)
    for number, env in enumerate([1, 2, 1, 0, 2, 2, 0], start=1):
        assert staging.has_room(None, None, [env])
        staging.put([np.float32([number])], None, None, [env])
    steps, mask, priority, envs = staging.waiting()
    assert envs.tolist() == [0, 1, 2]
    assert steps.tolist() == [[0, 1, 2], [4, 3, 5], [7, 0, 6], [0, 0, 0]]
    assert np.array_equal(mask, steps > 0)
    assert priority is None


def test_a_block_of_some_envs_is_padded_to_no_more_than_fits():
    staging = Staging(np.zeros(2**19, np.uint8), num_envs=4)  # 8 steps may wait
    item = np.zeros((1, 2**19), np.uint8)
    for env in (3, 0, 3, 3):
        if is_room := staging.has_room(None, None, [env]):
            staging.put([item], None, None, [env])
    assert not is_room
    assert len(staging) == 3
    assert staging.waiting()[0].shape == (2, 4, 2**19)


@pytest.mark.parametrize(("num_bytes", "most"), [(1024, 64), (3 * 2**20, 1)])
def test_a_few_steps_wait_in_memory_of_their_own(num_bytes, most):
    memory = np.empty(num_bytes + 64, np.uint8)
    for beyond in (0, 1):  # bytes past a multiple of 64: JAX may take an array as its own
        replay = jr.Replay(jr.items(capacity=2 * most, batch_size=2))
        item = memory[(beyond - memory.ctypes.data) % 64 :][:num_bytes].reshape(1, -1)
        num_waiting = []
        for t in range(3 * most):
            item.fill(t)
            replay.add(item)
            item.fill(255)
            num_waiting.append(len(replay._owner._staging))
        assert max(num_waiting) == most
        rows = np.asarray(replay.state.rows.steps)
        assert sorted(rows[:, 0].tolist()) == list(range(most, 3 * most))
        assert (rows == rows[:, :1]).all()


def test_a_failed_program_loses_no_step_that_waits(monkeypatch):
    replay = make(framework="numpy", steps=4)

    def fails(*arguments, **options):
        raise MemoryError("no room for a program")

    with monkeypatch.context() as patch:
        for name in ("_extend", "_add_and_sample"):
            patch.setattr(places, name, [fails, fails])
        for call in (replay.sample, lambda: len(replay), replay.clear):
            with pytest.raises(MemoryError):
                call()
    assert replay.sample().is_valid.all()
    check_same(replay, make(steps=4))


def test_a_long_run_compiles_nothing_after_its_first_steps():
    """Also where the replay looks at its rows for wrong resets: the envs reset rarely."""
    replay = make(num_envs=1, capacity=600)

    def loop(start, stop):
        for t in range(start, stop):
            replay.add({**step(t, (1,)), "truncated": np.array([t % 500 == 499])})
            if t % 10 == 9:
                replay.sample()

    loop(0, 300)
    with count_programs() as compiled:
        loop(300, 10_000 if ALL else 1_100)
    assert compiled() == 0

"""`jax_transfer_guard` forbids a program its implicit transfers, not the replay its own."""

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.datasets import Episode
from tests.support.replays import PRIORITIZED, block, make, on_device, step
from tests.support.steps import nth

NUM_ENVS, B = 3, 8


@pytest.fixture
def guard(rows):
    """A guard of a block of a thread, or of the whole process."""
    if rows == "host":
        with jax.transfer_guard("disallow"):
            yield
        return
    jax.config.update("jax_transfer_guard", "disallow")
    yield
    jax.config.update("jax_transfer_guard", None)


def doubled(given, after, factor):
    return {"reward": given.reward * factor}


def calls_of(replay, path):
    """Return calls of all methods of a replay, by their names. Steps have the shapes of those of
    `test_random_calls_are_those_of_the_functional_buffer`, with the same programs."""
    one_env = nth(block(0, 5), np.s_[:, 0])
    obs, no = one_env["obs"], np.zeros(4, bool)
    episode = Episode(obs, one_env["action"][:4], one_env["reward"][:4], no, no)
    every, one = np.ones(NUM_ENVS, bool), np.arange(NUM_ENVS) == 1
    extras = {"weights": np.ones(3)}
    batches = []

    def adds():
        for t in range(2):
            replay.add(step(t))
        replay.add(step(3), mask=one, priority=[1.0, 2.0, 3.0])
        replay.add(nth(step(4), 0), env=0, priority=np.ones(()))
        replay.add(on_device(step(5)), mask=one, priority=np.ones(NUM_ENVS))
        replay.add(on_device(nth(step(6), 0)), env=0, priority=np.ones(()))
        replay.add(nth(step(7), [2, 0]), envs=[2, 0], priority=np.ones(2))
        replay.add(block(8, 2))
        return len(replay)

    def samples():
        batches.extend(replay.sample() for _ in range(3))
        return next(iter(replay)).is_valid.all()

    index = lambda: batches[-1].index
    return {
        "add": adds,
        "can_sample": replay.can_sample,
        "sample": samples,
        "update_priorities": lambda: replay.update_priorities(index(), np.ones(B)),
        "reset_max_priority": replay.reset_max_priority,
        "write": lambda: replay.write(index(), {"reward": np.zeros(B)}),
        "map_rows": lambda: replay.map_rows(doubled, np.float32(2), block=32),
        "get": lambda: replay.get(index()),
        "age": lambda: replay.age(index()),
        "metrics": replay.metrics,
        "inspect": replay.inspect,
        "state": lambda: replay.state,
        "end_streams": lambda: replay.end_streams(every),
        "drop": lambda: replay.drop(one),
        "save": lambda: replay.save(path, extras=extras),
        "load": lambda: replay.load(path, extras=extras),
        "merge": lambda: replay.merge(replay.state),
        "add_episodes": lambda: replay.add_episodes([episode]),
        "clear": replay.clear,
        "close": replay.close,
    }


@pytest.mark.parametrize("rows", ["device", "host"])
def test_a_replay_moves_what_it_is_given_also_where_a_guard_forbids_it(rows, guard, tmp_path):
    buffer = make(**PRIORITIZED).buffer
    replay = jr.Replay(buffer, rows=rows)
    calls = calls_of(replay, tmp_path / "replay")
    # the buffer keeps no table, and actors are in processes of their own
    rest = {"buffer", "episode_table", "start"}
    assert calls.keys() | rest == {name for name in vars(jr.Replay) if not name.startswith("_")}
    found = {name: call() for name, call in calls.items()}
    assert found["add"] > 0
    assert found["sample"]
    with pytest.raises(Exception, match="Disallowed host-to-device"):
        jax.jit(lambda x: x)(np.ones(3))

"""Steps of NumPy arrays wait on the host until a program adds them all: nobody can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.stateful import owner
from tests.conftest import SOAK
from tests.support.compilations import count_programs
from tests.support.replays import NUM_ENVS, check_same, make, rows_of, step

BUFFERS = {
    "masked": {"allow_mask": True, "sampler": jr.Prioritized()},
    "one env": {"num_envs": 1, "capacity": 20},
    "queue": {"sampler": jr.Queue(), "batch_size": 2},
    "episodes": {"track_episodes": True, "autoreset": "same_step_no_final_obs", "min_size": 30},
}
if SOAK:
    BUFFERS |= {
        "prioritized": {"sampler": jr.Prioritized()},
        "without replacement": {"sampler": jr.WithoutReplacement(), "batch_size": 2},
    }


def on_device(given):
    """Return a step on the device, which is added at once."""
    return jax.tree.map(jnp.asarray, given)


def random_call(r, num_envs, masked, priorities):
    """Return a random call: a function of a replay, and of how to hand a step to its `add`."""
    kind = r.choice(["add"] * 8 + ["block", "sample", "sample", "update", "len", "clear"])
    t = int(r.integers(1000))
    options = {}
    if kind in ("add", "block"):
        axes = (num_envs,) if kind == "add" else (int(r.choice([2, 5])), num_envs)
        if masked and r.random() < 0.5:
            options["mask"] = r.random(axes) < 0.7
        if priorities and r.random() < 0.5:
            options["priority"] = r.random(axes).astype(r.choice([np.float32, np.float64]))
        given = step(t, axes)
        # other dtypes that hold the same values are cast
        given["reward"] = given["reward"].astype(r.choice([np.float32, np.float64]))
        given["action"] = given["action"].astype(r.choice([np.int32, np.int64]))
        return lambda replay, hand: replay.add(hand(given), **options)
    return {
        "sample": lambda replay, _: sampled(replay),
        "update": lambda replay, _: updated(replay, priorities),
        "len": lambda replay, _: (len(replay), replay.can_sample(), replay.metrics()),
        "clear": lambda replay, _: replay.clear(),
    }[kind]


def sampled(replay):
    try:
        return jax.device_get(replay.sample())
    except TimeoutError as error:
        return str(error)


def updated(replay, priorities):
    batch = sampled(replay)
    if priorities and not isinstance(batch, str):
        replay.update_priorities(batch.index, batch.experience.reward)
    return batch


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_all_is_as_if_each_step_were_added_at_once(name, seed):
    options = BUFFERS[name]
    waits, at_once = make(**options), make(**options)
    num_envs = options.get("num_envs", NUM_ENVS)
    priorities = isinstance(options.get("sampler"), jr.Prioritized)
    r = np.random.default_rng(seed)
    for replay in (waits, at_once):
        replay.add(step(0, (num_envs,)))
    for _ in range(100):
        call = random_call(r, num_envs, options.get("allow_mask", False), priorities)
        found = [call(waits, lambda given: given), call(at_once, on_device)]
        jax.tree.map(np.testing.assert_array_equal, *found)
        assert not len(at_once._owner._staging)
    check_same(waits, at_once)


def test_a_loop_runs_one_program_for_its_adds_and_its_sample(monkeypatch):
    replay, seen = make(capacity=600), []
    for t in range(8):
        replay.add(step(t))
    replay.sample()
    replay._watch.after_add = lambda *_: None  # which reads the rows now and then

    def noted(name, real):
        return lambda *arguments, **options: seen.append(name) or real(*arguments, **options)

    for name in ("_extend", "_sample", "_add_and_sample", "method"):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    for t in range(100):
        replay.add(step(t))
        if t % 4 == 3:
            replay.sample()
    assert seen == ["_add_and_sample"] * 25


def test_a_loop_of_any_length_compiles_no_program_again():
    for length in (1, 3):
        replay = make(capacity=600)
        with count_programs("_add_and_sample") as sampled, count_programs("_extend") as extended:
            for t in range(40 * length):
                replay.add(step(t))
                if t % length == length - 1 and t > 3:
                    replay.sample()
        assert sampled() <= 3
        assert extended() <= 3


def test_a_full_block_is_added_without_a_sample(monkeypatch):
    replay = make(capacity=3000)
    replay.add(step(0))
    for t in range(1, 200):
        replay.add(step(t))
        assert len(replay._owner._staging) <= 64
    assert int(replay._owner._state.streams.counters.filled[0]) >= 200 - 64
    assert int(replay._owner.state.streams.counters.filled[0]) == 200


def test_large_steps_do_not_wait_for_long():
    replay = jr.Replay(jr.items(capacity=8, batch_size=2))
    for t in range(8):
        replay.add(np.full((1, 3 * 2**20), t, np.uint8))
        assert len(replay._owner._staging) <= 1
    assert replay.sample().experience.shape == (2, 3 * 2**20)
    assert sorted(np.asarray(replay._owner.state.streams.steps)[:, 0].tolist()) == list(range(8))


def test_the_caller_may_reuse_its_arrays():
    replay, at_once = make(), make()
    memory = jax.tree.map(np.copy, step(0))
    for t in range(30):
        jax.tree.map(lambda own, new: np.copyto(own, new), memory, step(t))
        replay.add(memory)
        at_once.add(on_device(step(t)))
        if t % 7 == 6:
            replay.sample()
    jax.tree.map(lambda own: own.fill(1), memory)
    check_same(replay, at_once)


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({"reward": np.zeros(NUM_ENVS + 1, np.float32)}, {}, r"reward: got float32\[4\]"),
        ({"reward": np.full(NUM_ENVS, 1e300)}, {}, "add: reward"),
        ({"action": np.zeros(NUM_ENVS, np.float32)}, {}, r"action: got float32\[3\]"),
        ({"terminated": np.zeros(NUM_ENVS, np.float32)}, {}, "terminated"),
        ({"obs": {"x": np.zeros((NUM_ENVS, 2), np.float32)}}, {}, "obs"),
        ({}, {"mask": np.ones(NUM_ENVS, bool)}, "allow_mask"),
        ({}, {"priority": np.ones(NUM_ENVS)}, "no priorities"),
        ({}, {"env": 0}, "env"),
    ],
)
def test_an_error_comes_from_the_add_that_caused_it_and_nothing_is_lost(change, options, match):
    replay, at_once = make(), make()
    for t in range(6):
        replay.add(step(t))
        at_once.add(on_device(step(t)))
        with pytest.raises(ValueError, match=match):
            replay.add({**step(9), **change}, **options)
    check_same(replay, at_once)


def test_a_failed_program_loses_no_step_that_waits(monkeypatch):
    replay, at_once = make(), make()
    for t in range(6):
        replay.add(step(t))
        at_once.add(on_device(step(t)))

    def fails(*arguments, **options):
        raise MemoryError("no room for a program")

    with monkeypatch.context() as patch:
        for name in ("_extend", "_add_and_sample"):
            patch.setattr(owner, name, fails)
        for call in (replay.sample, lambda: len(replay), replay.clear):
            with pytest.raises(MemoryError):
                call()
    assert replay.sample().is_valid.all()
    check_same(replay, at_once)


def test_a_load_replaces_steps_that_wait(tmp_path):
    replay = make()
    for t in range(6):
        replay.add(step(t))
    replay.save(tmp_path / "replay")
    expected = rows_of(replay)
    replay.add(step(6))
    with pytest.raises(FileNotFoundError):
        replay.load(tmp_path / "nothing")
    assert not all(map(np.array_equal, expected, rows_of(replay)))  # the step is there
    replay.add(step(7))
    replay.load(tmp_path / "replay")
    for x, y in zip(expected, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)


def test_saved_at_any_time_as_if_added_at_once(tmp_path):
    replay, other = make(), make()
    for t in range(7):
        replay.add(step(t))
    replay.save(tmp_path / "replay")
    other.add(step(0))
    other.load(tmp_path / "replay")
    assert len(other) == len(replay) == 15
    check_same(replay, other)

"""A `Replay` begins with the rows of others, gets more of them, and shows its own."""

import signal

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import memory
from jaxreplay.datasets import Episode
from tests.support.buffers import bits
from tests.support.refusals import refused
from tests.support.sampling import assert_same
from tests.support.steps import begun, nth, plain_step

OPTIONS = {"num_envs": 2, "batch_size": 8, "autoreset": "next_step"}
ONLINE = jr.prioritized(capacity=60, **OPTIONS, beta=0)


def uniform(**options):
    return jr.uniform(**{"capacity": 60, **OPTIONS, **options})


def steps(first, num_envs=2, time=6):
    number = first + np.arange(time, dtype=np.float32)[:, None]
    return plain_step(number + 100 * np.arange(num_envs, dtype=np.float32))


def rewards(replay):
    """Return the rewards of all sampleable rows, sorted."""
    batch = replay.get(np.arange(replay.buffer.capacity))
    return sorted(np.asarray(batch.experience.reward)[np.asarray(batch.is_valid)].tolist())


def test_it_begins_with_the_state_of_another_buffer():
    """Of one env more, without priorities."""
    old = uniform(num_envs=3)
    state = begun(jr.jit(old), steps(0, 3))
    replay = jr.Replay(ONLINE, state=jax.tree.map(jax.numpy.copy, state), framework="numpy")
    expected = jr.jit(ONLINE).adopt(state)
    assert len(replay) == int(jr.jit(ONLINE).size(expected)) > 0
    assert bits(replay.state) == bits(expected)
    replay.add(nth(steps(50), 0))
    assert len(replay.sample().weight) == 8


def test_merge_adds_the_rows_of_a_replay_or_a_state():
    replay, other = (jr.Replay(uniform(), framework="numpy") for _ in range(2))
    replay.merge(begun(jr.jit(uniform()), steps(1000)))  # before any step
    replay.add(steps(0))
    other.add(steps(20, time=4))
    replay.merge(other)
    replay.merge(begun(jr.jit(uniform(capacity=30, num_envs=1)), steps(40, 1)))
    of = lambda first, time, num_envs=2: [
        float(first + 100 * env + t) for env in range(num_envs) for t in range(time - 1)
    ]
    assert rewards(replay) == sorted(of(0, 6) + of(20, 4) + of(40, 6, 1) + of(1000, 6))
    assert len(other) == 6
    with refused("merge:"):
        replay.merge(jr.items(capacity=8, batch_size=2).init(np.float32(0)))
    with refused("nothing was added yet"):
        replay.merge(jr.Replay(uniform()))
    assert len(replay) == 10 + 6 + 5 + 10


def test_demonstrations_come_first():
    """An episode that does not fit leaves the rows as they are."""
    time = np.arange(5, dtype=np.float32)
    last = np.arange(4) == 3
    demos = [
        Episode(time + 10 * k, time[:-1] + 10 * k, time[:-1] + 10 * k, last, ~last & last)
        for k in range(3)
    ]
    replay = jr.Replay(uniform(), framework="numpy")
    replay.add_episodes(demos)
    assert rewards(replay) == sorted(float(10 * k + t) for k in range(3) for t in range(4))
    replay.add(steps(500))
    before = rewards(replay)
    wrong = demos[0]._replace(rewards=np.zeros(2, np.float32))
    with refused("rewards: expected 4"):
        replay.add_episodes([demos[1], wrong])
    assert rewards(replay) == before
    replay.add_episodes(demos[:1])
    assert len(replay) == len(before) + 4


@pytest.mark.parametrize("rows", ["device", "host"])
def test_demonstrations_go_into_the_rows_a_block_at_a_time(rows, monkeypatch):
    """Ctrl-C leaves those that were added, and no episode that goes on."""
    monkeypatch.setattr("jaxreplay.datasets.episodes._MOST_STEPS", 4)
    replay = jr.Replay(
        uniform(allow_mask=True), rows=rows, example=nth(steps(0), (0, 0)), framework="numpy"
    )
    replay.add(steps(500))
    own, taken = rewards(replay), []
    store = replay._owner.place.tier._store if rows == "host" else None

    def episodes():
        for k in range(8):
            time, last = np.arange(6, dtype=np.float32) + 10 * k, np.arange(5) == 4
            taken.append(k)
            if k == 5:
                signal.raise_signal(signal.SIGINT)
            yield Episode(time, time[:-1], time[:-1], last, last & False)

    with pytest.raises(KeyboardInterrupt):
        replay.add_episodes(episodes())
    assert taken == [*range(6)]
    found = [reward for reward in rewards(replay) if reward not in own]
    assert found == [reward for reward in found if reward % 10 < 5]
    assert found[:10] == [0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    replay.add(steps(700))
    batch = replay.get(np.arange(replay.buffer.capacity))
    goes_on = batch.is_valid & (batch.experience.discount > 0)
    assert (batch.experience.next_obs - batch.experience.obs)[goes_on].max() == 1
    if store is not None:
        assert replay._owner.place.tier._store is store


def test_the_state_is_a_copy():
    replay = jr.Replay(uniform(track_episodes=True))
    replay.add(steps(0))
    state, table = replay.state, replay.episode_table()
    replay.add(steps(10))
    for each in jax.device_get((state, table.state)):  # no leaf is donated
        assert each.counters.stored[1].tolist() == [6, 6]  # the rows of each env


def mixed(**options):
    members = {"demos": (uniform(), 2), "online": (ONLINE, 6)}
    return jr.Replay(jr.mix(**members), framework="numpy", **options)


def test_a_mixture_is_one_replay():
    """Rows go to a member by its name; batches, priorities and figures are of all."""
    replay = mixed(state={"demos": begun(jr.jit(uniform()), steps(1000))})
    assert not replay.can_sample()
    with refused("online has 0 rows of at least 1", TimeoutError):
        replay.sample(timeout=0)
    for number in range(6):  # one at a time: they wait on the host
        replay.add(nth(steps(number, time=1), 0), member="online")
    assert replay.can_sample()
    assert len(replay) == 10 + 10
    index = replay.sample().index
    replay.update_priorities(index, np.zeros(8))
    batch = replay.sample()
    assert batch.source.tolist() == [0, 0] + 6 * [1]
    assert (batch.experience.reward[:2] >= 1000).all()
    assert not set(batch.index.row[2:]) & set(index.row[2:])
    online = {name: leaf[2:] for name, leaf in (("row", batch.index.row), ("lap", batch.index.lap))}
    again = replay.get(online, member="online").experience.reward
    np.testing.assert_array_equal(again, batch.experience.reward[2:])
    np.testing.assert_array_equal(replay.age(online, member="online"), 5 - again % 100)
    found = replay.inspect(member="demos").draws["rows that can be drawn"]
    assert replay.metrics()["demos/size"] == found == 10
    replay.merge(replay.state["online"], member="demos")
    assert len(replay) == 30
    replay.end_streams()
    replay.add(nth(steps(6), 0), member="online")  # follows no other step
    assert len(replay) == 30
    replay.clear()
    assert len(replay) == 0
    assert not replay.can_sample()


@pytest.mark.thorough
def test_the_rows_of_a_mixture_make_room_for_saved_ones(tmp_path, monkeypatch):
    replay = mixed(seed=0)
    for member in ("demos", "online"):
        replay.add(steps(0), member=member)
    replay.save(tmp_path / "replay")
    replay.add(steps(6), member="online")
    owners = [*replay._owner.members.values()]
    has_rows = lambda: any(owner._state is not None for owner in owners)
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 if has_rows() else 2**40)
    replay.load(tmp_path / "replay")
    assert len(replay) == 20


PLACES = {
    "demos in files": lambda path: {"demos": path / "rows"},
    "demos on the host, the others in files": lambda path: {
        "demos": "host",
        "online": path / "rows",
    },
    "all on the host": lambda path: "host",
    "demos of a checkpoint": lambda path: {"demos": jr.open(path / "demos", uniform())},
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("rows", PLACES)
def test_members_of_a_mixture_may_lie_in_different_places(rows, prefetch, tmp_path):
    """Batches, priorities and checkpoints are those of a mixture on the device."""
    with jr.Replay(uniform(), example=nth(steps(0), (0, 0))) as demos:
        demos.add(steps(1000))
        demos.save(tmp_path / "demos")
        state = demos.state
    options = {"example": nth(steps(0), (0, 0)), "seed": 3, "prefetch": prefetch}
    on_device = mixed(**options)
    elsewhere = mixed(**options, rows=PLACES[rows](tmp_path))
    for replay in (on_device, elsewhere):
        if replay is on_device or rows != "demos of a checkpoint":
            replay.merge(state, member="demos")
        replay.add(steps(0), member="online")
    for number in range(4):
        found, expected = elsewhere.sample(), on_device.sample()
        assert_same(found, expected)
        for replay, batch in ((elsewhere, found), (on_device, expected)):
            replay.update_priorities(batch.index, 1.0 + np.arange(8))
            replay.add(nth(steps(6 + number), 0), member="online")
        if not prefetch:
            fractions = {"demos": 0.75, "online": 0.25}
            found, expected = (one.sample(fractions=fractions) for one in (elsewhere, on_device))
            assert_same(found, expected)
    if rows != "demos of a checkpoint":
        elsewhere.save(tmp_path / "saved", copy=True)
        again = mixed(**options)
        again.load(tmp_path / "saved")
        assert len(again) == len(elsewhere) == len(on_device)
        assert_same(again.sample(), elsewhere.sample())
        elsewhere.add(steps(20), member="online")
        elsewhere.load(tmp_path / "saved")
        assert len(elsewhere) == len(again)
        elsewhere.clear()
        assert len(elsewhere) == 0
    elsewhere.close()


def test_a_mixture_has_states_and_batches_of_all_members():
    replay = mixed(example=nth(steps(0), (0, 0)))
    with refused("must be a dict of its members' states, got a ReplayS"):
        mixed(state=replay.state["demos"])
    replay.add(steps(0), member="online")
    replay.add(steps(0), member="demos")
    with refused("sample: a batch of this mixture has 8 items, not 4"):
        replay.sample(4)


def test_rows_of_a_folder_wait_for_an_example(tmp_path):
    buffer, rows = jr.items(capacity=4, batch_size=1), tmp_path / "rows"
    with jr.Replay(buffer, rows=rows) as replay:
        replay.add({"x": np.ones(1)})
    with (
        jr.Replay(buffer, rows=rows) as replay,
        refused("the rows that the folder has need example=", TimeoutError),
    ):
        replay.sample()
    with (
        jr.Replay(buffer) as replay,
        refused("add steps first, or wait with timeout=$", TimeoutError),
    ):
        replay.sample()

"""Minari datasets: the round trip is exact, and every sampled transition is one of the
dataset's."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("minari", reason="the minari extra is not installed")

import gymnasium
import minari
from minari.data_collector.episode_buffer import EpisodeBuffer

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets import episodes, minari as from_minari
from jaxreplay.datasets.episodes import steps_of

# Minari's recommendations for a dataset's metadata.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari.utils")

SPACE = gymnasium.spaces.Dict(
    {
        "image": gymnasium.spaces.Box(0, 255, (32, 32, 3), np.uint8),
        "goal": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64),
    }
)
ACTIONS = gymnasium.spaces.Discrete(5)
ABOUT = {
    "observation_space": SPACE,
    "action_space": ACTIONS,
    "author": "a",
    "author_email": "a@b.c",
    "code_permalink": "here",
}
ABOUT |= {"algorithm_name": "random", "description": "random"}
FORMS = pytest.mark.parametrize("form", ["next_step", "same_step"])


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def episode(number, length, end="terminations"):
    """Return T transitions and T + 1 observations, whose numbers tell episode and step."""
    names = 10_000 * number + np.arange(length + 1)
    flags = {"terminations": [False] * length, "truncations": [False] * length}
    if end and length:
        flags[end] = [False] * (length - 1) + [True]
    return EpisodeBuffer(
        observations={
            # Noise, which JPEG would change.
            "image": np.random.default_rng(number).integers(
                0, 256, (length + 1, 32, 32, 3), np.uint8
            ),
            "goal": np.stack([names, -names], axis=1).astype(np.float64),
        },
        actions=(names[:-1] % 5).astype(np.int64),
        rewards=[float(name) for name in names[:-1]],
        **flags,
    )


def made(name, episodes, **about):
    return minari.create_dataset_from_buffers(
        name, episodes, jpeg_encoding=False, data_format="hdf5", **{**ABOUT, **about}
    )


def buffer(form, capacity):
    return jr.uniform(capacity=capacity, num_envs=1, batch_size=64, autoreset=form)


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        for name in ("image", "goal"):
            np.testing.assert_array_equal(one.observations[name], other.observations[name])
        for name in ("actions", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@FORMS
def test_there_and_back(form):
    lengths = (3, 1, 700, 1, 1500, 20)
    ends = (
        "terminations",
        "truncations",
        "truncations",
        "terminations",
        "terminations",
        "truncations",
    )
    dataset = made(
        "there/one-v0",
        [
            episode(n, length, end)
            for n, (length, end) in enumerate(zip(lengths, ends, strict=True))
        ],
    )
    replay = buffer(form, datasets.required_capacity(dataset))
    state = datasets.from_minari(dataset, replay)
    assert int(state.streams.filled.sum()) == replay.capacity == sum(lengths) + len(lengths)
    assert int(replay.size(state)) == sum(lengths)
    assert state.streams.steps.obs["goal"].dtype == jnp.float32  # float64 is stored as float32
    batch = replay.sample(state, jax.random.key(0), 4096).experience
    start, end = np.asarray(batch.obs["goal"])[:, 0], np.asarray(batch.next_obs["goal"])[:, 0]
    np.testing.assert_array_equal(end - start, 1)  # same episode, true next observation
    np.testing.assert_array_equal(batch.reward, start)
    np.testing.assert_array_equal(batch.action, start % 10_000 % 5)
    number = (start // 10_000).astype(int)
    is_last = end % 10_000 == np.asarray(lengths)[number]
    np.testing.assert_array_equal(
        batch.discount == 0, is_last & (np.asarray(ends)[number] == "terminations")
    )
    assert set(number.tolist()) >= {0, 2, 4, 5}
    back = datasets.to_minari(replay, state, "back/one-v0", data_format="hdf5", **ABOUT)
    assert_equal(list(minari.load_dataset("back/one-v0")), list(dataset))
    assert back.total_steps == dataset.total_steps


@FORMS
def test_ends_in_the_middle_and_none_at_the_end(form):
    """A done within an episode begins another one; an episode that stops without one is
    truncated."""
    first, second = episode(1, 9, None), episode(2, 5, None)
    first.terminations[3] = first.truncations[6] = True
    dataset = made("middle/one-v0", [first, second])
    replay = buffer(form, 9 + 5 + 4)
    state = datasets.from_minari(dataset, replay)
    back = list(datasets.to_minari(replay, state, "middle/two-v0", data_format="hdf5", **ABOUT))
    assert [len(one) for one in back] == [4, 3, 2, 5]
    assert [bool(one.terminations[-1]) for one in back] == [True, False, False, False]
    assert [int(one.observations["goal"][0, 0]) for one in back] == [10_000, 10_004, 10_007, 20_000]
    assert [int(one.observations["goal"][-1, 0]) for one in back] == [
        10_004,
        10_007,
        10_009,
        20_005,
    ]


def test_what_is_stored_of_an_episode():
    """Three episodes in a ring that has wrapped: the first has lost its beginning, the last
    continues."""
    replay = jr.uniform(capacity=2 * 10, num_envs=2, batch_size=4, autoreset="next_step")
    space = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float32)
    about = {**ABOUT, "observation_space": space, "action_space": space, "data_format": "hdf5"}
    done = jnp.zeros((13, 2), bool).at[5].set(True)
    time = jnp.arange(13.0)[:, None] + jnp.array([0.0, 100.0])
    step = jr.Step(time, time, time, terminated=done, truncated=jnp.zeros((13, 2), bool))
    state = replay.extend(replay.init(jax.tree.map(lambda leaf: leaf[0, 0], step)), step)
    with pytest.raises(ValueError, match="to_minari: there is no intact episode in the buffer"):
        datasets.to_minari(replay, state, "parts/one-v0", **about)
    back = list(datasets.to_minari(replay, state, "parts/one-v0", include_partial=True, **about))
    assert [one.observations.tolist() for one in back] == [
        [offset + t for t in times]
        for offset in (0, 100)
        for times in ((3, 4, 5, 6), (7, 8, 9, 10, 11, 12))
    ]
    assert [one.truncations[-1] for one in back] == [False, True] * 2
    assert [one.terminations[-1] for one in back] == [True, False] * 2


def test_a_final_observation_that_nobody_has():
    """Same-step autoreset without `final_obs`: a truncated row becomes the final row itself; after
    a termination the last observation is repeated."""
    replay = buffer("same_step_no_final_obs", 32)
    space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    terminated, truncated = np.zeros((2, 12), bool)
    terminated[3] = truncated[8] = truncated[9] = True
    obs = jnp.arange(24.0, dtype=jnp.bfloat16).reshape(12, 1, 2)
    step = jr.Step(
        obs,
        obs,
        jnp.arange(12.0)[:, None],
        terminated=terminated[:, None],
        truncated=truncated[:, None],
    )
    state = replay.extend(
        replay.init(jax.tree.map(lambda leaf: jnp.asarray(leaf)[0, 0], step)), step
    )
    about = {**ABOUT, "observation_space": space, "action_space": space, "data_format": "hdf5"}
    back = list(datasets.to_minari(replay, state, "final/one-v0", **about))
    assert [one.observations[:, 0].tolist() for one in back] == [
        [0, 2, 4, 6, 6],
        [8, 10, 12, 14, 16],
    ]
    assert [one.rewards.tolist() for one in back] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [(bool(one.terminations[-1]), bool(one.truncations[-1])) for one in back] == [
        (True, False),
        (False, True),
    ]


def test_any_tree_of_observations():
    """A tuple of spaces, discrete ones too; rewards of shape [T, 1]."""
    space = gymnasium.spaces.Tuple(
        (
            gymnasium.spaces.Discrete(9),
            gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-1, 1, (2,))}),
        )
    )
    observations = (np.arange(6) % 9, {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2)})
    one = EpisodeBuffer(
        observations=observations,
        actions=np.arange(5),
        rewards=list(range(5)),
        terminations=[False] * 4 + [True],
        truncations=[False] * 5,
    )
    dataset = made("tuple/one-v0", [one, one], observation_space=space)
    replay = buffer("next_step", 12)
    state = datasets.from_minari(dataset, replay)
    back = datasets.to_minari(
        replay, state, "tuple/two-v0", data_format="hdf5", **{**ABOUT, "observation_space": space}
    )
    for episode in back:
        assert episode.observations[0].tolist() == observations[0].tolist()
        np.testing.assert_array_equal(episode.observations[1]["x"], observations[1]["x"])
        assert episode.rewards.tolist() == list(range(5))
    wide = dataclasses.replace(next(iter(dataset)), rewards=np.arange(5.0)[:, None])
    for form in ("next_step", "same_step"):
        steps = steps_of("from_minari", wide, form)
        assert steps.reward.shape == (len(steps.terminated), 1)
    with pytest.raises(
        ValueError, match=r"episode 0: observations.0: expected 6 numbers or arrays, got <U1\[6\]"
    ):
        steps_of(
            "from_minari",
            dataclasses.replace(wide, observations=(list("abcdef"), observations[1])),
            "next_step",
        )


def test_an_end_whose_tail_is_still_to_come():
    """The newest row is a terminated step: its transition is intact, except for the next
    observation, which no target reads."""
    replay = buffer("next_step", 8)
    space = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float32)
    time = jnp.arange(3.0)[:, None]
    step = jr.Step(
        time,
        time,
        time,
        terminated=jnp.asarray([[False], [False], [True]]),
        truncated=jnp.zeros((3, 1), bool),
    )
    state = replay.extend(replay.init(jax.tree.map(lambda leaf: leaf[0, 0], step)), step)
    about = {**ABOUT, "observation_space": space, "action_space": space, "data_format": "hdf5"}
    (one,) = datasets.to_minari(replay, state, "owed/one-v0", include_partial=True, **about)
    assert (one.observations.tolist(), one.rewards.tolist()) == ([0, 1, 2, 2], [0, 1, 2])
    assert (one.terminations.tolist(), one.truncations.any()) == ([False, False, True], False)


def test_an_example_decides_the_dtypes():
    dataset = made("example/one-v0", [episode(0, 4)])
    goal = jax.ShapeDtypeStruct((2,), jnp.float16)
    example = jr.Step(
        {"image": jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8), "goal": goal},
        jnp.uint8(0),
        jnp.float32(0),
        terminated=jnp.bool_(0),
        truncated=jnp.bool_(0),
    )
    replay = buffer("next_step", 8)
    state = datasets.from_minari(dataset, replay, example)
    assert state.streams.steps.obs["goal"].dtype == jnp.float16
    assert state.streams.steps.action.dtype == jnp.uint8
    large, many = made("example/large-v0", [episode(100, 4)]), episode(0, 4)
    many.actions[:] = 200
    wide = made("example/wide-v0", [many], action_space=gymnasium.spaces.Discrete(300))
    wrong = {
        r"obs.goal: .* cannot be stored as float16, the example's dtype": (large, example),
        "action: got": (dataset, example.replace(action=jnp.bool_(0))),
        "action: 200 cannot be stored as int8": (wide, example.replace(action=jnp.int8(0))),
    }
    for text, (source, other) in wrong.items():
        with pytest.raises(ValueError, match=text):
            datasets.from_minari(source, replay, other)


def test_bad_input_is_refused():
    dataset = made("bad/one-v0", [episode(0, 4), episode(1, 3)])
    for capacity, text in (
        (6, r"; required_capacity\(dataset\) is 9"),
        (8, ": episode 1 ends in row 9"),
    ):
        with pytest.raises(ValueError, match=f"capacity={capacity} is too small{text}"):
            datasets.from_minari(dataset, buffer("next_step", capacity))
    assert (
        int(buffer("same_step", 9).size(datasets.from_minari(dataset, buffer("same_step", 9)))) == 7
    )
    without = buffer("same_step_no_final_obs", 7)  # drops the last step of each truncated episode
    assert int(without.size(datasets.from_minari(dataset, without))) == 7
    for replay in (
        jr.items(capacity=16, batch_size=2),
        jr.uniform(capacity=16, num_envs=2, batch_size=2, autoreset="next_step"),
        3,
    ):
        with pytest.raises(
            ValueError, match="from_minari: buffer must be a ReplayBuffer of steps with num_envs=1"
        ):
            datasets.from_minari(dataset, replay)
    items = jr.items(capacity=16, batch_size=2)
    with pytest.raises(ValueError, match="to_minari: buffer must be a ReplayBuffer of steps"):
        datasets.to_minari(items, items.init(0.0), "bad/two-v0", **ABOUT)
    replay = buffer("next_step", 16)
    state = datasets.from_minari(dataset, replay)
    with pytest.raises(ValueError, match="there is no transition in the buffer"):
        datasets.to_minari(replay, replay.clear(state), "bad/two-v0", include_partial=True, **ABOUT)
    with pytest.raises(ValueError, match="from_minari: the dataset has no transitions"):
        datasets.from_minari(dataset.filter_episodes(lambda _: False), replay)
    assert "bad/two-v0" not in minari.list_local_datasets()


def test_a_write_that_fails_leaves_no_half_dataset(monkeypatch, tmp_path):
    dataset = made("half/one-v0", [episode(0, 4), episode(1, 3)])
    replay = buffer("next_step", 16)
    state = datasets.from_minari(dataset, replay)

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(minari.MinariDataset, "update_dataset_from_buffer", fails)
    monkeypatch.setattr(from_minari, "_MOST_BYTES", 1)
    with pytest.raises(OSError, match="no space left"):
        datasets.to_minari(replay, state, "half/two-v0", data_format="hdf5", **ABOUT)
    assert "half/two-v0" not in minari.list_local_datasets()
    with pytest.raises(ValueError, match="observation space and action space must be provided"):
        datasets.to_minari(replay, state, "half/two-v0", data_format="hdf5")
    monkeypatch.undo()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(from_minari, "_MOST_BYTES", 1)  # one episode at a time
    assert_equal(
        list(datasets.to_minari(replay, state, "half/two-v0", data_format="hdf5", **ABOUT)),
        list(dataset),
    )
    with pytest.raises(
        ValueError, match="to_minari: pass another dataset_id, since half/two-v0 exists"
    ):
        datasets.to_minari(replay, state, "half/two-v0", data_format="hdf5", **ABOUT)
    assert len(minari.load_dataset("half/two-v0")) == 2


def test_one_episode_at_a_time_is_in_memory(monkeypatch):
    """The steps that wait to be added are fewer than a block and an episode together."""
    dataset = made("stream/one-v0", [episode(n, 400) for n in range(8)])
    waiting, extended = [], episodes._extended

    def watched(replay, state, steps, size):
        waiting.append(sum(len(step.reward) for step in steps))
        return extended(replay, state, steps, size)

    monkeypatch.setattr(episodes, "_extended", watched)
    datasets.from_minari(dataset, buffer("next_step", datasets.required_capacity(dataset)))
    assert len(waiting) >= 3
    assert max(waiting) < 1024 + 401


@pytest.mark.parametrize("name", ["minari", "tqdm"])
def test_without_the_extra_the_error_says_which(name):
    code = (
        f"import sys; sys.modules[{name!r}] = None; import jaxreplay.datasets as d; d.from_minari"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"jaxreplay.datasets needs {name}: pip install 'jaxreplay[minari]'" in done.stderr

"""Minari datasets: the round trip is exact, and every sampled transition is one of the
dataset's."""

import dataclasses
import pathlib
import runpy
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("minari", reason="Minari is not installed")

import minari
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from minari.data_collector.episode_buffer import EpisodeBuffer

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets.episodes import rows_of, steps_of
from tests.support.buffers import everything, jitted

# Minari's recommendations for a dataset's metadata.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari.utils")

RECIPES = pathlib.Path(__file__).parent.parent / "examples" / "datasets.py"
IMAGE = (32, 32, 3)
GOAL = Box(-np.inf, np.inf, (2,), np.float64)
ABOUT = {
    "data_format": "hdf5",
    "observation_space": Dict({"image": Box(0, 255, IMAGE, np.uint8), "goal": GOAL}),
    "action_space": Discrete(5),
    **dict.fromkeys(("author", "code_permalink", "algorithm_name", "description"), "a"),
    "author_email": "a@b.c",
}
END, CUT = "terminations", "truncations"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def episode(number, length, end=END):
    """Return T transitions and T + 1 observations, whose numbers tell episode and step."""
    names = 10_000 * number + np.arange(length + 1)
    flags = {name: [False] * (length - 1) + [name == end] for name in (END, CUT)}
    # Noise, which JPEG would change.
    image = np.random.default_rng(number).integers(0, 256, (length + 1, *IMAGE), np.uint8)
    return EpisodeBuffer(
        observations={"image": image, "goal": np.stack([names, -names], axis=1).astype(float)},
        actions=names[:-1] % 5,
        rewards=names[:-1].astype(float).tolist(),
        **flags,
    )


def made(name, episodes, **about):
    return minari.create_dataset_from_buffers(
        name, episodes, jpeg_encoding=False, **{**ABOUT, **about}
    )


def buffer(form, capacity, num_envs=1):
    return jr.uniform(capacity=capacity, num_envs=num_envs, batch_size=64, autoreset=form)


def exported(replay, state, name, **options):
    """Return the episodes of the Minari dataset that a state becomes, by the recipe."""
    to_minari = runpy.run_path(str(RECIPES))["to_minari"]
    return list(to_minari(replay, state, name, **{**ABOUT, **options}))


def assert_equal(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        for name in ("observations", "actions", "rewards", END, CUT):
            jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("form", ["next_step", "same_step"])
def test_there_and_back(form):
    lengths, ends = (3, 1, 300, 1, 1200, 25), (END, CUT, CUT, END, END, CUT)
    dataset = made("there/one-v0", [*map(episode, range(6), lengths, ends)])
    replay = buffer(form, datasets.required_capacity(dataset))
    state = datasets.from_episodes(dataset, replay)
    assert int(state.filled.sum()) == replay.capacity == sum(lengths) + len(lengths)
    assert state.rows.steps.obs["goal"].dtype == np.float32  # float64 is stored as float32
    every = jax.device_get(everything(replay)(state, 0))
    assert every.is_valid.sum() == sum(lengths)
    batch = jax.tree.map(lambda leaf: leaf[every.is_valid], every.experience)
    start, after = (obs["goal"][:, 0] for obs in (batch.obs, batch.next_obs))
    np.testing.assert_array_equal(after - start, 1)  # same episode, true next observation
    np.testing.assert_array_equal(batch.reward, start)
    np.testing.assert_array_equal(batch.action, start % 10_000 % 5)
    back = exported(replay, state, "back/one-v0")
    assert_equal(back, list(dataset))
    assert_equal(list(minari.load_dataset("back/one-v0")), back)


@pytest.mark.parametrize(
    "form", ["next_step", pytest.param("same_step", marks=pytest.mark.thorough)]
)
def test_ends_in_the_middle_and_none_at_the_end(form):
    """A done within an episode begins another one; an episode that stops without one is
    truncated."""
    first, second = episode(1, 9, None), episode(2, 5, None)
    first.terminations[3] = first.truncations[6] = True
    replay = buffer(form, 9 + 5 + 4)
    state = datasets.from_episodes(made("middle/one-v0", [first, second]), replay)
    assert [
        (*one.observations["goal"][[0, -1], 0].tolist(), len(one), bool(one.terminations[-1]))
        for one in exported(replay, state, "middle/two-v0")
    ] == [
        (10_000, 10_004, 4, True),
        (10_004, 10_007, 3, False),
        (10_007, 10_009, 2, False),
        (20_000, 20_005, 5, False),
    ]


def numbers_of(replay, obs, terminated=(), truncated=(), **options):
    """Return the observations of each episode, and how it ends, that a state becomes after steps
    [T, E] of numbers, with ends at some times."""
    ends = np.zeros((2, *obs.shape), bool)
    ends[0, [*terminated]] = ends[1, [*truncated]] = True
    steps = jr.Step(obs, obs, obs.astype(np.float32), terminated=ends[0], truncated=ends[1])
    example = jax.tree.map(lambda leaf: leaf[0, 0], steps)
    state = jitted(replay, "extend")(replay.init(example), steps)
    found = [*datasets.to_episodes(replay, state, **options)]
    for one in found:
        assert one.rewards.tolist() == one.actions.tolist() == one.observations[:-1].tolist()
        assert bool(one.terminations[-1]) != bool(one.truncations[-1])
    return [(one.observations.tolist(), bool(one.terminations[-1])) for one in found]


def test_what_is_stored_of_an_episode():
    """Three episodes in a ring that has wrapped: the first has lost its beginning, the last
    continues."""
    replay = buffer("next_step", 2 * 10, num_envs=2)
    time = np.arange(13, dtype=np.float32)[:, None] + np.float32([0, 100])
    assert not numbers_of(replay, time, [5])
    assert numbers_of(replay, time, [5], include_partial=True) == [
        ([3, 4, 5, 6], True),
        ([7, 8, 9, 10, 11, 12], False),
        ([103, 104, 105, 106], True),
        ([107, 108, 109, 110, 111, 112], False),
    ]


def test_a_final_observation_that_nobody_has():
    """Same-step autoreset without `final_obs`: a truncated row becomes the final row itself; after
    a termination the last observation is repeated, also if its final row is still to come."""
    obs = np.arange(12).astype(ml_dtypes.bfloat16)[:, None]
    assert numbers_of(buffer("same_step_no_final_obs", 32), obs, [3], [8, 9]) == [
        ([0, 1, 2, 3, 3], True),
        ([4, 5, 6, 7, 8], False),
    ]
    newest = np.arange(3, dtype=np.float32)[:, None]
    found = numbers_of(buffer("next_step", 8), newest, [2], include_partial=True)
    assert found == [([0, 1, 2, 2], True)]


def test_any_tree_of_observations():
    """A tuple of spaces, discrete ones too; rewards of shape [T, 1]."""
    space = Tuple((Discrete(9), Dict({"x": Box(-1, 1, (2,))})))
    numbers = np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2)
    one = dataclasses.replace(episode(0, 5), observations=(np.arange(6), {"x": numbers}))
    dataset = made("tuple/one-v0", [one, one], observation_space=space)
    replay = buffer("next_step", 12)
    state = datasets.from_episodes(dataset, replay)
    assert_equal(exported(replay, state, "tuple/two-v0", observation_space=space), list(dataset))
    wide = dataclasses.replace(next(iter(dataset)), rewards=np.arange(5.0)[:, None])
    for form in ("next_step", "same_step"):
        ((steps, _),) = steps_of([rows_of("", wide)], form)
        assert steps.reward.shape == (len(steps.terminated), 1)
    wrong = dataclasses.replace(wide, observations=(list("abcdef"), numbers))
    message = r"episode 0: observations.0: expected 6 numbers or arrays, got <U1\[6\]"
    with pytest.raises(ValueError, match=message):
        rows_of("from_episodes", wrong)


def test_an_example_decides_the_dtypes():
    dataset = made("example/one-v0", [episode(0, 4)])
    example = jr.Step(
        {"image": np.zeros(IMAGE, np.uint8), "goal": jax.ShapeDtypeStruct((2,), np.float16)},
        np.uint8(0),
        np.float32(0),
        terminated=np.bool_(0),
        truncated=np.bool_(0),
    )
    replay = buffer("next_step", 8)
    steps = datasets.from_episodes(dataset, replay, example).rows.steps
    assert (steps.obs["goal"].dtype, steps.action.dtype) == (np.float16, np.uint8)
    many = episode(0, 4)
    many.actions[:] = 200
    wide = made("example/wide-v0", [many], action_space=Discrete(300))
    for message, source, other in (
        (
            r"obs.goal: .* cannot be stored as float16, the example's dtype",
            made("example/large-v0", [episode(100, 4)]),
            example,
        ),
        ("action: got", dataset, example.replace(action=np.bool_(0))),
        ("action: 200 cannot be stored as int8", wide, example.replace(action=np.int8(0))),
    ):
        with pytest.raises(ValueError, match=message):
            datasets.from_episodes(source, replay, other)


def test_bad_input_is_refused():
    dataset = made("bad/one-v0", [episode(0, 4), episode(1, 3)])
    # without final observations, the last step of each truncated episode is dropped
    for form, capacity in (("same_step", 9), ("same_step_no_final_obs", 7)):
        replay = buffer(form, capacity)
        assert jitted(replay, "size")(datasets.from_episodes(dataset, replay)) == 7
    items, replay = jr.items(capacity=16, batch_size=2), buffer("next_step", 16)
    no_steps = "buffer must be a ReplayBuffer of steps, since a dataset has episodes"
    too_small = "capacity={} is too small{}".format
    for message, other in (
        (too_small(8, ": episode 1 reaches row 9"), buffer("next_step", 8)),
        (no_steps, items),
        (no_steps, 3),
    ):
        with pytest.raises(ValueError, match=f"from_episodes: {message}"):
            datasets.from_episodes(dataset, other)
    with pytest.raises(ValueError, match="from_episodes: there is no transition"):
        datasets.from_episodes(dataset.filter_episodes(lambda _: False), replay)
    with pytest.raises(ValueError, match="to_episodes: buffer must be a ReplayBuffer of steps"):
        datasets.to_episodes(items, items.init(0.0))
    with pytest.raises(ValueError, match="to_episodes: the state belongs to another buffer"):
        datasets.to_episodes(buffer("next_step", 8), datasets.from_episodes(dataset, replay))


def test_without_the_extra_the_error_says_which(monkeypatch):
    replay = buffer("next_step", 16)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="from_episodes: a progress bar needs tqdm"):
        datasets.from_episodes([episode(0, 4)], replay, progress=True)


def test_its_file_is_a_file_by_episode(capsys, tmp_path):
    """Minari's HDF5 has a group for each episode."""
    import h5py

    dataset = made("file/one-v0", [*map(episode, range(12), [3, 1, 5] * 4, [END, CUT] * 6)])
    replay = buffer("next_step", datasets.required_capacity(dataset))
    wanted = datasets.from_episodes(dataset, replay, progress=False)
    assert not capsys.readouterr().err
    with h5py.File(tmp_path / "file/one-v0/data/main_data.hdf5") as file:
        got = datasets.from_arrays(file, replay, progress=True)
    assert "from_arrays: 48.0row" in capsys.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_extras_go_there_and_back():
    replay = buffer("same_step", 32, num_envs=2)
    flags = np.zeros(4, bool)
    number = np.arange(5, dtype=np.float32)
    extras = {"log_prob": number[:4] / 8, "grid": np.arange(8).reshape(4, 2)}
    given = [datasets.Episode(number, number[:4], number[:4], flags, flags, extras=extras)] * 3
    found = [*datasets.to_episodes(replay, datasets.from_episodes(given, replay))]
    assert [one.id for one in found] == [0, 1, 2]
    for one in found:
        jax.tree.map(np.testing.assert_array_equal, one.extras, extras)
        assert one.truncations.tolist() == [False, False, False, True]
    short = given[0]._replace(extras={"x": number[:3]})
    with pytest.raises(ValueError, match=r"episode : extras\.x: expected 4 numbers or arrays"):
        datasets.from_episodes([short], replay)

"""Episodes of Minari and of a buffer: the round trip is exact."""

import dataclasses
import pathlib
import runpy
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("minari", reason="Minari is not installed")

import h5py
import minari
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from minari.data_collector.episode_buffer import EpisodeBuffer

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets.episodes import rows_of, steps_of
from tests.support.buffers import everything
from tests.support.refusals import refused
from tests.support.sampling import assert_same, begin
from tests.support.steps import nth, plain_step

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
    options = {"jpeg_encoding": False, **ABOUT, **about}
    return minari.create_dataset_from_buffers(name, episodes, **options)


def buffer(form, capacity, num_envs=1):
    return jr.uniform(capacity=capacity, num_envs=num_envs, batch_size=64, autoreset=form)


def exported(replay, state, name, **options):
    """Return the episodes of the Minari dataset that a state becomes, by the recipe."""
    to_minari = runpy.run_path(str(RECIPES))["to_minari"]
    return list(to_minari(replay, state, name, **{**ABOUT, **options}))


def assert_equal(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        for name in ("observations", "actions", "rewards", END, CUT):
            assert_same(getattr(one, name), getattr(other, name))


def test_there_and_back(capsys, tmp_path):
    """Also by its file, which has a group for each episode."""
    episodes = [*map(episode, range(12), [3, 1, 5] * 4, [END, CUT] * 6)]
    dataset = made("there/one-v0", episodes)
    replay = buffer("next_step", datasets.required_capacity(dataset))
    state = datasets.from_episodes(dataset, replay, progress=False)
    assert not capsys.readouterr().err
    with h5py.File(tmp_path / "there/one-v0/data/main_data.hdf5") as file:
        other = datasets.from_arrays(file, replay, progress=True)
    assert "from_arrays: 48.0row" in capsys.readouterr().err
    assert_same(other, state)
    assert int(state.filled.sum()) == replay.capacity == 48
    assert state.rows.steps.obs["goal"].dtype == np.float32  # float64 is stored as float32
    every = jax.device_get(everything(replay)(state, 0))
    assert every.is_valid.sum() == 36
    batch = nth(every.experience, every.is_valid)
    start, after = (obs["goal"][:, 0] for obs in (batch.obs, batch.next_obs))
    np.testing.assert_array_equal(after - start, 1)  # same episode, true next observation
    np.testing.assert_array_equal(batch.reward, start)
    np.testing.assert_array_equal(batch.action, start % 10_000 % 5)
    back = exported(replay, state, "back/one-v0")
    assert_equal(back, list(dataset))
    assert_equal(list(minari.load_dataset("back/one-v0")), back)


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
    with refused(message):
        rows_of("from_episodes", wrong)


def numbers_of(replay, obs, terminated=(), truncated=(), **options):
    """Return the observations of each episode, and how it ends, that a state becomes after steps
    [T, E] of numbers, with ends at some times."""
    ends = np.zeros((2, *obs.shape), bool)
    ends[0, [*terminated]] = ends[1, [*truncated]] = True
    steps = jr.Step(obs, obs, obs.astype(np.float32), terminated=ends[0], truncated=ends[1])
    state = begin(replay, steps)
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
        (list(range(start, stop)), is_terminated)
        for env in (0, 100)
        for start, stop, is_terminated in ((env + 3, env + 7, True), (env + 7, env + 13, False))
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


def test_an_example_decides_the_dtypes():
    goal = jax.ShapeDtypeStruct((2,), np.float16)
    flags = {"terminated": np.False_, "truncated": np.False_}
    obs = {"image": np.zeros(IMAGE, np.uint8), "goal": goal}
    example, replay = jr.Step(obs, np.uint8(0), np.float32(0), **flags), buffer("next_step", 8)
    steps = datasets.from_episodes([episode(0, 4)], replay, example).rows.steps
    assert (steps.obs["goal"].dtype, steps.action.dtype) == (np.float16, np.uint8)
    many = dataclasses.replace(episode(0, 4), actions=np.full(4, 200))
    for message, one, other in (
        ("obs.goal: .* cannot be stored as float16, the example's dtype", episode(100, 4), example),
        ("action: got", episode(0, 4), example.replace(action=np.bool_(0))),
        ("action: 200 cannot be stored as int8", many, example.replace(action=np.int8(0))),
    ):
        with refused(message):
            datasets.from_episodes([one], replay, other)


def test_bad_input_is_refused(monkeypatch):
    items, replay = jr.items(capacity=16, batch_size=2), buffer("next_step", 16)
    for message, other in (
        ("takes a buffer of steps", items),
        ("the state belongs to another buffer", buffer("next_step", 8)),
    ):
        with refused(f"to_episodes: {message}"):
            datasets.to_episodes(other, jax.eval_shape(replay.init, plain_step(np.float32(0))))
    empty = made("bad/one-v0", [episode(0, 4)]).filter_episodes(lambda _: False)
    with refused("from_episodes: there is no transition"):
        datasets.from_episodes(empty, replay)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with refused("from_episodes: a progress bar needs tqdm", ImportError):
        datasets.from_episodes([episode(0, 4)], replay, progress=True)

"""Data that other libraries wrote, beside what they read of it: `make datasets` has them, and `make
matrix` LeRobot."""

import importlib.util
import os
import pathlib
import runpy
import types

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from tests.support.buffers import everything
from tests.support.steps import nth

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of the libraries

RECIPES = pathlib.Path(__file__).parent.parent / "examples" / "datasets.py"


@pytest.fixture
def recipes():
    return types.SimpleNamespace(**runpy.run_path(str(RECIPES)))


def rows_of(replay, state):
    """Return the items of all valid rows."""
    batch = jax.device_get(everything(replay)(state, 0))
    return [nth(batch.experience, which) for which in np.flatnonzero(batch.is_valid)]


LENGTHS = (7, 4, 2, 9)  # LeRobot cannot join a video of one frame


def write_lerobot(root):
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    feature = lambda kind, *shape, names=None: {"dtype": kind, "shape": shape, "names": names}
    sides = ["height", "width", "channels"]
    features = {
        "observation.state": feature("float32", 3),
        "observation.images.top": feature("video", 64, 96, 3, names=sides),
        "observation.images.wrist": feature("image", 32, 48, 3, names=sides),
        "action": feature("float32", 2),
        "next.reward": feature("float32", 1),
        "next.done": feature("bool", 1),
    }
    h264 = RGBEncoderConfig(vcodec="h264")
    dataset = LeRobotDataset.create("a/b", 10, features, root=root, rgb_encoder=h264)
    r = np.random.default_rng(0)
    for index, length in enumerate(LENGTHS):
        for frame in range(length):
            top = np.full((64, 96, 3), 40 * index, np.uint8)
            top[..., 0] = 25 * frame
            dataset.add_frame(
                {
                    "observation.state": r.random(3).astype(np.float32),
                    "observation.images.top": top,
                    "observation.images.wrist": r.integers(0, 256, (32, 48, 3)).astype(np.uint8),
                    "action": np.float32([index, frame]),
                    "next.reward": np.float32([frame]),
                    "next.done": np.array([frame == length - 1]),
                    "task": f"task {index % 2}",
                }
            )
        dataset.save_episode()
    dataset.finalize()


@pytest.mark.parametrize("episodes", [None, [3, 0]])
def test_chunks_are_those_of_lerobots_own_loader(monkeypatch, tmp_path, episodes):
    """Images and frames of videos, histories, chunks of actions, and what is padded."""
    if importlib.util.find_spec("lerobot") is None:
        pytest.skip("make matrix has it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    write_lerobot(tmp_path / "d")
    tenths = lambda *offsets: [offset / 10 for offset in offsets]
    top, wrist = "observation.images.top", "observation.images.wrist"
    deltas = {"action": tenths(0, 1, 2, 3)}
    deltas |= dict.fromkeys(("observation.state", top, wrist), tenths(-1, 0))
    theirs = LeRobotDataset(
        "a/b", tmp_path / "d", episodes=episodes, delta_timestamps=deltas, video_backend="pyav"
    )
    source = datasets.open_lerobot(tmp_path / "d", episodes=episodes)
    assert source.total_steps == len(theirs)
    replay = jr.chunks(
        capacity=64,
        num_envs=2,
        batch_size=4,
        obs=(-1, 0),
        action=4,
        autoreset="same_step_no_final_obs",
    )
    names = {"extras": {"task": "task_index", "time": "timestamp", "which": "index"}}
    state = datasets.from_arrays(source, replay, names=names)
    ours = {int(item.extras["which"]): item for item in rows_of(replay, state)}
    assert len(ours) == len(theirs)
    for one in (theirs[number] for number in range(len(theirs))):
        item = ours[int(one["index"])]
        np.testing.assert_array_equal(item.obs["state"], one["observation.state"])
        np.testing.assert_array_equal(item.action, one["action"])
        np.testing.assert_array_equal(item.obs_is_pad, one["observation.state_is_pad"])
        np.testing.assert_array_equal(item.action_is_pad, one["action_is_pad"])
        for name in (top, wrist):  # theirs are [C, H, W] of 0 to 1
            image = item.obs[name.removeprefix("observation.")].transpose(0, 3, 1, 2)
            np.testing.assert_allclose(image / 255, one[name], atol=1e-6)
        assert source.tasks[int(item.extras["task"])] == one["task"]
        assert float(item.extras["time"]) == float(one["timestamp"])


def test_episodes_of_rlds(recipes, tmp_path):
    """As of Open X-Embodiment, without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="make datasets has it")
    tensor = lambda shape, dtype: tfds.features.Tensor(shape=shape, dtype=dtype)
    scalar = lambda dtype: tfds.features.Scalar(dtype=dtype)
    observation = {"image": tensor((8, 8, 3), np.uint8), "state": tensor((2,), np.float32)}
    observation["text"] = tfds.features.Text()
    step = {"observation": tfds.features.FeaturesDict(observation)}
    step |= {"action": tensor((2,), np.float32), "reward": scalar(np.float32)}
    step |= {name: scalar(np.bool_) for name in ("is_first", "is_last", "is_terminal")}

    class Toy(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step)})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, _):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for index, length in enumerate((4, 2, 6)):
                yield index, {"steps": [made(index, at, length) for at in range(length)]}

    def made(index, at, length):
        number, is_last = 10 * index + at, at == length - 1
        seen = {"image": np.full((8, 8, 3), number, np.uint8), "text": "lift it"}
        seen["state"] = np.full(2, number, np.float32)
        taken = {"action": np.full(2, number, np.float32), "reward": float(number)}
        flags = {"is_first": at == 0, "is_last": is_last, "is_terminal": is_last and index == 2}
        return {"observation": seen, **taken, **flags}

    builder = Toy(data_dir=os.fspath(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    replay = jr.uniform(capacity=32, num_envs=2, batch_size=4, gamma=0.5, autoreset="same_step")
    source = builder.as_data_source(split="train")
    state = datasets.from_episodes(recipes.open_x(source, ("image", "state")), replay)
    found = {
        (
            int(item.obs["state"][0]),
            float(item.reward),
            float(item.discount),
            int(item.next_obs["image"][0, 0, 0]),
        )
        for item in rows_of(replay, state)
    }
    ends = {(24, 24.0, 0.0, 25)}
    numbers = [0, 1, 2, 10, 20, 21, 22, 23]
    assert {one for one in found if one[2]} == {(x, float(x), 0.5, x + 1) for x in numbers}
    assert {one[:3] for one in found if not one[2]} == {one[:3] for one in ends}


def test_a_file_of_ogbench(recipes, tmp_path):
    """Beside the transitions of its own loader."""
    utils = pytest.importorskip("ogbench.utils", reason="make datasets has it")
    r = np.random.default_rng(0)
    ends = np.isin(np.arange(60), (9, 30, 44, 59))
    rows = {"observations": r.random((60, 3), np.float32), "actions": r.random((60, 2), np.float32)}
    np.savez_compressed(tmp_path / "a.npz", **rows, terminals=ends, qpos=r.random((60, 4)))
    theirs = utils.load_dataset(tmp_path / "a.npz")
    replay = jr.uniform(capacity=128, num_envs=2, batch_size=4, autoreset="next_step")
    ours = rows_of(replay, recipes.ogbench(tmp_path / "a.npz", replay))
    key = lambda parts: tuple(np.concatenate(parts).tolist())
    assert {key((item.obs, item.action, item.next_obs)) for item in ours} == {
        *map(
            key,
            zip(
                *(theirs[name] for name in ("observations", "actions", "next_observations")),
                strict=True,
            ),
        )
    }


def test_a_zarr_group_of_a_diffusion_policy(recipes, tmp_path):
    zarr = pytest.importorskip("zarr", reason="make datasets has it")
    group, number = zarr.open_group(tmp_path / "a.zarr", mode="w"), np.arange(20, dtype=np.float32)
    data, meta = group.create_group("data"), group.create_group("meta")
    for name, values in (("img", np.zeros((20, 4, 4, 3), np.uint8)), ("state", number)):
        data.create_array(name, data=values, chunks=(6, *values.shape[1:]))
    data.create_array("action", data=-number)
    meta.create_array("episode_ends", data=np.array([7, 20]))
    replay = jr.uniform(capacity=32, batch_size=4, autoreset="same_step")
    state = recipes.diffusion_policy(zarr.open(tmp_path / "a.zarr", mode="r"), replay)
    found = [*datasets.to_episodes(replay, state)]
    states = [one.observations["state"].tolist() for one in found]
    assert states == [[*range(7)], [*range(7, 20)]]
    assert [-one.actions for one in found][1].tolist() == [*range(7, 19)]


def test_an_hdf5_file_of_robomimic(recipes, tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for index, length in enumerate((3, 5)):
            number = np.arange(length, dtype=np.float32) + 10 * index
            demo = file.create_group(f"data/demo_{index}")
            demo["obs/eef"], demo["next_obs/eef"] = number, number + 1
            demo["actions"], demo["rewards"] = number, number
            demo["dones"] = np.arange(length) == length - 1
        file["mask/train"] = np.array([b"demo_0"])
        replay = jr.uniform(capacity=32, batch_size=4, autoreset="next_step")
        found = [*datasets.to_episodes(replay, recipes.robomimic(file, replay))]
    states = [one.observations["eef"].tolist() for one in found]
    assert states == [[0, 1, 2, 3], [10, 11, 12, 13, 14, 15]]
    assert all(one.terminations[-1] for one in found)


def test_a_vault_of_flashbax(recipes, tmp_path):
    """Two envs, of which each has a stream of its own. The vault ends within an episode."""
    vault = pytest.importorskip("flashbax.vault", reason="make datasets has it")
    from flashbax.buffers.trajectory_buffer import TrajectoryBufferState

    number = np.arange(8, dtype=np.float32) + np.float32([[0], [100]])
    ends = np.isin(number, (2, 104))
    rows = {"observations": {"a": number}, "actions": number, "rewards": number}
    rows |= {"terminals": np.repeat(ends[..., None], 2, axis=2), "info": {"cut": number == 5}}
    rows = jax.tree.map(jax.numpy.asarray, rows)
    count, is_full = jax.numpy.int32(7), jax.numpy.bool_(False)
    state = TrajectoryBufferState(experience=rows, current_index=count, is_full=is_full)
    vault.Vault("mine", rows, rel_dir=os.fspath(tmp_path), vault_uid="a").write(state)
    replay = jr.uniform(capacity=32, batch_size=4, autoreset="next_step")
    state = recipes.vault(tmp_path / "mine" / "a", replay, {"truncated": "info/cut"})
    found = [*datasets.to_episodes(replay, state)]
    # a termination needs no final observation; of other ends the last row is taken for it
    assert [one.observations["a"].tolist() for one in found] == [
        [0, 1, 2, 2],
        [3, 4, 5],
        [100, 101, 102, 103, 104, 104],
        [105, 106],
    ]
    assert [bool(one.terminations[-1]) for one in found] == [True, False, True, False]

"""LeRobot datasets, with images and videos; needs `jaxreplay[lerobot]`, and not lerobot."""

import functools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxreplay.datasets.files import File, Forward, imported, open_parquet

_FLAGS = "terminals", "timeouts"


class Episodes(File):
    """Episodes of a LeRobot dataset, by index as text: a mapping of arrays each.

    Attributes:
      filename: The dataset's folder.
      tasks: The text of each task, by `task_index`.
      total_steps: Number of frames.
    """

    tasks: list[str]
    total_steps: int


def open_lerobot(root: Any, episodes: Iterable[int] | None = None) -> Episodes:
    """Return the episodes of a LeRobot dataset of version 2 or 3, for `from_arrays`.

    Each has its columns by name, and the usual fields: "observations" is a dict of the columns
    `observation.*`, such as `{"state": ..., "images.top": ...}`; "rewards" are `next.reward`, or 0;
    "terminals" are `next.terminated`, or `next.success` with `next.done`, and "timeouts" are other
    ends. Images and frames of videos are uint8[H, W, C], and are decoded when they are read. Pass
    `names` to `from_arrays` for some columns alone, or further ones: `{"obs": {"top":
    "observation.images.top"}, "extras": {"task": "task_index", "time": "timestamp"}}`.

    LeRobot stores no observation after an episode's last action. With
    `autoreset="same_step_no_final_obs"` that row is stored, and `jr.chunks` samples it. With
    another `autoreset` its observation is taken for the final one, unless the task ended there.

    Args:
      root: Folder of the dataset, which has the folder `meta`.
      episodes: Indices of the episodes to take, in whatever order. Default: all.

    Returns:
      A mapping, whose attribute `tasks` has the text of each `task_index`.

    Raises:
      ImportError: PyArrow is not installed; when they are read, PyAV for videos, and Pillow for
        images.
      ValueError: The folder holds no dataset, an episode is not in it, or a file is damaged; of a
        file with frames, `from_arrays` raises it.
    """
    root = Path(root)
    try:
        dataset = _Dataset(root)
        wanted = [*dataset.episodes] if episodes is None else map(operator.index, episodes)
        chosen = sorted(set(wanted))
        lengths = [dataset.episodes[index]["length"] for index in chosen]
    except KeyError as error:
        raise ValueError(f"open_lerobot: {root}: there is no {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"open_lerobot: {root} is no dataset: {error}") from error
    found = Episodes(root, map(str, chosen), lambda index: dataset.episode(int(index)))
    found.tasks, found.total_steps = dataset.tasks, sum(lengths)
    return found


class _Dataset:
    """The columns of a dataset.

    Args:
      root: Its folder.

    Attributes:
      episodes: The rows of `meta/episodes`, by index.
      tasks: The text of each task.
    """

    def __init__(self, root: Path):
        self._root, self._info = root, json.loads((root / "meta" / "info.json").read_text())
        if (version := self._info["codebase_version"][:2]) not in ("v2", "v3"):
            raise ValueError(f"it has version {version}; known are v2 and v3")
        self._fps, features = self._info["fps"], self._info["features"].items()
        self._kinds = {name: one["dtype"] for name, one in features if one["dtype"] != "string"}
        self.episodes = {one["episode_index"]: one for one in _table(root / "meta" / "episodes")}
        tasks = sorted(_table(root / "meta" / "tasks"), key=lambda one: one["task_index"])
        # the text is the index of a data frame in version 3
        self.tasks = [str(one.get("task", one.get("__index_level_0__"))) for one in tasks]
        # the first row of each file
        self._starts: dict[Any, int] = {}
        for one in self.episodes.values():
            file, row = _file(one), _first_row(one)
            self._starts[file] = min(row, self._starts.get(file, row))
        self._opened = functools.cache(open_parquet)
        self._flags = functools.lru_cache(1)(self._read_flags)

    def episode(self, index: int) -> File:
        """Return the arrays of an episode."""
        names = ["observations", "rewards", *_FLAGS, *self._kinds]
        return File(self._root, names, functools.partial(self._array, index))

    def _array(self, index: int, name: str) -> Any:
        one, kinds = self.episodes[index], self._kinds
        length = one["length"]
        if name == "observations":
            own = [key for key in kinds if key.startswith("observation.")]
            return {key.removeprefix("observation."): self._array(index, key) for key in own}
        if name == "rewards":
            has_reward = "next.reward" in kinds
            return self._array(index, "next.reward") if has_reward else np.zeros(length, np.float32)
        if name in _FLAGS:
            return Forward(length, lambda _: iter([self._flags(index)[_FLAGS.index(name)]]))
        if kinds[name] == "video":
            time = one.get(f"videos/{name}/from_timestamp", 0.0)
            path = self._path("video_path", index, f"videos/{name}")
            return Forward(length, functools.partial(_frames, path, time, self._fps))
        whole = self._opened(self._path("data_path", index, "data"))[name]
        return _Part(whole, _first_row(one) - self._starts[_file(one)], length)

    def _path(self, kind: str, index: int, key: str) -> Path:
        """Return the path of an episode's file."""
        one = self.episodes[index]
        return self._root / self._info[kind].format(
            chunk_index=one.get(f"{key}/chunk_index"),
            file_index=one.get(f"{key}/file_index"),
            episode_index=index,
            episode_chunk=index // self._info.get("chunks_size", 1000),
            video_key=key.removeprefix("videos/"),
        )

    def _read_flags(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Read which rows are terminated, and which are truncated."""
        none = np.zeros(self.episodes[index]["length"], bool)
        if "episode_index" in self._kinds:
            found = np.unique(self._array(index, "episode_index")[: len(none)])
            if found.tolist() != [index]:
                raise ValueError(f"meta/episodes has rows of other episodes, {found.tolist()}")
        terminated, success, truncated, done = (
            self._array(index, name)[: len(none)].reshape(len(none)).astype(bool)
            if (name := f"next.{flag}") in self._kinds
            else none
            for flag in ("terminated", "success", "truncated", "done")
        )
        terminated = terminated | (success & (done | truncated))
        return terminated, (done | truncated) & ~terminated


def _first_row(one: Mapping[str, Any]) -> int:
    """Return the number of an episode's first row in the dataset; version 2 has a file for each."""
    return one["dataset_from_index"] if "data/file_index" in one else 0


class _Part:
    """Consecutive rows of an array."""

    def __init__(self, whole: Forward, start: int, length: int):
        self._whole, self._start = whole, start
        self.shape, self.dtype = (length, *whole.shape[1:]), whole.dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.shape[0])
        return self._whole[self._start + start : self._start + stop]


def _file(one: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the numbers of the file with an episode's rows; version 2 has one for each episode."""
    return one.get("data/chunk_index"), one.get("data/file_index", one["episode_index"])


def _table(path: Path) -> list[dict[str, Any]]:
    """Read rows of a table without statistics: JSON lines of version 2, or Parquet files."""
    if (lines := path.with_suffix(".jsonl")).exists():
        return [json.loads(line) for line in lines.read_text().splitlines()]
    parquet = imported("open_lerobot", "pyarrow.parquet", "lerobot")
    rows = []
    for file in sorted(path.rglob("*.parquet")) or [path.with_suffix(".parquet")]:
        with parquet.ParquetFile(file) as opened:
            names = [name for name in opened.schema_arrow.names if not name.startswith("stats/")]
            rows += opened.read(names).to_pylist()
    return rows


def _frames(path: Path, time: float, fps: float, start: int) -> Iterator[np.ndarray]:
    """Yield the frames of a video, uint8[1, H, W, 3] each.

    Args:
      path: Path of the video.
      time: Time of the episode's first frame, in seconds.
      fps: Frames a second.
      start: Number of the first frame to yield.
    """
    av = imported("open_lerobot", "av", "lerobot")
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        expected = time + start / fps
        container.seek(int(expected / stream.time_base), stream=stream)  # the key frame before it
        for frame in container.decode(stream):
            if frame.time < expected - 0.5 / fps:
                continue
            if frame.time > expected + 0.5 / fps:
                raise ValueError(f"{path} has no frame at {expected:.3f} seconds")
            yield frame.to_ndarray(format="rgb24")[None]
            expected += 1 / fps

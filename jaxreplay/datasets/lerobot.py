"""LeRobot datasets, with images and videos; needs `jaxreplay[lerobot]`, and not lerobot."""

import functools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxreplay.datasets.files import File, Forward, imported, inside, parquet_of

_FLAGS = "terminals", "timeouts"
# how LeRobot quantizes depths, in an info of `meta/info.json`
_QUANTIZED = "video.depth_min", "video.depth_max", "video.shift", "video.use_log"


class LeRobotEpisodes(File):
    """Episodes of a LeRobot dataset, by index as text: a mapping of arrays each.

    Attributes:
      filename: The dataset's folder.
      tasks: The text of each task, by its number, `task_index`.
      total_steps: Number of frames.
    """

    tasks: dict[int, str]
    total_steps: int


def open_lerobot(root: Any, episodes: Iterable[int] | None = None) -> LeRobotEpisodes:
    """Return the episodes of a LeRobot dataset of version 2 or 3, for `from_arrays`.

    Each has its columns by name, and the usual fields: "observations" is a dict of the columns
    `observation.*`, such as `{"state": ..., "images.top": ...}`; "rewards" are `next.reward`, or 0;
    "terminals" are `next.terminated`, or `next.success` with `next.done`, and "timeouts" are other
    ends. Images and frames of videos are decoded when they are read; the frame of a row is the one
    at its `timestamp`. Images are as for `open_parquet`, frames of videos uint8[H, W, 3]. Frames
    of depth maps, and gray ones of more than 8 bits, are uint16[H, W, 1], or uint8 of 8 bits: as
    stored, or in millimeters if LeRobot has quantized them. Pass `names` to `from_arrays` for some
    columns alone, or further ones: `{"obs": {"top": "observation.images.top"}, "extras": {"task":
    "task_index", "time": "timestamp"}}`.

    LeRobot stores no observation after an episode's last action. With
    `autoreset="same_step_no_final_obs"` that row is stored, and `jr.chunks` samples it. With
    another `autoreset` its observation is taken for the final one, unless the task ended there.

    Args:
      root: Folder of the dataset, which has the folder `meta`.
      episodes: Indices of the episodes to take, in whatever order. Default: all.

    Returns:
      A mapping, whose attribute `tasks` is a dict of each `task_index` and its text.

    Raises:
      ImportError: PyArrow is not installed; when they are read, PyAV for videos, and Pillow for
        images.
      ValueError: The folder holds no dataset, an episode is not in it, or a file is damaged or not
        below the folder. `from_arrays` raises it if a file with frames is damaged, has no frame at
        a `timestamp`, or has frames of other forms: colors of more than 8 bits, with alpha, or of
        a depth map.
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
    found = LeRobotEpisodes(root, map(str, chosen), lambda index: dataset.episode(int(index)))
    found.tasks, found.total_steps = dataset.tasks, sum(lengths)
    return found


class _Dataset:
    """The columns of a dataset.

    Args:
      root: Its folder.

    Attributes:
      episodes: The rows of `meta/episodes`, by index.
      tasks: The text of each task, by number.
    """

    def __init__(self, root: Path):
        self._root, self._info = root, json.loads((root / "meta" / "info.json").read_bytes())
        if (version := self._info["codebase_version"][:2]) not in ("v2", "v3"):
            raise ValueError(f"it has version {version}; known are v2 and v3")
        self._fps, self._features = self._info["fps"], self._info["features"]
        kinds = {name: one["dtype"] for name, one in self._features.items()}
        self._kinds = {name: kind for name, kind in kinds.items() if kind != "string"}
        self.episodes = {one["episode_index"]: one for one in _table(root / "meta" / "episodes")}
        # the text is the index of a data frame in version 3
        self.tasks = {
            one["task_index"]: one["task" if "task" in one else "__index_level_0__"]
            for one in _table(root / "meta" / "tasks")
        }
        # the first row of each file
        self._starts: dict[Any, int] = {}
        for one in self.episodes.values():
            file, row = _file(one), _first_row(one)
            self._starts[file] = min(row, self._starts.get(file, row))
        self._opened = functools.cache(functools.partial(parquet_of, folder=root))
        self._flags = functools.lru_cache(1)(self._read_flags)
        self._times = functools.lru_cache(1)(self._read_times)

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
            path = self._path("video_path", index, f"videos/{name}")
            return Forward(length, functools.partial(self._frames, index, name, path))
        whole = self._opened(self._path("data_path", index, "data"))[name]
        return _Part(whole, _first_row(one) - self._starts[_file(one)], length)

    def _path(self, kind: str, index: int, key: str) -> Path:
        """Return the path of an episode's file."""
        one = self.episodes[index]
        name = self._info[kind].format(
            chunk_index=one.get(f"{key}/chunk_index"),
            file_index=one.get(f"{key}/file_index"),
            episode_index=index,
            episode_chunk=index // self._info.get("chunks_size", 1000),
            video_key=key.removeprefix("videos/"),
        )
        return inside(self._root, name)

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

    def _read_times(self, index: int) -> np.ndarray:
        """Read the times of an episode's rows, in seconds: float64[N]."""
        if "timestamp" not in self._kinds:
            raise ValueError("it has no column timestamp, by which the frames of videos are found")
        times = self._array(index, "timestamp")[: self.episodes[index]["length"]]
        return times.reshape(len(times)).astype(np.float64)

    def _frames(self, index: int, name: str, path: Path, start: int) -> Iterator[np.ndarray]:
        """Yield the frames of an episode's rows from a number on, [1, H, W, C] each."""
        one, feature = self.episodes[index], self._features[name]
        info = (feature.get("video_info") or {}) | (feature.get("info") or {})
        is_depth = bool(info.get("is_depth_map") or info.get("video.is_depth_map"))
        times = self._times(index)[start:] + one.get(f"videos/{name}/from_timestamp", 0.0)
        for frame in _frames_at(path, times, 0.5 / self._fps):
            pixels = _pixels(frame, is_depth)
            if pixels is None:
                raise ValueError(
                    f"{name}: {path} has {'a depth map' if is_depth else 'frames'} in the form "
                    f"{frame.format.name}; expected gray or colors of 8 bits without alpha, of a "
                    "depth map gray; encode it anew, such as by ffmpeg -pix_fmt yuv420p, or leave "
                    "the column out: names={'obs': {...}}"
                )
            if is_depth and not info.keys().isdisjoint(_QUANTIZED):
                if frame.format.components[0].bits != 12 or not info.keys() >= {*_QUANTIZED}:
                    raise ValueError(
                        f"{name}: depths are quantized to 12 bits by {', '.join(_QUANTIZED)} of "
                        f"meta/info.json; {path} has {frame.format.name}, and meta/info.json {info}"
                    )
                pixels = _millimeters(pixels, *(info[key] for key in _QUANTIZED))
            yield pixels


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
        return [*_json_lines(lines)]
    parquet = imported("open_lerobot", "pyarrow.parquet", "lerobot")
    rows = []
    for file in sorted(path.rglob("*.parquet")) or [path.with_suffix(".parquet")]:
        with parquet.ParquetFile(file) as opened:
            names = [name for name in opened.schema_arrow.names if not name.startswith("stats/")]
            rows += opened.read(names).to_pylist()
    return rows


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from error


def _frames_at(path: Path, times: np.ndarray, tolerance: float) -> Iterator[Any]:
    """Yield the frame of a video that is nearest to each of some times.

    Args:
      path: Path of the video.
      times: Times in seconds, float64[N], that do not fall.
      tolerance: Largest difference in seconds.
    """
    av = imported("open_lerobot", "av", "lerobot")
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        container.seek(int(times[0] / stream.time_base), stream=stream)  # the key frame before it
        decoded = container.decode(stream)
        frame, coming = None, next(decoded, None)
        for time in times:
            while coming and (not frame or abs(coming.time - time) < abs(frame.time - time)):
                frame, coming = coming, next(decoded, None)
            if not frame or abs(frame.time - time) > tolerance:
                raise ValueError(f"{path} has no frame at {time:.3f} seconds")
            yield frame


def _pixels(frame: Any, is_depth: bool) -> np.ndarray | None:
    """Return the pixels of a frame: those of gray ones of more than 8 bits, or of a depth map, as
    they are, [1, H, W, 1]; else as uint8[1, H, W, 3]. None if they are of neither form."""
    form = frame.format
    bits = max(one.bits for one in form.components)
    if re.fullmatch(r"gray\d*(le|be)?", form.name) and (is_depth or bits > 8):
        kind = np.dtype("u1" if bits == 8 else ">u2" if form.is_big_endian else "<u2")
        rows = np.frombuffer(frame.planes[0], kind).reshape(frame.height, -1)
        return rows[None, :, : frame.width, None].astype(kind.newbyteorder("="))
    if is_depth or bits > 8 or any(one.is_alpha for one in form.components):
        return None
    return frame.to_ndarray(format="rgb24")[None]


def _millimeters(
    codes: np.ndarray, low: float, high: float, shift: float, is_log: bool
) -> np.ndarray:
    """Return depths as uint16, of codes of 12 bits that LeRobot made of them.

    Args:
      codes: The codes: 0 is the depth `low`, and 4095 is `high`.
      low: Smallest depth in meters.
      high: Largest depth in meters.
      shift: Depth in meters that is added before the logarithm.
      is_log: Between those two, codes rise with the logarithm of the depth, not with the depth.
    """
    part = codes / 4095
    if is_log:
        depth = (low + shift) * ((high + shift) / (low + shift)) ** part - shift
    else:
        depth = low + (high - low) * part
    return np.rint(1000 * depth).clip(0, 2**16 - 1).astype(np.uint16)

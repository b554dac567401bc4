"""LeRobot's datasets, with images and videos, and images in Parquet files."""

import io
import json
import struct
import zlib

import jax
import numpy as np
import pytest

from jaxreplay import datasets
from jaxreplay.datasets import arrays
from tests.conftest import ALL
from tests.support.refusals import check_table, refused
from tests.test_dataset_files import FORMS, buffer, transitions

pyarrow, parquet, av, image = (
    pytest.importorskip(name, reason="the lerobot extra is not installed")
    for name in ("pyarrow", "pyarrow.parquet", "av", "PIL.Image")
)

LENGTHS = [4, 1, 3, 5]
DATA = {
    2: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    3: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEOS = {
    2: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    3: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
VIDEO = "videos/observation.video"
KINDS = {f"observation.{name}": kind for name, kind in (("state", "float32"), ("png", "image"))}
KINDS |= {"observation.text": "string", "observation.video": "video", "action": "float32"}
KINDS |= {"next.reward": "float32"} | dict.fromkeys(("next.done", "next.success"), "bool")
KINDS |= {"timestamp": "float32"} | dict.fromkeys(("episode_index", "task_index"), "int64")


def encoded(made, form="png", **options):
    file = io.BytesIO()
    made.save(file, form, **options)
    return file.getvalue()


def write(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(table), path)


def write_video(path, form, frames, size, codec, container):
    """Write planes of numbers, or arrays of colors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, 10)
        (stream.width, stream.height), stream.pix_fmt = size, form
        for at, frame in enumerate(frames):
            frame.pts = at
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def write_lerobot(folder, lengths=LENGTHS, version=3, kept=slice(None)):
    """Write a dataset as LeRobot does: `version` 3 has two episodes a file, version 2 one. Each
    number of a frame is in its state, its action, an image, and a frame of a video. Of the rows of
    each episode, a part is kept, but all frames of the videos. Episode 2 ends with a success, and
    episode 3 has one in its middle."""
    tables, frames, about, num_rows = {}, {}, [], 0
    for index, (stop, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        file = {"chunk_index": 0, "file_index": index // 2 if version == 3 else index}
        place = {**file, "episode_index": index, "episode_chunk": 0, "video_key": VIDEO[7:]}
        data, video = (folder / each[version].format(**place) for each in (DATA, VIDEOS))
        own, seen = np.arange(stop - length, stop)[kept], frames.setdefault(video, [])
        is_last = own == stop - 1 if kept == slice(None) else own == own[-1]
        columns = {
            "observation.state": [[float(x), x + 0.5] for x in own],
            "observation.png": [
                {"bytes": encoded(image.new("RGB", (4, 5), (int(x),) * 3)), "path": "a.png"}
                for x in own
            ],
            "observation.text": ["a"] * len(own),
            "action": [[float(x)] for x in own],
            "next.reward": own.astype(np.float32),
            "next.done": is_last,
            "next.success": np.isin(own, (7, 9)),
            "timestamp": (own - (stop - length)) / np.float32(10),
            "episode_index": np.full(len(own), index),
            "task_index": np.full(len(own), index % 2),
        }
        tables.setdefault(data, []).append(pyarrow.table(columns))
        one = {"episode_index": index, "length": len(own), "tasks": [f"task {index % 2}"]}
        if version == 3:
            one |= {f"{part}/{key}": n for part in ("data", VIDEO) for key, n in file.items()}
            one |= {f"{VIDEO}/from_timestamp": len(seen) / 10, "stats/action/min": [0.0]}
            one |= {"dataset_from_index": num_rows}
        about.append(one)
        seen += range(stop - length, stop)
        num_rows += len(own)
    for path, some in tables.items():
        write(path, pyarrow.concat_tables(some))
    for path, numbers in frames.items():
        colors = (np.full((16, 32, 3), 10 * number, np.uint8) for number in numbers)
        made = (av.VideoFrame.from_ndarray(pixels, "rgb24") for pixels in colors)
        write_video(path, "yuv420p", made, (32, 16), "mpeg4", "mp4")
    tasks = [{"task_index": nth, "task": f"task {nth}"} for nth in range(2)]
    for name, rows in (("episodes", about), ("tasks", tasks)):
        if version == 3:
            path = "episodes/a" if name == "episodes" else name
            write(folder / "meta" / f"{path}.parquet", pyarrow.Table.from_pylist(rows))
        else:
            (folder / "meta").mkdir(exist_ok=True)
            (folder / "meta" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    info = {"codebase_version": f"v{version}.0", "fps": 10, "chunks_size": 1000}
    info |= {"data_path": DATA[version], "video_path": VIDEOS[version]}
    info |= {"features": {name: {"dtype": kind} for name, kind in KINDS.items()}}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


def are_frames(video, numbers):
    return np.abs(video.mean(axis=(1, 2, 3)) - 10 * numbers).max() < 5  # they are lossy


@pytest.mark.parametrize(
    ("form", "version"),
    [(form, version) for form in FORMS for version in (2, 3)]
    if ALL
    else [(FORMS[0], 2), (FORMS[2], 3)],
)
def test_a_lerobot_dataset(form, version, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 2500)
    root = write_lerobot(tmp_path / "d", version=version)
    replay = buffer(form, allow_mask=True)
    source = datasets.open_lerobot(root)
    assert (source.tasks, source.total_steps) == ({0: "task 0", 1: "task 1"}, 13)
    names = {"extras": {"task": "task_index", "time": "timestamp"}}
    state = datasets.from_arrays(source, replay, names=names)
    pairs = {(0, 1), (1, 2), (2, 3), (5, 6), (6, 7), (7, None), (8, 9), (9, 10), (10, 11), (11, 12)}
    assert transitions(replay, state, lambda obs: obs["state"][:, :1]) == {
        (a, a, a, 0 if b is None else 0.5, b) for a, b in pairs
    }
    filled = np.asarray(state.counters.filled)
    taken = (np.arange(replay.length) < filled[:, None]).ravel()
    stored = jax.tree.map(lambda leaf: np.asarray(leaf)[taken], state.rows.steps)
    obs, extras = stored.obs, stored.extras
    sides = {"state": (2,), "png": (5, 4, 3), "video": (16, 32, 3)}
    assert {key: leaf.shape[1:] for key, leaf in obs.items()} == sides
    number = obs["state"][:, 0]
    if form == FORMS[2]:  # an episode's last frame has an action, too
        assert sorted(number.tolist()) == [*range(13)]
    assert (obs["png"] == number[:, None, None, None]).all()
    assert are_frames(obs["video"], number)
    first, which = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS), number.astype(int)
    np.testing.assert_allclose(extras["time"], (which - first[which]) / 10, atol=1e-6)
    np.testing.assert_array_equal(extras["task"], np.repeat([0, 1, 0, 1], LENGTHS)[which])
    chosen = datasets.open_lerobot(root, episodes=[3, 1])
    actions = [one["action"][:9][:, 0].tolist() for one in chosen.values()]
    assert actions == [[4], [*range(8, 13)]]
    # frame 4 has no next observation in the file, and frame 12 none either
    num_rows = {"next_step": 5, "same_step": 5, "same_step_no_final_obs": 6}[form]
    assert datasets.required_capacity(chosen, 1, form) == num_rows


def test_lerobot_datasets_that_are_damaged(tmp_path):
    root = write_lerobot(tmp_path / "d")

    def damaged(message, **options):
        with refused(message):
            datasets.from_arrays(datasets.open_lerobot(root, **options), buffer())

    damaged("open_lerobot: .*d: there is no 7", episodes=[1, 7])
    damaged("open_lerobot: .*d is no dataset: ", episodes=[1.5])
    meta = root / "meta" / "episodes" / "a.parquet"
    table = parquet.read_table(meta)
    write(meta, table.take([1, 2, 3]))  # the first episode of a file is not listed
    damaged("rows of other episodes, .0.")
    write(meta, table.take([3, 2, 1, 0]))
    assert datasets.required_capacity(datasets.open_lerobot(root), 1, FORMS[2]) == 13
    assert datasets.open_lerobot(root, [1, 1]).total_steps == 1
    write(meta, table.drop_columns("dataset_from_index"))
    damaged("there is no 'dataset_from_index'")
    write(meta, table)
    for path, change, message in (
        (f"{VIDEO}/chunk-000/file-001.mp4", 300, "video: cannot be read: .*file-001.mp4"),
        ("data/chunk-000/file-001.parquet", 300, "file-001.parquet"),
        ("meta/info.json", 30, "open_lerobot: .*d is no dataset"),
        ("meta/info.json", (b"v3", b"v9"), "it has version v9; known are v2"),
        ("meta/info.json", (b'"fps"', b'"f"'), "there is no 'fps'"),
        ("meta/info.json", (b'"action"', b'"act"'), "there is no array actions"),
    ):
        whole = (root / path).read_bytes()
        is_cut = isinstance(change, int)
        (root / path).write_bytes(whole[:change] if is_cut else whole.replace(*change))
        damaged(message)
        (root / path).write_bytes(whole)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kept", [slice(2, None), slice(None, None, 2), slice(3, 4)])
def test_frames_of_lerobot_are_those_at_the_timestamps(kept, version, tmp_path):
    """Of a dataset whose rows were cut at the beginning, or thinned out."""
    lengths = [6, 5, 8]
    source = datasets.open_lerobot(write_lerobot(tmp_path / "d", lengths, version, kept))
    for stop, length, own in zip(np.cumsum(lengths), lengths, source.values(), strict=True):
        numbers, video = np.arange(stop - length, stop)[kept], own["observations"]["video"]
        assert own["observation.state"][: len(numbers)][:, 0].tolist() == numbers.tolist()
        assert are_frames(video[: len(numbers)], numbers)
        # as from_arrays does, a few rows at a time
        parts = [video[at : at + 2] for at in range(0, len(numbers), 2)]
        assert are_frames(np.concatenate(parts), numbers)


def test_rows_of_lerobot_without_a_frame_are_refused(tmp_path):
    root = write_lerobot(tmp_path / "d")
    data = root / "data" / "chunk-000" / "file-000.parquet"
    table, info = parquet.read_table(data), root / "meta" / "info.json"

    def lacks_frame(message):
        with refused(message):
            datasets.open_lerobot(root)["0"]["observation.video"][:4]

    for times, time in (
        ([0, 0.1, 0.2, 9.3, 0.1], "9.300"),
        ([0, 0.1, 0.26, 0.16, 0.1], "0.160"),  # a frame before: times must not fall
        ([-0.06, 0.1, 0.2, 0.3, 0.1], "-0.060"),
    ):
        column = table.column_names.index("timestamp")
        write(data, table.set_column(column, "timestamp", pyarrow.array(np.float32(times))))
        lacks_frame(f"file-000.mp4 has no frame at {time} seconds")
    info.write_text(info.read_text().replace('"timestamp"', '"time"'))
    lacks_frame("has no column timestamp")


def frames_of(form, numbers, width=70):
    """Yield frames of a number each, in a form of pixels."""
    kind = "u1" if form in ("gray", "pal8") else ">u2" if form[-2:] == "be" else "<u2"
    for number in numbers:
        frame = av.VideoFrame(width, 16, form)
        for nth, plane in enumerate(frame.planes):
            size = plane.buffer_size // np.dtype(kind).itemsize
            is_palette = form == "pal8" and nth
            values = np.arange(size) if is_palette else np.full(size, number)
            plane.update(values.astype(kind).tobytes())
        yield frame


def test_depths_in_videos_of_lerobot_are_numbers(tmp_path):
    """Not colors of 8 bits. 1839 is 7 * 256 + 47."""
    root = write_lerobot(tmp_path / "d")
    file, path = root / "meta" / "info.json", root / VIDEO / "chunk-000" / "file-000.mp4"
    whole = json.loads(file.read_text())

    def check(form, numbers, info, expected=None, kind=np.uint16):
        codec = ("png", "mov") if form.endswith(("be", "pal8")) else ("ffv1", "matroska")
        write_video(path, form, frames_of(form, numbers), (70, 16), *codec)
        feature = {"observation.video": {"dtype": "video"} | info}
        file.write_text(json.dumps(whole | {"features": whole["features"] | feature}))
        read = datasets.open_lerobot(root)["0"]["observations"]["video"][:3]
        pixel = np.reshape(numbers if expected is None else expected, (3, 1, 1, -1)).astype(kind)
        np.testing.assert_array_equal(read, np.tile(pixel, (1, 16, 70, 1)), strict=True)

    depth = {"info": {"is_depth_map": True, "video.is_depth_map": False}}
    check("gray16le", [1839, 0, 65535], depth)
    check("gray16be", [1839, 0, 65535], {"video_info": {"video.is_depth_map": True}})
    check("gray12le", [1839, 0, 4095], {})
    check("gray", [39, 0, 255], depth, kind=np.uint8)
    three = [[39] * 3, [0] * 3, [255] * 3]
    check("gray", [39, 0, 255], {"info": {"is_depth_map": False}}, three, np.uint8)
    colors = [[6, 5, 4], [2, 1, 0], [254, 253, 252]]  # entries of 4 bytes: 0, 1, 2, ...
    check("pal8", [1, 0, 63], {}, colors, np.uint8)
    # LeRobot's quanta: from 1 m in steps of 1 mm; and from 0 m, where depth + 1 m is doubled thrice
    keys = "video.depth_min", "video.depth_max", "video.shift", "video.use_log"
    for values, numbers, depths in (
        ((1.0, 5.095, 3.5, False), [0, 839, 4095], [1000, 1839, 5095]),
        ((0.0, 7.0, 1.0, True), [1365, 2730, 4095], [1000, 3000, 7000]),
    ):
        quantized = {"info": {"is_depth_map": True} | dict(zip(keys, values, strict=True))}
        check("gray12le", numbers, quantized, depths)
    some = {"info": {"is_depth_map": True, "video.use_log": False}}
    bad = {
        "check('gray16le', three, quantized)": "depths are quantized to 12 bits by\ngray16le",
        "check('gray12le', three, some)": "depths are quantized\ninfo.json {'is_depth_map'",
        "check('yuv420p', three, depth)": "file-000.mp4 has a depth map in the form yuv420p",
        "check('yuv420p10le', three, {})": "file-000.mp4 has frames in the form yuv420p10le",
        "check('gbrp12le', three, {})": "has frames in the form gbrp12le; expected gray or",
        "check('bgra', three, {})": "has frames in the form bgra;\n-pix_fmt yuv420p, or",
    }
    bad = {typed: f"observation.video:\n{said}" for typed, said in bad.items()}
    names = {"check": check, "depth": depth, "quantized": quantized, "some": some}
    check_table(bad, names | {"three": [0, 1, 2]})


def test_tasks_of_lerobot_are_found_by_their_numbers(tmp_path):
    """Of version 2, in lines of JSON with other lines, and of version 3, whose texts are the index
    of a data frame."""
    root = write_lerobot(tmp_path / "d", version=2)
    tasks = root / "meta" / "tasks.jsonl"
    lines = [{"task_index": 7, "task": "lift\u2028it"}, {"task_index": 3, "task": "lever \u00fc"}]
    first, second = (json.dumps(line, ensure_ascii=False) for line in lines)
    tasks.write_bytes(f"{first}\n \r\n\n{second}\n".encode())
    assert datasets.open_lerobot(root).tasks == {3: "lever \u00fc", 7: "lift\u2028it"}
    tasks.write_text(f"{first}\n\n{second[:-3]}\n")
    with refused(r"open_lerobot: .*d is no dataset: .*tasks.jsonl: line 3"):
        datasets.open_lerobot(root)
    root = write_lerobot(tmp_path / "e")
    for name in ("task", "__index_level_0__", "text"):
        write(root / "meta" / "tasks.parquet", {"task_index": [4, 0], name: ["d", "a"]})
        if name != "text":
            assert datasets.open_lerobot(root).tasks == {0: "a", 4: "d"}
    with refused(r"open_lerobot: .*e: there is no '__index_level_0__'"):
        datasets.open_lerobot(root)


def test_a_lerobot_dataset_names_no_file_beyond_its_folder(tmp_path):
    """A link in the folder is the user's own, as in a cache of downloads."""
    root = write_lerobot(tmp_path / "d")
    video, info = root / VIDEO / "chunk-000" / "file-000.mp4", root / "meta" / "info.json"
    whole, real = json.loads(info.read_text()), tmp_path / "file-000.mp4"
    video.rename(real)
    video.symlink_to(real)
    assert len(datasets.open_lerobot(root)["0"]["observation.video"][:4]) == 4
    for key, path in (
        ("video_path", f"{tmp_path}/file-{{file_index:03d}}.mp4"),
        ("video_path", "../file-{file_index:03d}.mp4"),
        ("video_path", "videos/../../d2/file.mp4"),
        ("data_path", f"{tmp_path}/file-{{file_index:03d}}.parquet"),
    ):
        info.write_text(json.dumps(whole | {key: path}))
        with refused(r"from_arrays: .* is not below .*d, whose data name"):
            datasets.from_arrays(datasets.open_lerobot(root), buffer())


def chunk(kind, content):
    """Return a chunk of a PNG file."""
    summed = kind + content
    return struct.pack(">I", len(content)) + summed + struct.pack(">I", zlib.crc32(summed))


def test_images_of_parquet(tmp_path, monkeypatch):
    """Numbers of more than 8 bits, palettes, files that are named, and what is refused."""

    def read(*cells):
        write(tmp_path / "a.parquet", {"x": [*cells]})
        return datasets.open_parquet(tmp_path / "a.parquet")["x"][: len(cells)]

    def cell(content, path=None):
        return {"bytes": content, "path": path}

    depths = np.arange(20, dtype=np.uint16).reshape(4, 5) * 300
    meters, two = depths.astype(np.float32) / 7, np.uint8(depths)
    blue = image.new("RGB", (5, 4), (1, 2, 250)).quantize(2)
    first, color = blue.getpixel((0, 0)), blue.convert("RGB").getpixel((0, 0))
    of = image.fromarray
    for made, expected in (
        (encoded(of(depths)), depths),
        (encoded(of(depths), "tiff"), depths),
        (encoded(of(meters), "tiff"), meters),
        (encoded(of(two)), two),
        (encoded(of(two).convert("LA")), np.stack([two, two * 0 + 255], 2)),
        (encoded(blue), np.full((4, 5, 3), color, np.uint8)),
        (encoded(blue, transparency=first), np.full((4, 5, 4), (*color, 0), np.uint8)),
    ):
        (found,) = read(cell(made, "a.png"))
        np.testing.assert_array_equal(found, expected.reshape(4, 5, -1), strict=True)
    lossy = read(cell(encoded(image.new("CMYK", (5, 4), (255, 0, 0, 0)), "jpeg")))
    assert np.abs(lossy - np.array([0.0, 255, 255])).max() < 3
    (tmp_path / "images").mkdir()
    of(depths).save(tmp_path / "images" / "0.png")
    for path in ("images/0.png", f"{tmp_path}/images/0.png"):
        np.testing.assert_array_equal(read(cell(None, path))[0, ..., 0], depths)
    sides = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)  # colors of 16 bits
    parts = (b"IHDR", sides), (b"IDAT", zlib.compress(bytes(4 * 31))), (b"IEND", b"")
    deep = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    bad = {
        "read(cell(deep), whole)": "an image of more than 8 bits a color, RGB;16B",
        "read(cell(None, 'images/1.png'), whole)": "No such file or directory:\nimages/1.png",
        "read(cell(None, '../0.png'), whole)": "0.png is not below ",
        "read(cell(None, '/etc/0.png'), whole)": "/etc/0.png is not below ",
        "read(cell(None), whole)": "it has rows without an image",
        "read(None, whole)": "it has rows without an image",
    }
    names = {"read": read, "cell": cell, "deep": deep, "whole": cell(encoded(blue))}
    check_table(bad, names, (ValueError, OSError))
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 15)  # beyond it Pillow warns, at twice it raises
    with refused(r"Image size .20 pixels. exceeds limit", Warning):
        read(cell(encoded(blue)))

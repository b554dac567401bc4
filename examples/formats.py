"""Reads checkpoints and folders of rows with NumPy alone: docs/formats.md explains their files."""

import json
import pathlib
import sqlite3
import zlib

import numpy as np

DTYPES = {"BOOL": "?", "BF16": "u2"} | {
    f"{name}{8 * size}": f"<{kind}{size}"
    for name, kind in (("I", "i"), ("U", "u"), ("F", "f"))
    for size in (1, 2, 4, 8)
}


def rows_of_folder(folder):
    """Return the arrays, and the numbers of each env's oldest and next row."""
    folder = pathlib.Path(folder)
    database = sqlite3.connect(folder / "journal.sqlite")
    assert database.execute("PRAGMA user_version").fetchone() == (1,)
    [journal] = database.execute("SELECT * FROM journal")
    waiting = database.execute("SELECT * FROM waiting").fetchall()
    database.close()
    about, files, progress = journal
    arrays = {}
    for path in (folder / files).glob("*.npy"):
        arrays[path.stem.partition("-")[2]] = np.load(path)
    for kind, name, place, content in waiting:
        array, place = arrays[f"{kind}.{name}"], np.frombuffer(place, np.int64)
        values = np.frombuffer(content, array.dtype)
        array[place] = values.reshape(-1, *array.shape[1:])
    num_envs = json.loads(about)["num_envs"]
    first, end, _ = np.frombuffer(progress, np.int64).reshape(3, num_envs)
    return arrays, first, end


def arrays_of(file):
    """Return the arrays of a file of safetensors, by name."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, about in json.loads(content[8:begin]).items():
        low, high = (begin + offset for offset in about["data_offsets"])
        values = np.frombuffer(content[low:high], DTYPES[about["dtype"]])
        arrays[name] = values.reshape(about["shape"])
    return arrays


def rows_of_checkpoint(path, member=""):
    """Yield env, number and leaves of each row of the newest checkpoint."""
    path = pathlib.Path(path)
    newest = max((path / "manifests").glob("*.json"))
    seal, _, body = newest.read_bytes().partition(b"\n")
    assert int(seal, 16) == zlib.crc32(body)
    manifest = json.loads(body)
    assert manifest["format"] == 1
    own = manifest["members"][member]

    def of(numbers, env):
        return numbers[env if len(numbers) > 1 else 0]

    for group in np.reshape(own["groups"], (-1, 10)).tolist():
        save, number, start, stop, env, env_stop, *_ = group
        save, nth = own["saves"][save], 0
        file = f"{save['folder']}-{number:06}.safetensors"
        arrays = arrays_of(path / "rows" / file)
        for e in range(env, env_stop):
            end = of(save["end"], e)
            oldest = end - save["length"]
            low = max(of(save["since"], e), oldest + start)
            for n in range(low, min(end, oldest + stop)):
                if n >= of(own["first"], e):  # else it was overwritten since
                    leaves = {name: rows[nth] for name, rows in arrays.items()}
                    yield e, n, leaves
                nth += 1

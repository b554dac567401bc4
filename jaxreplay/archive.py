"""A state in one file: a zip archive of NumPy arrays, a leaf each, beside a note of what they are. Written and read a leaf at a time."""

import json
import os
import zipfile
from typing import Any

import jax
import numpy as np

from jaxreplay.description import description
from jaxreplay.leaves import spec_text
from jaxreplay.paths import named

_NOTES = "notes.json"


def save(path: Any, buffer: Any, state: Any, notes: dict[str, Any]) -> None:
    """Write a state. The file at the path is replaced once the new one is whole.

    Args:
      path: of the file. buffer: its configuration is noted, and compared when the state is read. notes: what else is to be kept: of JSON.
    """
    path = os.fspath(path)
    partial = f"{path}.partial"
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_NOTES, json.dumps({"buffer": description(buffer), "leaves": _described(state), **notes}))
            for name, leaf in named(state):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asarray(leaf), allow_pickle=False)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def check(path: Any, buffer: Any, shapes: Any) -> dict[str, Any]:
    """The notes of a file, once it is known to hold what `shapes`, a state or its shapes, says.

    Raises:
      ValueError: the file is of another buffer, or of other steps; each leaf that differs is named.
    """
    with zipfile.ZipFile(os.fspath(path)) as archive:
        notes = json.loads(archive.read(_NOTES))
    if notes["buffer"] != description(buffer):
        raise ValueError(f"load: the file is of another buffer:\n  {notes['buffer']}\nthis one is:\n  {description(buffer)}")
    got, expected = notes["leaves"], _described(shapes)
    if got != expected:
        names = [name for name in dict.fromkeys([*got, *expected]) if got.get(name) != expected.get(name)]
        lines = [f"{name}: got {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}" for name in names]
        raise ValueError("\n  ".join(["load: the file holds other steps:", *lines]))
    return notes


def load(path: Any, shapes: Any, device: Any) -> Any:
    """The state in a file that was checked, each leaf put on the device before the next one is read.

    Raises:
      zipfile.BadZipFile: the file is damaged.
    """
    leaves = []
    with zipfile.ZipFile(os.fspath(path)) as archive:
        for name, _ in named(shapes):
            with archive.open(f"{name}.npy") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
                if file.read():  # to the end: there the checksum is compared
                    raise zipfile.BadZipFile(f"load: {name} is longer than its shape says")
            leaves.append(jax.block_until_ready(jax.device_put(array, device)))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _described(state: Any) -> dict[str, str]:
    return {name: spec_text(leaf.shape, leaf.dtype) for name, leaf in named(state)}

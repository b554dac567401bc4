"""Tests of the files of checkpoints: other tools read them, and what is damaged is named."""

import json

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard
from hypothesis import strategies

from jaxreplay.checkpoint import CorruptCheckpointError, bundle
from jaxreplay.checkpoint.store import store_at
from tests.support.refusals import refused

pytestmark = pytest.mark.no_xla

Spec = jax.ShapeDtypeStruct

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e5m2",
)
SHAPES = ((), (1,), (7,), (0, 3), (10, 3), (9, 2, 1, 3))


@pytest.fixture(params=["folder", "memory://"])
def store(request, tmp_path):
    return store_at(tmp_path if request.param == "folder" else f"memory://{request.node.name}")


def values_of(shape, dtype):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, size=shape)
    return np.asarray(bits).astype(jnp.dtype(dtype))


def specs_of(arrays):
    return {name: Spec(values.shape, values.dtype) for name, values in arrays.items()}


def parsed(content):
    """Read a file as the format's description says, without the library."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    places = sorted(entry["data_offsets"] for entry in header.values())
    assert [start for start, _ in places] == [0, *(stop for _, stop in places)][:-1]
    assert content[8 + size :][places[-1][1] :] == b""
    kinds = {"BOOL": "?", "U": "u", "I": "i", "F": "f", "B": "V"}
    found = {}
    for name, entry in header.items():
        kind = entry["dtype"]
        bits = "".join(filter(str.isdigit, kind))
        dtype = "?" if kind == "BOOL" else f"{kinds[kind[0]]}{int(bits) // 8}"
        start, stop = (8 + size + one for one in entry["data_offsets"])
        found[name] = np.frombuffer(content[start:stop], dtype).reshape(entry["shape"])
    return found


@pytest.mark.parametrize("level", [None, 1, 19])
def test_other_tools_read_what_is_written(level, store):
    arrays = {
        f"{dtype} {number}": values_of(shape, dtype)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }
    parts, sums = bundle.packed(arrays, level)
    store.write("a", parts)
    content = b"".join(parts)
    if level is not None:
        reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
        content = reader.read()
    for name, values in parsed(content).items():
        assert values.tobytes() == arrays[name].tobytes()
        if "complex" not in name and "float8" not in name:  # whose bytes are stored
            assert values.shape == arrays[name].shape
            assert values.itemsize == arrays[name].itemsize
    found = bundle.read(store, "a", sums, level is not None, specs_of(arrays))
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("level", [None, 1])
def test_what_is_broken_is_named(level, store):
    arrays = {"x": values_of((10, 3), "int32"), "y": values_of((2,), "uint8")}
    parts, sums = bundle.packed(arrays, level)
    store.write("a", parts)
    every = specs_of(arrays)
    get = lambda sums=sums, name="a", specs=every: bundle.read(
        store, name, sums, level is not None, specs
    )
    broken = lambda said: refused(said, CorruptCheckpointError)
    np.testing.assert_array_equal(get()["x"], arrays["x"])
    for shape in ((10, 4), (3, 10), (30,)):
        with broken(r"a: x has the shape \[10, 3\] and .*, expected |a is cut short"):
            get(specs=every | {"x": Spec(shape, np.dtype("int32"))})
    with broken("a has no array z"):
        get(specs={"z": every["x"], "y": every["y"]})
    with broken("a is not as it was written"):
        get(sums._replace(stored=sums.stored ^ 1))
    with broken(r"a has .* bytes, expected"):
        get(sums._replace(size=sums.size - 1))
    with broken("b is missing"):
        get(name="b")
    content = store.read("a", 2**20).tobytes()
    for changed in (
        content[:-1],
        content[:3],
        b"",
        content + b"0",
        bytes([content[0] ^ 1]) + content[1:],
        content[:-1] + bytes([content[-1] ^ 1]),
    ):
        store.write("a", [changed])
        with broken("a (has|is)"):
            get()
        # with the right checksum, as in a forged manifest
        forged = sums._replace(size=len(changed), stored=bundle.checksum([changed]))
        if len(changed) < len(content):
            with broken("a[: ]"):
                get(forged)
    store.write("a", [content])
    np.testing.assert_array_equal(get()["x"], arrays["x"])


@hypothesis.given(
    shapes=strategies.lists(strategies.lists(strategies.integers(0, 9), max_size=3), max_size=6),
    most=strategies.integers(1, 200),
)
def test_arrays_are_divided_among_files(shapes, most):
    specs = {str(at): Spec(tuple(shape), np.dtype("int16")) for at, shape in enumerate(shapes)}
    files, seen = [*bundle.divided(specs, most)], []
    for pieces in files:
        sizes = []
        for piece in pieces:
            shape = specs[piece.name].shape
            row_bytes = bundle.nbytes_of(specs[piece.name]) // (shape[0] if shape else 1)
            sizes.append(row_bytes * (piece.stop - piece.start))
            seen += [(piece.name, row) for row in range(piece.start, piece.stop)]
        assert sum(sizes) <= most or (len(pieces) == 1 and pieces[0].stop - pieces[0].start == 1)
    assert seen == [
        (name, row)
        for name, spec in specs.items()
        for row in range(spec.shape[0] if spec.shape else 1)
        if spec.size
    ]


def test_a_name_is_created_once(store):
    assert store.create("manifests/1", b"one")
    assert not store.create("manifests/1", b"two")
    assert store.read("manifests/1", 3).tobytes() == b"one"
    assert store.entries("manifests") == ["manifests/1"]
    with refused("manifests/1 has .* bytes, expected at most 2", CorruptCheckpointError):
        store.read("manifests/1", 2)


def test_what_cannot_be_read_now_is_not_called_broken(tmp_path, monkeypatch):
    store = store_at(tmp_path)
    store.write("a", [b"123"])
    store.write("b", [])

    def fails(*_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fails)
        with refused("Too many open files", OSError):
            store.read("a", 3)
    assert store.read("a", 3).tobytes() == b"123"
    assert store.read("b", 3).tobytes() == b""

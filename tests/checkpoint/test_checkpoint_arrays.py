"""Tests of the array files of checkpoints: other tools read them, and what is damaged is named."""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from jaxreplay.checkpoint import CorruptCheckpointError, arrays
from jaxreplay.checkpoint.store import store_at
from tests.support.refusals import refused

pytestmark = pytest.mark.no_xla

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
SHAPES = ((), (1,), (7,), (10, 3), (9, 2, 1, 3))  # not empty: empty arrays have no files


@pytest.fixture(params=["folder", "memory://"])
def store(request, tmp_path):
    return store_at(tmp_path if request.param == "folder" else f"memory://{request.node.name}")


def values_of(shape, dtype):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, size=shape)
    return np.asarray(bits).astype(jnp.dtype(dtype))


def written(store, name, values, chunk_rows, level):
    """Write an array in chunks. Return the rows of a chunk and the checksums."""
    files = arrays.description(name, values.shape, values.dtype, chunk_rows, level)
    sums = [chunk_rows]
    for start in range(0, len(values), chunk_rows) if values.ndim else [0]:
        block = values
        if values.ndim:
            block = values[start : start + chunk_rows]
            block = np.resize(block, (chunk_rows, *block.shape[1:]))
        content, checksum = arrays.packed(np.ascontiguousarray(block), level)
        files[arrays.chunk_name(name, values.ndim, len(sums) - 1)] = content
        sums.append(checksum)
    store.write(files)
    return sums


def read(store, name, sums, shape, dtype, level):
    parts = [part for _, part in arrays.chunks(store, name, sums, shape, dtype, level is not None)]
    return np.concatenate(parts) if shape else parts[0]


@pytest.mark.parametrize("level", [None, 1, 19])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_tools_read_what_is_written(dtype, level, tmp_path):
    store = store_at(tmp_path)
    for number, shape in enumerate(SHAPES):
        values, name = values_of(shape, dtype), f"a/{number}"
        sums = written(store, name, values, min(4, *shape[:1]) if shape else 1, level)
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path / name}/"},
            "fill_missing_data_reads": False,
            "open": True,
        }
        found = ts.open(spec).result().read().result()
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(np.asarray(found), values)
        np.testing.assert_array_equal(read(store, name, sums, shape, values.dtype, level), values)


@pytest.mark.parametrize("level", [None, 1])
def test_what_is_broken_is_named(level, store):
    values = values_of((10, 3), "int32")
    sums = written(store, "a", values, 4, level)
    get = lambda sums, shape=(10, 3), name="a": read(store, name, sums, shape, "int32", level)
    broken = lambda said: refused(said, CorruptCheckpointError)
    np.testing.assert_array_equal(get(sums), values)
    for bad in ([], [4], sums[:-1], [0, *sums[1:]], [5, *sums[1:]], [11, *sums[1:2]]):
        with broken(r"a: has \d chunks of \d+ rows, for 10"):
            get(bad)
    with broken(r"a/c.0.0 "):  # of another size
        get(sums, (10, 4))
    with broken(r"a/c.2.0 is intact, but is not the file"):
        get([*sums[:-1], sums[-1] ^ 1])
    with broken(r"b/c.0.0 is missing"):
        get(sums, name="b")
    content = store.read("a/c.1.0", 2**20).tobytes()
    for changed in (
        content[:-1],
        content[:3],
        b"",
        content + b"0",
        bytes([content[0] ^ 1]) + content[1:],
        content[:-1] + bytes([content[-1] ^ 1]),
    ):
        store.write({"a/c.1.0": [changed]})
        with broken(r"a/c.1.0 "):
            get(sums)
        with broken(r"a/c.1.0 "):
            arrays.checked(store, "a/c.1.0", sums[2])
    store.write({"a/c.1.0": [content]})
    np.testing.assert_array_equal(get(sums), values)
    store.delete("a/c.1.0")
    with broken(r"a/c.1.0 is missing"):
        get(sums)


def test_a_name_is_created_once(store):
    assert store.create("manifests/1", b"one")
    assert not store.create("manifests/1", b"two")
    assert store.read("manifests/1", 3).tobytes() == b"one"
    assert store.entries("manifests") == ["1"]
    with refused("manifests/1 has 3 bytes, expected at most 2", CorruptCheckpointError):
        store.read("manifests/1", 2)


def test_what_cannot_be_read_now_is_not_called_broken(tmp_path, monkeypatch):
    store = store_at(tmp_path)
    store.write({"a": [b"123"], "b": []})

    def fails(*_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fails)
        with refused("Too many open files", OSError):
            store.read("a", 3)
    assert store.read("a", 3).tobytes() == b"123"
    assert store.read("b", 3).tobytes() == b""

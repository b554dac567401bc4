"""Tests of the array files of checkpoints: other tools can read them, and their files are read."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import tensorstore as ts

from jaxreplay.checkpoint import CorruptCheckpointError
from jaxreplay.checkpoint.store import store_at
from jaxreplay.checkpoint.zarr_arrays import Array, Writer, bytes_of, check_files

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


def values_of(shape, dtype):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, size=shape)
    return np.asarray(bits).astype(jnp.dtype(dtype))


def written(store, name, values, chunk_rows, level):
    writer = Writer(store, name, values.shape, values.dtype, chunk_rows, level)
    for number in range(-(-len(values) // chunk_rows) if values.ndim else 1):
        block = values[number * chunk_rows : (number + 1) * chunk_rows] if values.ndim else values
        content = bytes_of(np.ascontiguousarray(block))
        writer.write([content[:5], content[5:]])  # in two pieces
    return writer.seals


def spec(path):
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "fill_missing_data_reads": False,
    }


@pytest.mark.parametrize("level", [None, 1, 19])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_tools_read_what_is_written(dtype, level, tmp_path):
    store = store_at(tmp_path)
    for number, shape in enumerate(SHAPES):
        values = values_of(shape, dtype)
        seals = written(store, f"a/{number}", values, min(4, *shape[:1]) if shape else 1, level)
        found = (
            ts.open({**spec(tmp_path / "a" / str(number)), "open": True}).result().read().result()
        )
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(np.asarray(found), values)
        np.testing.assert_array_equal(
            Array(store, f"a/{number}", shape, values.dtype, seals).read(), values
        )
        check_files(store, f"a/{number}", seals)


@pytest.mark.parametrize("level", [None, 3])
def test_what_another_tool_wrote_is_read(level, tmp_path):
    store, values = store_at(tmp_path), values_of((10, 3), "float32")
    codecs = [
        {"name": "bytes"},
        *([] if level is None else [{"name": "zstd", "configuration": {"level": level}}]),
        {"name": "crc32c"},
    ]
    metadata = {
        "shape": values.shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (4, 3)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
    }
    ts.open({**spec(tmp_path / "a"), "metadata": metadata, "create": True}).result().write(
        values
    ).result()
    ends = [(tmp_path / "a" / f"c.{number}.0").read_bytes()[-4:] for number in range(3)]
    seals = [
        zlib.crc32((tmp_path / "a" / "zarr.json").read_bytes()),
        *(int.from_bytes(end, "little") for end in ends),
    ]
    array = Array(store, "a", values.shape, values.dtype, seals)
    np.testing.assert_array_equal(array.read(), values)
    parts = [np.empty(12 * count, np.uint8) for count in (1, 0, 1)]
    array.read_chunk(2, lambda: parts)
    assert b"".join(parts) == values[8:].tobytes()


@pytest.mark.parametrize("path", ["folder", "memory://arrays"])
@pytest.mark.parametrize("level", [None, 1])
def test_what_is_broken_is_named(level, path, tmp_path):
    store = store_at(tmp_path / path if path == "folder" else path)
    values = values_of((10, 3), "int32")
    seals = written(store, "a", values, 4, level)
    store.sync("a")
    for shape, dtype, message in (
        ((10, 4), "int32", r"a: got int32\[10, 3\], expected int32\[10, 4\]"),
        ((10, 3), "int64", "expected int64"),
    ):
        with pytest.raises(CorruptCheckpointError, match=message):
            Array(store, "a", shape, dtype, seals)
    with pytest.raises(CorruptCheckpointError, match=r"a/zarr.json is not as it was written"):
        Array(store, "a", values.shape, values.dtype, [seals[0] ^ 1, *seals[1:]])
    with pytest.raises(CorruptCheckpointError, match=r"a: has 3 chunks, expected 2"):
        Array(store, "a", values.shape, values.dtype, seals[:-1])
    with pytest.raises(
        CorruptCheckpointError, match=r"a/c.2.0 is intact, but is not the file that was written"
    ):
        Array(store, "a", values.shape, values.dtype, [*seals[:-1], seals[-1] ^ 1]).read()
    with pytest.raises(CorruptCheckpointError, match=r"b/zarr.json is missing"):
        Array(store, "b", values.shape, values.dtype, seals)
    content = store.get("a/c.1.0")
    for broken in (
        content[:-1],
        content[:3],
        b"",
        content + b"0",
        bytes([content[0] ^ 1]) + content[1:],
        content[:-1] + bytes([content[-1] ^ 1]),
    ):
        store.write("a/c.1.0", [broken])
        store.sync("a")
        with pytest.raises(CorruptCheckpointError, match=r"a/c.1.0 "):
            Array(store, "a", values.shape, values.dtype, seals).read()
        with pytest.raises(CorruptCheckpointError, match=r"a/c.1.0 "):
            check_files(store, "a", seals)
    store.write("a/c.1.0", [content])
    store.sync("a")
    store.expect("a/c.0.0")  # one file exists, the other does not
    store.expect("a/c.9.0")
    np.testing.assert_array_equal(
        Array(store, "a", values.shape, values.dtype, seals).read(), values
    )
    store.delete("a/c.1.0")
    with pytest.raises(CorruptCheckpointError, match=r"a/c.1.0 is missing"):
        Array(store, "a", values.shape, values.dtype, seals).read()


@pytest.mark.parametrize("path", ["folder", "memory://expected"])
def test_what_was_expected_is_read_once(path, tmp_path):
    """Expect files, then read or forget them: a later read gets the new content."""
    store = store_at(tmp_path / path if path == "folder" else path)
    for name in ("a/b", "a/c", "ab"):
        store.write(name, [b"before"])
    for name in ("a", "ab"):
        store.sync(name)
    for name in ("a/b", "a/c", "ab"):
        store.expect(name)
    assert store.get("a/b") == b"before"
    store.forget("a")
    for name in ("a/b", "a/c"):
        store.write(name, [b"after"])
    store.sync("a")
    assert [store.get(name) for name in ("a/b", "a/c", "ab")] == [b"after", b"after", b"before"]


def test_what_cannot_be_read_now_is_not_called_broken(tmp_path, monkeypatch):
    store = store_at(tmp_path)
    store.write("a", [b"123"])

    def fails(*_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fails)
        with pytest.raises(OSError, match="Too many open files"):
            store.get("a")
    assert store.get("a") == b"123"
    store.write("b", [])
    assert store.get("b") == b""

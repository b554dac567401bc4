"""Arrays as files, in zarr's third format, which many tools read: chunks along the first axis, zstd or not, each with a checksum.

An array is written once. Its description has no checksum, so that whoever writes an array keeps its seal, a checksum of the description,
and hands it in to read the array again. Chunks go from and to the caller's memory, with no copy on the way where nothing is compressed.

Source: the Zarr core specification, version 3, with its codecs bytes, zstd and crc32c.
"""

import collections
import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import zstandard

from jaxreplay.checkpoint.store import BrokenError, Store

_DESCRIPTION = "zarr.json"
_RESIDUE = 0x48674BC7  # the CRC-32C of anything that is followed by its own CRC-32C


def bytes_of(values: np.ndarray) -> np.ndarray:
    """The same memory, which lies in one piece, as uint8[nbytes]."""
    return values.reshape(-1).view(np.uint8)


class Buffers:
    """Memory of one thread that is used again and again: memory that is new costs as much as to read a file."""

    def __init__(self):
        self._buffers = collections.defaultdict(lambda: np.empty(0, np.uint8))

    def __call__(self, name: str, size: int) -> np.ndarray:
        """uint8[size], whose content is anything: the memory that was given for this name before, where that is enough."""
        if len(self._buffers[name]) < size:
            self._buffers.pop(name)
            self._buffers[name] = np.empty(size, np.uint8)
        return self._buffers[name][:size]


class Writer:
    """A new array.

    Args:
      name: its folder. chunk_rows: of a chunk, along the first axis. level: of zstd; None: not compressed.
    """

    def __init__(self, store: Store, name: str, shape: tuple[int, ...], dtype: Any, chunk_rows: int, level: int | None):
        self._store, self._name, self._rank, self._level = store, name, len(shape), level
        description = _described(shape, np.dtype(dtype), chunk_rows, level).encode()
        self.seal = zlib.crc32(description)
        self._chunk_bytes = math.prod((chunk_rows, *shape[1:]) if shape else ()) * np.dtype(dtype).itemsize
        store.write(f"{name}/{_DESCRIPTION}", [description])

    def write(self, number: int, parts: Sequence[Any]) -> None:
        """A chunk, of arrays of bytes one after another. One that is less than a chunk, the last, ends with zeros."""
        missing = self._chunk_bytes - sum(map(len, parts))
        parts = [*parts, np.zeros(missing, np.uint8)] if missing else parts
        if self._level is not None:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=False).compressobj(size=self._chunk_bytes)
            parts = [piece for piece in [*map(compressor.compress, parts), compressor.flush()] if piece]
        self._store.write(f"{self._name}/{_key(number, self._rank)}", [*parts, _checksum(parts)])


class Array:
    """One that was written.

    Raises:
      BrokenError: its description is missing, or not as it was written, or another one than is expected.
    """

    def __init__(self, store: Store, name: str, shape: tuple[int, ...], dtype: Any, seal: int):
        self._store, self._name, self._shape, self._dtype = store, name, shape, np.dtype(dtype)
        description = store.get(f"{name}/{_DESCRIPTION}")
        if zlib.crc32(description) != seal:
            raise BrokenError(f"{name}/{_DESCRIPTION} is not as it was written")
        found = json.loads(description)
        if (found["data_type"], found["shape"]) != (self._dtype.name, list(shape)):
            raise BrokenError(f"{name}: got {found['data_type']}{found['shape']}, expected {self._dtype}{list(shape)}")
        self._is_compressed = any(codec["name"] == "zstd" for codec in found["codecs"])
        self.chunk_rows = found["chunk_grid"]["configuration"]["chunk_shape"][0] if shape else 1
        self.chunk_bytes = math.prod((self.chunk_rows, *shape[1:]) if shape else ()) * self._dtype.itemsize

    def __len__(self) -> int:
        """Chunks."""
        return -(-self._shape[0] // self.chunk_rows) if self._shape else 1

    def read(self, buffers: Buffers | None = None) -> np.ndarray:
        """All of it, in memory of its own. `buffers`: as of `read_chunk`."""
        values = np.empty(self._shape, self._dtype)
        content = bytes_of(values)
        for number in range(len(self)):
            self.read_chunk(number, [content[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]], buffers)
        return values

    def read_chunk(self, number: int, parts: Sequence[Any], buffers: Buffers | None = None) -> None:
        """Fill arrays of bytes, one after another, with a chunk: the last one without the zeros at its end.

        Args:
          buffers: of the thread that reads, for a file that is compressed; None: new ones.

        Raises:
          BrokenError: the chunk is missing, or not as it was written.
        """
        name = f"{self._name}/{_key(number, len(self._shape))}"
        missing = self.chunk_bytes - sum(map(len, parts))
        parts, expected = [part for part in (*parts, np.empty(missing, np.uint8)) if len(part)], np.empty(4, np.uint8)
        if not self._is_compressed:
            self._read(name, lambda size: _sized(name, size, self.chunk_bytes, [*parts, expected]))
            return
        content: Any = None

        def parts_of(size: int) -> list[np.ndarray]:
            nonlocal content
            content = (buffers or Buffers())("file", max(size - 4, 0))
            return [content, expected]

        self._read(name, parts_of)
        try:
            with zstandard.ZstdDecompressor().stream_reader(content) as reader:
                is_whole = all(reader.readinto(part) == len(part) for part in parts)
        except zstandard.ZstdError as error:
            raise BrokenError(f"{name}: {error}") from error
        if not is_whole:
            raise BrokenError(f"{name} is cut short")

    def _read(self, name: str, parts_of: Callable[[int], Sequence[Any]]) -> None:
        """A file that ends with its checksum."""
        checksum = 0

        def extend(piece: Any) -> None:
            nonlocal checksum
            checksum = google_crc32c.extend(checksum, piece)

        self._store.read(name, parts_of, extend)
        if checksum != _RESIDUE:
            raise BrokenError(f"{name} is not as it was written")


def expect(store: Store, name: str, rank: int) -> None:
    """Say that an array of one chunk will be read soon."""
    store.expect(f"{name}/{_DESCRIPTION}")
    store.expect(f"{name}/{_key(0, rank)}")


def _described(shape: tuple[int, ...], dtype: np.dtype, chunk_rows: int, level: int | None) -> str:
    codecs: list[dict[str, Any]] = [{"name": "bytes"} if dtype.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}]
    if level is not None:
        codecs.append({"name": "zstd", "configuration": {"level": level, "checksum": False}})
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (chunk_rows, *shape[1:]) if shape else ()}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},  # one folder an array
            "fill_value": [0.0, 0.0] if dtype.kind == "c" else np.zeros((), dtype).item(),
            "codecs": [*codecs, {"name": "crc32c"}],
        }
    )


def _key(number: int, rank: int) -> str:
    return ".".join(["c", *([str(number)] if rank else []), *["0"] * (rank - 1)])


def _checksum(parts: Sequence[Any]) -> np.ndarray:
    checksum = 0
    for part in parts:
        checksum = google_crc32c.extend(checksum, part)
    return np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)


def _sized(name: str, size: int, chunk_bytes: int, parts: list[np.ndarray]) -> list[np.ndarray]:
    if size != chunk_bytes + 4:
        raise BrokenError(f"{name} has {size} bytes, expected {chunk_bytes + 4}")
    return parts

"""Arrays as files in zarr's third format, which many tools read.

Chunks lie along the first axis, are compressed with zstd or not at all, and have a checksum each.

An array is written once. Its seals are the checksums of its description and of each chunk, kept
elsewhere. By them a reader detects an intact file that is not the one written here.
Uncompressed chunks are written from and read into the caller's memory without a copy.

References:
  The Zarr core specification, version 3, with its codecs bytes, zstd and crc32c.
"""

import collections
import functools
import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import zstandard

from jaxreplay._util.names import printable
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.groups import Group
from jaxreplay.checkpoint.store import array_name

_DESCRIPTION = "zarr.json"
_PIECE = 2**20  # bytes that `check_files` reads at a time
_RESIDUE = 0x48674BC7  # the CRC-32C of any bytes that are followed by their own CRC-32C
# the largest ratio by which zstd compresses: a block of 128 KiB takes at least four bytes
_MOST_RATIO = 2**15


def bytes_of(values: np.ndarray) -> np.ndarray:
    """Return a view of contiguous memory as uint8[nbytes]."""
    return values.reshape(-1).view(np.uint8)


class Buffers:
    """Reusable memory of one thread: allocating new memory costs as much as reading a file."""

    def __init__(self):
        self._buffers = collections.defaultdict(lambda: np.empty(0, np.uint8))

    def __call__(self, name: str, size: int) -> np.ndarray:
        """Return uint8[size] with arbitrary content: earlier memory of this name, if it is large
        enough."""
        if len(self._buffers[name]) < size:
            self._buffers.pop(name)
            self._buffers[name] = np.empty(size, np.uint8)
        return self._buffers[name][:size]


class Writer:
    """Writer of a new array.

    Args:
      store: The files.
      name: The array's folder.
      shape: The array's shape.
      dtype: The array's dtype.
      chunk_rows: Size of a chunk along the first axis.
      level: Compression level of zstd, or None to write without compression.
    """

    def __init__(
        self,
        store: Files,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        chunk_rows: int,
        level: int | None,
    ):
        self._store, self._name, self._ndim, self._level = store, name, len(shape), level
        description = _described(shape, np.dtype(dtype), chunk_rows, level).encode()
        self.seals = [zlib.crc32(description)]  # `write` appends the checksum of each chunk
        self._chunk_bytes = (
            math.prod((chunk_rows, *shape[1:]) if shape else ()) * np.dtype(dtype).itemsize
        )
        store.write(f"{name}/{_DESCRIPTION}", [description])

    def write(self, parts: Sequence[Any]) -> None:
        """Write the next chunk from consecutive arrays of bytes. Zeros fill up the last chunk."""
        missing = self._chunk_bytes - sum(map(len, parts))
        parts = [*parts, np.zeros(missing, np.uint8)] if missing else parts
        if self._level is not None:
            compressor = zstandard.ZstdCompressor(
                level=self._level, write_checksum=False
            ).compressobj(size=self._chunk_bytes)
            parts = [
                piece for piece in [*map(compressor.compress, parts), compressor.flush()] if piece
            ]
        checksum = functools.reduce(google_crc32c.extend, parts, 0)
        name = f"{self._name}/{_key(len(self.seals) - 1, self._ndim)}"
        self._store.write(name, [*parts, np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)])
        self.seals.append(checksum)


class Array:
    """Reader of a written array.

    Args:
      store: The files.
      name: The array's folder.
      shape: The expected shape.
      dtype: The expected dtype.
      seals: The `seals` of its `Writer`.

    Raises:
      CorruptCheckpointError: The description is missing, damaged, or of another shape or dtype.
    """

    def __init__(
        self, store: Files, name: str, shape: tuple[int, ...], dtype: Any, seals: Sequence[int]
    ):
        self._store, self._name, self._shape, self._dtype, self._seals = (
            store,
            name,
            shape,
            np.dtype(dtype),
            seals,
        )
        found = described(store, name, seals)
        if (found.dtype, found.shape) != (self._dtype.name, list(shape)):
            raise CorruptCheckpointError(
                f"{name}: got {printable(found.dtype)}{found.shape}, expected "
                f"{self._dtype}{list(shape)}"
            )
        self._is_compressed, self.chunk_rows = found.is_compressed, found.chunk_rows if shape else 1
        self.chunk_bytes = (
            math.prod((self.chunk_rows, *shape[1:]) if shape else ()) * self._dtype.itemsize
        )
        if len(seals) != 1 + len(self):
            raise CorruptCheckpointError(
                f"{name}: has {len(self)} chunks, expected {len(seals) - 1}"
            )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return -(-self._shape[0] // self.chunk_rows) if self._shape else 1

    def read(self, buffers: Buffers | None = None) -> np.ndarray:
        """Return the whole array in new memory. `buffers`: memory of the thread that reads."""
        content = np.empty(0, np.uint8)
        for number in range(len(self)):

            def parts(number: int = number) -> list[np.ndarray]:
                nonlocal content
                if not number:  # allocated only once the first file is known to have a valid size
                    content = np.empty(math.prod(self._shape) * self._dtype.itemsize, np.uint8)
                return [content[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]]

            self.read_chunk(number, parts, buffers)
        return content.view(self._dtype).reshape(self._shape)

    def read_chunk(
        self, number: int, parts: Callable[[], Sequence[Any]], buffers: Buffers | None = None
    ) -> None:
        """Fill consecutive arrays of bytes with a chunk, without the zeros that fill it up.

        Args:
          number: The chunk's number, from 0 on.
          parts: Returns the arrays. It is called once the file is known to have a valid size.
          buffers: Memory of the reading thread for a compressed file, or None to allocate it.

        Raises:
          CorruptCheckpointError: The chunk is missing or damaged, or is not the one written here.
        """
        name, checksum, expected = (
            f"{self._name}/{_key(number, len(self._shape))}",
            0,
            np.empty(4, np.uint8),
        )
        content: Any = None

        def wanted() -> list[np.ndarray]:
            given = [*parts()]
            missing = self.chunk_bytes - sum(map(len, given))
            return [part for part in (*given, np.empty(missing, np.uint8)) if len(part)]

        def parts_of(size: int) -> list[np.ndarray]:
            nonlocal content
            self._check_size(name, size)
            if not self._is_compressed:
                return [*wanted(), expected]
            content = (buffers or Buffers())("file", size - 4)
            return [content, expected]

        def extend(piece: Any) -> None:
            nonlocal checksum
            checksum = google_crc32c.extend(checksum, piece)

        self._store.read(name, parts_of, extend)
        _check_seal(name, checksum, expected, self._seals[1 + number])
        if not self._is_compressed:
            return
        try:
            with zstandard.ZstdDecompressor().stream_reader(content) as reader:
                is_whole = all(reader.readinto(part) == len(part) for part in wanted())
        except zstandard.ZstdError as error:
            raise CorruptCheckpointError(f"{name}: {error}") from error
        if not is_whole:
            raise CorruptCheckpointError(f"{name} is cut short")

    def _check_size(self, name: str, size: int) -> None:
        if not self._is_compressed and size != self.chunk_bytes + 4:
            raise CorruptCheckpointError(
                f"{name} has {size:,} bytes, expected {self.chunk_bytes + 4:,}"
            )
        if self._is_compressed and not (self.chunk_bytes <= (size - 4) * _MOST_RATIO and size > 4):
            raise CorruptCheckpointError(
                f"{name} has {size:,} bytes, too few to decompress to {self.chunk_bytes:,} bytes"
            )


class Description(NamedTuple):
    """Content of an array's description file."""

    shape: list[int]
    dtype: str
    chunk_rows: int  # 1 for a scalar
    is_compressed: bool


def described(store: Files, name: str, seals: Sequence[int]) -> Description:
    """Read an array's description. Raises a CorruptCheckpointError if it is missing or damaged."""
    where = f"{name}/{_DESCRIPTION}"
    content = store.get(where)
    if not seals or zlib.crc32(content) != seals[0]:
        raise CorruptCheckpointError(f"{where} is not as it was written")
    try:
        found = json.loads(content)
        shape, codecs = found["shape"], [codec["name"] for codec in found["codecs"]]
        chunk_shape = found["chunk_grid"]["configuration"]["chunk_shape"]
        made = Description(
            shape, found["data_type"], chunk_shape[0] if shape else 1, "zstd" in codecs
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{where} is no description of an array: {type(error).__name__}"
        ) from None
    sizes = (
        [*shape, *chunk_shape]
        if isinstance(shape, list) and isinstance(chunk_shape, list)
        else [None]
    )
    is_possible = (
        isinstance(made.dtype, str)
        and all(type(size) is int and 0 <= size < 2**62 for size in sizes)
        and made.chunk_rows >= 1
        and list(chunk_shape[1:]) == shape[1:]
    )
    if not is_possible or codecs not in (["bytes", "crc32c"], ["bytes", "zstd", "crc32c"]):
        raise CorruptCheckpointError(f"{where} describes an array that jaxreplay does not write")
    return made


def check_files(store: Files, name: str, seals: Sequence[int]) -> None:
    """Read a whole array piece by piece to check it, and keep nothing.

    Raises:
      CorruptCheckpointError: A file is missing or damaged, or is not the one written here.
    """
    found = described(store, name, seals)
    piece, expected = np.empty(_PIECE, np.uint8), np.empty(4, np.uint8)
    for number, seal in enumerate(seals[1:]):
        where, checksum = f"{name}/{_key(number, len(found.shape))}", 0

        def parts_of(size: int, where: str = where) -> list[np.ndarray]:
            if size < 4:
                raise CorruptCheckpointError(f"{where} is cut short")
            whole, rest = divmod(size - 4, _PIECE)
            return [*[piece] * whole, piece[:rest], expected]

        def extend(part: Any) -> None:
            nonlocal checksum
            checksum = google_crc32c.extend(checksum, part)

        store.read(where, parts_of, extend)
        _check_seal(where, checksum, expected, seal)


def expect(store: Files, name: str, ndim: int) -> None:
    """Tell the store that an array of one chunk will be read soon."""
    store.expect(f"{name}/{_DESCRIPTION}")
    store.expect(f"{name}/{_key(0, ndim)}")


def _described(shape: tuple[int, ...], dtype: np.dtype, chunk_rows: int, level: int | None) -> str:
    codecs: list[dict[str, Any]] = [
        {"name": "bytes"}
        if dtype.itemsize == 1
        else {"name": "bytes", "configuration": {"endian": "little"}}
    ]
    if level is not None:
        codecs.append({"name": "zstd", "configuration": {"level": level, "checksum": False}})
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": (chunk_rows, *shape[1:]) if shape else ()},
            },
            # with "." all chunks lie in the array's one folder
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": [0.0, 0.0] if dtype.kind == "c" else np.zeros((), dtype).item(),
            "codecs": [*codecs, {"name": "crc32c"}],
        }
    )


def _key(number: int, ndim: int) -> str:
    return ".".join(["c", *([str(number)] if ndim else []), *["0"] * (ndim - 1)])


def _check_seal(name: str, checksum: int, end: np.ndarray, seal: int) -> None:
    """Check a chunk's file that was read.

    Args:
      name: The file.
      checksum: CRC-32C of the whole file, its own checksum included.
      end: The last four bytes, which are that checksum.
      seal: The checksum at the time of writing.
    """
    if checksum != _RESIDUE:
        raise CorruptCheckpointError(f"{name} is not as it was written")
    if int.from_bytes(end.tobytes(), "little") != seal:
        raise CorruptCheckpointError(f"{name} is intact, but is not the file that was written here")


def array_of(store: Files, group: Group, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the array of one leaf of a group's K rows, `[K, *shape]`.

    Raises:
      CorruptCheckpointError: The group has no array of this name.
    """
    if name not in group.seals:
        raise CorruptCheckpointError(f"rows/{group.folder} has no array {name}")
    return Array(
        store,
        array_name("rows", group.folder, name),
        (group.num_rows, *shape),
        dtype,
        group.seals[name],
    )

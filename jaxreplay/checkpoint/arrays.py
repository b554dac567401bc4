"""Arrays as files in zarr's third format, which many tools read.

An array is a folder with a description and chunks along the first axis, which are compressed with
zstd or not at all, and have a checksum each. The description is for other tools: what it says is
in the manifest, too, with the checksum of each chunk. By it a reader detects an intact file that
is not the one written here.

References:
  The Zarr core specification, version 3, with its codecs bytes, zstd and crc32c.
"""

import collections
import contextlib
import hashlib
import json
import math
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
import zstandard

from jaxreplay.buffers.trajectories import aligned, aligned_zeros
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files, Memory, new_memory

Chunks = dict[str, list[int]]  # by leaf: rows of a chunk, and the checksum of each chunk
_MOST_NAME = 200  # bytes of a file's name; most systems allow 255, and a suffix is added
# the largest ratio by which zstd compresses: a block of 128 KiB takes at least four bytes
_MOST_RATIO = 2**15


class Buffers:
    """Memory that threads use again: new memory costs as much as reading a file."""

    def __init__(self):
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """Return uint8[size] of arbitrary content, aligned so that a CPU backend reads it in
        place."""
        with contextlib.suppress(IndexError):
            memory = aligned(self._free.popleft())
            if len(memory) >= size:
                return memory[:size]
        return aligned_zeros((size,), np.uint8)

    def give_back(self, values: np.ndarray) -> None:
        """Give back what `take` returned, or a view of it. Other arrays are ignored."""
        if isinstance(values.base, np.ndarray) and values.base.flags.owndata:
            self._free.append(values.base)


def array_name(kind: str, folder: str, leaf: str) -> str:
    """Return the name of a leaf's array in the store.

    A slash in the leaf's name is escaped. A very long name is cut, and a hash makes it unique.
    """
    name = urllib.parse.quote(leaf, safe="")
    if len(name) > _MOST_NAME:
        name = f"{name[:_MOST_NAME]}~{hashlib.sha256(leaf.encode()).hexdigest()[:32]}"
    return f"{kind}/{folder}/{name}"


def description(
    name: str, shape: Sequence[int], dtype: Any, chunk_rows: int, level: int | None
) -> dict[str, list[bytes]]:
    """Return the name and the content of the file that describes an array."""
    dtype = np.dtype(dtype)
    codecs: list[dict[str, Any]] = [
        {"name": "bytes"}
        if dtype.itemsize == 1
        else {"name": "bytes", "configuration": {"endian": "little"}}
    ]
    if level is not None:
        codecs.append({"name": "zstd", "configuration": {"level": level, "checksum": False}})
    content = json.dumps(
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
    return {f"{name}/zarr.json": [content.encode()]}


def chunk_name(name: str, ndim: int, number: int = 0) -> str:
    """Return the name of an array's chunk in the store."""
    return f"{name}/" + ".".join(["c", *([str(number)] if ndim else []), *["0"] * (ndim - 1)])


def packed(values: np.ndarray, level: int | None) -> tuple[list[Any], int]:
    """Return the content of a chunk's file, and its checksum.

    Args:
      values: The chunk, contiguous.
      level: Compression level of zstd, or None to write without compression.
    """
    content: Any = values.reshape(-1).view(np.uint8)
    if level is not None:
        content = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(content)
    checksum = google_crc32c.value(content)
    return [content, checksum.to_bytes(4, "little")], checksum


def checked(
    store: Files, name: str, checksum: int, most: int = 2**40, memory: Memory = new_memory
) -> np.ndarray:
    """Read a chunk's file, without its checksum: uint8[...].

    Args:
      store: The files.
      name: The file.
      checksum: The checksum at the time of writing.
      most: Largest number of bytes that the chunk may have. Default: 1 TiB.
      memory: As for `Files.read`.

    Raises:
      CorruptCheckpointError: The file is missing or damaged, or is not the one written here.
    """
    found = store.read(name, most + 4, memory)
    content, end = found[:-4], found[-4:]
    if len(end) < 4:
        raise CorruptCheckpointError(f"{name} is cut short")
    if google_crc32c.value(content) != (own := int.from_bytes(end.tobytes(), "little")):
        raise CorruptCheckpointError(f"{name} is not as it was written")
    if own != checksum:
        raise CorruptCheckpointError(f"{name} is intact, but is not the file that was written here")
    return content


def chunk(
    store: Files,
    name: str,
    checksum: int,
    shape: Sequence[int],
    dtype: Any,
    is_compressed: bool,
    memory: Memory = new_memory,
) -> np.ndarray:
    """Read a chunk.

    Args:
      store: The files.
      name: The chunk's file.
      checksum: Its checksum at the time of writing.
      shape: Shape of the chunk.
      dtype: Its dtype.
      is_compressed: Whether it is compressed.
      memory: Memory for the chunk's values, and for up to 4 bytes more. Default: new memory.

    Raises:
      CorruptCheckpointError: The file is missing or damaged, or is not the one written here.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if not is_compressed:
        content = checked(store, name, checksum, size, memory)
        if len(content) != size:
            raise CorruptCheckpointError(f"{name} has {len(content):,} bytes, expected {size:,}")
        return content.view(dtype).reshape(shape)
    content = checked(store, name, checksum, size + (size >> 7) + 1024)
    if size > len(content) * _MOST_RATIO:
        raise CorruptCheckpointError(
            f"{name} has {len(content):,} bytes, too few to decompress to {size:,} bytes"
        )
    values = memory(size)
    try:
        with zstandard.ZstdDecompressor().stream_reader(content.data) as reader:
            if size and reader.readinto(values) != size:
                raise CorruptCheckpointError(f"{name} is cut short")
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError(f"{name}: {error}") from error
    return values.view(dtype).reshape(shape)


def chunks(
    store: Files,
    name: str,
    sums: Sequence[int],
    shape: Sequence[int],
    dtype: Any,
    is_compressed: bool,
) -> Iterator[tuple[int, np.ndarray]]:
    """Read an array chunk by chunk. Yield each one's first index and its values.

    Args:
      sums: The rows of a chunk, and the checksum of each chunk.

    Raises:
      CorruptCheckpointError: As for `chunk`; or the number of chunks is not that of the shape.
    """
    chunk_rows, *checksums = sums or [0]
    num_rows = shape[0] if shape else 1
    if not 1 <= chunk_rows <= max(num_rows, 1) or len(checksums) != -(-num_rows // chunk_rows):
        raise CorruptCheckpointError(
            f"{name}: has {len(checksums)} chunks of {chunk_rows} rows, for {num_rows} rows"
        )
    for number, checksum in enumerate(checksums):
        own, start = chunk_name(name, len(shape), number), number * chunk_rows
        rows = [chunk_rows] if shape else []  # the last chunk is filled up with zeros
        values = chunk(store, own, checksum, [*rows, *shape[1:]], dtype, is_compressed)
        yield start, values[: num_rows - start] if shape else values

"""Several arrays in one file, in the format of safetensors, which many tools open.

A file has a header, JSON with the dtype, shape and place of each array, and then the arrays, one
after another. It may be compressed with zstd: the header and each array is a frame. Its size and
checksum are in the manifest. So a reader detects damage, and an intact file that is not the one
written here.

References:
  https://github.com/huggingface/safetensors, its format; zstd: RFC 8878; crc32c: RFC 3720.
"""

import collections
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import google_crc32c
import jax
import msgspec
import numpy as np
import zstandard
from msgspec import Meta

from jaxreplay._util.aligned import aligned, aligned_zeros
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files, Memory, new_memory

# Names of dtypes. Values of others are stored as bytes.
_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{
        f"{kind}int{bits}": f"{letter}{bits}"
        for kind, letter in (("", "I"), ("u", "U"))
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_ALIGNMENT = 64  # bytes; the first array begins at a multiple: a CPU backend reads it in place
_MOST_HEADER = 2**26  # bytes
# the largest ratio by which zstd compresses: a block of 128 KiB takes at least four bytes
_MOST_RATIO = 2**15


_Sum = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Sums(NamedTuple):
    """Size and checksums of a file, as a manifest has them."""

    raw: _Sum  # checksum of the content before compression
    size: Annotated[int, Meta(ge=0, le=2**62)]  # bytes
    stored: _Sum  # checksum of the file


class Piece(NamedTuple):
    """The rows `start` to `stop - 1` of an array, along its first axis; all of a scalar."""

    name: str
    start: int
    stop: int


class Buffers(collections.deque[np.ndarray]):
    """Memory that threads use again: new memory costs as much as reading a file."""

    def take(self, size: int) -> np.ndarray:
        """Return uint8[size] of arbitrary content, aligned so that a CPU backend reads it in
        place."""
        with contextlib.suppress(IndexError):
            memory = aligned(self.popleft())
            if len(memory) >= size:
                return memory[:size]
        return aligned_zeros((size,), np.uint8)

    def give_back(self, values: np.ndarray) -> None:
        """Give back what `take` returned, or a view of it. Other arrays are ignored."""
        if isinstance(values.base, np.ndarray) and values.base.flags.owndata:
            self.append(values.base)


def file_name(kind: str, folder: str, number: int, is_compressed: bool) -> str:
    """Return the name of a file of a checkpoint, by its `Manifest.folder`. `kind`: "rows", or
    "rest" for the arrays beside them."""
    return f"{kind}/{folder}-{number:06}.safetensors{'.zst' if is_compressed else ''}"


def content_of(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """Return the content of a file before compression, in parts."""
    header, start = {}, 0
    parts: list[Any] = [b""]
    for name, values in sorted(arrays.items(), key=lambda one: -one[1].nbytes):
        dtype, shape = values.dtype, list(values.shape)
        known = _NAMES.get(dtype.name)
        stop = start + values.nbytes
        header[name] = {
            "dtype": known or "U8",
            "shape": shape if known else [*shape, dtype.itemsize],
            "data_offsets": [start, stop],
        }
        parts.append(np.asarray(values, order="C").reshape(-1).view(np.uint8))
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) & (_ALIGNMENT - 1))
    parts[0] = len(text).to_bytes(8, "little") + text
    return parts


def checksum(parts: Sequence[Any]) -> int:
    """Return the checksum of parts, one after another."""
    found = 0
    for part in parts:
        found = google_crc32c.extend(found, part)
    return found


def packed(arrays: Mapping[str, np.ndarray], level: int | None) -> tuple[list[Any], Sums]:
    """Return the content of a file, in parts, and its size and checksums.

    Args:
      arrays: The arrays by name.
      level: Compression level of zstd, or None to write without compression.
    """
    parts = content_of(arrays)
    raw = stored = checksum(parts)
    if level is not None:
        # A frame for each part, in one call: one that is fed bit by bit would wait for Python's
        # lock after each piece of its output.
        zstd = zstandard.ZstdCompressor(level=level, write_checksum=False)
        parts = [*map(zstd.compress, parts)]
        stored = checksum(parts)
    return parts, Sums(raw, sum(map(len, parts)), stored)


def checked(store: Files, name: str, sums: Sums, memory: Memory | None = new_memory) -> np.ndarray:
    """Read a file: uint8[size].

    Args:
      store: The files.
      name: The file.
      sums: What the manifest says of it.
      memory: As for `Files.read`.

    Raises:
      CorruptCheckpointError: The file is missing or damaged, or is not the one written here.
    """
    content = store.read(name, sums.size, memory)
    if checksum([content]) != sums.stored:
        raise CorruptCheckpointError(f"{name} is not as it was written")
    return content


class _Entry(msgspec.Struct):
    shape: list[int]
    data_offsets: tuple[int, int]


def read(
    store: Files,
    name: str,
    sums: Sums,
    is_compressed: bool,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    memory: Memory | None = new_memory,
) -> dict[str, np.ndarray]:
    """Read arrays of a file.

    Args:
      store: The files.
      name: The file.
      sums: What the manifest says of it.
      is_compressed: Whether it is compressed.
      wanted: Shapes and dtypes of all arrays of the file, by name.
      memory: Memory for the content, whose views are returned; None to map a file of this machine
        that is not compressed. Default: new memory.

    Raises:
      CorruptCheckpointError: The file is missing or damaged, is not the one written here, or has
        other arrays.
    """
    content = checked(store, name, sums, new_memory if is_compressed else memory)
    if is_compressed:
        num_bytes = sum(map(nbytes_of, wanted.values()))
        content = _decompressed(name, content, num_bytes, memory or new_memory)
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    try:
        header = msgspec.json.decode(content[8:begin].tobytes(), type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{name} has no header: {error}") from None
    found = {}
    for own, spec in wanted.items():
        if own not in header:
            raise CorruptCheckpointError(f"{name} has no array {own}")
        (start, stop), shape = header[own].data_offsets, header[own].shape
        values = content[begin + start : begin + stop] if 0 <= start <= stop else content[:0]
        if len(values) != (size := nbytes_of(spec)) or shape[: len(spec.shape)] != [*spec.shape]:
            raise CorruptCheckpointError(
                f"{name}: {own} has the shape {shape} and {len(values):,} bytes, expected "
                f"{[*spec.shape]} and {size:,}"
            )
        found[own] = values.view(spec.dtype).reshape(spec.shape)
    return found


def _decompressed(name: str, content: np.ndarray, num_bytes: int, memory: Memory) -> np.ndarray:
    """Return the content of a compressed file: its header, and so many bytes of arrays."""
    try:
        header = zstandard.frame_content_size(content.data)  # of the first frame
        size = header + num_bytes
        if not 8 <= header <= _MOST_HEADER or size > len(content) * _MOST_RATIO:
            raise CorruptCheckpointError(f"{name} would have {size:,} bytes")
        values = memory(size)
        left = values.data
        decompressor = zstandard.ZstdDecompressor()
        with decompressor.stream_reader(content.data, read_across_frames=True) as reader:
            while len(left):
                if not (count := reader.readinto(left)):
                    raise CorruptCheckpointError(f"{name} is cut short")
                left = left[count:]
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError(f"{name}: {error}") from error
    return values


def nbytes_of(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize


def divided(specs: Mapping[str, jax.ShapeDtypeStruct], most: int) -> Iterator[list[Piece]]:
    """Divide arrays among files of at most `most` bytes, or of one row that is larger.

    Args:
      specs: The arrays by name.
      most: Largest number of bytes.

    Yields:
      The pieces of each file.
    """
    pieces, held = [], 0
    for name, spec in specs.items():
        num_rows = spec.shape[0] if spec.shape else 1
        row_bytes, start = nbytes_of(spec) // max(num_rows, 1), 0
        while row_bytes and start < num_rows:
            if pieces and held + row_bytes > most:
                yield pieces
                pieces, held = [], 0
            stop = min(num_rows, start + max((most - held) // row_bytes, 1))
            pieces.append(Piece(name, start, stop))
            held, start = held + (stop - start) * row_bytes, stop
    if pieces:
        yield pieces

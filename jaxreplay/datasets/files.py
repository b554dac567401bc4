"""Arrays of `.npz` files and Parquet files, read a few rows at a time."""

import bisect
import functools
import importlib
import io
import itertools
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

_READ_BYTES = 2**20  # of one array
_GRAY = "I", "I;16", "I;16B", "I;16L", "I;16N", "F"  # Pillow's modes of more than 8 bits


class File(Mapping[str, Any]):
    """Arrays of a file or a folder by name, or mappings of arrays, for `from_arrays`.

    Args:
      filename: Its path.
      names: Names of the arrays.
      make: Returns the array, or the mapping, of a name.

    Attributes:
      filename: Its path.
    """

    def __init__(self, filename: Any, names: Iterable[str], make: Callable[[str], Any]):
        self.filename = os.fspath(filename)
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # a Mapping's own makes the array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Forward:
    """Array [N, ...] that is read forward. To go back takes as long as to open it anew.

    Args:
      length: Number of rows N.
      opened: Returns the rows from a number on, as arrays.
    """

    def __init__(self, length: int, opened: Callable[[int], Iterator[np.ndarray]]):
        self._length, self._opened = length, opened
        self._forget()

    def _forget(self) -> None:
        self._blocks: Iterator[np.ndarray] | None = None
        # rows from a number on: those that were asked for last, and more that were read with them
        self._start, self._held = 0, np.zeros(0)

    @functools.cached_property
    def _spec(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        first = self[:1]
        self._forget()  # more rows may be read at once, now that their size is known
        return (self._length, *first.shape[1:]), first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._spec[1]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._length)
        if self._blocks is None or not 0 <= start - self._start <= len(self._held):
            self._start, self._held, self._blocks = start, np.zeros(0), self._opened(start)
        parts = [self._held[start - self._start :]]
        while (
            sum(map(len, parts)) < stop - start and (block := next(self._blocks, None)) is not None
        ):
            parts.append(block)
        parts = [block for block in parts if len(block)] or parts
        self._start, self._held = start, np.concatenate(parts) if len(parts) > 1 else parts[0]
        read = self._held[: stop - start]
        if stop == self._length:
            self._forget()
        return read


def natural(key: Any) -> list[str]:
    """Return a key by which demo_2 comes before demo_10."""
    return [text.zfill(20) for text in re.split(r"(\d+)", str(key))]


def open_npz(path: Any) -> File:
    """Return the arrays of an `.npz` file, compressed or not, for `from_arrays`.

    Args:
      path: Path of the file.

    Raises:
      OSError: There is no such file.
      ValueError: It is damaged.

    Example:
      >>> import os, tempfile, numpy as np, jaxreplay as jr
      >>> from jaxreplay.datasets import from_arrays, open_npz, required_capacity
      >>> path = os.path.join(tempfile.mkdtemp(), "steps.npz")
      >>> ends = np.array([False, False, True])
      >>> np.savez(path, observations=np.arange(3.0), actions=ends, rewards=ends, terminals=ends)
      >>> file = open_npz(path)
      >>> buffer = jr.uniform(capacity=required_capacity(file), batch_size=2, autoreset="next_step")
      >>> int(buffer.size(from_arrays(file, buffer)))
      3
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in filter(lambda name: name.endswith(".npy"), archive.namelist()):
                with archive.open(member) as file:
                    shape = _npy_header(file)[0]
                opened = functools.partial(_npy_rows, path, member)
                arrays[member.removesuffix(".npy")] = Forward(shape[0] if shape else 0, opened)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"open_npz: {path}: {error}") from error
    return File(path, arrays, arrays.__getitem__)


def _npy_header(file: Any) -> tuple[Any, bool, np.dtype[Any]]:
    is_first = npy.read_magic(file) == (1, 0)
    return (npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0)(file)


def _npy_rows(path: Any, member: str, start: int) -> Iterator[np.ndarray]:
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        shape, is_fortran, dtype = _npy_header(file)
        if dtype.hasobject or (is_fortran and len(shape) > 1):
            raise ValueError("expected an array of numbers in C order")
        num_rows, row = shape[0], shape[1:]
        if not (row_bytes := dtype.itemsize * math.prod(row)):
            yield np.zeros((num_rows - start, *row), dtype)
            return
        file.seek(start * row_bytes, io.SEEK_CUR)
        while content := file.read(max(_READ_BYTES // row_bytes, 1) * row_bytes):
            whole = len(content) // row_bytes
            yield np.frombuffer(content, dtype, whole * math.prod(row)).reshape(whole, *row)


def open_parquet(path: Any) -> File:
    """Return the columns of Parquet files, for `from_arrays`; needs `jaxreplay[lerobot]`.

    A column has numbers, lists of equal length, or encoded images, which Pillow decodes to
    [H, W, C]: uint8, or uint16 or float32 if they are gray ones of that form. An image may be a
    file that is named instead, below the folder. Other columns are left out.

    Args:
      path: Path of a file, or of a folder with files, which follow each other by their names:
        part-2 comes before part-10.

    Raises:
      ImportError: PyArrow is not installed.
      OSError: There is no such file.
      ValueError: It is damaged, or the folder has none.
    """
    path = Path(path)
    return parquet_of(path, path if path.is_dir() else path.parent)


def parquet_of(path: Path, folder: Path) -> File:
    """Do what `open_parquet` does. `folder`: the one that named images are in."""
    parquet = imported("open_parquet", "pyarrow.parquet", "lerobot")
    files = sorted(path.rglob("*.parquet"), key=natural) if path.is_dir() else [path]
    groups, starts, num_rows = [], [], 0
    fields, row_bytes = {}, {}
    for file in files:
        try:
            with parquet.ParquetFile(file) as opened:
                about, schema = opened.metadata, opened.schema_arrow
        except ValueError as error:
            raise ValueError(f"open_parquet: {file}: {error}") from error
        fields = fields or {field.name: _decoder(field.type, folder) for field in schema}
        for nth in range(about.num_row_groups):
            groups.append((file, nth))
            starts.append(num_rows)
            num_rows += about.row_group(nth).num_rows
    if not num_rows:
        raise ValueError(f"open_parquet: {path}: there is no row in {len(files)} Parquet files")

    def rows(name: str, decode: Callable[[Any], Iterator[np.ndarray]], start: int) -> Iterator[Any]:
        first = bisect.bisect_right(starts, start) - 1
        skip, at_once = start - starts[first], max(_READ_BYTES // row_bytes.get(name, 2**16), 1)
        for file, some in itertools.groupby(groups[first:], key=lambda group: group[0]):
            # pages are read when they are needed
            with parquet.ParquetFile(file, pre_buffer=False, buffer_size=_READ_BYTES) as opened:
                chosen = [nth for _, nth in some]
                for batch in opened.iter_batches(at_once, row_groups=chosen, columns=[name]):
                    for block in decode(batch.column(0)[skip:]) if skip < len(batch) else ():
                        row_bytes.setdefault(name, block[:1].nbytes or 1)
                        yield block
                    skip = max(skip - len(batch), 0)

    arrays = {
        name: Forward(num_rows, functools.partial(rows, name, decode))
        for name, decode in fields.items()
        if decode is not None
    }
    return File(path, arrays, arrays.__getitem__)


def _decoder(kind: Any, folder: Path) -> Callable[[Any], Iterator[np.ndarray]] | None:
    """Return what decodes a column of a type, if it can be. `folder`: that of named images."""
    import pyarrow as pa

    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return functools.partial(_images, folder)
    while (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        kind = kind.value_type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return _numbers if is_number else None


def _numbers(column: Any) -> Iterator[np.ndarray]:
    """Yield a column of numbers, or of lists of equal length, as [K, ...]."""
    shape = [len(column)]
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        _check_not_null(column)
        if len({*column.value_lengths().to_pylist()}) > 1:
            raise ValueError("its lists have different lengths")
        column = column.flatten()
        shape.append(len(column) // max(math.prod(shape), 1))
    _check_not_null(column)
    yield column.to_numpy(zero_copy_only=False).reshape(shape)


def _check_not_null(column: Any) -> None:
    if column.null_count:
        raise ValueError("it has rows without a value")


def _images(folder: Path, column: Any) -> Iterator[np.ndarray]:
    """Yield decoded images, [1, H, W, C] each."""
    image = imported("open_parquet", "PIL.Image", "lerobot")
    for one in column.to_pylist():
        found = {key: value for key, value in (one or {}).items() if value is not None}
        if found.keys().isdisjoint(("bytes", "path")):
            raise ValueError("it has rows without an image")
        is_here = "bytes" in found
        file = io.BytesIO(found["bytes"]) if is_here else inside(folder, found["path"])
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)  # of a limit of pixels
            decoded = image.open(file)
        rest = [str(tile[3]) for tile in getattr(decoded, "tile", ())]
        if decoded.mode not in _GRAY and any(";16" in text for text in rest):
            raise ValueError(f"it has an image of more than 8 bits a color, {rest[0]}")
        if decoded.mode not in (*_GRAY, "1", "L", "LA", "RGB", "RGBA"):  # a palette, CMYK
            decoded = decoded.convert("RGBA" if decoded.has_transparency_data else "RGB")
        pixels = np.asarray(decoded)
        yield pixels.reshape(1, *pixels.shape[:2], -1)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file that data name. Raises a ValueError if it leaves their folder."""
    whole, path = os.path.abspath(folder), Path(os.path.abspath(folder / name))
    if not path.is_relative_to(whole):
        raise ValueError(f"{name} is not below {whole}, whose data name it")
    return path


def imported(where: str, module: str, extra: str) -> Any:
    """Import a module of an extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{where} needs {error.name}: pip install 'jaxreplay[{extra}]'"
        ) from error

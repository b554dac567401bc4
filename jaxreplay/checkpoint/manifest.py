"""Manifest of a checkpoint: the file that says what it holds and where, and makes it visible.

All fields are checked before they are used: a manifest may be damaged, of another version, or
forged.
"""

import dataclasses
import json
import zlib
from typing import Any, NamedTuple

import numpy as np

from jaxreplay._util.names import printable
from jaxreplay.checkpoint import schema
from jaxreplay.checkpoint.arrays import Chunks
from jaxreplay.checkpoint.files import CorruptCheckpointError
from jaxreplay.checkpoint.groups import Groups, Save
from jaxreplay.storage import stored_arrays

FORMAT = 7  # of the files, and of the meaning of a state's leaves
STEPS = -(2**63), 2**63 - 1  # the smallest and the largest step


class Leaf(NamedTuple):
    """A leaf of the rows: its array in the files, and its real dtype and shape."""

    name: str
    array: str  # name of its array in a group
    stored: np.dtype  # dtype of the array
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """Content of a checkpoint. A row's number counts all rows that its stream ever got, overwritten
    ones included."""

    # Name of the folder of its arrays: the checkpoint's number, which only one can have, and the
    # token of its writer.
    folder: str
    step: int
    buffer: str
    library: str
    length: int  # rows in each stream's ring
    first: list[int]  # number of the oldest row of each stream
    end: list[int]  # one more than the number of its newest row
    rows: dict[str, str]  # dtype and shape of a row, by leaf
    rest: dict[str, str]  # dtype and shape of every other leaf
    is_compressed: bool  # whether the other leaves' arrays are
    chunks: Chunks  # of the other leaves' arrays
    groups: Groups  # each row is in one; a stream's older rows are in earlier groups
    metadata: dict[str, Any]  # the user's

    @property
    def number(self) -> int:
        return int(self.folder[:10])

    @property
    def writer(self) -> str:
        return self.folder[11:]

    @property
    def name(self) -> str:
        """Name of the manifest's file."""
        return manifest_name(self.number)

    @property
    def leaves(self) -> list[Leaf]:
        found = []
        for name, text in self.rows.items():
            dtype, shape = schema.dtype_and_shape(name, text)
            bits = stored_arrays.carrier(dtype) if name.startswith("steps") else None
            stored = dtype if bits is None else np.dtype(bits)
            array = name if bits is None else f"{name}.bits"
            found.append(Leaf(name, array, stored, dtype, shape))
        return found

    def to_bytes(self) -> bytes:
        groups = self.groups
        saves = [
            vars(save) | {name: _short(getattr(save, name)) for name in ("since", "end")}
            for save in groups.saves
        ]
        written = {
            "saves": saves,
            "columns": groups.columns.ravel().tolist(),
            "leaves": groups.leaves,
            "sums": groups.sums.ravel().tolist(),
        }
        body = json.dumps(
            {"format": FORMAT} | vars(self) | {"groups": written}, separators=(",", ":")
        ).encode()
        return f"{zlib.crc32(body):08x}\n".encode() + body

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> "Manifest":
        """Parse and check a manifest.

        Raises:
          CorruptCheckpointError: The file is damaged or a field is invalid; the text names both.
          ValueError: The file has another format.
        """
        body = _body(name, content)
        try:
            fields = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{name} is no manifest: {type(error).__name__}") from None
        schema.check(name, fields, dict)
        found = fields.pop("format", None)
        schema.check(f"{name}: format", found, int)
        if found != FORMAT:
            library = printable(str(fields.get("library")))
            raise ValueError(
                f"{name}: written in format {found}, by jaxreplay {library}; this version reads "
                f"format {FORMAT}"
            )
        schema.check_fields(name, fields, _FIELDS)
        if manifest_name(int(fields["folder"][:10])) != name:
            raise CorruptCheckpointError(
                f"{name} belongs to another checkpoint, {fields['folder']}"
            )
        _check_numbers(name, fields)
        return cls(
            **{**fields, "groups": _groups(f"{name}: groups", fields["groups"], len(fields["end"]))}
        )


def manifest_name(number: int) -> str:
    return f"manifests/{number:010}.json"


def checksum_of(name: str, content: bytes) -> bytes:
    """Return the checksum in a manifest's first line. Raises a CorruptCheckpointError if the file
    is damaged."""
    _body(name, content)
    return content[:8]


def _body(name: str, content: bytes) -> memoryview:
    body = memoryview(content)[9:]
    if content[:9] != f"{zlib.crc32(body):08x}\n".encode():
        raise CorruptCheckpointError(f"{name} is not as it was written")
    return body


_FIELDS = {
    "folder": schema.folder,
    "step": schema.integer(*STEPS),
    "buffer": str,
    "library": str,
    "length": schema.integer(1, 2**30),
    "first": schema.integers(0, 2**62),
    "end": schema.integers(0, 2**62),
    "rows": schema.dict_of(schema.spec),
    "rest": schema.dict_of(schema.spec),
    "is_compressed": bool,
    "chunks": schema.dict_of(schema.integers(0, 2**32 - 1)),
    "groups": dict,
    "metadata": schema.metadata,
}
_NUMBERS = schema.integers(0, 2**62)
_GROUPS_FIELDS = {
    "saves": schema.list_of(dict),
    "columns": schema.integers(0, 2**32 - 1),
    "leaves": schema.list_of(schema.name),
    "sums": schema.integers(0, 2**32 - 1),
}
_SAVE_FIELDS = {
    "folder": schema.folder,
    "length": schema.integer(1, 2**30),
    "is_compressed": bool,
    "since": lambda where, value: _NUMBERS(where, value if isinstance(value, list) else [value]),
    "end": lambda where, value: _NUMBERS(where, value if isinstance(value, list) else [value]),
}


def _short(numbers: np.ndarray) -> int | list[int]:
    """Return one number if all streams have the same one, as streams that step together do."""
    return int(numbers[0]) if len(numbers) and (numbers == numbers[0]).all() else numbers.tolist()


def _check_numbers(name: str, fields: dict[str, Any]) -> None:
    """Check that `first`, `end` and `length` are consistent."""
    first, end = (np.array(fields[which], np.int64) for which in ("first", "end"))
    if len(first) != len(end) or (first > end).any() or (end - first > fields["length"]).any():
        raise CorruptCheckpointError(
            f"{name}: first, end: impossible for streams with a length of {fields['length']}"
        )


def _groups(where: str, fields: dict[str, Any], num_envs: int) -> Groups:
    """Check the fields of groups and return the groups."""
    schema.check_fields(where, fields, _GROUPS_FIELDS)
    saves = [
        _save(f"{where}: saves[{place}]", one, num_envs)
        for place, one in enumerate(fields["saves"])
    ]
    leaves, num_groups = tuple(fields["leaves"]), len(fields["columns"]) // 7
    if len(fields["columns"]) != 7 * num_groups or len(fields["sums"]) != num_groups * len(leaves):
        raise CorruptCheckpointError(
            f"{where}: columns, sums: {len(fields['columns'])} and {len(fields['sums'])} "
            f"numbers do not fit {len(leaves)} leaves"
        )
    columns = np.array(fields["columns"], np.int64).reshape(-1, 7)
    save, number, start, stop, env, env_stop, _ = columns.T
    is_possible = (
        (save < len(saves))
        & (number < 10**6)
        & (start < stop)
        & (env < env_stop)
        & (env_stop <= num_envs)
    )
    is_possible[is_possible] &= (
        stop[is_possible] <= np.array([one.length for one in saves], np.int64)[save[is_possible]]
    )
    if not is_possible.all():
        raise CorruptCheckpointError(
            f"{where}: columns: group {int(np.argmin(is_possible))} has rows that cannot exist"
        )
    return Groups(
        saves,
        columns,
        leaves,
        np.array(fields["sums"], np.uint32).reshape(num_groups, len(leaves)),
    )


def _save(where: str, fields: dict[str, Any], num_envs: int) -> Save:
    schema.check_fields(where, fields, _SAVE_FIELDS)
    vectors = {}
    for name in ("since", "end"):
        numbers = np.array(fields[name], np.int64)
        if numbers.ndim and len(numbers) != num_envs:
            raise CorruptCheckpointError(
                f"{where}: {name}: got {len(numbers)} streams, expected {num_envs}"
            )
        vectors[name] = np.broadcast_to(numbers, (num_envs,))
    if (vectors["since"] > vectors["end"]).any() or (
        vectors["end"] - vectors["since"] > fields["length"]
    ).any():
        raise CorruptCheckpointError(
            f"{where}: since, end: impossible for streams with a length of {fields['length']}"
        )
    return Save(
        fields["folder"], fields["length"], is_compressed=fields["is_compressed"], **vectors
    )

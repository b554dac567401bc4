"""What a generation holds, and where: the file whose appearance makes it one.

What is read is checked before anything goes by it: a manifest may be damaged, of another version, or made up.
"""

import dataclasses
import functools
import json
import zlib
from typing import Any

import numpy as np

from jaxreplay.checkpoint import rows, schema
from jaxreplay.checkpoint.files import BrokenError
from jaxreplay.paths import printable

FORMAT = 3  # of the files, and of what the leaves of a state mean
Seals = dict[str, list[int]]  # of arrays, by the leaf's name: see `arrays.py`


@dataclasses.dataclass(frozen=True)
class Group:
    """Some rows of all streams: for each leaf an array of `num_rows`, and the `env` and the `number` of each row."""

    folder: str
    num_rows: int
    seals: Seals
    first: list[list[int]]  # the smallest number of each stream, and
    last: list[list[int]]  # the largest one: pairs, of so many streams one after another, and of the number; 0 and -1 where there is none


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A generation. A row's number counts the rows of its stream from the first one on, overwritten ones included."""

    folder: str  # of its own arrays; later generations' come after it in the order of names. The manifest's name, too
    step: int
    buffer: str
    library: str
    length: int  # rows of a stream
    first: list[int]  # the number of the oldest row of each stream
    end: list[int]  # one more than the newest one's
    rows: dict[str, str]  # dtype and shape of a row, by leaf
    rest: dict[str, str]  # dtype and shape of every other leaf
    seals: Seals  # of the rest
    groups: list[Group]  # a row that is in two of them is as in the later one
    history: list[int]  # the fingerprint of each stream, but for rows that may be taken back; none where the state has none
    notes: dict[str, Any]  # the user's own

    def to_bytes(self) -> bytes:
        body = json.dumps({"format": FORMAT} | vars(self) | {"groups": [vars(group) for group in self.groups]}).encode()
        return f"{zlib.crc32(body):08x}\n".encode() + body

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> "Manifest":
        """Raises a BrokenError that names the file, and what is wrong in it; a ValueError, where it is of another format."""
        return _parsed(name, content)


@functools.lru_cache(maxsize=64)  # each save reads all that there are, several times
def _parsed(name: str, content: bytes) -> Manifest:
    checksum, _, body = content.partition(b"\n")
    if checksum != f"{zlib.crc32(body):08x}".encode():
        raise BrokenError(f"{name} is not as it was written")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"{name} is no manifest: {type(error).__name__}") from None
    schema.check(name, fields, dict)
    found = fields.pop("format", None)
    schema.check(f"{name}: format", found, int)
    if found != FORMAT:
        library = printable(str(fields.get("library")))
        raise ValueError(f"{name}: written in format {found}, by jaxreplay {library}; this version reads format {FORMAT}")
    schema.check_fields(name, fields, _FIELDS)
    for place, group in enumerate(fields["groups"]):
        schema.check_fields(f"{name}: groups[{place}]", group, _GROUP_FIELDS)
    manifest = Manifest(**{**fields, "groups": [Group(**group) for group in fields["groups"]]})
    if f"manifests/{manifest.folder}.json" != name:
        raise BrokenError(f"{name} is that of another generation, {manifest.folder}")
    _check_numbers(name, manifest)
    return manifest


_FIELDS = {
    "folder": schema.folder,
    "step": schema.integer(-(2**63), 2**63),
    "buffer": str,
    "library": str,
    "length": schema.integer(1, 2**30),
    "first": schema.integers(0, 2**62),
    "end": schema.integers(0, 2**62),
    "rows": schema.dict_of(schema.spec),
    "rest": schema.dict_of(schema.spec),
    "seals": schema.dict_of(schema.integers(0, 2**32 - 1)),
    "groups": schema.list_of(dict),
    "history": schema.integers(0, 2**32 - 1),
    "notes": dict,
}
_RUNS = schema.list_of(schema.pair(schema.integer(1, 2**30), schema.integer(-1, 2**62)))
_GROUP_FIELDS = {
    "folder": schema.group_folder,
    "num_rows": schema.integer(1, 2**30),
    "seals": schema.dict_of(schema.integers(0, 2**32 - 1)),
    "first": _RUNS,
    "last": _RUNS,
}


def _check_numbers(name: str, manifest: Manifest) -> None:
    """Whether the numbers of rows are possible together."""
    num_envs = len(manifest.end)
    first, end = np.array(manifest.first, np.int64), np.array(manifest.end, np.int64)
    if len(first) != num_envs or (first > end).any() or (end - first > manifest.length).any():
        raise BrokenError(f"{name}: first, end: these are not the rows of streams of {manifest.length}")
    if manifest.history and len(manifest.history) != num_envs:
        raise BrokenError(f"{name}: history: has {len(manifest.history)} streams, not {num_envs}")
    for place, group in enumerate(manifest.groups):
        where = f"{name}: groups[{place}]"
        counts = [sum(count for count, _ in runs) for runs in (group.first, group.last)]
        if counts[0] != counts[1] or counts[0] > num_envs:
            raise BrokenError(f"{where}: first, last: have {counts} streams, of {num_envs}")
        low, high = rows.from_runs(group.first), rows.from_runs(group.last)
        size = np.where(high < low, 0, high - low + 1)
        if (size > manifest.length).any() or int(size.sum()) != group.num_rows:
            raise BrokenError(f"{where}: first, last: name {int(size.sum()):,} rows, and num_rows is {group.num_rows:,}")

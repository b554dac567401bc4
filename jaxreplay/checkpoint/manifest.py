"""What a generation holds, and where: the file whose appearance makes it one."""

import dataclasses
import json
import zlib
from typing import Any

from jaxreplay.checkpoint.store import BrokenError

FORMAT = 1  # of the files, and of what the leaves of a state mean


@dataclasses.dataclass(frozen=True)
class Group:
    """Some rows of all streams: for each leaf an array of `num_rows`, and the `env` and the `number` of each row."""

    folder: str
    num_rows: int
    seals: dict[str, int]  # of the arrays, by the leaf's name
    first: list[list[int]]  # the smallest number of each stream, and
    last: list[list[int]]  # the largest one: pairs, of so many streams one after another, and of the number; 0 and -1 where there is none


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A generation. A row's number counts the rows of its stream from the first one on, overwritten ones included."""

    folder: str  # of its own arrays; later generations' come after it in the order of names
    step: int
    buffer: str
    library: str
    length: int  # rows of a stream
    first: list[int]  # the number of the oldest row of each stream
    end: list[int]  # one more than the newest one's
    rows: dict[str, str]  # dtype and shape of a row, by leaf
    rest: dict[str, str]  # dtype and shape of every other leaf
    seals: dict[str, int]  # of the arrays of the rest
    groups: list[Group]  # a row that is in two of them is as in the later one
    probes: list[list[int]]  # the stream, the number and a checksum of some rows
    notes: dict[str, Any]  # the user's own

    def to_bytes(self) -> bytes:
        body = json.dumps({"format": FORMAT} | vars(self) | {"groups": [vars(group) for group in self.groups]}).encode()
        return f"{zlib.crc32(body):08x}\n".encode() + body

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> "Manifest":
        checksum, _, body = content.partition(b"\n")
        if checksum != f"{zlib.crc32(body):08x}".encode():
            raise BrokenError(f"{name} is not as it was written")
        fields = json.loads(body)
        if (found := fields.pop("format")) != FORMAT:
            raise ValueError(f"{name}: written in format {found}, by jaxreplay {fields.get('library')}; this version reads format {FORMAT}")
        return cls(**{**fields, "groups": [Group(**group) for group in fields["groups"]]})

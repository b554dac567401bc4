"""Manifest of a checkpoint: the file that says what it holds and where, and makes it visible.

All fields are checked before they are used: a manifest may be damaged, of another version, or
forged.
"""

import dataclasses
import json
import zlib
from typing import Annotated, NamedTuple, cast

import numpy as np

from jaxreplay._util.aliases import Autoreset
from jaxreplay._util.names import printable
from jaxreplay.autoreset import FORMS
from jaxreplay.checkpoint import schema
from jaxreplay.checkpoint.files import CorruptCheckpointError
from jaxreplay.checkpoint.groups import Groups, Save
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.layout import Layout, Window

FORMAT = 8  # of the files, and of the meaning of a state's leaves
STEPS = -(2**63), 2**63 - 1  # the smallest and the largest step


class Leaf(NamedTuple):
    """A leaf of the rows: its array in the files, and its real dtype and shape."""

    name: str
    array: str  # name of its array in a group
    stored: np.dtype  # dtype of the array
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row


_Number = schema.Range(0, 2**62)
_Sum = schema.Range(0, 2**32 - 1)
_Length = Annotated[int, schema.Range(1, 2**30)]
_Specs = dict[str, Annotated[str, schema.dtype_and_shape]]
_Folder = Annotated[str, schema.folder]


def _form(where: str, value: str) -> None:
    if value not in ("", *FORMS):
        raise schema.expected(where, "a form of autoreset", value)


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """Meaning of the stored rows: the parts of a `Layout` and its `Window` that they depend on."""

    autoreset: Annotated[str, _form]  # "" for items
    allow_mask: bool
    before: Annotated[int, schema.Range(-1, 2**30)]  # -1: all since the episode's start
    after: Annotated[int, schema.Range(-1, 2**30)]  # -1: all up to the episode's end
    crosses_episodes: bool
    period: Annotated[int, schema.Range(1, 2**30)]
    needs_final_obs: bool

    @property
    def form(self) -> Autoreset | None:
        """The form of autoreset; None for items."""
        return cast(Autoreset, self.autoreset) if self.autoreset else None

    @classmethod
    def none(cls) -> "StoredLayout":
        """Return what stands for no rows."""
        return cls("", False, 0, 0, False, 1, False)

    @classmethod
    def of(cls, layout: Layout) -> "StoredLayout":
        """Return the part of a layout that a checkpoint has."""
        window = layout.window
        return cls(
            autoreset=layout.autoreset or "",
            allow_mask=layout.allow_mask,
            before=-1 if window.before is None else window.before,
            after=-1 if window.after is None else window.after,
            crosses_episodes=window.crosses_episodes,
            period=window.period,
            needs_final_obs=window.needs_final_obs,
        )

    def layout(self, num_envs: int, length: int, platform: str, has_table: bool) -> Layout:
        """Return a layout for the stored rows, without a sampler."""
        fields = {
            name: vars(self)[name] for name in ("crosses_episodes", "period", "needs_final_obs")
        }
        return Layout(
            num_envs=num_envs,
            length=length,
            autoreset=self.form,
            allow_mask=self.allow_mask,
            window=Window(
                before=None if self.before < 0 else self.before,
                after=None if self.after < 0 else self.after,
                **fields,
            ),
            platform=platform,
            has_table=has_table,
            sampler=None,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """Content of a checkpoint. A row's number counts all rows that its stream ever got, overwritten
    ones included."""

    # Name of the folder of its arrays: the checkpoint's number, which only one can have, and the
    # token of its writer.
    folder: _Folder
    step: Annotated[int, schema.Range(*STEPS)]
    buffer: str
    library: str
    layout: StoredLayout
    length: _Length  # rows in each stream's ring
    first: Annotated[list[int], _Number]  # number of the oldest row of each stream
    end: Annotated[list[int], _Number]  # one more than the number of its newest row
    rows: _Specs  # dtype and shape of a row, by leaf
    rest: _Specs  # dtype and shape of every other leaf
    is_compressed: bool  # whether the other leaves' arrays are
    chunks: dict[str, Annotated[list[int], _Sum]]  # of the other leaves' arrays, see `arrays.py`
    groups: Groups  # each row is in one; a stream's older rows are in earlier groups
    metadata: schema.Metadata  # the user's

    @property
    def number(self) -> int:
        """Place of the checkpoint in the chain."""
        return int(self.folder[:10])

    @property
    def writer(self) -> str:
        """Token of the writer."""
        return self.folder[11:]

    @property
    def name(self) -> str:
        """Name of the manifest's file."""
        return manifest_name(self.number)

    def files(self) -> set[str]:
        """Return the names of the files and folders of the checkpoint."""
        rows = {f"rows/{group.folder}" for group in self.groups}
        return {self.name, f"rest/{self.folder}"} | rows

    @property
    def leaves(self) -> list[Leaf]:
        """Leaves of the rows."""
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
            {"format": FORMAT} | vars(self) | {"groups": written, "layout": vars(self.layout)},
            separators=(",", ":"),
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
        fields = schema.decoded(name, dict, fields)
        found = schema.decoded(f"{name}: format", int, fields.pop("format", None))
        if found != FORMAT:
            library = printable(str(fields.get("library")))
            raise ValueError(
                f"{name}: written in format {found}, by jaxreplay {library}; this version reads "
                f"format {FORMAT}"
            )
        end = fields.get("end")
        num_envs = len(end) if isinstance(end, list) else 0
        columns = schema.decoded(f"{name}: groups", _Columns, fields.get("groups"))
        groups = columns.groups(f"{name}: groups", num_envs)
        manifest = schema.decoded(name, cls, fields | {"groups": groups})
        if manifest.name != name:
            raise CorruptCheckpointError(f"{name} belongs to another checkpoint, {manifest.folder}")
        first, last = (np.array(numbers, np.int64) for numbers in (manifest.first, manifest.end))
        _check_rows(f"{name}: first, end", manifest.length, first, last)
        return manifest


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


@dataclasses.dataclass(frozen=True)
class _Save:
    """A `groups.Save`. Vectors have one number if all streams have the same one."""

    folder: _Folder
    length: _Length
    since: Annotated[list[int], _Number]
    end: Annotated[list[int], _Number]
    is_compressed: bool


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Groups as they are written."""

    saves: list[_Save]
    columns: Annotated[list[int], _Sum]  # 7 of each group
    leaves: list[Annotated[str, schema.name]]
    sums: Annotated[list[int], _Sum]  # one of each group and leaf

    def groups(self, where: str, num_envs: int) -> Groups:
        """Check that the groups are possible for a number of streams, and return them."""
        saves = []
        for at, one in enumerate(self.saves):
            if {len(one.since), len(one.end)} - {1, num_envs}:
                raise CorruptCheckpointError(
                    f"{where}: saves[{at}]: since, end: expected one number, or {num_envs}"
                )
            vectors = (np.array(numbers, np.int64) for numbers in (one.since, one.end))
            since, end = (np.broadcast_to(vector, (num_envs,)) for vector in vectors)
            _check_rows(f"{where}: saves[{at}]: since, end", one.length, since, end)
            saves.append(Save(one.folder, one.length, since, end, one.is_compressed))
        num_groups, num_leaves = len(self.columns) // 7, len(self.leaves)
        if (len(self.columns), len(self.sums)) != (7 * num_groups, num_groups * num_leaves):
            raise CorruptCheckpointError(
                f"{where}: columns, sums: {len(self.columns)} and {len(self.sums)} numbers do not "
                f"fit {num_leaves} leaves"
            )
        columns = np.array(self.columns, np.int64).reshape(-1, 7)
        save, number, start, stop, env, env_stop, _ = columns.T
        length = np.array([*(one.length for one in saves), 0])[np.minimum(save, len(saves))]
        is_possible = (number < 10**6) & (start < stop) & (stop <= length)
        is_possible &= (env < env_stop) & (env_stop <= num_envs)
        if not is_possible.all():
            raise CorruptCheckpointError(
                f"{where}: columns: group {int(np.argmin(is_possible))} has rows that cannot exist"
            )
        sums = np.array(self.sums, np.uint32).reshape(num_groups, num_leaves)
        return Groups(saves, columns, tuple(self.leaves), sums)


def _short(numbers: np.ndarray) -> list[int]:
    """Return one number if all streams have the same one, as streams that step together do."""
    return numbers[:1].tolist() if (numbers == numbers[:1]).all() else numbers.tolist()


def _check_rows(where: str, length: int, first: np.ndarray, end: np.ndarray) -> None:
    """Check that rings of a length can have the rows `first` to `end - 1`, int64[E] both."""
    if len(first) != len(end) or (first > end).any() or (end - first > length).any():
        raise CorruptCheckpointError(f"{where}: impossible for streams with a length of {length}")

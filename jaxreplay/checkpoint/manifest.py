"""Manifest of a checkpoint: the file that says what it holds and where, and makes it visible.

All fields are checked before they are used: a manifest may be damaged, of another version, or
forged.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec import Meta

from jaxreplay._util import names
from jaxreplay._util.aliases import Autoreset
from jaxreplay._util.names import printable
from jaxreplay.checkpoint import bundle
from jaxreplay.checkpoint.bundle import Piece, Sums
from jaxreplay.checkpoint.files import CorruptCheckpointError
from jaxreplay.checkpoint.groups import NUM_COLUMNS, Folder, Group, Length, Save
from jaxreplay.storage import stored_arrays
from jaxreplay.storage.layout import Layout, Window

FORMAT = 1  # of the files, and of the meaning of a state's leaves
# The array of a checkpoint whose rows are in files elsewhere: the token of these.
TOKEN = "token"
STEPS = -(2**63), 2**63 - 1  # the smallest and the largest step
MOST_DEPTH = 100  # nested dicts and lists of metadata
_MOST_BYTES, _MOST_AXES = 2**50, 60  # of a row or an array
# Largest number of streams * saves, which have two numbers each, of a member.
MOST_NUMBERS = 2**21

_Number = Annotated[int, Meta(ge=0, le=2**62)]
_Reach = Annotated[int, Meta(ge=-1, le=2**30)]


def in_member(member: str, name: str) -> str:
    """Return the name of an array of a mixture's member, "" for a buffer that is no mixture."""
    return f"{member}/{name}" if member else name


class Leaf(NamedTuple):
    """A leaf of the rows: its array in the files, and its real dtype and shape."""

    name: str
    array: str  # name of its array in a group
    stored: np.dtype  # dtype of the array
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row


class StoredLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Meaning of the stored rows: the parts of a `Layout` and its `Window` that they depend on."""

    autoreset: Autoreset | Literal[""]  # "" for items
    allow_mask: bool
    before: _Reach  # -1: all since the episode's start
    after: _Reach  # -1: all up to the episode's end
    crosses_episodes: bool
    period: Length
    needs_final_obs: bool
    needs_next_obs: bool

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
            needs_next_obs=window.needs_next_obs,
        )

    def layout(self, **others: Any) -> Layout:
        """Return a layout for the stored rows, without a sampler.

        Args:
          others: Fields that are not stored here. Default: those of one row.
        """
        of_one = {"num_envs": 1, "length": 1, "platform": "cpu"}
        others = {**of_one, "has_table": False, "allow_write": False, **others}
        return Layout(
            autoreset=self.autoreset or None,
            allow_mask=self.allow_mask,
            window=Window(
                before=None if self.before < 0 else self.before,
                after=None if self.after < 0 else self.after,
                crosses_episodes=self.crosses_episodes,
                period=self.period,
                needs_final_obs=self.needs_final_obs,
                needs_next_obs=self.needs_next_obs,
            ),
            sampler=None,
            **others,
        )


class Member(msgspec.Struct, eq=False, forbid_unknown_fields=True):
    """Rows of one buffer. A row's number counts all rows that its stream ever got, overwritten ones
    included."""

    layout: StoredLayout
    length: Length  # rows in each stream's ring
    first: np.ndarray  # int64[E], number of the oldest row of each stream
    end: np.ndarray  # int64[E], one more than the number of its newest row
    rows: dict[str, str]  # dtype and shape of a row, by leaf
    saves: list[Save]
    columns: np.ndarray = msgspec.field(name="groups")  # as `columns_of` returns them

    @property
    def groups(self) -> list[Group]:
        """Its groups: each row is in one; a stream's older rows are in earlier groups. A list takes
        some hundred bytes for each."""
        return [
            Group._make((self.saves[save], *numbers[:6], Sums._make(numbers[6:])))
            for save, *numbers in self.columns.tolist()
        ]

    def check(self) -> None:
        """Check fields that were read, and put arrays into their shapes. Groups can be, each row is
        in one, and they are in the order of their rows.

        Raises:
          CorruptCheckpointError: Fields are impossible. Groups overlap, are out of order, have rows
            past `end`, or lack rows.
        """
        for name, text in self.rows.items():
            spec_of(f"rows: {name}", text)
        num_envs = len(self.end)
        if len(self.saves) * num_envs > MOST_NUMBERS:
            raise CorruptCheckpointError("saves: more than can be written")
        spans = [("first, end", self.length, self.first, self.end)]
        for at, one in enumerate(self.saves):
            where = f"saves[{at}]: since, end"
            if {len(one.since), len(one.end)} - {1, num_envs}:
                raise CorruptCheckpointError(f"{where}: expected one number, or {num_envs}")
            one.since, one.end, _ = np.broadcast_arrays(one.since, one.end, self.end)
            spans.append((where, one.length, one.since, one.end))
        for where, length, first, end in spans:
            if len(first) != len(end) or (first > end).any() or (end - first > length).any():
                raise CorruptCheckpointError(
                    f"{where}: impossible for streams with a length of {length}"
                )
        count = len(self.columns)
        if count // NUM_COLUMNS * NUM_COLUMNS != count:
            raise CorruptCheckpointError(f"{count} numbers are no groups")
        self.columns = self.columns.reshape(-1, NUM_COLUMNS)
        save, number, start, stop, env, env_stop, stamp, raw, _, stored = self.columns.T
        lengths = np.array([*(one.length for one in self.saves), 0])
        is_possible = (start < stop) & (stop <= lengths[np.minimum(save, len(self.saves))])
        is_possible &= (number < 10**6) & (env < env_stop) & (env_stop <= num_envs)
        is_possible &= (raw < 2**32) & (stored < 2**32) & (stamp < 2**32)
        if not is_possible.all():
            at = int(np.argmin(is_possible))
            raise CorruptCheckpointError(f"group {at} has rows that cannot exist")
        missing, end = int((self.end - self.first).sum()), self.end
        for group in reversed(self.groups):
            low, high = group.range()
            is_row = low < high
            if (is_row & (high > end)).any():
                raise CorruptCheckpointError(
                    f"{group.file} has rows of a later group, or rows that the checkpoint does not "
                    "have"
                )
            end = np.where(is_row, low, end)
            missing -= int(np.maximum(high - np.maximum(low, self.first), 0).sum())
        if missing:
            raise CorruptCheckpointError(
                f"{missing:,} rows of the checkpoint are in none of its groups"
            )

    @property
    def leaves(self) -> list[Leaf]:
        """Leaves of the rows."""
        found = []
        for name, text in self.rows.items():
            spec = spec_of(name, text)
            bits = stored_arrays.carrier(spec.dtype) if name.startswith("steps") else None
            stored = spec.dtype if bits is None else np.dtype(bits)
            array = name if bits is None else f"{name}.bits"
            found.append(Leaf(name, array, stored, spec.dtype, spec.shape))
        return found


class Manifest(msgspec.Struct, eq=False, forbid_unknown_fields=True, kw_only=True):
    """Content of a checkpoint."""

    format: int = FORMAT
    # Begins the names of its files: the checkpoint's number, which only one can have, and a token.
    folder: Folder
    step: Annotated[int, Meta(ge=STEPS[0], le=STEPS[1])]
    library: str
    writer: dict[str, str]  # who wrote it, for the errors of others
    buffer: str
    members: dict[str, Member]  # "" for a buffer that is no mixture; none for a rollout
    rest: dict[str, str]  # dtype and shape of every other array
    is_compressed: bool  # whether the files of these are
    # the arrays are divided into files of at most this size
    piece_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    files: list[Sums]  # of each of them
    text: str = msgspec.field(name="metadata")  # the user's, as JSON

    @property
    def metadata(self) -> Any:
        """The user's metadata, a copy."""
        return json.loads(self.text)

    @property
    def name(self) -> str:
        """Name of the manifest's file."""
        return f"manifests/{self.folder[:10]}.json"

    def has_index(self, member: str) -> bool:
        """Return whether the member's rows are in files elsewhere."""
        return in_member(member, TOKEN) in self.rest

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the arrays beside the rows."""
        return {name: spec_of(name, text) for name, text in self.rest.items()}

    def rest_files(self) -> Iterator[tuple[str, list[Piece]]]:
        """Yield the name and the pieces of each file beside the rows."""
        for number, pieces in enumerate(bundle.divided(self.specs(), self.piece_bytes)):
            yield bundle.file_name("rest", self.folder, number, self.is_compressed), pieces

    def sums(self) -> dict[str, Sums]:
        """Return the checksums of the checkpoint's files, but the manifest, by name."""
        rest = {name: one for one, (name, _) in zip(self.files, self.rest_files(), strict=False)}
        groups = (group for own in self.members.values() for group in own.groups)
        return rest | {group.file: group.sums for group in groups if group.sums is not None}

    def fill(self, written: Mapping[str, Sums]) -> None:
        """Note the checksums of the files that the save has written, by name."""
        for own in self.members.values():
            for nth, group in enumerate(own.groups):
                if group.file in written:
                    own.columns[nth, -len(Sums._fields) :] = written[group.file]
        self.files = [written[name] for name, _ in self.rest_files()]

    def to_bytes(self) -> bytes:
        body = msgspec.json.encode(self, enc_hook=_listed)
        return f"{zlib.crc32(body):08x}\n".encode() + body

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> "Manifest":
        """Parse and check a manifest.

        Raises:
          CorruptCheckpointError: The file is damaged or a field is invalid; the text names both.
          ValueError: The file has another format.
        """
        body = memoryview(content)[9:]
        if content[:9] != f"{zlib.crc32(body):08x}\n".encode():
            raise CorruptCheckpointError(f"{name} is not as it was written")
        try:
            head = msgspec.json.decode(body, type=_Head)
            if head.format == FORMAT:
                found = msgspec.json.decode(body, type=cls, dec_hook=_array)
                if found.name != name:
                    raise CorruptCheckpointError(f"it is of {found.folder}")
                check_depth(found.metadata)
                for one in found.members.values():
                    one.check()
                for leaf, text in found.rest.items():
                    spec_of(f"rest: {leaf}", text)
                return found
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{name}: {printable(str(error)[:300])}") from None
        raise ValueError(
            f"{name}: written in format {head.format}, by jaxreplay {printable(head.library)}; "
            f"this version reads format {FORMAT}"
        )


class _Head(msgspec.Struct):
    format: int
    library: str = ""


def _array(kind: Any, numbers: Any) -> np.ndarray:
    del kind
    return np.array(msgspec.convert(numbers, list[_Number]), np.int64)


def _listed(array: np.ndarray) -> list[int]:
    return array[: 1 if array.strides == (0,) else None].ravel().tolist()


def spec_of(where: str, text: str) -> jax.ShapeDtypeStruct:
    """Return the shape and the dtype of a text such as `uint8[84, 84]`. Raises a
    CorruptCheckpointError if no array can have them."""
    try:
        spec = names.spec_of(text)
    except (TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{where}: {error}") from None
    if not jnp.issubdtype(spec.dtype, np.number) and spec.dtype != np.bool_:
        raise CorruptCheckpointError(f"{where}: {spec.dtype} is no numeric dtype")
    if bundle.nbytes_of(spec) > _MOST_BYTES or len(spec.shape) > _MOST_AXES:
        raise CorruptCheckpointError(f"{where}: {text} is larger than an array can be")
    return spec


def check_depth(value: Any) -> None:
    """Raise a ValueError if JSON is nested too deeply for Python to copy it."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MOST_DEPTH} deep")

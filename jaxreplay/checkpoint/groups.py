"""Groups of rows: a group's rows share a file, with one array for each leaf.

The rows of a group are computed from a few numbers, so no list of them is kept or written. At a
save, the distance of a row is how many more rows its stream may get before the row is overwritten.
A group has the rows that a save writes of neighboring streams, between two distances. Its arrays
hold stream after stream, and each stream's oldest row first.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from jaxreplay.checkpoint import bundle
from jaxreplay.checkpoint.bundle import Sums
from jaxreplay.checkpoint.files import CorruptCheckpointError
from jaxreplay.checkpoint.rows import Picked
from jaxreplay.inspection.contents import numbers_in_order
from jaxreplay.storage import ring
from jaxreplay.storage.layout import NUM_PARTS

NUM_COLUMNS = 10  # numbers of a group in a manifest
MOST_ROWS = 2**22  # of a group: while it is read, each row takes 16 bytes for its numbers


Length = Annotated[int, Meta(ge=1, le=2**30)]
Folder = Annotated[str, Meta(pattern=r"\A[0-9]{10}-[0-9a-f]{8}\Z")]


class Save(msgspec.Struct, eq=False, forbid_unknown_fields=True):
    """Rows that one save wrote: the numbers `since` to `end - 1` of each of E streams.

    A manifest has one number in place of E equal ones, as those of streams that step together.
    """

    folder: Folder  # of the checkpoint
    length: Length  # rows in each stream's ring at that time
    since: np.ndarray  # int64[E]
    end: np.ndarray  # int64[E]
    is_compressed: bool

    def __post_init__(self) -> None:
        # equal numbers become a view of one
        self.since, self.end = (
            np.broadcast_to(own[:1], own.shape) if (own == own[:1]).all() else own
            for own in (self.since, self.end)
        )


class Group(NamedTuple):
    """Rows of a save: streams `env` to `env_stop - 1`, distances `start` to `stop - 1`."""

    save: Save
    number: int  # in the name of its file
    start: int
    stop: int
    env: int
    env_stop: int
    stamp: int = 0  # of the writes to its rows and their neighbors before the save, modulo 2^32
    sums: Sums | None = None  # of its file; None until it is written

    @property
    def file(self) -> str:
        """Name of its file."""
        save = self.save
        return bundle.file_name("rows", save.folder, self.number, save.is_compressed)

    @property
    def num_rows(self) -> int:
        low, high = self.range()
        return int((high - low).sum())

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first number of each stream's rows, and one more than the last: int64[E] both,
        equal for a stream without rows."""
        save, own = self.save, slice(self.env, self.env_stop)
        low, high = np.zeros((2, len(save.end)), np.int64)
        since, end = save.since[own], save.end[own]
        oldest = end - save.length  # its distance is 0
        low[own] = np.maximum(since, oldest + self.start)
        high[own] = np.maximum(np.minimum(end, oldest + self.stop), low[own])
        return low, high

    def stamped(self, stamps: np.ndarray | None) -> "Group":
        """Return the group with the stamp of the writes to its rows, a sum of those of the parts of
        the rings that have them.

        Args:
          stamps: uint32[E, NUM_PARTS], of each part of the streams' rings; None for none.
        """
        if stamps is None:
            return self._replace(stamp=0)
        low, high = (of_all[self.env : self.env_stop] for of_all in self.range())
        part = -(-self.save.length // NUM_PARTS)
        first, last = (ring.position_of(row, self.save.length) for row in (low, high - 1))
        end = last // part + 1 + NUM_PARTS * (last < first)
        own = stamps[self.env : self.env_stop].astype(np.int64)
        sums = np.cumsum(np.concatenate([np.zeros_like(own[:, :1]), own, own], axis=1), axis=1)
        env = np.arange(len(own))
        stamp = np.where(low < high, sums[env, end] - sums[env, first // part], 0)
        return self._replace(stamp=int(stamp.sum()) & 0xFFFFFFFF)

    def rows(self) -> Picked:
        """Return the rows in the order of the arrays. Raises a CorruptCheckpointError if there are
        more than `MOST_ROWS`."""
        low, high = self.range()
        if (num_rows := (high - low).sum()) > MOST_ROWS:
            raise CorruptCheckpointError(
                f"{self.file} has {num_rows:,} rows, more than a group can have"
            )
        return Picked(*numbers_in_order(low, high))


def columns_of(groups: Iterable[Group]) -> tuple[list[Save], np.ndarray]:
    """Return the saves of groups, and a row of numbers of each: int64[G, NUM_COLUMNS], the index of
    its save, its next six fields, and its checksums."""
    saves: dict[Save, int] = {}
    columns = [
        (saves.setdefault(one.save, len(saves)), *one[1:7], *(one.sums or (0, 0, 0)))
        for one in groups
    ]
    return [*saves], np.array(columns, np.int64).reshape(-1, NUM_COLUMNS)


def cut(save: Save, most: int, envs: slice, num_rewritten: int = 0) -> Iterator[Group]:
    """Divide the rows of a save into groups, in the order of overwriting.

    Args:
      save: The save.
      most: The largest number of rows in a group.
      envs: The streams whose rows are divided, with a start and a stop.
      num_rewritten: Newest rows of each stream that may be rewritten before the next save. They are
        in separate groups. Default: 0.
    """
    since, end = save.since[envs], save.end[envs]
    oldest, border = end - save.length, save.length - num_rewritten
    make = lambda start, stop, env=envs.start, env_stop=envs.stop: Group(
        save, 0, start, stop, env, env_stop
    )
    at_once, begun, held = max(most // len(end), 1), 0, 0
    first = int((since - oldest).min())
    for at in itertools.chain(
        range(first, border, at_once), range(max(first, border), save.length, at_once)
    ):
        stop = min(at + at_once, border if at < border else save.length)
        count = np.maximum(np.minimum(end, oldest + stop) - np.maximum(since, oldest + at), 0)
        total = int(count.sum())
        if held and (held + total > most or at == border):
            yield make(begun, at)
            held = 0
        if total > most:  # one row of each stream is more than a group may have
            bounds = [0, *np.flatnonzero(count)[most::most].tolist(), len(end)]
            for env, env_stop in itertools.pairwise(bounds):
                yield make(at, at + 1, envs.start + env, envs.start + env_stop)
        elif total:
            begun, held = begun if held else at, held + total
    if held:
        yield make(begun, save.length)

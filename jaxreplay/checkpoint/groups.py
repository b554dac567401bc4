"""Groups of rows: a group's rows share a folder, with one array for each leaf.

The rows of a group are computed from a few numbers, so no list of them is kept or written. At a
save, the distance of a row is how many more rows its stream may get before the row is overwritten.
A group has the rows that a save writes of neighboring streams, between two distances. Its arrays
hold stream after stream, and each stream's oldest row first.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxreplay.checkpoint import arrays
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files, Memory, new_memory
from jaxreplay.checkpoint.rows import Picked

MOST_ROWS = 2**22  # of a group: while it is read, each row takes 16 bytes for its numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Save:
    """Rows that one save wrote: the numbers `since` to `end - 1` of each of E streams."""

    folder: str  # of the checkpoint
    length: int  # rows in each stream's ring at that time
    since: np.ndarray  # int64[E]
    end: np.ndarray  # int64[E]
    is_compressed: bool


class Group(NamedTuple):
    """Rows of a save: streams `env` to `env_stop - 1`, distances `start` to `stop - 1`."""

    save: Save
    number: int  # in the name of its folder
    start: int
    stop: int
    env: int
    env_stop: int
    # of its rows (`fingerprint.py`); it and the fields below are set once the group is written
    fingerprint: int = 0
    leaves: tuple[str, ...] = ()  # leaves with an array in this group, of one chunk
    sums: Any = None  # uint32[leaves], checksums of the chunks; None until they are written

    @property
    def folder(self) -> str:
        return f"{self.save.folder}-{self.number:06}"

    @property
    def checksums(self) -> dict[str, int]:
        return dict(zip(self.leaves, np.asarray(self.sums).tolist(), strict=True))

    @property
    def num_rows(self) -> int:
        low, high = self.range()
        return int((high - low).sum())

    def within(self, env: int, env_stop: int) -> "Group":
        """Return the part of the rows that streams `env` to `env_stop - 1` have."""
        return self._replace(env=max(self.env, env), env_stop=min(self.env_stop, env_stop))

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first number of each stream's rows, and one more than the last: int64[E] both,
        equal for a stream without rows."""
        save, stream = self.save, np.arange(len(self.save.end))
        oldest = save.end - save.length  # its distance is 0
        low = np.maximum(save.since, oldest + self.start)
        high = np.maximum(np.minimum(save.end, oldest + self.stop), low)
        is_own = (stream >= self.env) & (stream < self.env_stop)
        return np.where(is_own, low, 0), np.where(is_own, high, 0)

    def rows(self) -> Picked:
        """Return the rows in the order of the arrays. Raises a CorruptCheckpointError if there are
        more than `MOST_ROWS`."""
        low, high = self.range()
        count = high - low
        if (num_rows := count.sum()) > MOST_ROWS:
            raise CorruptCheckpointError(
                f"rows/{self.folder} has {num_rows:,} rows, more than a group can have"
            )
        before = np.cumsum(count) - count
        env = np.repeat(np.arange(len(count)), count)
        return Picked(env, low[env] + np.arange(len(env)) - before[env])


@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Sequence[Group]):
    """Groups stored as columns: a list of `Group` would take some hundred bytes for each."""

    saves: list[Save]
    columns: np.ndarray  # int64[G, 7]: index of the group's save, and its next six fields
    leaves: tuple[str, ...]
    sums: np.ndarray  # uint32[G, leaves]

    @classmethod
    def of(cls, groups: Iterable[Group]) -> "Groups":
        """Return written groups as columns. All have arrays of the same leaves."""
        groups = list(groups)
        saves: dict[Save, int] = {}
        columns = [(saves.setdefault(group.save, len(saves)), *group[1:7]) for group in groups]
        leaves = groups[0].leaves if groups else ()
        assert all(group.leaves == leaves for group in groups)
        sums = np.array([group.sums for group in groups], np.uint32)
        sums = sums.reshape(len(groups), len(leaves))
        return cls([*saves], np.array(columns, np.int64).reshape(-1, 7), leaves, sums)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        save, *numbers = self.columns[at].tolist()
        return Group._make((self.saves[save], *numbers, self.leaves, self.sums[at]))

    def check(self, first: np.ndarray, end: np.ndarray) -> None:
        """Check that each row is in one group, and groups are in the order of their rows.

        Args:
          first: int64[E], the number of each stream's oldest row.
          end: int64[E], one more than the number of its newest row.

        Raises:
          CorruptCheckpointError: Groups overlap, are out of order, have rows past `end`, or lack
            rows.
        """
        num_rows = int((end - first).sum())
        for group in reversed(self):
            low, high = group.range()
            if ((low < high) & (high > end)).any():
                raise CorruptCheckpointError(
                    f"rows/{group.folder} has rows of a later group, or rows that the checkpoint "
                    "does not have"
                )
            end = np.where(low < high, low, end)
        if missing := num_rows - int(self.num_rows(first).sum()):
            raise CorruptCheckpointError(
                f"{missing:,} rows of the checkpoint are in none of its groups"
            )

    def num_rows(self, first: Any = 0) -> np.ndarray:
        """Count the rows of each group, int64[G].

        Args:
          first: int64[E], the first number of each stream that counts. Default: 0.
        """
        ranges = (group.range() for group in self)
        counts = [np.maximum(high - np.maximum(low, first), 0).sum() for low, high in ranges]
        return np.array(counts, np.int64)


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


def array_of(
    store: Files,
    group: Group,
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    memory: Memory = new_memory,
) -> np.ndarray:
    """Read a leaf of a group's K rows: `[K, *shape]`.

    Args:
      store: The files.
      group: The group.
      name: The leaf's name.
      shape: Shape of a row.
      dtype: Its dtype.
      memory: As for `arrays.chunk`.

    Raises:
      CorruptCheckpointError: The file is missing or damaged, or the manifest has none.
    """
    whole = (group.num_rows, *shape)
    if not math.prod(shape):
        return np.zeros(whole, dtype)
    if name not in group.leaves:
        raise CorruptCheckpointError(f"rows/{group.folder} has no array {name}")
    where = arrays.chunk_name(arrays.array_name("rows", group.folder, name), 1 + len(shape))
    return arrays.chunk(
        store, where, group.checksums[name], whole, dtype, group.save.is_compressed, memory
    )

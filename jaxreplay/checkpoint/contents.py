"""What a generation holds, for an inspection: read from its files a group at a time, without the buffer that it is of."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxreplay import leaves, ring
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.manifest import Group, Manifest
from jaxreplay.checkpoint.store import BrokenError, Store, array_name, checked
from jaxreplay.inspection.contents import COUNTERS, Contents, leaf_bytes, numbers_in_order, spread

_TREE = "sampler.tree.sums.0"


def contents_of(path: Any, step: int | None, max_bytes: int) -> Contents:
    """Of the newest generation under a path, or that of a step. At most `max_bytes` of the steps' values are looked at.

    Raises:
      FileNotFoundError: there is none. ValueError: it is of a rollout. BrokenError: an array is missing, or not as it was written.
    """
    store = Store(path)
    generations, problems = Generations(store, keep=1).read()
    manifest = next((one for one in generations if step in (None, one.step)), None)
    if manifest is None:
        what = f"there is no generation{'' if step is None else f' of step {step}'} under {store.name}"
        raise BrokenError("; ".join([what, *problems])) if problems else FileNotFoundError(what)
    if not manifest.rows:
        raise ValueError(f"{store.name} has no rows of a replay buffer, but a {manifest.buffer.partition('(')[0]}")
    return _Generation(store, manifest).contents(max_bytes)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf of the rows: as it is written, and what it means."""

    array: str  # its name in a group
    stored: np.dtype
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row

    @classmethod
    def of(cls, name: str, text: str) -> "_Leaf":
        dtype, shape = _dtype_and_shape(text)
        zeros = leaves.zeros(0, np.zeros((), dtype))
        if isinstance(zeros, leaves.Narrow) and name.startswith("steps"):
            return cls(f"{name}.bits", np.dtype(zeros.bits.dtype), dtype, shape)
        return cls(name, dtype, dtype, shape)

    @property
    def row_bytes(self) -> int:
        return leaf_bytes(self.shape, self.stored)


class _Generation:
    def __init__(self, store: Store, manifest: Manifest):
        self._store, self._manifest = store, manifest
        self._first, self._end = (np.asarray(numbers, np.int64) for numbers in (manifest.first, manifest.end))
        self._leaves = {name: _Leaf.of(name, text) for name, text in manifest.rows.items()}
        self._owner = np.full(int((self._end - self._first).sum()), -1, np.int32)  # the group that has each row as it is now

    def contents(self, max_bytes: int) -> Contents:
        manifest, flags, reward = self._manifest, self._leaves.get("flags"), self._leaves.get("steps.reward")
        columns = {name: leaf for name, leaf in (("flags", flags), ("reward", reward)) if leaf is not None and leaf.shape == ()}
        found = {name: np.zeros(len(self._owner), np.uint8 if name == "flags" else np.float64) for name in columns}
        for at, group in enumerate(manifest.groups):
            place = self._places(group)
            self._owner[place[place >= 0]] = at
            for name, leaf in columns.items():
                found[name][place[place >= 0]] = self._read(group, leaf, np.flatnonzero(place >= 0))
        if missing := int((self._owner < 0).sum()):
            raise BrokenError(f"{missing:,} rows of the generation are in none of its groups")
        return Contents(
            buffer=manifest.buffer,
            length=manifest.length,
            first=self._first,
            end=self._end,
            leaves={name: text for name, text in manifest.rows.items() if name.startswith("steps")},
            flags=found.get("flags"),
            reward=found.get("reward"),
            probability=self._probability() if _TREE in manifest.rest else None,
            counters={name: float(self._rest(f"sampler.{name}")) for name in COUNTERS if f"sampler.{name}" in manifest.rest},
            blocks=lambda: self._blocks(max_bytes),
        )

    def _blocks(self, max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
        """A group's chosen rows at a time."""
        steps = {name: leaf for name, leaf in self._leaves.items() if name.startswith("steps")}
        row_bytes = max(sum(leaf.row_bytes for leaf in steps.values()), 1)
        is_chosen = np.zeros(len(self._owner), bool)
        is_chosen[spread(np.arange(len(self._owner)), max_bytes // row_bytes)] = True
        for at, group in enumerate(self._manifest.groups):
            place = self._places(group)
            rows = np.flatnonzero((place >= 0) & (self._owner[place] == at) & is_chosen[place])
            if len(rows):
                yield {name: self._read(group, leaf, rows) for name, leaf in steps.items()}

    def _places(self, group: Group) -> np.ndarray:
        """Of a group's rows, in the order of `Contents`: int64[num_rows]; -1 for those that are not held any more."""
        env, number = (
            self._read(group, _Leaf(name, np.dtype(dtype), np.dtype(dtype), ()), slice(None)).astype(np.int64)
            for name, dtype in (("env", np.int32), ("number", np.int64))
        )
        before = np.cumsum(self._end - self._first) - (self._end - self._first)
        is_held = (number >= self._first[env]) & (number < self._end[env])
        return np.where(is_held, before[env] + number - self._first[env], -1)

    def _read(self, group: Group, leaf: _Leaf, rows: np.ndarray | slice) -> np.ndarray:
        if not leaf.row_bytes:
            return np.zeros((len(np.arange(group.num_rows)[rows]), *leaf.shape), leaf.dtype)
        where = array_name("rows", group.folder, leaf.array)
        array = self._store.open(where, (group.num_rows, *leaf.shape), leaf.stored, group.seals[leaf.array])
        block = checked(where, lambda: array[rows].read().result())
        return block if leaf.stored == leaf.dtype else np.asarray(leaves.decode(jnp.asarray(block), leaf.dtype))

    def _probability(self) -> np.ndarray:
        """From the leaves of the tree, which lie by time, then env."""
        env, number = numbers_in_order(self._first, self._end)
        mass = self._rest(_TREE)[ring.position_of(number, self._manifest.length) * len(self._end) + env].astype(np.float64)
        return mass / max(mass.sum(), np.finfo(np.float64).tiny)

    def _rest(self, name: str) -> np.ndarray:
        where = array_name("rest", self._manifest.folder, name)
        dtype, shape = _dtype_and_shape(self._manifest.rest[name])
        array = self._store.open(where, shape, dtype, self._manifest.seals[name])
        return checked(where, lambda: array.read().result())


def _dtype_and_shape(text: str) -> tuple[np.dtype, tuple[int, ...]]:
    dtype, _, sizes = text.partition("[")
    return np.dtype(jnp.dtype(dtype)), tuple(int(size) for size in sizes.rstrip("]").split(",") if size)

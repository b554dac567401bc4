"""Contents of a checkpoint, for an inspection: read group by group, without the buffer's code."""

import dataclasses
import re
from typing import Any

import numpy as np

from jaxreplay._util.names import printable
from jaxreplay.checkpoint import schema
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.saved_rows import RowReader
from jaxreplay.checkpoint.store import array_name, store_at
from jaxreplay.checkpoint.zarr_arrays import Array
from jaxreplay.inspection.contents import COUNTERS, Contents, leaf_bytes, numbers_in_order, spread
from jaxreplay.inspection.resets import Resets, rows_around_resets
from jaxreplay.storage import ring, stored_arrays

_TREE = "sampler.tree.sums.0"


def generation_of(path: Any, step: int | None, timeout: float) -> tuple[Files, Manifest]:
    """Return the store and the manifest of the newest checkpoint under a path, or of a step's.

    Args:
      path: Path, URL or specification, as for `store_at`.
      step: Step of the checkpoint, or None for the newest.
      timeout: Seconds that a request to an object store may take.

    Raises:
      FileNotFoundError: There is no checkpoint, or none of that step.
      ValueError: The checkpoint is of a rollout.
      CorruptCheckpointError: There is none, and some manifests cannot be read.
    """
    store = store_at(path, timeout)
    generations, problems = Generations(store, max_to_keep=1).read()
    manifest = next((one for one in generations if step in (None, one.step)), None)
    if manifest is None:
        what = (
            f"there is no checkpoint{'' if step is None else f' of step {step}'} under {store.name}"
        )
        raise (
            CorruptCheckpointError("; ".join([what, *problems]))
            if problems
            else FileNotFoundError(what)
        )
    if not manifest.rows:
        raise ValueError(
            f"{store.name} is no checkpoint of a replay buffer, but of a "
            f"{printable(manifest.buffer.partition('(')[0])}"
        )
    return store, manifest


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf of the rows: its array in the files, and its real dtype and shape."""

    array: str  # name of its array in a group
    stored: np.dtype  # dtype of the array
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row

    @classmethod
    def of(cls, name: str, text: str) -> "_Leaf":
        dtype, shape = schema.dtype_and_shape(name, text)
        bits = stored_arrays.carrier(dtype) if name.startswith("steps") else None
        return (
            cls(name, dtype, dtype, shape)
            if bits is None
            else cls(f"{name}.bits", np.dtype(bits), dtype, shape)
        )

    def read(self, reader: RowReader, rows: np.ndarray) -> np.ndarray:
        values = reader.read(self.array, self.shape, self.stored, rows)
        return (
            values
            if self.stored == self.dtype
            else stored_arrays.decode_on_host(values, self.dtype)
        )


def contents_of(store: Files, manifest: Manifest, max_bytes: int) -> Contents:
    """Read a checkpoint's contents, with at most `max_bytes` of the steps' values.

    Raises:
      CorruptCheckpointError: A file is missing or damaged.
    """
    reader = RowReader(store, manifest)
    held = {name: _Leaf.of(name, text) for name, text in manifest.rows.items()}
    steps = {name: leaf for name, leaf in held.items() if name.startswith("steps")}
    every = np.arange(reader.num_rows)

    row_bytes = sum(leaf_bytes(leaf.shape, leaf.stored) for leaf in steps.values())
    rows = spread(every, max_bytes // max(row_bytes, 1))

    def rest(name: str) -> np.ndarray:
        dtype, shape = schema.dtype_and_shape(name, manifest.rest[name])
        where = array_name("rest", manifest.folder, name)
        if name not in manifest.seals:
            raise CorruptCheckpointError(f"{where} is not named in the manifest")
        return Array(store, where, shape, dtype, manifest.seals[name]).read()

    if "flags" in held and (held["flags"].dtype, held["flags"].shape) != (np.uint8, ()):
        raise CorruptCheckpointError(
            f"manifests/{manifest.folder}.json: rows: flags must be uint8[], got "
            f"{manifest.rows['flags']}"
        )
    flags = held["flags"].read(reader, every) if "flags" in held else None
    reward, probability = held.get("steps.reward"), None
    if _TREE in manifest.rest:  # the tree's leaves are ordered by time, then env
        env, number = numbers_in_order(reader.first, reader.end)
        leaf = ring.position_of(number, manifest.length) * len(reader.end) + env
        tree = rest(_TREE)
        if (
            tree.ndim != 1
            or tree.size < manifest.length * len(reader.end)
            or tree.dtype.kind != "f"
        ):
            raise CorruptCheckpointError(
                f"manifests/{manifest.folder}.json: rest: {_TREE} must be a tree of the rows, got "
                f"{manifest.rest[_TREE]}"
            )
        mass = tree[leaf].astype(np.float64)
        probability = mass / max(mass.sum(), np.finfo(np.float64).tiny)
    return Contents(
        buffer=manifest.buffer,
        source=f"{store.name}, step {manifest.step}",
        length=manifest.length,
        first=reader.first,
        end=reader.end,
        leaves={name: text for name, text in manifest.rows.items() if name in steps},
        flags=flags,
        reward=None
        if reward is None or reward.shape
        else reward.read(reader, every).astype(np.float64),
        probability=probability,
        resets=_resets_of(reader, manifest, held, flags),
        counters={
            name: float(rest(f"sampler.{name}"))
            for name in COUNTERS
            if manifest.rest.get(f"sampler.{name}", "").endswith("[]")
        },
        rows=rows,
        values={name: leaf.read(reader, rows) for name, leaf in steps.items()},
    )


def _resets_of(
    reader: RowReader, manifest: Manifest, held: dict[str, _Leaf], flags: np.ndarray | None
) -> Resets | None:
    """Read the rows around resets; return None for items.

    Args:
      flags: uint8[R], of all rows in order.
    """
    declared = re.search(r"\bautoreset='(\w+)'", manifest.buffer)
    if flags is None or declared is None:
        return None
    env, _ = numbers_in_order(reader.first, reader.end)
    obs = [leaf for name, leaf in held.items() if name.split(".")[:2] == ["steps", "obs"]]
    row_bytes = sum(leaf_bytes(leaf.shape, leaf.stored) for leaf in obs)
    around = rows_around_resets(flags, env, row_bytes)
    reward = held.get("steps.reward")

    def read(leaf: _Leaf) -> np.ndarray:
        return leaf.read(reader, around.reshape(-1)).reshape(*around.shape, *leaf.shape)

    return Resets(
        declared[1],
        flags[around],
        None if reward is None or reward.shape else read(reward).astype(np.float64),
        [read(leaf) for leaf in obs],
    )

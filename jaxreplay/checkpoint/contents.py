"""Contents of a path's checkpoint: its manifest, the example of its rows, and, for an inspection,
the rows, which are read group by group without the buffer's code."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import nested, printable
from jaxreplay.buffers import state_checks
from jaxreplay.checkpoint.chain import Chain
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.manifest import Manifest, Member, in_member
from jaxreplay.checkpoint.reader import Reader
from jaxreplay.checkpoint.restoring import CheckpointFiles
from jaxreplay.checkpoint.store import store_at
from jaxreplay.inspection.contents import COUNTERS, Contents, StoredRows, numbers_in_order
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.types import Step

_Result = TypeVar("_Result")
_OF_PRIORITIES = "sampler.jaxreplay/Prioritized:"  # begins the names of its numbers
_MASS = f"{_OF_PRIORITIES}mass"
_FEW_ROWS = 2**22  # whose numbers take little memory


def at_checkpoint(
    where: str,
    use: Callable[[Files, Manifest], _Result],
    path: Any,
    step: int | None,
    member: str,
    timeout: float = 60.0,
) -> _Result:
    """Return what a function makes of the newest checkpoint under a path, or of a step's.

    If its files are missing or damaged, it is called again with the newest one then: a run may have
    deleted the other.

    Args:
      where: Name of the called function, for errors.
      use: Function of the store and the manifest.
      path: Path, URL or specification, as for `store_at`.
      step: Step of the checkpoint, or None for the newest.
      member: Name of a mixture's member, "" for a buffer that is no mixture.
      timeout: Seconds that a request to an object store may take. Default: 60.

    Raises:
      FileNotFoundError: There is no checkpoint, or none of that step.
      ValueError: The checkpoint has no rows of the member.
      CorruptCheckpointError: A file is missing or damaged.
    """
    store, before = store_at(path, timeout), ""
    while True:
        manifest = _looked_for(where, store, step, member)
        try:
            return use(store, manifest)
        except CorruptCheckpointError:
            if manifest.folder == before:
                raise
            before = manifest.folder


def _looked_for(where: str, store: Files, step: int | None, member: str) -> Manifest:
    found, problems = Chain(store).read()
    manifest = next((one for one in found if step in (None, one.step)), None)
    if manifest is None:
        what = (
            f"there is no checkpoint{'' if step is None else f' of step {step}'} under {store.name}"
        )
        raise (
            CorruptCheckpointError("; ".join([what, *problems]))
            if problems
            else FileNotFoundError(what)
        )
    if member not in manifest.members:
        names = ", ".join(map(printable, filter(None, manifest.members)))
        what = f"member {printable(repr(member))}" if member else "rows of a replay"
        kind = printable(manifest.buffer.partition("(")[0])
        raise ValueError(
            f"{where}: {store.name} is a checkpoint of a {kind}"
            + (f": pass member= one of {names}" if names else f", which has no {what}")
        )
    return manifest


def example_of(where: str, manifest: Manifest, name: str, in_files: PyTree = None) -> PyTree:
    """Return shapes and dtypes of one env's step, or of an item, with dicts as pytrees.

    Args:
      where: Name of the called function, for errors.
      manifest: The manifest.
      name: Name of the member.
      in_files: Those of rows in files. Default: none are known.

    Raises:
      ValueError: The rows are in files elsewhere.
    """
    member = manifest.members[name]
    if manifest.has_index(name):
        if in_files is not None:
            return in_files
        raise ValueError(
            f"{where}: the checkpoint has the index of rows in files; open their folder with "
            "jaxreplay.Replay(buffer, rows=folder)"
        )
    leaves = {
        leaf.name: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for leaf in member.leaves
    }
    steps = nested(leaves)["steps"]
    if member.layout.autoreset:
        steps = Step(**{"terminated": None, "truncated": None, **steps})
    return state_checks.example_of(member.layout.layout(), steps)


def _rows_of(store: Files, member: Member) -> StoredRows:
    """Return the rows of a buffer in a checkpoint.

    Raises:
      CorruptCheckpointError: A group has no file.
    """
    reader = Reader(store, member)
    if reader.num_rows > _FEW_ROWS:  # which a forged manifest may name without any file
        for group in reader.groups:
            reader.read(group, None)

    def read(wanted: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: stored_arrays.decode(values, leaf.dtype)
            if (leaf := reader.leaves[name]).stored != leaf.dtype
            else values
            for name, values in reader.take(wanted).items()
        }

    return StoredRows(
        member.first, member.end, reader.leaves, read, member.layout.autoreset or None
    )


def contents_of(store: Files, manifest: Manifest, *, member: str, max_bytes: int) -> Contents:
    """Read the contents of a checkpoint's member, with at most `max_bytes` of the steps' values.

    Raises:
      CorruptCheckpointError: A file is missing or damaged.
    """
    rows, own = manifest.members[member], functools.partial(in_member, member)
    stored = _rows_of(store, rows)
    files = CheckpointFiles(store, manifest)
    rest = lambda leaf: files.arrays([own(leaf)])[own(leaf)]
    if rows.rows.get("flags", "uint8[]") != "uint8[]":
        raise CorruptCheckpointError(
            f"{manifest.name}: rows: flags must be uint8[], got {rows.rows['flags']}"
        )
    probability = None
    if own(_MASS) in manifest.rest:
        env, number = numbers_in_order(stored.first, stored.end)
        row = env * rows.length + ring.position_of(number, rows.length)
        mass = rest(_MASS)
        if mass.shape != (rows.length * len(stored.end),) or mass.dtype.kind != "f":
            raise CorruptCheckpointError(
                f"{manifest.name}: rest: {_MASS} must be a number of each row, got "
                f"{manifest.rest[own(_MASS)]}"
            )
        is_pending = number >= stored.end[env] - rest("counters.num_pending")[env]
        mass = np.where(is_pending, 0, np.nan_to_num(mass[row].astype(np.float64)))
        probability = mass / max(mass.sum(), np.finfo(np.float64).tiny)
    num_bytes, metadata = sum(sums.size for sums in manifest.sums().values()), ""
    if manifest.metadata:
        metadata = f", metadata {printable(json.dumps(manifest.metadata)[:200])}"
    return stored.contents(
        max_bytes,
        buffer=f"{member}{' of ' * bool(member)}{manifest.buffer}",
        source=f"{store.name}, step {manifest.step}, {num_bytes:,} bytes{metadata}",
        length=rows.length,
        probability=probability,
        counters={
            counter: float(rest(_OF_PRIORITIES + counter))
            for counter in COUNTERS
            if manifest.rest.get(own(_OF_PRIORITIES + counter), "").endswith("[]")
        },
    )

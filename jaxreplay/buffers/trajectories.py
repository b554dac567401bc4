"""Ragged trajectories from workers, written into preallocated arrays through one small chunk.

They are stored back to back, in the layout of `autoreset="next_step"`: the steps of a trajectory,
then a final row with its final observation. Nothing is concatenated on host or device. Rows are
gathered in a chunk of fixed size, and one compiled function, which donates the arrays, writes it
at a traced row. So no length needs a compilation of its own.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.aligned import aligned_zeros
from jaxreplay.buffers import step_checks
from jaxreplay.types import Step

# Chunks of 4 to 32 MiB stay in a cache: 1 GB was written in 0.15 to 0.2 s, and in 0.3 s with chunks
# of 64 MiB (measured, two CPU cores).
CHUNK_BYTES = 2**24
_WHERE = "from_trajectories"


class Trajectory(NamedTuple):
    """A trajectory as rows to be written: its steps and, if it has one, its final row.

    Attributes:
      rows: (Step, mask), NumPy leaves [L, ...], views of the input. Leaves shorter than `num_rows`
        are padded with zeros, longer ones are cut. The flags in it are all False.
      num_steps: Number of steps that are kept; the last one given may have become the final row.
      num_rows: Number of rows: `num_steps`, or one more with a final row.
      is_terminated: Flag of the last step, kept here to save an array of flags.
      is_truncated: Flag of the last step.
    """

    rows: Any
    num_steps: int
    num_rows: int
    is_terminated: bool
    is_truncated: bool


def check_trajectories(trajectories: Iterable[Any], row: Step, length: int) -> list[Trajectory]:
    """Return all trajectories as rows, without a copy of any array.

    Args:
      trajectories: Steps or mappings with leaves [L, ...]. Leaves of `obs`, and then of `extras`,
        may be [L + 1, ...].
      row: Shapes and dtypes of one row, without leading axes.
      length: Number of rows that there is room for.

    Raises:
      ValueError: A trajectory does not fit; the error names the first one.
    """
    if isinstance(trajectories, Step | Mapping):
        raise ValueError(
            f"{_WHERE}: takes a list of trajectories, got one {type(trajectories).__name__}; "
            "write [trajectory]"
        )
    checked, total = [], 0
    for number, trajectory in enumerate(trajectories):
        where = f"{_WHERE}: trajectory {number}"
        checked.append(_as_rows(where, trajectory, row))
        total += checked[-1].num_rows
        if total > length:
            raise ValueError(
                f"{where}: does not fit: with it there are {total} rows, final observations "
                f"included, but the rollout has length={length}; "
                "make it longer, or pass fewer trajectories"
            )
    return checked


def write_trajectories(target: Any, trajectories: list[Trajectory], chunk_bytes: int) -> Any:
    """Write the rows of all trajectories, one after the other, from row 0 on.

    Args:
      target: (Step, mask) as stored, leaves [T, 1, ...]. Donated. Rows after the last written one
        may be overwritten with zeros or other rows.
      trajectories: As `check_trajectories` returns them.
      chunk_bytes: Bytes of the host's memory for one chunk. A chunk has at least one row.

    Returns:
      The new `target`.
    """
    stored, structure = jax.tree.flatten(target)
    if any(isinstance(leaf, Tracer) for leaf in stored):
        raise ValueError(
            f"{_WHERE}: it copies NumPy arrays chunk by chunk and compiles its own writes: call it "
            "outside of jit"
        )
    row_bytes = sum(leaf.nbytes for leaf in stored) // len(stored[0])
    size = min(len(stored[0]), max(1, chunk_bytes // max(1, row_bytes)))
    chunk = [aligned_zeros((size, *leaf.shape[2:]), leaf.dtype) for leaf in stored]
    chunk_tree = jax.tree.unflatten(structure, chunk)

    # The first chunk is the short one: the rows that it writes too many are overwritten, and the
    # last chunk ends exactly at the last row.
    start, filled, wanted = (
        0,
        0,
        _short_first(sum(trajectory.num_rows for trajectory in trajectories), size),
    )
    for trajectory in trajectories:
        sources, num_copied = jax.tree.leaves(trajectory.rows), 0
        while num_copied < trajectory.num_rows:
            count = min(trajectory.num_rows - num_copied, wanted - filled)
            for target_rows, source in zip(chunk, sources, strict=True):
                stop = num_copied + count
                _copy_rows(target_rows[filled : filled + count], source[num_copied:stop])
            if num_copied < trajectory.num_steps <= num_copied + count:
                last = filled + trajectory.num_steps - 1 - num_copied
                chunk_tree[0].terminated[last], chunk_tree[0].truncated[last] = (
                    trajectory.is_terminated,
                    trajectory.is_truncated,
                )
            num_copied, filled = num_copied + count, filled + count
            if filled == wanted:
                target = _write_chunk(target, chunk_tree, np.int32(start))
                jax.block_until_ready(target)  # until then JAX reads the chunk in place
                start, filled, wanted = start + wanted, 0, size
    return target


@functools.partial(jax.jit, donate_argnums=0)
def _write_chunk(target, chunk, start):
    """Write a chunk, leaves [K, ...], to `target`, leaves [T, 1, ...], from row `start` on."""
    return jax.tree.map(
        lambda leaf, rows: jax.lax.dynamic_update_slice_in_dim(leaf, rows[:, None], start, axis=0),
        target,
        chunk,
    )


def _as_rows(where: str, trajectory: Any, row: Step) -> Trajectory:
    """Return a trajectory as rows, or raise a ValueError if it does not fit."""
    step = step_checks.as_step(where, trajectory)
    checks.check_storable(where, step)
    if step.final_obs is not None:
        raise ValueError(
            f"{where}: has a final_obs; append it to obs instead, which then has one row more "
            "than action"
        )
    num_steps = (*np.shape(step.terminated), 0)[0]
    _check_leaves(where, step, num_steps, row)
    step = jax.tree.map(np.asarray, step)
    _check_end(where, step)
    has_final = any(len(leaf) > num_steps for leaf in jax.tree.leaves(step.obs))
    is_terminated, is_truncated = (
        bool(flag[-1:].any()) for flag in (step.terminated, step.truncated)
    )
    # The last known observation is the last step's own, so that step becomes the final row.
    if not has_final and not is_terminated:
        num_steps, has_final = max(num_steps - 1, 0), True
    # without steps, the final observation is not stored
    num_rows = num_steps + has_final if num_steps else 0
    # broadcast: one byte, whatever the length
    no, yes = (np.broadcast_to(np.bool_(flag), num_steps) for flag in (False, True))
    rows = (step.replace(terminated=no, truncated=no), yes)
    return Trajectory(rows, num_steps, num_rows, is_terminated, is_truncated or not is_terminated)


def _check_leaves(where: str, step: Step, num_steps: int, row: Step) -> None:
    """Raise a ValueError for leaves of other lengths, shapes or dtypes. Leaves of `obs` may all
    have one more row, the final one; then those of `extras` may, too."""
    first = next(map(np.shape, jax.tree.leaves(step.obs)), ())
    most = num_steps + (first[:1] == (num_steps + 1,))
    lengths = {"obs": (most,), "extras": (num_steps, most)}
    if all(
        _fits(getattr(step, name), getattr(row, name), lengths.get(name, (num_steps,)))
        for name in step_checks.STEP_FIELDS
    ):
        return
    of = lambda length, rows: jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((length, *row.shape), row.dtype), rows
    )
    expected = of(num_steps, row).replace(obs=of(most, row.obs))
    if jax.tree.structure(step.extras) == jax.tree.structure(row.extras):
        either = lambda leaf, row: of(most if np.shape(leaf)[:1] == (most,) else num_steps, row)
        expected = expected.replace(extras=jax.tree.map(either, step.extras, row.extras))
    hint = (
        "all leaves of a trajectory have as many rows as terminated; those of obs may have one "
        "more, the final one"
    )
    checks.check_leaves(where, step, expected, hint)


def _fits(tree: PyTree, row: Any, lengths: tuple[int, ...]) -> bool:
    """Return True if all leaves certainly fit. This is faster than `check_leaves`, which matters
    for thousands of short trajectories."""
    leaves, structure = jax.tree.flatten(tree)
    specs, expected = jax.tree.flatten(row)
    return structure == expected and all(
        isinstance(leaf, np.ndarray)
        and leaf.shape[:1] in [(length,) for length in lengths]
        and leaf.shape[1:] == spec.shape
        and jax.dtypes.canonicalize_dtype(leaf.dtype) == spec.dtype
        for leaf, spec in zip(leaves, specs, strict=True)
    )


def _check_end(where: str, step: Step) -> None:
    """Raise a ValueError if a flag is set before the last step."""
    for name, flag in {"terminated": step.terminated, "truncated": step.truncated}.items():
        if flag[:-1].any():
            raise ValueError(
                f"{where}: {name} is set at step {int(flag.argmax())}, but there are {len(flag)} "
                "steps; a trajectory is one episode, or a part of one: pass the steps after a done "
                "as another trajectory"
            )


def _short_first(num_rows: int, size: int) -> int:
    """Return the number of rows of the first chunk, in 1 .. size, such that all others are full."""
    return num_rows - (num_rows - 1) // size * size


def _copy_rows(rows: np.ndarray, source: np.ndarray) -> None:
    """Copy rows, and fill the rest with zeros.

    If the stored leaf holds the bits of a narrow float (`storage/stored_arrays.py`), the bits are
    copied. Otherwise NumPy converts wider dtypes.
    """
    if rows.dtype.kind == "u" and jnp.issubdtype(source.dtype, jnp.floating):
        source = source.view(rows.dtype)
    rows[: len(source)] = source
    rows[len(source) :] = 0

"""Ways to save and restore a full buffer of images, for `checkpoints.py`."""

import contextlib
import os
import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer

NUM_ENVS = 16
SIDE = 84
_CHUNK = 64 * 2**20


def prepare(way: str, num_rows: int) -> tuple[list[Any], Callable, Callable, Any]:
    """Return a state, in a list; functions that save a state under a path and restore it; and for
    jaxreplay `_More`, else None."""
    return {"plain": _plain, "pickle": _pickle, "orbax": _orbax, "vault": _vault}.get(
        way, _jaxreplay
    )(way, num_rows)


def num_rows_of(gigabytes: float) -> int:
    return int(gigabytes * 1e9) // SIDE**2 // NUM_ENVS * NUM_ENVS


def state_bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def steps_of(count: int, seed: int) -> dict[str, Any]:
    """Return steps of all envs, `[count, num_envs, ...]`: half of each image noise, half black."""
    rng = np.random.default_rng(seed)
    obs = np.zeros((count, NUM_ENVS, SIDE, SIDE), np.uint8)
    obs[:, :, : SIDE // 2] = rng.integers(
        256, size=(count, NUM_ENVS, SIDE // 2, SIDE), dtype=np.uint8
    )
    flags = np.zeros((count, NUM_ENVS), bool)
    zeros = np.zeros((count, NUM_ENVS), np.float32)
    return {
        "obs": obs,
        "action": zeros.astype(np.int32),
        "reward": zeros,
        "terminated": flags,
        "truncated": flags,
    }


def filled(num_rows: int) -> tuple[Any, Any, Any]:
    """Return a buffer, an example of its steps, and a full state."""
    buffer = jr.uniform(capacity=num_rows, num_envs=NUM_ENVS, batch_size=32, autoreset="next_step")
    example = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), steps_of(1, 0)
    )
    extend, length = jr.jit(buffer).extend, num_rows // NUM_ENVS
    state, block = buffer.init(example), max(length // 50, 1)
    for seed in range(-(-length // block) + 1):
        state = extend(state, steps_of(block, seed))
    return buffer, example, jax.block_until_ready(state)


class _More:
    """Add a hundredth of the rows, and save them on top of a checkpoint."""

    def __init__(self, buffer: Any, level: int | None):
        self._extend, self._count = jr.jit(buffer).extend, buffer.length // 100
        self.level, self.checkpointer = level, None

    def add(self, state: Any) -> Any:
        return jax.block_until_ready(self._extend(state, steps_of(self._count, 99)))

    def save(self, state: Any) -> None:
        assert self.checkpointer is not None
        self.checkpointer.save(state)


def _jaxreplay(way: str, num_rows: int) -> tuple[list[Any], Callable, Callable, Any]:
    buffer, example, state = filled(num_rows)
    more = _More(buffer, 1 if way == "zstd" else None)

    def save(path: pathlib.Path, state: Any) -> None:
        more.checkpointer = Checkpointer(path, buffer, compression_level=more.level)
        more.checkpointer.save(state)

    return (
        [state],
        save,
        lambda path: jax.block_until_ready(Checkpointer(path, buffer).restore(example)),
        more,
    )


def _plain(_: str, num_rows: int) -> tuple[list[Any], Callable, Callable, None]:
    _, _, state = filled(num_rows)
    # Copied here, so that the timed part makes no copy.
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(state)]
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def save(path: pathlib.Path, leaves: list[Any]) -> None:
        path.mkdir()
        for number, leaf in enumerate(leaves):
            content = memoryview(leaf.reshape(-1).view(np.uint8))
            for start in range(0, len(content), _CHUNK):
                with open(path / f"{number}-{start}", "wb") as file:
                    file.write(content[start : start + _CHUNK])
                    file.flush()
                    os.fsync(file.fileno())

    def restore(path: pathlib.Path) -> list[Any]:
        leaves = [np.empty(shape, dtype) for shape, dtype in shapes]
        for number, leaf in enumerate(leaves):
            content = memoryview(leaf.reshape(-1).view(np.uint8))
            for start in range(0, len(content), _CHUNK):
                with open(path / f"{number}-{start}", "rb") as file:
                    file.readinto(content[start : start + _CHUNK])
        return leaves

    return [leaves], save, restore, None


def _pickle(_: str, num_rows: int) -> tuple[list[Any], Callable, Callable, None]:
    _, _, state = filled(num_rows)

    def save(path: pathlib.Path, state: Any) -> None:
        path.mkdir()
        with open(path / "state", "wb") as file:
            pickle.dump(state, file, protocol=5)

    def restore(path: pathlib.Path) -> Any:
        with open(path / "state", "rb") as file:
            return jax.block_until_ready(pickle.load(file))

    return [state], save, restore, None


def _orbax(_: str, num_rows: int) -> tuple[list[Any], Callable, Callable, None]:
    import orbax.checkpoint as ocp

    _, _, state = filled(num_rows)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)

    def save(path: pathlib.Path, state: Any) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)

    def restore(path: pathlib.Path) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(path, abstract))

    return [state], save, restore, None


def _vault(_: str, num_rows: int) -> tuple[list[Any], Callable, Callable, None]:
    import flashbax
    import jax.numpy as jnp
    from flashbax.vault import Vault

    length = num_rows // NUM_ENVS
    buffer = flashbax.make_trajectory_buffer(
        max_length_time_axis=length,
        min_length_time_axis=1,
        sample_batch_size=32,
        add_batch_size=NUM_ENVS,
        sample_sequence_length=2,
        period=1,
    )
    state = buffer.init(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[2:], leaf.dtype), steps_of(1, 0))
    )
    add, block = jax.jit(buffer.add, donate_argnums=0), max(length // 50, 1)
    # One step short of full: the Vault's index does not wrap, and all of the buffer is written.
    for seed in range(length // block):
        count = min(block, length - 1 - seed * block)
        state = add(state, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps_of(count, seed)))

    def vault(path: pathlib.Path, structure: Any = None) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return Vault(path.name, structure, rel_dir=str(path.parent), vault_uid="state")

    def save(path: pathlib.Path, state: Any) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            vault(path, state.experience).write(state)

    def restore(path: pathlib.Path) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return jax.block_until_ready(vault(path).read())

    return [jax.block_until_ready(state)], save, restore, None

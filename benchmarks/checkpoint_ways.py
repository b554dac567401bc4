"""Ways to save and restore a full buffer of images or of small rows, for `checkpoints.py`."""

import contextlib
import os
import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer

SIDE = 84
_CHUNK = 64 * 2**20
PORT = 9123  # of a server that speaks as S3 does, on this machine
BUCKET = {
    "driver": "s3",
    "bucket": "bucket",
    "endpoint": f"http://127.0.0.1:{PORT}",
    "aws_region": "us-east-1",
}


class Kind(NamedTuple):
    """A buffer's size, the observations of its steps, and its other arguments."""

    num_rows: int
    num_envs: int
    obs: Callable[[tuple[int, ...], int], np.ndarray]  # of a shape, and a seed
    options: dict[str, Any]

    def buffer(self) -> Any:
        options = {"num_envs": self.num_envs, "batch_size": 32, "autoreset": "next_step"}
        return jr.transitions(capacity=self.num_rows, **options, **self.options)

    def steps(self, count: int, seed: int) -> dict[str, Any]:
        """Return steps of all envs, `[count, num_envs, ...]`."""
        flags = np.zeros((count, self.num_envs), bool)
        zeros = np.zeros((count, self.num_envs), np.float32)
        return {
            "obs": self.obs((count, self.num_envs), seed),
            "action": zeros.astype(np.int32),
            "reward": zeros,
            "terminated": flags,
            "truncated": flags,
        }


def images(gigabytes: float) -> Kind:
    """Return so many images of 84 x 84, half of each noise, half black, for 16 envs."""

    def obs(shape: tuple[int, ...], seed: int) -> np.ndarray:
        values = np.zeros((*shape, SIDE, SIDE), np.uint8)
        half = (*shape, SIDE // 2, SIDE)
        values[:, :, : SIDE // 2] = np.random.default_rng(seed).integers(256, size=half)
        return values

    num_rows = int(gigabytes * 1e9) // SIDE**2 // 16 * 16
    return Kind(num_rows, 16, obs, {})


def small(num_rows: int) -> Kind:
    """Return rows of 97 bytes for 64 envs, with priorities and a table of episodes."""

    def obs(shape: tuple[int, ...], seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((*shape, 22), np.float32)

    options = {"sampler": jr.Prioritized(), "track_episodes": True}
    return Kind(num_rows // 64 * 64, 64, obs, options)


def prepare(way: str, kind: Kind) -> tuple[list[Any], Callable, Callable, Any]:
    """Return a state, in a list; functions that save a state under a path and restore it; and for
    jaxreplay `_More`, else None."""
    return {"plain": _plain, "pickle": _pickle, "orbax": _orbax, "vault": _vault}.get(
        way, _jaxreplay
    )(way, kind)


def state_bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def filled(kind: Kind) -> tuple[Any, Any, Any]:
    """Return a buffer, an example of its steps, and a full state."""
    buffer = kind.buffer()
    example = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), kind.steps(1, 0)
    )
    extend, length = jr.jit(buffer).extend, buffer.length
    state, block = buffer.init(example), max(length // 50, 1)
    for seed in range(-(-length // block) + 1):
        state = extend(state, kind.steps(block, seed))
    return buffer, example, jax.block_until_ready(state)


class _More:
    """Add a hundredth of the rows, and save them on top of a checkpoint."""

    def __init__(self, kind: Kind, buffer: Any, level: int | None):
        self._extend, self._kind = jr.jit(buffer).extend, kind
        self._count = buffer.length // 100
        self.level, self.checkpointer = level, None

    def add(self, state: Any) -> Any:
        return jax.block_until_ready(self._extend(state, self._kind.steps(self._count, 99)))

    def save(self, state: Any) -> None:
        assert self.checkpointer is not None
        self.checkpointer.save(state)


def _jaxreplay(way: str, kind: Kind) -> tuple[list[Any], Callable, Callable, Any]:
    buffer, example, state = filled(kind)
    more = _More(kind, buffer, None if way == "jaxreplay" else 1)

    def place(path: pathlib.Path) -> Any:
        own = f"{path.name}-{os.getpid()}"  # the server keeps it
        return {**BUCKET, "path": own} if way == "bucket" else path

    def save(path: pathlib.Path, state: Any) -> None:
        more.checkpointer = Checkpointer(place(path), buffer, compression_level=more.level)
        more.checkpointer.save(state)

    return (
        [state],
        save,
        lambda path: jax.block_until_ready(Checkpointer(place(path), buffer).restore(example)),
        more,
    )


def _plain(_: str, kind: Kind) -> tuple[list[Any], Callable, Callable, None]:
    _, _, state = filled(kind)
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


def _pickle(_: str, kind: Kind) -> tuple[list[Any], Callable, Callable, None]:
    _, _, state = filled(kind)

    def save(path: pathlib.Path, state: Any) -> None:
        path.mkdir()
        with open(path / "state", "wb") as file:
            pickle.dump(state, file, protocol=5)

    def restore(path: pathlib.Path) -> Any:
        with open(path / "state", "rb") as file:
            return jax.block_until_ready(pickle.load(file))

    return [state], save, restore, None


def _orbax(_: str, kind: Kind) -> tuple[list[Any], Callable, Callable, None]:
    import orbax.checkpoint as ocp

    _, _, state = filled(kind)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)

    def save(path: pathlib.Path, state: Any) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)

    def restore(path: pathlib.Path) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(path, abstract))

    return [state], save, restore, None


def _vault(_: str, kind: Kind) -> tuple[list[Any], Callable, Callable, None]:
    import flashbax
    import jax.numpy as jnp
    from flashbax.vault import Vault

    length = kind.num_rows // kind.num_envs
    buffer = flashbax.make_trajectory_buffer(
        max_length_time_axis=length,
        min_length_time_axis=1,
        sample_batch_size=32,
        add_batch_size=kind.num_envs,
        sample_sequence_length=2,
        period=1,
    )
    state = buffer.init(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[2:], leaf.dtype), kind.steps(1, 0))
    )
    add, block = jax.jit(buffer.add, donate_argnums=0), max(length // 50, 1)
    # One step short of full: the Vault's index does not wrap, and all of the buffer is written.
    for seed in range(length // block):
        count = min(block, length - 1 - seed * block)
        state = add(state, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), kind.steps(count, seed)))

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

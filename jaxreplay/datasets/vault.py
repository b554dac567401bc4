"""Import of flashbax's vaults; needs `jaxreplay[checkpoint]`, and not flashbax."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.datasets import fields
from jaxreplay.datasets.episodes import Rows, episodes_of, fill
from jaxreplay.storage.state import ReplayState

_BLOCK_BYTES = 2**24
_VERSION = 1  # of vaults, without what follows the point


def from_vault(
    path: Any,
    buffer: ReplayBuffer,
    example: PyTree = None,
    *,
    names: Mapping[str, str] | None = None,
    into: ReplayState | None = None,
) -> ReplayState:
    """Return a buffer's state with all transitions of a vault, such as those of OG-MARL.

    The vault is read a block at a time. Where it holds several envs, their episodes follow each
    other in turn. An episode ends as in `from_npz`. Flags of several agents are joined: all of them
    must be set.

    Args:
      path: Folder of the vault: `rel_dir/vault_name/vault_uid`.
      buffer: A `ReplayBuffer` of steps with any `num_envs` and `autoreset`.
      example: One env's step, as for `buffer.init`. Default: the vault's shapes and dtypes, cut to
        32 bits while `jax_enable_x64` is off.
      names: Entries of the vault's experience by "obs", "action", "reward", "terminated",
        "truncated" and "next_obs", dotted where they are nested, such as "infos.legals".
        Observations and actions may be trees. Default: the usual names, such as "observations" and
        "terminals". Without rewards, they are 0.
      into: State of the buffer to add to, as for `from_episodes`. Donated. Default: an empty one.

    Returns:
      The state.

    Raises:
      ImportError: TensorStore is not installed.
      ValueError: The folder holds no vault, or an entry is missing; or as for `from_episodes`.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            "from_vault needs TensorStore: pip install 'jaxreplay[checkpoint]'"
        ) from error
    folder = Path(path).absolute()
    if not (folder / "metadata.json").is_file():
        raise ValueError(f"from_vault: {folder} has no metadata.json, so it is no vault")
    metadata = json.loads((folder / "metadata.json").read_text())
    if int(metadata.get("version", 0)) != _VERSION:
        raise ValueError(
            f"from_vault: {folder} has version {metadata.get('version')}; known are {_VERSION}.x"
        )
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2 * _BLOCK_BYTES}})

    def opened(name: str) -> Any:
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}", "path": name}
        return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, context=context).result()

    entries = dict(_entries(metadata["structure_shape"]))
    arrays = {
        field: jax.tree_util.tree_map_with_path(
            lambda path, _, name=name: opened(".".join([name, *(key.key for key in path), ""])),
            entries[name],
        )
        for field, name in fields.found("from_vault", entries, names).items()
    }
    total = int(opened("vault_index").read().result()[0])
    num_envs = jax.tree.leaves(arrays)[0].shape[0]
    streams = [
        episodes_of(_of_env(env, blocks), buffer)
        for env, blocks in enumerate(itertools.tee(_blocks(arrays, total), num_envs))
    ]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    episodes = (episode for episode in in_turn if episode is not None)
    return fill("from_vault", episodes, buffer, example, into)


def _entries(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each subtree of a tree of dicts, with its dotted name."""
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield f"{prefix}{key}", below
            yield from _entries(below, f"{prefix}{key}.")


def _blocks(arrays: dict[str, PyTree], total: int) -> Iterator[Rows]:
    """Yield blocks of K steps of all envs: leaves [E, K, ...]."""
    step_bytes = sum(
        leaf.dtype.numpy_dtype.itemsize * int(np.prod((leaf.shape[0], *leaf.shape[2:])))
        for leaf in jax.tree.leaves(arrays)
    )
    most = max(_BLOCK_BYTES // step_bytes, 1)
    for start in range(0, total, most):
        part = slice(start, min(start + most, total))
        futures = jax.tree.map(lambda leaf, part=part: leaf[:, part].read(), arrays)
        read = jax.tree.map(lambda future: future.result(), futures)
        shape = jax.tree.leaves(read["obs"])[0].shape[:2]
        terminated, truncated = (
            _joined(read.get(field, np.zeros(shape, bool))) for field in ("terminated", "truncated")
        )
        reward = read.get("reward", np.zeros(shape, np.float32))
        yield Rows(read["obs"], read["action"], reward, terminated, truncated, read.get("next_obs"))


def _of_env(env: int, blocks: Iterator[Rows]) -> Iterator[Rows]:
    for rows in blocks:
        yield jax.tree.map(lambda leaf: leaf[env], rows)


def _joined(flags: np.ndarray) -> np.ndarray:
    """Return flags [E, K, ...] as bool[E, K]."""
    return flags.astype(bool).reshape(*flags.shape[:2], -1).min(axis=2)

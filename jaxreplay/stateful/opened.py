"""A replay of the rows of a checkpoint where they lie."""

from typing import Any

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.stateful.replay import Replay


def open(
    path: Any,
    buffer: ReplayBuffer,
    *,
    example: PyTree = None,
    step: int | None = None,
    member: str = "",
    cache_bytes: int = 2**28,
    **options: Any,
) -> Replay:
    """Open a checkpoint to sample from its rows where they lie; needs `jaxreplay[checkpoint]`.

    The device gets an index of them, of 5 to 22 bytes a row, and the host 8 bytes a row. A batch
    reads its own rows alone, from files that are mapped into memory, if they are on this machine
    and were written with `compression_level=None`. Such a file is read once before, to compare its
    checksum. Of others whole files are read, and the last ones are kept: that is fast if all of
    them fit in `cache_bytes`. Several processes may open a
    checkpoint at a time. A save under the same path may delete its files.

    Args:
      path: As for `checkpoint.Checkpointer`, what a `Checkpointer` or `Replay.save` wrote.
      buffer: A `ReplayBuffer`, which says how the rows are sampled and seen. Its capacity,
        `num_envs`, `autoreset` and `allow_mask` become those of the checkpoint.
      example: One env's step, or an item, as for `buffer.init`. Default: that of the checkpoint,
        whose pytrees are dicts.
      step: Step of the checkpoint. Default: the newest.
      member: Name of the mixture's member whose rows are opened. Default: "", without a mixture.
      cache_bytes: Bytes of decompressed files that are kept. Default: 256 MiB.
      options: Of `jaxreplay.Replay`, such as `seed`, `framework` and `prefetch`.

    Returns:
      A `Replay`. Its `sample`, `get`, `update_priorities`, `metrics` and `len` work; whatever
      would change rows raises a ValueError.

    Raises:
      ImportError: The `checkpoint` extra is not installed.
      FileNotFoundError: There is no checkpoint under the path, or none of that step.
      ValueError: The rows do not fit the buffer or the example, or lie in a folder of their own.
      CorruptCheckpointError: A file is missing or damaged; the error names it.

    Example:
      >>> import tempfile, numpy as np, jaxreplay as jr
      >>> from jaxreplay.checkpoint import Checkpointer
      >>> buffer = jr.items(capacity=8, batch_size=4)
      >>> state = buffer.extend(buffer.init({"x": np.float32(0)}), {"x": np.ones((5, 1), "f")})
      >>> path = tempfile.mkdtemp() + "/run7"
      >>> Checkpointer(path, buffer, compression_level=None, progress=False).save(state, 1)
      >>> with jr.open(path, buffer, framework="numpy", seed=0) as replay:
      ...     len(replay), replay.sample().experience["x"].tolist()
      (5, [1.0, 1.0, 1.0, 1.0])
    """
    from jaxreplay.checkpoint.contents import at_checkpoint
    from jaxreplay.checkpoint.opened import Opened

    def use(store: Any, manifest: Any) -> Replay:
        tier = Opened(store, manifest, buffer, example, member, cache_bytes)
        return Replay(tier.buffer, example=tier.example, rows=tier, **options)

    return at_checkpoint("open", use, path, step, member)

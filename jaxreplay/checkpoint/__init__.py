"""Checkpoints of a buffer; needs `jaxreplay[checkpoint]`.

Saves write only new rows, are atomic, and work in chunks, so they never hold a second buffer.

    checkpointer = Checkpointer("run/replay", buffer)
    checkpointer.save(state, step)
    state = checkpointer.restore(example)

`save(state, step, extras=pytree)` saves the agent, too.
"""

from typing import Any

try:
    import google_crc32c as _google_crc32c  # noqa: F401
    import msgspec as _msgspec  # noqa: F401
    import tensorstore as _tensorstore  # noqa: F401
    import tqdm as _tqdm  # noqa: F401
    import zstandard as _zstandard  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"jaxreplay.checkpoint needs {error.name}: pip install 'jaxreplay[checkpoint]'"
    ) from error

from jaxreplay.checkpoint import verifying
from jaxreplay.checkpoint.checkpointer import Checkpointer, bars
from jaxreplay.checkpoint.contents import at_checkpoint, contents_of
from jaxreplay.checkpoint.files import CorruptCheckpointError, PathInUseError
from jaxreplay.checkpoint.restoring import MissingRows
from jaxreplay.checkpoint.store import store_at
from jaxreplay.checkpoint.verifying import Verified
from jaxreplay.inspection.inspection import Inspection, inspection_of

__all__ = [
    "Checkpointer",
    "CorruptCheckpointError",
    "MissingRows",
    "PathInUseError",
    "Verified",
    "inspect",
    "restore",
    "save",
    "verify",
]


def save(
    path: Any,
    buffer: Any,
    state: Any,
    *,
    step: int | None = None,
    extras: Any = None,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write a complete checkpoint of a state under a path, in place of what was there.

    The previous checkpoint is kept until the new one is complete. For repeated saves, which write
    only new rows, use a `Checkpointer`.

    Args:
      path: Folder, URL or TensorStore specification, as the `path` of a `Checkpointer`.
      buffer: The `ReplayBuffer`, `Rollout`, `Mixture` or sharded buffer of the state.
      state: The buffer's state. It stays valid.
      step: 64-bit integer that names the checkpoint. Default: the newest step under the path plus
        1, and 0 if the path is empty.
      extras: Pytree to save with it, as for `Checkpointer.save`. Default: none.
      metadata: JSON-compatible dict to store with the checkpoint, nested at most 100 deep.
        Default: an empty dict.
      options: More arguments of `Checkpointer`: `max_to_keep` (default here: 1), `chunk_bytes`,
        `compression_level`, `progress` and `timeout`.
    """
    options = {"max_to_keep": 1, "overwrite": True, **options}
    Checkpointer(path, buffer, **options).save(state, step, extras=extras, metadata=metadata)


def restore(
    path: Any,
    buffer: Any,
    example: Any,
    *,
    step: int | None = None,
    extras: Any = None,
    allow_partial: bool = False,
    sharding: Any = None,
    **options: Any,
) -> Any:
    """Restore the newest intact checkpoint under a path, or the one of a step.

    The buffer adopts the saved rows: its configuration may have changed. If it has not, everything
    that later operations depend on is bit-identical to what was saved.

    Args:
      path: Folder, URL or TensorStore specification, as the `path` of a `Checkpointer`.
      buffer: A `ReplayBuffer`, `Mixture` or sharded buffer for steps with the saved leaves and
        `autoreset`; all else may differ, as for `ReplayBuffer.adopt`. Or the `Rollout` that was
        saved.
      example: One step of one env, or one item, as for `buffer.init`: pytree of arrays or
        `jax.ShapeDtypeStruct`s.
      step: Step of the checkpoint to restore. Default: the newest intact checkpoint.
      extras: Pytree like the saved extras, as for `Checkpointer.restore`. Default: none.
      allow_partial: Whether a checkpoint with damaged rows may be restored if none is intact, with
        a warning: each env's rows up to the newest damaged one count as overwritten. Default:
        False.
      sharding: Placement of the state's leaves, in the form of `out_shardings` of `jax.jit`.
        Default: the default device.
      options: More arguments of `Checkpointer`: `progress` and `timeout`. (`max_to_keep`,
        `chunk_bytes` and `compression_level` are accepted, and have no effect on a restore.)

    Returns:
      A new state; with `extras`, a tuple of it and the extras.

    Raises:
      FileNotFoundError: The path has no checkpoint, or none of that step.
      ValueError: The steps of the checkpoint have other leaves, or another `autoreset`.
      CorruptCheckpointError: No checkpoint is intact, or the one of that step is damaged.
    """
    return Checkpointer(path, buffer, **options).restore(
        example, step, extras=extras, allow_partial=allow_partial, sharding=sharding
    )


def inspect(
    path: Any,
    *,
    step: int | None = None,
    member: str = "",
    max_bytes: int = 2**28,
    timeout: float = 60.0,
) -> Inspection:
    """Inspect a checkpoint as `jaxreplay.inspect` does a state, without the buffer's code.

    Sampling probabilities are reported for samplers by priority only. Files that are read are
    checked; `restore` and `verify` read all files.

    Args:
      path: Folder, URL or TensorStore specification, as the `path` of a `Checkpointer`.
      step: Step of the checkpoint. Default: the newest checkpoint.
      member: Name of a mixture's member. Default: "", for a buffer that is no mixture.
      max_bytes: Limit in bytes on the stored steps that are read. If there are more, rows spread
        evenly over the buffer are read. Default: 256 MiB.
      timeout: Seconds that a request to an object store may take. Default: 60.

    Returns:
      The figures, and suspicious findings, as an `Inspection`.

    Raises:
      FileNotFoundError: The path has no checkpoint, or none of that step.
      ValueError: The checkpoint is of a `Rollout`, or a mixture has no such member.
      CorruptCheckpointError: A file is missing or damaged.
    """
    use = lambda *given: inspection_of(contents_of(*given, member=member, max_bytes=max_bytes))
    return at_checkpoint("inspect", use, path, step, member, timeout)


def verify(path: Any, *, progress: bool | None = None, timeout: float = 60.0) -> list[Verified]:
    """Read all files of all checkpoints under a path and compare them with their checksums.

    Args:
      path: Folder, URL or TensorStore specification, as the `path` of a `Checkpointer`.
      progress: Whether to show a progress bar. Default: only if stderr is a terminal.
      timeout: Seconds that a request to an object store may take. Default: 60.

    Returns:
      A `Verified` for each checkpoint, newest first, with its problems.

    Raises:
      FileNotFoundError: The path has no checkpoint.
    """
    store = store_at(path, timeout)
    found = verifying.verified(store, bars(progress))
    if not found:
        raise FileNotFoundError(f"verify: there is no checkpoint under {store.name}")
    return found

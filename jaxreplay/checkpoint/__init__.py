"""Checkpoints of a buffer that never double its memory: in chunks, only what is new, whole or not
at all; needs `jaxreplay[checkpoint]`.

    checkpointer = Checkpointer("run/replay", buffer)
    checkpointer.save(state, step)
    state = checkpointer.restore(example)

A loop goes on meanwhile with `save(state, step, blocking=False)`, and `advance(state)` before each
`add`.
"""

from typing import Any

try:
    import google_crc32c as _google_crc32c  # noqa: F401
    import tensorstore as _tensorstore  # noqa: F401
    import tqdm as _tqdm  # noqa: F401
    import zstandard as _zstandard  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"jaxreplay.checkpoint needs {error.name}: pip install 'jaxreplay[checkpoint]'"
    ) from error

from jaxreplay.checkpoint import verifying
from jaxreplay.checkpoint.checkpointer import Checkpointer
from jaxreplay.checkpoint.contents import contents_of, generation_of
from jaxreplay.checkpoint.files import CorruptCheckpointError, PathInUseError
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.progress import bars
from jaxreplay.checkpoint.salvage import MissingRows
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
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write a state, all of it, under a path; what was there stays until this is whole. For saves
    on top of each other: `Checkpointer`.

    Args:
      options: of a `Checkpointer`; `max_to_keep` is 1.
    """
    with Checkpointer(path, buffer, **{"max_to_keep": 1, **options}) as checkpointer:
        checkpointer.save(state, step, metadata=metadata)


def restore(
    path: Any,
    buffer: Any,
    example: Any,
    *,
    step: int | None = None,
    resize: bool = False,
    allow_partial: bool = False,
    sharding: Any = None,
    **options: Any,
) -> Any:
    """The newest state that was saved under a path, or that of a step. See `Checkpointer.restore`;
    `options` are of a `Checkpointer`."""
    return Checkpointer(path, buffer, **options).restore(
        example, step, resize=resize, allow_partial=allow_partial, sharding=sharding
    )


def inspect(
    path: Any, *, step: int | None = None, max_bytes: int = 2**28, timeout: float = 60.0
) -> Inspection:
    """What the newest generation under a path holds, or that of a step: as `jaxreplay.inspect`,
    without the buffer that it is of.

    How rows are drawn is told of samplers by priority only. It checks what it reads; only a
    restore, or `verify`, reads everything.

    Args:
      path, timeout: as of a `Checkpointer`. max_bytes: of the steps' values that are looked at, at
        most.

    Raises:
      FileNotFoundError: there is none. ValueError: it is of a rollout. CorruptCheckpointError: an
        array is missing, or not as it was written.
    """
    manifest = None
    while True:
        before, (store, manifest) = manifest, generation_of(path, step, timeout)
        try:
            return inspection_of(contents_of(store, manifest, max_bytes))
        except CorruptCheckpointError:
            # else the run has deleted it meanwhile, for a newer one
            if before is not None and before.folder == manifest.folder:
                raise


def verify(path: Any, *, progress: bool | None = None, timeout: float = 60.0) -> list[Verified]:
    """What is wrong with each generation under a path: as `Checkpointer.verify`, without the buffer
    that they are of.

    Args:
      path, progress, timeout: as of a `Checkpointer`.

    Raises:
      FileNotFoundError: there is none.
    """
    store = store_at(path, timeout)
    found = verifying.verified(store, Generations(store, max_to_keep=1), bars(progress))
    if not found:
        raise FileNotFoundError(f"verify: there is no generation under {store.name}")
    return found

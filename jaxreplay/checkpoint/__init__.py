"""Checkpoints of a buffer that never double its memory: in chunks, only what is new, whole or not at all; needs `jaxreplay[checkpoint]`.

checkpointer = Checkpointer("run/replay", replay)
checkpointer.save(state, step)                    # or save(state, step, wait=False), and pump(state) before each add
state = checkpointer.restore(example)
"""

from typing import Any

try:
    import google_crc32c as _google_crc32c  # noqa: F401
    import tensorstore as _tensorstore  # noqa: F401
    import tqdm as _tqdm  # noqa: F401
    import zstandard as _zstandard  # noqa: F401
except ImportError as error:
    raise ImportError(f"jaxreplay.checkpoint needs {error.name}: pip install 'jaxreplay[checkpoint]'") from error

from jaxreplay.checkpoint.checkpointer import Checkpointer
from jaxreplay.checkpoint.contents import contents_of, generation_of
from jaxreplay.checkpoint.store import BrokenError
from jaxreplay.inspection.inspection import Inspection, inspection_of

__all__ = ["BrokenError", "Checkpointer", "inspect", "restore", "save"]


def save(path: Any, replay: Any, state: Any, *, step: int | None = None, notes: dict[str, Any] | None = None, **options: Any) -> None:
    """Write a state, all of it, under a path; what was there stays until this is whole. For saves on top of each other: `Checkpointer`.

    Args:
      options: of a `Checkpointer`; `keep` is 1.
    """
    Checkpointer(path, replay, **{"keep": 1, **options}).save(state, step, notes=notes)


def restore(
    path: Any, replay: Any, example: Any, *, step: int | None = None, resize: bool = False, sharding: Any = None, **options: Any
) -> Any:
    """The newest state that was saved under a path, or that of a step. See `Checkpointer.restore`; `options` are of a `Checkpointer`."""
    return Checkpointer(path, replay, **options).restore(example, step, resize=resize, sharding=sharding)


def inspect(path: Any, *, step: int | None = None, max_bytes: int = 2**28) -> Inspection:
    """What the newest generation under a path holds, or that of a step: as `jaxreplay.inspect`, without the buffer that it is of.

    How rows are drawn is told of samplers by priority only. It checks what it reads; only a restore reads everything.

    Raises:
      FileNotFoundError: there is none. ValueError: it is of a rollout. BrokenError: an array is missing, or not as it was written.
    """
    manifest = None
    while True:
        before, (store, manifest) = manifest, generation_of(path, step)
        try:
            return inspection_of(contents_of(store, manifest, max_bytes))
        except BrokenError:
            if before == manifest:  # else the run has deleted it meanwhile, for a newer one
                raise

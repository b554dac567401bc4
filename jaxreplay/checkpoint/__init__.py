"""Checkpoints of a buffer that never double its memory: in chunks, only what is new, whole or not at all; needs `jaxreplay[checkpoint]`.

checkpointer = Checkpointer("run/replay", replay)
checkpointer.save(state, step)                    # or save(state, step, wait=False), and pump(state) before each add
state = checkpointer.restore(example)
"""

from typing import Any

try:
    import tensorstore as _tensorstore  # noqa: F401
    import tqdm as _tqdm  # noqa: F401
except ImportError as error:
    raise ImportError(f"jaxreplay.checkpoint needs {error.name}: pip install 'jaxreplay[checkpoint]'") from error

from jaxreplay.checkpoint.checkpointer import Checkpointer
from jaxreplay.checkpoint.store import BrokenError

__all__ = ["BrokenError", "Checkpointer", "restore", "save"]


def save(path: Any, replay: Any, state: Any, *, step: int | None = None, notes: dict[str, Any] | None = None, **options: Any) -> None:
    """Write a state, all of it, under a path; what was there stays until this is whole. For saves on top of each other: `Checkpointer`.

    Args:
      options: of a `Checkpointer`; `keep` is 1.
    """
    Checkpointer(path, replay, **{"keep": 1, **options}).save(state, step, notes=notes)


def restore(path: Any, replay: Any, example: Any, *, step: int | None = None, **options: Any) -> Any:
    """The newest state that was saved under a path, or that of a step. See `Checkpointer.restore`."""
    return Checkpointer(path, replay, **options).restore(example, step)

"""A replay as an item of orbax's checkpoints: orbax's commit is the commit of agent and replay.

The rows go to a `Checkpointer`'s path, where each save writes what is new. An orbax step has the
name of the one that belongs to it. Which steps orbax keeps, by `max_to_keep`, `best_fn` or
`keep_period`, decides which rows stay. Needs `jaxreplay[checkpoint]` and orbax 0.11 or newer::

    checkpointer = Checkpointer("run/replay", buffer)
    manager = ocp.CheckpointManager(
        "/run/steps",
        item_handlers={
            "agent": ocp.StandardCheckpointHandler(),
            "replay": ReplayHandler(checkpointer),
        },
    )
    manager.save(
        step, args=ocp.args.Composite(agent=ocp.args.StandardSave(agent), replay=ReplaySave(state))
    )

With several processes, all of them call this, as they call orbax.

References:
  https://orbax.readthedocs.io: `CheckpointManager`, `CheckpointHandler`, `StatefulCheckpointable`.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Awaitable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxreplay.checkpoint import Checkpointer

_FILE = "jaxreplay.json"


class ReplayHandler(ocp.CheckpointHandler):
    """Handler of an item of a `CheckpointManager`.

    Args:
      checkpointer: The rows' `Checkpointer`, with a path of its own. Its `max_to_keep` is replaced.
    """

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer = checkpointer

    def save(self, directory: epath.Path, args: "ReplaySave") -> None:
        """Save the rows, and name their checkpoint in orbax's folder."""
        step = _saved(self._checkpointer, args.state, epath.Path(directory))
        _write(epath.Path(directory), step)

    def restore(self, directory: epath.Path, args: "ReplayRestore") -> Any:
        """Return the state that belongs to an orbax step."""
        return self._checkpointer.restore(args.example, _read(epath.Path(directory)))


@ocp.args.register_with_handler(ReplayHandler, for_save=True)
@dataclasses.dataclass
class ReplaySave(ocp.args.CheckpointArgs):
    """Arguments of a save.

    Args:
      state: The buffer's state, as for `Checkpointer.save`.
    """

    state: Any


@ocp.args.register_with_handler(ReplayHandler, for_restore=True)
@dataclasses.dataclass
class ReplayRestore(ocp.args.CheckpointArgs):
    """Arguments of a restore.

    Args:
      example: One env's step or item, as for `Checkpointer.restore`.
    """

    example: Any


class ReplayItem:
    """A `StatefulCheckpointable` of orbax's API of version 1: `save_checkpointables(path,
    {"agent": agent, "replay": item})`.

    Args:
      checkpointer: The rows' `Checkpointer`, with a path of its own. Its `max_to_keep` is replaced.
      example: One env's step or item, as for `Checkpointer.restore`.
      state: The buffer's state, which a save writes and a load replaces: set it before each save.
        Default: None.
    """

    def __init__(self, checkpointer: Checkpointer, example: Any, state: Any = None):
        self._checkpointer, self._example, self.state = checkpointer, example, state

    async def save(self, directory: Any) -> Awaitable[None]:
        """Save the rows; the result names their checkpoint in orbax's folder."""
        step = _saved(self._checkpointer, self.state, epath.Path(directory.path))

        async def write() -> None:
            _write(epath.Path(await directory.await_creation()), step)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Replace `state` by the one that belongs to an orbax step."""
        step = _read(epath.Path(directory))

        async def restore() -> None:
            self.state = self._checkpointer.restore(self._example, step)

        return restore()


def _saved(checkpointer: Checkpointer, state: Any, directory: epath.Path) -> int:
    """Save a state under the next step of a checkpointer, and return the step."""
    checkpointer.max_to_keep = functools.partial(_steps, directory.parent.parent)
    latest = checkpointer.latest_step()
    step = 0 if latest is None else latest + 1
    checkpointer.save(state, step)
    return step


def _steps(root: epath.Path) -> set[int]:
    """Return the steps of the rows that orbax's folders name."""
    steps = set()
    for file in root.glob(f"*/*/{_FILE}"):
        with contextlib.suppress(FileNotFoundError):  # orbax deletes the folder meanwhile
            steps.add(_read(file.parent))
    return steps


def _write(directory: epath.Path, step: int) -> None:
    if jax.process_index() == 0:
        (directory / _FILE).write_text(json.dumps({"step": step}))


def _read(directory: epath.Path) -> int:
    return json.loads((directory / _FILE).read_text())["step"]

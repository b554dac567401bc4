"""Runs of one buffer and their checkpoints, for tests that attack files, writers and processes."""

import contextlib
import json
import pathlib
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, PathInUseError, rows
from tests.support import checkpointed_run
from tests.support.checkpointed_run import EXAMPLE, begun, expected, items, numbers

BUFFER = items()
SUPPORT = pathlib.Path(checkpointed_run.__file__).parent


def state_of(end, start=0):
    """Return the state of a run that has taken the steps `start` to `end - 1`."""
    return begun(BUFFER, end, start)


def check(state, end, start=0):
    """Check that a state has the newest rows of such a run."""
    rows = [[number for number in row if number % 10**6 >= start] for row in expected(BUFFER, end)]
    assert numbers(BUFFER, state) == rows


def check_restored(checkpointer, end, start=0):
    """Check that the newest checkpoint is of such a run."""
    check(checkpointer.restore(EXAMPLE), end, start)


def save_run(checkpointer, end):
    """Save the run of so many steps."""
    checkpointer.save(state_of(end), end)


def replay_of(end, start=0):
    """Return a `Replay` that has taken these steps."""
    replay = jr.Replay(BUFFER, example=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), EXAMPLE))
    for t in range(start, end):
        replay.add(checkpointed_run.step(t, BUFFER.num_envs))
    return replay


def save_two(path, ends=(20, 25)):
    """Save two checkpoints of a run under a path, in groups of few rows. Each names its end."""
    checkpointer = Checkpointer(path, BUFFER, chunk_bytes=1000, max_to_keep=2)
    for end in ends:
        checkpointer.save(state_of(end), end, metadata={"end": end})
    return path


def check_no_other_files(checkpointer, path):
    """Check that a folder has no files but those of its checkpoints."""
    named = {name for one in checkpointer._chain.read()[0] for name in (one.name, *one.sums())}
    assert {str(one.relative_to(path)) for one in path.glob("[mr]*/*")} == named


def outcomes_of_two_writers(save_of, restore, num_rounds):
    """Save the runs of the steps 0 to 19 and 500 to 519 at the same time, again and again.

    Each time, the restored state must be one of them.

    Args:
      save_of: Function of a run's first step that returns a function that saves the run.
      restore: Function that restores a state, or finds none.
      num_rounds: Number of times.

    Returns:
      The two outcomes of each time: None, or the class of the error.
    """
    barrier, outcomes = threading.Barrier(2), []
    saves = [save_of(start) for start in (0, 500)]

    def outcome_of(save):
        barrier.wait()
        try:
            save()
        except (PathInUseError, OSError) as error:
            return type(error)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(num_rounds):
            outcomes.append([*threads.map(outcome_of, saves)])
            with contextlib.suppress(FileNotFoundError):
                restored = restore()
                start = numbers(BUFFER, restored)[0][0] // 500 * 500
                check(restored, start + 20, start)
    return outcomes


def sealed(text):
    """Return the bytes of a manifest, with its checksum."""
    body = text.encode()
    return f"{zlib.crc32(body):08x}\n".encode() + body


def manifests(path):
    """Return the files of the manifests under a path, the newest last."""
    return sorted((path / "manifests").iterdir())


def fields_of(manifest):
    """Return the content of a manifest's file."""
    return json.loads(manifest.read_bytes().split(b"\n", 1)[1])


def quiet():
    """Ignore warnings in a block."""
    return warnings.catch_warnings(action="ignore")


def files_of(path):
    """Return the files of checkpoints, sorted."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def groups_of(checkpointer):
    """Return the groups of the checkpoint that the next save goes on from."""
    return checkpointer._base.members[""].groups


def check_intact(verified):
    """Check the result of `verify`: no checkpoint is damaged."""
    assert not any(one.problems for one in verified)


def span_of(buffer, state):
    """Return the numbers of each stream's oldest row, and of the one after its newest."""
    names = ("position", "lap", "filled")
    counters = {name: getattr(state.counters, name) for name in names}
    return rows.span_of(counters, buffer.length)

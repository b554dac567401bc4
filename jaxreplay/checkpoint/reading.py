"""Choose the checkpoint to restore: the newest intact one or, for a partial restore, the newest
readable one."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxreplay._util.signals import defer_interrupts
from jaxreplay.checkpoint import verifying
from jaxreplay.checkpoint.files import CorruptCheckpointError, Files
from jaxreplay.checkpoint.generations import Generations
from jaxreplay.checkpoint.identity import check_fits
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.restoring import Reading
from jaxreplay.checkpoint.salvage import MissingRows


class Restored(NamedTuple):
    """A restored state, its checkpoint's manifest, and the rows that were lost."""

    state: Any
    manifest: Manifest
    lost: list[MissingRows]


def restored(
    store: Files,
    generations: Generations,
    buffer: Any,
    example: Any,
    step: int | None,
    resize: bool,
    allow_partial: bool,
    sharding: Any,
    bar: Callable[..., Any],
) -> Restored:
    """Restore a state; the arguments from `buffer` to `sharding` are those of
    `Checkpointer.restore`.

    Args:
      bar: Makes a progress bar from a title and a number of bytes.
    """
    while True:
        found, problems = generations.read()
        for manifest in found:
            if step is None or manifest.step == step:
                with (
                    defer_interrupts()
                    # JAX would report an interrupt during its comparison of buffers as an error of
                    # the buffers, here and in `restoring`
                ):
                    before, num_bytes = (
                        check_fits(manifest, buffer, example, resize, problems),
                        buffer.memory(example).total,
                    )
                wrong = (
                    {
                        group.folder: verifying.problem_of_group(store, group)
                        for group in manifest.groups
                    }
                    if allow_partial
                    else {}
                )
                damaged = {folder: problem for folder, problem in wrong.items() if problem}
                try:
                    with bar(f"restore {manifest.step}", num_bytes) as told:
                        reading = Reading(store, manifest, told.update)
                        state = reading.state(buffer, before, example, sharding, set(damaged))
                except CorruptCheckpointError as error:
                    if manifest.folder not in {one.folder for one in generations.read()[0]}:
                        break  # another process has deleted it meanwhile: read again
                    problems.append(f"step {manifest.step}: {error}")
                    continue
                lost = reading.holes.lost(np.asarray(manifest.end))
                if lost:
                    count, total = (
                        sum(one.last - one.first + 1 for one in lost),
                        sum(manifest.end) - sum(manifest.first),
                    )
                    problems += [
                        f"{count:,} of its {total:,} rows are lost:",
                        *damaged.values(),
                    ]
                if problems:
                    lines = [
                        f"restore: step {manifest.step} was restored; this is damaged:",
                        *problems,
                    ]
                    warnings.warn("\n  ".join(lines), stacklevel=3)
                return Restored(state, manifest, lost)
        # otherwise other checkpoints exist by now: try these
        if [one.folder for one in generations.read()[0]] == [one.folder for one in found]:
            break
    if problems:
        what = "nothing" if step is None else f"no step {step}"
        others = (
            ""
            if step is None
            else f" (there are {', '.join(str(one.step) for one in reversed(found))})"
        )
        raise CorruptCheckpointError(
            "\n  ".join([f"restore: {what} under {store.name} can be restored{others}:", *problems])
        )
    raise FileNotFoundError(
        f"restore: there is no checkpoint{'' if step is None else f' of step {step}'} under "
        f"{store.name}"
    )

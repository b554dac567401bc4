"""Checkpoints of a buffer whose rows lie on the host.

Rows in the memory of the host are saved as those on a device. Of rows in files a checkpoint has the
index alone, and the token of the files, unless a copy is asked for. The rows that were overwritten
since are left out when it is restored, as damaged rows are by a partial restore.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.buffers.tiered import Tiered
from jaxreplay.checkpoint import rows
from jaxreplay.checkpoint.manifest import TOKEN
from jaxreplay.checkpoint.planning import Split
from jaxreplay.checkpoint.restoring import Reading
from jaxreplay.distributed.parts import Parts
from jaxreplay.storage import adopt
from jaxreplay.storage.state import ReplayState


def split(tier: Tiered, state: ReplayState, has_copy: bool) -> Split:
    """Divide a state into what a checkpoint has of it.

    Args:
      tier: The buffer.
      state: Its newest state.
      has_copy: Whether the checkpoint has a copy of rows that are in files.
    """
    token = tier.flush()
    if token is None or has_copy:
        whole = tier.whole(state)
        return Split(tier.whole_buffer, *rows.split(whole), Parts.of(whole))
    own, rest = rows.split(state)
    kept = np.frombuffer(bytes.fromhex(token), np.uint8)
    return Split(tier.index, own, {**rest, TOKEN: kept}, Parts.of(state))


def restored(tier: Tiered, example: Any, reading: Reading) -> ReplayState:
    """Return the state of a checkpoint, with the rows on the host.

    Args:
      tier: The buffer. Its rows are replaced.
      example: One env's step, or an item.
      reading: The checkpoint.

    Raises:
      ValueError: The folder does not have the rows of the checkpoint.
      CorruptCheckpointError: A file is missing or damaged; the error names it.
    """
    token = reading.token
    if token is not None:
        restore = lambda first: reading.since(first).state(tier.index, example, None)
        return tier.resume(example, token, reading.end, restore)
    layout = reading.layout_for(tier.index)
    if not adopt.stays(layout, tier.index.layout()):
        with jax.default_device(jax.devices("cpu")[0]):
            state = reading.state(tier.whole_buffer, example, None)
        return tier.adopt(state)

    def fill(stored: dict[str, Any], index: Any) -> ReplayState:
        reading.rows(stored, layout.length)
        steps = index.rows.steps
        if getattr(steps, "terminated", None) is not None:  # bytes of several agents
            steps = steps.replace(terminated=jnp.array(stored["steps"].terminated))
        own = {"steps": steps, "flags": jax.tree.map(jnp.array, stored["flags"])}
        return reading.put_together(tier.index, layout, own, *reading.beside(layout.length))

    if tier.is_in_files:  # whose rows are replaced one by one
        reading.check_files()
    return tier.replace(example, fill)

"""Savers: how states are saved and restored, by where their rows lie.

Rows in the memory of the host are saved as those on a device. Of rows in files a checkpoint has the
index alone, and the token of the files, unless a copy is asked for. The rows that were overwritten
since are left out when it is restored, as damaged rows are by a partial restore.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.adopt import canonical, stored
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import check_state
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.checkpoint.manifest import TOKEN
from jaxreplay.checkpoint.planning import SaveParts
from jaxreplay.checkpoint.restoring import Reading
from jaxreplay.distributed.parts import Parts
from jaxreplay.distributed.shards import Shards
from jaxreplay.storage import relayout
from jaxreplay.storage.state import ReplayState


class StateSaver:
    """Saves and restores states that have their rows.

    Args:
      buffer: The buffer.

    Attributes:
      buffer: The buffer of which a checkpoint has a state.
    """

    # the reason why a restore takes no sharding, or None
    why_no_sharding: str | None = None

    def __init__(self, buffer: Any):
        self.buffer = buffer

    def check(self, where: str, state: Any) -> None:
        """Raise a ValueError if a state is not of the buffer."""
        # JAX would report an interrupt during its comparison of layouts as an error, here and below
        with defer_interrupts():
            if isinstance(self.buffer, ReplayBuffer):
                check_state(where, self.buffer, state)
            else:
                self.buffer.steps(state)  # raises the same error

    def split(self, state: Any, has_copy: bool) -> SaveParts:
        """Divide a state into what a checkpoint has of it.

        Args:
          state: The newest state.
          has_copy: Whether the checkpoint has a copy of rows that are in files.
        """
        if isinstance(state, ReplayState):
            with defer_interrupts():
                return SaveParts(stored(state), canonical(state), Parts.of(state))
        return SaveParts({}, state, Parts.of(state))  # a rollout, all of whose rows are new

    def restored(self, example: Any, reading: Reading, sharding: Any) -> Any:
        """Return the state of a checkpoint.

        Args:
          example: One env's step, or an item.
          reading: The checkpoint.
          sharding: As for `Checkpointer.restore`.

        Raises:
          ValueError: The folder does not have the rows of the checkpoint.
          CorruptCheckpointError: A file is missing or damaged; the error names it.
        """
        return reading.state(self.buffer, example, sharding)


class ShardedSaver(StateSaver):
    """Saves and restores states of a sharded buffer."""

    why_no_sharding = "a sharded buffer's mesh is its own"

    def __init__(self, shards: Shards):
        super().__init__(shards.buffer)
        self._shards = shards

    def check(self, where: str, state: Any) -> None:
        self._shards.check(where, state)

    def split(self, state: Any, has_copy: bool) -> SaveParts:
        parts = self._shards.parts(state)
        return SaveParts(*self._shards.split(state), parts)

    def restored(self, example: Any, reading: Reading, sharding: Any) -> Any:
        return self._shards.restored(example, reading)


class TieredSaver(StateSaver):
    """Saves and restores states of a tiered buffer, whose rows a restore replaces."""

    why_no_sharding = "the index of a tiered buffer lies on the default device"

    def __init__(self, tier: Tiered):
        super().__init__(tier.index)
        self._tier = tier

    def split(self, state: Any, has_copy: bool) -> SaveParts:
        token = self._tier.flush()
        if token is None or has_copy:
            return super().split(self._tier.whole(state), has_copy)
        split = super().split(state, has_copy)
        split.rest[TOKEN] = np.frombuffer(bytes.fromhex(token), np.uint8)
        return split

    def restored(self, example: Any, reading: Reading, sharding: Any) -> Any:
        tier, token = self._tier, reading.token
        if token is not None:
            restore = lambda first: reading.since(first).state(tier.index, example, None)
            return tier.resume(example, token, reading.end, restore)
        layout = reading.layout_for(tier.index)
        if not relayout.stays(layout, tier.index.layout()):
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

        return tier.replace(example, fill)

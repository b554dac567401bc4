"""flashbax's flat buffers in the form of `workload.py`, with its tree update for the backend; or
ours with its interface."""

from typing import Any

import jax
import jax.numpy as jnp
from cases import NUM_ENVS, Case
from workload import Drawn


class Library:
    """flashbax's calls, of its own module or of `jaxreplay.compat.flashbax`.

    Forms: "" carries only the experience through a loop; "carried" the whole sample, with its
    probabilities; "weights" has a loss.
    """

    is_compiled = False

    def __init__(self, case: Case, flashbax: Any):
        self._carries_all = case.form == "carried"
        sizes = {
            "max_length": case.capacity,
            "min_length": NUM_ENVS,
            "sample_batch_size": case.batch_size,
            "add_batch_size": NUM_ENVS,
        }
        if case.buffer == "uniform":
            self._buffer = flashbax.make_flat_buffer(**sizes)
        else:
            self._buffer = flashbax.make_prioritised_flat_buffer(
                **sizes, device=jax.default_backend()
            )

    def init(self, example):
        return self._buffer.init(example)

    def add(self, state, step):
        return self._buffer.add(state, step)

    def sample(self, state, key) -> Drawn:
        batch = self._buffer.sample(state, key)
        # If probabilities are carried but do not affect the update, XLA copies the whole tree in
        # each iteration.
        return Drawn(
            kept=batch if self._carries_all else batch.experience,
            reward=batch.experience.first["reward"],
            index=getattr(batch, "indices", None),
            probability=getattr(batch, "probabilities", None),
        )

    def update(self, state, index, priority):
        return self._buffer.set_priorities(state, index, priority)

    def weight(self, state, drawn: Drawn) -> jax.Array:
        """Compute importance weights in users' code, since flashbax has no function for them."""
        weight = (1 / drawn.probability) ** 0.4
        return weight / jnp.max(weight)

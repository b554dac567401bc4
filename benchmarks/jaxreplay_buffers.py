"""jaxreplay in the form of `workload.py`."""

import jax
from cases import NUM_ENVS, Case
from workload import Drawn

import jaxreplay as jr


class Library:
    """jaxreplay's calls.

    Forms: "" has envs that step together, as in flashbax, and no final observations. Each other
    form changes one thing: "next_step", "final_obs" and "n_step=3" change the buffer; "weights"
    uses importance weights in a loss; "carried" carries the whole sample through a loop, and not
    only the items. "jax.jit" has single calls of `jax.jit`, not of `jr.jit`.
    """

    def __init__(self, case: Case):
        self._form = case.form
        is_plain = case.population or case.form == "jax.jit"
        self.is_compiled = case.mode == "call" and not is_plain
        buffer = self._made(case)
        self._buffer = jr.jit(buffer) if self.is_compiled else buffer

    def _made(self, case: Case):
        sizes = {"capacity": case.capacity, "num_envs": NUM_ENVS, "batch_size": case.batch_size}
        if case.buffer == "items":
            return jr.items(**sizes)
        sizes |= {
            "autoreset": {"next_step": "next_step", "final_obs": "same_step"}.get(
                case.form, "same_step_no_final_obs"
            ),
            "n_step": 3 if case.form == "n_step=3" else 1,
        }
        if case.buffer == "uniform":
            return jr.uniform(**sizes)
        return jr.prioritized(**sizes)

    def init(self, example):
        return self._buffer.init(example)

    def add(self, state, step):
        return self._buffer.add(state, step)

    def sample(self, state, key) -> Drawn:
        batch = self._buffer.sample(state, key)
        # `jr.jit` returns the whole batch, too
        kept = batch if self._form in ("carried", "jax.jit") else batch.experience
        reward = getattr(batch.experience, "reward", None)
        return Drawn(
            kept=kept,
            reward=reward,
            index=batch.index,
            probability=batch.probability,
            is_valid=batch.is_valid,
            weight=batch.weight,
        )

    def update(self, state, index, priority):
        return self._buffer.update_priorities(state, index, priority)

    def weight(self, state, drawn: Drawn) -> jax.Array:
        return drawn.weight

"""Unfinished episodes that are given up: `buffer.drop`."""

from typing import Any

import jax.numpy as jnp

from jaxreplay.buffers import step_checks
from jaxreplay.buffers.adopt import numbers_of
from jaxreplay.storage import newest_row, relayout, ring, row_flags
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState, at


def dropped(buffer: Any, state: ReplayState, mask: Any) -> ReplayState:
    """Return a buffer's state without the unfinished episodes of some envs.

    Their rows stay in the rings as rows of no step, until they are overwritten, so that no index
    changes its meaning.

    Args:
      buffer: The buffer.
      state: Its state. Donated.
      mask: bool[E], True for the envs that lose their episode.

    Raises:
      ValueError: The buffer stores items, or the mask has another type or shape.
    """
    if buffer.autoreset is None:
        raise ValueError("drop: items have no episodes that could be given up")
    step_checks.check_mask("drop", mask, True, (buffer.num_envs,))
    mask = jnp.asarray(mask)
    layout, numbers, row = state.layout, numbers_of(state), ring.arange(state.layout.capacity)
    # An episode that has ended stays, although its final row will not come.
    last_flags = state.counters.last_flags
    has_ended = row_flags.owes_final_row(last_flags) & (layout.autoreset == "next_step")
    has_ended |= layout.closes_episode(last_flags)
    state, _ = newest_row.close(state, mask & has_ended)
    # The newest rows from the episode's first one on, or all of a ring. Flags of rows that were not
    # written yet mean nothing.
    counters, (env, _) = state.counters, layout.split(row)
    age = jnp.where(state.has(row, row_flags.FIRST), state.age(row), layout.length)
    age_of_first = age.reshape(layout.num_envs, layout.length).min(axis=1)
    is_dropped = at(mask & ~has_ended, env) & (state.age(row) <= at(age_of_first, env))
    flags = jnp.where(is_dropped, jnp.uint8(row_flags.NO_STEP), state.rows.flags)
    last_flags = jnp.where(mask & ~has_ended, jnp.uint8(row_flags.NO_STEP), counters.last_flags)
    # Candidate numbers are larger than all before, so that none has two meanings.
    end = counters.num_candidates + jnp.uint32(layout.length)
    counters = counters.set(last_flags=last_flags, num_candidates=end)
    state = state.replace(rows=state.rows.replace(flags=flags), counters=counters)
    state = relayout.derived(state, layout)
    for name in numbers:
        if name.endswith("jaxreplay/Queue:num_waiting"):  # it would count dropped rows as lost
            numbers[name] *= 0
    sampler = buffer.sampler._from_labelled(Sampleable.of(state), numbers)
    return state.replace(sampler=sampler)

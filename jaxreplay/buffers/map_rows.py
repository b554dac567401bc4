"""Rows that are computed anew, all of them, a block at a time: `buffer.map_rows`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay.buffers import step_checks
from jaxreplay.storage import ring, row_flags, writes
from jaxreplay.storage.layout import NUM_PARTS
from jaxreplay.storage.state import ReplayState
from jaxreplay.views import RowReader


def mapped(
    buffer: Any, state: ReplayState, function: Callable[..., Any], arguments: Any, size: int
) -> ReplayState:
    """Return a state with new leaves of all its steps.

    Args:
      buffer: The buffer.
      state: Its state, of a layout with `allow_write`. Donated.
      function: As for `ReplayBuffer.map_rows`, as are `arguments`.
      size: Number of rows of a block, at most the capacity.
    """
    capacity = buffer.capacity

    def of_row(state: ReplayState, row: jax.Array) -> Any:
        reader = RowReader(state, row)
        if buffer.autoreset is None:
            return function(reader.item(), *arguments)
        return function(reader.step(0), reader.next_obs(0), *arguments)

    def of_block(number: jax.Array, carry: Any) -> Any:
        state, trace = carry
        row = number * size + ring.arange(size)
        inside = jnp.minimum(row, capacity - 1)
        is_step = (row == inside) & state.is_written(inside) & ~state.has(inside, row_flags.FINAL)
        values = jax.vmap(functools.partial(of_row, state))(inside)
        new = step_checks.as_values("map_rows", state, values, (size,))
        target = jnp.where(is_step, inside, capacity)
        trace += jnp.where(is_step, writes.trace_of(row, new), 0).sum(dtype=jnp.uint32)
        return state.replace(rows=writes.put(state.rows, target, new, are_distinct=True)), trace

    # Of the state, since a constant would not vary among the shards of a `shard_map`.
    none = (0 * state.counters.filled[0]).astype(jnp.uint32)
    state, trace = jax.lax.fori_loop(0, -(-capacity // size), of_block, (state, none))
    traces = jnp.full((NUM_PARTS, 1), jnp.maximum(trace, 1))
    counters = writes.traced(state.counters, traces)
    return state.replace(counters=counters)

"""Rows that are computed anew, all of them, a block at a time: `buffer.map_rows`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay.buffers import step_checks
from jaxreplay.storage import ring, row_flags, writes
from jaxreplay.storage.layout import NUM_PARTS
from jaxreplay.storage.state import ReplayState
from jaxreplay.views import RowReader


def rows_mapped(
    buffer: Any, state: ReplayState, function: Callable[..., Any], arguments: Any, size: int
) -> ReplayState:
    """Return a state with new leaves of all its steps.

    Args:
      buffer: The buffer.
      state: Its state, of a layout with `allow_write`. Donated.
      function: As for `ReplayBuffer.map_rows`, as are `arguments`.
      size: Number of rows of a block, at most the capacity.
    """

    def of_block(number: jax.Array, carry: Any) -> Any:
        state, stamp = carry
        target, new, own = block_of(buffer, state, function, arguments, size, number)
        return state.replace(
            rows=writes.put(state.rows, target, new, are_distinct=True)
        ), stamp + own

    # Of the state, since a constant would not vary among the shards of a `shard_map`.
    none = (0 * state.counters.filled[0]).astype(jnp.uint32)
    num_blocks = -(-buffer.capacity // size)
    state, stamp = jax.lax.fori_loop(0, num_blocks, of_block, (state, none))
    return stamped(state, stamp)


def block_of(
    buffer: Any,
    state: ReplayState,
    function: Callable[..., Any],
    arguments: Any,
    size: int,
    number: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Return the rows of a block that have steps, int32[size], the capacity for others; their new
    leaves by name, [size, ...]; and the stamp of writing them.

    Args:
      buffer: As for `mapped`, as are `state`, `function`, `arguments` and `size`.
      number: int32[], of the block.
    """
    capacity = buffer.capacity

    def of_row(row: jax.Array) -> Any:
        reader = RowReader(state, row)
        if buffer.autoreset is None:
            return function(reader.item(), *arguments)
        return function(reader.step(0), reader.next_obs(0), *arguments)

    row = number * size + ring.arange(size)
    inside = jnp.minimum(row, capacity - 1)
    is_step = (row == inside) & state.is_written(inside) & ~state.has(inside, row_flags.FINAL)
    new = step_checks.as_values("map_rows", state, jax.vmap(of_row)(inside), (size,))
    stamp = jnp.where(is_step, writes.stamp_of(row, new), 0).sum(dtype=jnp.uint32)
    return jnp.where(is_step, inside, capacity), new, stamp


def stamped(state: ReplayState, stamp: jax.Array) -> ReplayState:
    """Return a state of which all rows were written, with a stamp."""
    stamps = jnp.full((NUM_PARTS, 1), jnp.maximum(stamp, 1))
    return state.replace(counters=writes.stamped(state.counters, stamps))


def identified(function: Any) -> Any:
    """Return a function that equals another one if both are of one object: `==` of objects may
    leave out an array."""
    return function.__call__ if callable(function) else function

"""One row and its neighbours in time, read lazily: what a view does not ask for is never gathered."""

import dataclasses
from typing import Any

import jax

from jaxreplay import autoreset, leaves, ring
from jaxreplay.streams import Streams, StreamState, has_final_obs


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A row of a buffer's streams. `offset`: rows forward in time, int32[...], from `-length` to `length - 1`.

    Whether a neighbour belongs to the anchor's episode, or is written at all, is for the view to know: see `rows_after`.
    """

    streams: Streams
    state: StreamState
    row: jax.Array  # int32[]

    def item(self) -> Any:
        """The stored item, or step, at the anchor."""
        return self._read(self.state.steps, 0)

    def obs(self, offset: Any) -> Any:
        return self._read(self.state.steps.obs, offset)

    def action(self, offset: Any) -> Any:
        return self._read(self.state.steps.action, offset)

    def reward(self, offset: Any) -> Any:
        return self._read(self.state.steps.reward, offset)

    def extras(self, offset: Any) -> Any:
        return self._read(self.state.steps.extras, offset)

    def is_terminated(self, offset: Any) -> jax.Array:
        return (self._flags(offset) & autoreset.TERMINATED) != 0

    def is_tail(self, offset: Any) -> jax.Array:
        return (self._flags(offset) & autoreset.TAIL) != 0

    def rows_after(self) -> jax.Array:
        """Rows of the stream that were written after the anchor: int32[]."""
        return self.streams.age(self.state, self.row)

    @property
    def termination_has_tail(self) -> bool:
        """Whether a terminated row's successor, once written, holds the final observation."""
        assert self.streams.autoreset is not None
        return autoreset.termination_has_tail(self.streams.autoreset, has_final_obs(self.state.steps))

    def _flags(self, offset: Any) -> jax.Array:
        return self._read(self.state.flags, offset)

    def _read(self, stored: Any, offset: Any) -> Any:
        env, position = ring.split(self.row, self.streams.length)
        row = self.streams.row(env, ring.wrap(position + offset, self.streams.length))
        return leaves.tree_map(lambda leaf: leaves.take(leaf, row), stored)

"""One row and its neighbours in time, read lazily: what a view does not ask for is never
gathered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util import random
from jaxreplay._util.aliases import PyTree, Stored
from jaxreplay.storage import row_flags, stored_arrays
from jaxreplay.storage.episodes import Episodes, EpisodeState
from jaxreplay.storage.streams import Streams, written_row
from jaxreplay.types import Step


@dataclasses.dataclass(frozen=True)
class RowReader:
    """A row of a buffer's streams. `offset`: rows forward in time, int32[...], from `-length` to
    `length - 1`.

    Whether a neighbour belongs to the row's episode, or is written at all, is for the view to know:
    see `rows_after`. A view that changes what another one reads hands it a reader with some of
    these methods changed.
    """

    streams: Streams
    row: jax.Array  # int32[]
    table: EpisodeState | None = None  # where the window is not bounded, or the buffer keeps one
    # uint32[2]: random bits of this item's own, for a view that draws
    bits: jax.Array | None = None

    def item(self) -> PyTree:
        """The stored item, or step, of the row."""
        return self._read(self.streams.steps, 0)

    def obs(self, offset: ArrayLike) -> PyTree:
        return self._read(self.streams.steps.obs, offset)

    def action(self, offset: ArrayLike) -> PyTree:
        return self._read(self.streams.steps.action, offset)

    def reward(self, offset: ArrayLike) -> PyTree:
        return self._read(self.streams.steps.reward, offset)

    def extras(self, offset: ArrayLike) -> PyTree:
        return self._read(self.streams.steps.extras, offset)

    def is_terminated(self, offset: ArrayLike) -> jax.Array:
        return self.has(row_flags.TERMINATED, offset)

    def is_truncated(self, offset: ArrayLike) -> jax.Array:
        return self.has(row_flags.TRUNCATED, offset)

    def is_final(self, offset: ArrayLike) -> jax.Array:
        return self.has(row_flags.FINAL, offset)

    def is_first(self, offset: ArrayLike) -> jax.Array:
        """Whether a row opens an episode."""
        return self.has(row_flags.FIRST, offset)

    def has(self, flag: int, offset: ArrayLike) -> jax.Array:
        return (self._read(self.streams.flags, offset) & flag) != 0

    def step(self, offset: ArrayLike) -> Step:
        """A stored step, whole."""
        return Step(
            obs=self.obs(offset),
            action=self.action(offset),
            reward=self.reward(offset),
            terminated=self.is_terminated(offset),
            truncated=self.is_truncated(offset),
            extras=self.extras(offset),
        )

    def rows_before(self, offset: ArrayLike, most: int) -> jax.Array:
        """Rows before a row that belong to its episode, `most` at the most: int32[...]."""
        return self.streams.rows_before(self.streams.layout.ahead(self.row, offset), most)

    def rows_after(self) -> jax.Array:
        """Rows of the stream that were written after the row: int32[]."""
        return self.streams.age(self.row)

    @property
    def episodes(self) -> Episodes:
        """Look-ups of episode ends around rows."""
        assert self.table is not None
        return Episodes(self.streams, self.table)

    @property
    def termination_has_final_row(self) -> bool:
        """Whether a terminated row's successor, once written, holds the final observation."""
        return self.streams.layout.termination_has_final_row

    def random_words(self, purpose: int) -> tuple[jax.Array, jax.Array]:
        """64 random bits of this item's own, as two uint32[]: others for each purpose."""
        assert self.bits is not None
        return random.remix(self.bits[0], self.bits[1], jnp.uint32(purpose))

    def random_row(self, purpose: int) -> "RowReader":
        """A row among all that are stored, uniformly."""
        return self.at(row=written_row(self.streams, *self.random_words(purpose)))

    def at(self, **changes: Any) -> "RowReader":
        """With another row, or other bits."""
        return dataclasses.replace(self, **changes)

    def _read(self, stored: Stored, offset: ArrayLike) -> PyTree:
        row = self.streams.layout.ahead(self.row, offset)
        return stored_arrays.tree_map(lambda leaf: stored_arrays.read(leaf, row), stored)


@dataclasses.dataclass(frozen=True)
class WrappedReader(RowReader):
    """A reader that reads through another one; a view overrides what it changes."""

    inner: RowReader | None = None

    @classmethod
    def around(cls, inner: RowReader, **fields: Any) -> PyTree:
        shared = {field.name: getattr(inner, field.name) for field in dataclasses.fields(RowReader)}
        return cls(**shared, inner=inner, **fields)

    def obs(self, offset: ArrayLike) -> PyTree:
        return self._inner.obs(offset)

    def reward(self, offset: ArrayLike) -> PyTree:
        return self._inner.reward(offset)

    def is_terminated(self, offset: ArrayLike) -> jax.Array:
        return self._inner.is_terminated(offset)

    def at(self, **changes: Any) -> RowReader:
        return dataclasses.replace(self, inner=self._inner.at(**changes), **changes)

    @property
    def _inner(self) -> RowReader:
        assert self.inner is not None
        return self.inner

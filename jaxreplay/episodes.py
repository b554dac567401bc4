"""Episodes: every look-up is O(1), without a scan, a sort or a bound on their number or length.

Each row has the ordinal of its episode in its stream, modulo the stream's length; a table per stream has, for each ordinal, the
position of that episode's last row, written when it ends. A stream of `length` rows holds at most `length` episodes, so no two that
are stored share an ordinal. An entry of the table is read only for an episode that has ended and whose last row is stored.

Eight bytes a row, kept only where a view or the buffer's maker asks for them.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxreplay import autoreset, ring
from jaxreplay.streams import Streams, StreamState, Written, has_final_obs


class EpisodeState(flax.struct.PyTreeNode):
    ordinal: jax.Array  # int32[N], in [0, length): each row's episode
    last: jax.Array  # int32[N], env * length + ordinal -> the position of that episode's last row
    current: jax.Array  # int32[E], in [0, length): the ordinal of the next row
    is_open: jax.Array  # bool[E]: the newest row's episode has not ended


def init(streams: Streams) -> EpisodeState:
    return EpisodeState(
        ordinal=jnp.zeros((streams.capacity,), jnp.int32),
        last=jnp.zeros((streams.capacity,), jnp.int32),
        current=jnp.zeros((streams.num_envs,), jnp.int32),
        is_open=jnp.zeros((streams.num_envs,), bool),
    )


def clear(state: EpisodeState) -> EpisodeState:
    """Forget every episode; an unfinished one does not go on."""
    return state.replace(current=jnp.zeros_like(state.current), is_open=jnp.zeros_like(state.is_open))


def observe(streams: Streams, before: StreamState, state: EpisodeState, written: Written) -> EpisodeState:
    """The table after a write. `before`: the streams before it."""
    assert streams.autoreset is not None
    assert written.flags is not None
    closes = written.is_written & autoreset.closes_episode(written.flags, streams.autoreset, has_final_obs(before.steps))
    ended_before = jnp.cumsum(closes, axis=0, dtype=jnp.int32) - closes
    ordinal = ring.wrap(state.current + ended_before, streams.length)
    env = ring.places(streams.num_envs)
    entry = jnp.where(closes, streams.row(env, ordinal), streams.capacity)
    _, position = ring.split(written.row, streams.length)
    is_newest = written.is_written & (written.age == 0)
    return EpisodeState(
        ordinal=state.ordinal.at[written.row].set(ordinal, mode="drop", unique_indices=True),
        last=state.last.at[entry].set(position, mode="drop", unique_indices=True),
        current=ring.wrap(state.current + closes.sum(axis=0, dtype=jnp.int32), streams.length),
        is_open=jnp.where(written.num_rows > 0, ~jnp.any(is_newest & closes, axis=0), state.is_open),
    )


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The episodes of a buffer's state. All look-ups take rows int32[...] that are stored, and are elementwise."""

    streams: Streams
    state: StreamState
    table: EpisodeState

    def steps_to_end(self, row: jax.Array) -> jax.Array:
        """Rows from each row to the last one of its episode, or to the newest where it has not ended: int32[...], 0 at that row."""
        env, position, ordinal = self._locate(row)
        end = jnp.where(self._has_ended(env, ordinal), self._last(env, ordinal), self._newest(env))
        return ring.forward(position, end, self.streams.length)

    def steps_from_start(self, row: jax.Array) -> jax.Array:
        """Rows from the first one of its episode to each row, or from the oldest one stored where the first is overwritten: int32[...]."""
        env, position, ordinal = self._locate(row)
        oldest = self._oldest(env)
        # Of the oldest episode alone the start may be gone; what is stored of it begins with the oldest row.
        is_oldest = ordinal == self._ordinal(env, oldest)
        previous = self._last(env, ring.wrap(ordinal - 1, self.streams.length))
        start = jnp.where(is_oldest, oldest, ring.wrap(previous + 1, self.streams.length))
        return ring.forward(start, position, self.streams.length)

    def kth_end(self, row: jax.Array, k: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Rows from each row to the end of its k-th episode, counted from its own as 1, and whether that has ended.

        Returns:
          int32[...], the rows ahead, up to the newest row where there are fewer ends; bool[...], whether there are k ends ahead.
        """
        env, position, ordinal = self._locate(row)
        newest = self._newest(env)
        ends = ring.forward(ordinal, self._ordinal(env, newest), self.streams.length) + ~self._of(self.table.is_open, env)
        exists = (k >= 1) & (k <= ends)
        target = ring.wrap(ordinal + jnp.where(exists, k - 1, 0), self.streams.length)
        end = jnp.where(exists, self._last(env, target), newest)
        return ring.forward(position, end, self.streams.length), exists

    def is_complete(self, row: jax.Array) -> jax.Array:
        """Whether each row's episode has ended and is stored from its first row on: bool[...]."""
        env, _, ordinal = self._locate(row)
        oldest = self._oldest(env)
        assert self.state.flags is not None
        is_first = (self._of(self.state.flags, self.streams.row(env, oldest)) & autoreset.FIRST) != 0
        is_whole = (ordinal != self._ordinal(env, oldest)) | is_first
        return self.streams.is_written(self.state, row) & self._has_ended(env, ordinal) & is_whole

    def _locate(self, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        env, position = ring.split(row, self.streams.length)
        return env, position, self._of(self.table.ordinal, row)

    def _has_ended(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        is_newest = ordinal == self._ordinal(env, self._newest(env))
        return ~(is_newest & self._of(self.table.is_open, env))

    def _newest(self, env: jax.Array) -> jax.Array:
        return ring.wrap(self.streams.of_stream(self.state.head, env) - 1, self.streams.length)

    def _oldest(self, env: jax.Array) -> jax.Array:
        head, filled = (self.streams.of_stream(x, env) for x in (self.state.head, self.state.filled))
        return ring.wrap(head - filled, self.streams.length)

    def _ordinal(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return self._of(self.table.ordinal, self.streams.row(env, position))

    def _last(self, env: jax.Array, ordinal: jax.Array) -> jax.Array:
        return self._of(self.table.last, self.streams.row(env, ordinal))

    def _of(self, values: jax.Array, index: jax.Array) -> jax.Array:
        return values.at[index].get(mode="promise_in_bounds")

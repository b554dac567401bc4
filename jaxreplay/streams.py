"""Storage: every env is a stream, a ring of rows of its own, and all streams lie in one array a leaf.

Leaves are `[num_envs * length, ...]`, env-major: row = env * length + position, so a stream's neighbours in time are neighbours in
memory. Each write is one masked scatter a leaf; a row that is not written points past the end. (A `lax.cond` around the write would
become a select over the whole buffer under `vmap`, and a strided `dynamic_update_slice` took 13 us where the scatter takes 2.)

The streams know nothing of sampling. Beside a step's own leaves they keep, for each row, flags that say what it is (`autoreset.py`), and
its rank, the number of anchors (rows that can be drawn) before it in its stream, from which `drawable.py` counts and finds rows without
keeping a list of them. The two are apart since samples read the flags alone: at one byte a row those of a million rows stay in a
core's cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import autoreset, fingerprint, leaves, ring
from jaxreplay.stream_state import Heads, StreamState, Written
from jaxreplay.types import Index, Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """`num_envs` rings of `length` rows. `autoreset` is one of `autoreset.FORMS`, or None where the rows are items without an order.

    Every `stride`-th transition is an anchor, counted from each episode's start where `stride_restarts`, else on and on. With
    `keep_history` the state has a fingerprint of all rows that were ever written. `platform`: what the state is laid
    out for; None where there is none yet.
    """

    num_envs: int
    length: int
    autoreset: str | None
    masked: bool
    stride: int = 1
    stride_restarts: bool = True
    keep_history: bool = True
    platform: str | None = None

    @property
    def capacity(self) -> int:
        return self.num_envs * self.length

    def init(self, example: Any) -> StreamState:
        """Zeros for every row. `example`: one env's step, or one item."""
        # Envs step together unless a mask leaves some out or an episode's end takes a second row.
        together = not self.masked and self.rows_per_step(example) == 1
        zeros = jnp.zeros((self.num_envs,), jnp.int32)
        stored = example if self.autoreset is None else _stored(example)
        has_flags = self.autoreset is not None
        return StreamState(
            steps=jax.tree.map(lambda leaf: leaves.zeros(self.capacity, leaf, self.platform), stored),
            flags=jnp.zeros((self.capacity,), jnp.uint8) if has_flags else None,
            rank=jnp.zeros((self.capacity,), jnp.uint32) if has_flags else None,
            heads=Heads(zeros, jnp.zeros_like(zeros), zeros.astype(jnp.uint32)),
            # As if a tail had been written: the first row opens an episode.
            last=jnp.full((self.num_envs,), autoreset.TAIL, jnp.uint8) if has_flags else None,
            count=jnp.zeros((self.num_envs,), jnp.uint32) if has_flags else None,
            phase=jnp.zeros((self.num_envs,), jnp.int32) if self.stride > 1 else None,
            history=jnp.zeros((self.num_envs,), jnp.uint32) if self.keep_history else None,
            newest=jnp.zeros((self.num_envs,), jnp.uint32) if self.keep_history and self.may_take_back(example) else None,
            together=together,
        )

    def clear(self, state: StreamState) -> StreamState:
        """Forget every row; the stored steps stay as they are, and no index drawn before is valid after.

        Where a done still owes its tail (`autoreset="next_step"`), the next row is that tail: it would pair with the next episode.
        """
        # The laps by two: the rows from the head on count as of the lap before.
        return state.with_heads(position=0, filled=0, lap=state.heads.lap + jnp.uint32(2)).replace(
            last=None if state.last is None else autoreset.after_clear(_not_none(self.autoreset), state.last),
            phase=None if state.phase is None else jnp.zeros_like(state.phase),
        )

    def rows_per_step(self, steps: Any) -> int:
        """2 where a step may write its tail beside it. `steps`: a step, or the stored steps."""
        return 2 if self.autoreset == "same_step" and has_final_obs(steps) else 1

    def may_take_back(self, steps: Any) -> bool:
        """Whether each stream's newest row, a tail, may be taken back (`provisional.py`). `steps`: a step, or the stored steps."""
        return self.rows_per_step(steps) == 2 and not self.masked

    def count(self, state: StreamState, steps: Any, mask: jax.Array | None) -> tuple[StreamState, Written]:
        """A block of steps, leaves `[T, num_envs, ...]`, is appended: all but the rows themselves, which are to be `put`.

        `mask`: bool[T, num_envs], False where an env took no step. T times `rows_per_step` must not exceed the length.
        """
        num_steps = jax.tree.leaves(steps)[0].shape[0]
        mask = jnp.ones((num_steps, self.num_envs), bool) if mask is None else mask
        if self.autoreset is None:
            flags, is_written = None, mask
        else:
            flags, is_written = autoreset.rows_of(
                self.autoreset, has_final_obs(steps), steps.terminated, steps.truncated, mask, _not_none(state.last)
            )
            if self.stride > 1:
                state, flags = self._skip(state, flags, is_written)
        if state.together:  # the positions are known without looking at the block
            nth = jnp.broadcast_to(ring.places(num_steps)[:, None], is_written.shape)
            num_rows = jnp.full((self.num_envs,), num_steps, jnp.int32)
        else:
            nth = jnp.cumsum(is_written, axis=0, dtype=jnp.int32) - 1
            num_rows = nth[-1] + 1
        age = num_rows - 1 - nth
        new = self._advance(state, num_rows)
        # From the new head back, here and in what follows: of what is counted on XLA would keep a copy, where a later kernel reads it.
        row = self.row(ring.places(self.num_envs), ring.wrap(new.heads.position - 1 - age, self.length))
        written = Written(jnp.where(is_written, row, self.capacity), is_written, flags, age, num_rows)
        new = new.replace(last=_of_newest(state.last, written, flags))
        if self.keep_history:
            number = self._next_number(state.heads.position, state.heads.lap) + nth.astype(jnp.uint32)
            new = self._note(new, written, jnp.where(is_written, self._hashes(steps, flags, number), 0))
        if flags is not None:
            is_anchor = is_written & ((flags & autoreset.NO_ANCHOR) == 0)
            count = _not_none(state.count) + is_anchor.sum(axis=0, dtype=jnp.uint32)
            new, written = new.replace(count=count), written._replace(rank=count - from_each_on(is_anchor))
        return new, written

    def _skip(self, state: StreamState, flags: jax.Array, is_written: jax.Array) -> tuple[StreamState, jax.Array]:
        """Mark the transitions between anchors: flags uint8[K, E]."""
        is_transition = is_written & ((flags & autoreset.TAIL) == 0)
        through = jnp.cumsum(is_transition, axis=0, dtype=jnp.int32)  # of this block, each row's own included
        before = through - is_transition
        starts = is_written & ((flags & autoreset.FIRST) != 0) & self.stride_restarts
        # Counted from the row's episode's start, where that is in the block; else on from the rows before it.
        latest_start = jax.lax.cummax(jnp.where(starts, before, -1), axis=0)
        since = jnp.where(latest_start >= 0, before - latest_start, before + _not_none(state.phase))
        _, place = ring.split(since, self.stride)
        _, phase = ring.split((since + is_transition)[-1], self.stride)
        return state.replace(phase=phase), jnp.where(is_transition & (place != 0), flags | autoreset.SKIPPED, flags)

    def put(self, state: StreamState, steps: Any, written: Written) -> StreamState:
        """The rows of a block that was counted."""

        def put(stored, new, row):
            return leaves.tree_map(lambda leaf, values: leaves.put(leaf, row, values), stored, new)

        if self.autoreset is None:
            return state.replace(steps=put(state.steps, steps, written.row))
        new = _stored(steps)
        if self.rows_per_step(steps) == 2:  # a tail is read for its observation alone
            pairs = written.row.reshape(-1, 2, self.num_envs)
            rest = put(state.steps.replace(obs=()), new.replace(obs=()), pairs[:, 0])
            stored = rest.replace(obs=put(state.steps.obs, _with_tails(steps), written.row))
        else:
            stored = put(state.steps, new, written.row)
        return state.replace(
            steps=stored,
            flags=put(state.flags, written.flags, written.row),
            rank=put(state.rank, written.rank, written.row),
        )

    def _advance(self, state: StreamState, num_rows: jax.Array) -> StreamState:
        end = state.heads.position + num_rows
        heads = Heads(
            ring.wrap(end, self.length),
            jnp.minimum(state.heads.filled + num_rows, self.length),
            state.heads.lap + (end >= self.length).astype(jnp.uint32),
        )
        return state.replace(heads=heads)

    def _note(self, state: StreamState, written: Written, hashes: jax.Array) -> StreamState:
        """`hashes`: uint32[K, E], of the rows written; 0 where there is none."""
        history = _not_none(state.history) + hashes.sum(axis=0, dtype=jnp.uint32)
        return state.replace(history=history, newest=_of_newest(state.newest, written, hashes))

    def next_number(self, state: StreamState) -> jax.Array:
        """The number of each stream's next row, modulo 2^32: uint32[] or uint32[E]. A row's position is its number modulo the length."""
        return self._next_number(state.head, state.lap)

    def _next_number(self, head: jax.Array, lap: jax.Array) -> jax.Array:
        return lap * jnp.uint32(self.length) + head.astype(jnp.uint32)

    def _hashes(self, steps: Any, flags: jax.Array | None, number: jax.Array) -> jax.Array:
        """Of what a block writes to each row: uint32[K, E]. `flags`: uint8[K, E]. `number`: uint32[K, E]."""
        if flags is None:
            return fingerprint.of_values(steps, number, self.platform)
        new, of_flags = _stored(steps), fingerprint.of_flags(flags, number)
        if self.rows_per_step(steps) == 1:
            return fingerprint.of_values(new, number, self.platform) + of_flags
        rest = fingerprint.of_values(new.replace(obs=()), ~number[::2], self.platform)
        of_rest = jnp.stack([rest, jnp.zeros_like(rest)], axis=1).reshape(number.shape)
        return fingerprint.of_values(_with_tails(steps), number, self.platform) + of_rest + of_flags

    def hashes(self, state: StreamState, row: jax.Array, number: jax.Array) -> jax.Array:
        """Of stored rows: uint32[K], their parts of `history`. `row`: int32[K], in bounds. `number`: uint32[K], in their streams."""
        if state.flags is None:
            return fingerprint.of_stored(state.steps, row, number, self.platform)
        flags = state.flags.at[row].get(mode="promise_in_bounds")
        of_flags = fingerprint.of_flags(flags, number)
        if self.rows_per_step(state.steps) == 1:
            return fingerprint.of_stored(state.steps, row, number, self.platform) + of_flags
        rest = fingerprint.of_stored(state.steps.replace(obs=()), row, ~number, self.platform)
        is_tail = (flags & autoreset.TAIL) != 0  # it has nothing but its observation
        return fingerprint.of_stored(state.steps.obs, row, number, self.platform) + jnp.where(is_tail, 0, rest) + of_flags

    def row(self, env: jax.Array, position: jax.Array) -> jax.Array:
        return env * self.length + position

    def ahead(self, row: jax.Array, offset: Any) -> jax.Array:
        """The rows `offset` rows forward in their stream, from `-length` to `length - 1`: int32[...]."""
        env, position = ring.split(row, self.length)
        return self.row(env, ring.wrap(position + offset, self.length))

    def back(self, state: StreamState, row: jax.Array, most: int) -> jax.Array:
        """Rows before each row that belong to its episode, `most` at the most: int32[...]. The first row has none before it."""
        places = ring.places(most).reshape((most,) + (1,) * row.ndim)
        flags = _not_none(state.flags).at[self.ahead(row, -places)].get(mode="promise_in_bounds")
        goes_on = (flags & autoreset.FIRST) == 0
        return jnp.cumprod(goes_on, axis=0, dtype=jnp.int32).sum(axis=0, dtype=jnp.int32)

    def age(self, state: StreamState, row: jax.Array) -> jax.Array:
        """Rows of its stream written after each row: 0 for the newest. For a row never written, at least `filled`. int32[...]."""
        env, position = ring.split(row, self.length)
        return ring.wrap(self.of_stream(state.head, env) - 1 - position, self.length)

    def is_written(self, state: StreamState, row: jax.Array) -> jax.Array:
        """Whether each row, in `[0, capacity)`, holds a step. bool[...]."""
        env, _ = ring.split(row, self.length)
        return self.age(state, row) < self.of_stream(state.filled, env)

    def index(self, state: StreamState, row: jax.Array) -> Index:
        """The rows' names: row and lap."""
        env, position = ring.split(row, self.length)
        ahead = position >= self.of_stream(state.head, env)  # written before the head last went round
        return Index(row=row, lap=self.of_stream(state.lap, env) - ahead.astype(jnp.uint32))

    def of_stream(self, per_stream: jax.Array, env: jax.Array) -> jax.Array:
        """A per-stream value at each env; a scalar serves all."""
        return per_stream if per_stream.ndim == 0 else per_stream.at[env].get(mode="promise_in_bounds")


def has_final_obs(steps: Any) -> bool:
    """Whether a step, or the stored steps, hold final observations."""
    return getattr(steps, "final_obs", None) is not None


def _stored(step: Step) -> Step:
    """A step as it is stored: its done flags go into `flags`, and a final observation into the `obs` of a row of its own; `()`, which
    has no leaves, keeps in the state's structure that there is one."""
    return step.replace(terminated=None, truncated=None, final_obs=() if has_final_obs(step) else None)


def _of_newest(before: jax.Array | None, written: Written, values: Any) -> jax.Array | None:
    """The newest row's value of each stream: of those written, `[K, E]`, or the one before the write; None where none is kept."""
    if before is None:
        return None
    newest = jnp.where(written.is_written & (written.age == 0), values, 0).sum(axis=0, dtype=before.dtype)
    return jnp.where(written.num_rows > 0, newest, before)


def from_each_on(is_one: jax.Array) -> jax.Array:
    """How many there are among each and those after it: uint32[K, E]."""
    return jnp.flip(jnp.cumsum(jnp.flip(is_one, axis=0), axis=0, dtype=jnp.uint32), axis=0)


def _with_tails(steps: Step) -> Any:
    """The observations of a block and, after each, its final one: leaves [2 T, E, ...]."""

    def joined(obs: jax.Array, final_obs: jax.Array) -> jax.Array:
        return jnp.stack([obs, final_obs], axis=1).reshape((-1, *obs.shape[1:]))

    return jax.tree.map(joined, steps.obs, steps.final_obs)


def _not_none(value: Any) -> Any:
    assert value is not None
    return value

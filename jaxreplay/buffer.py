"""The buffer: check, write, tell the sampler; draw, read the view."""

import dataclasses
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxreplay import autoreset as autoreset_forms
from jaxreplay import checks, episodes, leaves, memory
from jaxreplay.donation import warn_of_copy
from jaxreplay.drawable import Drawable, settle
from jaxreplay.samplers import PrioritySampler, Sampler
from jaxreplay.streams import Streams, StreamState
from jaxreplay.types import Index, Sample
from jaxreplay.views import Anchor, View


class ReplayState(flax.struct.PyTreeNode):
    """Everything that a buffer holds; E streams. `add`, `extend`, `update_priorities` and `clear` take it over: donate it to them."""

    streams: StreamState
    pending: jax.Array  # int32[E]: newest rows of each stream whose window is not known yet
    sampler: Any
    episodes: episodes.EpisodeState | None  # None unless `keep_episodes`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayBuffer:
    """A replay buffer: storage in streams, a sampler, and a view. It is static configuration; its methods are pure.

    State comes first, a key next, and the key is consumed. Jit the methods that return a state with `donate_argnums=0`
    (`jaxreplay.jit` does), and in a loop add before you sample: then nothing costs more than the rows it touches.

    Args:
      capacity: rows in all, the final observations of episodes included; a multiple of `num_envs`.
      num_envs: streams, each a ring of `capacity / num_envs` rows.
      batch_size: items of a sample, unless the call says otherwise.
      sampler: which drawable rows are drawn.
      view: what is read around them.
      autoreset: "next_step" or "same_step": what the env does when an episode ends (`autoreset.py`). None for a view that takes items.
      masked: whether `add` and `extend` take a mask of the envs that took a step.
      min_size: drawable rows that `can_sample` waits for, at least 1.
      keep_episodes: whether to keep what `episodes` needs, 8 bytes a row.
    """

    capacity: int
    num_envs: int
    batch_size: int
    sampler: Sampler
    view: View
    autoreset: str | None
    masked: bool = False
    min_size: int = 1
    keep_episodes: bool = False

    def __post_init__(self):
        checks.check_static(self)
        checks.check_capacity("ReplayBuffer", self.capacity, self.num_envs, self.view.lookahead + 1)
        if self.view.needs_steps and self.autoreset not in autoreset_forms.FORMS:
            raise ValueError(autoreset_forms.form_error("ReplayBuffer", self.autoreset))
        if not self.view.needs_steps and (self.autoreset is not None or self.keep_episodes):
            raise ValueError(
                f"ReplayBuffer: {type(self.view).__name__} stores items, which have no episodes; leave out autoreset and keep_episodes"
            )
        checks.check_size("ReplayBuffer", "batch_size", self.batch_size)
        checks.check_size("ReplayBuffer", "min_size", self.min_size)
        if self.min_size > self.capacity:
            raise ValueError(f"ReplayBuffer: min_size={self.min_size} exceeds capacity={self.capacity}: can_sample would never be True")

    @property
    def streams(self) -> Streams:
        return Streams(num_envs=self.num_envs, length=self.capacity // self.num_envs, autoreset=self.autoreset, masked=self.masked)

    def init(self, example: Any) -> ReplayState:
        """An empty buffer.

        Args:
          example: one env's step (leaves without the env axis) or one item: arrays, or `jax.ShapeDtypeStruct`s. Only structure, shapes
            and dtypes are read. With `autoreset="same_step"`, `final_obs` in the example says that every step will bring it.

        Raises:
          ValueError: the example is no step, or a flag is not bool.
          MemoryError: the device cannot hold the buffer.
        """
        where = "init"
        if self.view.needs_steps:
            example = checks.as_step(where, example)
            checks.check_flags(where, example)
            if self.autoreset == "next_step":  # the next row is the final observation: another copy is not read
                example = example.replace(final_obs=None)
            smallest = self.view.lookahead + self.streams.rows_per_step(example)
            checks.check_capacity(where, self.capacity, self.num_envs, smallest)
        example = checks.specs(where, example)
        if not jax.tree.leaves(example):
            raise ValueError(f"{where}: the example has no leaves: there is nothing to store")
        if not isinstance(jnp.zeros(()), Tracer):  # while tracing, nothing is allocated yet
            memory.check_fits(where, self.memory(example))
        return self._init(example)

    def _init(self, example: Any) -> ReplayState:
        return ReplayState(
            streams=self.streams.init(example),
            pending=jnp.zeros((self.num_envs,), jnp.int32),
            sampler=self.sampler.init(self.streams, self.view.lookahead),
            episodes=episodes.init(self.streams) if self.keep_episodes else None,
        )

    def memory(self, example: Any) -> memory.Memory:
        """The bytes that `init(example)` will take, leaf by leaf, with nothing allocated."""
        if self.view.needs_steps:
            example = checks.as_step("memory", example)
        return memory.memory_of(jax.eval_shape(lambda: self._init(checks.specs("memory", example))), self.capacity)

    def add(self, state: ReplayState, step: Any, mask: Any = None, priority: Any = None) -> ReplayState:
        """Append one step of every env.

        Args:
          state: taken over; jit with `donate_argnums=0`, or the whole buffer is copied.
          step: leaves `[num_envs, ...]`, of the example's dtypes.
          mask: bool[num_envs], False where an env took no step; needs `masked=True`. With `autoreset="next_step"` never mask the step
            after a done: it brings the final observation.
          priority: float[num_envs], for samplers that have priorities; by default the largest so far.
        """
        warn_of_copy(self, "add", state)
        step, mask, priority = self._checked("add", state, step, mask, priority, "one step of every env, leaves [num_envs, ...]", ())
        return self._write(state, *jax.tree.map(lambda leaf: leaf[None], (step, mask, priority)))

    def extend(self, state: ReplayState, steps: Any, mask: Any = None, priority: Any = None) -> ReplayState:
        """Append a block of steps, as `lax.scan` stacks them: the same as `add` for each, oldest first. `state` is taken over.

        Args:
          steps: leaves `[time, num_envs, ...]`; of more steps than a stream holds, the newest stay.
          mask: bool[time, num_envs]. priority: float[time, num_envs].
        """
        warn_of_copy(self, "extend", state)
        first = jax.tree.leaves(steps)[:1]
        time = (jnp.shape(first[0]) or (0,))[:1] if first else (0,)
        block = self._checked("extend", state, steps, mask, priority, "a block of steps, leaves [time, num_envs, ...]", time)
        # A write must not reach the rows that wait for their window.
        most = (self.streams.length - self.view.lookahead) // self.streams.rows_per_step(block[0])
        whole, rest = divmod(time[0], most)
        if whole + bool(rest) > 1:
            chunks = jax.tree.map(lambda leaf: leaf[: whole * most].reshape((whole, most, *leaf.shape[1:])), block)
            state, _ = jax.lax.scan(lambda state, chunk: (self._write(state, *chunk), None), state, chunks)
            block = jax.tree.map(lambda leaf: leaf[whole * most :], block)
            time = (rest,)
        return self._write(state, *block) if time[0] else state

    def _write(self, state: ReplayState, steps: Any, mask: jax.Array | None, priority: jax.Array | None) -> ReplayState:
        """Leaves `[T, E, ...]`, checked, and few enough that the waiting rows stay."""
        streams = self.streams
        written_streams, written = streams.write(state.streams, steps, mask)
        pending, change = settle(streams, self.view.lookahead, state.streams, state.pending, written)
        if priority is not None and streams.rows_per_step(steps) == 2:  # a tail has none
            priority = jnp.stack([priority, jnp.zeros_like(priority)], axis=1).reshape(-1, self.num_envs)
        table = state.episodes and episodes.observe(streams, state.streams, state.episodes, written)
        sampler = self.sampler.observe(streams, state.sampler, change, priority)
        return ReplayState(streams=written_streams, pending=pending, sampler=sampler, episodes=table)

    def sample(self, state: ReplayState, key: jax.Array, batch_size: int | None = None) -> Sample:
        """Draw a batch with replacement. Before `can_sample` its items are finite and `is_valid` is False.

        Args:
          key: consumed.
          batch_size: static; by default the buffer's.
        """
        batch_size = self.batch_size if batch_size is None else batch_size
        checks.check_size("sample", "batch_size", batch_size)
        row, probability = self.sampler.draw(state.sampler, self._drawable(state), key, batch_size)
        return self._read(state, self.streams.index(state.streams, row), probability, self.can_sample(state) & (probability > 0))

    def get(self, state: ReplayState, index: Index | jax.Array) -> Sample:
        """The items of rows that were drawn before, or of row numbers; `is_valid` is False where a row is not drawable, out of range,
        or was overwritten since. A drawable row of priority 0 is valid, with probability 0.

        Args:
          index: `batch.index`, or int32[B] rows.
        """
        if isinstance(index, Index):
            row, lap = index.row, index.lap
        else:
            row, lap = jnp.asarray(index), None  # of any integer dtype
            if not jnp.issubdtype(row.dtype, jnp.integer):
                raise ValueError(f"get: index must be a jaxreplay.Index or integer rows, got {row.dtype.name}")
            row = row if row.dtype.itemsize >= 4 else row.astype(jnp.int32)  # a narrow one cannot be compared with the capacity
        is_valid = (row >= 0) & (row < self.capacity)
        row = jnp.where(is_valid, row, 0).astype(jnp.int32)
        current = self.streams.index(state.streams, row)
        is_valid &= self._drawable(state).contains(row) & (lap is None or current.lap == lap)
        probability = self.sampler.probability(state.sampler, self._drawable(state), row)
        return self._read(state, current, probability, is_valid)

    def _read(self, state: ReplayState, index: Index, probability: jax.Array, is_valid: jax.Array) -> Sample:
        """The index of an item that is not valid has a lap that no row has: an update by it is ignored, also once the row is drawable."""
        read = lambda row: self.view.read(Anchor(self.streams, state.streams, row))  # noqa: E731
        for _ in index.row.shape:
            read = jax.vmap(read)
        lap = jnp.where(is_valid, index.lap, index.lap ^ jnp.uint32(2**31))
        return Sample(read(index.row), Index(index.row, lap), jnp.where(is_valid, probability, 0), is_valid)

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        """Give drawn rows new priorities, such as absolute TD errors. `state` is taken over.

        Bad priorities and stale or foreign rows are ignored and counted in the state; of several priorities for one row the largest wins.

        Args:
          index: `batch.index`.
          priority: float[B], at least 0; a row of priority 0 is never drawn.
        """
        warn_of_copy(self, "update_priorities", state)
        sampler = self._need_priorities("update_priorities")
        if not isinstance(index, Index):
            raise ValueError(
                f"update_priorities: index must be the batch.index of a sample, got {type(index).__name__}; a bare row number cannot tell "
                "whether the row was overwritten since it was drawn"
            )
        priority = self._checked_priority("update_priorities", priority, jnp.shape(index.row))
        flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1), (index, priority))
        return state.replace(sampler=sampler.update(state.sampler, self._drawable(state), *flat))

    def min_probability(self, state: ReplayState) -> jax.Array:
        """The smallest probability of a drawable row of positive priority, for `importance_weights`: float32[]."""
        return self._need_priorities("min_probability").min_probability(self.streams, state.sampler)

    def size(self, state: ReplayState) -> jax.Array:
        """Drawable rows: int32[]."""
        return self._drawable(state).count().sum(dtype=jnp.int32)

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Whether there are `min_size` drawable rows, and mass to draw from: bool[]."""
        return (self.size(state) >= self.min_size) & self.sampler.can_draw(state.sampler)

    def age(self, state: ReplayState, index: Index) -> jax.Array:
        """Rows of its stream that were written after each drawn row, tails included: int32[B], 0 for the newest."""
        return self.streams.age(state.streams, index.row)

    def clear(self, state: ReplayState) -> ReplayState:
        """Forget every row; takes `state` over. No index drawn before is valid after; the stored steps stay where they are, unread."""
        return ReplayState(
            streams=self.streams.clear(state.streams),
            pending=jnp.zeros_like(state.pending),
            sampler=self.sampler.clear(state.sampler),
            episodes=state.episodes and episodes.clear(state.episodes),
        )

    def episodes(self, state: ReplayState) -> episodes.Episodes:
        """Look-ups of episode ends around stored rows; needs `keep_episodes=True`."""
        if state.episodes is None:
            raise ValueError("episodes: this buffer keeps no episode table; make it with keep_episodes=True")
        return episodes.Episodes(self.streams, state.streams, state.episodes)

    def _drawable(self, state: ReplayState) -> Drawable:
        return Drawable(self.streams, state.streams, state.pending)

    def _need_priorities(self, where: str) -> PrioritySampler:
        if not self.sampler.has_priorities:
            raise ValueError(f"{where}: the sampler {type(self.sampler).__name__} has no priorities; use jaxreplay.prioritized")
        return cast(PrioritySampler, self.sampler)

    def _checked(self, where, state, steps, mask, priority, what, time) -> tuple[Any, Any, Any]:
        """Steps, mask and priority of an `add` (time is ()) or an `extend` (time is (T,)), or a ValueError that names what is wrong."""
        axes = (*time, self.num_envs)
        stored = state.streams.steps
        if self.view.needs_steps:
            steps = checks.as_step(where, steps)
            if self.autoreset == "next_step":
                steps = steps.replace(final_obs=None)
        checks.check_leaves(
            where, steps, self._expected(stored, axes), f"{where} takes {what}, here {list(axes)}, as the example given to init has them."
        )
        if (mask is not None) and not self.masked:
            raise ValueError(f"{where}: a mask was given, but this buffer was made without masked=True")
        if mask is not None:
            checks.check_leaves(where, {"mask": mask}, {"mask": jax.ShapeDtypeStruct(axes, bool)}, "mask: True where an env took a step.")
            mask = jnp.asarray(mask)
        if priority is not None:
            self._need_priorities(where)
            priority = self._checked_priority(where, priority, axes)
        return jax.tree.map(jnp.asarray, steps), mask, priority

    def _expected(self, stored: Any, axes: tuple[int, ...]) -> Any:
        """The specs of what `add` takes, from the stored leaves, whose first axis is rows."""
        expected = leaves.tree_map(lambda leaf: jax.ShapeDtypeStruct(axes + leaf.shape[1:], leaf.dtype), stored)
        if self.view.needs_steps:
            flag = jax.ShapeDtypeStruct(axes, bool)
            final_obs = None if stored.final_obs is None else expected.obs
            expected = expected.replace(terminated=flag, truncated=flag, final_obs=final_obs)
        return expected

    def _checked_priority(self, where: str, priority: Any, shape: tuple[int, ...]) -> jax.Array:
        priority = jnp.asarray(priority)
        if priority.shape != shape or not jnp.issubdtype(priority.dtype, jnp.number) or jnp.iscomplexobj(priority):
            raise ValueError(
                f"{where}: priority: got {priority.dtype.name}{list(priority.shape)}, expected float32{list(shape)}, one for each row"
            )
        return priority.astype(jnp.float32)

"""The buffer: check, write, tell the sampler; draw, read the view."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxreplay import autoreset as autoreset_forms
from jaxreplay import checks, episode_table, intake, memory, operations, platforms
from jaxreplay.operations import ReplayState
from jaxreplay.samplers import ConsumingSampler, PrioritySampler, RankedSampler, Sampler
from jaxreplay.state_check import check_state, take_over
from jaxreplay.streams import Streams
from jaxreplay.types import Index, Sample
from jaxreplay.views import View
from jaxreplay.window import Window


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
      keep_history: whether the state has a fingerprint of all that was written to it, which tells a `Checkpointer` what need not be
        written again. Where nobody saves it, an `add` that is a call of its own may do without these 4 bytes an env and 2 microseconds.
      platform: what `init` lays states out for: "cpu", "gpu" or "tpu". None: that of the device that new arrays go to then. A state stays
        what it was made for; to compile for a device that is not there, name its platform.
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
    keep_history: bool = True
    platform: str | None = None

    def __post_init__(self):
        checks.check_static(self)
        if self.platform is not None:
            object.__setattr__(self, "platform", platforms.checked("ReplayBuffer", self.platform))
        checks.check_part("ReplayBuffer", "sampler", self.sampler, Sampler, "jaxreplay.Uniform()")
        checks.check_part("ReplayBuffer", "view", self.view, View, "jaxreplay.Item()")
        checks.check_capacity("ReplayBuffer", self.capacity, self.num_envs, self.window.length)
        if self.view.needs_steps and self.autoreset not in autoreset_forms.FORMS:
            raise ValueError(autoreset_forms.form_error("ReplayBuffer", self.autoreset))
        if not self.view.needs_steps and (self.autoreset is not None or self.has_table):
            raise ValueError(
                f"ReplayBuffer: {type(self.view).__name__} stores items, which have no episodes; leave out autoreset and keep_episodes, "
                "and draw rows, not episodes"
            )
        checks.check_size("ReplayBuffer", "batch_size", self.batch_size)
        checks.check_size("ReplayBuffer", "min_size", self.min_size)
        if self.min_size > self.capacity:
            raise ValueError(f"ReplayBuffer: min_size={self.min_size} exceeds capacity={self.capacity}: can_sample would never be True")

    @property
    def window(self) -> Window:
        """What must be known around a row before it is drawn."""
        return self.sampler.window(self.view.window)

    @property
    def streams(self) -> Streams:
        return Streams(
            num_envs=self.num_envs,
            length=self.capacity // self.num_envs,
            autoreset=self.autoreset,
            masked=self.masked,
            stride=self.window.stride,
            stride_restarts=not self.window.crosses,
            keep_history=self.keep_history,
        )

    @property
    def has_table(self) -> bool:
        """Whether the state has an episode table: where it is asked for, or the view or the sampler looks episodes up."""
        return self.keep_episodes or self.window.looks_up or not self.window.is_bounded

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
        if self.autoreset is not None:
            example = intake.step_of(where, example, self.autoreset)
            checks.check_flags(where, example)
            smallest = self.window.length - 1 + self.streams.rows_per_step(example)
            checks.check_capacity(where, self.capacity, self.num_envs, smallest)
        example = checks.specs(where, example)
        if not jax.tree.leaves(example):
            raise ValueError(f"{where}: the example has no leaves: there is nothing to store")
        self.view.check(where, self.streams, example)
        if not isinstance(jnp.zeros(()), Tracer):  # while tracing, nothing is allocated yet
            memory.check_fits(where, self.memory(example))
        return operations.empty(self, example)

    def memory(self, example: Any) -> memory.Memory:
        """The bytes that `init(example)` will take, leaf by leaf, with nothing allocated."""
        if self.autoreset is not None:
            example = intake.step_of("memory", example, self.autoreset)
        return memory.memory_of(jax.eval_shape(lambda: operations.empty(self, checks.specs("memory", example))), self.capacity)

    def add(self, state: ReplayState, step: Any, mask: Any = None, priority: Any = None) -> ReplayState:
        """Append one step of every env.

        Args:
          state: taken over; jit with `donate_argnums=0`, or the whole buffer is copied.
          step: leaves `[num_envs, ...]`, of the example's dtypes.
          mask: bool[num_envs], False where an env took no step, by default nowhere; needs `masked=True`. With `autoreset="next_step"`
            never mask the step after a done: it brings the final observation.
          priority: float[num_envs], for samplers that have priorities; by default the largest so far.
        """
        state = take_over("add", self, state)
        step, mask, priority = self._checked("add", state, step, mask, priority, "one step of every env, leaves [num_envs, ...]", ())
        return operations.write(self, state, *jax.tree.map(lambda leaf: leaf[None], (step, mask, priority)))

    def extend(self, state: ReplayState, steps: Any, mask: Any = None, priority: Any = None) -> ReplayState:
        """Append a block of steps, as `lax.scan` stacks them: the same as `add` for each, oldest first. `state` is taken over.

        Args:
          steps: leaves `[time, num_envs, ...]`; of more steps than a stream holds, the newest stay.
          mask: bool[time, num_envs]. priority: float[time, num_envs].
        """
        state = take_over("extend", self, state)
        first = jax.tree.leaves(steps)[:1]
        time = (jnp.shape(first[0]) or (0,))[:1] if first else (0,)
        block = self._checked("extend", state, steps, mask, priority, "a block of steps, leaves [time, num_envs, ...]", time)
        # A write must reach neither the rows that wait for their window, nor those that the newest ones look back to.
        most = (self.streams.length - self.window.length + 1) // self.streams.rows_per_step(block[0])
        whole, rest = divmod(time[0], most)
        if whole + bool(rest) > 1:
            chunks = jax.tree.map(lambda leaf: leaf[: whole * most].reshape((whole, most, *leaf.shape[1:])), block)
            state, _ = jax.lax.scan(lambda state, chunk: (operations.write(self, state, *chunk), None), state, chunks)
            block = jax.tree.map(lambda leaf: leaf[whole * most :], block)
            time = (rest,)
        return operations.write(self, state, *block) if time[0] else state

    def sample(self, state: ReplayState, key: jax.Array, batch_size: int | None = None) -> Sample:
        """Draw a batch with replacement. Before `can_sample` its items are finite and `is_valid` is False.

        Args:
          key: consumed.
          batch_size: static; by default the buffer's.
        """
        if self.sampler.consumes:
            raise ValueError(f"sample: {type(self.sampler).__name__} hands out each row once: state, batch = replay.take(state, key)")
        return self._draw("sample", state, key, batch_size)[1]

    def take(self, state: ReplayState, key: jax.Array, batch_size: int | None = None) -> tuple[ReplayState, Sample]:
        """Draw a batch from a sampler that hands out each row once. `state` is taken over. What falls short of a batch is not valid.

        Args:
          key: consumed.
          batch_size: static; by default the buffer's.
        """
        if not self.sampler.consumes:
            raise ValueError(f"take: {type(self.sampler).__name__} draws with replacement: batch = replay.sample(state, key)")
        state = take_over("take", self, state)
        return self._draw("take", state, key, batch_size)

    def _draw(self, where: str, state: ReplayState, key: jax.Array, batch_size: int | None) -> tuple[ReplayState, Sample]:
        state = check_state(where, self, state)
        batch_size = self.batch_size if batch_size is None else batch_size
        checks.check_size(where, "batch_size", batch_size)
        return operations.draw(self, state, key, batch_size, self.can_sample(state))

    def get(self, state: ReplayState, index: Index | jax.Array, key: jax.Array | None = None) -> Sample:
        """The items of rows that were drawn before, or of row numbers; `is_valid` is False where a row is not drawable, out of range,
        or was overwritten since. A drawable row of priority 0 is valid, with probability 0.

        Args:
          index: `batch.index`, or int32[B] rows.
          key: consumed; for a view that draws (goals, horizons, augmentations), which draws anew.
        """
        if self.view.draws and key is None:
            raise ValueError(f"get: {type(self.view).__name__} draws what it reads: give get(state, index, key) a key")
        state = check_state("get", self, state)
        rows, lap = (index.row, index.lap) if isinstance(index, Index) else (index, None)
        row, is_valid = intake.as_rows("get", rows, self.capacity)
        return operations.get(self, state, row, is_valid, lap, key)

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        """Give drawn rows new priorities, such as absolute TD errors. `state` is taken over.

        Bad priorities and stale or foreign rows are ignored and counted in the state; of several priorities for one row the largest wins.

        Args:
          index: `batch.index`.
          priority: float[B], at least 0; a row of priority 0 is never drawn.
        """
        state = take_over("update_priorities", self, state)
        sampler = self._need_priorities("update_priorities")
        if not isinstance(index, Index):
            raise ValueError(
                f"update_priorities: index must be the batch.index of a sample, got {type(index).__name__}; a bare row number cannot tell "
                "whether the row was overwritten since it was drawn"
            )
        priority = intake.as_priority("update_priorities", priority, jnp.shape(index.row))
        flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1), (index, priority))
        return state.replace(sampler=sampler.update(state.sampler, operations.drawable(self, state), *flat))

    def can_add(self, state: ReplayState, num_steps: int = 1) -> jax.Array:
        """Whether `num_steps` more steps of every env overwrite nothing that is still to be taken: bool[]."""
        if not isinstance(self.sampler, ConsumingSampler):
            raise ValueError(f"can_add: {type(self.sampler).__name__} hands out nothing once: there is nothing to wait for")
        state = check_state("can_add", self, state)
        rows = num_steps * self.streams.rows_per_step(state.streams.steps)
        return self.sampler.can_add(state.sampler, operations.drawable(self, state), rows)

    def rerank(self, state: ReplayState) -> ReplayState:
        """Rank the drawable rows by their priorities, for a rank-based sampler: a sort of the whole buffer. `state` is taken over."""
        state = take_over("rerank", self, state)
        if not isinstance(self.sampler, RankedSampler):
            raise ValueError(f"rerank: the sampler {type(self.sampler).__name__} has no ranks; use RankBased")
        return state.replace(sampler=self.sampler.rerank(state.sampler, operations.drawable(self, state)))

    def min_probability(self, state: ReplayState) -> jax.Array:
        """The smallest probability of a drawable row of positive priority, for `importance_weights`: float32[]."""
        state = check_state("min_probability", self, state)
        return self._need_priorities("min_probability").min_probability(state.layout.streams, state.sampler)

    def size(self, state: ReplayState) -> jax.Array:
        """Rows that can be drawn: int32[]; of a sampler that hands out each row once, those that are left."""
        state = check_state("size", self, state)
        return self.sampler.size(state.sampler, operations.drawable(self, state))

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Whether there are `min_size` rows that can be drawn, and mass to draw from: bool[]."""
        state = check_state("can_sample", self, state)
        return (self.size(state) >= self.min_size) & self.sampler.can_draw(state.sampler)

    def age(self, state: ReplayState, index: Index) -> jax.Array:
        """Rows of its stream that were written after each drawn row, tails included: int32[B], 0 for the newest."""
        state = check_state("age", self, state)
        return self.streams.age(state.streams, index.row)

    def clear(self, state: ReplayState) -> ReplayState:
        """Forget every row; takes `state` over. No index drawn before is valid after; the stored steps stay where they are, unread."""
        state = check_state("clear", self, state)
        return state.replace(
            streams=self.streams.clear(state.streams),
            pending=None if state.pending is None else jnp.zeros_like(state.pending),
            cut=None if state.cut is None else jnp.zeros_like(state.cut),
            sampler=self.sampler.clear(state.sampler),
            episodes=state.episodes and episode_table.clear(state.episodes),
        )

    def episodes(self, state: ReplayState) -> episode_table.Episodes:
        """Look-ups of episode ends around stored rows; needs `keep_episodes=True`."""
        state = check_state("episodes", self, state)
        if state.episodes is None:
            raise ValueError("episodes: this buffer keeps no episode table; make it with keep_episodes=True")
        return episode_table.Episodes(self.streams, state.streams, state.episodes)

    def _need_priorities(self, where: str) -> PrioritySampler:
        if not isinstance(self.sampler, PrioritySampler):
            raise ValueError(f"{where}: the sampler {type(self.sampler).__name__} has no priorities; use jaxreplay.prioritized")
        return self.sampler

    def _checked(self, where, state, steps, mask, priority, what, time) -> tuple[Any, Any, Any]:
        """Steps, mask and priority of an `add` (time is ()) or an `extend` (time is (T,)), or a ValueError that names what is wrong."""
        axes = (*time, self.num_envs)
        if self.autoreset is not None:
            steps = intake.step_of(where, steps, self.autoreset)
        intake.check_block(where, steps, state.streams.steps, axes, what)
        if mask is not None:
            intake.check_mask(where, mask, self.masked, axes)
            mask = jnp.asarray(mask)
        if priority is not None:
            self._need_priorities(where)
            priority = intake.as_priority(where, priority, axes)
        return jax.tree.map(jnp.asarray, steps), mask, priority

"""The buffer: check, write, tell the sampler; draw, read the view."""

import dataclasses
import functools
from typing import Any, Generic, Required, TypedDict

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxreplay import autoreset
from jaxreplay._util import checks, random
from jaxreplay._util.aliases import Autoreset, Key, PyTree
from jaxreplay._util.struct import Static
from jaxreplay.buffers import memory, step_checks
from jaxreplay.buffers.state_checks import check_donated, check_state
from jaxreplay.samplers import ConsumingSampler, PrioritySampler, Sampler
from jaxreplay.storage import episodes, platforms, row_flags
from jaxreplay.storage.episodes import Episodes
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import (
    ReplayState,
    Sampleable,
    count_expired,
    count_pending,
    effect_of,
)
from jaxreplay.storage.streams import Streams
from jaxreplay.types import Index, Sample, T
from jaxreplay.views import RowReader, View

_FOR_THE_VIEW = 1  # the sampler draws its bits for purpose 0
_METRIC_DRAWS = 128


class BufferOptions(TypedDict, total=False):
    """Options of every named buffer; `ReplayBuffer` has more on each."""

    capacity: Required[int]  # rows in all, a multiple of `num_envs`
    num_envs: int  # streams; by default 1
    batch_size: Required[int]  # items of a sample
    # "next_step", "same_step" or "same_step_no_final_obs"; must be given, but for items, which have
    # None
    autoreset: Autoreset | None
    allow_mask: bool  # whether `add` takes a mask of the envs that took a step; by default False
    min_size: int  # rows that `can_sample` waits for; by default 1
    # whether to keep what `episode_table` needs, 8 bytes a row; by default False
    track_episodes: bool
    # "cpu", "gpu" or "tpu", that states are laid out for; by default that of new arrays
    platform: str | None


class ReplayBuffer(Static, Generic[T]):
    """A replay buffer: storage in streams, a sampler, and a view. It is static configuration; its
    methods are pure.

    State comes first, a key next, and the key is consumed. Jit the methods that return a state with
    `donate_argnums=0` (`jaxreplay.jit` does), and in a loop add before you sample: then nothing
    costs more than the rows it touches.

    Args:
      capacity: rows in all, the final observations of episodes included; a multiple of `num_envs`.
      num_envs: streams, each a ring of `capacity / num_envs` rows.
      batch_size: items of a sample, unless the call says otherwise.
      sampler: which sampleable rows are drawn.
      view: what is read around them.
      autoreset: what the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs" (`jaxreplay.autoreset` says which libraries do which), or
        Gymnasium's `AutoresetMode`. None for a view that takes items.
      allow_mask: whether `add` and `extend` take a mask of the envs that took a step.
      min_size: sampleable rows that `can_sample` waits for, at least 1.
      track_episodes: whether to keep what `episode_table` needs, 8 bytes a row.
      platform: what `init` lays states out for: "cpu", "gpu" or "tpu". None: that of the device
        that new arrays go to then. A state stays what it was made for; to compile for a device that
        is not there, name its platform.
    """

    capacity: int
    num_envs: int = 1
    batch_size: int
    sampler: Sampler
    view: View[T]
    autoreset: Autoreset | None = None
    allow_mask: bool = False
    min_size: int = 1
    track_episodes: bool = False
    platform: str | None = None

    def _check(self) -> None:
        if self.platform is not None:
            object.__setattr__(self, "platform", platforms.checked("ReplayBuffer", self.platform))
        checks.check_part("ReplayBuffer", "sampler", self.sampler, Sampler, "jaxreplay.Uniform()")
        checks.check_part("ReplayBuffer", "view", self.view, View, "jaxreplay.views.Item()")
        if self.view.needs_steps:
            form = autoreset.checked("ReplayBuffer", self.autoreset)
            object.__setattr__(self, "autoreset", form)
        checks.check_capacity("ReplayBuffer", self.capacity, self.num_envs, self.min_length)
        if not self.view.needs_steps and (self.autoreset is not None or self.has_table):
            raise ValueError(
                f"ReplayBuffer: {type(self.view).__name__} stores items, which have no episodes; "
                "leave out autoreset and track_episodes, "
                "and draw rows, not episodes"
            )
        checks.check_size("ReplayBuffer", "batch_size", self.batch_size)
        checks.check_size("ReplayBuffer", "min_size", self.min_size)
        if self.min_size > self.capacity:
            raise ValueError(
                f"ReplayBuffer: min_size={self.min_size} exceeds capacity={self.capacity}: "
                "can_sample would never be True"
            )

    @functools.cached_property
    def window(self) -> Window:
        """What must be known around a row before it is drawn."""
        return self.sampler.window(self.view.window)

    @property
    def length(self) -> int:
        """Rows of a stream."""
        return self.capacity // self.num_envs

    @property
    def min_length(self) -> int:
        """Rows of the shortest stream: it holds one window, whose last step may write two rows."""
        return self.window.length - 1 + row_flags.rows_per_step(self.autoreset)

    def layout(self, platform: str | None = None) -> Layout:
        """Return the layout of this buffer's states.

        Args:
          platform: by default the buffer's, or that of the device that new arrays go to.
        """
        return Layout(
            num_envs=self.num_envs,
            length=self.length,
            autoreset=self.autoreset,
            allow_mask=self.allow_mask,
            window=self.window,
            platform=platform or self.platform or platforms.default(),
            alpha=getattr(self.sampler, "alpha", None),
        )

    @property
    def has_table(self) -> bool:
        """Whether the state has an episode table: where it is asked for, or the view or the sampler
        looks episodes up."""
        return self.track_episodes or self.window.needs_episodes or not self.window.is_bounded

    def init(self, example: PyTree) -> ReplayState:
        """An empty buffer.

        Args:
          example: one env's step (leaves without the env axis) or one item: arrays, or
            `jax.ShapeDtypeStruct`s. Only structure, shapes and dtypes are read.

        Raises:
          ValueError: the example is no step, or a flag is not bool.
          MemoryError: the device cannot hold the buffer.
        """
        example = self._example("init", example)
        self.view.check("init", self.layout(), example)
        if not isinstance(jnp.zeros(()), Tracer):  # while tracing, nothing is allocated yet
            memory.check_fits("init", self.memory(example))
        return self._empty(example)

    def memory(self, example: PyTree) -> memory.Memory:
        """The bytes that `init(example)` will take, leaf by leaf, with nothing allocated."""
        example = self._example("memory", example)
        return memory.memory_of(jax.eval_shape(lambda: self._empty(example)), self.capacity)

    def _example(self, where: str, example: PyTree) -> Any:
        """Return the shapes and dtypes of one env's step, or of an item."""
        if self.autoreset is not None:
            example = step_checks.step_of(where, example, self.autoreset)
            step_checks.check_flags(where, example)
        example = checks.specs(where, example)
        if not jax.tree.leaves(example):
            raise ValueError(f"{where}: the example has no leaves: there is nothing to store")
        return example

    def _empty(self, example: PyTree, platform: str | None = None) -> ReplayState:
        """Return a state without rows. `example`: of `_example`. `platform`: as for `layout`."""
        layout = self.layout(platform)
        return ReplayState(
            streams=Streams.empty(layout, example),
            num_pending=None
            if self.window.after is None
            else jnp.zeros((self.num_envs,), jnp.int32),
            num_expired=jnp.zeros((self.num_envs,), jnp.int32) if self.window.before else None,
            sampler=self.sampler.init(layout),
            episodes=episodes.init(layout) if self.has_table else None,
        )

    def add(
        self, state: ReplayState, step: PyTree, mask: Any = None, priority: Any = None
    ) -> ReplayState:
        """Append one step of every env.

        Args:
          state: donated; jit with `donate_argnums=0`, or the whole buffer is copied.
          step: leaves `[num_envs, ...]`, of the example's dtypes.
          mask: bool[num_envs], False where an env took no step, by default nowhere; needs
            `allow_mask=True`. With `autoreset="next_step"` never mask the step after a done: it
            brings the final observation.
          priority: float[num_envs], for samplers that have priorities; by default the largest so
            far.
        """
        state = check_donated("add", self, state)
        step, mask, priority = self._checked(
            "add", state, step, mask, priority, "one step of every env, leaves [num_envs, ...]", ()
        )
        return self._write(state, *jax.tree.map(lambda leaf: leaf[None], (step, mask, priority)))

    def extend(
        self, state: ReplayState, steps: PyTree, mask: Any = None, priority: Any = None
    ) -> ReplayState:
        """Append a block of steps, as `lax.scan` stacks them: the same as `add` for each, oldest
        first. `state` is donated.

        Args:
          steps: leaves `[time, num_envs, ...]`; of more steps than a stream holds, the newest stay.
          mask: bool[time, num_envs]. priority: float[time, num_envs].
        """
        state = check_donated("extend", self, state)
        first = jax.tree.leaves(steps)[:1]
        time = (jnp.shape(first[0]) or (0,))[:1] if first else (0,)
        block = self._checked(
            "extend",
            state,
            steps,
            mask,
            priority,
            "a block of steps, leaves [time, num_envs, ...]",
            time,
        )
        # A write must reach neither the rows that wait for their window, nor those that the newest
        # ones look back to.
        most = (self.length - self.window.length + 1) // state.layout.rows_per_step
        num_full, rest = divmod(time[0], most)
        if num_full + bool(rest) > 1:
            chunks = jax.tree.map(
                lambda leaf: leaf[: num_full * most].reshape((num_full, most, *leaf.shape[1:])),
                block,
            )
            state, _ = jax.lax.scan(
                lambda state, chunk: (self._write(state, *chunk), None), state, chunks
            )
            block = jax.tree.map(lambda leaf: leaf[num_full * most :], block)
            time = (rest,)
        return self._write(state, *block) if time[0] else state

    def sample(
        self,
        state: ReplayState,
        key: Key | None = None,
        batch_size: int | None = None,
        *,
        beta: jax.Array | float | None = None,
    ) -> Sample[T]:
        """Draw a batch with replacement. Before `can_sample` its items are finite, `is_valid` is
        False and `weight` is 0.

        Args:
          key: consumed; must be given.
          batch_size: static; by default the buffer's.
          beta: number[], how far weights correct the bias of prioritized draws, in [0, 1]; may be
            traced; by default the sampler's. Samplers without priorities ignore it.
        """
        if isinstance(self.sampler, ConsumingSampler):
            raise ValueError(
                f"sample: {type(self.sampler).__name__} hands out each row once: state, batch = "
                "buffer.pop(state, key)"
            )
        return self._draw("sample", state, key, batch_size, beta)[1]

    def pop(
        self, state: ReplayState, key: Key, batch_size: int | None = None
    ) -> tuple[ReplayState, Sample[T]]:
        """Draw a batch from a sampler that hands out each row once. `state` is donated. What
        falls short of a batch is not valid.

        Args:
          key: consumed.
          batch_size: static; by default the buffer's.
        """
        if not isinstance(self.sampler, ConsumingSampler):
            raise ValueError(
                f"pop: {type(self.sampler).__name__} draws with replacement: batch = "
                "buffer.sample(state, key)"
            )
        state = check_donated("pop", self, state)
        return self._draw("pop", state, key, batch_size, None)

    def _draw(
        self,
        where: str,
        state: ReplayState,
        key: Key | None,
        batch_size: int | None,
        beta: jax.Array | float | None,
    ) -> tuple[ReplayState, Sample[T]]:
        if key is None:
            raise TypeError(
                f"{where}: needs a state and a key: buffer.{where}(state, jax.random.key(0)); "
                "jaxreplay.Replay(buffer) keeps both, and has sample(batch_size)"
            )
        state = check_state(where, self, state)
        batch_size = self.batch_size if batch_size is None else batch_size
        checks.check_size(where, "batch_size", batch_size)
        rows = Sampleable.of(state)
        can_sample = self._can_sample(state, rows)
        sampler, row, probability = self.sampler.sample(state.sampler, rows, key, batch_size)
        # before `can_sample` nothing is handed out, so nothing is taken
        if isinstance(self.sampler, ConsumingSampler):
            sampler = jax.tree.map(
                lambda new, old: jnp.where(can_sample, new, old), sampler, state.sampler
            )
        is_valid = can_sample & (probability > 0)
        index = state.streams.index(row)
        batch = self._read(state, rows, index, probability, is_valid, key, beta)
        return state.replace(sampler=sampler), batch

    def _read(
        self,
        state: ReplayState,
        rows: Sampleable,
        index: Index,
        probability: jax.Array,
        is_valid: jax.Array,
        key: Key | None,
        beta: jax.Array | float | None,
    ) -> Sample[T]:
        """Read the items of rows, int32[...]. One that is not valid gets a lap that no row has: a
        later update by it is ignored."""

        def item(row: jax.Array, words: Any) -> Any:
            own = None if words is None else jnp.stack(words)
            return self.view.read(RowReader(state.streams, row, state.episodes, own))

        words = None
        if self.view.is_random:
            assert key is not None
            words = jax.tree.map(
                lambda word: word.reshape(index.row.shape),
                random.words(key, index.row.size, _FOR_THE_VIEW),
            )
        for _ in index.row.shape:
            item = jax.vmap(item)
        lap = jnp.where(is_valid, index.lap, index.lap ^ jnp.uint32(2**31))
        return Sample(
            item(index.row, words),
            Index(index.row, lap),
            jnp.where(is_valid, probability, 0),
            self.sampler.weight(state.sampler, rows, probability, is_valid, beta),
            is_valid,
        )

    def get(
        self,
        state: ReplayState,
        index: Index | jax.Array,
        key: Key | None = None,
        *,
        beta: jax.Array | float | None = None,
    ) -> Sample[T]:
        """The items of rows that were drawn before, or of row numbers; `is_valid` is False where a
        row is not sampleable, out of range, or was overwritten since. A sampleable row of priority
        0 is valid, with probability and weight 0.

        Args:
          index: `batch.index`, or int32[B] rows.
          key: consumed; for a view that draws (goals, horizons, augmentations), which draws anew.
          beta: as for `sample`.
        """
        if self.view.is_random and key is None:
            raise ValueError(
                f"get: {type(self.view).__name__} draws what it reads: give get(state, index, "
                "key) a key"
            )
        state = check_state("get", self, state)
        rows, lap = (index.row, index.lap) if isinstance(index, Index) else (index, None)
        row, is_valid = step_checks.as_rows("get", rows, self.capacity)
        current, members = state.streams.index(row), Sampleable.of(state)
        is_valid &= members.contains(row) & (lap is None or current.lap == lap)
        probability = self.sampler.probability(state.sampler, members, row)
        return self._read(state, members, current, probability, is_valid, key, beta)

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        """Give drawn rows new priorities, such as absolute TD errors. `state` is donated.

        Bad priorities and stale or foreign rows are ignored and counted in the state; of several
        priorities for one row the largest wins.

        Args:
          index: `batch.index`.
          priority: float[B], at least 0; a row of priority 0 is never drawn.
        """
        state = check_donated("update_priorities", self, state)
        sampler = self._need_priorities("update_priorities")
        if not isinstance(index, Index):
            raise ValueError(
                "update_priorities: index must be the batch.index of a sample, got "
                f"{type(index).__name__}; a bare row number cannot tell "
                "whether the row was overwritten since it was drawn"
            )
        priority = step_checks.as_priority("update_priorities", priority, jnp.shape(index.row))
        flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1), (index, priority))
        return state.replace(sampler=sampler.update(state.sampler, Sampleable.of(state), *flat))

    def can_add(self, state: ReplayState, num_steps: int = 1) -> jax.Array:
        """Whether `num_steps` more steps of every env overwrite nothing that is still to be taken:
        bool[]."""
        if not isinstance(self.sampler, ConsumingSampler):
            raise ValueError(
                f"can_add: {type(self.sampler).__name__} hands out nothing once: there is nothing "
                "to wait for"
            )
        state = check_state("can_add", self, state)
        rows = num_steps * state.layout.rows_per_step
        return self.sampler.can_add(state.sampler, Sampleable.of(state), rows)

    def rerank(self, state: ReplayState) -> ReplayState:
        """Rank the sampleable rows by their priorities, for a rank-based sampler: a sort of the
        whole buffer. `state` is donated."""
        state = check_donated("rerank", self, state)
        rerank = getattr(self.sampler, "rerank", None)
        if rerank is None:
            raise ValueError(
                f"rerank: the sampler {type(self.sampler).__name__} has no ranks; use RankBased"
            )
        return state.replace(sampler=rerank(state.sampler, Sampleable.of(state)))

    def size(self, state: ReplayState) -> jax.Array:
        """Rows that can be drawn: int32[]; of a sampler that hands out each row once, those that
        are left."""
        state = check_state("size", self, state)
        return self.sampler.size(state.sampler, Sampleable.of(state))

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Whether there are `min_size` rows that can be drawn, and mass to draw from: bool[]."""
        state = check_state("can_sample", self, state)
        return self._can_sample(state, Sampleable.of(state))

    def _can_sample(self, state: ReplayState, rows: Sampleable) -> jax.Array:
        return (self.sampler.size(state.sampler, rows) >= self.min_size) & self.sampler.can_sample(
            state.sampler
        )

    def metrics(
        self, state: ReplayState, *, beta: jax.Array | float | None = None
    ) -> dict[str, jax.Array]:
        """Return figures to log. Works inside `jit`, and costs about as much as a sample.

        Args:
          beta: as for `sample`.

        Returns:
          Scalars, by name:
            size: int32; rows that can be drawn.
            fill: float32 in [0, 1]; rows written, as a part of the capacity.
            effective_sample_size: float32 in [0, 1]; (sum of weights)^2 / sum of squared weights,
              as a part of (up to) 128 draws: 1 if all weigh alike, 0 if nothing can be drawn.
            max_priority: float32; the largest priority so far.
            mean_priority: float32; (mean of priority ** alpha) ** (1 / alpha), over `size` rows.
            num_bad_priorities: uint32; NaN, infinite or negative ones, which were ignored.
            num_stale_updates: uint32; updates that named no row that can be drawn, which were
              ignored.
          The last four are there for samplers with priorities; the mean neither for rank-based ones
          nor for alpha 0.
        """
        state = check_state("metrics", self, state)
        rows = Sampleable.of(state)
        _, _, probability = self.sampler.sample(
            state.sampler, rows, jax.random.key(0), _METRIC_DRAWS
        )
        is_valid = probability > 0
        weight = self.sampler.weight(state.sampler, rows, probability, is_valid, beta)
        filled = state.streams.heads.filled.sum(dtype=jnp.int32)
        square_sum = is_valid.sum() * jnp.square(weight).sum()
        return {
            "size": self.sampler.size(state.sampler, rows),
            "fill": filled.astype(jnp.float32) / self.capacity,
            "effective_sample_size": jnp.square(weight.sum())
            / jnp.where(square_sum > 0, square_sum, 1),
            **self.sampler.metrics(state.sampler, rows),
        }

    def age(self, state: ReplayState, index: Index) -> jax.Array:
        """Rows of its stream that were written after each drawn row, final rows included: int32[B],
        0 for the newest."""
        state = check_state("age", self, state)
        return state.streams.age(index.row)

    def clear(self, state: ReplayState) -> ReplayState:
        """Forget every row; donates `state`. No index drawn before is valid after; the stored
        steps stay where they are, unread."""
        state = check_state("clear", self, state)
        return state.replace(
            streams=state.streams.clear(),
            num_pending=None if state.num_pending is None else jnp.zeros_like(state.num_pending),
            num_expired=None if state.num_expired is None else jnp.zeros_like(state.num_expired),
            sampler=self.sampler.clear(state.sampler),
            episodes=state.episodes and episodes.clear(state.episodes),
        )

    def episode_table(self, state: ReplayState) -> Episodes:
        """Look-ups of episode ends around stored rows; needs `track_episodes=True`."""
        state = check_state("episode_table", self, state)
        if state.episodes is None:
            raise ValueError(
                "episodes: this buffer keeps no episode table; make it with track_episodes=True"
            )
        return Episodes(state.streams, state.episodes)

    def _write(
        self, state: ReplayState, steps: PyTree, mask: jax.Array | None, priority: jax.Array | None
    ) -> ReplayState:
        """Write a block of steps, leaves `[T, E, ...]`: few enough to overwrite no row that waits,
        nor one that a new row looks back to."""
        layout, window = state.layout, self.window
        before = Sampleable.of(state)
        if state.num_expired is not None:
            # Always so, which XLA cannot know: the write then depends on the flags that the last
            # one read, and copies none.
            is_ready = jnp.broadcast_to(
                state.num_expired >= 0, (jax.tree.leaves(steps)[0].shape[0], layout.num_envs)
            )
            mask = is_ready if mask is None else mask & is_ready
        counted, written = state.streams.advance(steps, mask)
        num_pending = (
            None if state.num_pending is None else count_pending(layout, state.num_pending, written)
        )
        table, noted = (
            episodes.advance(layout, state.episodes, written) if state.episodes else (None, None)
        )
        after = state.replace(streams=counted, num_pending=num_pending, episodes=table)
        if layout.traits.in_line:
            # The least of the two is the first one, in a way that XLA cannot know: else it would
            # keep a copy of what is counted on.
            waited = (
                before.num_pending
                if window.after is None
                else jnp.minimum(before.num_pending, window.after)
            )
            after, written, noted, waited = _counted_first(after, written, noted, waited)
            before = dataclasses.replace(before, num_pending=waited)
        after = after.replace(
            streams=after.streams.write(steps, written),
            episodes=after.episodes and noted and episodes.write(after.episodes, noted),
        )
        after = after.replace(num_expired=count_expired(after.streams))
        effect = effect_of(before, Sampleable.of(after), written) if window.is_bounded else None
        if priority is not None and layout.rows_per_step == 2:  # a final row has none
            priority = jnp.stack([priority, jnp.zeros_like(priority)], axis=1).reshape(
                -1, layout.num_envs
            )
        return after.replace(sampler=self.sampler.observe(state.sampler, effect, priority))

    def _need_priorities(self, where: str) -> PrioritySampler:
        if not isinstance(self.sampler, PrioritySampler):
            raise ValueError(
                f"{where}: the sampler {type(self.sampler).__name__} has no priorities; use "
                "jaxreplay.prioritized"
            )
        return self.sampler

    def _checked(self, where, state, steps, mask, priority, what, time) -> tuple[Any, Any, Any]:
        """Steps, mask and priority of an `add` (time is ()) or an `extend` (time is (T,)), or a
        ValueError that names what is wrong."""
        axes = (*time, self.num_envs)
        if self.autoreset is not None:
            steps = step_checks.step_of(where, steps, self.autoreset)
        step_checks.check_block(where, steps, state.streams.steps, axes, what)
        if mask is not None:
            step_checks.check_mask(where, mask, self.allow_mask, axes)
            mask = jnp.asarray(mask)
        if priority is not None:
            self._need_priorities(where)
            priority = step_checks.as_priority(where, priority, axes)
        return jax.tree.map(jnp.asarray, steps), mask, priority


def _counted_first(state: ReplayState, *others: Any) -> tuple[Any, ...]:
    """Keep all counting before all writing, in one kernel: XLA would fuse into each write the
    counting that it needs."""
    rows = {name: getattr(state.streams, name) for name in ("steps", "flags", "candidate_number")}
    table = (
        {
            name: getattr(state.episodes, name)
            for name in ("ordinal", "end_position", "start_position")
        }
        if state.episodes
        else {}
    )
    small = state.replace(
        streams=state.streams.replace(**dict.fromkeys(rows)),
        episodes=state.episodes and state.episodes.replace(**dict.fromkeys(table)),
        sampler=None,
    )
    small, *rest = jax.lax.optimization_barrier((small, *others))
    num_full = small.replace(
        streams=small.streams.replace(**rows),
        episodes=small.episodes and small.episodes.replace(**table),
        sampler=state.sampler,
    )
    return num_full, *rest

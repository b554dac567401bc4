"""The replay buffer: check the input, write rows, tell the sampler; sample rows, read the view."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Unpack

import jax
import jax.numpy as jnp

from jaxreplay import autoreset
from jaxreplay._util import checks, random
from jaxreplay._util.aliases import Autoreset, Key, PyTree
from jaxreplay._util.hints import no_attribute
from jaxreplay._util.names import kind_of
from jaxreplay._util.serialization import tell_flax
from jaxreplay._util.struct import Static
from jaxreplay.buffers import step_checks
from jaxreplay.buffers.adopt import adopted, merged
from jaxreplay.buffers.drop import dropped
from jaxreplay.buffers.map_rows import rows_mapped
from jaxreplay.buffers.memory import Memory, check_fits, memory_of
from jaxreplay.buffers.state_checks import check_state, example_of
from jaxreplay.samplers import Sampler
from jaxreplay.storage import newest_row, platforms, row_flags, writes
from jaxreplay.storage.episodes import Episodes
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState
from jaxreplay.targets import weights_of
from jaxreplay.types import Index, Sample, SampleOptions, T
from jaxreplay.views import RowReader, View, WrappedView
from jaxreplay.views.view import Outline

_FOR_THE_VIEW = 1  # the purpose of its random bits; the sampler has purpose 0


class ReplayBuffer(Static, Generic[T]):
    """A replay buffer, composed of storage, a sampler and a view.

    The buffer is static configuration, hashable and without arrays; the state has all arrays. Its
    methods are pure functions of the state. Axes: T time, E env (`num_envs`), B batch.

    Methods that return a state donate the old one: jit them with `donate_argnums=0`, as
    `jaxreplay.jit` does, and go on with the state that they return. In a loop, add before you
    sample. Then no call costs more than the rows that it touches.

    Args:
      capacity: Rows of all envs together, the final row of each episode included. A multiple of
        `num_envs`.
      num_envs: Number of parallel envs. Each has a ring of `capacity / num_envs` rows. Default: 1.
      batch_size: Number of items in a sample, if `sample` is given no other.
      sampler: Chooses the rows of a sample.
      view: Reads an item around each row.
      autoreset: What the env does when an episode ends: "next_step", "same_step" or
        "same_step_no_final_obs", or Gymnasium's `AutoresetMode`. `jaxreplay.autoreset` has the
        value of each env library. Default: None, for a view of items, which have no episodes.
      allow_mask: Let `add` and `extend` take a mask of the envs that took a step. Default: False.
      allow_write: Let `write` change stored rows: 68 bytes an env note its writes, by which a
        checkpoint knows which rows it has to save again. Default: False.
      min_size: Number of sampleable rows from which on `can_sample` is True. Default: 1.
      track_episodes: Keep the table that `episode_table` needs, 12 bytes a row. Default: False.
      num_agents: Number A of agents in each env, whose flags are bool[E, A]: they may end one by
        one. Default: one flag for each env.
      platform: Memory layout of new states: "cpu", "gpu" or "tpu". Set it to compile ahead of time.
        Default: the platform of JAX's default device when `init` is called.

    Raises:
      ValueError: An argument is out of range, or does not fit the view.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.ReplayBuffer(
      ...     capacity=8, batch_size=2, sampler=jr.Prioritized(alpha=1.0), view=jr.views.Item()
      ... )
      >>> state = buffer.init({"x": 0.0})
      >>> state = buffer.add(state, {"x": jnp.array([1.0])}, priority=jnp.array([0.0]))
      >>> state = buffer.add(state, {"x": jnp.array([2.0])}, priority=jnp.array([3.0]))
      >>> buffer.sample(state, jax.random.key(0)).experience["x"].tolist()
      [2.0, 2.0]
    """

    capacity: int
    num_envs: int = 1
    batch_size: int
    sampler: Sampler
    view: View[T]
    autoreset: Autoreset | None = None
    allow_mask: bool = False
    allow_write: bool = False
    min_size: int = 1
    track_episodes: bool = False
    num_agents: int | None = None
    platform: str | None = None
    _kind = ReplayState  # of its states
    takes = ("beta",)
    ranges = (("beta", 0.0, float("inf")),)

    def _check(self) -> None:
        if self.platform is not None:
            object.__setattr__(self, "platform", platforms.checked("ReplayBuffer", self.platform))
        checks.check_part("ReplayBuffer", "sampler", self.sampler, Sampler, "jaxreplay.Uniform()")
        checks.check_part("ReplayBuffer", "view", self.view, View, "jaxreplay.views.Item()")
        if self.view.needs_steps:
            form = autoreset.checked("ReplayBuffer", self.autoreset)
            object.__setattr__(self, "autoreset", form)
        checks.check_capacity("ReplayBuffer", self.capacity, self.num_envs, self.min_length)
        if not self.view.needs_steps and (self.autoreset or self.has_table or self.num_agents):
            raise ValueError(
                f"ReplayBuffer: {type(self.view).__name__} stores items, which have no episodes; "
                "leave out autoreset, track_episodes and num_agents, and sample rows, not episodes"
            )
        given = ("num_agents",) if self.num_agents is not None else ()
        for name in ("batch_size", "min_size", *given):
            checks.check_size("ReplayBuffer", name, getattr(self, name))
        step_checks.check_min_size(self)

    if not TYPE_CHECKING:  # a type checker knows the methods
        __getattr__ = no_attribute

    @functools.cached_property
    def window(self) -> Window:
        """Rows around a row that must be known before it can be sampled."""
        return self.sampler.window(self.view.window)

    @functools.cached_property
    def _outline(self) -> "ReplayBuffer[Any]":
        """A buffer with the same states, without the functions of the view and the parameters of a
        call. They may hold traced arrays, which a cache must not keep."""
        outline = Outline(rows=self.view.window, reads_steps=self.view.needs_steps)
        return dataclasses.replace(self.with_given(Static.given), view=outline)

    @property
    def length(self) -> int:
        """Number of rows in each env's ring."""
        return self.capacity // self.num_envs

    @property
    def min_length(self) -> int:
        """Smallest possible `length`: one window, whose last step may write two rows."""
        return self.window.length - 1 + row_flags.rows_per_step(self.autoreset)

    def layout(self, platform: str | None = None) -> Layout:
        """Return the layout of this buffer's states.

        Args:
          platform: "cpu", "gpu" or "tpu". Default: the buffer's, or that of JAX's default device.
        """
        return Layout(
            num_envs=self.num_envs,
            length=self.length,
            autoreset=self.autoreset,
            allow_mask=self.allow_mask,
            allow_write=self.allow_write,
            window=self.window,
            platform=platform or self.platform or platforms.default(),
            has_table=self.has_table,
            sampler=self.sampler.identity(),
        )

    @property
    def has_table(self) -> bool:
        """True if the state has an episode table: `track_episodes` is set, or the view or the
        sampler looks episodes up.
        """
        return self.track_episodes or self.window.needs_episodes or not self.window.is_bounded

    def init(self, example: PyTree) -> ReplayState:
        """Make an empty state.

        Args:
          example: One env's step (a `Step`, or a mapping, dataclass or NamedTuple with its fields,
            leaves without the env axis) or one item. Arrays or `jax.ShapeDtypeStruct`s: only
            structure, shapes and dtypes are read.

        Returns:
          The state, on JAX's default device.

        Raises:
          ValueError: `example` is not a step, or a flag is not bool.
          MemoryError: The device has too little memory for the buffer.
        """
        tell_flax()
        example = self._example("init", example)
        self.view.check("init", self.layout(), example)
        if isinstance(self.view, WrappedView):  # an error of its functions comes here
            read = lambda key: self.get(self._empty(example), jnp.zeros(1, jnp.int32), key)
            jax.eval_shape(read, jax.random.key(0))
        if not checks.is_tracing():  # while tracing, nothing is allocated yet
            check_fits("init", self.memory(example))
        leaves, structure = jax.tree.flatten(example)
        return _compiled_empty(self, structure, tuple(leaves), self.layout().platform)

    def memory(self, example: PyTree) -> Memory:
        """Return the memory in bytes that `init` will take, leaf by leaf, and allocate nothing.

        Args:
          example: One env's step or one item, as for `init`.
        """
        leaves, structure = jax.tree.flatten(self._example("memory", example))
        # traced once for an example, and compiled by `init`
        given = self, structure, tuple(leaves), self.layout().platform
        return memory_of(_compiled_empty.eval_shape(*given), self.capacity)

    def _example(self, where: str, example: PyTree) -> Any:
        """Return the shapes and dtypes of one env's step, or of an item."""
        return step_checks.as_example(where, example, self.autoreset, self.num_agents)

    def _empty(self, example: PyTree, platform: str | None = None) -> ReplayState:
        """Return a state without rows.

        Args:
          example: As `_example` returns it.
          platform: As for `layout`.
        """
        layout = self.layout(platform)
        return ReplayState.empty(layout, example, self.sampler.init(layout))

    def _empty_like(self, state: ReplayState) -> ReplayState:
        """Return a state without rows for the same leaves."""
        return self._empty(example_of(state.layout, state.rows.steps), state.layout.platform)

    def add(
        self,
        state: ReplayState,
        step: PyTree,
        mask: Any = None,
        priority: Any = None,
        *,
        envs: Any = None,
    ) -> ReplayState:
        """Append one step of every env, or of some envs.

        With `envs`, the cost is that of these envs alone. Each env needs a write position of its
        own then, as it has with `autoreset="same_step"`, or with `allow_mask=True`, which makes a
        fused loop with uniform samples take up to 1.7 times as long on a CPU.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          step: A `Step`, or a mapping, dataclass or NamedTuple with its fields, or items; leaves
            [E, ...] with the dtypes of the example. E is `num_envs`, or the number of `envs`.
          mask: bool[E], False where an env took no step; needs `allow_mask=True`, or `envs`. With
            `autoreset="next_step"`, never mask the step after a done: it brings the final
            observation. Default: every env took a step.
          priority: float[E], at least 0, for samplers with priorities. Default: that of new rows,
            the largest so far or the sampler's `new_priority`.
          envs: int32[E], different envs that took the steps, in any order; may be traced. A number
            outside of [0, `num_envs`) is for padding: its step is dropped. Default: all envs.

        Returns:
          The new state.

        Raises:
          ValueError: An argument does not fit the buffer; the error names the leaf.
        """
        state = check_state("add", self, state)
        block, envs = self._checked("add", state, step, mask, priority, envs)
        return self._write(state, *jax.tree.map(lambda leaf: leaf[None], block), envs=envs)

    def extend(
        self,
        state: ReplayState,
        steps: PyTree,
        mask: Any = None,
        priority: Any = None,
        *,
        envs: Any = None,
    ) -> ReplayState:
        """Append a block of steps, as `lax.scan` stacks them, of every env or of some envs.

        The result equals that of one `add` for each step, oldest first. If a ring is shorter than
        the block, the newest steps stay.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          steps: As for `add`, with leaves [T, E, ...].
          mask: bool[T, E], as for `add`. Default: every env took every step.
          priority: float[T, E], as for `add`. Default: that of new rows.
          envs: int32[E], as for `add`. Default: all envs.

        Returns:
          The new state.

        Raises:
          ValueError: An argument does not fit the buffer; the error names the leaf.
        """
        state = check_state("extend", self, state)
        given = mask, priority, envs
        block, envs = self._checked("extend", state, steps, *given, is_block=True)
        time, most = jax.tree.leaves(block)[0].shape[0], self._most_steps
        num_full, rest = divmod(time, most)
        if num_full + bool(rest) > 1:
            shape = lambda leaf: (num_full, most, *leaf.shape[1:])
            divided = lambda leaf: leaf[: num_full * most].reshape(shape(leaf))
            chunks = jax.tree.map(divided, block)
            state, _ = jax.lax.scan(
                lambda state, chunk: (self._write(state, *chunk, envs=envs), None), state, chunks
            )
            block = jax.tree.map(lambda leaf: leaf[num_full * most :], block)
            time = rest
        return self._write(state, *block, envs=envs) if time else state

    def sample(
        self,
        state: ReplayState,
        key: Key | None = None,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> Sample[T]:
        """Sample a batch, with replacement.

        While `can_sample` is False, all items are finite, with `is_valid` False and `weight` 0.

        Args:
          state: The buffer's state.
          key: Random key, consumed. Default: an error that says how to make one.
          batch_size: Number of items B, static. Default: the buffer's.
          options: Parameters of this call, as `jaxreplay.types.SampleOptions` says: beta, n_step,
            gamma, fractions. May be traced.

        Returns:
          The items, their indices, probabilities and weights, leaves [B, ...].

        Raises:
          ValueError: The sampler consumes rows: use `pop`.
          TypeError: There is no key, or the buffer takes no such option.
        """
        if self.sampler.consumes:
            raise ValueError(
                f"sample: {type(self.sampler).__name__} consumes rows: state, batch = "
                "buffer.pop(state, key)"
            )
        if key is None:
            raise TypeError(
                "sample: needs a state and a key: buffer.sample(state, jax.random.key(0)); "
                "jaxreplay.Replay(buffer) keeps both, and has sample(batch_size)"
            )
        return self._draw("sample", state, key, batch_size, options)[1]

    def pop(
        self,
        state: ReplayState,
        key: Key,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> tuple[ReplayState, Sample[T]]:
        """Sample a batch, and consume its rows; for `Queue`, `OnlineQueue` and
        `WithoutReplacement`.

        If fewer than B rows are left, the rest of the batch has `is_valid` False.

        Args:
          state: Donated: jit with `donate_argnums=0`.
          key: Random key, consumed.
          batch_size: Number of items B, static. Default: the buffer's.
          options: As for `sample`.

        Returns:
          The new state, and the batch, leaves [B, ...].

        Raises:
          ValueError: The sampler does not consume rows: use `sample`.
          TypeError: The buffer takes no such option.
        """
        if not self.sampler.consumes:
            raise ValueError(
                f"pop: {type(self.sampler).__name__} samples with replacement: batch = "
                "buffer.sample(state, key)"
            )
        return self._draw("pop", state, key, batch_size, options)

    def _draw(self, where, state, key, batch_size, options) -> tuple[ReplayState, Sample[T]]:
        state = check_state(where, self, state)
        batch_size = self.batch_size if batch_size is None else batch_size
        checks.check_size(where, "batch_size", batch_size)
        self = step_checks.of_call(where, self, options) if options else self
        rows = Sampleable.of(state)
        sampler, row, probability = self.sampler.sample(state.sampler, rows, key, batch_size)
        can_sample, reference = self._can_sample(state, rows, probability)
        # while `can_sample` is False the batch is invalid, so nothing is consumed
        if self.sampler.consumes:
            kept = lambda new, old: jnp.where(can_sample, new, old)
            sampler = jax.tree.map(kept, sampler, state.sampler)
        is_valid = can_sample & (probability > 0)
        batch = self._read(state, row, probability, is_valid, key, reference)
        return state.replace(sampler=sampler), batch

    def _read(
        self,
        state: ReplayState,
        row: jax.Array,
        probability: jax.Array,
        is_valid: jax.Array,
        key: Key | None,
        reference: jax.Array | None = None,
    ) -> Sample[T]:
        """Read the items of rows, int32[...], with weights as of `weights_of`."""

        def item(row: jax.Array, is_valid: jax.Array, words: Any, given: Any) -> Any:
            own = None if words is None else jnp.stack(words)
            view = self.view.with_given(given) if given else self.view
            return view.read(RowReader(state, row, own, is_valid))

        given = self.given and step_checks.of_items(self.given, self.view.all_takes(), row.shape)
        words = None
        if self.view.is_random:
            assert key is not None
            words = jax.tree.map(
                lambda word: word.reshape(row.shape),
                random.words(key, row.size, _FOR_THE_VIEW),
            )
        for _ in row.shape:
            item = jax.vmap(item)
        beta = getattr(self.sampler, "beta", None)
        weight = is_valid.astype(jnp.float32)
        if beta is not None:
            weight = weights_of(probability, is_valid, self.given.get("beta", beta), reference)
        return Sample(
            item(row, is_valid, words, given),
            state.index(row, is_valid),
            jnp.where(is_valid, probability, 0),
            weight,
            is_valid,
        )

    def get(
        self,
        state: ReplayState,
        index: Index | jax.Array,
        key: Key | None = None,
        **options: Unpack[SampleOptions],
    ) -> Sample[T]:
        """Read rows that were sampled before, or rows by number.

        `is_valid` is False where a row is not sampleable, out of range, or overwritten since. A
        sampleable row of priority 0 is valid, with probability and weight 0.

        Args:
          state: The buffer's state.
          index: `batch.index` of a sample, leaves [B], or row numbers, int32[B].
          key: Random key, consumed. Required for a view that is random (goals, horizons,
            augmentations): these are sampled anew. Default: None.
          options: As for `sample`.

        Returns:
          The items, their indices, probabilities and weights, leaves [B, ...].

        Raises:
          ValueError: The view is random and there is no key, or `index` is not of integers.
          TypeError: The buffer takes no such option.
        """
        if self.view.is_random and key is None:
            raise ValueError(
                f"get: {type(self.view).__name__} is random: buffer.get(state, index, key)"
            )
        state = check_state("get", self, state)
        self = step_checks.of_call("get", self, options) if options else self
        given, lap = (index.row, index.lap) if isinstance(index, Index) else (index, None)
        row, is_valid = step_checks.as_rows("get", given, self.capacity)
        rows = Sampleable.of(state)
        is_valid &= rows.contains(row) & (lap is None or state.index(row).lap == lap)
        probability = self.sampler.probability(state.sampler, rows, row)
        return self._read(state, row, probability, is_valid, key)

    def update_priorities(self, state: ReplayState, index: Index, priority: Any) -> ReplayState:
        """Set the priorities of sampled rows, such as absolute TD errors.

        Stale indices and invalid priorities (NaN, infinite, negative) are ignored and counted in
        the state. If a row appears more than once, its largest priority counts.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          index: `batch.index` of a sample, leaves [B].
          priority: float[B], at least 0. A row with priority 0 is never sampled again: add a small
            constant to TD errors.

        Returns:
          The new state.

        Raises:
          ValueError: The sampler has no priorities, or an argument has another type or shape.
        """
        state = check_state("update_priorities", self, state)
        step_checks.check_priorities("update_priorities", self)
        index = self._index("update_priorities", index)
        priority = step_checks.as_priority("update_priorities", priority, jnp.shape(index.row))
        flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1), (index, priority))
        sampler = self.sampler.update(state.sampler, Sampleable.of(state), *flat)
        return state.replace(sampler=sampler)

    def reset_max_priority(self, state: ReplayState) -> ReplayState:
        """Give new rows the largest priority of a stored row, at most the largest so far.

        An outlier no longer counts once it is overwritten or updated. It costs O(capacity).

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.

        Returns:
          The new state. Its largest priority is 1 if no row has a positive one, or `alpha` is 0; of
          a sharded buffer it is at least 1 if a shard has no such row.

        Raises:
          ValueError: The sampler has no priorities.
        """
        state = check_state("reset_max_priority", self, state)
        step_checks.check_priorities("reset_max_priority", self)
        sampler = self.sampler.reset_max_priority(state.sampler, Sampleable.of(state))
        return state.replace(sampler=sampler)

    def write(self, state: ReplayState, index: Index, values: Any) -> ReplayState:
        """Overwrite leaves of rows that were sampled: latents, late or relabelled rewards.

        Rows that were overwritten by other steps since, and final rows, are ignored and counted. If
        a row appears more than once, its last values stay. Samples that were prefetched before have
        the old values.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          index: `batch.index` of a sample, leaves [B]; or for the steps of sequences
            `batch.experience.index`, leaves [B, T].
          values: Some leaves of a step, as a mapping that may be nested, such as
            `{"reward": r, "extras": {"latent": z}}`, or some leaves of an item; [B, ...] or
            [B, T, ...], with the stored dtypes. Flags cannot be written.

        Returns:
          The new state.

        Raises:
          ValueError: The buffer was made without `allow_write=True`, or an argument does not fit;
            the error names the leaf.

        Example:
          >>> import jax, jax.numpy as jnp, jaxreplay as jr
          >>> buffer = jr.items(capacity=4, batch_size=2, allow_write=True)
          >>> state = buffer.extend(buffer.init({"x": 0.0}), {"x": jnp.zeros((3, 1))})
          >>> batch = buffer.get(state, jnp.array([0, 2]))
          >>> state = buffer.write(state, batch.index, {"x": jnp.array([7.0, 8.0])})
          >>> buffer.get(state, jnp.arange(3)).experience["x"].tolist()
          [7.0, 0.0, 8.0]
        """
        state = check_state("write", self, state)
        step_checks.check_writable("write", state)
        index = self._index("write", index)
        given = step_checks.as_values("write", state, values, jnp.shape(index.row))
        flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1), index)
        return writes.overwrite(state, flat, given)

    def map_rows(
        self, state: ReplayState, function: Callable[..., Any], *arguments: Any, block: int = 65_536
    ) -> ReplayState:
        """Compute leaves of all rows anew, a block at a time, in place: new rewards of a learned
        model, new values.

        It costs O(capacity), and one block of memory. Final rows stay as they are.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          function: Pure function `function(step, next_obs, *arguments)` of one stored `Step`, or
            `function(item, *arguments)` of one item, which may close over traced arrays. It returns
            some leaves of the step, as for `write`. `next_obs` is as for `jaxreplay.relabel`; it
            may be new already, if the function returns observations.
          arguments: Further arguments of the function, such as parameters of a model.
          block: Number of rows that are computed at once. Default: 65,536.

        Returns:
          The new state.

        Raises:
          ValueError: The buffer was made without `allow_write=True`, or a result does not fit; the
            error names the leaf.

        Example:
          >>> import jax, jax.numpy as jnp, jaxreplay as jr
          >>> buffer = jr.items(capacity=4, batch_size=2, allow_write=True)
          >>> state = buffer.extend(buffer.init({"x": 0.0}), {"x": jnp.arange(3.0)[:, None]})
          >>> state = buffer.map_rows(state, lambda item: {"x": item["x"] + 10})
          >>> buffer.get(state, jnp.arange(3)).experience["x"].tolist()
          [10.0, 11.0, 12.0]
        """
        state = check_state("map_rows", self, state)
        step_checks.check_writable("map_rows", state)
        checks.check_size("map_rows", "block", block)
        return rows_mapped(self, state, function, arguments, min(block, self.capacity))

    def can_add(self, state: ReplayState, num_steps: int = 1) -> jax.Array:
        """Return whether more steps overwrite only rows that were consumed; for `Queue`,
        `OnlineQueue` and `WithoutReplacement`.

        Args:
          state: The buffer's state.
          num_steps: Number of steps of every env. Default: 1.

        Returns:
          bool[].

        Raises:
          ValueError: The sampler does not consume rows.
        """
        if not self.sampler.consumes:
            raise ValueError(
                f"can_add: it is for samplers that consume rows, such as Queue; "
                f"{type(self.sampler).__name__} samples with replacement, so that an add loses "
                "nothing"
            )
        state = check_state("can_add", self, state)
        rows = num_steps * state.layout.rows_per_step
        return self.sampler.can_add(state.sampler, Sampleable.of(state), rows)

    def size(self, state: ReplayState) -> jax.Array:
        """Return the number of sampleable rows, int32[]; consumed rows do not count.

        Args:
          state: The buffer's state.
        """
        state = check_state("size", self, state)
        return self.sampler.size(state.sampler, Sampleable.of(state))

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Return whether a sample is valid, bool[]: `min_size` rows are sampleable, and one has a
        positive priority. Of a blend, samplers of fraction 0 do not count.

        Args:
          state: The buffer's state.
        """
        state = check_state("can_sample", self, state)
        return self._can_sample(state, Sampleable.of(state))[0]

    def _can_sample(
        self, state: ReplayState, rows: Sampleable, probability: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Return whether a sample is valid, bool[], and the reference of the weights of items with
        these probabilities, as `_read` takes it."""
        given = state.sampler, rows
        return (self.sampler.size(*given) >= self.min_size) & self.sampler.can_sample(*given), None

    def metrics(self, state: ReplayState) -> dict[str, jax.Array]:
        """Return figures to log, inside `jit` too.

        Args:
          state: The buffer's state.

        Returns:
          Scalars by name.
          `size`, int32: sampleable rows.
          `fill`, float32 in [0, 1]: rows written, as a part of the capacity.
          For samplers with priorities also
          `max_priority`, float32: the largest priority so far;
          `mean_priority`, float32: (mean of priority ** alpha) ** (1 / alpha) over `size` rows,
          left out for alpha 0;
          `num_bad_priorities`, uint32: priorities that were ignored as NaN, infinite or negative;
          `num_stale_updates`, uint32: updates that were ignored as their row is not sampleable.
          For `Queue` and `OnlineQueue` also
          `num_new`, int32: rows that wait for their first use;
          `num_lost`, uint32: rows that were overwritten before it.
          With `allow_write` also `num_ignored_writes`, uint32: rows that `write` ignored.
        """
        state = check_state("metrics", self, state)
        rows = Sampleable.of(state)
        filled = state.counters.filled.sum(dtype=jnp.int32)
        return {
            "size": self.sampler.size(state.sampler, rows),
            "fill": filled.astype(jnp.float32) / self.capacity,
            **(
                {"num_ignored_writes": state.counters.num_ignored_writes.sum()}
                if self.allow_write
                else {}
            ),
            **self.sampler.metrics(state.sampler, rows),
        }

    def age(self, state: ReplayState, index: Index) -> jax.Array:
        """Return how many rows of its env were written after each row, final rows included.

        Args:
          state: The buffer's state.
          index: `batch.index` of a sample, leaves [B].

        Returns:
          int32[B], 0 for the newest row.
        """
        state = check_state("age", self, state)
        return state.age(self._index("age", index).row)

    def clear(self, state: ReplayState) -> ReplayState:
        """Remove all rows. No index of an earlier sample is valid afterwards.

        Args:
          state: Donated.

        Returns:
          The new state.
        """
        state = check_state("clear", self, state)
        return state.clear().replace(sampler=self.sampler.clear(state.sampler))

    def end_streams(self, state: ReplayState, mask: Any = None) -> ReplayState:
        """End the unfinished episodes: the next step of each env does not follow its newest one.

        Call it after a reset that no step tells, such as one by hand, or of new envs in a resumed
        run. Otherwise the newest step would be paired with the first observation after the reset.
        The newest transition of each unfinished episode is given up, since its next observation is
        unknown.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          mask: bool[E], False for envs that go on. Default: every env was reset.

        Returns:
          The new state.

        Raises:
          ValueError: The buffer stores items.
        """
        state = check_state("end_streams", self, state)
        if self.autoreset is None:
            raise ValueError("end_streams: items have no episodes, so that nothing goes on")
        mask = jnp.ones(self.num_envs, bool) if mask is None else mask
        step_checks.check_mask("end_streams", mask, True, (self.num_envs,))
        state, effect = newest_row.close(state, jnp.asarray(mask))
        return state.replace(sampler=self.sampler.observe(state.sampler, effect, None))

    def drop(self, state: ReplayState, mask: Any) -> ReplayState:
        """Give up the unfinished episodes of some envs, as of a simulator that crashed.

        No row of them is sampled any more, and the next step of each env begins an episode.
        Episodes that have ended stay. It costs O(capacity), and the next checkpoint saves all rows.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole buffer is copied.
          mask: bool[E], True for the envs whose episode is given up.

        Returns:
          The new state.

        Raises:
          ValueError: The buffer stores items, or `mask` has another type or shape.
        """
        return dropped(self, check_state("drop", self, state), mask)

    def adopt(self, state: ReplayState) -> ReplayState:
        """Make the state of another buffer this buffer's, with all its rows.

        The buffers may differ in the sampler and its arguments, the view (`n_step`, `gamma`,
        window, `period`), `capacity`, `num_envs`, `allow_mask`, `allow_write`, `track_episodes` and
        `platform`. Their steps must have the same leaves, and the same `autoreset`, but "next_step"
        and "same_step" may be exchanged. It costs O(capacity).

        Each env keeps its newest rows that fit. Priorities stay, whatever their exponent; rows
        without one get that of new rows. Rows that a `Queue` consumed stay consumed for a
        `Queue`, in each env up to the first one that was not. If `num_envs` differs, whole streams
        are dealt out: that of env `e` goes to env `e mod num_envs`, after those before it, and
        unfinished episodes end, as by `end_streams`. If all envs of this buffer step together,
        shorter ones are filled up with rows that are never sampled. Items are dealt out one by one.

        `batch.index` of earlier samples means other rows now, unless `capacity`, `num_envs` and
        `allow_mask` are equal.

        Args:
          state: The state of any `ReplayBuffer`. It need not be donated: if `capacity`, `num_envs`
            and `allow_mask` are equal, the new state has the same arrays of steps.

        Returns:
          The new state.

        Raises:
          ValueError: `autoreset` differs, the view does not fit the steps, or items in windows
            would have to be dealt to other envs.

        Example:
          >>> import jax, jax.numpy as jnp, jaxreplay as jr
          >>> old = jr.items(capacity=4, batch_size=2)
          >>> state = old.extend(old.init(jnp.int32(0)), jnp.array([[7], [8], [9]]))
          >>> new = jr.items(capacity=8, num_envs=2, batch_size=2, sampler=jr.Prioritized())
          >>> int(new.size(new.adopt(state)))  # one row of three cannot be divided among two envs
          2
        """
        return adopted("adopt", self, state)

    def merge(self, state: ReplayState, other: ReplayState) -> ReplayState:
        """Append the rows of another buffer's state, such as demonstrations.

        Whole streams of the other are dealt out in turn, to the envs with the fewest rows first,
        and unfinished episodes of both end. An episode of the other whose first rows were
        overwritten begins with its oldest row then. It costs O(capacity) of both.

        Args:
          state: Donated: jit with `donate_argnums=0`.
          other: The state of a buffer with the same leaves and `autoreset`, of any capacity and
            number of envs. It stays valid.

        Returns:
          The new state.

        Raises:
          ValueError: The states have other leaves; the error names them. Or as for `adopt`.
        """
        return merged(self, check_state("merge", self, state), other)[0]

    def episode_table(self, state: ReplayState) -> Episodes:
        """Return look-ups of the episode ends around stored rows.

        Args:
          state: The buffer's state.

        Raises:
          ValueError: The buffer keeps no table: make it with `track_episodes=True`.
        """
        state = check_state("episode_table", self, state)
        if not state.layout.has_table:
            raise ValueError(
                "episode_table: this buffer keeps none; make it with track_episodes=True"
            )
        return Episodes(state)

    @property
    def _most_steps(self) -> int:
        """Steps that are written at once: they overwrite neither rows that wait for their window,
        nor rows that the newest ones look back to."""
        return (self.length - self.window.length + 1) // self.layout().rows_per_step

    def _write(
        self,
        state: ReplayState,
        steps: PyTree,
        mask: jax.Array | None,
        priority: jax.Array | None,
        envs: jax.Array | None,
    ) -> ReplayState:
        """Write a block of at most `_most_steps`, leaves [T, E, ...]."""
        of_all = state.counters
        if envs is not None:
            state = state.replace(counters=of_all.of(envs))
        counters, written = writes.advance(state, steps, mask)
        rows = writes.write(state.rows, state.layout, steps, written)
        after = state.replace(rows=rows, counters=counters)
        if state.counters.num_expired is not None:
            counters = counters.set(num_expired=writes.count_expired(after))
            after = after.replace(counters=counters)
        effect = writes.effect_of(after, written)
        if priority is not None and state.layout.rows_per_step == 2:  # 0 for final rows
            both = jnp.stack([priority, jnp.zeros_like(priority)], axis=1)
            priority = both.reshape(-1, priority.shape[-1])
        if envs is not None:
            after = after.replace(counters=of_all.put(counters))
        return after.replace(sampler=self.sampler.observe(state.sampler, effect, priority))

    def _index(self, where: str, index: Any) -> Index:
        """Return the index of a sample, or raise a ValueError if it is none."""
        if not isinstance(index, Index):
            raise ValueError(
                f"{where}: index must be the batch.index of a sample, got {kind_of(index)}; a bare "
                "row number cannot tell whether the row was overwritten since it was sampled"
            )
        return index

    def _checked(
        self, where, state, steps, mask, priority, envs=None, is_block=False
    ) -> tuple[tuple[Any, Any, Any], Any]:
        """Return steps, mask and priority, and envs, as arrays, or raise a ValueError that names
        the leaf.

        Args:
          is_block: Whether the steps have an axis of time before that of the envs.
        """
        if envs is not None:
            envs = jnp.asarray(envs) if isinstance(envs, list | tuple) else envs
            step_checks.check_envs(where, envs, state.layout, self.num_envs)
        stored = state.rows.steps
        steps, axes = step_checks.checked_steps(where, self, steps, stored, envs, is_block)
        if mask is not None:
            step_checks.check_mask(where, mask, self.allow_mask or envs is not None, axes)
            mask = jnp.asarray(mask)
        if priority is not None:
            step_checks.check_priorities(where, self)
            priority = step_checks.as_priority(where, priority, axes)
        envs = None if envs is None else step_checks.as_envs(envs, self.num_envs)
        return (steps, mask, priority), envs


# One program compiles in a third of the time of its operations one by one (measured).
@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _compiled_empty(
    buffer: ReplayBuffer, structure: Any, leaves: tuple[Any, ...], platform: str
) -> ReplayState:
    return buffer._empty(jax.tree.unflatten(structure, leaves), platform)

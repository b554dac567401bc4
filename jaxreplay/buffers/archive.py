"""Items that are kept by their score, or a random sample of all that came: levels, demonstrations,
the memory of an average policy."""

import functools
from collections.abc import Iterator
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp

from jaxreplay._util import checks, random, xla
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.names import has_shapes
from jaxreplay._util.struct import Node, Static
from jaxreplay.buffers import memory, step_checks
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import (
    as_arrays,
    check_not_deleted,
    check_state,
    example_of,
    warn_of_copy,
)
from jaxreplay.samplers import ConsumingSampler, Newest, PrioritySampler, Recent, Sampler, Uniform
from jaxreplay.storage import min_tree, ring, stored_arrays, writes
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.state import ReplayState, at
from jaxreplay.types import Index, Sample, SampleOptions
from jaxreplay.views.item import Item

KEEPS = ("best", "reservoir")
_LARGEST = jnp.iinfo(jnp.int32).max


class ArchiveState(Node):
    """State of an archive. C is its capacity.

    `add`, `update_scores` and `clear` donate it: use the state that they return.

    Attributes:
      items: State of the buffer of the items and their sampler; rows are filled from 0 on.
      scores: Tuple of float32[n], a tree of minima. The first, [C], has the score of each row, -inf
        where there is no item. Empty for a reservoir.
      lap: uint32[C], number of times that an item was stored in the row or the archive was cleared,
        modulo 2^32.
      num_seen: int32[], number of items that came, stored or not. It stops at 2^31 - 1.
    """

    items: ReplayState
    scores: tuple[jax.Array, ...]
    lap: jax.Array
    num_seen: jax.Array

    def __repr__(self) -> str:
        """Show sizes, such as `ArchiveState(1 archive x 4 rows, item f32[3], 16 kB)`."""
        if not has_shapes(self):
            return super().__repr__()
        *population, capacity = self.lap.shape
        steps = self.items.rows.steps
        return stored_arrays.shown(self, population, (1, capacity), "item", steps, what="archive")


class Archive(Static):
    """Buffer of items where a new one takes the place of the worst, or of a random one.

    With `keep="best"` the archive has the items with the largest scores: levels of the largest
    regret, the best demonstrations. With `keep="reservoir"` it has a uniform sample of all items
    that ever came, as the average policy of fictitious self-play needs it.

    A call costs what it touches, and the logarithm of the capacity, but for `clear` and samples of
    `Stale`. The axes are M items of a call
    and B items of a batch. Methods are pure functions of the state. In one program, add before you
    sample, or what was made from the sample: else XLA copies the archive.

    Args:
      capacity: Number of items C that are kept.
      batch_size: Number of items B in a sample, if `sample` is given no other.
      keep: "best" or "reservoir". Default: "best".
      sampler: Chooses the items of a sample, any sampler that neither consumes rows nor reads their
        age. If it has priorities, these are the scores, and 0 for negative ones. Default:
        `Uniform()`.

    Raises:
      ValueError: An argument is out of range, or the sampler does not fit.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> archive = jr.Archive(capacity=2, batch_size=4, sampler=jr.Prioritized(alpha=1.0))
      >>> state = archive.init({"level": jnp.int32(0)})
      >>> levels, regret = {"level": jnp.array([7, 8, 9])}, jnp.array([0.5, 0.1, 0.3])
      >>> state, index = archive.add(state, levels, regret)
      >>> index.row.tolist()  # level 8 is the worst
      [0, -1, 1]
      >>> batch = archive.sample(state, jax.random.key(0))
      >>> state = archive.update_scores(state, batch.index, jnp.zeros(4))
      >>> state, index = archive.add(state, {"level": jnp.array([8])}, jnp.array([0.1]))
      >>> index.row.tolist()
      [0]

    References:
      Jiang et al., "Prioritized Level Replay" (2021), https://arxiv.org/abs/2010.03934, whose level
      with the lowest score is replaced. Vitter, "Random Sampling with a Reservoir" (1985),
      https://doi.org/10.1145/3147.3165, algorithm R. Heinrich and Silver, "Deep Reinforcement
      Learning from Self-Play in Imperfect-Information Games" (2016),
      https://arxiv.org/abs/1603.01121, whose memory of the average policy is a reservoir.
    """

    capacity: int
    batch_size: int
    keep: str = "best"
    sampler: Sampler = Uniform()

    def _check(self) -> None:
        if self.keep not in KEEPS:
            raise ValueError(f"Archive: keep must be one of {KEEPS}, got {self.keep!r}")
        for one in _all_of(self.sampler):
            if isinstance(one, ConsumingSampler | Newest | Recent):
                raise ValueError(
                    f"Archive: {type(one).__name__} goes by the order of rows in time, which an "
                    "archive does not keep; use jaxreplay.Uniform() or jaxreplay.Prioritized()"
                )
        self._buffer  # noqa: B018, which checks the rest

    @functools.cached_property
    def _buffer(self) -> ReplayBuffer[Any]:
        return ReplayBuffer(
            capacity=self.capacity, batch_size=self.batch_size, sampler=self.sampler, view=Item()
        )

    def init(self, example: PyTree) -> ArchiveState:
        """Make an empty state.

        Args:
          example: One item: any pytree. Arrays or `jax.ShapeDtypeStruct`s: only structure, shapes
            and dtypes are read.

        Returns:
          The state, on JAX's default device.

        Raises:
          ValueError: The example has no leaves.
          MemoryError: The device has too little memory for the archive.
        """
        example = self._buffer._example("init", example)
        if not checks.is_tracing():
            memory.check_fits("init", self.memory(example))
        return self._with(self._buffer.init(example))

    def memory(self, example: PyTree) -> memory.Memory:
        """Return the memory in bytes that `init` will take, leaf by leaf, and allocate nothing.

        Args:
          example: One item, as for `init`.
        """
        example = self._buffer._example("memory", example)
        state = jax.eval_shape(lambda: self._with(self._buffer._empty(example)))
        return memory.memory_of(state, self.capacity)

    def _with(self, items: ReplayState) -> ArchiveState:
        """Return a state without items."""
        fan_out, is_best = items.layout.traits.fan_out, self.keep == "best"
        scores = min_tree.filled(self.capacity, fan_out, -jnp.inf) if is_best else ()
        lap = jnp.zeros((self.capacity,), jnp.uint32)
        return ArchiveState(items, scores, lap, jnp.int32(0))

    def add(
        self,
        state: ArchiveState,
        items: PyTree,
        score: Any = None,
        *,
        key: Key | None = None,
        mask: Any = None,
    ) -> tuple[ArchiveState, Index]:
        """Store items that are good enough, or chosen by chance.

        With "best", the archive then has the C items with the largest scores of those that it had
        and the new ones. An item with the score of a new one stays; of equal new ones the first is
        stored. With "reservoir", each of the n items that came so far is stored with probability
        C / n.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole archive is copied.
          items: Items, pytree with leaves [M, ...] and the dtypes of the example.
          score: float32[M]. An item whose score is not finite is not stored, and does not count.
            Required with "best"; for a reservoir it is the sampler's priority. Default: none.
          key: Random key, consumed. Required for a reservoir. Default: none.
          mask: bool[M], False for padding, which does not count as an item. Default: all are items.

        Returns:
          The new state; the index of each item, whose `row` is -1 where it was not stored, or
          another item of this call took its place.

        Raises:
          ValueError: An argument does not fit the archive; the error names the leaf.
        """
        state = self._check_state("add", state)
        warn_of_copy(self, "add", state)
        num = (*(jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(items)), ())[0] or (1,)
        num, stored, what = num[0], state.items.rows.steps, "M items, leaves [M, ...]"
        step_checks.check_block("add", items, stored, (num,), what)
        is_one = jnp.ones(num, bool)
        if mask is not None:
            step_checks.check_mask("add", mask, True, (num,))
            is_one &= mask
        if score is not None:
            self._check_takes_scores("add")
            score = step_checks.as_priority("add", score, (num,), "score")
            is_one &= jnp.isfinite(score)
        if not num:
            return state, Index(row=jnp.zeros(0, jnp.int32), lap=jnp.zeros(0, jnp.uint32))

        # The row of each item, C for none.
        seen = jnp.cumsum(is_one, dtype=jnp.int32)
        nth = state.num_seen + jnp.minimum(seen, _LARGEST - state.num_seen)
        if self.keep == "best":
            if score is None:
                raise ValueError('add: an archive with keep="best" needs the score of each item')
            row = self._best(state, jnp.where(is_one, score, -jnp.inf))
        else:
            if key is None:
                raise ValueError('add: an archive with keep="reservoir" needs a key')
            row = self._by_chance(nth, is_one, key)
        is_kept = row < self.capacity

        # The items.
        old = state.items
        steps = stored_arrays.tree_map(
            lambda leaf, new: stored_arrays.write(leaf, row, jnp.asarray(new)),
            old.rows.steps,
            items,
        )
        filled = jnp.max(jnp.where(is_kept, row + 1, 0), initial=0)
        filled = jnp.maximum(old.counters.filled, filled)
        position, is_full = ring.wrap(filled, self.capacity), filled == self.capacity
        counters = old.counters.set(position=position, filled=filled, lap=is_full)
        # What the sampler observes.
        is_kept, rows, zeros = is_kept[:, None], row[:, None], jnp.zeros((num, 1), jnp.int32)
        effect = writes.WriteEffect(
            layout=old.layout,
            envs=None,
            row=rows,
            became_sampleable=is_kept,
            is_written=is_kept,
            is_candidate=is_kept,
            is_gone=is_kept,
            age=zeros,
            start=jnp.zeros((1,), jnp.int32),
        )
        priority = None
        if score is not None and _has_priorities(self.sampler):
            priority = self._priority(score)[:, None]
        sampler = self.sampler.observe(old.sampler, effect, priority)
        items = old.replace(rows=old.rows.replace(steps=steps), counters=counters, sampler=sampler)

        lap = state.lap.at[row].get(mode="fill", fill_value=0) + 1
        state = state.replace(
            items=items,
            scores=_put(state, row, score),
            lap=state.lap.at[row].set(lap, mode="drop", unique_indices=True),
            num_seen=nth[-1],
        )
        return state, Index(row=jnp.where(is_kept[:, 0], row, -1), lap=lap)

    def _best(self, state: ArchiveState, score: jax.Array) -> jax.Array:
        """Return the rows of items with these scores, -inf for no item: int32[M]."""
        num = min(len(score), self.capacity)
        row, lowest = min_tree.smallest(state.scores, state.items.layout.traits.fan_out, num)
        new, nth = jax.lax.top_k(score, num)
        row = jnp.where(new > lowest, row, self.capacity)
        return jnp.full(score.shape, self.capacity, jnp.int32).at[nth].set(row)

    def _by_chance(self, nth: jax.Array, is_one: jax.Array, key: Key) -> jax.Array:
        """Return the rows of a reservoir's items, of which `nth` have come: int32[M]."""
        row = random.below(*random.words(key, len(nth)), nth)
        row = jnp.where(nth <= self.capacity, nth - 1, row)
        row = jnp.where(is_one, jnp.minimum(row, self.capacity), self.capacity)
        return jnp.where(xla.is_last(row), row, self.capacity)

    def _check_takes_scores(self, where: str) -> None:
        if self.keep != "best" and not _has_priorities(self.sampler):
            raise ValueError(
                f"{where}: a reservoir has scores for a sampler with priorities alone; "
                f"{type(self.sampler).__name__} has none: leave out the score, or use "
                "sampler=jaxreplay.Prioritized()"
            )

    @staticmethod
    def _priority(score: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(score), jnp.maximum(score, 0), jnp.nan)

    def sample(
        self,
        state: ArchiveState,
        key: Key | None = None,
        batch_size: int | None = None,
        **options: Unpack[SampleOptions],
    ) -> Sample[Any]:
        """Sample a batch, with replacement, as `ReplayBuffer.sample` does.

        Args:
          state: The state.
          key: Random key, consumed. Default: an error that says how to make one.
          batch_size: Number of items B, static. Default: the archive's.
          options: Parameters of this call: `beta` of samplers with priorities, and the `fractions`
            of a blend. May be traced.

        Returns:
          The items, their indices, probabilities and weights, leaves [B, ...].

        Raises:
          TypeError: There is no key, or the sampler takes no such option.
        """
        state = self._check_state("sample", state)
        batch = self._buffer.sample(state.items, key, batch_size, **options)
        return self._named(state, batch)

    def get(self, state: ArchiveState, index: Index | jax.Array) -> Sample[Any]:
        """Read items that were sampled or added before, or items by row number.

        Args:
          state: The state.
          index: Index of a sample or of an `add`, leaves [B], or row numbers, int32[B].

        Returns:
          The items, as `sample` returns them; `is_valid` is False where the row has no item, or by
          now another one.

        Raises:
          ValueError: `index` is not of integers.
        """
        state = self._check_state("get", state)
        rows, is_same = index, True
        if isinstance(index, Index):
            rows, is_same = index.row, self._is_live(state, index)
        batch = self._buffer.get(state.items, rows)
        none = lambda leaf: jnp.where(is_same, leaf, jnp.zeros_like(leaf))
        return self._named(
            state,
            batch.replace(
                probability=none(batch.probability),
                weight=none(batch.weight),
                is_valid=batch.is_valid & is_same,
            ),
        )

    def _named(self, state: ArchiveState, batch: Sample[Any]) -> Sample[Any]:
        """Return a batch whose index tells when another item takes a row."""
        row = batch.index.row
        lap = at(state.lap, row)
        return batch.replace(
            index=Index(row=row, lap=jnp.where(batch.is_valid, lap, lap ^ jnp.uint32(2**31)))
        )

    def _is_live(self, state: ArchiveState, index: Index) -> jax.Array:
        row = jnp.clip(index.row, 0, self.capacity - 1)
        is_stored = (row == index.row) & state.items.is_written(row)
        return is_stored & (at(state.lap, row) == index.lap)

    def update_scores(
        self, state: ArchiveState, index: Index, score: Any, values: Any = None
    ) -> ArchiveState:
        """Set the scores of items, and leaves of them that go with the scores.

        Items that were replaced since are ignored, and so are scores that are not finite. If an
        item appears more than once, its largest score counts.

        Args:
          state: Donated: jit with `donate_argnums=0`, else the whole archive is copied.
          index: `batch.index` of a sample, leaves [B].
          score: float[B].
          values: Leaves of the items to overwrite, such as `{"max_return": r}`, which may be
            nested; [B, ...], with the stored dtypes. Default: the items stay as they are.

        Returns:
          The new state.

        Raises:
          ValueError: An argument has another type or shape; the error names the leaf.
        """
        state = self._check_state("update_scores", state)
        warn_of_copy(self, "update_scores", state)
        if not isinstance(index, Index):
            raise step_checks.no_index("update_scores", index)
        self._check_takes_scores("update_scores")
        shape, items = jnp.shape(index.row), state.items
        score = step_checks.as_priority("update_scores", score, shape, "score").reshape(-1)
        given = step_checks.as_values("update_scores", items, values, shape)
        index = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1), index)
        is_live = self._is_live(state, index)

        # The rows, each once, with its largest score.
        order = jnp.argsort(jnp.where(jnp.isfinite(score), score, -jnp.inf))
        row = jnp.where(is_live & jnp.isfinite(score), index.row, self.capacity)
        is_last = jnp.zeros(row.shape, bool).at[order].set(xla.is_last(row[order]))
        row = jnp.where(is_last, row, self.capacity)
        rows = writes.put(items.rows, row, given, are_distinct=True) if given else items.rows
        sampler = items.sampler
        if _has_priorities(self.sampler):
            own = items.index(jnp.clip(index.row, 0, self.capacity - 1), is_live)
            priority = self._priority(score)
            sampler = cast(PrioritySampler, self.sampler).update(
                sampler, Sampleable.of(items), own, priority
            )
        return state.replace(
            items=items.replace(rows=rows, sampler=sampler),
            scores=_put(state, row, score),
        )

    def size(self, state: ArchiveState) -> jax.Array:
        """Return the number of items that the sampler may sample: int32[].

        Args:
          state: The state.
        """
        return self._buffer.size(self._check_state("size", state).items)

    def can_sample(self, state: ArchiveState) -> jax.Array:
        """Return whether a sample is valid: bool[].

        Args:
          state: The state.
        """
        return self._buffer.can_sample(self._check_state("can_sample", state).items)

    def metrics(self, state: ArchiveState) -> dict[str, jax.Array]:
        """Return figures to log, those of `ReplayBuffer.metrics`, and `num_seen`, int32.

        Args:
          state: The state.
        """
        state = self._check_state("metrics", state)
        return self._buffer.metrics(state.items) | {"num_seen": state.num_seen}

    def clear(self, state: ArchiveState) -> ArchiveState:
        """Remove all items. No index of an earlier sample is valid afterwards.

        Args:
          state: Donated.

        Returns:
          The new state.
        """
        state = self._check_state("clear", state)
        items = state.items.replace(
            counters=state.items.counters.set(position=0, filled=0, lap=0),
            sampler=self.sampler.clear(state.items.sampler),
        )
        scores = jax.tree.map(lambda leaf: jnp.full_like(leaf, -jnp.inf), state.scores)
        return ArchiveState(items, scores, state.lap + 1, jnp.zeros_like(state.num_seen))

    def _check_state(self, where: str, state: ArchiveState) -> ArchiveState:
        if not isinstance(state, ArchiveState):
            raise ValueError(
                f"{where}: the state must be an ArchiveState, as init and add return it, got a "
                f"{type(state).__name__}"
            )
        check_not_deleted(where, state)
        items = check_state(where, self._buffer, state.items)
        example = example_of(items.layout, items.rows.steps)
        empty = lambda: self._with(self._buffer._empty(example, items.layout.platform))
        checks.check_leaves(where, state, jax.eval_shape(empty), f"The state is not of {self}")
        return as_arrays(state)


def _all_of(sampler: Sampler) -> Iterator[Sampler]:
    """Yield a sampler and all its parts."""
    yield sampler
    for part in getattr(sampler, "parts", {}).values():
        yield from _all_of(part)


def _has_priorities(sampler: Sampler) -> bool:
    return any(
        isinstance(one, PrioritySampler) and not hasattr(one, "parts") for one in _all_of(sampler)
    )


def _put(state: ArchiveState, row: jax.Array, score: jax.Array | None) -> tuple[jax.Array, ...]:
    """Return the tree of scores after new ones of different rows, C for none."""
    if score is None or not state.scores:
        return state.scores
    return min_tree.put(state.scores, state.items.layout.traits.fan_out, row, score)

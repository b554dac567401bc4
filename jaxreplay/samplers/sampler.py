"""The protocol of samplers, which choose the rows of a batch.

Axes in this package: N rows in the buffer (`layout.capacity`); E streams, each the ring of one env
(`layout.num_envs`); B batch; K rows that one write may add to a stream.

A sampler sees which rows are sampleable, and never the stored data. Its methods get a `Sampleable`:

    sampleable.count()           int32[E], the number of sampleable rows of each stream
    sampleable.select(env, nth)  int32[...], the nth sampleable row of each stream, oldest first
    sampleable.contains(row)     bool[...], whether each row in [0, N) is sampleable
    sampleable.age(row)          int32[...], the number of newer rows in the row's stream
    sampleable.live(index)       int32[B], bool[B], the rows of `batch.index`, and which are live
    sampleable.layout            sizes of the buffer; `split(row)` gives each row's env and position
"""

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.names import named
from jaxreplay._util.struct import Static
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.writes import WriteEffect
from jaxreplay.types import Index

SMALLEST = float(np.finfo(np.float32).tiny)  # the smallest float32 that no processor flushes to 0


class Draw(NamedTuple):
    """Rows of a batch, and the sampler's state after it.

    Attributes:
      state: Pytree, the sampler's state. `buffer.pop` keeps it; `buffer.sample` drops it. Return it
        unchanged unless the sampler consumes rows.
      row: int32[B], the rows, in [0, N). A row may occur more than once.
      probability: float32[B], the probability with which one item of a batch is this row. An item
        with probability 0 is not valid: there was no row to sample.
    """

    state: PyTree
    row: jax.Array
    probability: jax.Array


class Sampler(Static):
    """Base class of samplers: frozen, hashable configuration with pure methods.

    Implement `sample` and `probability`. The other methods have defaults for a sampler that has no
    state, works with every view, and samples from all sampleable rows.

    A sampler that implements `update` has priorities. With it `add` and `extend` take `priority`,
    and the buffer has `update_priorities`. If it has a `beta`, such as `beta: float = 0.4`, this
    is the exponent of importance weights, which a call of `buffer.sample` may override. By default
    all weights are 1.

    A sampler that implements `can_add` consumes rows. Its `sample` returns a new state, which marks
    the rows as consumed. The buffer has `pop` instead of `sample`.

    A subclass is a dataclass. Its parameters are annotated fields with hashable Python values, such
    as `decay: float = 0.9`. They are static under `jit`. A call of `buffer.sample` may give those
    that `takes` names, such as `takes = ("decay",)`; `self.given` has them, traced or not.

    A sampler may have a state, a pytree of arrays. Methods that return a state must keep its
    structure, shapes and dtypes. All methods but `window` and `identity` may run under `jit`.

    If leaves of the state hold a number for each row in another order than that of the rows,
    implement `numbers` and `from_numbers`. Another buffer can then adopt the rows with them. The
    class attribute `counts` names the numbers that count something, such as `counts = ("lost",)`:
    where several states become one, by `buffer.merge` or in a checkpoint of shards, they are added.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> class Latest(jr.samplers.Sampler):
      ...     '''Sample the newest sampleable row of a random env that has one.'''
      ...
      ...     def size(self, state, sampleable):
      ...         return (sampleable.count() > 0).sum(dtype=jnp.int32)
      ...
      ...     def sample(self, state, sampleable, key, batch_size):
      ...         has_rows = jnp.log((sampleable.count() > 0).astype(jnp.float32))
      ...         env = jax.random.categorical(key, has_rows, shape=(batch_size,))
      ...         row = self.latest(sampleable, env)
      ...         return jr.samplers.Draw(state, row, self.probability(state, sampleable, row))
      ...
      ...     def probability(self, state, sampleable, row):
      ...         env, _ = sampleable.layout.split(row)
      ...         is_latest = sampleable.contains(row) & (row == self.latest(sampleable, env))
      ...         return jnp.where(is_latest, 1 / self.size(state, sampleable), 0)
      ...
      ...     def latest(self, sampleable, env):
      ...         return sampleable.select(env, jnp.maximum(sampleable.count()[env] - 1, 0))
      >>> buffer = jr.items(capacity=8, batch_size=2, sampler=Latest())
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(5)[:, None])
      >>> buffer.sample(state, jax.random.key(0)).experience.tolist()
      [4, 4]
    """

    counts: ClassVar[tuple[str, ...]] = ()

    @functools.cached_property
    def has_priorities(self) -> bool:
        """True if the sampler has priorities: it implements `update`."""
        return type(self).update is not Sampler.update

    @functools.cached_property
    def consumes(self) -> bool:
        """True if the sampler consumes rows: it implements `can_add`."""
        return type(self).can_add is not Sampler.can_add

    def window(self, window: Window) -> Window:
        """Return the rows around a candidate that must be stored before it can be sampled.

        Called when the buffer is made.

        Args:
          window: The rows around a candidate that the view reads.

        Returns:
          `window` or a wider one. Use `dataclasses.replace(window, needs_episodes=True)` if the
          sampler reads `sampleable.episodes`. By default `window`.

        Raises:
          ValueError: The sampler does not work with this window.
        """
        return window

    def identity(self) -> "Sampler | None":
        """Return what decides the meaning of the state, beside the buffer's sizes.

        States of buffers whose samplers have equal identities can be exchanged.

        Returns:
          By default None if the sampler has no state, else the sampler itself. If arguments do not
          change the state, return the sampler with their defaults.
        """
        return None if type(self).init is Sampler.init else self

    def init(self, layout: Layout) -> PyTree:
        """Return the state for an empty buffer.

        Args:
          layout: Sizes of the buffer: `capacity` N, `num_envs` E, and `length`, the N / E rows of
            each stream.

        Returns:
          A pytree of arrays. By default `()`, no state.
        """
        del layout
        return ()

    def clear(self, state: PyTree) -> PyTree:
        """Return the state for a buffer whose rows were all forgotten by `buffer.clear`.

        Candidate numbers continue from where they were.

        Args:
          state: The sampler's state.

        Returns:
          The new state. By default `state`.
        """
        return state

    def observe(
        self, state: PyTree, effect: WriteEffect | None, priority: jax.Array | None
    ) -> PyTree:
        """Return the state after a write.

        `add` calls it once, as does `end_streams`, and `extend` once for each block that it writes.

        Args:
          state: The sampler's state.
          effect: The change of each row: `became_sampleable` and `is_gone`, bool[W, E], of the rows
            `row`, int32[W, E], and the rows `written`, int32[K, E]. W counts all rows of a stream
            that the write may have changed. None if the window is unbounded.
          priority: float32[K, E], the priorities given to `add`. They may be NaN or negative, and
            mean nothing where `effect.is_written` is False. Final rows that `autoreset="same_step"`
            adds have 0. None if `add` was given none, and always unless the sampler has priorities.

        Returns:
          The new state. By default `state`.
        """
        del effect, priority
        return state

    def numbers(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return what the state knows, in a form for any layout of the rows: priorities, and which
        rows were consumed.

        `buffer.adopt`, `buffer.merge` and checkpoints carry it to another state.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          Arrays by name: [N] with a number of each row, env * length + position, which go where the
          rows go; others stay as they are, but a merge keeps the larger of two floating scalars. A
          row without a number has NaN or, in signed integers, -1, else 0. By default the leaves of
          the state.
        """
        del sampleable
        return dict(named(state))

    def from_numbers(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> PyTree:
        """Return the state for a buffer that has its rows from another one.

        Args:
          sampleable: The sampleable rows of the new buffer.
          numbers: Result of `numbers`, of a sampler of this class or of one that it derives from,
            with [N] of the new buffer; {} if the other buffer had none. Rows may lack a number.

        Returns:
          The state. By default one with the leaves in `numbers` if their shapes and dtypes fit,
          else that of `init`.
        """
        fresh = self.init(sampleable.layout)
        own = [(numbers.get(name), leaf) for name, leaf in named(fresh)]
        kind = lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf))
        if any(new is None or kind(new) != kind(leaf) for new, leaf in own):
            return fresh
        return jax.tree.unflatten(jax.tree.structure(fresh), [new for new, _ in own])

    def _labelled(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return `numbers` with the class in their names, "jaxreplay/Prioritized:mass": the leaves
        of two classes may have equal names."""
        label, *_ = _labels(type(self))
        return {f"{label}:{name}": x for name, x in self.numbers(state, sampleable).items()}

    def _all_counts(self) -> set[str]:
        """Return the names that `counts` have in the result of `_labelled`."""
        label, *_ = _labels(type(self))
        return {f"{label}:{name}" for name in self.counts}

    def _from_labelled(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> PyTree:
        """Return `from_numbers`, of what `_labelled` of any sampler returned."""
        return self.from_numbers(sampleable, of_class(type(self), numbers))

    def size(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the number of rows that can be sampled now.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          int32[], by default the number of all sampleable rows.
        """
        del state
        return sampleable.count().sum(dtype=jnp.int32)

    def can_sample(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return False if the state prevents sampling, such as when all priorities are 0.

        `buffer.can_sample` also requires that `size` is at least `min_size`.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          bool[]. By default True or, for a sampler with priorities that has `mass`, whether that is
          positive.
        """
        if self.has_priorities and type(self).mass is not Sampler.mass:
            return self.mass(state, sampleable) > 0
        return jnp.asarray(True)

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        """Sample a batch of rows.

        It is also called if no row can be sampled. It then returns any rows in [0, N), with
        probability 0.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.
          key: Random key; consumed.
          batch_size: Number of rows B, static.

        Returns:
          A `Draw` of the sampler's state, the rows, int32[B], and their probabilities, float32[B].

        Raises:
          NotImplementedError: The subclass does not implement this.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a sampler must implement "
            "sample(state, sampleable, key, batch_size)"
        )

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        """Return the probability with which one item of the next batch is each row.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.
          row: int32[...], in [0, N).

        Returns:
          float32[...], of the shape of `row`. The buffer ignores it for rows that are not
          sampleable.

        Raises:
          NotImplementedError: The subclass does not implement this.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a sampler must implement probability(state, sampleable, row)"
        )

    def mass(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return what a shard of a buffer is sampled in proportion to.

        A row's probability times this mass must not depend on any other row. A whole buffer then
        samples a shard in proportion to its mass, and the row as the shard alone would.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          float32[], 0 if no row can be sampled.

        Raises:
          NotImplementedError: The subclass does not implement this, so that its buffers cannot be
            sharded.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: for a sharded buffer, a sampler must implement "
            "mass(state, sampleable)"
        )

    def metrics(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the figures that the sampler adds to `buffer.metrics`.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          Scalars by name. By default {}.
        """
        del state, sampleable
        return {}

    def update(
        self, state: PyTree, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> PyTree:
        """Return the state with new priorities for sampled rows.

        Ignore invalid priorities, and indices that are not live, as `sampleable.live(index)` tells.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.
          index: `batch.index` of a sample, leaves [B], not checked. A row may occur more than once.
          priority: float32[B], the new priorities. They may be NaN, infinite or negative.

        Returns:
          The new state.

        Raises:
          NotImplementedError: The subclass does not implement this.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a sampler with priorities must implement "
            "update(state, sampleable, index, priority)"
        )

    def reset_max_priority(self, state: PyTree, sampleable: Sampleable) -> PyTree:
        """Return the state with the largest stored priority as that of new rows.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          The new state. By default `state`.
        """
        return state

    def can_add(self, state: PyTree, sampleable: Sampleable, num_rows: int) -> jax.Array:
        """Return whether more rows can be written without overwriting rows still to be consumed.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.
          num_rows: Number of rows to be written to each stream, static.

        Returns:
          bool[].

        Raises:
          NotImplementedError: The subclass does not implement this.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a sampler that consumes rows must implement "
            "can_add(state, sampleable, num_rows)"
        )


def _labels(kind: type) -> list[str]:
    """Return names of the classes that decide what a sampler's numbers mean, its own first."""
    return [
        "jaxreplay/" * (one.__module__.partition(".")[0] == "jaxreplay") + one.__name__
        for one in kind.__mro__
        if not {"init", "numbers"}.isdisjoint(vars(one))
    ]


def of_class(kind: type, numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the numbers of a class of samplers by their own names, or those of the nearest class
    that it derives from; {} if there are none. Of several samplers, the first one's.

    Args:
      kind: The class.
      numbers: Numbers by labels, "jaxreplay/Prioritized:mass", or those of a sampler's part,
        "priority.jaxreplay/Prioritized:mass".
    """
    heads = dict.fromkeys(label.partition(":")[0] for label in numbers)
    for label in _labels(kind):
        for head in heads:
            if head.rpartition(".")[2] == label:
                start = f"{head}:"
                own = (name for name in numbers if name.startswith(start))
                return {name.removeprefix(start): numbers[name] for name in own}
    return {}


def plus(count: jax.Array, more: jax.Array) -> jax.Array:
    """Return the sum of two counts, which stops at the largest number of their dtype."""
    return count + jnp.minimum(more, jnp.asarray(jnp.iinfo(count.dtype).max, count.dtype) - count)


def uniform_probability(total: jax.Array) -> jax.Array:
    """Return the probability of one of `total` equally probable rows, 0 if `total` is 0.

    float32[...], of the shape of `total`.
    """
    return jnp.where(total > 0, 1 / jnp.maximum(total, 1).astype(jnp.float32), 0)

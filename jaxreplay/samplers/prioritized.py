"""Proportional prioritized sampling: the probability of a row is priority ** alpha, divided by the
sum over all sampleable rows.

The mass of a row, here and in the sum tree, is its priority ** alpha.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.aliases import Key
from jaxreplay._util.struct import Node
from jaxreplay.samplers.sampler import SMALLEST, Draw, Sampler, plus
from jaxreplay.samplers.sum_tree import SumTree, SumTreeState
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.writes import WriteEffect
from jaxreplay.types import Index

_LARGEST_TOTAL = 2.0**120  # of all masses; the reciprocal of a larger total may be flushed to 0
_COUNTS = ("num_bad_priorities", "num_stale_updates")
_SCALARS = ("max_priority", *_COUNTS)


class PrioritizedState(Node):
    # priority ** alpha of each row, 0 for rows that are not sampleable; leaves are ordered by
    # position, then env
    tree: SumTreeState
    # float32[lookahead, E]: priority ** alpha of each stream's newest rows, the newest last; None
    # without a look-ahead
    pending_mass: jax.Array | None
    max_priority: jax.Array  # float32[]: the largest priority so far, at first 1
    # uint32[]: ignored priorities, which were NaN, infinite or negative; stays at its maximum
    num_bad_priorities: jax.Array
    # uint32[]: ignored updates of rows that were overwritten, out of range, or not sampleable;
    # stays at its maximum
    num_stale_updates: jax.Array


class Prioritized(Sampler):
    """Sample rows in proportion to priority ** alpha.

    With the priority p_i of each of the n sampleable rows, item b of B is row i with probability
    P(i) = p_i^alpha / sum_k p_k^alpha, and its weight is w_i = (n P(i))^-beta, divided by the
    largest weight of the batch (`jaxreplay.targets.importance_weights` divides by others). Its law
    is that of `oracle` in the example.

    A row with priority 0 is never sampled. The paper adds a constant to every priority; add it
    before the call. A row keeps the priority that it was added with until it becomes sampleable. By
    default that is the largest priority so far, or `new_priority`.

    Args:
      alpha: Exponent of priorities, at least 0. With 0, all rows of positive priority are equally
        probable. Default: 0.6.
      beta: Exponent of importance weights, at least 0: 0 corrects nothing, 1 corrects the bias of
        prioritized sampling fully. `buffer.sample(beta=...)` overrides it. Default: 0.4.
      stratified: Sample once from each of B equal parts of the total, as in the paper. Batches then
        come in the order of the rows' positions in their rings. False: B independent samples.
        Default: True.
      new_priority: Priority of rows that are added without one, at least 0. Default: the largest so
        far, by which one outlier rules until `reset_max_priority`.
      fan_out: Number of children of a node in the sum tree. Default: 0, which chooses 8 on a CPU,
        32 on a GPU and 128 on a TPU.

    Raises:
      ValueError: `alpha`, `beta` or `new_priority` is negative or not finite.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=4, batch_size=2, sampler=jr.Prioritized(alpha=1.0))
      >>> state = buffer.init(jnp.int32(0))
      >>> priority = jnp.array([[1.0], [2.0], [5.0]])
      >>> state = buffer.extend(state, jnp.array([[7], [8], [9]]), priority=priority)
      >>> print(buffer.get(state, jnp.arange(3)).probability)
      [0.125 0.25  0.625]
      >>> import numpy as np
      >>> def oracle(priority, alpha, beta, B, rng):
      ...     ends = np.cumsum(mass := priority**alpha)
      ...     place = (np.arange(B) + rng.random(B)) / B  # stratified
      ...     row = np.searchsorted(ends, place * ends[-1], side="right")
      ...     probability = mass[row] / ends[-1]
      ...     weight = (len(mass) * probability) ** -beta
      ...     return row, probability, weight / weight.max()
      >>> row, probability, _ = oracle(priority[:, 0], 1.0, 0.4, 4, np.random.default_rng(0))
      >>> print(row, probability)
      [1 1 2 2] [0.25  0.25  0.625 0.625]

    References:
      Schaul et al., "Prioritized Experience Replay" (2016), section 3.3, algorithm 1,
      https://arxiv.org/abs/1511.05952
    """

    alpha: float = 0.6
    beta: float = 0.4
    stratified: bool = True
    new_priority: float | None = None
    fan_out: int = 0
    counts = _COUNTS

    def _check(self) -> None:
        has_new = self.new_priority is not None
        for name in ("alpha", "beta", *["new_priority"] * has_new):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{type(self).__name__}: {name} must be a finite number of at least 0, got "
                    f"{getattr(self, name)}"
                )

    def window(self, window: Window) -> Window:
        if not window.is_bounded:
            raise ValueError(
                f"{type(self).__name__}: this view's window reaches to the end of the episode, so "
                "rows become sampleable by whole episodes, but priorities need a window of fixed "
                "length. Use sampler=jaxreplay.Uniform(), or a view with a fixed window: "
                "unfinished=True of jaxreplay.hindsight or FutureView, or "
                'jaxreplay.hindsight(..., strategy="random")'
            )
        return window

    def identity(self) -> "Prioritized":
        """Return the sampler without what only samples depend on."""
        return dataclasses.replace(self, beta=0.4, stratified=True, new_priority=None)

    def init(self, layout: Layout) -> PrioritizedState:
        """Return a state without priorities, whose largest priority is 1."""
        return PrioritizedState(
            tree=self._tree(layout).init(),
            pending_mass=jnp.zeros((layout.window.after, layout.num_envs), jnp.float32)
            if layout.window.after
            else None,
            max_priority=jnp.float32(1),
            num_bad_priorities=jnp.uint32(0),
            num_stale_updates=jnp.uint32(0),
        )

    def clear(self, state: PrioritizedState) -> PrioritizedState:
        """Return the state without priorities, and with 1 as the largest. The counts of ignored
        priorities and updates stay."""
        tree, pending_mass = jax.tree.map(jnp.zeros_like, (state.tree, state.pending_mass))
        return state.replace(
            tree=tree,
            pending_mass=pending_mass,
            max_priority=jnp.ones_like(state.max_priority),
        )

    def observe(
        self, state: PrioritizedState, effect: WriteEffect | None, priority: jax.Array | None
    ) -> PrioritizedState:
        """Give new rows their priority: the given one or, if missing or invalid, `new_priority` or
        the largest so far."""
        assert effect is not None
        state, given = _give(state, effect.is_written, priority, self.new_priority)
        mass = jnp.where(effect.is_candidate, self._mass(effect.layout, given), 0)
        if state.pending_mass is not None:
            lookahead, waiting = len(state.pending_mass), state.pending_mass
            envs = effect.layout.envs(effect.envs)
            if effect.envs is not None:
                waiting = waiting.at[:, envs].get(mode="fill")
            mass = jnp.concatenate([waiting, mass])
            # Each stream's newest rows keep waiting, ordered by age. Rows of earlier writes move up
            # by the number of rows written after them.
            is_row = jnp.concatenate([jnp.ones_like(waiting, bool), effect.is_written])
            age = effect.age[: len(is_row)]
            place = jnp.where(is_row & (age < lookahead), lookahead - 1 - age, lookahead)
            env = jnp.broadcast_to(envs, place.shape)
            state = state.replace(
                pending_mass=state.pending_mass.at[place, env].set(
                    mass, mode="drop", unique_indices=True
                )
            )
        return state.replace(tree=self._write(state.tree, effect, mass))

    def numbers(self, state: PrioritizedState, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the mass of each row, with the exponent `alpha`, and the other numbers."""
        layout, row = sampleable.layout, ring.arange(sampleable.layout.capacity)
        by_position = state.tree.sums[0][: layout.capacity].reshape(layout.length, layout.num_envs)
        mass = jnp.where(sampleable.contains(row), by_position.T.reshape(-1), jnp.nan)
        if state.pending_mass is not None:
            env, _ = layout.split(row)
            lookahead, age = len(state.pending_mass), sampleable.age(row)
            is_pending = (age < sampleable.num_pending[env]) & sampleable.is_candidate(row)
            pending = state.pending_mass[lookahead - 1 - jnp.minimum(age, lookahead - 1), env]
            mass = jnp.where(is_pending, pending, mass)
        scalars = {name: getattr(state, name) for name in _SCALARS}
        return {"mass": mass, "alpha": jnp.float32(self.alpha), **scalars}

    def from_numbers(
        self, sampleable: Sampleable, numbers: dict[str, jax.Array]
    ) -> PrioritizedState:
        """Return the state with the priorities of rows that have one, and the largest so far for
        the others."""
        layout, row = sampleable.layout, ring.arange(sampleable.layout.capacity)
        fresh = self.init(layout)
        fresh = fresh.replace(**{name: numbers[name] for name in _SCALARS if name in numbers})
        new = fresh.max_priority if self.new_priority is None else jnp.float32(self.new_priority)
        largest = self._mass(layout, new)
        mass = jnp.full(row.shape, largest)
        if "mass" in numbers:
            known, alpha = numbers["mass"], numbers["alpha"]
            # With an exponent of 0, masses tell no priorities but those of 0.
            power = known ** (self.alpha / jnp.where(alpha > 0, alpha, 1))
            power = jnp.where(alpha > 0, power, largest)
            own = jnp.where(alpha == jnp.float32(self.alpha), known, power)
            own = jnp.clip(own, SMALLEST, _LARGEST_TOTAL / layout.capacity)
            mass = jnp.where(jnp.isnan(known), mass, jnp.where(known > 0, own, 0))
        in_tree = jnp.where(sampleable.contains(row), mass, 0)
        in_tree = in_tree.reshape(layout.num_envs, layout.length).T.reshape(-1)
        state = fresh.replace(tree=self._tree(layout).of(in_tree))
        if state.pending_mass is None:
            return state
        age = len(state.pending_mass) - 1 - ring.arange(len(state.pending_mass))[:, None]
        newest = layout.row(layout.envs(), layout.wrap(sampleable.state.head - 1 - age))
        waits = (age < sampleable.state.filled) & sampleable.is_candidate(newest)
        return state.replace(pending_mass=jnp.where(waits, mass[newest], 0))

    def _write(self, tree: SumTreeState, effect: WriteEffect, mass: jax.Array) -> SumTreeState:
        """Write the masses that an effect changes into the tree.

        Rows that became sampleable get their mass. Other written rows, and rows whose look-back is
        overwritten, get 0. Rows that keep waiting, or stay sampleable, keep theirs.

        Args:
          tree: The tree.
          effect: The effect of the write.
          mass: float32[V, E], masses of the first V rows of `effect.row`, at most all of them.
        """
        mass = jnp.pad(mass, ((0, effect.row.shape[0] - mass.shape[0]), (0, 0)))
        mass = jnp.where(effect.became_sampleable, mass, 0)
        changed = effect.became_sampleable | effect.is_gone
        layout = effect.layout
        if effect.start.ndim == 0:
            return self._tree(layout).set_range(
                tree, effect.start * layout.num_envs, mass.reshape(-1), changed.reshape(-1)
            )
        leaf = jnp.where(changed, _leaf_of(layout, effect.row), layout.capacity)
        return self._tree(layout).set(tree, leaf.reshape(-1), mass.reshape(-1), are_distinct=True)

    def sample(
        self, state: PrioritizedState, sampleable: Sampleable, key: Key, batch_size: int
    ) -> Draw:
        layout, tree = sampleable.layout, self._tree(sampleable.layout)
        high, low = random.words(key, batch_size)
        target = random.fraction(high)
        if self.stratified:
            target = (ring.arange(batch_size).astype(jnp.float32) + target) / batch_size
        leaf, mass = tree.find(state.tree, target, low)
        time, env = ring.divide(leaf, layout.num_envs)
        return Draw(state, layout.row(env, time), _normalized(mass, tree.total(state.tree)))

    def probability(
        self, state: PrioritizedState, sampleable: Sampleable, row: jax.Array
    ) -> jax.Array:
        tree = self._tree(sampleable.layout)
        return _normalized(
            tree.get(state.tree, _leaf_of(sampleable.layout, row)), tree.total(state.tree)
        )

    def mass(self, state: PrioritizedState, sampleable: Sampleable) -> jax.Array:
        """Return the sum of priority ** alpha."""
        return self._tree(sampleable.layout).total(state.tree)

    def metrics(self, state: PrioritizedState, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the largest and the mean priority, and the counts of what was ignored.

        The mean is `(mean of priority ** alpha) ** (1 / alpha)`. With alpha 0 it is left out.
        """
        metrics = {name: getattr(state, name) for name in _SCALARS}
        if self.alpha:  # with alpha 0, the tree has only 0 and 1
            total = self._tree(sampleable.layout).total(state.tree)
            mean = total / jnp.maximum(self.size(state, sampleable), 1)
            metrics["mean_priority"] = mean ** (1 / self.alpha)
        return metrics

    def update(
        self, state: PrioritizedState, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> PrioritizedState:
        """Set the priorities of sampled rows.

        Rows that are out of range, overwritten since, or not sampleable are ignored and counted. So
        are priorities that are NaN, infinite or negative: the row keeps its own. If a row appears
        more than once, its largest priority counts.
        """
        layout, (row, is_live) = sampleable.layout, sampleable.live(index)
        is_good = is_good_priority(priority)
        accepted = is_live & is_good
        priority = jnp.where(accepted, priority, 0)
        leaf = jnp.where(accepted, _leaf_of(layout, row), layout.capacity)
        return state.replace(
            tree=self._tree(layout).set(state.tree, leaf, self._mass(layout, priority)),
            max_priority=jnp.maximum(state.max_priority, jnp.max(priority, initial=0)),
            num_stale_updates=plus(state.num_stale_updates, (~is_live).sum(dtype=jnp.uint32)),
            num_bad_priorities=plus(
                state.num_bad_priorities, (is_live & ~is_good).sum(dtype=jnp.uint32)
            ),
        )

    def reset_max_priority(self, state: PrioritizedState, sampleable: Sampleable) -> Any:
        """Lower the largest priority so far to that of a row that is stored, or to 1 if none has a
        positive one, or `alpha` is 0."""
        mass = jnp.nanmax(self.numbers(state, sampleable)["mass"], initial=0)
        known = jnp.clip(mass ** (1 / (self.alpha or 1)), SMALLEST, state.max_priority)
        return state.replace(max_priority=jnp.where((mass > 0) & (self.alpha > 0), known, 1))

    def _tree(self, layout: Layout) -> SumTree:
        return SumTree.on(layout.traits, layout.capacity, self.fan_out)

    def _mass(self, layout: Layout, priority: jax.Array) -> jax.Array:
        """Return priority ** alpha, 0 for 0, clipped so that positive values stay positive and the
        sum over all rows stays finite: float32[...].

        Args:
          priority: float32[...], as `is_good_priority` is True for.
        """
        mass = jnp.clip(
            jnp.maximum(priority, SMALLEST) ** self.alpha,
            SMALLEST,
            _LARGEST_TOTAL / layout.capacity,
        )
        # Test the bits: a processor that flushes subnormal numbers compares them as 0.
        is_positive = jax.lax.bitcast_convert_type(priority, jnp.int32) > 0
        return jnp.where(is_positive, mass, 0)


def _normalized(mass: jax.Array, total: jax.Array) -> jax.Array:
    """Return the probability of each mass, positive for positive ones: float32[...]."""
    probability = jnp.maximum(mass / jnp.where(total > 0, total, 1), SMALLEST)
    return jnp.where((total > 0) & (mass > 0), probability, 0)


def _leaf_of(layout: Layout, row: jax.Array) -> jax.Array:
    """Return the leaf of each row: int32[...]; the capacity for rows from the capacity on.

    Leaves are ordered by position, then env, so that rows that all envs write together are one
    range of the tree.
    """
    env, position = layout.split(row)
    return jnp.where(row < layout.capacity, position * layout.num_envs + env, layout.capacity)


def _give(
    state: PrioritizedState, is_new: jax.Array, priority: jax.Array | None, new: float | None
) -> tuple[Any, jax.Array]:
    """Return the priorities of new rows: the given ones or, if missing or invalid, the largest so
    far, or `new`.

    Args:
      state: The sampler's state.
      is_new: bool[K, E], whether a row was written.
      priority: float32[K, E], the given priorities, or None.
      new: `Prioritized.new_priority`.

    Returns:
      The new state; float32[K, E], the priorities.
    """
    if priority is None:
        return state, jnp.broadcast_to(state.max_priority if new is None else new, is_new.shape)
    is_good = is_good_priority(priority)
    largest = jax.lax.cummax(
        jnp.max(jnp.where(is_new & is_good, priority, state.max_priority), axis=1)
    )
    largest = jnp.maximum(largest, state.max_priority)
    before = jnp.concatenate([state.max_priority[None], largest[:-1]])  # of each row's step
    state = state.replace(
        max_priority=largest[-1],
        num_bad_priorities=plus(
            state.num_bad_priorities, (is_new & ~is_good).sum(dtype=jnp.uint32)
        ),
    )
    return state, jnp.where(is_good, priority, before[:, None] if new is None else new)


def is_good_priority(priority: jax.Array) -> jax.Array:
    """Return whether each priority is finite and at least 0: bool[...]."""
    return jnp.isfinite(priority) & (priority >= 0)

"""Rank-based prioritized sampling: a row is drawn by the rank of its priority, so that a few huge errors cannot take over the batch.

Source: Schaul et al., "Prioritized Experience Replay" (2016), section 3.3, the second variant. Where we differ: draws are exact in
proportion to rank ** -exponent, where the paper cuts that law into segments of about equal probability; and ranks change only in
`rerank`, where the paper keeps them roughly up to date in a heap that it sorts from time to time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import ring
from jaxreplay.drawable import Change, Drawable
from jaxreplay.layout import Layout
from jaxreplay.samplers.priorities import SMALLEST, accept, check_window, give, is_positive, leaf_of
from jaxreplay.samplers.prioritized import Prioritized, PrioritizedState
from jaxreplay.samplers.sampler import RankedSampler
from jaxreplay.sum_tree import SumTree
from jaxreplay.types import Index
from jaxreplay.window import Window


class RankBasedState(PrioritizedState):
    """The masses in the tree are those of the ranks, or 1 for a row that became drawable since these were taken."""

    priority: jax.Array  # float32[N], in the order of the leaves: each row's own, which gives it its rank in the next `rerank`


class RankBased(RankedSampler):
    """Rows in proportion to rank ** -exponent, where rank 1 has the largest priority.

    Ranks are as of the last `rerank`. A priority that is updated is only recorded, 0 as well, and acts with the next one. A row that
    becomes drawable meanwhile is drawn as rank 1 is, unless it was added with priority 0. In a `rerank`, rows of equal priority rank by
    their row numbers, and rows of priority 0 have no rank: they are not drawn until a later one.

    Args:
      exponent: alpha, at least 0: 0 is uniform over the rows of positive priority.
      stratified: as for `Prioritized`.
      keep_minimum: keep what `min_probability` needs.
      fan_out: children of a tree node; 0 chooses for the state's platform.
    """

    exponent: float = 0.7
    stratified: bool = True
    keep_minimum: bool = False
    fan_out: int = 0

    def _check(self) -> None:
        if not 0 <= self.exponent < float("inf"):
            raise ValueError(f"RankBased: exponent must be a finite number of at least 0, got {self.exponent}")

    @property
    def _by_mass(self) -> Prioritized:
        """What draws from the tree. Its exponent of 0 gives each new row of positive priority a mass of 1."""
        return Prioritized(exponent=0.0, stratified=self.stratified, keep_minimum=self.keep_minimum, fan_out=self.fan_out)

    def window(self, window: Window) -> Window:
        return check_window("RankBased", window)

    def init(self, layout: Layout) -> RankBasedState:
        return RankBasedState(**vars(self._by_mass.init(layout)), priority=jnp.zeros((layout.capacity,), jnp.float32))

    def clear(self, state: RankBasedState) -> PrioritizedState:
        """No mass, and 1 for the largest priority. The recorded ones stay, unread: each is written anew before its row is drawable."""
        return self._by_mass.clear(state)

    def observe(self, state: RankBasedState, change: Change | None, priority: jax.Array | None) -> PrioritizedState:
        assert change is not None
        lookahead = 0 if state.waiting is None else len(state.waiting)
        state, given = give(state, change.is_written, priority)
        leaf = leaf_of(change.layout, change.row[lookahead:][: len(given)])
        recorded = state.priority.at[leaf].set(_recordable(given), mode="drop", unique_indices=True)
        return self._by_mass.observe(state.replace(priority=recorded), change, given)

    def parted(self, state: RankBasedState) -> tuple[Any, dict[str, Any]]:
        rest, by_place = self._by_mass.parted(state)
        return rest.replace(priority=None), {**by_place, "priority": state.priority}

    def resized(self, before: Layout, after: Layout, state: RankBasedState) -> PrioritizedState:
        priority = jnp.zeros((after.capacity,), jnp.float32)
        return self._by_mass.resized(before, after, state).replace(priority=priority)

    def moved(self, state: RankBasedState, drawable: Drawable, name: str, row: jax.Array, values: jax.Array) -> PrioritizedState:
        """Each row keeps its priority, and the rank that it has until the next `rerank`."""
        if name != "priority":
            return self._by_mass.moved(state, drawable, name, row, values)
        leaf = leaf_of(drawable.layout, row)
        return state.replace(priority=state.priority.at[leaf].set(values, mode="drop", unique_indices=True))

    def can_draw(self, state: RankBasedState) -> jax.Array:
        return self._by_mass.can_draw(state)

    def draw(
        self, state: RankBasedState, drawable: Drawable, key: jax.Array, batch_size: int
    ) -> tuple[PrioritizedState, jax.Array, jax.Array]:
        return self._by_mass.draw(state, drawable, key, batch_size)

    def probability(self, state: RankBasedState, drawable: Drawable, row: jax.Array) -> jax.Array:
        """As of the ranks that are drawn from: float32[B]."""
        return self._by_mass.probability(state, drawable, row)

    def min_probability(self, layout: Layout, state: RankBasedState) -> jax.Array:
        """The smallest probability of a row that can be drawn: float32[]; 1 where there is none."""
        if not self.keep_minimum:
            raise ValueError("min_probability: this buffer keeps no minimum; make its sampler with RankBased(keep_minimum=True)")
        return self._by_mass.min_probability(layout, state)

    def update(self, state: RankBasedState, drawable: Drawable, index: Index, priority: jax.Array) -> RankBasedState:
        """Record new priorities, float32[B], for the rows drawn as `index`; what is bad or stale is ignored as by `Prioritized`, and of
        several priorities for one row the largest wins."""
        state, leaf, priority = accept(state, drawable, index, priority)
        recorded = state.priority.at[leaf].set(0, mode="drop").at[leaf].max(_recordable(priority), mode="drop")
        return state.replace(priority=recorded)

    def rerank(self, state: RankBasedState, drawable: Drawable) -> RankBasedState:
        """Rank all drawable rows by their priorities: O(n log n), and the one operation that makes arrays of one number a row.

        In a compiled loop, `jax.lax.cond(is_time, replay.rerank, lambda state: state, state)` leaves the stored steps in place.
        """
        layout = drawable.layout
        row = layout.row(layout.envs(), ring.places(layout.length)[:, None]).reshape(-1)  # of each leaf
        is_ranked = drawable.contains(row) & (state.priority > 0)
        _, row = jax.lax.sort((jnp.where(is_ranked, -state.priority, jnp.inf), row), num_keys=2)
        rank = ring.places(layout.capacity) + 1
        mass = jnp.maximum(rank.astype(jnp.float32) ** -self.exponent, SMALLEST)
        mass = jnp.where(rank <= is_ranked.sum(dtype=jnp.int32), mass, 0)
        by_leaf = jnp.zeros_like(mass).at[leaf_of(layout, row)].set(mass, unique_indices=True, mode="promise_in_bounds")
        tree = SumTree.on(layout.platform, layout.capacity, self.fan_out, has_minimum=self.keep_minimum)
        return state.replace(tree=tree.set_range(state.tree, jnp.int32(0), by_leaf, jnp.ones_like(is_ranked)))


def _recordable(priority: jax.Array) -> jax.Array:
    """A positive priority as one that stays positive in comparisons, which may take a subnormal number for 0."""
    return jnp.where(is_positive(priority), jnp.maximum(priority, SMALLEST), 0)

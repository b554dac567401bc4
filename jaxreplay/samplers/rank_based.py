"""Rank-based prioritized sampling: a row is drawn by the rank of its priority, so that a few huge
errors cannot take over the batch.

Source: Schaul et al., "Prioritized Experience Replay" (2016), section 3.3, the second variant.
Where we differ: draws are exact in proportion to rank ** -alpha, where the paper cuts that law into
segments of about equal probability; and ranks change only in `rerank`, where the paper keeps them
roughly up to date in a heap that it sorts from time to time.
"""

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import PyTree
from jaxreplay.samplers.prioritized import (
    SMALLEST,
    Prioritized,
    PrioritizedState,
    accept,
    give,
    is_positive,
    leaf_of,
)
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import Sampleable, WriteEffect
from jaxreplay.types import Index


class RankBasedState(PrioritizedState):
    """The masses in the tree are those of the ranks, or 1 for a row that became sampleable since
    these were taken."""

    # float32[N], in the order of the leaves: each row's own, which gives it its rank in the next
    # `rerank`
    priority: jax.Array


class RankBased(Prioritized):
    """Rows in proportion to rank ** -alpha, where rank 1 has the largest priority.

    Ranks are as of the last `rerank`. A priority that is updated is only recorded, 0 as well, and
    acts with the next one. A row that becomes sampleable meanwhile is drawn as rank 1 is, unless it
    was added with priority 0. In a `rerank`, rows of equal priority rank by their row numbers, and
    rows of priority 0 have no rank: they are not drawn until a later one.

    Args:
      alpha: at least 0: 0 is uniform over the rows of positive priority.
      beta, normalize_weights, stratified, fan_out: as for `Prioritized`.
    """

    alpha: float = 0.7
    beta: float = 0.5
    PER_ROW = ("tree", "priority")

    def init(self, layout: Layout) -> RankBasedState:
        return RankBasedState(
            **vars(super().init(layout)), priority=jnp.zeros((layout.capacity,), jnp.float32)
        )

    def observe(
        self, state: PyTree, effect: WriteEffect | None, priority: jax.Array | None
    ) -> PrioritizedState:
        assert effect is not None
        lookahead = 0 if state.pending_mass is None else len(state.pending_mass)
        state, given = give(state, effect.is_written, priority)
        leaf = leaf_of(effect.layout, effect.row[lookahead:][: len(given)])
        recorded = state.priority.at[leaf].set(_recordable(given), mode="drop", unique_indices=True)
        return super().observe(state.replace(priority=recorded), effect, given)

    def per_row(self, state: PyTree) -> dict[str, jax.Array]:
        return {**super().per_row(state), "priority": state.priority}

    def put_per_row(
        self, state: PyTree, sampleable: Sampleable, name: str, row: jax.Array, values: jax.Array
    ) -> PrioritizedState:
        """Each row keeps its priority, and the rank that it has until the next `rerank`."""
        if name != "priority":
            return super().put_per_row(state, sampleable, name, row, values)
        leaf = leaf_of(sampleable.layout, row)
        return state.replace(
            priority=state.priority.at[leaf].set(values, mode="drop", unique_indices=True)
        )

    def update(
        self, state: PyTree, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> RankBasedState:
        """Record new priorities, float32[B], for the rows drawn as `index`; what is bad or stale is
        ignored as by `Prioritized`, and of several priorities for one row the largest wins."""
        state, leaf, priority = accept(state, sampleable, index, priority)
        recorded = (
            state.priority.at[leaf]
            .set(0, mode="drop")
            .at[leaf]
            .max(_recordable(priority), mode="drop")
        )
        return state.replace(priority=recorded)

    def rerank(self, state: PyTree, sampleable: Sampleable) -> RankBasedState:
        """Rank all sampleable rows by their priorities: O(n log n), and the one operation that
        makes arrays of one number a row.

        In a compiled loop, `jax.lax.cond(is_time, buffer.rerank, lambda state: state, state)`
        leaves the stored steps in place.
        """
        layout = sampleable.layout
        # of each leaf
        row = layout.row(layout.envs(), ring.arange(layout.length)[:, None]).reshape(-1)
        is_ranked = sampleable.contains(row) & (state.priority > 0)
        _, row = jax.lax.sort((jnp.where(is_ranked, -state.priority, jnp.inf), row), num_keys=2)
        rank = ring.arange(layout.capacity) + 1
        mass = jnp.maximum(rank.astype(jnp.float32) ** -self.alpha, SMALLEST)
        mass = jnp.where(rank <= is_ranked.sum(dtype=jnp.int32), mass, 0)
        by_leaf = (
            jnp.zeros_like(mass)
            .at[leaf_of(layout, row)]
            .set(mass, unique_indices=True, mode="promise_in_bounds")
        )
        tree = self._tree(layout).set_range(
            state.tree, jnp.int32(0), by_leaf, jnp.ones_like(is_ranked)
        )
        return state.replace(tree=tree)

    def metrics(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return those of `Prioritized`, but no mean: the tree holds ranks."""
        metrics = super().metrics(state, sampleable)
        metrics.pop("mean_priority", None)
        return metrics

    def _mass(self, layout: Layout, priority: jax.Array) -> jax.Array:
        """Return 1 for a row of positive priority, else 0: float32[...]."""
        return is_positive(priority).astype(jnp.float32)


def _recordable(priority: jax.Array) -> jax.Array:
    """A positive priority as one that stays positive in comparisons, which may take a subnormal
    number for 0."""
    return jnp.where(is_positive(priority), jnp.maximum(priority, SMALLEST), 0)

"""Rank-based prioritized sampling: the rank of a row's priority decides its probability, so that a
few huge errors cannot dominate the batch."""

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
from jaxreplay.samplers.sampler import Sampler
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout
from jaxreplay.storage.sampleable import Sampleable, WriteEffect
from jaxreplay.types import Index


class RankBasedState(PrioritizedState):
    """State whose tree has rank ** -alpha of each row, or 1 for rows that became sampleable since
    the last `rerank`."""

    # float32[N], in the order of the leaves: each row's priority, which decides its rank in the
    # next `rerank`
    priority: jax.Array


class RankBased(Prioritized):
    """Sample rows in proportion to rank ** -alpha, where rank 1 has the largest priority.

    Ranks change only in `buffer.rerank`. Until then, updated priorities are recorded without
    effect, 0 included. A row that becomes sampleable meanwhile is sampled like rank 1, unless it
    was added with priority 0. `rerank` orders rows of equal priority by row number. Rows of
    priority 0 get no rank, and are not sampled until a later `rerank` finds a positive priority.

    The distribution is exact, where the paper cuts it into segments of about equal probability. The
    paper keeps ranks roughly up to date in a heap, which it sorts from time to time.

    Args:
      alpha: Exponent of ranks, at least 0. With 0, all rows of positive priority are equally
        probable. Default: 0.7.
      beta: Exponent of importance weights, at least 0: 0 corrects nothing, 1 corrects the bias of
        prioritized sampling fully. `buffer.sample(beta=...)` overrides it. Default: 0.5.
      normalize_weights: "batch" divides weights by the largest of the batch. "buffer" divides them
        by the largest that any row of the buffer could have, as the paper does. It keeps a second
        tree, which takes about as long to update as the first. None leaves weights as
        `(size * probability) ** -beta`. Default: "batch".
      stratified: Sample once from each of B equal parts of the total, as in the paper. Batches then
        come in the order of the rows' positions in their rings. False: B independent samples.
        Default: True.
      fan_out: Number of children of a node in the sum tree. Default: 0, which chooses 8 on a CPU,
        32 on a GPU and 128 on a TPU.

    Raises:
      ValueError: `alpha` or `beta` is negative or not finite, or `normalize_weights` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> buffer = jr.items(capacity=4, batch_size=2, sampler=jr.RankBased(alpha=1.0))
      >>> state = buffer.init(jnp.int32(0))
      >>> priority = jnp.array([[0.5], [1000.0]])
      >>> state = buffer.extend(state, jnp.array([[7], [8]]), priority=priority)
      >>> state = buffer.rerank(state)
      >>> print(buffer.get(state, jnp.arange(2)).probability * 3)  # 1/2 and 1/1, over their sum
      [1. 2.]

    References:
      Schaul et al., "Prioritized Experience Replay" (2016), section 3.3, the second variant.
    """

    alpha: float = 0.7
    beta: float = 0.5
    PER_ROW = ("tree", "priority")
    mass = Sampler.mass  # not implemented: a rank is among the rows of the whole buffer

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
        """Write priorities of rows, or the masses of their ranks."""
        if name != "priority":
            return super().put_per_row(state, sampleable, name, row, values)
        leaf = leaf_of(sampleable.layout, row)
        return state.replace(
            priority=state.priority.at[leaf].set(values, mode="drop", unique_indices=True)
        )

    def update(
        self, state: PyTree, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> RankBasedState:
        """Record priorities of sampled rows for the next `rerank`.

        Stale indices and invalid priorities are ignored and counted. If a row appears more than
        once, its largest priority counts.
        """
        state, leaf, priority = accept(state, sampleable, index, priority)
        recorded = (
            state.priority.at[leaf]
            .set(0, mode="drop")
            .at[leaf]
            .max(_recordable(priority), mode="drop")
        )
        return state.replace(priority=recorded)

    def rerank(self, state: PyTree, sampleable: Sampleable) -> RankBasedState:
        """Rank all sampleable rows by their priorities.

        It sorts the N rows in O(N log N), and is the only operation of a sampler that allocates
        arrays [N]. In a compiled loop,
        `jax.lax.cond(is_time, buffer.rerank, lambda state: state, state)` does not copy the stored
        steps.

        Args:
          state: The sampler's state.
          sampleable: The sampleable rows.

        Returns:
          The new state.
        """
        layout = sampleable.layout
        # the row of each leaf
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
        """Return the metrics of `Prioritized` without `mean_priority`: the tree holds ranks."""
        metrics = super().metrics(state, sampleable)
        metrics.pop("mean_priority", None)
        return metrics

    def _mass(self, layout: Layout, priority: jax.Array) -> jax.Array:
        """Return 1 for each positive priority, else 0: float32[...]."""
        return is_positive(priority).astype(jnp.float32)


def _recordable(priority: jax.Array) -> jax.Array:
    """Return priorities whose positive values compare as positive, where a subnormal number may
    compare as 0: float32[...]."""
    return jnp.where(is_positive(priority), jnp.maximum(priority, SMALLEST), 0)

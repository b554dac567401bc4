"""Rank-based sampling: ranks of the last rerank, and the effects of hostile input."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers.rank_based import RankBased
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView
from tests.conftest import SOAK
from tests.storage.test_oracle_streams import PRIORITIES, Pair
from tests.support.hlo import large_temporaries
from tests.support.sampling import (
    add,
    check_all_in_place,
    check_jit_and_vmap,
    clear,
    fed,
    make_buffer,
    probability_of_all,
    sample,
    step_of,
)
from tests.views.test_views import Config

NAN, INF = float("nan"), float("inf")
update, rerank, get = (
    jax.jit(getattr(ReplayBuffer, name)) for name in ("update_priorities", "rerank", "get")
)


class RankPair(Pair):
    """A buffer, an oracle, and rank ** -alpha of each ranked row."""

    def __init__(self, config):
        super().__init__(config)
        self.first, self.ranked, self.kept = {}, {}, []

    def add(self, codes, priority):
        super().add(codes, priority)
        self._note()

    def extend(self, block):
        super().extend(block)
        self._note()

    def _note(self):
        for rows in self.oracle.streams:
            for row in rows:
                self.first.setdefault(id(row), row.priority)
                # Rows are identified by their ids, and Python reuses the id of a deleted row: a new
                # row would have its rank.
                self.kept.append(row)

    def rerank(self):
        sampleable = self.oracle.sampleable()
        ranked = sorted(
            (-row.priority, number) for number, (row, _) in sampleable.items() if row.priority > 0
        )
        self.ranked |= {id(row): 0.0 for row, _ in sampleable.values()}
        for rank, (_, number) in enumerate(ranked, start=1):
            self.ranked[id(sampleable[number][0])] = rank**-self.config.sampler.alpha
        self.state = rerank(self.config.replay, self.state)

    def mass(self):
        """Return row number -> rank ** -alpha, or 0 for priority 0. A row that became sampleable
        after the last rerank has rank 1."""
        return {
            number: self.ranked.get(id(row), 1.0 if self.first[id(row)] > 0 else 0.0)
            for number, (row, _) in self.oracle.sampleable().items()
        }

    def draw(self, seed):
        sampleable = self.oracle.sampleable()
        batch = sample(self.config.replay, self.state, jax.random.key(seed), 64)
        rows = [
            sampleable[int(row)][0] if ok else None
            for row, ok in zip(batch.index.row, batch.is_valid, strict=True)
        ]
        self.drawn.append((batch.index, rows))
        return batch

    def update(self, which, priorities):
        """Update priorities of the rows of an earlier sample, which may be overwritten by now."""
        if self.drawn:
            index, rows = self.drawn[which % len(self.drawn)]
            priorities = list(itertools.islice(itertools.cycle(priorities), 64))
            self.oracle.update(rows, priorities)
            self.state = update(
                self.config.replay, self.state, index, jnp.asarray(priorities, jnp.float32)
            )

    def check(self):
        mass = self.mass()
        total = sum(mass.values())
        got = np.asarray(probability_of_all(self.config.replay, self.state))
        np.testing.assert_allclose(
            [got[row] for row in mass],
            [m / total if total else 0 for m in mass.values()],
            rtol=1e-5,
        )
        batch = self.draw(self.clock)
        assert np.asarray(batch.is_valid).tolist() == [total > 0] * 64
        assert not total or {mass[int(row)] > 0 for row in batch.index.row} == {True}
        np.testing.assert_allclose(
            batch.probability, got[np.asarray(batch.index.row)] * (total > 0), rtol=1e-6
        )
        sampler = self.state.sampler
        assert float(sampler.max_priority) == np.float32(self.oracle.max_priority)
        assert int(sampler.num_bad_priorities) == self.oracle.num_bad_priorities
        assert int(sampler.num_stale_updates) == self.oracle.num_stale_updates
        if total:
            drawn = np.asarray(batch.probability)
            reference = {
                "batch": drawn.min(),
                "buffer": min(m / total for m in mass.values() if m),
                None: 1 / len(mass),
            }[self.config.sampler.normalize_weights]
            np.testing.assert_allclose(batch.weight, (reference / drawn) ** 0.5, rtol=1e-5)


POOL = (
    Config(
        "next_step",
        True,
        6,
        TransitionView(n_step=3, gamma=0.5),
        RankBased(stratified=False, normalize_weights="buffer"),
        num_envs=3,
    ),
    Config("same_step", False, 6, TransitionView(gamma=0.5), RankBased(alpha=1.0)),
    Config(
        "same_step_no_final_obs",
        False,
        8,
        TransitionView(n_step=2, gamma=0.5),
        RankBased(alpha=0.5, normalize_weights=None),
        num_envs=2,
    ),
    Config(
        "same_step_no_final_obs",
        False,
        7,
        TransitionView(n_step=3, gamma=0.5),
        RankBased(alpha=1.5),
        num_envs=2,
    ),
)


@st.composite
def histories(draw):
    config = draw(st.sampled_from(POOL))
    codes = st.lists(
        st.sampled_from((0, 0, 0, 0, 0, 1, 2, 4)),
        min_size=config.num_envs,
        max_size=config.num_envs,
    )
    priorities = st.lists(
        st.sampled_from(PRIORITIES), min_size=config.num_envs, max_size=config.num_envs
    )
    adds = st.tuples(st.just("add"), codes, priorities)
    blocks = st.tuples(
        st.just("extend"), st.lists(codes, min_size=1, max_size=2).map(lambda block: block * 3)
    )
    updates = st.tuples(
        st.just("update"),
        st.integers(0, 7),
        st.lists(st.sampled_from(PRIORITIES), min_size=1, max_size=5),
    )
    rest = [st.tuples(st.just(name)) for name in ("check", "check", "rerank")]
    history = draw(
        st.lists(
            st.one_of(adds, adds, adds, blocks, updates, *rest),
            min_size=2 * config.length,
            max_size=5 * config.length,
        )
    )
    if draw(st.integers(0, 3)) == 0:
        history.insert(len(history) // 2, ("clear",))
    return config, history


@hypothesis.settings(max_examples=400 if SOAK else 16)
@hypothesis.given(histories())
def test_ranks_agree_with_the_oracle(case):
    config, history = case
    pair = RankPair(config)
    for kind, *arguments in history:
        getattr(pair, kind)(*arguments)
    pair.check()
    pair.rerank()
    pair.check()


WRITES = {
    "nothing": [],
    "an add": [("add", 0)],
    "a masked add": [("add", 1)],
    "a termination": [("add", 2)],
    "a truncation": [("add", 4)],
    "a priority of 0": [("add", 0, 0.0)],
    "a bad priority": [("add", 0, NAN)],
    "a block": [("extend", [0, 0, 2])],
    "a block longer than the ring": [("extend", [0, 2, 0, 0, 4, 0, 0, 0, 2, 0, 0])],
    "a wrap": [("add", 0)] * 9,
    "an update": [("update", 0, [5.0, 0.0])],
    "an update of rows overwritten since": [("add", 0)] * 8 + [("update", 0, [5.0])],
    "a clear": [("clear",)],
    "a clear, and as many rows as before": [("clear",), *[("add", 0)] * 7],
}


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("config", POOL, ids=range(len(POOL)))
def test_the_law_of_ranks_holds_after_each_kind_of_write_between_two_reranks(config, writes):
    """Ranked rows keep their rank, new rows have rank 1, and removed rows leave nothing behind."""
    envs = config.num_envs
    pair = RankPair(config)
    for t in range(7):
        pair.add([0 if t != 3 else 2] * envs, [float(1 + (3 * t + env) % 5) for env in range(envs)])
    pair.check()
    pair.rerank()
    pair.check()
    for kind, *arguments in WRITES[writes]:
        if kind == "add":
            code, priority = (*arguments, None)[:2]
            pair.add([code] * envs, None if priority is None else [priority] * envs)
        elif kind == "extend":
            pair.extend([[code] * envs for code in arguments[0]])
        else:
            getattr(pair, kind)(*arguments)
        pair.check()
    pair.rerank()
    pair.check()


def ranked(priorities, **config):
    """Return a buffer and a state; each stream has one ranked row, with its priority, and a
    waiting row."""
    buffer, state = make_buffer(
        RankBased(**{"alpha": 1.0, "stratified": False, **config}),
        num_envs=len(priorities),
        length=4,
    )
    state = add(buffer, state, step_of(priorities), None, jnp.asarray(priorities, jnp.float32))
    return buffer, rerank(buffer, add(buffer, state, step_of(priorities)))


def shares(buffer, state):
    return np.asarray(probability_of_all(buffer, state))[:: buffer.capacity // buffer.num_envs]


def index_of(buffer, state, streams):
    return get(buffer, state, jnp.array(streams, jnp.int32) * 4).index


def normalized(mass):
    return np.array(mass) / np.sum(mass)


def test_draws_follow_the_law():
    """Chi-square of independent draws; the fixed key fails by chance once in 10^4."""
    r = np.random.default_rng(0)
    priority = r.permutation(40) ** 3.0
    buffer, state = ranked(priority, alpha=0.7)
    rank = 40 - priority.argsort().argsort()
    expected = normalized(np.where(priority > 0, rank**-0.7, 0))
    batch = sample(buffer, state, jax.random.key(0), 300_000)
    counts = np.bincount(np.asarray(batch.index.row) // 4, minlength=40)
    assert counts[priority == 0] == 0
    assert stats.chisquare(counts[priority > 0], expected[priority > 0] * 300_000).pvalue > 1e-4
    np.testing.assert_allclose(
        batch.probability, expected[np.asarray(batch.index.row) // 4], rtol=1e-5
    )


def test_a_stratified_batch_has_one_draw_in_each_part_of_the_mass():
    buffer, state = ranked([2.0, 5.0, 1.0], stratified=True)
    share = shares(buffer, state)
    ends = np.cumsum(share)
    for seed in range(5):
        stream = np.asarray(sample(buffer, state, jax.random.key(seed), 64).index.row) // 4
        parts = np.arange(64) / 64
        assert (ends[stream] > parts - 1e-6).all()
        assert ((ends - share)[stream] < parts + 1 / 64 + 1e-6).all()


def test_only_the_order_of_priorities_counts():
    buffer, state = ranked([3.4e38, 1e-30, 0.5])
    np.testing.assert_allclose(shares(buffer, state), normalized([1, 1 / 3, 1 / 2]), rtol=1e-5)


def test_subnormal_priorities_are_positive_and_alike():
    buffer, state = ranked([1e-45, 0.0, 1e-40])
    np.testing.assert_allclose(shares(buffer, state), normalized([1, 0, 1 / 2]), rtol=1e-6)


def test_equal_priorities_rank_by_their_rows():
    buffer, state = ranked([2.0, 1.0, 2.0])
    np.testing.assert_allclose(shares(buffer, state), normalized([1, 1 / 3, 1 / 2]), rtol=1e-6)


def test_an_update_acts_at_the_next_rerank():
    buffer, state = ranked([1.0, 2.0, 3.0])
    before = shares(buffer, state)
    state = update(buffer, state, index_of(buffer, state, [0, 2]), jnp.array([9.0, 0.0]))
    np.testing.assert_array_equal(shares(buffer, state), before)
    np.testing.assert_allclose(
        shares(buffer, rerank(buffer, state)), normalized([1, 1 / 2, 0]), rtol=1e-6
    )


def test_a_new_row_is_drawn_as_the_first_rank_is_unless_its_priority_is_0():
    buffer, state = ranked([1.0, 2.0, 3.0])
    # This add makes the waiting rows sampleable.
    state = add(buffer, state, step_of([0.0] * 3), None, jnp.array([0.1, 0.0, 5.0]))
    state = add(buffer, state, step_of([0.0] * 3))
    mass = np.zeros((3, 4))
    mass[:, 0], mass[:, 1], mass[:, 2] = [1 / 3, 1 / 2, 1], 1, [1, 0, 1]
    np.testing.assert_allclose(
        probability_of_all(buffer, state), normalized(mass).ravel(), rtol=1e-6
    )


def test_all_zero_cannot_be_sampled_until_a_rerank_with_more():
    buffer, state = ranked([0.0, 0.0, 0.0])
    assert not buffer.can_sample(state)
    assert not sample(buffer, state, jax.random.key(0), 4).is_valid.any()
    state = update(buffer, state, index_of(buffer, state, [1]), jnp.array([0.5]))
    assert not buffer.can_sample(state)
    assert sample(buffer, rerank(buffer, state), jax.random.key(0), 4).index.row.tolist() == [4] * 4


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -1.0])
def test_a_bad_priority_keeps_the_old_one_and_is_counted(bad):
    buffer, state = ranked([1.0, 2.0, 3.0])
    state = update(buffer, state, index_of(buffer, state, [0, 2]), jnp.array([bad, 1.5]))
    assert (int(state.sampler.num_bad_priorities), int(state.sampler.num_stale_updates)) == (1, 0)
    np.testing.assert_allclose(
        shares(buffer, rerank(buffer, state)), normalized([1 / 3, 1, 1 / 2]), rtol=1e-6
    )


def test_the_largest_of_duplicates_wins():
    buffer, state = ranked([5.0, 5.0, 5.0])
    state = update(
        buffer, state, index_of(buffer, state, [0, 0, 1, 0]), jnp.array([2.0, 3.0, 2.5, NAN])
    )
    np.testing.assert_array_equal(np.asarray(state.sampler.priority)[:3], [3, 2.5, 5])


def test_stale_and_foreign_rows_are_ignored_and_counted():
    buffer, state = ranked([1.0, 2.0, 3.0])
    late = index_of(buffer, state, [0, 1, 2])
    foreign = jr.types.Index(
        row=jnp.array([-1, 12, 2**31 - 1], jnp.int32), lap=jnp.zeros(3, jnp.uint32)
    )
    state = update(buffer, state, foreign, jnp.full(3, 9.0))
    state = fed(buffer, state, range(3))  # overwrites the first rows
    recorded = np.asarray(state.sampler.priority)
    state = update(buffer, state, late, jnp.full(3, 9.0))
    np.testing.assert_array_equal(state.sampler.priority, recorded)
    assert (int(state.sampler.num_stale_updates), float(state.sampler.max_priority)) == (6, 3)


def test_clear_forgets_ranks_and_priorities():
    buffer, state = ranked([7.0, 2.0, 3.0])
    state = clear(buffer, state)
    assert not buffer.can_sample(state)
    state = fed(buffer, rerank(buffer, state), range(2))
    np.testing.assert_allclose(shares(buffer, state), 1 / 3, rtol=1e-6)
    assert float(state.sampler.max_priority) == 1
    np.testing.assert_allclose(
        shares(buffer, rerank(buffer, state)), normalized([1, 1 / 2, 1 / 3]), rtol=1e-6
    )


def test_one_item_and_none():
    buffer = ReplayBuffer(
        capacity=1, num_envs=1, batch_size=2, sampler=RankBased(), view=Item(), autoreset=None
    )
    state = rerank(buffer, buffer.init(jnp.float32(0)))
    assert not sample(buffer, state, jax.random.key(0), 2).is_valid.any()
    state = rerank(buffer, add(buffer, state, jnp.array([3.0])))
    batch = sample(buffer, state, jax.random.key(0), 2)
    assert (batch.experience.tolist(), batch.probability.tolist()) == ([3, 3], [1, 1])


def test_a_high_alpha_leaves_every_rank_a_probability():
    buffer, state = ranked([1.0, 2.0, 3.0], alpha=100.0)
    assert (shares(buffer, state) > 0).all()


def test_what_it_cannot_do_is_refused():
    with pytest.raises(
        ValueError, match="RankBased: alpha must be a finite number of at least 0, got -1"
    ):
        RankBased(alpha=-1.0)
    with pytest.raises(
        ValueError, match="RankBased: this view's window reaches to the end of the episode"
    ):
        RankBased().window(jr.views.FutureView().window)
    with pytest.raises(ValueError, match='normalize_weights must be "batch", "buffer" or None'):
        RankBased(normalize_weights="max")  # pyright: ignore[reportArgumentType]


def test_jit_equals_eager_and_vmap_equals_a_loop():
    buffer, state = make_buffer(RankBased(), num_envs=2)
    states = [fed(buffer, state, range(k)) for k in (5, 0, 17)]
    check_jit_and_vmap(buffer, states)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    together = jax.jit(jax.vmap(buffer.rerank))(stacked)
    for which, one in enumerate(states):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(lambda leaf, which=which: leaf[which], together),
            rerank(buffer, one),
        )


def test_it_is_in_place():
    def loop(buffer, state, key):
        """Add twice, sample, update twice: each write must come after the reads before it."""
        priority = jax.random.uniform(key, (8,))
        state = buffer.add(
            buffer.add(state, step_of(priority[:4])), step_of(priority[4:]), None, priority[:4]
        )
        batch = buffer.sample(state, key, 8)
        state = buffer.update_priorities(
            buffer.update_priorities(state, batch.index, priority), batch.index, 2 * priority
        )
        return state, (batch, buffer.size(state))

    check_all_in_place(RankBased(), [loop])


def test_a_loop_that_reranks_now_and_then_never_copies_the_stored_steps():
    capacity = 1 << 14
    buffer, _ = make_buffer(RankBased(), length=capacity)
    wide = jax.tree.map(
        lambda leaf: jnp.tile(leaf, (1, 8)) if leaf.dtype == jnp.float32 else leaf, step_of([0.0])
    )
    wide = wide.replace(reward=jnp.zeros(1))
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], wide))

    def iteration(carry, key):
        state, time = carry
        state = buffer.add(state, wide)
        batch = buffer.sample(state, key)
        state = buffer.update_priorities(state, batch.index, jnp.ones(4))
        return (jax.lax.cond(time == 2, buffer.rerank, lambda state: state, state), time + 1), batch

    loop = jax.jit(
        lambda state, keys: jax.lax.scan(iteration, (state, jnp.int32(0)), keys), donate_argnums=0
    )
    text = loop.lower(state, jax.random.split(jax.random.key(0), 3)).compile().as_text()
    assert large_temporaries(text, capacity)  # made by rerank
    assert not large_temporaries(text, 8 * capacity)


def test_dtypes_hold_with_64_bit_numbers():
    with jax.enable_x64(True):
        buffer, state = make_buffer(RankBased(), num_envs=2)
        new = jax.eval_shape(
            lambda state: buffer.rerank(buffer.add(state, step_of([0.0, 1.0]))), state
        )
    assert jax.tree.map(lambda leaf: leaf.dtype, new.sampler) == jax.tree.map(
        lambda leaf: leaf.dtype, state.sampler
    )

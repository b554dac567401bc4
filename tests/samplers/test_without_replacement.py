"""Passes over the sampleable rows: each row once, in a new order for each pass, while rows come and
go."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers.permutation import permute
from jaxreplay.samplers.without_replacement import WithoutReplacement
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView
from tests.conftest import SOAK
from tests.support.sampling import (
    add,
    add_and_pop,
    check_all_in_place,
    check_jit_and_vmap,
    clear,
    fed,
    histories,
    make_buffer,
    pop,
    rewards,
    size,
)
from tests.views.test_views import Config, ViewPair

order_of = jax.jit(permute)
LARGEST = 64  # at least the rows of any pass here: one compilation serves all


class PassPair(ViewPair):
    """A buffer, an oracle, and the pass as a list of the oracle's rows in their order."""

    def __init__(self, config):
        super().__init__(config)
        self.rows, self.position = [], 0

    def clear(self):
        super().clear()
        self.rows, self.position = [], 0

    def pop(self, batch_size):
        now = {
            id(self.oracle.streams[env][index]): (env, index)
            for env, _, index in self.config.anchors(self.oracle)
        }
        self.state, batch = pop(
            self.config.replay, self.state, jax.random.key(len(now) * 1000 + self.clock), batch_size
        )
        taken, rounds = [], 0
        while (
            now
            and len(taken) < batch_size
            and (not taken or (rounds < 8 and self.position < len(self.rows)))
        ):
            if (
                self.position == len(self.rows)
                or sum(id(row) in now for row in self.rows) <= len(self.rows) // 8
            ):
                self._begin(now)
            for row in self.rows[self.position :][:batch_size]:
                if len(taken) < batch_size:
                    self.position += 1
                    taken += [now[id(row)]] if id(row) in now else []
            rounds += 1
        rows = [env * self.config.length + index % self.config.length for env, index in taken]
        assert np.asarray(batch.is_valid).tolist() == [True] * len(rows) + [False] * (
            batch_size - len(rows)
        )
        assert np.asarray(batch.index.row)[: len(rows)].tolist() == rows
        assert len(set(rows)) == len(rows)
        assert bool(rows) == bool(now)
        np.testing.assert_allclose(
            batch.probability, np.asarray(batch.is_valid) / max(len(now), 1), rtol=1e-6
        )

    def _begin(self, now):
        """Begin a pass: order the rows by env, then time, and permute them by the pass's key."""
        rows = [self.oracle.streams[env][index] for env, index in sorted(now.values())]
        index = jnp.minimum(jnp.arange(LARGEST, dtype=jnp.int32), len(rows) - 1)
        order = order_of(self.state.sampler.key, index, jnp.int32(len(rows)))
        self.rows, self.position = [rows[place] for place in np.asarray(order)[: len(rows)]], 0

    def check(self):
        assert int(size(self.config.replay, self.state)) == len(self.config.anchors(self.oracle))


POOL = (
    Config(
        "next_step",
        True,
        6,
        TransitionView(n_step=3, gamma=0.5),
        WithoutReplacement(),
        num_envs=3,
    ),
    Config(
        "same_step",
        False,
        9,
        jr.views.FrameStack(num_frames=3, inner=TransitionView(gamma=0.5)),
        WithoutReplacement(),
    ),
    Config(
        "same_step_no_final_obs",
        True,
        12,
        jr.views.SequenceView(length=2, period=2),
        WithoutReplacement(),
        num_envs=1,
    ),
    Config("same_step_no_final_obs", False, 9, jr.views.FutureView(), WithoutReplacement()),
)


@hypothesis.settings(max_examples=500 if SOAK else 25)
@hypothesis.given(histories(POOL))
def test_passes_agree_with_the_oracle(case):
    config, history = case
    pair = PassPair(config)
    for kind, *arguments in history:
        getattr(pair, kind)(*arguments)
    pair.check()
    pair.pop(3)
    pair.pop(3)


def passes(buffer, state, number, key=0):
    """Return the state and the rewards of each of the next passes; none of them has begun."""
    found = []
    for which in range(number):
        taken = []
        while len(taken) < int(size(buffer, state)):
            state, batch = pop(
                buffer, state, jax.random.fold_in(jax.random.key(key), 1000 * which + len(taken)), 4
            )
            taken += rewards(batch)
        found.append(taken)
    return state, found


def test_each_pass_has_every_row_once_in_an_order_of_its_own():
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state, found = passes(buffer, fed(buffer, state, range(12)), 3)
    rows = sorted([10 * time + env for time in range(11) for env in range(2)])
    assert [sorted(taken) for taken in found] == [rows] * 3
    assert len({tuple(taken) for taken in found}) == 3


def test_the_last_batch_of_a_pass_is_short():
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state, lengths = fed(buffer, state, range(6)), []
    for seed in range(6):
        state, batch = pop(buffer, state, jax.random.key(seed), 4)
        lengths.append(len(rewards(batch)))
    assert lengths == [4, 4, 2] * 2


def test_rows_that_are_added_wait_for_the_next_pass():
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state, _ = pop(buffer, fed(buffer, state, range(4)), jax.random.key(0), 4)
    state = fed(buffer, state, [4, 5])
    state, batch = pop(buffer, state, jax.random.key(1), 4)
    assert len(rewards(batch)) == 2
    assert max(rewards(batch)) < 30
    state, found = passes(buffer, state, 1)
    assert sorted(found[0]) == sorted(10 * time + env for time in range(5) for env in range(2))


def test_orders_are_all_alike():
    """The 24 orders of a first pass over 4 rows are equally likely; the fixed keys fail by chance
    once in 10^4."""
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state = fed(buffer, state, range(3))
    draw = jax.jit(jax.vmap(lambda key: buffer.pop(state, key, 4)[1].index.row))
    rows = np.asarray(draw(jax.random.split(jax.random.key(5), 20_000)))
    counts = np.unique(rows @ [1, 24, 24**2, 24**3], return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


def test_a_pass_that_lost_almost_all_its_rows_gives_way_to_a_new_one():
    """If 10 of a pass's 11 rows are overwritten, a new pass over the 11 current rows fills the next
    batch."""
    buffer, state = make_buffer(WithoutReplacement(), length=12)
    state, _ = pop(buffer, fed(buffer, state, range(12)), jax.random.key(0), 4)
    state = fed(buffer, state, range(12, 22))
    state, batch = pop(buffer, state, jax.random.key(1), 4)
    assert len(rewards(batch)) == 4
    assert int(state.sampler.position) == 4
    assert int(state.sampler.num_rows.sum()) == 11


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_batch_has_a_row_while_there_is_one(batch_size):
    """Batches are never empty, for 0 to 12 adds between two pops, in passes of 11 rows."""
    buffer, state = make_buffer(WithoutReplacement(), length=12)
    state, time = fed(buffer, state, range(3)), 3
    for turn in range(60):
        state, batch = pop(buffer, state, jax.random.key(turn), batch_size)
        assert bool(batch.is_valid[0])
        state, time = fed(buffer, state, range(time, time + turn % 13)), time + turn % 13


def test_ranks_wrap_around():
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state = state.replace(
        streams=state.streams.with_counters(num_candidates=jnp.full(2, 2**32 - 5, jnp.uint32))
    )
    state, seen = fed(buffer, state, range(8)), []
    for seed in range(4):  # 4 rows a pop, of 18; by the end 4 of each stream are overwritten
        state, batch = pop(
            buffer, fed(buffer, state, range(8 + 2 * seed, 10 + 2 * seed)), jax.random.key(seed), 4
        )
        assert all(reward // 10 >= max(0, 10 + 2 * seed - 12) for reward in rewards(batch))
        seen += rewards(batch)
    assert len(set(seen)) == len(seen) >= 12
    assert max(seen) < 90


def test_clear_ends_the_pass():
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state, _ = pop(buffer, fed(buffer, state, range(8)), jax.random.key(0), 4)
    state = clear(buffer, state)
    state, batch = pop(buffer, state, jax.random.key(1), 4)
    assert not batch.is_valid.any()
    state, batch = pop(buffer, fed(buffer, state, [20, 21]), jax.random.key(2), 4)
    assert sorted(rewards(batch)) == [200, 201]


def test_one_item():
    buffer = ReplayBuffer(
        capacity=1,
        num_envs=1,
        batch_size=2,
        sampler=WithoutReplacement(),
        view=Item(),
        autoreset=None,
    )
    state = buffer.init(jnp.float32(0))
    for value in (3.0, 4.0):
        state = add(buffer, state, jnp.array([value]))
        for seed in range(2):  # one pass each
            state, batch = pop(buffer, state, jax.random.key(seed), 2)
            assert (batch.experience[0], batch.is_valid.tolist(), batch.probability[0]) == (
                value,
                [True, False],
                1,
            )
    assert buffer.can_add(state)


def test_jit_equals_eager_and_vmap_equals_a_loop():
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    states = [fed(buffer, state, range(k)) for k in (5, 2, 17)]
    states[0], _ = pop(buffer, states[0], jax.random.key(0), 4)
    states[2], _ = pop(buffer, states[2], jax.random.key(0), 4)
    states[2] = fed(buffer, states[2], range(17, 24))
    check_jit_and_vmap(buffer, states)


def test_it_is_in_place():
    check_all_in_place(WithoutReplacement(), [add_and_pop])


def test_dtypes_hold_with_64_bit_numbers():
    with jax.enable_x64(True):
        buffer, state = make_buffer(WithoutReplacement(), num_envs=2)
        new = jax.eval_shape(lambda state: buffer.pop(state, jax.random.key(0))[0], state)
    assert jax.tree.map(lambda leaf: leaf.dtype, new.sampler) == jax.tree.map(
        lambda leaf: leaf.dtype, state.sampler
    )

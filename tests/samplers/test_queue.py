"""The queue consumes each row once, streams take turns, and lost rows are counted."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers.queue import Queue
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView
from tests.conftest import SOAK
from tests.support import oracle_views
from tests.support.sampling import (
    add,
    add_and_pop,
    can_add,
    check_all_in_place,
    check_jit_and_vmap,
    clear,
    fed,
    histories,
    make_buffer,
    pop,
    probability_of_all,
    rewards,
    size,
    step_of,
)
from tests.views.test_views import Config, ViewPair, reward_of


@jax.jit
def everything_of(buffer, state):
    rooms = [buffer.can_add(state, num_steps) for num_steps in STEPS]
    return buffer.size(state), buffer.can_sample(state), probability_of_all(buffer, state), rooms


STEPS = (1, 4)


class QueuePair(ViewPair):
    """A buffer, an oracle, and the oracle's rows that were consumed or lost."""

    def __init__(self, config):
        super().__init__(config)
        self.done, self.lost, self.is_cleared, self.kept = set(), 0, False, []

    def clear(self):
        self._keep()
        super().clear()
        self.is_cleared = True

    def _keep(self):
        """Keep all rows alive: rows are identified by their ids, which must not be reused."""
        self.kept += [row for rows in self.oracle.streams for row in rows]

    def left(self, **window):
        """Return the indices of each stream's remaining candidates, in the order of time.

        `window` replaces fields of the buffer's window.
        """
        window = {
            field: getattr(self.config.window, field)
            for field in ("before", "after", "crosses_episodes", "period", "needs_final_obs")
        } | window
        left = [[] for _ in self.oracle.streams]
        for env, _, index in oracle_views.anchors(self.oracle, **window):
            if id(self.oracle.streams[env][index]) not in self.done:
                left[env].append(index)
        return [sorted(indices) for indices in left]

    def pop(self, batch_size):
        turns = sorted(
            (place, env, index)
            for env, indices in enumerate(self.left())
            for place, index in enumerate(indices)
        )
        expected = sorted((env, index) for _, env, index in turns[:batch_size])
        if expected:
            self._count_lost()
        self.done |= {id(self.oracle.streams[env][index]) for env, index in expected}
        self.state, batch = pop(self.config.replay, self.state, jax.random.key(0), batch_size)
        rows = [env * self.config.length + index % self.config.length for env, index in expected]
        assert np.asarray(batch.is_valid).tolist() == [True] * len(rows) + [False] * (
            batch_size - len(rows)
        )
        assert np.asarray(batch.index.row)[: len(rows)].tolist() == rows
        assert np.asarray(batch.probability).tolist() == np.asarray(batch.is_valid).tolist()
        assert int(self.state.sampler.lost) == self.lost

    def _count_lost(self):
        stored, self.oracle.length = self.oracle.length, 10**9
        ever = self.left(before=0, after=0)
        self.oracle.length = stored
        whole = self.left(after=0)
        gone = {
            id(self.oracle.streams[env][at])
            for env, found in enumerate(ever)
            for at in found
            if at not in whole[env]
        }
        self.lost += 0 if self.is_cleared else len(gone)
        self.done |= gone
        self.is_cleared = False

    def check(self):
        buffer, oracle, left = self.config.replay, self.oracle, self.left()
        rows = {
            env * oracle.length + index % oracle.length
            for env, indices in enumerate(left)
            for index in indices
        }
        sampleable = {
            env * oracle.length + position for env, position, _ in self.config.anchors(oracle)
        }
        number, is_enough, probability, rooms = jax.tree.map(
            np.asarray, everything_of(buffer, self.state)
        )
        assert (number, is_enough) == (len(rows), bool(rows))
        assert {row for row in sampleable if probability[row] == 1} == rows
        assert all(probability[row] == 0 for row in sampleable - rows)
        rows_per_step = 2 if self.config.autoreset == "same_step" else 1
        assert [bool(room) for room in rooms] == [
            self._has_room(num_steps * rows_per_step) for num_steps in STEPS
        ]

    def _has_room(self, num_rows):
        before = self.config.window.before
        for rows, waiting in zip(self.oracle.streams, self.left(after=0), strict=True):
            needed = len(rows) - (before or 0)
            if waiting:
                first, _ = oracle_views.spans(self.oracle, rows)[waiting[0]]
                needed = first if before is None else max(first, waiting[0] - before)
            if len(rows) + num_rows - self.oracle.length > needed:
                return False
        return True


POOL = (
    Config("next_step", True, 3, TransitionView(n_step=3, gamma=0.5), Queue(), num_envs=3),
    Config(
        "same_step",
        False,
        4,
        jr.views.FrameStack(num_frames=3, inner=TransitionView(gamma=0.5)),
        Queue(),
    ),
    Config(
        "same_step_no_final_obs",
        True,
        6,
        jr.views.SequenceView(length=2, burn_in=1, period=2, cross_episodes=True),
        Queue(),
        num_envs=1,
    ),
    Config(
        "same_step",
        True,
        5,
        jr.views.Hindsight(
            inner=TransitionView(gamma=0.5), reward_fn=reward_of, strategy="episode"
        ),
        Queue(),
    ),
)


@hypothesis.settings(max_examples=500 if SOAK else 25)
@hypothesis.given(histories(POOL))
def test_the_queue_agrees_with_the_oracle(case):
    config, history = case
    pair = QueuePair(config)
    for kind, *arguments in history:
        getattr(pair, kind)(*arguments)
    pair.check()
    pair.pop(3)


def test_streams_take_turns():
    """With 3, 1 and 5 rows, a batch of 4 has each stream's first and the second of stream 0."""
    buffer, state = make_buffer(Queue(), num_envs=3, allow_mask=True)
    for time in range(6):
        mask = jnp.array([time < 4, time < 2, True])
        state = add(buffer, state, step_of([time, 10 + time, 20 + time]), mask)
    taken = []
    for _ in range(4):
        state, batch = pop(buffer, state, jax.random.key(0), 4)
        taken.append(rewards(batch))
    assert taken == [[0, 1, 10, 20], [2, 21, 22, 23], [24], []]
    assert batch.probability.tolist() == [0] * 4
    assert np.isfinite(np.asarray(batch.experience.obs)).all()


def test_min_size_holds_rows_back_for_a_full_batch():
    buffer, state = make_buffer(Queue(), min_size=4)
    state = fed(buffer, state, range(4))
    state, batch = pop(buffer, state, jax.random.key(0), 4)
    assert (rewards(batch), int(size(buffer, state))) == ([], 3)
    state = fed(buffer, state, [4])
    state, batch = pop(buffer, state, jax.random.key(0), 4)
    assert (rewards(batch), int(size(buffer, state))) == ([0, 10, 20, 30], 0)


def test_a_stream_that_holds_one_item_hands_it_out_once():
    buffer = ReplayBuffer(
        capacity=1, num_envs=1, batch_size=2, sampler=Queue(), view=Item(), autoreset=None
    )
    state = buffer.init(jnp.float32(0))
    for value in (3.0, 4.0):
        state = add(buffer, state, jnp.array([value]))
        assert not can_add(buffer, state, 1)
        state, batch = pop(buffer, state, jax.random.key(0), 2)
        assert (batch.experience[0], batch.is_valid.tolist()) == (value, [True, False])
        assert can_add(buffer, state, 1)
        assert not can_add(buffer, state, 2)


@pytest.mark.parametrize("lap", [0, 2**30 - 2, 2**32 - 2])
def test_items_are_queued_across_wraps_and_clears(lap):
    """Items have no candidate numbers; laps and positions replace them, also where they wrap
    around."""
    buffer = ReplayBuffer(
        capacity=8,
        num_envs=2,
        batch_size=3,
        sampler=Queue(),
        view=Item(),
        autoreset=None,
        allow_mask=True,
    )
    state = buffer.init(jnp.float32(0))
    state = state.replace(streams=state.streams.with_counters(lap=jnp.full(2, lap, jnp.uint32)))
    queue, r, clock = [[], []], np.random.default_rng(lap), 0
    for _ in range(60):
        mask, clock = r.random(2) < 0.7, clock + 1
        state = add(buffer, state, jnp.array([clock, clock + 0.5]), jnp.asarray(mask))
        queue = [
            (rows + [clock + env / 2] * bool(mask[env]))[-4:] for env, rows in enumerate(queue)
        ]
        if r.random() < 0.1:
            state, queue = clear(buffer, state), [[], []]
        if r.random() < 0.4:
            turns = sorted(
                (place, env, value)
                for env, rows in enumerate(queue)
                for place, value in enumerate(rows)
            )[:3]
            state, batch = pop(buffer, state, jax.random.key(0), 3)
            taken = [value for _, _, value in sorted(turns, key=lambda turn: turn[1:])]
            assert np.asarray(batch.experience)[np.asarray(batch.is_valid)].tolist() == taken
            queue = [[value for value in rows if value not in taken] for rows in queue]
        assert int(size(buffer, state)) == sum(map(len, queue))
        assert bool(can_add(buffer, state, 2)) == all(len(rows) <= 2 for rows in queue)


def test_ranks_wrap_around():
    """After 2^32 transitions a stream's counter restarts at 0, and the queue continues."""
    buffer, state = make_buffer(Queue(), num_envs=2, length=6)
    start = jnp.full(2, 2**32 - 9, jnp.uint32)
    state = state.replace(
        streams=state.streams.with_counters(num_candidates=start),
        sampler=state.sampler.replace(next=start),
    )
    for time in range(30):
        state = fed(buffer, state, [time])
        assert int(size(buffer, state)) == (0 if time == 0 else 2)
        state, batch = pop(buffer, state, jax.random.key(0), 3)
        assert rewards(batch) == ([] if time == 0 else [10 * time - 10, 10 * time - 9])
    # 5 of the 10 transitions of each stream are still stored
    state = fed(buffer, state, range(30, 40))
    state, _ = pop(buffer, state, jax.random.key(0), 1)
    assert (int(size(buffer, state)), int(state.sampler.lost)) == (9, 10)


def test_the_count_of_lost_rows_stays_at_its_maximum():
    buffer, state = make_buffer(Queue())
    state = fed(
        buffer, state.replace(sampler=state.sampler.replace(lost=jnp.uint32(2**32 - 2))), range(20)
    )
    state, _ = pop(buffer, state, jax.random.key(0), 4)
    assert int(state.sampler.lost) == 2**32 - 1


def test_nothing_is_lost_by_a_producer_that_asks():
    buffer, state = make_buffer(Queue(), num_envs=2, length=5, n_step=2)
    added, taken, blocked = 0, [], 0
    for turn in range(60):
        if can_add(buffer, state, 1):
            state, added = fed(buffer, state, [added]), added + 1
        else:
            blocked += 1
        if turn > 15 and turn % 2:
            state, batch = pop(buffer, state, jax.random.key(0), 3)
            taken += np.asarray(batch.experience.obs)[np.asarray(batch.is_valid)].tolist()
    assert blocked > 10
    for env in range(2):
        mine = [value for value in taken if value % 10 == env]
        assert mine == [10 * time + env for time in range(len(mine))]
    assert int(state.sampler.lost) == 0


def test_jit_equals_eager_and_vmap_equals_a_loop():
    buffer, state = make_buffer(Queue(), num_envs=2)
    states = [fed(buffer, state, range(k)) for k in (5, 2, 11)]
    states[2], _ = pop(buffer, states[2], jax.random.key(0), 4)
    check_jit_and_vmap(buffer, states)


def test_it_is_in_place():
    check_all_in_place(Queue(), [add_and_pop])


def test_dtypes_hold_with_64_bit_numbers():
    with jax.enable_x64(True):
        buffer, state = make_buffer(Queue(), num_envs=2)
        new = jax.eval_shape(
            lambda state: buffer.pop(buffer.add(state, step_of([0.0, 1.0])), jax.random.key(0))[0],
            state,
        )
    assert jax.tree.map(lambda leaf: leaf.dtype, new.sampler) == jax.tree.map(
        lambda leaf: leaf.dtype, state.sampler
    )


def test_turns_are_those_of_a_plain_deal():
    from jaxreplay.samplers.queue import _turns

    turns = jax.jit(_turns, static_argnums=(1, 2))
    for left in itertools.product((0, 1, 3, 8), repeat=3):
        for batch_size in (1, 2, 6, 17):
            dealt, rest = [0, 0, 0], batch_size
            for env in [env for _ in range(8) for env in range(3)]:
                if (
                    dealt[env] < left[env]
                    and rest
                    and all(dealt[env] <= dealt[e] or dealt[e] == left[e] for e in range(3))
                ):
                    dealt[env], rest = dealt[env] + 1, rest - 1
            assert turns(jnp.array(left, jnp.int32), batch_size, 8).tolist() == dealt

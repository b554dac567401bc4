"""The queue consumes each row once, streams take turns, and lost rows are counted."""

import collections
import itertools

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.samplers.queue import Queue, _turns
from tests.conftest import ALL
from tests.support import oracle_views
from tests.support.sampling import (
    ADD,
    BATCH_SIZE,
    CLEAR,
    ROOMS,
    Model,
    add,
    check_histories,
    configs_of,
    fed,
    make_buffer,
    pop,
    rewards,
    size,
    step_of,
)


class QueueModel(Model):
    """The oracle's rows that were consumed or lost, and the count of the lost ones."""

    def __init__(self, config, start):
        super().__init__(config, start)
        self.done, self.lost = set(), start
        self.uses = collections.defaultdict(int)
        self.is_cleared, self.has_asked, self.num_empty = False, True, 0

    def left(self, **window):
        return [one for one in self.candidates(**window) if self.row(*one) not in self.done]

    def probabilities(self):
        return {self.number(*one): self.row(*one) not in self.done for one in self.candidates()}

    def check(self, seen):
        super().check(seen)
        rows_per_step = 2 if self.config.autoreset == "same_step" else 1
        rooms = [self.has_room(num_steps * rows_per_step) for num_steps in ROOMS]
        assert [bool(room) for room in seen["has_room"]] == rooms
        self.now_has_room = rooms[0]

    def has_room(self, num_rows):
        before, waiting = self.config.window["before"], self.left(after=0)
        for env, rows in enumerate(self.oracle.streams):
            needed = len(rows) - (before or 0)
            mine = [index for stream, index in waiting if stream == env]
            if mine:
                first, _ = oracle_views.spans(self.oracle, rows)[mine[0]]
                needed = first if before is None else max(first, mine[0] - before)
            if len(rows) + num_rows - self.config.length > needed:
                return False
        return True

    def take(self, seen):
        taken, most = [], self.config.sampler.max_uses
        for use in range(most):
            left = [one for one in self.left() if self.uses[self.row(*one)] == use]
            streams = [
                [one for one in left if one[0] == env] for env in range(self.config.num_envs)
            ]
            turns = [one for turn in itertools.zip_longest(*streams) for one in turn]
            turns = [one for one in turns if one is not None]
            taken += sorted(turns[: BATCH_SIZE - len(taken)])
        self.num_empty += not taken
        if taken:
            self.count_lost()
        for one in taken:
            self.uses[self.row(*one)] += 1
        self.done |= {self.row(*one) for one in taken if self.uses[self.row(*one)] == most}
        self.check_batch(seen["batch"], taken)
        assert seen["batch"].probability.tolist() == seen["batch"].is_valid.tolist()
        assert seen["sampler"].lost == min(self.lost, 2**32 - 1)

    def count_lost(self):
        stored, self.oracle.length = self.oracle.length, 10**9
        ever = self.left(before=0, after=0)
        self.oracle.length = stored
        gone = {self.row(*one) for one in set(ever) - set(self.left(after=0))}
        new = {row for row in gone if not self.uses[row]}
        self.lost += 0 if self.is_cleared else len(new)
        self.done |= gone
        assert not (gone and self.has_asked)  # a producer that asks loses nothing
        self.is_cleared = False
        # Further rows of an episode whose first rows are lost will be lost as well.
        self.has_asked |= self.config.window["before"] is not None

    def before_a_drop(self):
        was_cleared = self.is_cleared
        self.count_lost()
        self.is_cleared = was_cleared

    def after(self, operation):
        self.is_cleared |= operation == CLEAR
        self.has_asked &= operation != ADD or self.now_has_room


CONFIGS = configs_of(Queue())
REUSED = configs_of(Queue(max_uses=3), Queue(max_uses=2))


@pytest.mark.parametrize(
    "config", [*CONFIGS, *REUSED] if ALL else [*CONFIGS[:4], REUSED[0], REUSED[1], REUSED[4]]
)
def test_the_queue_agrees_with_a_model_of_lists(config):
    models = check_histories(config, QueueModel)
    if config == CONFIGS[0]:  # some rows were lost, past the counter's maximum, or all consumed
        assert any(model.lost > 2**32 - 1 for model in models)
        assert any(model.num_empty for model in models)


def test_a_population_of_queues_agrees_with_its_models():
    check_histories(CONFIGS[4], QueueModel, together=True)


def test_streams_take_turns():
    """With 3, 1 and 5 rows, a batch of 4 has each stream's first and the second of stream 0."""
    buffer, state = make_buffer(Queue(), num_envs=3, allow_mask=True)
    for time in range(6):
        mask = np.array([time < 4, time < 2, True])
        state = add(buffer, state, step_of([time, 10 + time, 20 + time]), mask)
    taken = []
    for _ in range(4):
        state, batch = pop(buffer, state, jax.random.key(0), 4)
        taken.append(rewards(batch))
    assert taken == [[0, 1, 10, 20], [2, 21, 22, 23], [24], []]
    assert np.isfinite(np.asarray(batch.experience.obs)).all()


def test_min_size_holds_rows_back_for_a_full_batch():
    buffer, state = make_buffer(Queue(), min_size=4)
    state = fed(buffer, state, range(4))
    state, batch = pop(buffer, state, jax.random.key(0), 4)
    assert (rewards(batch), int(size(buffer, state))) == ([], 3)
    state, batch = pop(buffer, fed(buffer, state, [4]), jax.random.key(0), 4)
    assert (rewards(batch), int(size(buffer, state))) == ([0, 10, 20, 30], 0)


def test_turns_are_those_of_a_plain_deal():
    lefts = np.array(list(itertools.product((0, 1, 3, 8), repeat=3)), np.int32)
    turns = jax.jit(jax.vmap(lambda left, wanted: _turns(left, wanted, 8), (0, None)))
    for wanted in (1, 2, 6, 17):
        for left, got in zip(lefts, turns(lefts, np.int32(wanted)).tolist(), strict=True):
            deal = [env for turn in range(8) for env in range(3) if turn < left[env]][:wanted]
            assert got == [deal.count(env) for env in range(3)]


def test_uses_go_with_the_rows_to_another_buffer():
    buffer, state = make_buffer(Queue(max_uses=3), num_envs=2)
    state = fed(buffer, state, range(5))
    for _ in range(3):  # 8 rows are sampleable: all once, and the oldest of each env twice
        state, batch = pop(buffer, state, jax.random.key(0), 4)
    larger, _ = make_buffer(Queue(max_uses=3), num_envs=2, length=16)
    other = jax.jit(larger.adopt)(state)
    once, _ = make_buffer(Queue(), num_envs=2)
    of_once = jax.jit(once.adopt)(state)
    assert int(size(once, of_once)) == 0  # each was used already
    taken = []
    for _ in range(6):
        state, batch = pop(buffer, state, jax.random.key(0), 4)
        other, same = pop(larger, other, jax.random.key(0), 4)
        assert rewards(same) == rewards(batch)
        taken += rewards(batch)
    counts = collections.Counter(taken)
    assert sorted(counts.values()) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_rows_that_a_merge_overwrites_before_they_were_consumed_are_lost():
    """Of 8 rows and 4 more, as by `extend`; of 6 that are left and 4 more, and 1 lost before."""
    make = lambda capacity, sampler: jr.items(capacity=capacity, batch_size=2, sampler=sampler)
    own, its, plain = make(8, Queue()), make(4, Queue()), make(4, jr.Uniform())
    fed = lambda buffer, num: buffer.extend(buffer.init(0.0), np.zeros((num, 1), np.float32))

    @jax.jit
    def run():
        full = fed(own, 8)
        popped, _ = own.pop(full, jax.random.key(0))
        states = [own.merge(full, fed(buffer, 4)) for buffer in (its, plain)]
        states += [own.extend(full, np.zeros((4, 1), np.float32)), own.merge(popped, fed(its, 5))]
        return [own.pop(state, jax.random.key(0))[0].sampler.lost for state in states]

    assert [int(lost) for lost in run()] == [4, 4, 4, 3]


def test_ignored_priorities_of_merged_states_are_added():
    make = lambda: jr.items(capacity=8, batch_size=2, sampler=jr.Prioritized())
    bad = np.array([[np.nan], [-1], [1]], np.float32)

    @jax.jit
    def run():
        state = make().extend(make().init(0.0), np.zeros((3, 1), np.float32), priority=bad)
        both = make().merge(state, state)
        return both.sampler.num_bad_priorities, both.sampler.num_stale_updates

    assert [int(count) for count in run()] == [4, 0]

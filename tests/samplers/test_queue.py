"""The queue by hand. A model of lists is in `support/models.py`: it consumes each row once, streams
take turns, and lost rows are counted."""

import collections
import itertools

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.samplers.queue import Queue, _turns
from tests.support.sampling import fed, make_buffer, pop, rewards, size


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
    once, its = make_buffer(Queue(), num_envs=2)
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
    wide, _ = make_buffer(Queue(), num_envs=4)
    its, batch = pop(once, fed(once, its, range(5)), jax.random.key(0), 4)
    _, rest = pop(wide, jax.jit(wide.adopt)(its), jax.random.key(0), 4)
    assert sorted(rewards(batch) + rewards(rest)) == [0, 1, 10, 11, 20, 21, 30, 31]


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

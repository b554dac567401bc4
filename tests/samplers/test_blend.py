"""Samplers of samplers: exact parts of a batch, the law of the blend, weights that correct it, and
each new row once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay._util import random
from jaxreplay.checkpoint import Checkpointer
from jaxreplay.samplers.shares import shares
from tests.conftest import SOAK
from tests.samplers.test_laws import check
from tests.support.buffers import draw
from tests.support.sampling import adopt, begin, can_sample, extend, get, metrics, pop, sample
from tests.support.steps import begun, nth, plain_step

BATCH, ROWS = 10, 17  # of each of two envs
KEYS = 40_000 if SOAK else 2_000
PRIORITY = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)


def by_priority(alpha):
    return PRIORITY**alpha / (PRIORITY**alpha).sum()


# Each sampler with the probability of each row, [time, env].
_AGE = np.arange(ROWS)[::-1, None] + np.zeros(2)
UNIFORM = jr.Uniform(), np.full((ROWS, 2), 1 / (2 * ROWS))
PRIORITIZED = jr.Prioritized(alpha=1.0), by_priority(1.0)
SQUARE_ROOT = jr.Prioritized(alpha=0.5, stratified=False), by_priority(0.5)
RECENT = jr.Recent(decay=0.8), 0.8**_AGE / (0.8**_AGE).sum()
NEWEST = jr.Newest(num_rows=3), (_AGE < 3) / 6
BLENDS = {
    "three": {"uniform": (UNIFORM, 3), "priority": (PRIORITIZED, 2), "recent": (RECENT, 1)},
    "two trees": {"one": (PRIORITIZED, 0.25), "two": (SQUARE_ROOT, 0.75)},
    "without priorities": {"uniform": (UNIFORM, 0.85), "newest": (NEWEST, 0.15)},
}


def buffer_of(name):
    """Return a buffer of two envs."""
    members = {part: (one, fraction) for part, ((one, _), fraction) in BLENDS[name].items()}
    return jr.items(capacity=64, num_envs=2, batch_size=BATCH, sampler=jr.blend(**members))


def laws(name):
    """Return the members' probabilities of each row of the buffer, [M, N]."""
    found = [np.zeros((2, 32)) for _ in BLENDS[name]]
    for law, ((_, own), _) in zip(found, BLENDS[name].values(), strict=True):
        law[:, :ROWS] = own.T
    return np.stack(found).reshape(len(found), -1)


@jax.jit
def seen_of(buffer, fractions):
    """Return the probability of each row, and a batch for each of three betas, with the fractions
    of a call, too."""
    has_priorities = "Prioritized" in repr(buffer.sampler)
    state = begun(buffer, PRIORITY, None, PRIORITY if has_priorities else None)
    found = []
    for options in ({}, {"fractions": fractions}):
        draw = lambda beta, options=options: buffer.sample(
            state, jax.random.key(3), beta=beta, **options
        )
        rows = buffer.get(state, jnp.arange(64), **options).probability
        found.append((rows, jax.vmap(draw)(jnp.asarray(BETAS))))
    return found


BETAS = np.float32([0.0, 0.4, 1.0])


@pytest.mark.parametrize("name", BLENDS)
def test_rows_have_the_probabilities_of_their_members_in_these_parts(name):
    """Weights correct it: with beta 1, they are in proportion to 1 / probability."""
    own = np.array([fraction for _, fraction in BLENDS[name].values()])
    other = np.arange(1.0, 1 + len(own))
    found = jax.device_get(seen_of(buffer_of(name), dict(zip(BLENDS[name], other, strict=True))))
    for fractions, (rows, batch) in zip((own, other), found, strict=True):
        mixed = fractions / fractions.sum() @ laws(name)
        np.testing.assert_allclose(rows, mixed, rtol=1e-4)
        assert batch.is_valid.all()
        assert batch.probability.min() > 0
        np.testing.assert_allclose(batch.probability, mixed[batch.index.row], rtol=1e-4)
        smallest = batch.probability.min(axis=1, keepdims=True)
        weight = (batch.probability / smallest) ** -BETAS[:, None]
        np.testing.assert_allclose(batch.weight, weight, rtol=1e-5)


def test_of_two_samplers_with_priorities_the_first_one_tells_its_figures():
    buffer = buffer_of("two trees")
    state = begin(buffer, PRIORITY, None, PRIORITY)
    mean = jax.device_get(metrics(buffer, state))["mean_priority"]
    np.testing.assert_allclose(mean, PRIORITY.mean(), rtol=1e-5)  # its alpha is 1
    members = {name: (jr.Prioritized(beta=beta), 1) for name, beta in (("a", 0.2), ("b", 0.9))}
    assert jr.blend(**members).beta == 0.2


def test_a_blend_has_priorities_if_a_part_has():
    uniform, priority = (jr.Uniform(), 1), (jr.Prioritized(), 1)
    old, new = jr.blend(a=uniform, b=uniform), jr.blend(a=uniform, b=priority)
    queues = jr.OnlineQueue(), jr.OnlineQueue(sampler=jr.Prioritized())
    samplers = *queues, old, new, jr.blend(x=uniform, old=(old, 1)), jr.blend(x=(new, 1))
    found = [(one.has_priorities, one.consumes) for one in samplers]
    assert found == [(0, 1), (1, 1), (0, 0), (1, 0), (0, 0), (1, 0)]


class FirstRow(jr.samplers.Sampler):
    """Sample a row that a call may give."""

    takes = ("nth",)

    def sample(self, state, sampleable, key, batch_size):
        row = jnp.full(batch_size, self.given.get("nth", 0), jnp.int32)
        return jr.samplers.Draw(state, row, self.probability(state, sampleable, row))

    def probability(self, state, sampleable, row):
        return (row == self.given.get("nth", 0)).astype(jnp.float32)


def test_parameters_of_a_call_reach_the_parts_of_a_blend():
    """Those of a blend in a blend are named after it, also in a mixture."""
    inner = jr.blend(first=(FirstRow(), 1), newest=(jr.Newest(num_rows=1), 1))
    sampler = jr.blend(x=(jr.Newest(num_rows=1), 0), inner=(inner, 1))
    buffer = jr.items(capacity=16, batch_size=4, sampler=sampler)
    mixture = jr.mix(one=(buffer, 2), two=(buffer, 2))
    calls = [
        {"nth": 3},
        {"fractions": {"inner.first": 3, "inner.newest": 1}, "nth": 2},
        {"fractions": {"x": 1, "inner": 1, "inner.first": 0, "inner.newest": 1}},
        {"fractions": {"x": 1, "inner": 3}, "nth": 1},
    ]
    of_members = [
        {"fractions": {"one.inner.first": 1, "one.inner.newest": 0}, "nth": 4},
        {"fractions": {"one": 0, "two": 1, "two.x": 1, "two.inner": 0}},
    ]

    @jax.jit
    def run(calls, of_members):
        state = buffer.extend(buffer.init(0.0), jnp.arange(9.0)[:, None])
        states, key = {"one": state, "two": state}, jax.random.key(0)
        found = [buffer.sample(state, key, **options) for options in calls]
        found += [mixture.sample(states, key, **options) for options in of_members]
        return [batch.experience for batch in found]

    got = [sorted(items.tolist()) for items in run(calls, of_members)]
    assert got[:4] == [[3, 3, 8, 8], [2, 2, 2, 8], [8] * 4, got[3]]
    assert got[3] in ([1, 1, 8, 8], [1, 8, 8, 8])  # 3/2 of the first row
    assert got[4:] == [[4, 4, 4, 8], [8] * 4]


def test_parts_are_the_next_whole_numbers_and_their_mean_is_the_fraction(monkeypatch):
    """Of all random bits that matter: 1,024 offsets, and 112 that choose places. Members may draw
    more than are taken: each of their places is taken equally often."""
    fractions, sizes = np.float32([0.21, 0.0, 0.79]), (7, 3, 16)

    @jax.jit
    @jax.vmap
    def share(*words):
        monkeypatch.setattr(random, "words", lambda *_: [word[None] for word in words])
        return shares(fractions, sizes, 16, jax.random.key(0))

    offset, place = (x.ravel() for x in np.meshgrid(np.arange(1024.0), np.arange(112) + 0.5))
    words = np.uint32(offset * 2**22), np.uint32(place / 112 * 2**32)
    source, place = jax.device_get(share(*words))
    counts = np.stack([(source == number).sum(axis=1) for number in range(3)])
    assert (np.diff(source, axis=1) >= 0).all()
    assert set(counts[0]) == {3, 4}
    assert not counts[1].any()
    assert abs(counts[0].mean() - 3.36) <= 0.5 / 1024
    for number, size in ((0, 7), (2, 16)):
        at = np.where(source == number, place, -1)
        assert len(set(np.bincount(at[at >= 0], minlength=size))) == 1
        at = np.sort(at, axis=1)
        assert ((np.diff(at, axis=1) > 0) | (at[:, 1:] < 0)).all()  # no place comes twice


@pytest.mark.parametrize("batch_size", [3, 16_384])
def test_whole_numbers_are_exact_at_every_offset(batch_size):
    fractions = np.float32([0.25, 0.5, 0.25]) if batch_size > 3 else np.float32([0, 1, 0])
    keys = jax.random.split(jax.random.key(1), 64)
    share = jax.vmap(lambda key: shares(fractions, [batch_size] * 3, batch_size, key))
    source, _ = jax.device_get(jax.jit(share)(keys))
    for number, fraction in enumerate(fractions):
        assert ((source == number).sum(axis=1) == fraction * batch_size).all()


UNIFORM_ONLY = jr.blend(u=(jr.Uniform(), 0.75), n=(jr.Newest(num_rows=3), 0.25))


def by(alpha):
    return jr.Prioritized(alpha=alpha, new_priority=1.0)


# Each with the share of the batch of each of its trees, by its exponent, if all parts are trees.
NESTED = {
    "names of two levels": (
        jr.OnlineQueue(sampler=jr.blend(x=(by(1.0), 0.9), sampler=(by(0.5), 0.1))),
        {1.0: 0.9, 0.5: 0.1},
    ),
    "a part's name inside and beside": (
        jr.blend(m=(jr.blend(a=(by(1.0), 0.5), m=(by(0.5), 0.5)), 0.5), a=(by(0.2), 0.5)),
        {1.0: 0.25, 0.5: 0.25, 0.2: 0.5},
    ),
    "one without a state": (jr.blend(x=(UNIFORM_ONLY, 0.5), p=(by(1.0), 0.5)), {}),
    "online, every third": (jr.OnlineQueue(sampler=UNIFORM_ONLY, period=3), {}),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_samplers_keep_what_they_know(name, tmp_path):
    """Through a drop of nothing, another capacity, and a checkpoint. Priorities reach all trees."""
    sizes = {"num_envs": 1, "batch_size": 4, "autoreset": "same_step_no_final_obs"}
    make = lambda capacity, sampler: jr.transitions(capacity=capacity, **sizes, sampler=sampler)
    sampler, trees = NESTED[name]
    buffer, larger = (make(capacity, sampler) for capacity in (16, 32))
    single, rows = make(16, by(1.0)), np.arange(16)
    has_priorities = "Prioritized" in repr(sampler)
    steps = plain_step(np.arange(12.0, dtype=np.float32)[:, None])

    @jax.jit
    def run():
        state = begun(buffer, steps)
        if has_priorities:
            index = buffer.get(state, rows[:3]).index
            state = buffer.update_priorities(state, index, np.float32([9, 5, 2]))
        others = (
            (buffer, buffer.drop(state, np.zeros(1, bool))),
            (larger, larger.adopt(state)),
            (single, single.adopt(state)),
        )
        draw(buffer, state, jax.random.key(0))
        return state, [one.get(its, rows).probability for one, its in ((buffer, state), *others)]

    state, (expected, *found, there) = run()
    assert expected.sum() == pytest.approx(1, rel=1e-5)
    if trees:
        priority = np.array([9, 5, 2, *[1] * 8])  # the newest row waits
        law = sum(share * priority**a / (priority**a).sum() for a, share in trees.items())
        np.testing.assert_allclose(expected[:11], law, rtol=1e-5)
    checkpointer = Checkpointer(tmp_path, buffer)
    checkpointer.save(state)
    restored = checkpointer.restore(nth(steps, (0, 0)))
    for got in (*found, get(buffer, restored, rows).probability):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    if has_priorities:  # the first of them
        assert there[0] / there[1] == pytest.approx(9 / 5, rel=1e-5)


def test_a_buffer_can_be_sampled_if_a_part_gives_items():
    """A part of fraction 0, or one that has consumed its rows, gives none."""
    whole = jr.blend(uniform=(jr.Uniform(), 0.0), priority=(jr.Prioritized(), 1.0))
    online, ones = jr.OnlineQueue(sampler=jr.Prioritized()), np.ones((3, 1), np.float32)

    @jax.jit
    def run(buffer):
        state = begun(buffer, ones, None, 0 * ones)
        if isinstance(buffer.sampler, jr.OnlineQueue):
            then, batch = buffer.pop(state, jax.random.key(0))
        else:
            then, batch = state, buffer.sample(state, jax.random.key(0))
        index = buffer.get(then, np.arange(3)).index
        states = state, then, buffer.update_priorities(then, index, ones[:, 0])
        can_sample = jnp.stack([buffer.can_sample(one) for one in states])
        return can_sample, buffer.metrics(then)["size"], batch.is_valid, batch.probability

    for sampler in (whole, jr.blend(inner=(whole, 0.5)), online):
        buffer = jr.items(capacity=8, batch_size=4, sampler=sampler)
        can_sample, size, is_valid, probability = jax.device_get(run(buffer))
        num = 3 * (sampler is online)
        assert can_sample.tolist() == [sampler is online, False, True]
        assert size == 0
        assert is_valid.tolist() == [k < num for k in range(4)]
        np.testing.assert_allclose(probability, is_valid / max(num, 1))


def test_a_part_without_rows_counts_as_little_as_one_without_priorities():
    """The newest row waits for its next observation: no part that gives items has a row."""
    sampler = jr.blend(uniform=(jr.Uniform(), 0.0), newest=(jr.Newest(num_rows=1), 1.0))
    sizes = {"capacity": 16, "batch_size": 4, "autoreset": "same_step_no_final_obs"}
    buffer = jr.transitions(**sizes, sampler=sampler)
    steps = plain_step(np.arange(3.0, dtype=np.float32)[:, None])
    state = begin(buffer, steps)
    assert not can_sample(buffer, state)
    assert not sample(buffer, state, jax.random.key(0)).is_valid.any()


def test_a_replay_waits_for_the_parts_that_give_the_items_of_a_call():
    sampler = jr.blend(uniform=(jr.Uniform(), 0.5), priority=(jr.Prioritized(), 0.5))
    buffer = jr.items(capacity=8, batch_size=4, sampler=sampler)
    replay = jr.Replay(buffer, example=np.float32(0))
    replay.add(np.ones((3, 1), np.float32), priority=np.zeros((3, 1), np.float32))
    of_priority = {"uniform": 0.0, "priority": 1.0}
    why = "3 rows, but none of a positive priority, or of the fractions asked for"
    for _ in range(2):  # before it is known that others can be drawn, and after
        with pytest.raises(TimeoutError, match=f"can be sampled yet, {why}: add steps first"):
            replay.sample(fractions=of_priority)
        assert replay.sample().is_valid.tolist() == [True, True, False, False]
    assert replay.sample(fractions={"uniform": 1.0, "priority": 0.0}).is_valid.all()
    replay.add(np.ones((3, 1), np.float32))
    assert replay.sample(fractions=of_priority).is_valid.all()


class InOrder(FirstRow):
    """Sample the first rows, in their order."""

    takes = ()

    def sample(self, state, sampleable, key, batch_size):
        row = jnp.arange(batch_size)
        return jr.samplers.Draw(state, row, jnp.full(batch_size, 0.1))


def test_the_rest_of_a_batch_is_taken_evenly_of_a_whole_batch():
    """A stratified sampler has an item of each part of the mass: none of these is preferred."""
    buffer = jr.items(capacity=64, batch_size=BATCH, sampler=jr.OnlineQueue(sampler=InOrder()))

    @jax.jit
    def run(keys):
        state = buffer.extend(buffer.init(0.0), jnp.arange(4.0)[:, None])
        return jax.vmap(lambda key: buffer.pop(state, key)[1].index.row)(keys)

    rows = np.asarray(run(jax.random.split(jax.random.key(7), KEYS)))
    assert (rows[:, :4] == np.arange(4)).all()
    assert (np.diff(rows[:, 4:], axis=1) > 0).all()
    check(np.bincount(rows[:, 4:].ravel(), minlength=BATCH), np.full(BATCH, 1 / BATCH))


class DreamerRule:
    """A plain reading of DreamerV3's replay. A worker's step completes the sequence of `length`
    steps that ends with it. Each sequence can be sampled; every `length`-th of a worker goes to the
    end of a queue, too. A batch takes sequences out of the queue while it has any."""

    def __init__(self, num_workers, length, num_stored):
        self.length, self.num_stored = length, num_stored
        self.num_steps, self.queue = [0] * num_workers, []

    def add(self, worker):
        self.num_steps[worker] += 1
        start = self.num_steps[worker] - self.length
        if start >= 0 and start % self.length == 0:
            self.queue.append((worker, start))

    def is_stored(self, worker, start, newer=0):
        return start >= self.num_steps[worker] + newer - self.num_stored

    def starts(self, newer):
        last = [steps - self.length for steps in self.num_steps]
        every = [(worker, s) for worker, end in enumerate(last) for s in range(end + 1)]
        return [one for one in every if self.is_stored(*one, newer)]

    def take(self, batch_size, newer):
        there = [one for one in self.queue if self.is_stored(*one, newer)]
        self.queue = there[batch_size:]
        return there[:batch_size]


ONLINE = {"num_envs": 2, "batch_size": 4, "autoreset": "same_step_no_final_obs"}


def test_an_online_queue_with_the_period_of_its_sequences_is_that_of_dreamer():
    """Each new sequence once, in its order, and all starts as likely as each other; also while
    batches lag behind. Here a sequence has the observation after its last step, too, so that it is
    complete a step later."""
    length, num_steps, stored = 3, 100, 16
    sampler = jr.OnlineQueue(period=length)
    sizes = ONLINE | {"capacity": 2 * stored, "length": length, "cross_episodes": True}
    buffer = jr.sequences(**sizes, sampler=sampler)
    r = np.random.default_rng(0)
    name = np.arange(2.0 * num_steps, dtype=np.float32).reshape(num_steps, 2)
    ends = r.random((num_steps, 2)) < 0.2
    steps = plain_step(name, terminated=ends)
    takes = r.random(num_steps) < np.where(np.arange(num_steps) < 60, 0.4, 0.03)

    @jax.jit
    def run(steps, takes):
        def go(state, now):
            time, step, takes = now
            state = buffer.add(state, step)
            taken, batch = buffer.pop(state, jax.random.key(time))
            rows = buffer.get(state, jnp.arange(buffer.capacity))
            seen = batch.experience.obs[:, 0], rows, buffer.metrics(state), buffer.can_add(state)
            return jax.tree.map(lambda a, b: jnp.where(takes, a, b), taken, state), seen

        state = buffer.init(nth(steps, (0, 0)))
        return jax.lax.scan(go, state, (jnp.arange(num_steps), steps, takes))[1]

    obs, rows, figures, has_room = jax.device_get(run(steps, takes))
    rule, num_taken, num_late = DreamerRule(2, length, stored), 0, 0
    for time in range(num_steps):
        if time:
            rule.add(0), rule.add(1)
        starts = rule.starts(newer=1)
        valid = rows.is_valid[time]
        named = lambda of: [(int(x) % 2, int(x) // 2) for x in of]
        assert sorted(named(rows.experience.obs[time][valid, 0])) == starts
        np.testing.assert_allclose(rows.probability[time][valid], 1 / max(len(starts), 1), 1e-6)
        waiting = [one for one in rule.queue if rule.is_stored(*one, newer=1)]
        assert figures["num_new"][time] == len(waiting)
        num_seen = num_taken + len(waiting) + figures["num_lost"][time]
        assert num_seen == sum(start % length == 0 for _, start in map(tuple, ever(rule)))
        oldest = min((start for _, start in waiting), default=None)
        assert oldest is None or has_room[time] == (oldest > time - stored + 1)
        if takes[time] and starts:
            new = rule.take(4, newer=1)
            num_taken += len(new)
            num_late += len(waiting) > 4
            assert named(obs[time][: len(new)]) == sorted(new)
            assert set(named(obs[time])) <= set(starts)
    assert num_taken > 40
    assert num_late > 0
    assert figures["num_lost"][-1] > 0


def ever(rule):
    """Return all starts that a rule has seen."""
    last = [steps - rule.length for steps in rule.num_steps]
    return [(worker, s) for worker, end in enumerate(last) for s in range(end + 1)]


def test_an_online_queue_takes_adopted_rows_as_sampled():
    old = jr.items(capacity=8, batch_size=2)
    rows = np.arange(4, dtype=np.float32)[:, None]
    state = begin(old, rows)
    sampler = jr.OnlineQueue(sampler=jr.Prioritized(alpha=1.0))
    buffer = jr.items(capacity=8, batch_size=4, sampler=sampler)
    state = extend(buffer, adopt(buffer, state), rows[:1] + 9, priority=rows[:1] + 3)
    state, batch = pop(buffer, state, jax.random.key(0))
    items = np.asarray(batch.experience)
    assert items[0] == 9
    np.testing.assert_allclose(batch.probability, np.where(items == 9, 3, 1) / 7, rtol=1e-5)
    larger = jr.items(capacity=16, batch_size=4, sampler=jr.OnlineQueue())
    state = adopt(larger, extend(buffer, state, rows[:2] + 10))
    assert pop(larger, state, jax.random.key(0))[1].experience[:2].tolist() == [10, 11]


def test_every_third_row_stays_new_in_another_buffer(tmp_path):
    """Of 8 rows, 0, 3 and 6 were new. The next new one is 9, which is not there yet; a clear keeps
    that count. A queue of every row takes the newest row, which waits, as new."""
    sizes = ONLINE | {"num_envs": 1, "sampler": jr.OnlineQueue(period=3)}
    buffer, larger = (jr.transitions(capacity=size, **sizes) for size in (16, 32))
    every = jr.transitions(capacity=16, **sizes | {"sampler": jr.OnlineQueue()})
    steps, key = plain_step(np.arange(15.0, dtype=np.float32)[:, None]), jax.random.key(0)
    example = nth(steps, (0, 0))

    @jax.jit
    def begin(steps):
        state = begun(buffer, steps)
        taken, batch = buffer.pop(state, key)
        others = larger.adopt(taken), buffer.drop(taken, np.zeros(1, bool)), buffer.clear(taken)
        num_new = buffer.metrics(state)["num_new"]
        return taken, others, every.adopt(taken), num_new, batch.experience.obs

    @jax.jit
    def go_on(one, state, steps):
        state = one.extend(state, steps)
        return one.metrics(state)["num_new"], one.pop(state, key)[1].experience.obs

    taken, (adopted, *others), of_every, num_new, obs = begin(nth(steps, slice(9)))
    assert (num_new, obs[:3].tolist()) == (3, [0, 3, 6])
    checkpointer = Checkpointer(tmp_path, buffer)
    checkpointer.save(taken)
    states = (taken, *others, checkpointer.restore(example))
    for one, its in ((larger, adopted), *((buffer, state) for state in states)):
        num_new, obs = go_on(one, its, nth(steps, slice(9, 15)))
        assert (num_new, obs[:2].tolist()) == (2, [9, 12])
    assert go_on(every, of_every, nth(steps, slice(9, 15)))[1][:4].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("rows", ["device", "host"])
def test_a_replay_looks_at_new_rows_and_takes_none(rows):
    """Prefetched batches have taken theirs."""
    buffer = jr.items(capacity=16, batch_size=2, sampler=jr.OnlineQueue())
    given = {"example": np.float32(0), "rows": rows, "framework": "numpy"}
    replay = jr.Replay(buffer, **given)
    for value in range(5):
        replay.add(np.float32([value]))
    looks = [replay.sample(consume=False).experience.tolist() for _ in range(2)]
    assert looks == [[0, 1], [0, 1]]
    assert replay.sample().experience.tolist() == [0, 1]
    assert replay.sample(3, consume=False).experience.tolist() == [2, 3, 4]
    assert replay.metrics()["num_new"] == 3
    ahead = jr.Replay(buffer, **given, prefetch=1, samples_per_insert=1.0)
    ahead.add(np.arange(5, dtype=np.float32)[:, None])
    assert ahead.sample().experience.tolist() == [0, 1]
    assert ahead.sample(consume=False).experience[0] == 4
    assert ahead.sample().experience.tolist() == [2, 3]


def replay_with_queue(num_added, **queue):
    """Return a replay that adds so many rows before each batch of 4, and samples for a while."""
    buffer = jr.items(capacity=64, batch_size=4, sampler=jr.OnlineQueue(**queue))
    replay = jr.Replay(buffer, example=np.float32(0))
    replay.add(np.zeros((40, 1), np.float32))  # a warm-up
    for _ in range(130):
        for _ in range(num_added):
            replay.add(np.zeros(1, np.float32))
        replay.sample()
    return replay


def test_a_replay_warns_once_of_a_queue_that_lags():
    with pytest.warns(UserWarning, match="sample: the online queue lags: .* rows are new") as found:
        replay = replay_with_queue(6)
    assert len(found) == 1
    lost = replay.metrics()["num_lost"]
    assert lost > 100
    assert f"{lost:,} new rows were overwritten before" in str(replay.inspect())
    replay = replay_with_queue(6, period=3)  # it catches up with the warm-up
    assert replay.metrics()["num_new"] == 0
    assert "were overwritten before" not in str(replay.inspect())


def test_members_of_a_mixture_may_have_fractions_of_a_call():
    """Its items are those of the members' own batches."""
    ours = jr.items(capacity=16, batch_size=1, sampler=jr.Prioritized(alpha=1.0, beta=1.0))
    mixture = jr.mix(one=(ours, 4), two=(jr.items(capacity=4, batch_size=1), 4))
    two = mixture.members[1][1]
    values = np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    states = {
        "one": begin(ours, values, None, values),
        "two": begin(two, -values),
    }

    @jax.jit
    def many(keys, part):
        fractions = {"one": part, "two": 1 - part}
        return jax.vmap(lambda key: mixture.sample(states, key, fractions=fractions))(keys)

    keys = jax.random.split(jax.random.key(0), KEYS)
    for part in (0.0, 0.3, 1.0):
        batch = jax.device_get(many(keys, part))
        assert (batch.source == (batch.experience < 0)).all()
        assert abs((batch.source == 0).mean() - part) < 0.02
        mine = batch.experience[batch.source == 0]
        check(np.bincount(np.int32(mine), minlength=9)[1:], values[:, 0] / values.sum())


def test_priorities_of_a_replays_mixture_reach_the_members_that_gave_the_items():
    """A batch with fractions has other numbers of items than the mixture."""
    member = jr.items(capacity=8, batch_size=1, sampler=jr.Prioritized(alpha=1.0))
    replay = jr.Replay(jr.mix(one=(member, 4), two=(member, 4)))
    for value in range(8):
        for sign, name in ((1, "one"), (-1, "two")):
            replay.add(np.float32([sign * (value + 1)]), member=name)
    batch = replay.sample(fractions={"one": 0.25, "two": 0.75})
    assert (batch.source == (batch.experience < 0)).all()
    replay.update_priorities(batch.index, np.where(batch.source == 1, 3, 2).astype(np.float32))
    for source, name in enumerate(("one", "two")):
        sampled = np.unique(np.abs(batch.experience[batch.source == source])).astype(int) - 1
        expected = np.ones(8)
        expected[sampled] = 2 + source
        got = replay.get(np.arange(8), member=name).probability
        np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-5)

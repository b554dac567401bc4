"""Groups of completions beside lists: arrivals in any order, late ones, versions, uses."""

import jax
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from tests.conftest import ALL
from tests.support.steps import nth, stacked

SIZE, CAPACITY, BATCH, N, TIME = 3, 5, 2, 4, 60
ADD, POP, CLEAR, CLOSE = range(4)


def example():
    return {"tokens": np.zeros(2, np.int32), "mask": np.zeros(2, bool), "reward": np.float16(0)}


class Lists:
    """The groups as lists: by their place, [number, completions, uses, is closed]."""

    def __init__(self, strategy, max_uses):
        self.strategy, self.max_uses = strategy, max_uses
        self.places, self.num_late = [None] * CAPACITY, 0

    def add(self, items):
        for number, *_ in items:
            here = self.places[number % CAPACITY]
            if number >= 0 and (here is None or here[0] < number):
                self.places[number % CAPACITY] = [number, [], 0, False]
        for number, version, reward, name in items:
            if number < 0:
                continue
            place = self.places[number % CAPACITY]
            if place[0] == number and len(place[1]) < SIZE and not place[3]:
                place[1].append((version, reward, name))
            else:
                self.num_late += 1

    def left(self, version, staleness):
        return {
            place[0]: place
            for place in self.places
            if place is not None
            and (len(place[1]) == SIZE or place[3])
            and place[2] < self.max_uses
            and version - min(one[0] for one in place[1]) <= staleness
            and (self.strategy != "variance" or np.var([one[1] for one in place[1]]) > 0)
        }

    def clear(self):
        for place in self.places:
            if place is not None:
                place[2] = self.max_uses

    def close(self, numbers, least):
        for number in numbers:
            place = self.places[number % CAPACITY]
            if place is not None and place[0] == number and len(place[1]) < SIZE and not place[3]:
                place[3] = True
                if len(place[1]) < least:
                    place[2] = self.max_uses


def history(seed):
    """Return operations, completions (number, version, reward, name), and the learner's version."""
    r, operations, clock = np.random.default_rng(seed), [], 0
    for time in range(TIME):
        operation = r.choice(4, p=[0.6, 0.3, 0.03, 0.07])
        items = []
        for _ in range(N):
            clock += 1
            number = r.choice([-1, clock // 6 + r.integers(-3, 3)], p=[0.1, 0.9])
            items.append(
                (max(int(number), -1), time // 3 - int(r.integers(3)), r.integers(3), clock)
            )
        operations.append((operation, items, time // 3, int(r.integers(1, 6))))
    return operations


def run(groups, operations, items, versions, staleness):
    def go(state, now):
        operation, items, version, staleness = now
        number, item_version, completions = items
        gate = {"version": version, "max_staleness": staleness}
        popped, batch = groups.pop(state, jax.random.key(version), **gate)
        size = groups.size(state, **gate)
        ways = [
            lambda: groups.add(state, completions, number, item_version),
            lambda: popped,
            lambda: groups.clear(state),
            lambda: groups.close(state, number, staleness),
        ]
        return jax.lax.switch(operation, ways), (batch, size, state.num_late)

    state = groups.init(example())
    return jax.lax.scan(go, state, (operations, items, versions, staleness))[1]


run_together = jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0, 0)), static_argnums=0)


def arrays_of(operations):
    items = np.array([items for _, items, *_ in operations])
    names = items[..., 3].astype(np.int32)
    completions = {
        "tokens": np.stack([names, -names], axis=-1),
        "mask": np.stack([names > 0, names % 2 == 0], axis=-1),
        "reward": items[..., 2].astype(np.float16),
    }
    kinds, versions, staleness = (np.array([one[k] for one in operations]) for k in (0, 2, 3))
    numbers = items[..., 0].astype(np.int32), items[..., 1].astype(np.int32), completions
    return kinds, numbers, versions, staleness


@pytest.mark.parametrize(("strategy", "max_uses"), [("random", 2), ("recent", 1), ("variance", 3)])
def test_groups_are_those_of_lists(strategy, max_uses):
    groups = jr.Groups(
        group_size=SIZE,
        capacity=CAPACITY,
        batch_size=BATCH,
        max_uses=max_uses,
        strategy=strategy,
    )
    histories = [history(seed) for seed in range(40 if ALL else 8)]
    arguments = [arrays_of(one) for one in histories]
    found = jax.device_get(run_together(groups, *stacked(arguments)))
    num_popped = num_short = 0
    for which, operations in enumerate(histories):
        model = Lists(strategy, max_uses)
        for time, (operation, items, version, staleness) in enumerate(operations):
            batch, size, num_late = nth(found, (which, time))
            left = model.left(version, staleness)
            assert (size, num_late) == (len(left), model.num_late)
            num_valid = min(BATCH, len(left))
            assert batch.is_valid.tolist() == [k < num_valid for k in range(BATCH)]
            numbers = batch.group[:num_valid].tolist()
            assert len(set(numbers)) == len(numbers)
            assert set(numbers) <= set(left)
            if strategy == "recent":
                assert numbers == sorted(left, reverse=True)[:num_valid]
            for k, number in enumerate(numbers):
                versions, rewards, names = zip(*left[number][1], strict=True)
                item, missing = nth(batch.experience, k), SIZE - len(names)
                num_short += missing > 0
                assert batch.mask[k].tolist() == [True] * len(names) + [False] * missing
                assert item["tokens"].tolist() == [[n, -n] for n in (*names, *[0] * missing)]
                assert item["reward"].tolist() == [*rewards, *[0] * missing]
                assert (batch.version[k], batch.num_uses[k]) == (min(versions), left[number][2] + 1)
            for leaf in jax.tree.leaves(batch.experience):
                assert not leaf[num_valid:].any()  # masks of tokens, too
            assert not batch.mask[num_valid:].any()
            if operation == ADD:
                model.add(items)
            elif operation == POP:
                num_popped += num_valid
                for number in numbers:
                    left[number][2] += 1
            elif operation == CLEAR:
                model.clear()
            else:
                model.close([number for number, *_ in items], staleness)
    assert num_popped > 40
    assert num_short > 2


@pytest.mark.parametrize("strategy", ["random", "variance"])
def test_groups_are_as_probable_as_their_strategy_says(strategy):
    groups = jr.Groups(
        group_size=2, capacity=8, batch_size=1, strategy=strategy, reward_key="reward"
    )
    spread = np.array([0, 1, 2, 3, 0], np.float32)  # of groups 0 to 4; group 5 is not complete
    number = np.array([*range(5), *range(6)], np.int32)
    reward = np.concatenate([spread, -spread, [9]]).astype(np.float32)

    @jax.jit
    def draws(keys):
        state = groups.init({"reward": np.float32(0)})
        state = groups.add(state, {"reward": reward}, number, 0)
        return jax.vmap(lambda key: groups.pop(state, key)[1].group[0])(keys)

    counts = np.bincount(draws(jax.random.split(jax.random.key(0), 20_000)), minlength=5)
    law = np.full(5, 0.2) if strategy == "random" else spread**2 / (spread**2).sum()
    assert (counts[law == 0] == 0).all()
    assert len(counts) == 5
    assert stats.chisquare(counts[law > 0], 20_000 * law[law > 0]).pvalue > 1e-4


def test_a_group_of_equal_rewards_has_no_variance():
    groups = jr.Groups(group_size=3, capacity=4, batch_size=2, strategy="variance")
    reward = np.array([0.1] * 3 + [1e8] * 3 + [0.7, 0.7, np.nextafter(np.float32(0.7), 1)])

    @jax.jit
    def run():
        state = groups.init({"reward": np.float32(0)})
        items = {"reward": reward.astype(np.float32)}
        state = groups.add(state, items, np.repeat(np.arange(3), 3), 0)
        return state.variance, groups.pop(state, jax.random.key(0))[1].group

    variance, group = jax.device_get(run())
    assert ((variance > 0).tolist(), group.tolist()) == ([False, False, True, False], [2, -1])


def test_the_count_of_late_completions_stops_at_its_maximum():
    groups = jr.Groups(group_size=1, capacity=1, batch_size=1)

    @jax.jit
    def add():
        state = groups.init(np.float32(0)).replace(num_late=np.int32(2**31 - 2))
        return groups.add(state, np.zeros(4, np.float32), np.zeros(4, np.int32), 0).num_late

    assert int(add()) == 2**31 - 1


def test_a_compiled_buffer_has_the_same_methods():
    groups = jr.jit(jr.Groups(group_size=1, capacity=4, batch_size=2))
    empty = jax.jit(lambda: groups.init(np.zeros(3, np.float32)))()
    state = groups.add(empty, np.ones((2, 3), np.float32), np.arange(2), 0)
    assert repr(state).startswith("GroupsState(4 groups x 1 rows, item f32[3]")
    closed = groups.close(state, np.arange(4))  # of complete groups it changes nothing
    state, batch = groups.pop(closed, jax.random.key(0), 4)
    assert batch.is_valid.tolist() == [True, True, False, False]
    assert int(groups.size(state)) == 0

"""Archives beside lists: the best items, reservoirs, scores that change, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay._util import random
from jaxreplay.storage import min_tree
from jaxreplay.types import Index
from tests.conftest import ALL
from tests.samplers.test_laws import check as check_law
from tests.support.hlo import check_in_place
from tests.support.refusals import refused
from tests.support.steps import nth, stacked

CAPACITY, BATCH, M, TIME = 11, 4, 5, 40
ADD, UPDATE, CLEAR = range(3)
BY_SCORE = jr.Prioritized(alpha=1.0)
STALE = jr.blend(score=(BY_SCORE, 0.7), stale=(jr.samplers.Stale(), 0.3))


def example():
    return {
        "name": np.int32(0),
        "max": {"return": np.float16(0)},
        "half": np.zeros(2, jnp.bfloat16),
    }


class Lists:
    """An archive as a list of [name, score, largest return, time of the score]."""

    def __init__(self, archive):
        self.archive, self.num_seen, self.now = archive, 0, 0
        self.rows = []

    def add(self, names, scores, mask, words):
        """Return the row of each item, -1 for none."""
        found, is_one = [-1] * M, mask & np.isfinite(scores)
        if self.archive.keep == "best":
            new = sorted(np.flatnonzero(is_one), key=lambda k: -scores[k])
            free = [(-np.inf, row) for row in range(len(self.rows), CAPACITY)]
            old = sorted([*free, *((one[1], row) for row, one in enumerate(self.rows))])
            for k, (lowest, row) in zip(new, old, strict=False):
                if scores[k] > lowest:
                    found[k] = row
        seen = self.num_seen
        for k in np.flatnonzero(is_one):
            self.num_seen += 1
            if self.archive.keep == "reservoir":
                row = words[k] * self.num_seen >> 64
                row = seen if seen < CAPACITY else row
                seen += 1
                found = [-1 if one == row else one for one in found]
                found[k] = row if row < CAPACITY else -1
        self.rows += [None] * (max(*found, len(self.rows) - 1) + 1 - len(self.rows))
        for k, row in enumerate(found):
            if row >= 0:
                self.rows[row] = [names[k], scores[k], names[k], self.now + k + 1]
        self.now += M
        return found

    def update(self, names, rows, scores, returns):
        """Set the scores of rows that have the items of these names."""
        for row in set(rows):
            own = [k for k in range(BATCH) if rows[k] == row and np.isfinite(scores[k])]
            if own and 0 <= row < len(self.rows) and self.rows[row][0] == names[own[0]]:
                best = max(own, key=lambda k: (scores[k], k))
                name = self.rows[row][0]
                self.rows[row] = [name, scores[best], returns[best], self.now + own[-1] + 1]
        self.now += BATCH

    def probabilities(self):
        score = np.array([max(one[1], 0) for one in self.rows], np.float64)
        by_score = score / max(score.sum(), 1e-30)
        if self.archive.sampler == jr.Uniform():
            return np.ones(len(self.rows)) / max(len(self.rows), 1)
        if self.archive.sampler == BY_SCORE:
            return by_score
        time = np.array([self.now - one[3] for one in self.rows], np.float64)
        time = time if time.any() else time + 1
        return 0.7 * by_score + 0.3 * time / max(time.sum(), 1)


def run(archive, operations, items, updates):
    """Run a history. Return what each method says of the state before each operation."""

    def go(carry, now):
        state, index, names = carry
        time, operation, (name, score, mask), (new_score, returns) = now
        key = jax.random.key(time)
        batch = archive.sample(state, key)
        added = {"name": name, "max": {"return": name}, "half": jnp.stack([name, name], axis=-1)}
        added = jax.tree.map(lambda new, old: new.astype(old.dtype), added, example())
        after, own = archive.add(state, added, score, key=key, mask=mask)
        ways = [
            lambda: after,
            lambda: archive.update_scores(state, index, new_score, {"max": {"return": returns}}),
            lambda: archive.clear(state),
        ]
        seen = {
            "size": archive.size(state),
            "can_sample": archive.can_sample(state),
            "rows": archive.get(state, jnp.arange(CAPACITY)),
            "old": archive.get(state, index).is_valid,
            "batch": batch,
            "added": own.row,
            "names": archive.get(after, own).experience["name"],
            "again": archive.get(after, archive.get(after, own).index).is_valid,
            "words": random.words(key, M),
            "num_seen": archive.metrics(state)["num_seen"],
            "updated": (names, index.row),
        }
        # an index is used some time after its sample
        later = time % 3 == 0
        new = (batch.index, batch.experience["name"])
        kept = jax.tree.map(lambda x, y: jnp.where(later, x, y), new, (index, names))
        return (jax.lax.switch(operation, ways), *kept), seen

    state = archive.init(example())
    none = jnp.full(BATCH, -1)
    start = state, Index(row=none, lap=none.astype(jnp.uint32)), none
    times = jnp.arange(len(operations))
    return jax.lax.scan(go, start, (times, operations, items, updates))[1]


jitted_run = jax.jit(run, static_argnums=0)
run_together = jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0)), static_argnums=0)


def history(seed):
    r = np.random.default_rng(seed)
    operations = r.choice(3, TIME, p=[0.6, 0.37, 0.03])
    scores = lambda num: np.where(  # few values, so that many are equal; some are negative
        r.random((TIME, num)) < 0.1,
        r.choice([np.nan, np.inf, -np.inf], (TIME, num)),
        r.integers(-2, 9, (TIME, num)) / 4,
    ).astype(np.float32)
    names = np.arange(1, TIME * M + 1, dtype=np.int32).reshape(TIME, M)
    items = names, scores(M), r.random((TIME, M)) < 0.8
    return (
        operations,
        items,
        (scores(BATCH), r.integers(300, size=(TIME, BATCH)).astype(np.float16)),
    )


@pytest.mark.parametrize(
    ("keep", "sampler"),
    [("best", jr.Uniform()), ("best", STALE), ("reservoir", BY_SCORE)],
    ids=["best, uniform", "best, stale", "reservoir, by score"],
)
def test_archives_are_those_of_lists(keep, sampler):
    archive = jr.Archive(capacity=CAPACITY, batch_size=BATCH, keep=keep, sampler=sampler)
    histories = [history(seed) for seed in range(60 if ALL else 10)]
    found = jax.device_get(run_together(archive, *stacked(histories)))
    alone = jax.device_get(jitted_run(archive, *histories[0]))
    near = lambda one, other: np.testing.assert_allclose(
        np.float64(one), np.float64(other), rtol=1e-6, atol=1e-6
    )
    jax.tree.map(near, nth(found, 0), alone)
    num_stale = num_replaced = 0
    for which, (operations, items, updates) in enumerate(histories):
        lists = Lists(archive)
        for time, operation in enumerate(operations):
            seen = nth(found, (which, time))
            size, law = len(lists.rows), lists.probabilities()
            assert (seen["size"], seen["num_seen"]) == (size, lists.num_seen)
            assert seen["can_sample"] == (law.sum() > 0)
            rows, batch = seen["rows"], seen["batch"]
            assert rows.is_valid.tolist() == [row < size for row in range(CAPACITY)]
            np.testing.assert_allclose(rows.probability[:size], law, rtol=1e-5)
            names = np.array([one[0] for one in lists.rows], np.int32)
            np.testing.assert_array_equal(rows.experience["name"][:size], names)
            np.testing.assert_array_equal(
                rows.experience["half"][:size, 1], names.astype(jnp.bfloat16)
            )
            returns = np.array([one[2] for one in lists.rows], np.float16)
            np.testing.assert_array_equal(rows.experience["max"]["return"][:size], returns)
            if batch.is_valid.any():
                row = batch.index.row[batch.is_valid]
                assert (names[row] == batch.experience["name"][batch.is_valid]).all()
                np.testing.assert_allclose(batch.probability[batch.is_valid], law[row], rtol=1e-5)
                assert (law[row] > 0).all()
            old_names, old_rows = seen["updated"]
            is_same = [
                0 <= row < size and names[row] == name
                for name, row in zip(old_names, old_rows, strict=True)
            ]
            assert seen["old"].tolist() == is_same
            num_stale += sum(old_rows >= 0) - sum(is_same)
            # what the operation does
            name, score, mask = nth(items, time)
            high, low = seen["words"]
            words = [int(one) << 32 | int(two) for one, two in zip(high, low, strict=True)]
            if operation == ADD:
                added = lists.add(name, score, mask, words)
                assert seen["added"].tolist() == added
                kept = [k for k in range(M) if added[k] >= 0]
                assert seen["again"].tolist() == [row >= 0 for row in added]
                assert seen["names"][kept].tolist() == name[kept].tolist()
                num_replaced += sum(row < size for row in added if row >= 0)
            elif operation == UPDATE:
                lists.update(old_names, old_rows, *nth(updates, time))
            else:
                lists.rows, lists.num_seen = [], 0
    assert num_stale > 20
    assert num_replaced > 20


def test_each_item_is_kept_with_the_same_probability():
    archive = jr.Archive(capacity=4, batch_size=1, keep="reservoir")

    @jax.jit
    @jax.vmap
    def kept(key):
        state = archive.init(jnp.int32(0))
        add = lambda state, now: archive.add(state, now[0], key=now[1])
        names = jnp.arange(20).reshape(4, 5)
        state, _ = jax.lax.scan(add, state, (names, jax.random.split(key, 4)))
        return archive.get(state, jnp.arange(4)).experience

    names = np.asarray(kept(jax.random.split(jax.random.key(0), 20_000)))
    check_law(np.bincount(names.ravel(), minlength=20), np.full(20, 1 / 20))
    assert (np.diff(np.sort(names)) > 0).all()


def test_a_tree_of_minima_finds_the_smallest_of_any_number_of_leaves():
    @functools.partial(jax.jit, static_argnums=(2, 3))
    def found(index, value, capacity, num):
        levels = min_tree.filled(capacity, 3, np.inf)
        return min_tree.smallest(min_tree.put(levels, 3, index, value), 3, num)

    r = np.random.default_rng(0)
    for capacity, num in ((1, 1), (3, 2), (28, 28), (82, 5)):
        value = r.integers(9, size=capacity).astype(np.float32)
        index = r.permutation(capacity).astype(np.int32)
        leaves = np.empty(capacity, np.float32)
        leaves[index] = value
        node, lowest = found(index, value, capacity, num)
        right = np.argsort(leaves, stable=True)[:num]
        assert (node.tolist(), lowest.tolist()) == (right.tolist(), leaves[right].tolist())


@pytest.mark.parametrize(
    ("keep", "sampler"),
    [("best", BY_SCORE), ("reservoir", jr.Uniform())],
    ids=["best", "reservoir"],
)
def test_no_call_makes_an_array_as_large_as_the_archive(keep, sampler):
    archive = jr.Archive(capacity=1 << 14, batch_size=8, keep=keep, sampler=sampler)
    items, score = {"x": np.zeros((8, 3), np.float32)}, np.ones(8, np.float32)
    state = jax.eval_shape(lambda: archive.init(nth(items, 0)))
    key = jax.random.key(0)

    def loop(state, _):
        state, _ = archive.add(state, items, score, key=key)
        batch = archive.sample(state, key)
        if keep == "best":
            state = archive.update_scores(state, batch.index, batch.experience["x"].sum(axis=1))
        return archive.add(state, batch.experience, score, key=key)[0], batch.weight

    score = score if keep == "best" else None
    add = lambda state: archive.add(state, items, score, key=key)[0]
    for call, donated in (
        (add, 0),
        (lambda state: archive.sample(state, key), None),
        (lambda state: jax.lax.scan(loop, state, length=4), 0),
    ):
        check_in_place(call, (state,), num_elements=1 << 14, donated=donated)


def test_the_number_of_items_stops_at_its_maximum_and_empty_calls_change_nothing():
    archive = jr.Archive(capacity=2, batch_size=1, keep="reservoir")

    @jax.jit
    def add():
        state = archive.init(np.float32(0)).replace(num_seen=np.int32(2**31 - 2))
        state, none = archive.add(state, np.zeros(0, np.float32), key=jax.random.key(0))
        return none.row, archive.add(state, np.zeros(4, np.float32), key=jax.random.key(0))[0]

    none, state = add()
    assert (none.shape, int(state.num_seen)) == ((0,), 2**31 - 1)


def test_a_compiled_archive_has_the_same_methods():
    archive = jr.jit(jr.Archive(capacity=4, batch_size=2))
    empty = archive.init(np.zeros(3, np.float32))
    assert repr(empty).startswith("ArchiveState(1 archive x 4 rows, item f32[3]")
    state, index = archive.add(empty, np.ones((2, 3), np.float32), np.array([2, 1]))
    state = archive.update_scores(state, index, np.zeros(2))
    assert state.scores[0].tolist() == [0, 0, -np.inf, -np.inf]
    with refused(r"score: got key<fry>\[\], expected float32\[2\]"):
        archive.add(state, np.ones((2, 3), np.float32), jax.random.key(0))
    with refused("add: this state was donated to an earlier call"):
        archive.add(empty, np.ones((2, 3), np.float32), np.array([2, 1]))


@pytest.mark.no_xla
def test_mistakes_are_answered():
    sizes = {"capacity": 4, "batch_size": 2}
    with refused("keep must be one of .*'reservoir'.*, got 'worst'"):
        jr.Archive(**sizes, keep="worst")
    inner = jr.blend(old=(jr.Recent(decay=0.5), 1))
    for sampler in (jr.Queue(), jr.Newest(num_rows=1), jr.blend(inner=(inner, 1))):
        with refused("goes by the order of rows in time, which an archive does not keep"):
            jr.Archive(**sizes, sampler=sampler)
    with refused("capacity"):
        jr.Archive(capacity=0, batch_size=1)
    with refused("the example has no leaves"):
        jr.Archive(**sizes).init({})
    archive, chance = jr.Archive(**sizes), jr.Archive(**sizes, keep="reservoir")
    state = jax.eval_shape(lambda: archive.init({"x": np.float32(0)}))
    reservoir = jax.eval_shape(lambda: chance.init({"x": np.float32(0)}))
    items, score = {"x": np.zeros(3, np.float32)}, np.zeros(3)
    index = Index(row=np.zeros(2, np.int32), lap=np.zeros(2, np.uint32))
    for message, own, its, method, *given in (
        ('keep="best" needs the score of each item', archive, state, "add", items),
        ('keep="reservoir" needs a key', chance, reservoir, "add", items),
        ("a reservoir has scores for a sampler", chance, reservoir, "add", items, score),
        (
            r"x: got float32\[\], expected float32\[1\]",
            archive,
            state,
            "add",
            {"x": np.float32(0)},
            0,
        ),
        ("index must be .* got a dict of 1", archive, state, "get", {"x": 0}),
        (
            r"score: got float32\[2\], expected float32\[3\]",
            archive,
            state,
            "add",
            items,
            score[:2],
        ),
        (
            r"x: got bool\[3\], expected float32\[3\]",
            archive,
            state,
            "add",
            {"x": score > 0},
            score,
        ),
        ("score: got bool", archive, state, "update_scores", index, np.zeros(2, bool)),
        ("index must be the batch.index", archive, state, "update_scores", 0, score),
        ("a reservoir has scores for a sampler", chance, reservoir, "update_scores", index, score),
        (
            "no leaf of a row is named y",
            archive,
            state,
            "update_scores",
            index,
            score[:2],
            {"y": 1},
        ),
        ("scores", archive, reservoir, "size"),
        ("needs a state and a key", archive, state, "sample"),
    ):
        with refused(message, (ValueError, TypeError)):
            jax.eval_shape(lambda state: getattr(own, method)(state, *given), its)  # noqa: B023
    with refused("must be an ArchiveState, as init and add return it, got a dict"):
        archive.size({})

"""The sum tree alone: exact parents, a search that never enters a node without mass, hostile input,
and a long run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxreplay as jr
from tests.conftest import SOAK

CAPACITIES = (1, 2, 7, 8, 9, 64, 65, 1000)
FAN_OUTS = (2, 8, 32)
FORMS = [{"fan_out": width, "in_line": False} for width in FAN_OUTS] + [
    {"fan_out": width, "in_line": True} for width in (2, 32)
]


def tree_of(mass, **config):
    tree = jr.samplers.SumTree(capacity=len(mass), **config)
    return tree, tree.set(tree.init(), jnp.arange(len(mass)), jnp.asarray(mass, jnp.float32))


def check_parents(tree, state, leaves):
    """Check that each level holds the sums of the level below, and that the total and the positive
    minimum are those of the leaves, in float64."""
    np.testing.assert_array_equal(np.asarray(state.sums[0])[: tree.capacity], leaves)
    np.testing.assert_allclose(tree.total(state), leaves.sum(dtype=np.float64), rtol=1e-6)
    below = np.asarray(state.sums[0], np.float64)
    nodes = np.concatenate([np.zeros(0), *state.sums[1:]])  # of all levels above
    while len(below) > state.fan_out:
        sums = below.reshape(-1, state.fan_out).sum(axis=1)
        size = -(-len(sums) // state.fan_out) * state.fan_out
        below, nodes = nodes[:size], nodes[size:]
        np.testing.assert_allclose(below[: len(sums)], sums, rtol=1e-6)
        assert not below[len(sums) :].any()
    assert not nodes.size
    if tree.has_minimum:
        assert float(tree.minimum(state)) == min(leaves[leaves > 0], default=np.inf)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("form", FORMS)
def test_sets_and_ranges_leave_exact_parents(capacity, form):
    tree = jr.samplers.SumTree(capacity=capacity, has_minimum=True, **form)
    state, leaves, r = tree.init(), np.zeros(capacity, np.float32), np.random.default_rng(capacity)
    set_, set_unique, set_range = (
        jax.jit(tree.set),
        jax.jit(tree.set_unique),
        jax.jit(tree.set_range),
    )
    length = max(1, capacity // 3)
    for _ in range(20):
        start, mass, where = (
            r.integers(capacity),
            r.random(length).astype(np.float32),
            r.random(length) < 0.6,
        )
        state = set_range(state, jnp.int32(start), mass, where)
        leaves[((start + np.arange(length)) % capacity)[where]] = mass[where]
        index = r.permutation(capacity + 5)[:3].astype(np.int32)
        state = set_unique(state, index, mass[:1].repeat(3)[: len(index)])
        leaves[index[index < capacity]] = mass[0]
        index = r.integers(-2, capacity + 40, size=6).astype(np.int32)
        mass = r.random(6).astype(np.float32) * (r.random(6) < 0.7)
        state = set_(state, index, mass)
        for i in set(index[(index >= 0) & (index < capacity)]):
            leaves[i] = mass[index == i].max()
        check_parents(tree, state, leaves)
    state = set_range(
        state, jnp.int32(capacity // 2), np.ones(capacity, np.float32), np.ones(capacity, bool)
    )
    check_parents(tree, state, np.ones(capacity, np.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_a_bad_mass_is_ignored(bad):
    tree, state = tree_of([1.0, 2.0, 3.0])
    changed = tree.set(state, jnp.array([1, 0]), jnp.array([bad, 5.0]))
    np.testing.assert_array_equal(changed.sums[0][:3], [5.0, 2.0, 3.0])


def test_of_duplicates_the_largest_wins_in_any_order():
    tree, state = tree_of([9.0, 1.0, 1.0])
    index, mass = jnp.array([0, 1, 0, 0, 1]), jnp.array([0.5, 0.0, 2.0, 1.0, 0.25])
    for order in ([0, 1, 2, 3, 4], [2, 0, 3, 4, 1], [3, 4, 1, 2, 0]):
        changed = tree.set(state, index[jnp.array(order)], mass[jnp.array(order)])
        np.testing.assert_array_equal(changed.sums[0][:3], [2.0, 0.25, 1.0])


@pytest.mark.parametrize("form", FORMS)
def test_find_returns_the_leaf_in_which_the_target_lies(form):
    mass = np.array([0, 1, 0, 3, 0, 0, 4, 0, 0, 8, 0], np.float32)  # total: 16
    tree, state = tree_of(mass, **form)
    leaf, found = tree.find(state, jnp.array([0, 0.5, 1, 3.99, 4, 7.5, 8, 15.99, 16]) / 16)
    assert leaf.tolist() == [1, 1, 3, 3, 6, 6, 9, 9, 9]
    assert found.tolist() == mass[leaf].tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_find_never_returns_a_leaf_without_mass(form, seed):
    r = np.random.default_rng(seed)
    mass = np.float32(10.0) ** r.integers(-30, 30, size=777).astype(np.float32) * (
        r.random(777) < 0.05
    )
    tree, state = tree_of(mass, **form)
    below_one = np.nextafter(np.float32(1), np.float32(0))
    target = jnp.concatenate(
        [jnp.array([0.0, 1.0, below_one, 1e-45]), jnp.asarray(r.random(5000), jnp.float32)]
    )
    for word in (
        None,
        jnp.zeros(len(target), jnp.uint32),
        jnp.full(len(target), 2**32 - 1, jnp.uint32),
    ):
        leaf, found = tree.find(state, target, word)
        assert (np.asarray(found) > 0).all()
        np.testing.assert_array_equal(mass[leaf], found)


def test_find_in_an_empty_tree_has_no_mass():
    for form in FORMS:
        tree = jr.samplers.SumTree(capacity=100, **form)
        leaf, mass = tree.find(tree.init(), jnp.array([0.0, 0.5, 1.0]))
        assert mass.tolist() == [0, 0, 0]
        assert ((leaf >= 0) & (leaf < 100)).all()


def test_one_leaf_with_all_the_mass_is_always_found():
    tree, state = tree_of(np.eye(1, 4096, 2077)[0])
    leaf, _ = tree.find(state, jax.random.uniform(jax.random.key(0), (10_000,)))
    assert set(leaf.tolist()) == {2077}


@pytest.mark.parametrize("form", FORMS)
def test_a_leaf_is_found_in_proportion_to_its_mass(form):
    """Chi-square with independent draws; the fixed key fails by chance once in 10^4."""
    mass = np.random.default_rng(0).gamma(0.5, size=500).astype(np.float32)
    tree, state = tree_of(mass, **form)
    target, word = (
        jax.random.uniform(jax.random.key(1), (400_000,)),
        jax.random.bits(jax.random.key(2), (400_000,)),
    )
    counts = np.bincount(tree.find(state, target, word)[0], minlength=500)
    expected = mass / mass.sum(dtype=np.float64) * counts.sum()
    large = expected > 5
    table = (
        np.append(counts[large], counts[~large].sum()),
        np.append(expected[large], expected[~large].sum()),
    )
    assert stats.chisquare(*table, sum_check=False).pvalue > 1e-4


def test_the_last_levels_are_as_even_as_the_first():
    """For 4 M equal leaves, a float32 target alone has 4 steps a leaf. The additional random bits
    make the eight siblings of a node equally likely."""
    capacity = 1 << 22
    tree = jr.samplers.SumTree(capacity=capacity, fan_out=8)
    state = tree.set_range(tree.init(), jnp.int32(0), jnp.ones(capacity), jnp.ones(capacity, bool))
    state = tree.set(state, jnp.array([5]), jnp.array([0.3]))  # the sums are no powers of two
    find = jax.jit(tree.find)
    counts = np.zeros(8)
    for key in jax.random.split(jax.random.key(0), 10):
        keys = jax.random.split(key)
        leaf, _ = find(
            state, jax.random.uniform(keys[0], (200_000,)), jax.random.bits(keys[1], (200_000,))
        )
        counts += np.bincount(np.asarray(leaf) % 8, minlength=8)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_a_long_run_does_not_drift():
    """After updates of a half-filled tree, the root is the leaves' sum, and only leaves with mass
    are found. A tree of float32 differences drifts by 1e-4 in 40 000 such updates, and then returns
    leaves that were never written."""
    capacity, batch, calls = (1_000_000, 256, 3907) if SOAK else (20_000, 256, 400)  # 10^6 updates
    draws = 10_000_000 if SOAK else 300_000
    tree = jr.samplers.SumTree(capacity=capacity)
    filled = capacity // 2

    def update(state, key):
        rows, masses, zeros = jax.random.split(key, 3)
        index = jax.random.randint(rows, (batch,), 0, filled)
        mass = jnp.exp(3 * jax.random.normal(masses, (batch,))) * (
            jax.random.uniform(zeros, (batch,)) < 0.9
        )
        return tree.set(state, index, mass), None

    ones = jnp.ones(filled)
    state = tree.set_range(tree.init(), jnp.int32(0), ones, ones > 0)
    state, _ = jax.jit(lambda state, keys: jax.lax.scan(update, state, keys))(
        state, jax.random.split(jax.random.key(0), calls)
    )
    check_parents(tree, state, np.asarray(state.sums[0])[:capacity])

    def draw(key):
        keys = jax.random.split(key)
        leaf, mass = tree.find(
            state, jax.random.uniform(keys[0], (10_000,)), jax.random.bits(keys[1], (10_000,))
        )
        return jnp.max(leaf), jnp.min(mass), jnp.min(tree.get(state, leaf))

    last, smallest, stored = jax.lax.map(draw, jax.random.split(jax.random.key(1), draws // 10_000))
    assert last.max() < filled
    assert smallest.min() > 0
    assert stored.min() > 0


def test_a_bad_tree_is_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        jr.samplers.SumTree(capacity=0)
    with pytest.raises(ValueError, match="fan_out must be at least 2, got 1"):
        jr.samplers.SumTree(capacity=4, fan_out=1)
    tree = jr.samplers.SumTree(capacity=4)
    with pytest.raises(ValueError, match="has_minimum=True"):
        tree.minimum(tree.init())


def test_a_state_of_another_tree_is_refused():
    small, wide = (
        jr.samplers.SumTree(capacity=100, fan_out=8),
        jr.samplers.SumTree(capacity=100, fan_out=16),
    )
    state = small.init()
    calls = (
        lambda tree: tree.set(state, jnp.zeros(1, jnp.int32), jnp.ones(1)),
        lambda tree: tree.set_unique(state, jnp.zeros(1, jnp.int32), jnp.ones(1)),
        lambda tree: tree.set_range(state, jnp.int32(0), jnp.ones(1), jnp.ones(1, bool)),
        lambda tree: tree.get(state, jnp.zeros(1, jnp.int32)),
        lambda tree: tree.find(state, jnp.zeros(1)),
    )
    for call in calls:
        call(small)
        for other in (wide, jr.samplers.SumTree(capacity=1000, fan_out=8)):
            with pytest.raises(
                ValueError,
                match=r"the state is not of this tree, .*: its sums have the shapes "
                r"\[\(104,\), \(16,\), \(8,\)\]",
            ):
                call(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: (sums[0], sums[-1][:1]),
        lambda sums: (sums[0], sums[-1][:0]),
        lambda sums: [array[None] for array in sums],
    ],
    ids=["a root of one child", "a root without children", "stacked"],
)
def test_a_state_of_no_tree_is_refused(change):
    tree = jr.samplers.SumTree(capacity=100)
    state = tree.init()
    with pytest.raises(ValueError, match="the state is not of this tree"):
        tree.get(state.replace(sums=tuple(change(state.sums))), jnp.zeros(1, jnp.int32))

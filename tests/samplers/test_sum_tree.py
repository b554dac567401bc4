"""The sum tree alone: exact parents, a search that never enters a node without mass, and hostile
input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL, thorough
from tests.samplers.test_laws import check as check_law
from tests.support.sampling import assert_same
from tests.support.steps import nth

NAN, INF = float("nan"), float("inf")
FORMS = [
    {"fan_out": width, "in_line": in_line}
    for width, in_line in ((2, False), (8, False), (32, False), (2, True), (32, True))
]
SHAPES = (
    [(form, capacity) for form in FORMS for capacity in (1, 2, 7, 8, 9, 64, 65, 1000, 4_100)]
    if ALL
    else [*zip(FORMS, (65, 4_100, 7, 8, 1000), strict=True), (FORMS[1], 9), (FORMS[1], 1)]
)


def check_parents(tree, state, total, leaves):
    """Check that each level holds the sums of the level below, and that the total is that of the
    leaves, in float64."""
    np.testing.assert_array_equal(state.sums[0][: tree.capacity], leaves)
    np.testing.assert_allclose(total, leaves.sum(dtype=np.float64), rtol=1e-6)
    below = np.asarray(state.sums[0], np.float64)
    nodes = np.concatenate([np.zeros(0), *state.sums[1:]])  # of all levels above
    while len(below) > state.fan_out:
        sums = below.reshape(-1, state.fan_out).sum(axis=1)
        size = -(-len(sums) // state.fan_out) * state.fan_out
        below, nodes = nodes[:size], nodes[size:]
        np.testing.assert_allclose(below[: len(sums)], sums, rtol=1e-6)
        assert not below[len(sums) :].any()
    assert not nodes.size


@jax.jit
def write_all(tree, ranges, unique, others):
    """Write by each method in turn. Return the state and its total after each write, and after a
    last one to all leaves; and all sums of a tree to which the same leaves are written at once."""

    def seen(state):
        return state, tree.total(state)

    def step(state, writes):
        first = tree.set_range(state, *writes[0])
        second = tree.set(first, *writes[1], are_distinct=True)
        third = tree.set(second, *writes[2])
        return third, [seen(state) for state in (first, second, third)]

    state, found = jax.lax.scan(step, tree.init(), (ranges, unique, others))
    ones, leaves = jnp.ones(tree.capacity), state.sums[0][: tree.capacity]
    at_once = tree.set_range(tree.init(), jnp.int32(0), leaves, ones > 0)
    last = tree.set_range(state, jnp.int32(tree.capacity // 2), ones, ones > 0)
    return found, seen(last), at_once.sums


@pytest.mark.parametrize(("form", "capacity"), SHAPES)
def test_writes_leave_exact_parents_ignore_bad_masses_and_keep_the_largest_of_duplicates(
    form, capacity
):
    tree = jr.samplers.SumTree(capacity=capacity, **form)
    r, steps, length = np.random.default_rng(capacity), 20, max(1, capacity // 3)
    mass = lambda size: r.random((steps, size), np.float32)
    ranges = r.integers(0, capacity, steps, np.int32), mass(length), mass(length) < 0.6
    rows = [r.permutation(np.arange(capacity + 5, dtype=np.int32))[:3] for _ in range(steps)]
    unique = np.stack(rows), mass(3)
    index = np.tile(r.integers(-2, capacity + 3, (steps, 6), np.int32), 2)  # duplicates
    special = r.choice(np.float32([NAN, INF, -INF, -1, 0]), index.shape)
    others = index, np.where(mass(12) < 0.6, mass(12), special)
    writes = ranges, unique, others
    found, last, at_once = jax.device_get(write_all(tree, *writes))
    leaves = np.zeros(capacity, np.float32)
    for step in range(steps):
        ((start, new, where), (rows, values), (index, masses)), states = nth((writes, found), step)
        leaves[((start + np.arange(length)) % capacity)[where]] = new[where]
        check_parents(tree, *states[0], leaves)
        leaves[rows[rows < capacity]] = values[rows < capacity]
        check_parents(tree, *states[1], leaves)
        is_good = (index >= 0) & (index < capacity) & np.isfinite(masses) & (masses >= 0)
        for leaf in set(index[is_good]):
            leaves[leaf] = masses[is_good & (index == leaf)].max()
        check_parents(tree, *states[2], leaves)
    check_parents(tree, *last, np.ones(capacity, np.float32))
    assert_same(states[2][0].sums, at_once)  # no history: rounding errors do not add up


NUM_LEAVES, NUM_TARGETS = 777, 10_000


@jax.jit
def find(tree, mass, target, word):
    state = tree.set_range(tree.init(), jnp.int32(0), mass, mass >= 0)
    return tree.find(state, target), tree.find(state, target, word)


def found(form, mass, target, word=0):
    """Return the leaves for targets, without and with another word of bits, after a check of their
    masses. All calls for a form share a program."""
    mass = np.pad(np.asarray(mass, np.float32), (0, NUM_LEAVES - len(mass)))
    tree = jr.samplers.SumTree(capacity=NUM_LEAVES, **form)
    given = np.resize(np.float32(target), NUM_TARGETS), np.resize(np.uint32(word), NUM_TARGETS)
    both = jax.device_get(find(tree, mass, *given))
    for leaf, own in both:
        assert ((leaf >= 0) & (leaf < NUM_LEAVES)).all()
        np.testing.assert_array_equal(own, mass[leaf])
    return [leaf for leaf, _ in both]


forms = pytest.mark.parametrize(
    "form", [thorough(form) if form["fan_out"] == 2 else form for form in FORMS]
)


@forms
def test_find_returns_the_leaf_in_which_the_target_lies(form):
    """So a leaf is found in proportion to its mass. Bounds of random masses are rounded."""
    mass = np.array([0, 1, 0, 3, 0, 0, 4, 0, 0, 8, 0])  # total: 16
    target = np.array([0, 0.5, 1, 3.99, 4, 7.5, 8, 15.99, 16]) / 16
    for leaf in found(form, mass, target):
        assert leaf[:9].tolist() == [1, 1, 3, 3, 6, 6, 9, 9, 9]
    r = np.random.default_rng(0)
    share = r.dirichlet(np.full(NUM_LEAVES, 0.5))
    target, word = r.random(NUM_TARGETS), r.integers(2**32, size=NUM_TARGETS)
    for leaf in found(form, 1000 * share, target, word):
        end = np.cumsum(share)[leaf]
        assert (np.abs(target - (end - share[leaf] / 2)) < share[leaf] / 2 + 1e-5).all()


@forms
def test_find_never_returns_a_leaf_without_mass(form):
    r = np.random.default_rng(0)
    below_one = np.nextafter(np.float32(1), np.float32(0))
    target = np.append([0.0, 1.0, below_one, 1e-45], r.random(5000))
    for word in (0, 2**32 - 1):
        for _ in range(4):
            is_there = r.random(NUM_LEAVES) < 0.05
            mass = np.float32(10) ** r.integers(-30, 30, NUM_LEAVES) * is_there
            for leaf in found(form, mass, target, word):
                assert (mass[leaf] > 0).all()
    for leaf in found(form, np.eye(1, NUM_LEAVES, 599)[0], target):
        assert (leaf == 599).all()
    found(form, np.zeros(NUM_LEAVES), target)  # an empty tree


@pytest.mark.thorough
def test_the_last_levels_are_as_even_as_the_first():
    """For 4 M equal leaves, a float32 target alone has 4 steps a leaf. The additional random bits
    make the eight siblings of a node equally likely."""
    tree = jr.samplers.SumTree(capacity=1 << 22, fan_out=8)

    @jax.jit
    def leaves():
        ones = jnp.ones(tree.capacity)
        state = tree.set_range(tree.init(), jnp.int32(0), ones, ones > 0)
        state = tree.set(state, jnp.array([5]), jnp.array([0.3]))  # the sums are no powers of two

        def draw(key):
            target, word = jax.random.split(key)
            target, word = jax.random.uniform(target, (200_000,)), jax.random.bits(word, (200_000,))
            return tree.find(state, target, word)[0] % 8

        return jax.lax.map(draw, jax.random.split(jax.random.key(0), 10))

    check_law(np.bincount(np.asarray(leaves()).ravel(), minlength=8), np.full(8, 1 / 8))


INDEX, ONE = np.zeros(1, np.int32), np.ones(1, np.float32)


@pytest.mark.no_xla
def test_a_state_of_another_tree_is_refused():
    """Also one whose root has no children, or too many axes."""
    small, free = (jr.samplers.SumTree(capacity=100, fan_out=width) for width in (8, 0))
    state, shapes = jax.eval_shape(small.init), r"\[\(104,\), \(16,\), \(8,\)\]"
    others = [
        (jr.samplers.SumTree(capacity=capacity, fan_out=width), state, shapes)
        for capacity, width in ((100, 16), (1000, 8))
    ]
    for shape in ((1,), (0,), (1, 8)):
        sums = state.sums[0], jax.ShapeDtypeStruct(shape, np.float32)
        others.append((free, state.replace(sums=sums), ""))
    for method, given in {
        "set": (INDEX, ONE),
        "set_range": (np.int32(0), ONE, ONE > 0),
        "get": (INDEX,),
        "find": (ONE,),
        "total": (),
    }.items():
        jax.eval_shape(getattr(small, method), state, *given)
        for tree, its, shapes in others:
            with pytest.raises(ValueError, match=rf"the state is not of this tree.*{shapes}"):
                jax.eval_shape(getattr(tree, method), its, *given)

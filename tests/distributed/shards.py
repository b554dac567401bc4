"""Each shard is the buffer that it would be alone; what is wrong is refused. On 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxreplay as jr
from jaxreplay.samplers import PrioritySampler
from tests.conftest import SOAK
from tests.distributed import common
from tests.support.buffers import KINDS, bits
from tests.support.hlo import sent

FEW = [case for case in common.CASES if case in KINDS or case.name == "future_pairs"]
PLACES = [
    (case, num, kind)
    for case in common.CASES
    for num, kind in ((1, "auto"), (2, "explicit"), (4, "auto"), (8, "explicit"))
    if SOAK or (num == 4 and case in FEW) or case.name.startswith("prioritized same_step")
]


def shard_keys(key, num):
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(jnp.arange(num))


@pytest.mark.parametrize(
    ("case", "num", "kind"), PLACES, ids=[f"{case.name}-{num}" for case, num, _ in PLACES]
)
def test_shards_equal_vmapped_buffers_to_the_bit(case, num, kind):
    buffer = jr.sharded(common.whole(case), common.mesh_of(num, kind))
    local = buffer.local.buffer
    assert local.capacity == 256 // num
    state = buffer.init(case.example())
    own = jax.vmap(lambda _: local.init(case.example()))(jnp.arange(num))
    assert bits(state) == bits(common.joined(own))
    time = 256 // 8 + 9  # it wraps

    def fill(state, block, mask, step, step_mask):
        return buffer.add(buffer.extend(state, block, mask), step, step_mask)

    given = (
        common.steps(case, 1, time),
        common.mask(local, 2, time),
        common.steps(case, 3),
        common.mask(local, 4),
    )
    state = jax.jit(fill, donate_argnums=0)(state, *given)
    parts = [
        common.divided(tree, num, axis) for tree, axis in zip(given, (1, 1, 0, 0), strict=True)
    ]
    own = jax.jit(jax.vmap(lambda s, b, m, t, n: local.add(local.extend(s, b, m), t, n)))(
        own, *parts
    )
    assert bits(state) == bits(common.joined(own))

    key = jax.random.key(5)
    batch = jax.jit(buffer.sample)(state, key)
    expected = jax.jit(jax.vmap(local.sample))(own, shard_keys(key, num))
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), expected)
    assert bits(batch.experience) == bits(flat.experience)
    assert bits(batch.index.lap) == bits(flat.index.lap)
    assert bits(batch.is_valid) == bits(flat.is_valid)
    first = np.repeat(np.arange(num) * local.capacity, 16 // num)
    np.testing.assert_array_equal(batch.index.row, flat.index.row + first)
    if num == 1:
        assert bits((batch.probability, batch.weight)) == bits((flat.probability, flat.weight))

    if isinstance(local.sampler, PrioritySampler):
        priority = jnp.arange(16.0) + 0.5
        state = jax.jit(buffer.update_priorities, donate_argnums=0)(state, batch.index, priority)
        own = jax.jit(jax.vmap(local.update_priorities))(
            own, expected.index, common.divided(priority, num)
        )
        largest = own.sampler.max_priority.max()
        np.testing.assert_array_equal(state.sampler.max_priority, jnp.full(num, largest))
        own = own.replace(sampler=own.sampler.replace(max_priority=jnp.full(num, largest)))
        assert bits(state) == bits(common.joined(own))
    if local.autoreset is not None and case.name != "future_pairs":
        ended = jnp.arange(8) != 3
        state = jax.jit(buffer.end_streams, donate_argnums=0)(state, ended)
        own = jax.jit(jax.vmap(local.end_streams))(own, common.divided(ended, num))
        assert bits(state) == bits(common.joined(own))
    sizes = jax.vmap(local.size)(own)
    assert int(jax.jit(buffer.size)(state)) == int(sizes.sum()) > 0
    assert bool(jax.jit(buffer.can_sample)(state))
    state = jax.jit(buffer.clear, donate_argnums=0)(state)
    assert bits(state) == bits(common.joined(jax.jit(jax.vmap(local.clear))(own)))
    assert not jax.jit(buffer.can_sample)(state)
    batch = jax.jit(buffer.sample)(state, key)
    assert not batch.is_valid.any()
    assert not batch.weight.any()


@pytest.mark.parametrize("draw", ["even", "global"])
def test_all_shards_know_the_largest_priority(draw):
    buffer, state = common.items([64, 30, 0, 5], np.ones(256), draw=draw)
    largest = lambda state: np.asarray(state.sampler.max_priority).tolist()
    assert largest(state) == [1] * 4
    step, mask = jnp.zeros(4), jnp.array([False, True, True, False])
    add = jax.jit(buffer.add, donate_argnums=0)
    state = add(state, step, mask, jnp.array([9.0, 3.0, jnp.nan, 9.0]))
    assert largest(state) == [3] * 4
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    update = jax.jit(buffer.update_priorities, donate_argnums=0)
    state = update(state, batch.index, jnp.where(jnp.arange(32) == 1, 7.0, 1.0))
    assert largest(state) == [7] * 4
    state = add(state, step, mask)
    figures = jax.jit(buffer.metrics)(state)
    assert figures["max_priority"] == 7
    assert figures["num_bad_priorities"] == 1
    assert figures["num_stale_updates"] == (~batch.is_valid).sum()


def test_rows_of_other_shards_are_ignored():
    """In an even draw an item's device has its row; in a global one any device may have it."""
    for draw in ("even", "global"):
        buffer, state = common.items([64, 64], np.ones(128), draw=draw)
        batch = jax.jit(buffer.sample)(state, jax.random.key(0))
        turned = jax.tree.map(lambda leaf: jnp.roll(leaf, 8), batch.index)
        state = jax.jit(buffer.update_priorities)(state, turned, jnp.full(16, 5.0))
        priorities = np.asarray(state.sampler.tree.sums[0]).reshape(2, -1)[:, :64].ravel()
        rows = set(np.asarray(batch.index.row).tolist())
        stale = int(jax.jit(buffer.metrics)(state)["num_stale_updates"])
        if draw == "even":
            assert (priorities == 1).all()
            assert stale == 16
        else:
            assert set(np.flatnonzero(priorities == 5)) == rows
            assert stale == 0


@pytest.mark.parametrize("draw", ["even", "global"])
def test_an_index_of_an_empty_buffer_names_no_row(draw):
    buffer, state = common.items([0, 0], np.ones(128), draw=draw)
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    assert not batch.is_valid.any()
    assert np.isfinite(batch.experience).all()
    state = jax.jit(buffer.add)(state, jnp.zeros(2))
    state = jax.jit(buffer.update_priorities)(state, batch.index, jnp.full(16, 9.0))
    assert (state.sampler.max_priority == 1).all()
    assert (jax.jit(buffer.sample)(state, jax.random.key(1)).probability == 0.5).all()
    assert jax.jit(buffer.metrics)(state)["num_stale_updates"] == 16


def test_a_mesh_of_two_axes_has_replicas():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    case = common.CASES[5]
    buffer = jr.sharded(common.whole(case), mesh)
    state = jax.jit(buffer.extend)(buffer.init(case.example()), common.steps(case, 1, 30))
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    for leaf in jax.tree.leaves((state, batch)):
        parts = {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), []).append(bits(shard.data))
        assert len(parts) == 4
        assert all(one == other for one, other in parts.values())
    both = jr.sharded(common.whole(case), mesh, ("data", "model"))
    assert both.num_shards == 8
    state = jax.jit(both.extend)(both.init(case.example()), common.steps(case, 1, 30))
    assert jax.jit(both.sample)(state, jax.random.key(0)).is_valid.all()
    other = jr.sharded(common.whole(case), common.mesh_of(8))
    expected = jax.jit(other.extend)(other.init(case.example()), common.steps(case, 1, 30))
    assert bits(state) == bits(expected)


@pytest.mark.parametrize("kind", common.AXES)
@pytest.mark.parametrize("draw", ["even", "global"])
def test_a_carry_keeps_its_type(kind, draw):
    """A loop of the user's, inside and outside of a `shard_map`: both give the same."""
    mesh = common.mesh_of(4, kind)
    case = next(case for case in common.CASES if case.name == "prioritized same_step, 3 steps")
    buffer = jr.sharded(common.whole(case), mesh, draw=draw)
    local = buffer.local
    block, keys = common.steps(case, 1, 12), jax.random.split(jax.random.key(3), 12)

    def loop(buffer, state, block, keys):
        def iteration(state, x):
            step, key = x
            state = buffer.add(state, step, priority=jnp.abs(step.reward))
            batch = buffer.sample(state, key)
            reward = jnp.abs(batch.experience.reward) + batch.weight
            return buffer.update_priorities(state, batch.index, reward), batch.index.row

        return jax.lax.scan(iteration, state, (block, keys))

    def inside(state, block, keys):
        state, rows = loop(local, local.own(state), block, keys)
        return local.stacked(state), rows

    specs = {
        "in_specs": (P("data"), P(None, "data"), P()),
        "out_specs": (P("data"), P(None, "data")),
    }
    block = jax.device_put(block, NamedSharding(mesh, P(None, "data")))
    keys = jax.device_put(keys, NamedSharding(mesh, P()))
    start = buffer.init(case.example())
    one = jax.jit(jax.shard_map(inside, mesh=mesh, **specs))(start, block, keys)
    two = jax.jit(lambda *given: loop(buffer, *given))(start, block, keys)
    assert bits(one) == bits(two)


class Heavy(jr.Prioritized):
    """Weights that one shard cannot tell."""

    def reference(self, state, sampleable):
        return jnp.float32(1)


class Latest(jr.samplers.Sampler):
    """No word on how probable a shard is."""


def test_what_cannot_be_sharded_is_refused():
    mesh = common.mesh_of(4)
    shape = {"capacity": 64, "num_envs": 4, "batch_size": 8}
    for sizes, problem in (
        ({"num_envs": 6, "capacity": 66}, "num_envs=6 cannot .* among 4 devices; 4 and 8 can"),
        ({"num_envs": 1}, "num_envs=1 cannot be divided among 4 devices; 4 can"),
        ({"batch_size": 2}, "batch_size=2 cannot .*; 4 can"),
    ):
        with pytest.raises(ValueError, match=problem):
            jr.sharded(jr.items(**(shape | sizes)), mesh)
    buffer = jr.sharded(jr.items(**shape), mesh)
    state = buffer.init(0.0)
    with pytest.raises(ValueError, match="sample: batch_size=10 cannot be divided"):
        buffer.sample(state, jax.random.key(0), 10)
    with pytest.raises(ValueError, match=r"got float32\[3\], expected float32\[4\]"):
        buffer.add(state, jnp.zeros(3))
    with pytest.raises(ValueError, match="the sampler Uniform has no priorities"):
        buffer.update_priorities(state, jnp.arange(8), jnp.ones(8))
    other, its_state = common.items([64] * 4, np.ones(256))
    with pytest.raises(ValueError, match=r"index must be the batch\.index of a sample"):
        other.update_priorities(its_state, jnp.arange(8), jnp.ones(8))
    with pytest.raises(
        ValueError, match=r"end_streams:\n  mask: got bool\[3\], expected bool\[4\]"
    ):
        buffer.end_streams(state, jnp.ones(3, bool))
    with pytest.raises(ValueError, match="with 4 shards of 16 rows; init makes it"):
        buffer.size(jr.items(**shape).init(0.0))
    own = jr.items(capacity=16, num_envs=1, batch_size=2).init(0.0)
    with pytest.raises(ValueError, match=r"steps: got float32\[16\], expected float32\[64\]"):
        buffer.size(own)
    index = jr.types.Index(jnp.zeros(30, jnp.int32), jnp.zeros(30, jnp.uint32))
    with pytest.raises(ValueError, match="update_priorities: items=30 cannot be divided among 4"):
        other.update_priorities(its_state, index, jnp.ones(30))
    with pytest.raises(ValueError, match="must be a ReplayState"):
        buffer.size(3)
    with pytest.raises(ValueError, match="the mesh has no axis 'x', but 'data'"):
        jr.sharded(jr.items(**shape), mesh, "x")
    with pytest.raises(ValueError, match='draw must be "even" or "global"'):
        jr.sharded(jr.items(**shape), mesh, draw="odd")
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh"):
        jr.sharded(jr.items(**shape), 4)
    for sampler, reason in ((Heavy(), "has weights of its own"), (Latest(), "lacks mass")):
        with pytest.raises(ValueError, match=reason):
            jr.sharded(jr.items(**shape, sampler=sampler), mesh)
    for case in common.REFUSED:
        with pytest.raises(ValueError, match=r"sharded: (Queue|WithoutReplacement|RankBased)"):
            jr.sharded(common.whole(case), mesh)


def test_min_size_is_of_the_whole():
    buffer = jr.sharded(
        jr.items(capacity=64, num_envs=2, batch_size=4, min_size=5, allow_mask=True),
        common.mesh_of(2),
    )
    jitted = jr.jit(buffer)
    state = jitted.init(0.0)
    assert repr(state).startswith("ReplayState(2 shards x 1 env x 32 rows, item f32[]")
    for number in range(1, 7):  # all in one shard
        state = jitted.add(state, jnp.zeros(2), jnp.array([True, False]))
        batch = jitted.sample(state, jax.random.key(0))
        assert bool(jitted.can_sample(state)) == (number >= 5)
        assert batch.is_valid.tolist() == [number >= 5] * 2 + [False] * 2
        # an empty shard has no part in the distribution
        assert batch.weight.tolist() == [2.0 * (number >= 5)] * 2 + [0] * 2


@pytest.mark.parametrize("draw", ["even", "global"])
def test_a_population_equals_its_members(draw):
    case = next(case for case in common.CASES if case.name == "prioritized same_step, 3 steps")
    buffer = jr.sharded(common.whole(case), common.mesh_of(4), draw=draw)
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = [common.steps(case, seed, 20) for seed in range(3)]

    def run(state, block, key):
        state = buffer.extend(state, block)
        batch = buffer.sample(state, key)
        return buffer.update_priorities(state, batch.index, batch.weight), batch

    empty = buffer.init(case.example())
    one = jax.jit(run)
    members = [one(empty, block, key) for block, key in zip(blocks, keys, strict=True)]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    together = jax.jit(jax.vmap(run))(stack([empty] * 3), stack(blocks), keys)
    assert bits(stack(members)) == bits(together)


@pytest.mark.parametrize("kind", common.AXES)
@pytest.mark.parametrize("draw", ["even", "global"])
def test_a_population_over_an_axis_of_its_own(kind, draw):
    """Each pair of a member's shard and its device does what it does without a population."""
    case = next(case for case in common.CASES if case.name == "prioritized same_step, 3 steps")
    mesh = jax.make_mesh((2, 4), ("population", "data"), axis_types=(common.AXES[kind],) * 2)
    local = jr.sharded(common.whole(case), mesh, draw=draw).local
    one = jr.sharded(common.whole(case), common.mesh_of(4, kind), draw=draw)
    num = 6
    keys = jax.random.split(jax.random.key(0), num)
    blocks = [common.steps(case, seed, 20) for seed in range(num)]

    def run(buffer, state, block, key):
        state = buffer.extend(state, block)
        batch = buffer.sample(state, key)
        return buffer.update_priorities(state, batch.index, batch.weight), batch

    def inside(state, block, key):
        state, batch = run(local, local.own(state), block, key)
        return local.stacked(state), batch

    def placed(trees, *axes):
        sharding = NamedSharding(mesh, P(*axes))
        stack = lambda *leaves: jnp.stack([jnp.asarray(jax.device_get(leaf)) for leaf in leaves])
        return jax.device_put(jax.tree.map(stack, *trees), sharding)

    both, times = P("population", "data"), P("population", None, "data")
    together = jax.shard_map(
        jax.vmap(inside),
        mesh=mesh,
        in_specs=(both, times, P("population")),
        out_specs=both,
    )
    empty = one.init(case.example())
    found = jax.jit(together)(
        placed([empty] * num, "population", "data"),
        placed(blocks, "population", None, "data"),
        jax.device_put(keys, NamedSharding(mesh, P("population"))),
    )
    alone = jax.jit(lambda *given: run(one, *given))
    for member in range(num):
        expected = alone(empty, blocks[member], keys[member])
        own = jax.tree.map(lambda leaf, at=member: leaf[at], jax.device_get(found))
        assert bits(own) == bits(expected)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step_no_final_obs"])
def test_a_rollout_is_divided_by_envs(autoreset):
    length, num_envs, num = 6, common.NUM_ENVS, 4
    mesh, envs = common.mesh_of(num), P(None, "data")
    whole = jr.Rollout(length=length, num_envs=num_envs, autoreset=autoreset)
    own = jr.Rollout(length=length, num_envs=num_envs // num, autoreset=autoreset)
    example = jr.Step(jnp.zeros(3), 0, 0.0, terminated=False, truncated=False)
    empty = whole.init(example)
    specs = jr.RolloutState(steps=envs, mask=envs, position=P(), num_dropped=P(), last=P("data"))
    r = np.random.default_rng(0)
    obs = jnp.asarray(r.normal(size=(9, num_envs, 3)), jnp.float32)
    terminated = jnp.asarray(r.random((9, num_envs)) < 0.3)
    steps = jr.Step(
        obs, terminated.astype(int), obs.sum(2), terminated=terminated, truncated=terminated[::-1]
    )

    def run(rollout, state, steps):
        first = jax.tree.map(lambda leaf: leaf[0], steps)
        state = rollout.clear(rollout.add(state, first))
        state = rollout.extend(state, steps)  # three more than it has room for
        value = rollout.steps(state).obs.sum(2)
        return state, *rollout.advantages(
            state, value, value[-1], value + 1 if autoreset != "next_step" else None, gamma=0.9
        )

    divided = jax.jit(
        jax.shard_map(
            lambda *given: run(own, *given),
            mesh=mesh,
            in_specs=(specs, envs),
            out_specs=(specs, envs, envs),
        )
    )
    found = divided(empty, steps)
    assert int(found[0].num_dropped) == 3
    assert bits(found) == bits(jax.jit(lambda *given: run(whole, *given))(empty, steps))
    assert sent(divided.lower(empty, steps).compile().as_text()) == []

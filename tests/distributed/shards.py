"""Each shard is the buffer that it would be alone; what is wrong is refused. On 8 devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxreplay as jr
from tests.conftest import ALL, SOAK
from tests.distributed import common
from tests.distributed.common import (
    CASES,
    PAIRS,
    PRIORITIZED,
    SEQUENCES,
    items,
    mesh_of,
    whole,
)
from tests.support.buffers import KINDS, bits
from tests.support.hlo import compiled, sent
from tests.support.refusals import refused
from tests.support.steps import nth, stacked

KEY = jax.random.key(5)
FEW = [case for case in CASES if case in KINDS or case is PAIRS]
MORE = {
    PRIORITIZED.name: {"allow_write": True},
    SEQUENCES.name: {"allow_mask": True, "track_episodes": True},
}
PLACES = [(PRIORITIZED, 4, "explicit")]
if ALL:
    PLACES += [
        (case, num, kind)
        for case in CASES
        for num, kind in ((1, "auto"), (2, "explicit"), (4, "auto"), (8, "auto"))
        if SOAK or (num == 4 and case in FEW) or case is PRIORITIZED
    ]


def life(case, buffer, given, key, largest=lambda priority: priority):
    """Return the states and batches of one buffer, whose methods are called in turn."""
    block, block_mask, step, step_mask, priority, ended = given
    whole, state = getattr(buffer, "buffer", buffer), buffer.init(case.example())
    found = {"empty": state}
    state = buffer.add(buffer.extend(state, block, block_mask), step, step_mask)
    batch = buffer.sample(state, key)
    found |= {"filled": state, "batch": batch}
    found |= {"size": buffer.size(state), "can_sample": buffer.can_sample(state)}
    if whole.sampler.has_priorities:
        state = buffer.update_priorities(state, batch.index, priority)
        top = largest(state.sampler.max_priority)
        state = state.replace(sampler=state.sampler.replace(max_priority=top))
        found["updated"] = state
    if not case.is_items and case is not PAIRS:
        found["dropped"] = state = buffer.drop(state, ended)
        found["ended"] = state = buffer.end_streams(state, ~ended)
    if whole.allow_write:
        index = getattr(batch.experience, "index", batch.index)
        new = {"reward": batch.experience.reward + 100}
        found["written"] = state = buffer.write(state, index, new)
        change = lambda step, next_obs, factor: {"reward": factor * step.reward}
        found["mapped"] = state = buffer.map_rows(state, change, np.float32(3), block=8)
    found["cleared"] = state = buffer.clear(state)
    return found, buffer.can_sample(state)


@pytest.mark.parametrize(
    ("case", "num", "kind"), PLACES, ids=[f"{case.name}-{num}" for case, num, _ in PLACES]
)
def test_shards_equal_vmapped_buffers_to_the_bit(case, num, kind):
    buffer = jr.sharded(whole(case, **MORE.get(case.name, {})), mesh_of(num, kind))
    local = buffer.local.buffer
    assert local.capacity == 256 // num
    time = 256 // 8 + 9  # it wraps
    given = (
        common.steps(case, 1, time),
        common.mask(local, 2, time),
        common.steps(case, 3),
        common.mask(local, 4),
        np.arange(16, dtype=np.float32) + 0.5,
        np.arange(8) != 3,
    )
    own = functools.partial(life, case, local, largest=lambda top: jax.lax.pmax(top, "shard"))

    @jax.jit
    def of_all(parts):
        keys = jax.vmap(functools.partial(jax.random.fold_in, KEY))(jnp.arange(num))
        return jax.vmap(own, axis_name="shard")(parts, keys)[0]

    def divided(tree, axis):
        """Divide the axis of envs among the shards, which come first."""
        return jax.tree.map(lambda leaf: np.stack(np.split(leaf, num, axis)), tree)

    def among_all(node):
        """Count rows through all shards."""
        if not isinstance(node, jr.types.Index):
            return node
        first = np.repeat(np.arange(num, dtype=np.int32), 16 // num) * local.capacity
        return node.replace(row=node.row + first.reshape(-1, *[1] * (node.row.ndim - 1)))

    joined = lambda leaf: leaf if leaf.ndim == 1 else leaf.reshape(-1, *leaf.shape[2:])
    parts = tuple(map(divided, given, (1, 1, 0, 0, 0, 0)))
    expected = jax.tree.map(joined, jax.device_get(of_all(parts)))
    found, can_sample = jax.device_get(jax.jit(functools.partial(life, case, buffer))(given, KEY))
    assert not can_sample
    assert found.pop("size") == expected.pop("size").sum() > 0
    assert found.pop("can_sample") == expected.pop("can_sample").any()
    is_index = lambda node: isinstance(node, jr.types.Index)
    expected["batch"] = jax.tree.map(among_all, expected["batch"], is_leaf=is_index)
    if num > 1:  # probabilities are those of all shards
        for one in (found, expected):
            one["batch"] = one["batch"].replace(probability=0, weight=0)
    for name, value in found.items():
        assert bits(value) == bits(expected[name]), name


@pytest.mark.parametrize("sampler", [jr.Prioritized(alpha=1.0), *[jr.Uniform()] * ALL])
def test_rows_are_read_again_and_have_an_age(sampler):
    """An item is read on the device of its row, and is the one that was sampled."""
    buffer = items(4, sampler)
    numbers = 2 * np.arange(256, dtype=np.float32)
    priorities = [numbers + 1] * sampler.has_priorities
    state = common.filled(buffer, [64, 17, 0, 3], *priorities)

    @jax.jit
    def run(state):
        batch = buffer.sample(state, KEY)
        turned = jax.tree.map(lambda leaf: jnp.roll(leaf, 8), batch.index)
        found = buffer.get(state, batch.index, beta=0.4), buffer.get(state, turned)
        return buffer.sample(state, KEY, beta=0.4), *found, buffer.age(state, batch.index)

    batch, again, turned, age = jax.device_get(run(state))
    assert bits(again) == bits(batch)
    assert batch.is_valid.sum() == 24
    assert not turned.is_valid.any()
    env, place = np.divmod(batch.index.row, 64)
    expected = np.array([64, 17, 0, 3])[env] - 1 - place
    np.testing.assert_array_equal(age[batch.is_valid], expected[batch.is_valid])


@pytest.mark.parametrize("kind", [np.asarray, *[list, jnp.asarray] * ALL])
def test_numbers_of_rows_count_through_all_shards(kind):
    """Each of four shards has one of the first four numbers, none the fifth."""
    buffer = items(4, jr.Uniform())
    state, numbers = common.filled(buffer, [64] * 4), [1, 65, 129, 193, 256]
    local = buffer.local

    def read(state):
        batch = local.get(local.own(state), kind(numbers))
        return batch.is_valid, batch.experience

    found = jax.shard_map(read, mesh=buffer.mesh, in_specs=P("data"), out_specs=P("data"))
    is_valid, experience = jax.device_get(jax.jit(found)(state))
    assert is_valid.reshape(4, 5).tolist() == np.eye(4, 5, dtype=bool).tolist()
    assert experience[is_valid].tolist() == numbers[:4]


def test_a_merge_is_that_of_each_shard():
    """All shards then know the largest priority of both."""
    buffer = items(4, jr.Prioritized(alpha=1.0))
    sizes = [[5, 0, 3, 64], [1, 2, 0, 40]]
    states = [common.filled(buffer, one, np.full(256, n + 1)) for n, one in enumerate(sizes)]
    ones, others = (np.split(np.asarray(one.rows.steps), 4) for one in states)
    merge = jr.jit(buffer).merge
    found = jax.device_get(merge(states[0], states[1]))
    assert jr.jit(buffer).size(found) == 6 + 2 + 3 + 64
    for shard, (own, its) in enumerate(zip(ones, others, strict=True)):
        rows = np.concatenate([own[: sizes[0][shard]], its[: sizes[1][shard]]])[-64:]
        got = np.split(found.rows.steps, 4)[shard]
        assert sorted(got[: len(rows)]) == sorted(rows)
    assert found.sampler.max_priority.tolist() == [2.0] * 4
    two = items(2, jr.Prioritized(alpha=1.0))
    for call in (buffer.merge, lambda _, state: buffer.adopt(state)):
        with refused("the state has 2 shards, and this buffer 4"):
            call(found, two.init(np.float32(0)))


def test_a_tensor_is_of_one_shard():
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from jaxreplay.torch import to_torch

    place = NamedSharding(mesh_of(2), P("data"))
    x = jax.device_put(np.arange(8, dtype=np.float32), place)
    with refused(r"lies on 2 devices; take one with x.addressable_shards\[i\].data"):
        to_torch(x)
    assert to_torch(x.addressable_shards[1].data).tolist() == [4, 5, 6, 7]


def test_steps_of_some_envs_go_to_their_shards():
    buffer = items(4, jr.Prioritized(alpha=1.0))
    step, priority = np.arange(4, dtype=np.float32), np.float32([1, 5, 2, 9])
    mask, envs = np.array([True, True, False, True]), np.int32([3, 0, 4, 1, -1])
    states = [buffer.init(np.float32(0)) for _ in range(2)]
    add, extend = jr.jit(buffer).add, jr.jit(buffer).extend
    for t in range(70):
        some = step[envs.clip(0, 3)] + t, None, priority[envs.clip(0, 3)] + t
        if t % 2:
            some = extend(states[1], *(None if x is None else x[None] for x in some), envs=envs)
        else:
            some = add(states[1], *some, envs=envs)
        states = [add(states[0], step + t, mask, priority + t), some]
        assert bits(states[0]) == bits(states[1])


def test_all_shards_know_the_largest_priority():
    """Priorities of rows that another shard has are ignored, and those of an empty buffer's
    sample."""
    buffer = items(4, jr.Prioritized(alpha=1.0))
    step, mask = np.zeros(4, np.float32), np.array([False, True, True, False])
    nines = np.full(32, 9, np.float32)

    @jax.jit
    def run(state):
        empty = buffer.sample(buffer.init(step[0]), KEY)
        states = [state, buffer.add(state, step, mask, np.array([9, 3, np.nan, 9], np.float32))]
        batch = buffer.sample(states[-1], KEY)
        turned = jax.tree.map(lambda leaf: jnp.roll(leaf, 8), batch.index)
        own = np.where(np.arange(32) == 1, 7, 1).astype(np.float32)
        for index, priority in ((batch.index, own), (turned, nines), (empty.index, nines)):
            states.append(buffer.update_priorities(states[-1], index, priority))
        figures = buffer.metrics(buffer.add(states[-1], step, mask))
        return [state.sampler for state in states], empty, batch.is_valid, figures

    start = common.filled(buffer, [64, 30, 0, 5], np.ones(256))
    samplers, empty, is_valid, figures = jax.device_get(run(start))
    assert not empty.is_valid.any()
    assert not empty.weight.any()
    assert np.isfinite(empty.experience).all()
    assert [one.max_priority.tolist() for one in samplers] == [[n] * 4 for n in (1, 3, 7, 7, 7)]
    assert bits(samplers[-1].tree) == bits(samplers[-2].tree) == bits(samplers[-3].tree)
    assert (figures["max_priority"], figures["num_bad_priorities"]) == (7, 1)
    assert figures["num_stale_updates"] == (~is_valid).sum() + 64


class Latest(jr.samplers.Sampler):
    """No word on how probable a shard is."""


def test_what_cannot_be_sharded_is_refused():
    mesh = mesh_of(4)

    def check(message, *place, **sizes):
        shape = {"capacity": 64, "num_envs": 4, "batch_size": 8}
        with refused(message):
            jr.sharded(jr.items(**shape | sizes), *(place or (mesh,)))

    check("num_envs=6 cannot .* among 4 devices; 4 and 8 can", num_envs=6, capacity=66)
    check("num_envs=1 cannot be divided among 4 devices; 4 can", num_envs=1)
    check("batch_size=2 cannot .*; 4 can", batch_size=2)
    check("the mesh has no axis 'x', but 'data'", mesh, "x")
    check(r"mesh must be a jax\.sharding\.Mesh", 4)
    check("lacks mass", sampler=Latest())
    for case in common.REFUSED:
        with refused(r"sharded: (Queue|WithoutReplacement|Blend|OnlineQueue)"):
            jr.sharded(whole(case), mesh)


def test_bad_arguments_are_refused():
    shape = {"num_envs": 4, "batch_size": 8}
    one, own = jr.items(capacity=64, **shape), jr.items(capacity=16, batch_size=2)
    uniform = jr.sharded(one, mesh_of(4))
    prioritized = items(4, jr.Prioritized())

    def check(message, buffer, method, *given, state_of=None):
        state = jax.eval_shape((state_of or buffer).init, np.float32(0))
        with refused(message):
            jax.eval_shape(lambda state: getattr(buffer, method)(state, *given), state)

    check("sample: batch_size=10 cannot be divided", uniform, "sample", KEY, 10)
    check(r"got float32\[3\], expected float32\[4\]", uniform, "add", np.zeros(3, np.float32))
    message = r"end_streams:\n  mask: got bool\[3\], expected bool\[4\]"
    check(message, uniform, "end_streams", np.ones(3, bool))
    check("with 4 shards of 16 rows; init makes it", uniform, "size", state_of=one)
    check(r"steps: got float32\[16\], expected float32\[64\]", uniform, "size", state_of=own)
    update, priority, place = "update_priorities", np.ones(32, np.float32), np.arange(32)
    check("the sampler Uniform has no priorities", uniform, update, place, priority)
    check(r"index must be the batch\.index of a sample", prioritized, update, place, priority)
    index = jr.types.Index(np.zeros(30, np.int32), np.zeros(30, np.uint32))
    message = "update_priorities: items=30 cannot be divided among 4"
    check(message, prioritized, update, index, priority[:30])
    state = jax.eval_shape(uniform.init, np.float32(0))
    for call in (uniform.size, uniform.adopt, functools.partial(uniform.merge, state)):
        with refused("must be a ReplayState"):
            call(3)


def test_parts_on_cpu_devices_share_the_memory_of_the_host(monkeypatch):
    buffer, free = items(4, jr.Uniform()), "jaxreplay.buffers.memory.free_bytes"
    num_bytes = 4 * buffer.local.buffer.memory(np.float32(0)).total
    monkeypatch.setattr(free, lambda: num_bytes - 1)
    with refused(f"takes {num_bytes:,} bytes .* About 255 rows fit", MemoryError):
        buffer.init(np.float32(0))
    monkeypatch.setattr(free, lambda: num_bytes)
    buffer.init(np.float32(0))


def test_min_size_is_of_the_whole():
    buffer = jr.items(capacity=64, num_envs=2, batch_size=4, min_size=5, allow_mask=True)
    jitted = jr.jit(jr.sharded(buffer, mesh_of(2)))
    state = jitted.init(0.0)
    assert repr(state).startswith("ReplayState(2 shards x 1 env x 32 rows, item f32[]")
    for number in range(1, 7):  # all in one shard
        state = jitted.add(state, np.zeros(2, np.float32), np.array([True, False]))
        batch, is_enough = jitted.sample(state, KEY), number >= 5
        assert bool(jitted.can_sample(state)) == is_enough
        assert batch.is_valid.tolist() == [is_enough] * 2 + [False] * 2
        # an empty shard has no part in the distribution
        assert batch.weight.tolist() == [2.0 * is_enough] * 2 + [0] * 2


@common.KINDS
@pytest.mark.parametrize("is_local", [True, *[False] * ALL])
def test_a_population_equals_its_members(kind, is_local):
    """A loop of the user's, whose carry keeps its type. Vmapped, and inside of a `shard_map` over
    an axis of its own, it does for each member what it does without a population."""
    case, num = PRIORITIZED, 4
    one = jr.sharded(whole(case), mesh_of(4, kind))
    mesh = jax.make_mesh((2, 4), ("population", "data"), axis_types=(common.AXES[kind],) * 2)
    local = jr.sharded(whole(case), mesh).local

    def run(buffer, state, block, key):
        def iteration(state, step):
            state = buffer.add(state, step, priority=jnp.abs(step.reward))
            batch = buffer.sample(state, key)
            priority = jnp.abs(batch.experience.reward) + batch.weight
            return buffer.update_priorities(state, batch.index, priority), batch

        return jax.lax.scan(iteration, state, block)

    def inside(state, block, key):
        state, batches = run(local, local.own(state), block, key)
        return local.stacked(state), batches

    alone, empty = functools.partial(run, one), one.init(case.example())
    blocks, keys = [common.steps(case, seed, 12) for seed in range(num)], jax.random.split(KEY, num)
    members = [jax.jit(alone)(empty, *given) for given in zip(blocks, keys, strict=True)]
    given = stacked([jax.device_get(empty)] * num), stacked(blocks), keys
    of_state, of_steps = P("population", "data"), P("population", None, "data")
    specs = of_state, of_steps, P("population")
    mapped = jax.shard_map(
        jax.vmap(inside), mesh=mesh, in_specs=specs, out_specs=(of_state, of_steps)
    )
    placed = jax.device_put(given, tuple(NamedSharding(mesh, spec) for spec in specs))
    expected = bits(stacked(jax.device_get(members)))
    found = jax.jit(mapped)(*placed) if is_local else jax.jit(jax.vmap(alone))(*given)
    assert bits(found) == expected


@pytest.mark.parametrize("autoreset", ["same_step_no_final_obs", *["next_step"] * ALL])
def test_a_rollout_is_divided_by_envs(autoreset):
    num_envs, num = common.NUM_ENVS, 4
    whole, own = (
        jr.Rollout(length=6, num_envs=envs, autoreset=autoreset)
        for envs in (num_envs, num_envs // num)
    )
    example = jr.Step(np.zeros(3, np.float32), 0, 0.0, terminated=False, truncated=False)
    r = np.random.default_rng(0)
    obs = r.normal(size=(9, num_envs, 3)).astype(np.float32)
    ends = r.random((9, num_envs)) < 0.3
    steps = jr.Step(obs, ends.astype(np.int32), obs.sum(2), terminated=ends, truncated=ends[::-1])

    def run(rollout, state, steps):
        state = rollout.clear(rollout.add(state, nth(steps, 0)))
        state = rollout.extend(state, steps)  # three more than it has room for
        value = rollout.steps(state).obs.sum(2)
        after = value + 1 if autoreset != "next_step" else None
        return state, *rollout.advantages(state, value, value[-1], after, gamma=0.9)

    envs = P(None, "data")
    specs = jr.RolloutState(steps=envs, mask=envs, position=P(), num_dropped=P(), last=P("data"))
    mapped = jax.shard_map(
        functools.partial(run, own),
        mesh=mesh_of(num),
        in_specs=(specs, envs),
        out_specs=(specs, envs, envs),
    )
    given = whole.init(example), steps
    divided = compiled(mapped, *given)
    found = divided(*given)
    assert int(found[0].num_dropped) == 3
    assert bits(found) == bits(jax.jit(functools.partial(run, whole))(*given))
    assert sent(divided.as_text()) == []

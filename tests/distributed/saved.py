# ruff: noqa: E402
"""Checkpoints of sharded states: any number of devices restores any of them. On 8 devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

checkpoint = pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from tests.conftest import ALL
from tests.distributed import common
from tests.distributed.common import PRIORITIZED, mesh_of, whole
from tests.distributed.errors import refused
from tests.support.buffers import bits, jitted
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers, step
from tests.support.replays import damaged


@functools.cache
def extension(buffer):
    def extend(state, block, mask, key, seed):
        state = buffer.extend(state, block, mask)
        if hasattr(getattr(buffer, "buffer", buffer).sampler, "alpha"):
            batch = buffer.sample(state, key)
            state = buffer.update_priorities(state, batch.index, batch.weight + seed)
        return state

    return jax.jit(extend)


def extended(buffer, case, state, seed):
    mask = common.mask(getattr(buffer, "buffer", buffer), seed, 25)
    return extension(buffer)(state, common.steps(case, seed, 25), mask, jax.random.key(seed), seed)


def same(buffer, case, *states):
    """Check that two states hold the same, and go on equally. Episode tables are built again."""
    sample, keys = jitted(buffer, "sample"), jax.random.split(jax.random.key(0), 3)
    for _ in range(2):
        one, other = (bits((state.rows, state.counters, state.sampler)) for state in states)
        assert one == other
        one, other = (bits([sample(state, key) for key in keys]) for state in states)
        assert one == other
        states = [extended(buffer, case, state, 77) for state in states]


def moved(path, old, state, new, example):
    """Return what a buffer restores from another one's save."""
    checkpoint.save(path, old, state)
    return checkpoint.restore(path, new, example)


@common.THREE
@common.KINDS
def test_a_restored_state_goes_on_on_as_many_devices(case, kind, tmp_path):
    buffer = common.four(case, kind)
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=4000, max_to_keep=9)
    states = [buffer.init(case.example())]
    checkpointer.save(states[0], 0)
    for number in range(1, 4):  # around the rings
        states.append(state := extended(buffer, case, states[-1], number))
        checkpointer.save(state, number)
    assert checkpointer.verify()[0].problems == []
    for number, state in enumerate(states):
        got = checkpointer.restore(case.example(), number)
        for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
            assert leaf.shape == wanted.shape
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        same(buffer, case, got, state)


@common.THREE
def test_any_number_of_devices_restores_what_another_saved(case, tmp_path):
    """Save the state of 4 devices, with 8 envs. Each other number has the same rows, priorities and
    streams, though it draws in another order; one device has what it would have alone."""
    example, four = case.example(), common.four(case)
    size_of = lambda buffer, state: int(jitted(buffer, "size")(state))
    state = four.init(example)
    for seed in range(1, 4):
        state = extended(four, case, state, seed)
    before = bits(moved(tmp_path / "4", four, state, four, example))
    others = {num: jr.sharded(whole(case), mesh_of(num)) for num in (8, *[1, 2] * ALL)}
    for num, other in (others | {"one": whole(case)}).items():
        got = checkpoint.restore(tmp_path / "4", other, example)
        assert size_of(other, got) == size_of(four, state)
        if num in others:
            assert len(got.rows.steps.reward.sharding.device_set) == num
        assert bits(moved(tmp_path / f"{num}", other, got, four, example)) == before
    small = jr.sharded(whole(case, capacity=128), mesh_of(2))
    assert 0 < size_of(small, checkpoint.restore(tmp_path / "4", small, example)) <= 128


@pytest.mark.parametrize("axis", ["data", *[("data", "model")] * ALL])
def test_rows_of_each_env_are_there_once(axis, tmp_path):
    buffer = items(capacity=256, num_envs=8)
    sharded = jr.sharded(buffer, jax.make_mesh((4, 2), ("data", "model")), axis)
    leaf = jax.tree.leaves(sharded.init(EXAMPLE))[0]
    assert len({str(shard.index) for shard in leaf.addressable_shards}) == sharded.num_shards
    state = added(buffer, buffer.init(EXAMPLE), 0, 40)
    Checkpointer(tmp_path, buffer, chunk_bytes=4000).save(state, 1)
    checkpointer = Checkpointer(tmp_path, sharded, chunk_bytes=4000)
    got = checkpointer.restore(EXAMPLE)
    assert bits(got.rows.steps) == bits(state.rows.steps)
    checkpointer.save(got, 2)  # writes no row again
    assert checkpointer._base.members[""].saves[0].folder.startswith("0000000001")
    checkpointer.save(jitted(sharded, "add")(got, step(40, 8)), 3)
    assert len(checkpointer._base.members[""].saves) > 1
    for number, end in ((2, 40), (3, 41)):
        found = numbers(buffer, checkpoint.restore(tmp_path, buffer, EXAMPLE, step=number))
        assert found == expected(buffer, end)


def test_a_plain_buffer_is_restored_over_devices(tmp_path):
    """Save from four devices; restore to two, and to one with another capacity."""
    sizes = {"num_envs": 4, "batch_size": 8, "autoreset": "next_step"}
    large, small = (jr.prioritized(capacity=capacity, **sizes) for capacity in (64, 32))
    block = common.steps(PRIORITIZED, 1, 21)
    block = jax.tree.map(lambda leaf: leaf[:, :4], block)
    example = PRIORITIZED.example()

    def over(buffer, num_devices):
        mesh = mesh_of(num_devices)
        is_row = lambda leaf: leaf.ndim and leaf.shape[0] == buffer.capacity
        put = lambda leaf: NamedSharding(mesh, P("data") if is_row(leaf) else P())
        return jax.tree.map(put, jax.eval_shape(buffer.init, example))

    state = jax.jit(large.extend, out_shardings=over(large, 4))(large.init(example), block)
    checkpoint.save(tmp_path, large, state, chunk_bytes=4096)
    for buffer, num_devices in ((large, 2), *[(small, 1)] * ALL):
        where = over(buffer, num_devices)
        got = checkpoint.restore(tmp_path, buffer, example, sharding=where)
        wanted = state if buffer is large else checkpoint.restore(tmp_path, buffer, example)
        assert bits(got) == bits(wanted)
        lies = lambda leaf, to: leaf.sharding.is_equivalent_to(to, leaf.ndim)
        assert jax.tree.all(jax.tree.map(lies, got, where))


def test_a_state_may_lie_elsewhere(tmp_path):
    buffer = jr.sharded(items(capacity=64, num_envs=8), mesh_of(4))
    state = buffer.init(EXAMPLE)
    for t in range(20):
        state = jitted(buffer, "add")(state, step(t, 8))
    both = jax.make_mesh((2, 2), ("data", "model"))
    places = NamedSharding(buffer.mesh, P()), NamedSharding(both, P(("model", "data")))
    moved = (jax.device_put(state, place) for place in (*places, jax.devices()[1]))
    for number, placed in enumerate([jax.device_get(state), *moved]):
        checkpointer = Checkpointer(tmp_path / str(number), buffer)
        for saved in (1, 2):
            checkpointer.save(placed, saved)
        assert bits(checkpointer.restore(EXAMPLE)) == bits(state)


def test_damaged_rows_are_left_out_as_of_one_buffer(tmp_path):
    one, example = whole(PRIORITIZED), PRIORITIZED.example()
    sharded = common.four(PRIORITIZED)
    state = extended(sharded, PRIORITIZED, sharded.init(example), 1)
    Checkpointer(tmp_path, sharded, chunk_bytes=4000).save(state)
    damaged(tmp_path)
    found = []
    for buffer in (one, sharded):
        reader = Checkpointer(tmp_path, buffer)
        with pytest.warns(UserWarning, match="rows are lost"):
            found.append(reader.restore(example, allow_partial=True))
        assert reader.missing_rows
    found[1] = moved(tmp_path / "again", sharded, found[1], one, example)
    assert jitted(one, "size")(found[0]) > 0
    wanted, again = (bits((state.rows, state.counters, state.sampler)) for state in found)
    assert again == wanted


class Counting(jr.Uniform):
    counts = ("hits",)

    def init(self, layout):
        return {"size": np.int32(5), "num_stale_updates": np.int32(7), "hits": np.uint32(3)}

    def metrics(self, state, sampleable):
        return {"hits": state["hits"], "age": 9}


def test_shards_add_what_the_sampler_counts_up_to_its_maximum(tmp_path):
    """Other numbers stay, whatever they are called."""
    one = jr.items(capacity=64, num_envs=8, batch_size=8, sampler=Counting())
    sharded, most = jr.sharded(one, mesh_of(4)), np.iinfo(np.uint32).max
    state = sharded.init(np.float32(0))
    figures = jax.jit(sharded.metrics)(state)
    assert (figures["hits"], "age" in figures) == (12, False)
    for hits, total in (([1, 2, 0, 4], 7), ([most, 0, 3, 0], most)):
        counted = state.replace(sampler=state.sampler | {"hits": np.asarray(hits, np.uint32)})
        found = moved(tmp_path, sharded, counted, one, np.float32(0)).sampler
        numbers = {name: int(number) for name, number in found.items()}
        assert numbers == {"size": 5, "num_stale_updates": 7, "hits": total}
        back = checkpoint.restore(tmp_path, sharded, np.float32(0)).sampler
        assert back["hits"].tolist() == [total, 0, 0, 0]
        assert back["size"].tolist() == [5] * 4


@pytest.mark.parametrize("num_envs", [16, *[8] * ALL])
def test_a_sharded_buffer_adopts_the_rows_of_another(num_envs):
    """Each device as it would alone: with other priorities, 3-step returns, fewer rows, more
    envs."""
    old, example = whole(PRIORITIZED), PRIORITIZED.example()
    new = dataclasses.replace(
        old,
        capacity=16 * num_envs,
        num_envs=num_envs,
        sampler=jr.Prioritized(alpha=0.3),
        view=jr.views.TransitionView(n_step=3),
        allow_mask=True,
    )
    one, other = common.four(PRIORITIZED), jr.sharded(new, common.four(PRIORITIZED).mesh)
    state = extended(one, PRIORITIZED, one.init(example), 1)
    got = jr.jit(other).adopt(state)
    assert jax.tree.structure(got) == jax.tree.structure(other.init(example))
    for at in range(4):
        wanted = jitted(other.local.buffer, "adopt")(shard_of(one, state, at))
        found = shard_of(other, got, at)
        assert bits(found.rows) == bits(wanted.rows)
        assert bits(found.sampler.tree) == bits(wanted.sampler.tree)
    assert jitted(other, "sample")(got, jax.random.key(0)).is_valid.all()
    refused("the state has 4 shards, and this buffer 2", jr.sharded(new, mesh_of(2)).adopt, state)


def shard_of(sharded, state, at):
    """Return the state of one shard."""
    specs = sharded.local.specs(state)

    def part(leaf, spec):
        size = (spec.shape or (1,))[0]
        return np.asarray(leaf)[at * size : (at + 1) * size].reshape(spec.shape)

    return jax.tree.map(part, state, specs)


def test_what_does_not_fit_is_refused(tmp_path):
    buffer = items(capacity=64, num_envs=4)
    sharded = jr.sharded(buffer, mesh_of(4))
    checkpointer = Checkpointer(tmp_path, sharded)
    checkpointer.save(sharded.init(EXAMPLE))
    save, restore = checkpointer.save, checkpointer.restore
    refused("save: the state must be a ReplayState", save, 3)
    refused("save: this state is not of this sharded buffer, with 4", save, buffer.init(EXAMPLE))
    message = "a sharded buffer's mesh is its own; leave out sharding"
    refused(message, restore, EXAMPLE, sharding=jax.devices()[0])

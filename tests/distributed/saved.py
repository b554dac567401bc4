# ruff: noqa: E402
"""Checkpoints of sharded states: any number of devices restores any of them. On 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

checkpoint = pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from tests.conftest import SOAK
from tests.distributed import common
from tests.support.buffers import bits
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers, step

CASES = [
    next(case for case in common.CASES if case.name == name)
    for name in ("uniform masked, episodes", "prioritized same_step, 3 steps", "future_pairs")
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def extended(buffer, case, state, seed, time=25):
    whole = getattr(buffer, "buffer", buffer)
    mask = common.mask(whole, seed, time)
    given = () if mask is None else (mask,)
    state = jax.jit(buffer.extend)(state, common.steps(case, seed, time), *given)
    if hasattr(whole.sampler, "alpha"):
        batch = jax.jit(buffer.sample)(state, jax.random.key(seed))
        state = jax.jit(buffer.update_priorities)(state, batch.index, batch.weight + seed)
    return state


def same(buffer, case, one, other):
    """Check that two states hold the same, and go on equally. Episode tables are built again."""
    for _ in range(1 + SOAK):
        assert bits((one.streams, one.sampler)) == bits((other.streams, other.sampler))
        sample = jax.jit(buffer.sample)
        for seed in range(3):
            key = jax.random.key(seed)
            assert bits(sample(one, key)) == bits(sample(other, key))
        one, other = (extended(buffer, case, state, 77) for state in (one, other))


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, "explicit") for case in CASES] + [(CASES[1], "auto")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_restored_state_goes_on_on_as_many_devices(case, kind, tmp_path):
    buffer = jr.sharded(common.whole(case), common.mesh_of(4, kind))
    checkpointer, states = Checkpointer(tmp_path, buffer, chunk_bytes=4000, max_to_keep=9), []
    state = buffer.init(case.example())
    checkpointer.save(state, 0)
    states.append(state)
    for number in range(1, 4):  # around the rings
        state = extended(buffer, case, state, number)
        checkpointer.save(state, number, blocking=number != 2)
        for _ in range(2):
            checkpointer.advance(state, 0)
        checkpointer.wait_until_finished(state)
        states.append(state)
    assert checkpointer.verify()[0].problems == []
    for number, state in enumerate(states):
        got = checkpointer.restore(case.example(), number)
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, state)
        if SOAK or number in (0, len(states) - 1):
            same(buffer, case, got, state)


@cases
def test_any_number_of_devices_restores_what_another_saved(case, tmp_path):
    """Save the state of 4 devices, with 8 envs. Each other number has the same rows, priorities and
    streams, though it draws in another order; one device has what it would have alone."""
    whole = common.whole(case)
    four = jr.sharded(whole, common.mesh_of(4))
    state = four.init(case.example())
    for seed in range(1, 4):
        state = extended(four, case, state, seed)
    path = tmp_path / "4"
    checkpoint.save(path, four, state)
    before = Checkpointer(path, four).restore(case.example())
    for num in (1, 2, 8):
        other = jr.sharded(whole, common.mesh_of(num))
        got = Checkpointer(path, other).restore(case.example())
        assert len(got.streams.steps.reward.sharding.device_set) == num
        np.testing.assert_array_equal(jax.jit(other.size)(got), jax.jit(four.size)(state))
        checkpoint.save(tmp_path / f"{num}", other, got)
        back = Checkpointer(tmp_path / f"{num}", four).restore(case.example())
        assert bits(back) == bits(before)
    one = checkpoint.restore(path, whole, case.example())
    checkpoint.save(tmp_path / "one", whole, one)
    back = checkpoint.restore(tmp_path / "one", four, case.example())
    assert bits(back) == bits(before)
    small = jr.sharded(common.whole(case, capacity=128), common.mesh_of(2))
    got = checkpoint.restore(path, small, case.example(), resize=True)
    assert 0 < int(jax.jit(small.size)(got)) <= 128


def test_rows_of_each_env_are_there_once(tmp_path):
    buffer = items(capacity=256, num_envs=4)
    two_axes = jax.make_mesh((4, 2), ("data", "model"))  # replicas
    sharded = jr.sharded(buffer, two_axes)
    with Checkpointer(tmp_path, buffer, chunk_bytes=4000) as checkpointer:
        state = added(buffer, buffer.init(EXAMPLE), 0, 40)
        checkpointer.save(state, 1)
    with Checkpointer(tmp_path, sharded, chunk_bytes=4000) as checkpointer:
        got = checkpointer.restore(EXAMPLE)
        assert bits(got.streams.steps) == bits(state.streams.steps)
        checkpointer.save(got, 2)  # writes no row again
        assert checkpointer._base.groups.saves[0].folder.startswith("0000000001")
        step = {
            "number": jnp.arange(4),
            "bytes": jnp.full((4, 100), jnp.arange(4)[:, None], jnp.uint8),
        }
        checkpointer.save(jax.jit(sharded.add)(got, step), 3)
        assert len(checkpointer._base.groups.saves) > 1
    assert numbers(buffer, checkpoint.restore(tmp_path, buffer, EXAMPLE, step=2)) == expected(
        buffer, 40
    )
    found = numbers(buffer, checkpoint.restore(tmp_path, buffer, EXAMPLE, step=3))
    assert [own[-1] for own in found] == [0, 1, 2, 3]


@cases
def test_a_mesh_without_the_default_device(case, tmp_path):
    whole = common.whole(case)
    mesh = jax.sharding.Mesh(jax.devices()[5:7], ("data",))
    buffer = jr.sharded(whole, mesh)
    state = extended(buffer, case, buffer.init(case.example()), 1)
    checkpoint.save(tmp_path, buffer, state)
    got = checkpoint.restore(tmp_path, buffer, case.example())
    for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == wanted.sharding
    same(buffer, case, got, state)


def test_a_state_may_lie_elsewhere(tmp_path):
    whole = items(capacity=64, num_envs=8)
    buffer = jr.sharded(whole, common.mesh_of(4))
    state = buffer.init(EXAMPLE)
    for t in range(20):
        state = jax.jit(buffer.add)(state, step(t, 8))
    both = jax.make_mesh((2, 2), ("data", "model"))
    spec = jax.sharding.PartitionSpec
    for number, place in enumerate(
        (
            lambda x: jax.device_put(x, jax.sharding.NamedSharding(buffer.mesh, spec())),
            lambda x: jax.device_put(x, jax.devices()[1]),
            lambda x: jax.device_put(x, jax.sharding.NamedSharding(both, spec(("model", "data")))),
            np.asarray,
        )
    ):
        with Checkpointer(tmp_path / str(number), buffer) as checkpointer:
            placed = jax.tree.map(place, state)
            checkpointer.save(placed, 1)
            checkpointer.save(placed, 2, blocking=False)
            checkpointer.wait_until_finished(placed)
            assert bits(checkpointer.restore(EXAMPLE)) == bits(state)


def test_damaged_rows_are_left_out_as_of_one_buffer(tmp_path):
    case = CASES[1]
    whole = common.whole(case)
    sharded = jr.sharded(whole, common.mesh_of(4))
    state = extended(sharded, case, sharded.init(case.example()), 1)
    with Checkpointer(tmp_path, sharded, chunk_bytes=4000) as checkpointer:
        checkpointer.save(state)
        groups = checkpointer._base.groups
    assert len(groups) > 3
    file = tmp_path / "rows" / groups[1].folder / "steps.reward" / "c.0"
    file.write_bytes(b"\0" + file.read_bytes()[1:] + b"\0")
    found = {}
    for name, buffer in (("one", whole), ("sharded", sharded)):
        reader = Checkpointer(tmp_path, buffer)
        with pytest.warns(UserWarning, match="rows are lost"):
            found[name] = reader.restore(case.example(), allow_partial=True)
        assert reader.missing_rows
    checkpoint.save(tmp_path / "again", sharded, found["sharded"])
    again = checkpoint.restore(tmp_path / "again", whole, case.example())
    assert bits((again.streams, again.sampler)) == bits(
        (found["one"].streams, found["one"].sampler)
    )


def test_counters_add_up_to_their_maximum(tmp_path):
    case, most = CASES[1], np.iinfo(np.uint32).max
    whole = common.whole(case)
    sharded = jr.sharded(whole, common.mesh_of(4))
    state = sharded.init(case.example())
    for counts, total in (([1, 2, 0, 4], 7), ([most, 0, 3, 0], most)):
        counted = jnp.asarray(counts, jnp.uint32)
        sampler = state.sampler.replace(num_stale_updates=counted)
        checkpoint.save(tmp_path, sharded, state.replace(sampler=sampler))
        one = checkpoint.restore(tmp_path, whole, case.example())
        assert int(one.sampler.num_stale_updates) == total
        back = checkpoint.restore(tmp_path, sharded, case.example())
        assert back.sampler.num_stale_updates.tolist() == [total, 0, 0, 0]


def test_what_does_not_fit_is_refused(tmp_path):
    buffer = items(capacity=64, num_envs=4)
    sharded = jr.sharded(buffer, common.mesh_of(4))
    checkpointer = Checkpointer(tmp_path, sharded)
    with pytest.raises(ValueError, match="save: the state must be a ReplayState"):
        checkpointer.save(3)
    with pytest.raises(ValueError, match="save: this state is not of this sharded buffer, with 4"):
        checkpointer.save(buffer.init(EXAMPLE))
    checkpointer.save(sharded.init(EXAMPLE))
    with pytest.raises(ValueError, match="a sharded buffer's mesh is its own; leave out sharding"):
        checkpointer.restore(EXAMPLE, sharding=jax.devices()[0])
    other = jr.sharded(items(capacity=128, num_envs=4), common.mesh_of(4))
    with pytest.raises(ValueError, match=r"is of another buffer.*(\n.*)*resize=True"):
        Checkpointer(tmp_path, other).restore(EXAMPLE)

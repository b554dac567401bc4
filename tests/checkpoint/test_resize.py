"""Tests of restores into a buffer of another capacity: the newest rows that fit are kept, with all
that belongs to them."""

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import PLATFORM
from tests.support.buffers import KINDS, bits, everything, jitted, jitted_draw
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay._util.struct import Node
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, resize, rows
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from jaxreplay.samplers.uniform import Uniform

kinds = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


def at(buffer, capacity):
    return dataclasses.replace(buffer, capacity=capacity)


def run(case, buffer, num_steps):
    """Return a state after `num_steps` steps, with random priorities where the sampler has any.

    Its steps and priorities do not depend on the capacity.
    """
    steps = case.step(1, time=num_steps)
    given = case.mask(buffer, 2, num_steps)
    if isinstance(buffer.sampler, PrioritySampler):
        given = (
            *(given or (None,)),
            jnp.asarray(np.random.default_rng(3).random((num_steps, buffer.num_envs)), jnp.float32),
        )
    return jax.jit(buffer.extend)(buffer.init(case.example()), steps, *given)


def names(buffer, state):
    """Return the names of sampleable rows: pairs (stream, number in it)."""
    is_valid = np.asarray(everything(buffer)(state, 1).is_valid)
    env, position = np.divmod(np.flatnonzero(is_valid), buffer.length)
    first = rows.span_of(rows.heads_of(state), buffer.length).first
    return sorted(
        (int(e), int(first[e] + (p - first[e]) % buffer.length))
        for e, p in zip(env, position, strict=True)
    )


def items_of(buffer, state, which):
    """Return the items and the probabilities of rows, by their names."""
    env, number = np.array(which, int).reshape(-1, 2).T
    batch, index = everything(buffer)(state, 1), env * buffer.length + number % buffer.length
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], (batch.experience, batch.probability))


@kinds
@pytest.mark.parametrize("num_steps", [30, 130])
def test_a_smaller_buffer_is_as_if_it_had_been_fed_the_same(case, num_steps, tmp_path):
    """Compare rows, items and probabilities with a buffer that had the smaller capacity from the
    first step on."""
    large, small = case.replay(capacity=240), case.replay(capacity=96)
    checkpoint.save(tmp_path, large, run(case, large, num_steps))
    got, wanted = (
        checkpoint.restore(tmp_path, small, case.example(), resize=True),
        run(case, small, num_steps),
    )
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert bits(got.streams.counters) == bits(wanted.streams.counters)
    which = names(small, wanted)
    assert names(small, got) == which
    if not isinstance(small.sampler, ConsumingSampler):
        assert bits(items_of(small, got, which)) == bits(items_of(small, wanted, which))
        for seed in range(3):
            assert bits(jitted_draw(small)(got, jax.random.key(seed))) == bits(
                jitted_draw(small)(wanted, jax.random.key(seed))
            )
    add, more = jax.jit(small.add), case.step(7)
    assert names(small, add(got, more)) == names(small, add(wanted, more))


@kinds
def test_a_larger_buffer_has_every_row_and_keeps_more(case, tmp_path):
    small, large = case.replay(capacity=96), case.replay(capacity=240)
    state = run(case, small, 130)
    checkpoint.save(tmp_path, small, state)
    got = checkpoint.restore(tmp_path, large, case.example(), resize=True)
    which = names(small, state)
    assert which
    assert names(large, got) == which
    np.testing.assert_array_equal(large.size(got), small.size(state))
    if not small.view.is_random:
        assert bits(items_of(large, got, which)[0]) == bits(items_of(small, state, which)[0])
    np.testing.assert_allclose(
        items_of(large, got, which)[1], items_of(small, state, which)[1], rtol=1e-6
    )
    more = jax.jit(large.extend)(got, case.step(9, time=20), *case.mask(large, 4, 20))
    assert set(which) <= set(names(large, more))


@pytest.mark.parametrize("capacity", [16, 400])
@pytest.mark.parametrize("ranked", [False, True])
def test_priorities_come_along(capacity, ranked, tmp_path):
    """Restore updated priorities, priorities of pending rows, and ranks of the last `rerank`."""
    buffer = jr.prioritized(
        capacity=100, num_envs=2, batch_size=32, autoreset="same_step_no_final_obs", n_step=3
    )
    if ranked:
        buffer = dataclasses.replace(buffer, sampler=jr.RankBased(normalize_weights="buffer"))
    step = jr.Step(
        *(jnp.zeros((80, 2)) for _ in range(3)),
        terminated=jnp.zeros((80, 2), bool),
        truncated=jnp.zeros((80, 2), bool),
    )
    given = jnp.asarray(np.random.default_rng(0).uniform(0.1, 9, (80, 2)), jnp.float32)
    state = jax.jit(buffer.extend)(
        buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], step)), step, None, given
    )
    which = names(buffer, state)
    env, number = np.array(which).T
    index = jitted(buffer, "get")(state, jnp.asarray(env * 50 + number % 50, jnp.int32)).index
    state = jitted(buffer, "update_priorities")(state, index, jnp.linspace(0.0, 9.0, len(which)))
    state = jitted(buffer, "rerank")(state) if ranked else state
    checkpoint.save(tmp_path, buffer, state)
    other = at(buffer, capacity)
    example = jax.tree.map(lambda leaf: leaf[0, 0], step)
    got = checkpoint.restore(tmp_path, other, example, resize=True)
    kept = names(other, got)
    assert kept == [name for name in which if name in set(kept)]
    assert len(kept) == (len(which) if capacity > 100 else 2 * 5)  # of each 8 rows, 3 pending
    for field in ("max_priority", "num_stale_updates", "num_bad_priorities"):
        assert bits(getattr(got.sampler, field)) == bits(getattr(state.sampler, field))
    assert np.asarray(jitted_draw(other)(got, jax.random.key(0)).is_valid).all()

    def shares(kept):
        was, now = (
            np.asarray(items_of(*pair, kept)[1], np.float64)
            for pair in ((buffer, state), (other, got))
        )
        return was / was.sum(), now / now.sum()

    np.testing.assert_allclose(*shares(kept), rtol=1e-5)
    if ranked:
        now = np.asarray(items_of(other, got, kept)[1])
        tree = jr.RankBased(normalize_weights="buffer")._tree(got.layout)
        smallest = tree.minimum(got.sampler.tree) / tree.total(got.sampler.tree)
        assert float(smallest) == pytest.approx(now[now > 0].min(), rel=1e-5)
    # Pending rows have their window now, and their own priorities.
    more = jax.tree.map(lambda leaf: leaf[:3], step)
    state, got = (jax.jit(one.extend)(its, more) for one, its in ((buffer, state), (other, got)))
    if ranked:
        state, got = jitted(buffer, "rerank")(state), jitted(other, "rerank")(got)
    both = sorted(set(names(buffer, state)) & set(names(other, got)))
    assert {(env, number) for env in range(2) for number in (77, 78, 79)} <= set(both)
    was, now = shares(both)
    if ranked:
        np.testing.assert_array_equal(
            np.argsort(now, kind="stable"), np.argsort(was, kind="stable")
        )
    else:
        np.testing.assert_allclose(now, was, rtol=1e-5)


@pytest.mark.parametrize("capacity", [2 * 17, 2 * 60])
@pytest.mark.parametrize("autoreset", jr.autoreset.FORMS)
def test_episodes_are_as_before(autoreset, capacity, tmp_path, monkeypatch):
    """Compare the episode table at every stored row. It is rebuilt in blocks, of which the oldest
    is partial, and final rows may come first."""
    monkeypatch.setattr(resize, "_BLOCK", 8)  # four rows in each of two streams
    buffer = jr.uniform(
        capacity=2 * 30, num_envs=2, batch_size=4, autoreset=autoreset, track_episodes=True
    )
    other, r = at(buffer, capacity), np.random.default_rng(1)
    done = r.random((41, 2))
    time = jnp.arange(41.0)[:, None] + jnp.zeros(2)
    step = jr.Step(
        time,
        time,
        time,
        terminated=jnp.asarray(done < 0.1),
        truncated=jnp.asarray(done > 0.7),
        final_obs=time if autoreset == "same_step" else None,
    )
    example = jax.tree.map(lambda leaf: leaf[0, 0], step)
    state = jax.jit(buffer.extend)(buffer.init(example), step)
    checkpoint.save(tmp_path, buffer, state)
    got = checkpoint.restore(tmp_path, other, example, resize=True)
    wanted = (
        jax.jit(other.extend)(other.init(example), step) if capacity < buffer.capacity else state
    )
    reference = other if capacity < buffer.capacity else buffer

    @functools.cache
    def looks_up(buffer):
        def run(state, row):
            found = buffer.episode_table(state)
            ends = (found.kth_end(row, k) for k in (1, 2, 3))
            counts = (found.num_episodes(), found.num_unfinished(), found.num_headless())
            return (
                found.steps_to_end(row),
                found.steps_from_start(row),
                found.ends_ahead(row),
                found.is_complete(row),
                *ends,
                counts,
            )

        return jax.jit(run)

    def looked_up(buffer, state):
        length = buffer.length
        span = rows.span_of(rows.heads_of(state), length)
        row = [
            env * length + number % length
            for env in range(2)
            for number in range(span.first[env], span.end[env])
        ]
        return looks_up(buffer)(state, jnp.asarray(row, jnp.int32))

    assert bits(looked_up(other, got)) == bits(looked_up(reference, wanted))
    more = jax.tree.map(lambda leaf: leaf[20:29], step)
    got, wanted = jax.jit(other.extend)(got, more), jax.jit(reference.extend)(wanted, more)
    if reference is other:
        assert bits(looked_up(other, got)) == bits(looked_up(other, wanted))


def test_after_a_clear_and_when_the_laps_begin_anew(tmp_path):
    buffer = items(capacity=64)
    state = added(buffer, buffer.init(EXAMPLE), 0, 40)
    state = added(buffer, buffer.clear(state), 40, 5)
    checkpoint.save(tmp_path / "clear", buffer, state)
    for capacity in (16, 128):
        other = items(capacity=capacity)
        got = checkpoint.restore(tmp_path / "clear", other, EXAMPLE, resize=True)
        assert numbers(other, got) == [
            row[-min(5, capacity // 4) :] for row in expected(buffer, 45)
        ]
    state = added(buffer, buffer.init(EXAMPLE), 0, 40)
    late = state.replace(streams=state.streams.with_counters(lap=jnp.uint32(2**32 - 1)))
    checkpoint.save(tmp_path / "late", buffer, late)
    for capacity in (32, 256):
        other = items(capacity=capacity)
        got = checkpoint.restore(tmp_path / "late", other, EXAMPLE, resize=True)
        got = added(other, got, 40, 30)
        want = [row[-min(capacity // 4, 16 + 30) :] for row in expected(items(capacity=4 * 70), 70)]
        assert numbers(other, got) == want


@pytest.mark.parametrize(
    "kind", [jr.Queue(), jr.WithoutReplacement()], ids=["queue", "without replacement"]
)
def test_what_is_handed_out_once_is_not_handed_out_again(kind, tmp_path):
    """Restore after a pop: popped rows stay popped. A queue counts rows that do not fit as lost,
    but not popped ones."""
    buffer = jr.ReplayBuffer(
        capacity=40, num_envs=2, batch_size=4, sampler=kind, view=jr.views.Item(), autoreset=None
    )
    state = buffer.init(jnp.int32(0))
    for t in range(20):
        state = jitted(buffer, "add")(state, jnp.asarray([t, 100 + t], jnp.int32))
    state, first = jitted(buffer, "pop")(state, jax.random.key(0))
    checkpoint.save(tmp_path, buffer, state)
    for capacity, left in ((100, 40), (20, 20)):
        other, seen = at(buffer, capacity), []
        got = checkpoint.restore(tmp_path, other, jnp.int32(0), resize=True)
        before = int(other.size(got))
        for seed in range(100):
            got, batch = jitted(other, "pop")(got, jax.random.key(seed))
            seen += np.asarray(batch.experience)[np.asarray(batch.is_valid)].tolist()
            if (
                isinstance(kind, jr.WithoutReplacement) and len(seen) >= left - 4
            ) or not np.asarray(batch.is_valid).any():
                break
        assert len(set(seen)) == len(seen)
        if isinstance(kind, jr.Queue):
            assert before == len(seen) == left - (4 if capacity == 100 else 0)
            assert not set(seen) & set(np.asarray(first.experience).tolist())
            assert int(got.sampler.lost) == (0 if capacity == 100 else 40 - 4 - 20)
        else:
            assert set(seen) <= {
                env * 100 + t for env in range(2) for t in range(20 - left // 2, 20)
            }


def test_a_resized_run_goes_on_under_its_path(tmp_path):
    buffer, larger, smaller = items(capacity=64), items(capacity=128), items(capacity=32)
    checkpoint.save(tmp_path, buffer, added(buffer, buffer.init(EXAMPLE), 0, 40), step=40)
    with pytest.raises(
        ValueError,
        match=r"of another buffer:\n.*capacity=64.*\n.*\n.*capacity=128.*\nthe capacity differs: "
        r"restore\(..., resize=True\) keeps the newest rows",
    ):
        checkpoint.restore(tmp_path, larger, EXAMPLE)
    with pytest.raises(ValueError, match="has checkpoints of another buffer"):
        checkpoint.save(tmp_path, larger, larger.init(EXAMPLE))
    checkpointer = Checkpointer(tmp_path, larger)
    state = checkpointer.restore(EXAMPLE, resize=True)
    assert [row[-16:] for row in numbers(larger, state)] == expected(buffer, 40)
    state = added(larger, state, 40, 10)
    checkpointer.save(state, 50)
    assert len(checkpointer._base.groups) == 2  # the restored rows are not written again
    assert numbers(larger, Checkpointer(tmp_path, larger).restore(EXAMPLE)) == [
        row[-26:] for row in expected(larger, 50)
    ]
    narrow = Checkpointer(tmp_path, smaller)
    for step, end in ((40, 40), (50, 50)):
        assert numbers(smaller, narrow.restore(EXAMPLE, step, resize=True)) == expected(
            smaller, end
        )
    state = added(smaller, narrow.restore(EXAMPLE, 40, resize=True), 40, 13)  # an older step
    checkpointer.close()
    narrow.save(state, 53, blocking=False)
    narrow.wait_until_finished(state)
    assert numbers(smaller, checkpoint.restore(tmp_path, smaller, EXAMPLE)) == expected(smaller, 53)
    assert numbers(
        smaller, checkpoint.restore(tmp_path, smaller, EXAMPLE, resize=True)
    ) == expected(smaller, 53)
    for file in tmp_path.glob("rest/*3-*/*/c.*"):
        file.write_bytes(b"broken")
    with pytest.raises(
        ValueError,
        match=r"step 50 is of another buffer:(.|\n)*these checkpoints are damaged:\n  step 53: ",
    ):
        checkpoint.restore(tmp_path, smaller, EXAMPLE)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_nothing_and_one_row(num_steps, tmp_path):
    for capacities in ((1, 5), (5, 1)):
        buffer, other = (jr.items(capacity=capacity, batch_size=1) for capacity in capacities)
        path = tmp_path / str(capacities[0])
        state = buffer.init(jnp.int32(0))
        for t in range(num_steps):
            state = jitted(buffer, "add")(state, jnp.full(1, 7 + t, jnp.int32))
        checkpoint.save(path, buffer, state)
        got = checkpoint.restore(path, other, jnp.int32(0), resize=True)
        assert int(other.size(got)) == num_steps
        assert other.sample(got, jax.random.key(0)).experience.tolist() == [7 * num_steps]


def test_other_differences_are_refused(tmp_path):
    buffer = items(capacity=64)
    checkpoint.save(tmp_path, buffer, added(buffer, buffer.init(EXAMPLE), 0, 4))
    for other in (items(capacity=64, num_envs=2), items(capacity=64, allow_mask=True)):
        with pytest.raises(ValueError, match="is of another buffer"):
            checkpoint.restore(tmp_path, other, EXAMPLE, resize=True)
    with pytest.raises(ValueError, match=r"steps.more: stored nothing, expected float32\[\]"):
        checkpoint.restore(tmp_path, items(capacity=32), {**EXAMPLE, "more": 0.0}, resize=True)
    for file in tmp_path.rglob("steps.number/c.0"):
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"steps\.number"):
        checkpoint.restore(tmp_path, items(capacity=32), EXAMPLE, resize=True)


RANKED = [
    (case, True) for case in KINDS if isinstance(case.replay(capacity=480).sampler, PrioritySampler)
]


@pytest.mark.parametrize(
    ("case", "is_ranked"),
    [(case, False) for case in KINDS] + RANKED,
    ids=lambda value: getattr(value, "name", value),
)
def test_no_program_takes_memory_for_each_row(case, is_ranked):
    """Compile from shapes, and bound the memory beside arguments and results."""
    small, large = case.replay(capacity=240 * 8000), case.replay(capacity=240 * 16000)
    if is_ranked:
        small, large = (
            dataclasses.replace(buffer, sampler=jr.RankBased(normalize_weights="buffer"))
            for buffer in (small, large)
        )
    for before, after in ((small, large), (large, small)):
        old, state = (jax.eval_shape(buffer.init, case.example()) for buffer in (before, after))
        old, by_place = resize.parted(before, rows.split(old)[1])
        holes = (jax.ShapeDtypeStruct((before.num_envs, 1), jnp.int32),) * 2
        programs = [resize.resized.lower(after, old, state.streams)]
        for name, leaf in by_place.items():
            start, values = (
                jax.ShapeDtypeStruct((), jnp.int32),
                jax.ShapeDtypeStruct((2**21,), leaf.dtype),
            )
            given = (
                old.streams,
                state.sampler,
                state.replace(sampler=None),
                name,
                start,
                values,
                holes,
            )
            programs.append(resize.moved.lower(after, *given))
        for program in programs:
            memory = program.compile().memory_analysis()
            # 8 MiB are 2 to 4 bytes a row; trees of other platforms have wide nodes
            assert memory.temp_size_in_bytes < (12 if PLATFORM else 8) * 2**20


class Counts(Node):
    count: jax.Array


class Counting(Uniform):
    """Keep a number per row without naming it in `PER_ROW`."""

    def init(self, layout):
        return Counts(jnp.zeros(layout.capacity))


class SaidToCount(Counting):
    PER_ROW = ("count",)


class Told(SaidToCount):
    def per_row(self, state):
        return {"count": state.count}


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (Counting(), "Counting keeps values per row: name these fields of its state in PER_ROW"),
        (SaidToCount(), "SaidToCount: PER_ROW names count, so the sampler must implement per_row"),
        (Told(), "per_row returns count, so the sampler must implement put_per_row"),
    ],
)
def test_a_sampler_must_say_how_its_rows_move(sampler, text, tmp_path):
    buffer = jr.ReplayBuffer(
        capacity=8, num_envs=1, batch_size=2, sampler=sampler, view=jr.views.Item()
    )
    checkpoint.save(tmp_path, buffer, buffer.init(jnp.int32(0)))
    with pytest.raises(NotImplementedError, match=text):
        checkpoint.restore(tmp_path, at(buffer, 16), jnp.int32(0), resize=True)


def test_states_over_several_devices(tmp_path):
    """Save from four devices; restore to four, two and one, and to two with another capacity."""
    program = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import jaxreplay as jr
    from jaxreplay import checkpoint
    from jaxreplay.checkpoint import Checkpointer


    def shardings(replay, example, num_devices):
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("envs",))
        over = lambda leaf: (
            PartitionSpec("envs")
            if leaf.ndim and leaf.shape[0] == replay.capacity
            else PartitionSpec()
        )
        return jax.tree.map(
            lambda leaf: NamedSharding(mesh, over(leaf)), jax.eval_shape(replay.init, example)
        )


    assert len(jax.devices()) == 4
    replay = jr.prioritized(capacity=64, num_envs=4, batch_size=8, autoreset="next_step")
    step = jr.Step(
        jnp.arange(12.0).reshape(4, 3),
        jnp.zeros(4),
        jnp.arange(4.0),
        terminated=jnp.zeros(4, bool),
        truncated=jnp.zeros(4, bool),
    )
    example = jax.tree.map(lambda leaf: leaf[0], step)
    wide = shardings(replay, example, 4)
    state = jax.jit(lambda: replay.init(example), out_shardings=wide)()
    add = jax.jit(replay.add, donate_argnums=0, out_shardings=wide)
    for t in range(21):
        state = add(
            state, jax.tree.map(lambda leaf: leaf + t if leaf.dtype == jnp.float32 else leaf, step)
        )
    assert len(state.streams.steps.obs.sharding.device_set) == 4
    path = sys.argv[1]
    checkpointer = Checkpointer(path, replay, chunk_bytes=4096)
    checkpointer.save(state, 1)
    state = add(state, step)
    checkpointer.save(state, 2, blocking=False)
    checkpointer.wait_until_finished(state)
    same = lambda a, b: jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b)
    )
    for num_devices in (4, 2, 1):
        where = shardings(replay, example, num_devices)
        got = checkpoint.restore(path, replay, example, sharding=where, chunk_bytes=4096)
        same(got, state)
        assert jax.tree.all(
            jax.tree.map(lambda leaf, to: leaf.sharding.is_equivalent_to(to, leaf.ndim), got, where)
        )
    same(checkpoint.restore(path, replay, example), state)
    small = jr.prioritized(capacity=32, num_envs=4, batch_size=8, autoreset="next_step")
    where = shardings(small, example, 2)
    got = checkpoint.restore(path, small, example, resize=True, sharding=where)
    same(got, checkpoint.restore(path, small, example, resize=True))
    assert jax.tree.all(
        jax.tree.map(lambda leaf, to: leaf.sharding.is_equivalent_to(to, leaf.ndim), got, where)
    )
    """
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(program), tmp_path]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr

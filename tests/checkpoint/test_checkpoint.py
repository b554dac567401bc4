"""Tests of saving and restoring: a restored state continues bit-identically, a save writes only new
rows, and memory is bounded."""

import functools
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import SOAK
from tests.support import checkpointed_run
from tests.support.buffers import KINDS, bits, draw
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers, step

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, groups, rows
from jaxreplay.samplers import ConsumingSampler, PrioritySampler

kinds = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


@functools.cache
def go_on(case, replay, num_steps):
    """Return a jitted function of a state: add, sample and update priorities `num_steps` times.

    It returns the final state and, of each step, the batch and the buffer's size.
    """
    steps = case.step(5, time=num_steps)
    masks = case.mask(replay, 6, num_steps)

    def once(state, given):
        step, mask, seed = given
        state = replay.add(state, step, *mask)
        key = jax.random.key(seed)
        if isinstance(replay.sampler, ConsumingSampler):
            state, batch = replay.pop(state, key)
        else:
            batch = draw(replay, state, key)
        if isinstance(replay.sampler, PrioritySampler):
            state = replay.update_priorities(
                state, batch.index, jax.random.uniform(key, batch.probability.shape)
            )
        return state, (batch, replay.size(state))

    return jax.jit(lambda state: jax.lax.scan(once, state, (steps, masks, jnp.arange(num_steps))))


@kinds
def test_a_restored_state_goes_on_to_the_last_bit(case, tmp_path):
    """Save in the middle of episodes: before the ring is full, after it wrapped around, and after a
    clear. Each save builds on the one before."""
    replay = case.replay(capacity=480)
    run, checkpointer = (
        go_on(case, replay, 50),
        Checkpointer(tmp_path, replay, chunk_bytes=8192, max_to_keep=9),
    )
    state, states = replay.init(case.example()), []
    for number in range(6):
        checkpointer.save(state, number)
        states.append(state)
        written = checkpointer._base
        # each row is in one group
        assert (
            written.groups.num_rows(np.array(written.first)).sum()
            == (np.array(written.end) - written.first).sum()
        )
        state = run(replay.clear(state) if number == 4 else state)[0]
    for number, state in enumerate(states):
        restored = checkpointer.restore(case.example(), number)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(rows.split(restored)[1]) == bits(rows.split(state)[1])
        for _ in range(20 if SOAK else 1):
            (restored, got), (state, wanted) = run(restored), run(state)
            assert bits(got) == bits(wanted)


@hypothesis.given(data=hypothesis.strategies.data())
def test_every_new_row_is_in_one_group_and_those_first_that_go_first(data):
    integers = hypothesis.strategies.integers
    num_envs, length, most = (data.draw(integers(1, top)) for top in (6, 9, 12))
    end = np.array([data.draw(integers(0, 40)) for _ in range(num_envs)])
    since, num_rewritten = (
        np.array([data.draw(integers(max(0, e - length), e)) for e in end]),
        data.draw(integers(0, min(2, length))),
    )
    first_env = data.draw(integers(0, num_envs - 1))
    envs = slice(first_env, data.draw(integers(first_env + 1, num_envs)))
    seen, nearest_before = [], -1
    save = groups.Save("0000000001-00000000", length, since, end, False)
    for group in groups.cut(save, most, envs, num_rewritten):
        picked = group.rows()
        assert len({*(picked.number >= end[picked.env] - num_rewritten).tolist()}) == 1
        # rows that may be added before the row is overwritten
        distance = picked.number + length - end[picked.env]
        assert 1 <= len(picked.env) == group.num_rows <= most
        assert distance.min() >= nearest_before
        nearest_before = distance.min()
        seen += (
            rows_of_group := list(zip(picked.env.tolist(), picked.number.tolist(), strict=True))
        )
        assert rows_of_group == sorted(rows_of_group)
    assert sorted(seen) == [
        (env, number)
        for env in range(envs.start, envs.stop)
        for number in range(since[env], end[env])
    ]


def size_of(path):
    return sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())


def test_a_save_writes_what_is_new_and_forgets_what_is_old(tmp_path):
    replay = items(capacity=4096, num_envs=2)
    checkpointer = Checkpointer(
        tmp_path, replay, max_to_keep=2, compression_level=None, chunk_bytes=64 * 1024
    )
    state = added(replay, replay.init(EXAMPLE), 0, 2000)
    checkpointer.save(state, 2000)
    full = size_of(tmp_path)
    assert full > 4000 * 104
    state = added(replay, state, 2000, 20)
    checkpointer.save(state, 2020)
    assert size_of(tmp_path) - full < 0.05 * full
    for end in range(2500, 9000, 500):  # several times around the ring
        state = added(replay, state, end - 500 if end > 2500 else 2020, 500 if end > 2500 else 480)
        checkpointer.save(state, end)
        assert size_of(tmp_path) < 2 * full  # overwritten rows are deleted
    assert checkpointer.all_steps() == [8000, 8500]
    for end in (8000, 8500):
        assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE, end)) == expected(
            replay, end
        )


@pytest.mark.parametrize("mask", [False, True], ids=["lockstep", "masked"])
def test_parts_have_groups_of_their_own_which_stay_few(mask, tmp_path, monkeypatch):
    """Save as if three parts, such as those of several processes, had the envs."""
    buffer = items(capacity=2048, num_envs=4, allow_mask=mask)
    bounds = [0, 1, 3, 4]
    parts_of = lambda _, state: rows.Parts.of(state)._replace(bounds=bounds)
    monkeypatch.setattr(Checkpointer, "_parts_of", parts_of)
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=400_000, max_to_keep=30)
    state, r, add = buffer.init(EXAMPLE), np.random.default_rng(0), jr.jit(buffer).add
    counts, saved, num_rewinds = [], [], 0
    for number in range(30 + 400 * SOAK):
        for _ in range(r.integers(1, 40)):
            is_added = r.random(4) < 0.5 if mask else np.ones(4, bool)
            state = add(state, step(r.integers(10**6), 4), *([is_added] if mask else []))
        checkpointer.save(state, number, blocking=number % 3 > 0)
        checkpointer.wait_until_finished(state)
        saved.append(jax.tree.map(jnp.copy, state))
        for group in checkpointer._base.groups:
            assert any(
                start <= group.env < group.env_stop <= stop
                for start, stop in itertools.pairwise(bounds)
            )
        counts.append(len(checkpointer._base.groups))
        assert bits(Checkpointer(tmp_path, buffer).restore(EXAMPLE)) == bits(state)
        if r.random() < 0.2:
            state = jax.tree.map(jnp.copy, saved[r.integers(max(0, number - 5), number + 1)])
            num_rewinds += 1
    assert num_rewinds > 2
    assert max(counts) < 24  # a group has at most 512 rows here
    assert not any(one.problems for one in checkpointer.verify())


def test_small_groups_stay_few_where_not_every_env_steps(tmp_path):
    """Each save has rows of some of the envs, a few of each."""
    buffer = items(capacity=64 * 64, num_envs=64, allow_mask=True)
    checkpointer, counts = Checkpointer(tmp_path, buffer), []
    state, r, add = buffer.init(EXAMPLE), np.random.default_rng(0), jr.jit(buffer).add
    for number in range(40):
        for _ in range(3):
            state = add(state, step(number, 64), r.random(64) < 0.5)
        checkpointer.save(state, number)
        counts.append(len(checkpointer._base.groups))
    assert max(counts) < 12, counts
    assert bits(checkpointer.restore(EXAMPLE)) == bits(state)


def test_a_run_that_goes_back_does_not_mix_with_the_one_it_left(tmp_path):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay)
    state = added(replay, replay.init(EXAMPLE), 0, 5)
    checkpointer.save(state, 5)
    checkpointer.save(added(replay, jax.tree.map(jnp.copy, state), 500, 4), 9)
    back = checkpointer.restore(EXAMPLE, 5)
    back = added(replay, back, 5, 3)
    checkpointer.save(back, 8)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 8)) == expected(replay, 8)
    fresh = added(replay, replay.init(EXAMPLE), 0, 30)  # another run under the same path
    checkpointer.close()
    for number in (1, 2):
        Checkpointer(tmp_path, replay).save(fresh, number)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 2)) == expected(replay, 30)
    # fewer rows than were saved here before
    checkpointer.save(added(replay, replay.init(EXAMPLE), 0, 3), 3)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 3)) == expected(replay, 3)


def test_only_rows_of_the_same_history_are_left_out(tmp_path):
    """Save states with equal row numbers and different rows: another branch and a fresh run."""
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay)
    start = added(replay, replay.init(EXAMPLE), 0, 8)
    checkpointer.save(start, 8)
    one, other = (added(replay, jax.tree.map(jnp.copy, start), 8 + 100 * way, 4) for way in (0, 1))
    checkpointer.save(one, 12)
    checkpointer.save(other, 13)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 13))[0][-5:] == [7, 108, 109, 110, 111]
    anew = added(replay, replay.init(EXAMPLE), 20, 14)
    checkpointer.save(anew, 14)
    assert numbers(replay, checkpointer.restore(EXAMPLE, 14))[0] == list(range(20, 34))


def test_others_may_delete_what_a_save_would_go_on_from(tmp_path):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay, max_to_keep=1)
    states = [added(replay, replay.init(EXAMPLE), 0, 4)]
    checkpointer.save(states[0], 4)
    checkpointer.close()
    checkpoint.save(tmp_path, replay, states[0], step=5)  # keeps one checkpoint, so deletes step 4
    checkpointer.save(added(replay, jax.tree.map(jnp.copy, states[0]), 4, 2), 6)
    assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE)) == expected(replay, 6)
    wide = Checkpointer(tmp_path / "x", replay, max_to_keep=3)
    for end in (4, 6, 8):
        states.append(added(replay, replay.init(EXAMPLE), 0, end))
        wide.save(states[-1], end)
    wide.close()
    narrow = Checkpointer(tmp_path / "x", replay, max_to_keep=1)
    state = narrow.restore(EXAMPLE, 4)
    narrow.save(added(replay, state, 4, 1), 5)
    assert numbers(replay, Checkpointer(tmp_path / "x", replay).restore(EXAMPLE, 5)) == expected(
        replay, 5
    )
    assert (narrow.all_steps(), narrow.latest_step()) == ([5], 5)


def test_what_is_not_ours_stays(tmp_path):
    for name in ("rows/mine.txt", "rest/photos/one.png", "manifests/notes.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    replay = items()
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    for number in range(3):
        checkpoint.save(tmp_path, replay, state, step=number)
    assert (
        len(list(tmp_path.rglob("*.txt")))
        == len(list(tmp_path.rglob("*.png")))
        == len(list(tmp_path.rglob("notes.json")))
        == 1
    )
    other = jr.items(capacity=64, num_envs=4, batch_size=8, allow_mask=True)
    with pytest.raises(
        ValueError,
        match="has checkpoints of another buffer, or of steps with other leaves; use another path "
        "for each buffer",
    ):
        checkpoint.save(tmp_path, other, other.init(EXAMPLE))
    # settings of sampling may differ
    again = jr.items(capacity=64, num_envs=4, batch_size=100, min_size=7)
    assert numbers(again, checkpoint.restore(tmp_path, again, EXAMPLE)) == expected(again, 4)


def test_small_saves_do_not_pile_up(tmp_path):
    replay = items(capacity=4096, num_envs=2)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=64 * 1024)
    state = replay.init(EXAMPLE)
    last = 149 if SOAK else 70
    for end in range(1, last + 1):
        state = added(replay, state, end - 1, 1)
        checkpointer.save(state, end)
    assert len(checkpointer._base.groups) < 12
    for end in range(last + 1, last + 11):  # no new rows
        checkpointer.save(state, end)
    assert len(checkpointer._base.groups) < 12
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, last)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("chunk_bytes", [400, 3000])
def test_streams_of_different_speed(wait, chunk_bytes, tmp_path):
    """Save streams of very different lengths, two of them empty. Groups have fewer or more rows
    than there are envs."""
    replay = jr.items(capacity=8 * 30, num_envs=8, batch_size=8, allow_mask=True)
    add, checkpointer = jr.jit(replay).add, Checkpointer(tmp_path, replay, chunk_bytes=chunk_bytes)
    state, r = replay.init(EXAMPLE), np.random.default_rng(0)
    for number in range(4):
        for t in range(25):
            mask = r.random(8) < [0.9, 0.1, 0.5, 0.3, 0.0, 0.2, 0.1, 0.0]
            state = add(state, step(25 * number + t, 8), mask)
        checkpointer.save(state, number, blocking=wait)
        for _ in range(2):
            checkpointer.advance(state)
        checkpointer.wait_until_finished(state)
        restored = checkpointer.restore(EXAMPLE)
        first, end = rows.span_of(rows.heads_of(state), 30)
        for env in range(8):
            held = env * 30 + np.arange(first[env], end[env]) % 30
            for leaf, other in zip(
                jax.tree.leaves(restored.streams.steps),
                jax.tree.leaves(state.streams.steps),
                strict=True,
            ):
                np.testing.assert_array_equal(leaf[held], other[held])


@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_save_that_does_not_wait_is_of_the_state_that_it_was_given(num_envs, tmp_path):
    replay = items(capacity=1024 * num_envs, num_envs=num_envs)
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=8 * 1024 * num_envs)
    buffer, state = jr.jit(replay), added(replay, replay.init(EXAMPLE), 0, 1500)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)}
    checkpointer.save(state, 1500, blocking=False)
    assert checkpointer.is_saving
    for t in range(1500, 2600):  # overwrites the whole ring during the save
        checkpointer.advance(state)
        state = buffer.add(state, step(t, num_envs))
    # every add was in place
    assert {
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)
    } == pointers
    checkpointer.wait_until_finished(state)
    assert not checkpointer.is_saving
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 1500)
    checkpointer.save(state, 2600, blocking=False)
    checkpointer.wait_until_finished(state)
    checkpointer.close()
    assert numbers(replay, checkpointer.restore(EXAMPLE, 2600)) == expected(replay, 2600)


@pytest.mark.parametrize(("num_envs", "row_bytes"), [(1, 100), (4, 100), (4, 40_000)])
@pytest.mark.parametrize("level", [None, 1])
def test_a_save_that_waits_leaves_the_rows_in_place(num_envs, row_bytes, level, tmp_path):
    """Write rows from the state's memory, also across the ring's end. The save then releases that
    memory, so adds stay in place."""
    replay = items(capacity=64 * num_envs, num_envs=num_envs)
    buffer, checkpointer = (
        jr.jit(replay),
        Checkpointer(tmp_path, replay, chunk_bytes=2**20, compression_level=level),
    )
    example = {"number": jnp.int32(0), "image": jnp.zeros(row_bytes, jnp.uint8)}
    images = np.random.default_rng(0).integers(
        256, size=(7, 30, num_envs, row_bytes), dtype=np.uint8
    )
    state = replay.init(example)
    for number in range(7):
        numbers_ = jnp.broadcast_to(
            jnp.arange(30, dtype=jnp.int32)[:, None] + 30 * number, (30, num_envs)
        )
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)]
        state = buffer.extend(state, {"number": numbers_, "image": jnp.asarray(images[number])})
        assert [
            leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)
        ] == pointers
        checkpointer.save(state)
        assert bits(checkpointer.restore(example)) == bits(rows.copied(state))


@pytest.mark.parametrize("chunk_bytes", [4096, 2**20])
def test_priorities_are_those_of_the_call(chunk_bytes, tmp_path, monkeypatch):
    """Save priorities with `blocking=False`, also without new rows. If they are larger than a
    chunk, they are not copied."""
    zero = jnp.zeros(1)
    step = jr.Step(obs=zero, action=zero, reward=zero, terminated=zero > 0, truncated=zero > 0)
    example = jax.tree.map(lambda leaf: leaf[0], step)
    replay = jr.prioritized(capacity=4096, num_envs=1, batch_size=8, autoreset="next_step")
    buffer, checkpointer = jr.jit(replay), Checkpointer(tmp_path, replay, chunk_bytes=chunk_bytes)
    state = buffer.extend(
        replay.init(example), jax.tree.map(lambda leaf: jnp.repeat(leaf[None], 3000, 0), step)
    )
    write = checkpointer._store.write

    def slow(files):
        if any(name.startswith("rest/") for name in files):
            time.sleep(0.02)
        write(files)

    monkeypatch.setattr(checkpointer._store, "write", slow)
    for number in range(3):  # only the first save has new rows
        wanted = bits(rows.split(state)[1])
        checkpointer.save(state, number, blocking=False)
        batch = buffer.sample(state, jax.random.key(number))
        state = buffer.update_priorities(state, batch.index, jnp.arange(8.0) + number)
        checkpointer.advance(state, 0)
        checkpointer.wait_until_finished(state)
        assert (
            bits(rows.split(checkpointer.restore(example, number))[1])
            == wanted
            != bits(rows.split(state)[1])
        )


def test_a_save_without_pumps_is_refused_and_the_one_before_stays(tmp_path):
    replay = items()
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=500)
    state = added(replay, replay.init(EXAMPLE), 0, 20)
    checkpointer.save(state, 20)
    state = added(replay, state, 20, 16)
    checkpointer.save(state, 36, blocking=False)
    state = added(replay, state, 36, 16)
    with pytest.raises(
        RuntimeError,
        match=r"rows were overwritten or cleared before .*: call advance\(state\) before each "
        r"add, with its num_steps",
    ):
        checkpointer.wait_until_finished(state)
    assert checkpointer.all_steps() == [20]
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 20)
    checkpointer.save(state, 52, blocking=False)
    with pytest.raises(RuntimeError, match="this state is not from the run that is being saved"):
        checkpointer.wait_until_finished(replay.init(EXAMPLE))
    checkpointer.save(state, 52, blocking=False)
    with pytest.raises(RuntimeError, match=r"and wait_until_finished\(state\) before a clear"):
        checkpointer.wait_until_finished(
            added(replay, replay.clear(jax.tree.map(jnp.copy, state)), 0, 1)
        )
    checkpointer.save(state, 52, blocking=False)
    with pytest.raises(ZeroDivisionError), checkpointer:  # the caller's error propagates
        _ = 1 / 0
    assert checkpointer.all_steps() == [20]
    checkpointer.save(state, 52, blocking=False)
    with pytest.raises(RuntimeError, match="a save was incomplete and is cancelled"):
        checkpointer.close()
    checkpointer.save(state, 52)
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 52)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(),
    reason="needs Linux, whose kernel says how much memory there was",
)
@pytest.mark.parametrize(
    ("gigabytes", "row"),
    [(0.5, 100_000), *([(4, 100_000), (8, 100_000), (0.1, 4), (0.5, 4)] if SOAK else [])],
)
def test_beside_the_state_there_are_few_chunks(gigabytes, row, tmp_path):
    script = pathlib.Path(checkpointed_run.__file__).parent / "checkpoint_memory.py"
    # memory for compiling counts too
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, script, tmp_path, str(gigabytes), str(row)],
        capture_output=True,
        text=True,
        env=environment,
    )
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("save", "save_more", "restore", "save_later", "resize"):
        assert found[name] <= 3 * 64 * 2**20, (name, found)
    assert found["full_bytes"] >= found["state"] >= gigabytes * 1e9
    assert row < 1000 or found["more_bytes"] <= 0.05 * found["full_bytes"]


def test_the_example_and_the_buffer_must_fit(tmp_path):
    replay = items()
    with pytest.raises(FileNotFoundError, match="there is no checkpoint under /"):
        checkpoint.restore(tmp_path, replay, EXAMPLE)
    checkpoint.save(tmp_path, replay, added(replay, replay.init(EXAMPLE), 0, 5), step=5)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint of step 6"):
        checkpoint.restore(tmp_path, replay, EXAMPLE, step=6)
    with pytest.raises(
        ValueError, match=r"step 5 is of another buffer:\n.*capacity=64.*\n.*\n.*capacity=128"
    ):
        checkpoint.restore(tmp_path, items(capacity=128), EXAMPLE)
    with pytest.raises(
        ValueError, match=r"steps.bytes: stored uint8\[100\], expected uint8\[99\]"
    ) as caught:
        checkpoint.restore(
            tmp_path, replay, {**EXAMPLE, "bytes": jnp.zeros(99, jnp.uint8), "more": 0.0}
        )
    assert "steps.more: stored nothing, expected float32[]" in str(caught.value)
    with pytest.raises(
        ValueError,
        match=r"save: this state is not of this buffer.*\n  length: the state's is 16, this "
        r"buffer's 32",
    ):
        checkpoint.save(tmp_path, items(capacity=128), replay.init(EXAMPLE))
    with pytest.raises(ValueError, match="keep must be an int of at least 1"):
        Checkpointer(tmp_path, replay, max_to_keep=0)


def test_only_a_buffer_and_its_state_are_taken(tmp_path):
    replay = items()
    for other in (jr.jit(replay), jr.mix(one=(replay, 2)), jr.Replay(replay)):
        with pytest.raises(
            ValueError,
            match="Checkpointer: buffer must be a ReplayBuffer, a Rollout or a sharded buffer, "
            "got ",
        ):
            Checkpointer(tmp_path, other)
    with pytest.raises(
        ValueError,
        match=r"save: the state must be a ReplayState, .* got a tuple of 2; the state comes first",
    ):
        Checkpointer(tmp_path, replay).save((replay.init(EXAMPLE), 1))
    assert not list(tmp_path.rglob("*.json"))


def test_notes_and_names_of_any_kind(tmp_path):
    replay = jr.items(capacity=4, batch_size=2)
    example = {"a/b": 0.0, "..": np.zeros((2, 0)), "": {"é": True}}
    state = replay.add(replay.init(example), jax.tree.map(lambda x: jnp.asarray(x)[None], example))
    checkpointer = Checkpointer(tmp_path / "x", replay)
    checkpointer.save(state, metadata={"episodes": 3})
    other = Checkpointer(f"file://{tmp_path}/x/", replay)
    assert bits(other.restore(example)) == bits(state)
    assert other.metadata == {"episodes": 3}
    other.metadata["episodes"] = 4  # the caller's copy
    other.restore(example)
    assert other.metadata == {"episodes": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    for path in (tmp_path / "a%20b c#d", "memory://somewhere/else"):
        one = Checkpointer(path, replay, max_to_keep=1)
        for number in range(3):
            one.save(state, number)
        assert one.all_steps() == [2]
        assert bits(Checkpointer(path, replay).restore(example)) == bits(state)
        assert [len(one._store.entries(kind)) for kind in ("manifests", "rest", "rows")] == [
            1,
            1,
            1,
        ]


def test_very_long_names_of_leaves(tmp_path):
    """Save leaves whose names are too long for file names, and differ only at the end."""
    replay = jr.items(capacity=4, batch_size=2)
    example = {
        f"{'n' * 300}{end}": np.float32(value)
        for value, end in enumerate(("", "a", "b", "é" * 200, "/" * 200))
    }
    state = replay.add(replay.init(example), jax.tree.map(lambda x: jnp.asarray(x)[None], example))
    checkpoint.save(tmp_path, replay, state)
    assert bits(checkpoint.restore(tmp_path, replay, example)) == bits(state)
    assert checkpoint.verify(tmp_path)[0].problems == []
    assert all(len(path.name) < 256 for path in tmp_path.rglob("*"))


def test_narrow_numbers_are_told_apart(tmp_path):
    replay = jr.items(capacity=4, batch_size=2)
    state = replay.add(
        replay.init(jnp.zeros(3, jnp.float8_e5m2)), jnp.ones((1, 3), jnp.float8_e5m2)
    )
    checkpoint.save(tmp_path, replay, state)
    assert bits(checkpoint.restore(tmp_path, replay, jnp.zeros(3, jnp.float8_e5m2))) == bits(state)
    with pytest.raises(ValueError, match=r"stored float8_e5m2\[3\], expected float8_e4m3fn\[3\]"):
        checkpoint.restore(tmp_path, replay, jnp.zeros(3, jnp.float8_e4m3fn))


@pytest.mark.parametrize("chunk_bytes", [64, 2**20])  # smaller and larger than the state
def test_a_rollout_is_saved_too(tmp_path, chunk_bytes):
    rollout = jr.rollout(length=5, num_envs=2, autoreset="next_step")
    zeros = jnp.zeros(2)
    step = jr.Step(
        obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0
    )
    example = jax.tree.map(lambda x: x[0], step)
    state = rollout.add(rollout.add(rollout.init(example), step), step)
    checkpointer = Checkpointer(tmp_path, rollout, chunk_bytes=chunk_bytes)
    for number, wait in enumerate((True, False)):
        checkpointer.save(state, number, blocking=wait)
        checkpointer.advance(state)
        checkpointer.wait_until_finished(state)
        assert bits(checkpointer.restore(example)) == bits(state)
        state = rollout.add(state, step)

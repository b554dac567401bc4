"""Tests of damaged checkpoints: swapped files, damage that several checkpoints share, and partial
restores."""

import collections
import functools
import itertools
import random

import jax
import numpy as np
import pytest

from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError, rows
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from jaxreplay.storage import stored_arrays
from tests.checkpoint.runs import files_of, groups_of, quiet, span_of
from tests.checkpoint.test_resize import fed, kinds
from tests.conftest import ALL, SOAK
from tests.support.buffers import NUM_ENVS, bits, everything, jitted, jitted_draw
from tests.support.checkpointed_run import EXAMPLE, REPLAY, added, begun, expected, items, numbers
from tests.support.refusals import refused, warned
from tests.support.steps import nth


def flipped(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def saves(checkpointer, ends):
    """Save a run at each of these steps, and return its last state."""
    state, start = begun(REPLAY, 0), 0
    for end in ends:
        state, start = added(REPLAY, state, start, end - start), end
        checkpointer.save(state, end)
    return state


def restored(path, **options):
    """Restore with a fresh Checkpointer and check the rows.

    Returns:
      The restored step, or None if the restore is refused.
    """
    checkpointer = Checkpointer(path, REPLAY)
    try:
        with quiet():
            state = checkpointer.restore(EXAMPLE, **options)
    except CorruptCheckpointError:
        return None
    assert numbers(REPLAY, state) == expected(REPLAY, checkpointer.step)
    return checkpointer.step


# Swapped files.


@pytest.mark.parametrize("level", [None, 1])
def test_a_file_in_another_s_place_is_never_read_as_its_own(level, tmp_path):
    """Swap two files, mostly of equal size, or copy one over the other. A backup that was restored
    only in part has the same effect. So has an older copy of the newest manifest."""
    saves(
        Checkpointer(tmp_path, REPLAY, chunk_bytes=4000, compression_level=level), range(4, 40, 4)
    )
    r, outcomes = random.Random(0), collections.Counter()
    files = {file: file.read_bytes() for file in files_of(tmp_path)}
    alike = [
        (one, other)
        for one, other in itertools.combinations(files, 2)
        if one.parent == other.parent and files[one] != files[other]
        if level or len(files[one]) == len(files[other]) or one.parent.name == "manifests"
    ]
    assert len(alike) > 10
    for trial in range(2500 if SOAK else 40):
        one, other = r.choice(alike) if trial % 10 else r.sample([*files], 2)
        if trial % 3:
            one.write_bytes(files[other])
        other.write_bytes(files[one])
        outcomes[restored(tmp_path)] += 1
        for file in (one, other):
            file.write_bytes(files[file])
    assert restored(tmp_path) == 36
    assert set(outcomes) <= {None, 28, 32, 36}
    assert outcomes[None] > 6  # no checkpoint could be restored
    assert outcomes[32] > 1
    oldest, *_, newest = sorted((tmp_path / "manifests").iterdir())
    newest.write_bytes(oldest.read_bytes())
    assert restored(tmp_path) == 32


# Damage that several checkpoints share.


def damage(path, checkpointer):
    """Damage the oldest group, which all checkpoints share. Return the folder of the group."""
    oldest = min(group.file for group in groups_of(checkpointer))
    flipped(path / oldest)
    return oldest


@pytest.fixture
def shared(tmp_path):
    """Three checkpoints that share groups, and their path."""
    checkpointer = Checkpointer(tmp_path / "run", REPLAY, chunk_bytes=16_000)
    saves(checkpointer, (40, 44, 48))
    return checkpointer, tmp_path / "run"


def test_verify_names_what_is_broken_in_each_generation(shared, capsys):
    checkpointer, path = shared
    steps = (48, 44, 40)
    assert [tuple(found) for found in checkpointer.verify()] == [(step, []) for step in steps]
    main(["inspect", "--verify", str(path)])
    assert capsys.readouterr().out == "".join(f"step {step}: is intact\n" for step in steps)
    for broken in files_of(path)[:: 1 if ALL else 2]:
        flipped(broken)
        found, own = checkpointer.verify(), str(broken.relative_to(path))
        assert any(one.problems for one in found), own
        for one in found:
            assert not one.problems or any(own in problem for problem in one.problems), (own, one)
            expected_step = None if one.problems else one.step
            assert one.step is None or restored(path, step=one.step) == expected_step
        flipped(broken)
    damage(path, checkpointer)

    def told(code, *arguments):
        """Return what the command prints, after a check of its exit status."""
        with pytest.raises(SystemExit) as ended:
            main(["inspect", "--verify", str(path), *arguments])
        assert ended.value.code == code
        return "".join(capsys.readouterr())

    said = told(1)
    assert said.count("is broken\n  rows/") == 3
    assert said.count("is not as it was written") == 3
    assert told(1, "--json", "--step", "44").count('"step": ') == 1
    # not checked is not intact
    assert "there is no checkpoint of step 9" in told(2, "--step", "9")
    assert "leave out --plot" in told(2, "--plot", "x")
    with refused("there is no checkpoint", FileNotFoundError):
        checkpoint.verify(path / "nothing")


# Partial restores.


def salvaged(path, text, buffer=REPLAY, **options):
    """Restore what is left, with a warning. Return the state and its Checkpointer."""
    checkpointer = Checkpointer(path, buffer)
    with warned(text):
        state = checkpointer.restore(EXAMPLE, allow_partial=True, **options)
    return state, checkpointer


def lost_of(checkpointer):
    """Return the (env, number) of each row that is missing."""
    return {
        (one.env, number)
        for one in checkpointer.missing_rows
        for number in range(one.first, one.last + 1)
    }


def numbered(times):
    return [[1_000_000 * env + t for t in times] for env in range(4)]


def test_only_what_is_lost_is_left_out(shared):
    before, path = shared
    before.close()
    checkpointer = Checkpointer(path, REPLAY)
    state = checkpointer.restore(EXAMPLE, allow_partial=True)  # without a warning
    assert checkpointer.missing_rows == []
    assert numbers(REPLAY, state) == expected(REPLAY, 48)
    damage(path, before)
    with refused(r"restore: nothing under .* can be restored", CorruptCheckpointError):
        checkpointer.restore(EXAMPLE)
    state, checkpointer = salvaged(path, r"of its 192 rows are lost:\n  rows/.* is not as it was")
    lost = {number for _, number in lost_of(checkpointer)}
    left = [t for t in range(48) if t not in lost]
    assert lost == set(range(left[0]))
    assert numbers(REPLAY, state) == numbered(left)
    # The state continues, and its next checkpoint is intact.
    checkpointer.save(added(REPLAY, state, 48, 3), 51)
    assert checkpointer.verify()[0].problems == []
    state = Checkpointer(path, REPLAY).restore(EXAMPLE)
    assert numbers(REPLAY, state) == numbered([*left, 48, 49, 50])


def test_when_the_rest_is_broken_an_older_generation_is_salvaged(shared):
    checkpointer, path = shared
    damage(path, checkpointer)
    flipped(next((path / "rest").glob("*3-*")))
    assert salvaged(path, r"step 48: rest/(.|\n)*rows are lost")[1].step == 44


def test_the_checkpoint_of_which_most_is_left_is_salvaged(shared):
    """The newest rows of the newest one are damaged, and the oldest of all."""
    checkpointer, path = shared
    damage(path, checkpointer)
    flipped(max((path / "rows").iterdir()))
    state, reader = salvaged(path, "rows are lost")
    assert reader.step == 44
    first = {one.last + 1 for one in reader.missing_rows}
    assert numbers(REPLAY, state) == numbered(range(*first, 44))


def test_when_all_rows_are_lost_nothing_is_left_but_the_buffer(shared):
    path = shared[1]
    for file in (path / "rows").iterdir():
        flipped(file)
    state, _ = salvaged(path, "192 of its 192 rows")
    assert numbers(REPLAY, state) == [[]] * 4
    assert not bool(jitted(REPLAY, "can_sample")(state))
    assert numbers(REPLAY, added(REPLAY, state, 48, 2)) == numbered((48, 49))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_left_in_another_capacity_is_saved_under_the_same_path(is_replaced, tmp_path):
    """As long as its checkpoint is there."""
    with Checkpointer(tmp_path, REPLAY, chunk_bytes=4000) as checkpointer:
        before = saves(checkpointer, [60])
        flipped(tmp_path / groups_of(checkpointer)[-3].file)
    small = items()
    state, checkpointer = salvaged(tmp_path, "rows are lost", small)
    assert checkpointer.missing_rows
    if is_replaced:
        checkpoint.save(tmp_path, REPLAY, before)
        with refused("has a newer checkpoint, by this process", PathInUseError):
            checkpointer.save(state)
    else:
        checkpointer.save(state)
        assert numbers(small, checkpointer.restore(EXAMPLE)) == numbers(small, state)


# Partial restores of every kind of buffer. A row's name is 1 + env + 4 * step, and 0 is no row's.


def has_name(path):
    return any(leaf in jax.tree_util.keystr(path) for leaf in ("image", "vector", "action"))


def named(case, seed, block, time):
    """Return steps whose images, vectors and actions hold the names of their rows."""
    name = 1 + np.arange(NUM_ENVS) + NUM_ENVS * (time * block + np.arange(time)[:, None])

    def marked(path, leaf):
        own = name.reshape(name.shape + (1,) * (leaf.ndim - 2))
        return np.broadcast_to(own, leaf.shape).astype(leaf.dtype) if has_name(path) else leaf

    return jax.tree_util.tree_map_with_path(marked, case.step(seed + block, time=time))


def names_in(case, item):
    """Return the names of the rows of an item: all from the smallest to the largest found in it.

    With hindsight, only the names found in it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(item)
    found = {int(name) for path, leaf in leaves if has_name(path) for name in leaf.ravel()} - {0}
    return found if "hindsight" in case.name else set(range(min(found), max(found) + 1, NUM_ENVS))


def held(case, buffer, state):
    """Return the name and the place of each stored row, by its env and number."""
    leaf = state.rows.steps["image"] if case.is_items else state.rows.steps.action
    name = np.asarray(stored_arrays.values(leaf)).reshape(buffer.capacity, -1)[:, 0].astype(int)
    spans = zip(*span_of(buffer, state), strict=True)
    of = lambda env, number: env * buffer.length + number % buffer.length
    return {
        (env, number): (int(name[of(env, number)]), of(env, number))
        for env, span in enumerate(spans)
        for number in range(*span)
    }


def read(case, buffer, state):
    """Return each sampleable row's item, the names in it and its probability, by the row's name."""
    batch, found = jax.device_get(everything(buffer)(state, 1)), {}
    for name, place in held(case, buffer, state).values():
        if batch.is_valid[place]:
            item = nth(batch.experience, place)
            found[name] = bits(item), names_in(case, item), batch.probability[place]
    return found


@kinds
@pytest.mark.parametrize("seed", range(8 if SOAK else 1))
def test_what_is_salvaged_is_as_it_was(case, seed, tmp_path):
    """Damage random groups and restore in part: rows that are older than the newest damage are as
    if they were overwritten."""
    r, buffer = random.Random(f"{case.name} {seed}"), case.replay(capacity=96)
    add = functools.partial(fed, case, buffer, step=functools.partial(named, case, 10 * seed))
    checkpointer = Checkpointer(tmp_path, buffer, chunk_bytes=4096)
    state = None
    for block in range(5):
        state = add([block], state)
        checkpointer.save(state, block)
    checkpointer.close()
    groups = [group.file for group in groups_of(checkpointer)]
    assert len(groups) >= 3
    for file in r.sample(groups, r.choice([1, 1, 2])):
        flipped(tmp_path / file)
    with warned("rows are lost"):
        got = checkpointer.restore(case.example(), 4, allow_partial=True)
    gone = check_salvaged(case, buffer, state, got, lost_of(checkpointer))
    # The state continues, around the ring.
    more = add([5], got)
    for _, made_of, _ in read(case, buffer, more).values():
        assert "across" in case.name or not made_of & gone, made_of & gone
    for key in range(3):
        batch = jitted_draw(buffer)(more, jax.random.key(key))
        assert np.asarray(batch.is_valid).all() or isinstance(buffer.sampler, ConsumingSampler)
    # It can be saved and restored.
    checkpoint.save(tmp_path / "again", buffer, more)
    again = checkpoint.restore(tmp_path / "again", buffer, case.example())
    assert bits(rows.split(again)[1]) == bits(rows.split(more)[1])
    assert held(case, buffer, again) == held(case, buffer, more)


def check_salvaged(case, buffer, before, after, lost):
    """Check the rows and items that are left. Return the names of those that are lost."""
    was, now = (held(case, buffer, state) for state in (before, after))
    left = [name for row, (name, _) in was.items() if row not in lost]
    assert [name for name, _ in now.values()] == left
    gone = {name for name, _ in was.values()} - {*left}
    if buffer.view.is_random:
        return gone
    edges = {
        name
        for (env, number), (name, _) in was.items()
        if lost & {(env, number - 1), (env, number), (env, number + 1)}
    }
    read_before, read_after = (read(case, buffer, state) for state in (before, after))
    assert set(read_after) <= set(read_before)
    for name, (content, made_of, _) in read_after.items():
        assert "across" in case.name or not made_of & gone, (name, made_of & gone)
        if not (made_of | read_before[name][1]) & edges:
            assert content == read_before[name][0], name
    if not isinstance(buffer.sampler, ConsumingSampler) and "sequences" not in case.name:
        far = {name for name, (_, made_of, _) in read_before.items() if not made_of & edges}
        assert far <= set(read_after)
    if isinstance(buffer.sampler, PrioritySampler):  # ratios of priorities are unchanged
        both = read_before, read_after
        shares = np.array([[its[name][2] for name in read_after] for its in both])
        was, now = shares[:, (shares > 0).all(axis=0)]
        np.testing.assert_allclose(now / now.sum(), was / was.sum(), rtol=1e-4)
    return gone

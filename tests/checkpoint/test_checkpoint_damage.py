"""Tests of damaged checkpoints: swapped files, damage that several checkpoints share, and partial
restores."""

import collections
import itertools
import random
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import COUNTERS_CHUNK, SOAK
from tests.support.buffers import CATALOG, KINDS, bits, everything, jitted, jitted_draw
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, rows, verifying
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from jaxreplay.storage import stored_arrays


def files_of(path):
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and file.name != "zarr.json" and "writers" not in file.parts
    )


def flipped(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def restored(buffer, path, **options):
    """Restore with a fresh Checkpointer and check the rows.

    Returns:
      The restored step, or None if the restore is refused.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = Checkpointer(path, buffer)
        try:
            state = checkpointer.restore(EXAMPLE, **options)
        except CorruptCheckpointError:
            return None
    assert numbers(buffer, state) == expected(buffer, checkpointer.step)
    return checkpointer.step


# Swapped files.


@pytest.mark.parametrize("level", [None, 1])
def test_a_file_in_another_s_place_is_never_read_as_its_own(level, tmp_path):
    """Swap two files, mostly of equal size or name, or copy one over the other. A backup that was
    restored only in part has the same effect."""
    buffer, path = items(), tmp_path / "run"
    checkpointer, state = (
        Checkpointer(path, buffer, chunk_bytes=2000, compression_level=level, max_to_keep=3),
        buffer.init(EXAMPLE),
    )
    for end in range(4, 40, 4):
        state = added(buffer, state, end - 4, 4)
        checkpointer.save(state, end)
    files, r, outcomes = files_of(path), random.Random(0), collections.Counter()
    alike = [
        pair
        for kind in (lambda file: file.stat().st_size, lambda file: file.parent.name + file.name)
        for _, found in itertools.groupby(sorted(files, key=kind), key=kind)
        for pair in itertools.combinations(found, 2)
        if pair[0].read_bytes() != pair[1].read_bytes()
    ]
    assert len(alike) > 1000
    for trial in range(2500 if SOAK else 60):
        one, other = r.choice(alike) if trial % 10 else r.sample(files, 2)
        contents = one.read_bytes(), other.read_bytes()
        if trial % 3:
            one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        outcomes[restored(buffer, path)] += 1
        one.write_bytes(contents[0])
        other.write_bytes(contents[1])
    assert restored(buffer, path) == 36
    assert set(outcomes) <= {None, 28, 32, 36}
    assert outcomes[None] > 10  # no checkpoint could be restored
    assert outcomes[32] > 3


def test_a_damaged_group_that_is_partly_overwritten_is_written_again(tmp_path):
    """Damage a group whose older rows are overwritten: the save compares its other rows."""
    buffer = items(capacity=256)
    checkpointer, state = (
        Checkpointer(tmp_path, buffer, chunk_bytes=8000),
        added(buffer, buffer.init(EXAMPLE), 0, 64),
    )
    checkpointer.save(state, 64)
    oldest = checkpointer._base.groups[0]
    state = added(buffer, state, 64, 1)
    flipped(tmp_path / "rows" / oldest.folder / "steps.number" / "c.0")
    with pytest.warns(
        UserWarning,
        match=f"save: rows/{oldest.folder}/steps.number.*: damaged since it was written; its "
        "rows are still in the buffer",
    ):
        checkpointer.save(state, 65)
    assert oldest.folder not in {group.folder for group in checkpointer._base.groups}
    assert numbers(buffer, checkpointer.restore(EXAMPLE)) == expected(buffer, 65)


def test_an_older_copy_of_the_newest_files_is_told(tmp_path):
    """Replace the newest chunk, array or group by a backup's, and the manifest by an older one."""
    buffer, path, backup = items(), tmp_path / "run", tmp_path / "backup"
    for copy, start, count in ((backup, 500, 3), (path, 0, 4)):
        with Checkpointer(copy, buffer, chunk_bytes=2000) as checkpointer:
            state = buffer.init(EXAMPLE)
            for end in (count, 2 * count):
                state = added(buffer, state, start + end - count, count)
                checkpointer.save(state, end)
    for kind, what in (
        ("rows", "steps.number/c.0"),
        ("rows", "steps.number"),
        ("rows", ""),
        ("rest", COUNTERS_CHUNK),
        ("rest", ""),
    ):
        theirs, ours = (sorted((copy / kind).iterdir())[-1] / what for copy in (backup, path))
        kept = tmp_path / "kept"
        shutil.move(ours, kept)
        (shutil.copy if theirs.is_file() else shutil.copytree)(theirs, ours)
        assert restored(buffer, path) in (4, None), (kind, what)
        shutil.rmtree(ours) if ours.is_dir() else ours.unlink()
        shutil.move(kept, ours)
    assert restored(buffer, path) == 8
    newest = sorted((path / "manifests").iterdir())[-1]
    newest.write_bytes(sorted((path / "manifests").iterdir())[0].read_bytes())
    assert restored(buffer, path) == 4


# Damage that several checkpoints share.


@pytest.fixture
def shared(tmp_path):
    """Three checkpoints that share groups, and a file of a group that all of them have."""
    buffer, path = items(capacity=256), tmp_path / "run"
    checkpointer, state = (
        Checkpointer(path, buffer, chunk_bytes=16_000, progress=False),
        buffer.init(EXAMPLE),
    )
    for end in (40, 44, 48):
        state = added(buffer, state, end - (40 if end == 40 else 4), 40 if end == 40 else 4)
        checkpointer.save(state, end)
    folders = [
        {group.folder for group in manifest.groups} for manifest in checkpointer._chain.read()[0]
    ]
    group = sorted(set.intersection(*folders))[0]
    return buffer, path, checkpointer, state, path / "rows" / group / "steps.number" / "c.0"


def test_verify_names_what_is_broken_in_each_generation(shared, capsys):
    buffer, path, checkpointer, _, file = shared
    assert [(found.step, found.problems) for found in checkpointer.verify()] == [
        (48, []),
        (44, []),
        (40, []),
    ]
    main(["inspect", "--verify", str(path)])
    assert capsys.readouterr().out == "step 48: is intact\nstep 44: is intact\nstep 40: is intact\n"
    for broken in files_of(path):
        flipped(broken)
        found = checkpointer.verify()
        own = str(broken.relative_to(path))
        for one in found:
            assert not one.problems or any(own in problem for problem in one.problems), (own, one)
            assert one.step is None or restored(buffer, path, step=one.step) == (
                None if one.problems else one.step
            )
        assert any(one.problems for one in found), own
        flipped(broken)
    flipped(file)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--verify", str(path)])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert said.count("is broken\n  rows/") == 3
    assert said.count("steps.number/c.0 is not as it was written") == 3
    with pytest.raises(SystemExit):
        main(["inspect", "--verify", "--json", "--step", "44", str(path)])
    assert capsys.readouterr().out.count('"step": ') == 1
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.verify(path / "nothing")
    for arguments, said in (
        (["--step", "9"], "there is no checkpoint of step 9"),
        (["--html", "x"], "leave out --html"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", "--verify", str(path), *arguments])
        assert ended.value.code == 2  # not checked is not intact
        assert said in capsys.readouterr().err


def test_saves_find_damage_and_mend_it(shared):
    """Each save checks one group, in turn: within one round damage is found, reported, and its rows
    are written again."""
    buffer, path, checkpointer, state, file = shared
    flipped(file)
    assert restored(buffer, path) is None
    caught, end, num_saves, num_groups = [], 48, 0, len(checkpointer._base.groups)
    assert num_groups >= 5
    while not caught:
        state = added(buffer, state, end, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpointer.save(state, end := end + 1)
        num_saves += 1
        assert num_saves <= num_groups + 1
    assert file.parent.parent.name in str(caught[0].message)
    assert (
        "damaged since it was written; its rows are still in the buffer and are written again"
        in str(caught[0].message)
    )
    assert restored(buffer, path) == end
    newest = checkpointer.verify()[0]
    assert (newest.step, newest.problems) == (end, [])
    state = added(buffer, state, end, 1)
    checkpointer.save(state, end + 1)
    assert restored(buffer, path) == end + 1


def test_saves_read_a_large_group_once_as_much_was_written_and_at_each_fourth(tmp_path):
    buffer, read = items(capacity=4096), []
    checkpointer, state = (
        Checkpointer(tmp_path, buffer, chunk_bytes=32_000, progress=False),
        buffer.init(EXAMPLE),
    )
    state, end = added(buffer, state, 0, 600), 600
    checkpointer.save(state)
    looked, files = verifying.problem_of_group, checkpointer._base.groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "_LITTLE", 0)
        patch.setattr(
            verifying,
            "problem_of_group",
            lambda *given: (read.append(given[-1].folder), looked(*given))[1],
        )
        for count, expected_reads in (
            (1, 0),
            (1, 0),
            (1, 0),
            (1, 1),
            (1, 1),
            (100, 2),
            (100, 3),
            (1, 3),
        ):
            state, end = added(buffer, state, end, count), end + count
            checkpointer.save(state)
            assert len(read) == expected_reads, (count, read)
    # in turn, oldest first, while the groups exist
    assert read == [group.folder for group in files if group.folder in read]
    assert numbers(buffer, Checkpointer(tmp_path, buffer).restore(EXAMPLE)) == expected(buffer, end)


def test_damage_is_found_however_many_groups_are_new(tmp_path):
    """Find damage in a group that was checked before, while each save adds a group."""
    buffer = items(capacity=4096)
    checkpointer, state, end = (
        Checkpointer(tmp_path, buffer, chunk_bytes=16_000, progress=False),
        buffer.init(EXAMPLE),
        0,
    )
    for count in [40] + 30 * [8]:
        state, end = added(buffer, state, end, count), end + count
        checkpointer.save(state, end)
    flipped(
        tmp_path
        / "rows"
        / min(group.folder for group in checkpointer._base.groups)
        / "steps.number"
        / "c.0"
    )
    for _ in range(2 * len(checkpointer._base.groups)):
        state, end = added(buffer, state, end, 8), end + 8
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpointer.save(state, end)
        if caught:
            break
    assert caught
    assert "damaged since it was written" in str(caught[0].message)
    assert restored(buffer, tmp_path) == end


def test_a_save_that_does_not_wait_mends_it_with_the_next(shared):
    buffer, path, checkpointer, state, file = shared
    flipped(file)
    caught, end = [], 48
    for _ in range(30):
        state = added(buffer, state, end, 1)
        with warnings.catch_warnings(record=True) as more:
            warnings.simplefilter("always")
            checkpointer.save(state, end := end + 1, blocking=False)
            checkpointer.wait_until_finished(state)
        caught += more
    assert caught
    assert restored(buffer, path) == end


def test_nothing_is_lost_where_nothing_is_broken(shared):
    buffer, path, _, _, _ = shared
    checkpointer = Checkpointer(path, buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = checkpointer.restore(EXAMPLE, allow_partial=True)
    assert checkpointer.missing_rows == []
    assert numbers(buffer, state) == expected(buffer, 48)


def test_only_what_is_lost_is_left_out(shared):
    buffer, path, before, _, file = shared
    before.close()
    flipped(file)
    checkpointer = Checkpointer(path, buffer)
    with pytest.raises(CorruptCheckpointError, match=r"restore: nothing under .* can be restored"):
        checkpointer.restore(EXAMPLE)
    with pytest.warns(
        UserWarning,
        match=r"of its 192 rows are lost:\n  rows/.*steps.number/c.0 is not as it was "
        r"written",
    ):
        state = checkpointer.restore(EXAMPLE, allow_partial=True)
    assert checkpointer.missing_rows
    gone = {
        (one.env, number)
        for one in checkpointer.missing_rows
        for number in range(one.first, one.last + 1)
    }
    left = [[1_000_000 * env + t for t in range(48) if (env, t) not in gone] for env in range(4)]
    assert numbers(buffer, state) == left
    assert sum(map(len, left)) + len(gone) == 192
    # The state continues, and its next checkpoint is intact.
    more = added(buffer, state, 48, 3)
    checkpointer.save(more, 51)
    assert checkpointer.verify()[0].problems == []
    assert numbers(buffer, Checkpointer(path, buffer).restore(EXAMPLE)) == [
        [*own, *(1_000_000 * env + t for t in (48, 49, 50))] for env, own in enumerate(left)
    ]


def test_when_the_rest_is_broken_an_older_generation_is_salvaged(shared):
    buffer, path, _, _, file = shared
    flipped(file)
    flipped(next((path / "rest").glob(f"*3-*/{COUNTERS_CHUNK}")))
    checkpointer = Checkpointer(path, buffer)
    with pytest.warns(UserWarning, match=r"step 48: rest/(.|\n)*rows are lost"):
        checkpointer.restore(EXAMPLE, allow_partial=True)
    assert checkpointer.step == 44


def test_when_all_rows_are_lost_nothing_is_left_but_the_buffer(shared):
    buffer, path, _, _, _ = shared
    for file in (path / "rows").rglob("c.0*"):
        flipped(file)
    checkpointer = Checkpointer(path, buffer)
    with pytest.warns(UserWarning, match="192 of its 192 rows"):
        state = checkpointer.restore(EXAMPLE, allow_partial=True)
    assert numbers(buffer, state) == [[]] * 4
    assert not bool(buffer.can_sample(state))
    assert numbers(buffer, added(buffer, state, 48, 2)) == [
        [1_000_000 * env + t for t in (48, 49)] for env in range(4)
    ]


# Partial restores of every kind of buffer.


def marked(case, num_steps, num_envs, start=0, seed=1):
    """Return steps whose leaves hold the row's exact name, 1000 * (1 + env) + number.

    0 is no row's name.
    """
    steps = case.step(seed, time=num_steps)
    name = 1000 * (1 + np.arange(num_envs))[None] + start + np.arange(num_steps)[:, None]
    digits = np.stack([name // 256, name % 256], -1)
    image = jnp.asarray(np.concatenate([digits, np.zeros((*name.shape, 4), int)], -1), jnp.uint8)
    if case.is_items:
        return {**steps, "image": image.reshape(*name.shape, 3, 2)}
    named = lambda leaf: jnp.asarray(np.broadcast_to(name[..., None], leaf.shape), leaf.dtype)
    obs = {
        **steps.obs,
        "vector": named(steps.obs["vector"]),
        "image": image[..., :4].reshape(*name.shape, 2, 2),
    }
    final = None if steps.final_obs is None else {**obs, "goal": steps.final_obs["goal"]}
    return steps.replace(obs=obs, final_obs=final, action=jnp.asarray(name, jnp.int32))


def names_in(case, item):
    """Return the names of the rows of an item: all from the smallest to the largest found in it.

    With hindsight, only the names found in it.
    """
    found = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(item):
        name = jax.tree_util.keystr(path)
        if "image" in name:
            frames = np.moveaxis(leaf, -1, 0) if "frame_stack" in case.name else leaf
            digits = frames.astype(int).reshape(-1, 6 if case.is_items else 4)
            found |= set((256 * digits[:, 0] + digits[:, 1]).tolist())
        elif "vector" in name:
            found |= set(leaf.reshape(-1, 5)[:, 0].astype(int).tolist())
        elif "action" in name:
            found |= set(leaf.ravel().tolist())
    found -= {0}
    return set(range(min(found), max(found) + 1)) if "hindsight" not in case.name else found


def all_items(buffer, state):
    """Return the item and the probability of each sampleable row, by its place in the buffer."""
    batch = everything(buffer)(state, 1)
    items, probability = jax.device_get((batch.experience, batch.probability))
    one = lambda place: jax.tree.map(lambda leaf: leaf[place], items)
    return {
        place: (one(place), probability[place]) for place in np.flatnonzero(batch.is_valid).tolist()
    }


salvaged = pytest.mark.parametrize("case", CATALOG if SOAK else KINDS, ids=lambda case: case.name)


@salvaged
@pytest.mark.parametrize("seed", range(8 if SOAK else 1))
def test_what_is_salvaged_is_as_it_was_and_pairs_nothing_across_a_gap(case, seed, tmp_path):
    """Damage random groups and restore in part: items have consecutive rows only, and far from a
    gap they are unchanged."""
    r = random.Random(f"{case.name} {seed}")
    buffer = case.replay(capacity=240)
    extend = jax.jit(buffer.extend)
    checkpointer, state, start = (
        Checkpointer(tmp_path, buffer, chunk_bytes=2048, progress=False),
        buffer.init(case.example()),
        0,
    )
    for part in range(6):
        count = 10 if part == 0 else r.choice([10, 20])
        state = extend(
            state, marked(case, count, 4, start, part + 10 * seed), *case.mask(buffer, part, count)
        )
        start += count
        if isinstance(buffer.sampler, PrioritySampler):
            batch, priority = (
                jitted_draw(buffer)(state, jax.random.key(part)),
                np.abs(np.random.default_rng(part).normal(size=buffer.batch_size)),
            )
            state = jitted(buffer, "update_priorities")(
                state, batch.index, priority.astype(np.float32)
            )
        checkpointer.save(state, part)
    checkpointer.close()
    groups = [group.folder for group in checkpointer._base.groups]
    assert len(groups) >= 3
    for folder in r.sample(groups, r.choice([1, 1, 2])):
        flipped(next((tmp_path / "rows" / folder).rglob("c.0*")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = checkpointer.restore(case.example(), allow_partial=True)
    jax.eval_shape(buffer.add, got, case.step(), *case.mask(buffer, 0))
    check_salvaged(case, buffer, state, got, checkpointer.missing_rows)
    # The state continues, around the ring and over its gaps.
    more = extend(got, marked(case, 25, 4, start, 99), *case.mask(buffer, 7, 25))
    lost = lost_names(case, buffer, state, got)
    for item, _ in all_items(buffer, more).values():
        if "across" not in case.name:
            assert not names_in(case, item) & lost, names_in(case, item) & lost
    for key in range(3):
        batch = jitted_draw(buffer)(more, jax.random.key(key))
        assert bool(np.asarray(batch.is_valid).all()) or isinstance(
            buffer.sampler, ConsumingSampler
        )
    # It can be saved and restored.
    checkpoint.save(tmp_path / "again", buffer, more)
    assert bits(checkpoint.restore(tmp_path / "again", buffer, case.example())) == bits(more)


def stored_names(case, state):
    """Return the row name at each place of the buffer."""
    leaf = stored_arrays.read_plain(state.streams.steps, jnp.arange(state.layout.capacity))
    return (
        np.asarray(leaf["image"]).reshape(-1, 6)[:, :2] @ [256, 1]
        if case.is_items
        else np.asarray(leaf.action)
    ).astype(int)


def held_names(case, buffer, state):
    """Return the row names of each stream, oldest first."""
    span = rows.span_of(rows.heads_of(state), buffer.length)
    by_env = stored_names(case, state).reshape(buffer.num_envs, -1)
    return [
        [int(by_env[e][n % buffer.length]) for n in range(span.first[e], span.end[e])]
        for e in range(buffer.num_envs)
    ]


def lost_names(case, buffer, before, after):
    was, now = (
        set(itertools.chain.from_iterable(held_names(case, buffer, state)))
        for state in (before, after)
    )
    return was - now


def check_salvaged(case, buffer, before, after, lost):
    was, now = held_names(case, buffer, before), held_names(case, buffer, after)
    spans = rows.span_of(rows.heads_of(before), buffer.length)
    for env in range(buffer.num_envs):
        gone = {
            number for one in lost if one.env == env for number in range(one.first, one.last + 1)
        }
        kept = [
            name
            for number, name in zip(range(spans.first[env], spans.end[env]), was[env], strict=True)
            if number not in gone
        ]
        assert now[env] == kept
    if buffer.view.is_random:
        return
    read_before, read_after = ({}, {})
    for state, read in ((before, read_before), (after, read_after)):
        stored = stored_names(case, state).tolist()
        for place, (item, probability) in all_items(buffer, state).items():
            read[stored[place]] = bits(item), names_in(case, item), probability
    gone = lost_names(case, buffer, before, after)
    beside = {(one.env, number) for one in lost for number in range(one.first - 1, one.last + 2)}
    edges = {
        name
        for env, old in enumerate(was)
        for number, name in enumerate(old, spans.first[env])
        if (env, number) in beside
    }
    assert set(read_after) <= set(read_before)
    for name, (content, made_of, _) in read_after.items():
        assert "across" in case.name or not made_of & gone, (name, made_of & gone)
        if not (made_of | read_before[name][1]) & edges:
            assert content == read_before[name][0], name
    for name, (_, made_of, _) in read_before.items():
        if (
            not made_of & edges
            and not isinstance(buffer.sampler, ConsumingSampler)
            and not case.name.startswith("sequences")
        ):
            assert name in read_after, name
    # Ratios of priorities are unchanged.
    both = [name for name in read_after if read_before[name][2] > 0 and read_after[name][2] > 0]
    if isinstance(buffer.sampler, PrioritySampler) and both and "rank" not in case.name:
        ratio = np.array([read_after[name][2] / read_before[name][2] for name in both])
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_left_in_another_capacity_is_saved_under_the_same_path(is_replaced, tmp_path):
    """As long as its checkpoint is there."""
    large, small = items(capacity=512), items(capacity=256)
    before = added(large, large.init(EXAMPLE), 0, 100)
    with Checkpointer(tmp_path, large, chunk_bytes=4000) as checkpointer:
        checkpointer.save(before)
        groups = checkpointer._base.groups
    flipped(next((tmp_path / "rows" / groups[len(groups) // 2].folder).glob("steps.number/c.*")))
    checkpointer = Checkpointer(tmp_path, small)
    with pytest.warns(UserWarning, match="rows are lost"):
        state = checkpointer.restore(EXAMPLE, resize=True, allow_partial=True)
    assert checkpointer.missing_rows
    if is_replaced:
        with Checkpointer(tmp_path, large, max_to_keep=1) as other:
            other.save(before)
        with pytest.raises(ValueError, match="has checkpoints of another buffer"):
            checkpointer.save(state)
    else:
        checkpointer.save(state)
        assert numbers(small, checkpointer.restore(EXAMPLE)) == numbers(small, state)

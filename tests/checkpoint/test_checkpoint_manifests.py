"""Tests of manifests: large ones use little memory, and no checkpoint is deleted for a newer one
that cannot be read."""

import dataclasses
import json
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest

from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

from jaxreplay import checkpoint
from jaxreplay.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    chain,
    folder,
    groups,
    planning,
)
from jaxreplay.checkpoint.manifest import Manifest
from jaxreplay.checkpoint.object_store import Objects

LEAVES = ("candidate_number", "flags", "steps.action", "steps.obs", "steps.reward")
MIB = 2**20


def made_up(num_groups, num_envs, num_saves, length=2**20):
    """Return a manifest of streams of different lengths, with groups of `num_saves` saves."""
    r = np.random.default_rng(0)
    end = np.sort(r.integers(0, length, (num_saves + 1, num_envs)), axis=0)
    saves = [
        groups.Save(f"{at:010}-0123abcd", length, end[at], end[at + 1], False)
        for at in range(num_saves)
    ]
    columns = np.zeros((num_groups, 7), np.int64)
    columns[:, 0] = np.arange(num_groups) * num_saves // num_groups
    columns[:, 1], columns[:, 2] = (
        np.arange(num_groups),
        length - 2 - 2 * (np.arange(num_groups) % 5000),
    )
    columns[:, 3], columns[:, 5] = columns[:, 2] + 2, num_envs
    columns[:, 6] = r.integers(0, 2**32, num_groups)
    sums = r.integers(0, 2**32, (num_groups, len(LEAVES))).astype(np.uint32)
    return Manifest(
        folder="0000000200-0123abcd",
        step=1,
        buffer="ReplayBuffer()",
        library="0",
        length=length,
        first=[0] * num_envs,
        end=end[-1].tolist(),
        rows=dict.fromkeys(LEAVES, "uint8[84, 84]"),
        rest={},
        is_compressed=False,
        chunks={},
        groups=groups.Groups(saves, columns, LEAVES, sums),
        metadata={},
    )


def read(manifest, content):
    return Manifest.from_bytes(manifest.name, content)


def test_a_manifest_of_many_groups_and_streams_that_step_apart_is_small():
    """Store two numbers per stream and save, not per stream and group."""
    manifest = made_up(num_groups=10_000, num_envs=4096, num_saves=100)
    content = manifest.to_bytes()
    assert len(content) < 20 * 10**6
    got = read(manifest, content)
    for at in (0, 99, 9_999):
        group, wanted = got.groups[at], manifest.groups[at]
        assert (group.folder, group.checksums, group.num_rows) == (
            wanted.folder,
            wanted.checksums,
            wanted.num_rows,
        )
        np.testing.assert_array_equal(group.range(), wanted.range())
    first = 100 * np.arange(4096)
    counts = got.groups.num_rows(first)
    for at in range(0, 10_000, 500):
        low, high = got.groups[at].range()
        assert counts[at] == np.maximum(high - np.maximum(low, first), 0).sum()
    assert len(set(counts.tolist())) > 50


def test_what_is_kept_of_a_manifest_of_many_groups_is_small():
    """Keep manifests of 28,000 groups: 200 GB in groups of 8 MiB have as many."""
    manifest = made_up(num_groups=28_000, num_envs=1, num_saves=1000)
    content = manifest.to_bytes()
    tracemalloc.start()
    try:
        kept = [read(manifest, content) for _ in range(3)]
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept[0].groups) == 28_000
    assert now < 12 * MIB
    assert most < 100 * MIB


def test_a_made_up_manifest_of_very_many_groups_costs_little(tmp_path):
    """List groups that have the same rows and no files: a restore and `inspect` fail at once."""
    replay = items(capacity=64)
    with Checkpointer(tmp_path, replay) as checkpointer:
        checkpointer.save(added(replay, replay.init(EXAMPLE), 0, 10), 1)
    file = next((tmp_path / "manifests").iterdir())
    manifest = Manifest.from_bytes(f"manifests/{file.name}", file.read_bytes())
    found = manifest.groups
    many = groups.Groups(
        found.saves,
        np.repeat(found.columns, 100_000, 0),
        found.leaves,
        np.repeat(found.sums, 100_000, 0),
    )
    many.columns[:, 1] = 1 + np.arange(len(many))
    file.write_bytes(dataclasses.replace(manifest, groups=many).to_bytes())
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=r"rows/\S+ has rows of a later group"):
            checkpoint.restore(tmp_path, replay, EXAMPLE)
        with pytest.raises(CorruptCheckpointError, match=r"rows/\S+ is missing"):
            checkpoint.inspect(tmp_path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 128 * MIB


@pytest.mark.parametrize(
    "changes", [{"first": [0]}, {"first": [0] * 5}, {"end": [3] * 4}, {"length": 9}]
)
def test_numbers_that_cannot_be_are_refused(changes, tmp_path):
    """Change the rows of four streams, of which each holds the rows 0 to 9 of at most 16."""
    replay = items(capacity=64)
    with Checkpointer(tmp_path, replay) as checkpointer:
        checkpointer.save(added(replay, replay.init(EXAMPLE), 0, 10), 1)
    file = next((tmp_path / "manifests").iterdir())
    fields = json.loads(file.read_bytes().split(b"\n", 1)[1])
    if "end" in changes:
        changes = changes | {"first": [4] * 4}
    body = json.dumps(fields | changes).encode()
    file.write_bytes(f"{zlib.crc32(body):08x}\n".encode() + body)
    with pytest.raises(CorruptCheckpointError, match="impossible for streams with a length of"):
        checkpoint.restore(tmp_path, replay, EXAMPLE)


@pytest.mark.parametrize("how", ["twice", "beyond the end"])
def test_a_row_is_in_one_group_or_the_manifest_is_refused(how, tmp_path):
    replay = items(capacity=64)
    with Checkpointer(tmp_path, replay, chunk_bytes=2000) as checkpointer:
        checkpointer.save(added(replay, replay.init(EXAMPLE), 0, 14), 1)
    file = next((tmp_path / "manifests").iterdir())
    manifest = Manifest.from_bytes(f"manifests/{file.name}", file.read_bytes())
    found, end = manifest.groups, list(manifest.end)
    assert len(found) > 2
    if how == "twice":  # the number of rows is right: one group replaces another
        places = [*range(len(found) - 2), len(found) - 1, len(found) - 1]
        found = groups.Groups(found.saves, found.columns[places], found.leaves, found.sums[places])
    else:
        end = [number - 1 for number in end]
    file.write_bytes(dataclasses.replace(manifest, groups=found, end=end).to_bytes())
    with pytest.raises(
        CorruptCheckpointError,
        match="has rows of a later group, or rows that the checkpoint does not have",
    ):
        checkpoint.restore(tmp_path, replay, EXAMPLE)


def test_only_the_manifests_that_there_are_stay_in_memory(tmp_path):
    replay = items()
    checkpointer, state = Checkpointer(tmp_path, replay, max_to_keep=2), replay.init(EXAMPLE)
    for number in range(8):
        state = added(replay, state, number, 1)
        checkpointer.save(state, number)
        assert len(checkpointer._chain._known) <= 3


@pytest.mark.parametrize("what", ["too large", "cut short", "unreadable"])
def test_no_generation_is_deleted_for_one_that_cannot_be_read(what, tmp_path, monkeypatch):
    replay = items()
    checkpointer, state = (
        Checkpointer(tmp_path, replay, max_to_keep=1),
        added(replay, replay.init(EXAMPLE), 0, 5),
    )
    checkpointer.save(state, 5)
    with monkeypatch.context() as patch:
        if what == "too large":
            commit = checkpointer._chain.commit

            def limited(manifest):
                patch.setattr(chain, "MOST_BYTES", 100)
                commit(manifest)

            patch.setattr(checkpointer._chain, "commit", limited)
        elif what == "cut short":
            create = folder.Folder.create
            patch.setattr(
                folder.Folder,
                "create",
                lambda self, name, content: create(self, name, content[:-1]),
            )
        else:
            patch.setattr(planning, "__version__", None)
        with pytest.raises(ValueError, match="manifest"):
            checkpointer.save(added(replay, state, 5, 3), 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = checkpointer.restore(EXAMPLE)
    assert [str(one.message).count("is not as it was written") for one in caught] == [1] * (
        what == "cut short"
    )
    assert numbers(replay, back) == expected(replay, 5)
    checkpointer.save(added(replay, back, 5, 4), 9)
    assert checkpointer.all_steps() == [9]
    assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE)) == expected(replay, 9)


def test_a_step_has_64_bits(tmp_path):
    replay = items()
    checkpointer, state = (
        Checkpointer(tmp_path, replay, max_to_keep=1),
        added(replay, replay.init(EXAMPLE), 0, 5),
    )
    checkpointer.save(state, -(2**63))
    checkpointer.save(state, 2**63 - 1)
    for step in (2**63, 2**64, -(2**63) - 1, None):  # None: one more than the last step
        with pytest.raises(ValueError, match="step must be a 64-bit integer"):
            checkpointer.save(state, step)
    assert checkpointer.all_steps() == [2**63 - 1]
    assert numbers(replay, checkpointer.restore(EXAMPLE)) == expected(replay, 5)


def test_metadata_that_is_nested_too_deep_is_refused(tmp_path):
    def nested(depth):
        return {"a": [nested(depth - 2)] if depth > 2 else depth}

    replay = items()
    checkpointer, state = (
        Checkpointer(tmp_path, replay, max_to_keep=1),
        added(replay, replay.init(EXAMPLE), 0, 5),
    )
    checkpointer.save(state, 1, metadata=nested(99))
    for depth in (103, 900, 100_000):
        metadata = nested(depth) if depth < 900 else {"a": json.loads("[" * 900 + "]" * 900)}
        with pytest.raises(
            ValueError, match="save: metadata must be JSON, nested at most 100 deep"
        ):
            checkpointer.save(state, 2, metadata=metadata)
    checkpointer.restore(EXAMPLE)
    assert checkpointer.metadata == nested(99)
    file = next((tmp_path / "manifests").iterdir())
    fields = json.loads(file.read_bytes().split(b"\n", 1)[1])
    body = json.dumps(fields | {"metadata": nested(900)}).encode()
    file.write_bytes(f"{zlib.crc32(body):08x}\n".encode() + body)
    with pytest.raises(CorruptCheckpointError, match="metadata: nested more than 100 deep"):
        checkpoint.restore(tmp_path, replay, EXAMPLE)


def test_all_is_written_anew_before_a_manifest_is_too_large(tmp_path, monkeypatch):
    """Save often: each save whose rows are still held adds two numbers per stream."""
    replay = items(capacity=4096)
    monkeypatch.setattr(planning, "_MOST_NUMBERS", 5 * 4)
    checkpointer, state, counts = (
        Checkpointer(tmp_path, replay, chunk_bytes=8000),
        replay.init(EXAMPLE),
        [],
    )
    for number in range(20):
        state = added(replay, state, 20 * number, 20)
        checkpointer.save(state, number)
        counts.append(len(checkpointer._base.groups.saves))
    assert max(counts) == 6
    assert counts.count(1) >= 3
    assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE)) == expected(replay, 400)


def test_a_far_store_is_listed_once_by_a_run(monkeypatch):
    """List rows once per run: with 200 GB, a listing takes hundreds of requests."""
    listed, entries = [], Objects.entries
    monkeypatch.setattr(
        Objects, "entries", lambda self, name: (listed.append(name), entries(self, name))[1]
    )
    replay = items()
    checkpointer, state = (
        Checkpointer("memory://listed-once", replay, max_to_keep=2),
        replay.init(EXAMPLE),
    )
    for number in range(5):
        state = added(replay, state, 3 * number, 3)
        checkpointer.save(state, number)
    assert listed.count("rows") == 1
    assert numbers(
        replay, Checkpointer("memory://listed-once", replay).restore(EXAMPLE)
    ) == expected(replay, 15)
    names = {
        name
        for one in checkpointer._chain.read()[0]
        for name in (group.folder for group in one.groups)
    }
    assert set(entries(checkpointer._store, "rows")) == names  # other groups are deleted


def test_what_a_failed_save_has_left_is_deleted_by_the_next(tmp_path, monkeypatch):
    replay = items()
    checkpointer, state = (
        Checkpointer(tmp_path, replay, max_to_keep=1),
        added(replay, replay.init(EXAMPLE), 0, 5),
    )
    checkpointer.save(state, 5)
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpointer._chain, "commit", lambda _: (_ for _ in ()).throw(OSError("no room"))
        )
        with pytest.raises(OSError, match="no room"):
            checkpointer.save(added(replay, state, 5, 3), 8)
    checkpointer.save(added(replay, checkpointer.restore(EXAMPLE), 5, 4), 9)
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {
        group.folder for group in checkpointer._base.groups
    }
    assert {path.name for path in (tmp_path / "rest").iterdir()} == {checkpointer._base.folder}

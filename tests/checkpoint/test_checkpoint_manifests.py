"""Tests of manifests: large ones use little memory, and no checkpoint is deleted for a newer one
that cannot be read."""

import contextlib
import json
import tracemalloc
import warnings

import msgspec
import numpy as np
import pytest

from jaxreplay import checkpoint
from jaxreplay.checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    chain,
    folder,
    groups,
    planning,
)
from jaxreplay.checkpoint.manifest import Manifest, Member, StoredLayout
from jaxreplay.checkpoint.object_store import Objects
from tests.checkpoint.runs import (
    BUFFER,
    check,
    check_restored,
    manifests,
    save_run,
    state_of,
)
from tests.conftest import ALL
from tests.support.checkpointed_run import EXAMPLE, added
from tests.support.refusals import check_refused, refused


def made_up(num_groups, num_envs, num_saves, length=2**20):
    """Return a manifest of streams of different lengths, with groups of `num_saves` saves."""
    r = np.random.default_rng(0)
    end = np.sort(r.integers(0, length, (num_saves + 1, num_envs)), axis=0)
    saves = [
        groups.Save(f"{at:010}-0123abcd", length, end[at], end[at + 1], False)
        for at in range(num_saves)
    ]
    columns = np.zeros((num_groups, groups.NUM_COLUMNS), np.int64)
    columns[:, 0] = np.arange(num_groups) * num_saves // num_groups
    columns[:, 1] = np.arange(num_groups)
    columns[:, 2] = length - 2 - 2 * (np.arange(num_groups) % 5000)
    columns[:, 3], columns[:, 5] = columns[:, 2] + 2, num_envs
    columns[:, 6:] = r.integers(0, 2**32, (num_groups, 4))
    member = Member(
        layout=StoredLayout.of(BUFFER.layout()),
        length=length,
        first=np.zeros(num_envs, np.int64),
        end=end[-1],
        rows=dict.fromkeys(("flags", "steps.action", "steps.obs"), "uint8[84, 84]"),
        saves=saves,
        columns=columns,
    )
    return Manifest(
        folder="0000000200-0123abcd",
        step=1,
        library="0",
        writer={},
        buffer="ReplayBuffer()",
        members={"": member},
        rest={},
        is_compressed=False,
        piece_bytes=1,
        files=[],
        text="{}",
    )


@pytest.fixture
def unchecked(monkeypatch):
    """Take manifests whose groups do not have each row once."""
    reshaped = lambda own: own.columns.reshape(-1, groups.NUM_COLUMNS)
    monkeypatch.setattr(Member, "check", lambda own: setattr(own, "columns", reshaped(own)))


def test_a_manifest_of_many_groups_and_streams_that_step_apart_is_small(unchecked):
    """Store two numbers per stream and save, not per stream and group."""
    wanted = made_up(num_groups=10_000, num_envs=4096, num_saves=100)
    content = wanted.to_bytes()
    assert len(content) < 20 * 10**6
    got, made = (
        one.members[""].groups for one in (Manifest.from_bytes(wanted.name, content), wanted)
    )
    for at in (0, 99, 9_999):
        assert (got[at].file, got[at].sums) == (made[at].file, made[at].sums)
        np.testing.assert_array_equal(got[at].range(), made[at].range())


@contextlib.contextmanager
def memory_below(most):
    """Check the largest number of bytes that the block takes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_what_is_kept_of_a_manifest_of_many_groups_is_small(unchecked):
    """Keep manifests of 7,000 groups: 200 GB in groups of 8 MiB have four times as many."""
    made = made_up(7_000, num_envs=1, num_saves=250)
    content = made.to_bytes()
    with memory_below(3600 * 7_000):
        kept = [Manifest.from_bytes(made.name, content) for _ in range(3)]
        assert len(kept[0].members[""].groups) == 7_000
        assert tracemalloc.get_traced_memory()[0] < 440 * 7_000


def test_a_made_up_manifest_of_very_many_groups_costs_little(tmp_path):
    """List groups that have the same rows and no files: a restore and `inspect` fail at once."""
    many = 100_000 if ALL else 20_000
    checkpoint.save(tmp_path, BUFFER, state_of(10), chunk_bytes=2**20)
    (file,) = manifests(tmp_path)
    found = Manifest.from_bytes(f"manifests/{file.name}", file.read_bytes())
    member = found.members[""]
    columns = np.repeat(member.columns, many, 0)
    columns[:, 1] = 1 + np.arange(many)
    found.members[""] = msgspec.structs.replace(member, columns=columns)
    file.write_bytes(found.to_bytes())
    with memory_below(1300 * many):
        check_refused(
            r"rows/\S+ has rows of a later group",
            lambda: checkpoint.restore(tmp_path, BUFFER, EXAMPLE),
            lambda: checkpoint.inspect(tmp_path),
            error=CorruptCheckpointError,
        )


@pytest.mark.parametrize("what", ["too large", "cut short", "unreadable"])
def test_no_checkpoint_is_deleted_for_one_that_cannot_be_read(what, tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, BUFFER, max_to_keep=1)
    save_run(checkpointer, 5)
    with monkeypatch.context() as patch:
        if what == "too large":
            commit = checkpointer._chain.commit

            def limited(*given):
                patch.setattr(chain, "MOST_BYTES", 100)
                commit(*given)

            patch.setattr(checkpointer._chain, "commit", limited)
        elif what == "cut short":
            create = folder.Folder.create
            cut = lambda self, name, content: create(self, name, content[:-1])
            patch.setattr(folder.Folder, "create", cut)
        else:
            patch.setattr(planning, "__version__", None)
        with refused("manifest"):
            save_run(checkpointer, 8)
    with warnings.catch_warnings(record=True, action="always") as caught:
        check(back := checkpointer.restore(EXAMPLE), 5)
    said = "is not as it was written"
    assert [str(one.message).count(said) for one in caught] == [1] * (what == "cut short")
    checkpointer.save(added(BUFFER, back, 5, 4), 9)
    assert checkpointer.all_steps() == [9]
    check_restored(Checkpointer(tmp_path, BUFFER), 9)


def test_a_step_has_64_bits(tmp_path):
    checkpointer, state = Checkpointer(tmp_path, BUFFER, max_to_keep=1), state_of(5)
    for step in (-(2**63), np.int64(24), 2**63 - 1):
        checkpointer.save(state, step)
    for step in (2**63, 2**64, -(2**63) - 1, None):  # None: one more than the last step
        with refused("step must be a 64-bit integer"):
            checkpointer.save(state, step)
    assert checkpointer.all_steps() == [2**63 - 1]
    check_restored(checkpointer, 5)


def test_metadata_that_is_nested_too_deep_is_refused(tmp_path):
    nested = lambda depth: json.loads('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
    checkpointer, state = Checkpointer(tmp_path, BUFFER), state_of(5)
    checkpointer.save(state, 1, metadata=nested(100))
    for depth in (101, 900):
        with refused("metadata must be JSON, nested at most 100 deep"):
            checkpointer.save(state, 2, metadata=nested(depth))
    checkpointer.restore(EXAMPLE)
    assert checkpointer.metadata == nested(100)


def test_all_is_written_anew_before_a_manifest_is_too_large(tmp_path, monkeypatch):
    """Save often: each save whose rows are still held adds two numbers per stream."""
    monkeypatch.setattr(planning, "MOST_NUMBERS", 6 * 4)
    checkpointer, counts = Checkpointer(tmp_path, BUFFER, chunk_bytes=1000), []
    for end in range(1, 21):
        save_run(checkpointer, end)
        counts.append(len(checkpointer._base.members[""].saves))
    assert max(counts) == 6
    assert counts.count(1) >= 3
    check_restored(Checkpointer(tmp_path, BUFFER), 20)


def test_a_far_store_is_listed_once_by_a_run_whose_old_manifests_are_forgotten(monkeypatch):
    """List rows once per run: with 200 GB, a listing takes hundreds of requests."""
    listed, entries = [], Objects.entries
    monkeypatch.setattr(
        Objects, "entries", lambda self, name: (listed.append(name), entries(self, name))[1]
    )
    checkpointer = Checkpointer("memory://listed-once", BUFFER, max_to_keep=2)
    for end in range(3, 18, 3):
        save_run(checkpointer, end)
        assert len(checkpointer._chain._known) <= 3
    assert listed.count("rows") == 1
    check_restored(Checkpointer("memory://listed-once", BUFFER), 15)

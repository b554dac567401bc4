"""Rows in files: what is there after the end of a process, and what is wrong with a folder."""

import contextlib
import errno
import functools
import gc
import json
import os
import pathlib
import random
import shutil
import sqlite3
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from jaxreplay.storage import file_rows
from tests.conftest import ALL, thorough
from tests.support import row_writer
from tests.support.refusals import check_table, refused, warned
from tests.support.row_writer import LENGTH, NUM_ENVS, steps
from tests.support.sampling import assert_same
from tests.support.steps import nth

ROOT = pathlib.Path(__file__).parents[2]


def example():
    return nth(steps([0]), (0, 0))


def opened(folder, buffer=None, continue_streams=True):
    """Return a tiered buffer over a folder, and its state."""
    buffer = buffer or row_writer.buffer()
    tier = jr.tiered(buffer, rows=folder, continue_streams=continue_streams)
    return tier, tier.init(example())


def fed(buffer, state, first, end):
    """Return a state after the steps `first` to `end - 1`, by two programs."""
    while first < end:
        size = 10 if end - first >= 10 else 1
        state = buffer.extend(state, steps(range(first, first + size)))
        first += size
    return state


@functools.partial(jax.jit, static_argnums=0)
def counts_of(index, state):
    return state.lap, state.head, state.filled, index.size(state)


@functools.cache
def of_device(end):
    """Return flags, the size and a batch of a buffer that got the steps before `end`."""
    buffer = jr.jit(row_writer.buffer())
    state = fed(buffer, buffer.init(example()), 0, end)
    batch = buffer.sample(state, jax.random.key(end))
    return jax.device_get((state.rows.flags, buffer.size(state), batch))


def check_rows(tier, state, first, end):
    """Check that a state has exactly the steps `first` to `end - 1`, whole."""
    lap, head, filled, size = map(int, counts_of(tier.index, state))
    assert (lap * LENGTH + head, filled) == (end, end - first)
    rows = np.asarray([env * LENGTH + n % LENGTH for n in range(first, end) for env in range(3)])
    whole = tier.whole(state)
    for name, leaf in {"x": whole.rows.steps.obs["x"], "reward": whole.rows.steps.reward}.items():
        expected = [n * NUM_ENVS + env for n in range(first, end) for env in range(3)]
        assert np.asarray(leaf)[rows].tolist() == expected, name
    image = np.asarray(whole.rows.steps.obs["image"])[rows]
    assert (image == np.asarray(expected)[:, None]).all()
    # the flags, and all that follows from them, are those of a buffer that got the same steps
    if filled == min(end, LENGTH):
        flags, its_size, batch = of_device(end)
        np.testing.assert_array_equal(np.asarray(state.rows.flags)[rows], flags[rows])
        assert size == its_size
        found = tier.sample(state, jax.random.key(end))
        assert_same(found, batch)


def test_what_a_checkpoint_says_is_on_the_disk_before_it(tmp_path, monkeypatch):
    tier, state = opened(tmp_path / "rows")
    state, calls, sync = fed(tier, state, 0, 3), [], os.fdatasync
    path = lambda file: pathlib.Path(os.readlink(f"/proc/self/fd/{file}"))
    monkeypatch.setattr(os, "fdatasync", lambda file: (calls.append(path(file)), sync(file)))
    waiting = tmp_path / "rows" / "journal.sqlite-wal"
    assert waiting.stat().st_size  # of the database
    Checkpointer(tmp_path / "index", tier).save(state)
    files = files_of(tmp_path / "rows")
    assert sorted(calls[: len(files)]) == files
    assert not waiting.stat().st_size


@pytest.mark.xdist_group("killed")
def test_the_rows_of_a_killed_process_are_there(tmp_path):
    rng, last, num_kills = random.Random(0), 0, 50 if ALL else 2
    for _ in range(num_kills):
        command = [sys.executable, "-m", "tests.support.row_writer", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            said = process.stdout.read(8)  # it has begun
            with refused("in use by another process, or by another buffer", BlockingIOError):
                opened(tmp_path)
            time.sleep(rng.random() * 0.3)
            process.kill()
            said += process.stdout.read()
        announced = int.from_bytes(said[-8:], "little")
        tier, state = opened(tmp_path)
        progress = tier._store.progress[:, 0]
        first, end = int(progress[file_rows.FIRST]), int(progress[file_rows.END])
        assert last <= announced <= end <= announced + row_writer.size_of(announced)
        assert first in (max(0, end - LENGTH), max(0, end + row_writer.size_of(end) - LENGTH))
        check_rows(tier, state, first, end)
        tier.close()
        last = end


def pairs(tier, state):
    """Return the steps that transitions are from and to, of those that go on."""
    batch = tier.sample(state, jax.random.key(0), batch_size=256)
    found = jax.device_get(batch.experience)
    goes_on = (found.discount > 0) & batch.is_valid
    codes = found.obs["x"][goes_on] // NUM_ENVS, found.next_obs["x"][goes_on] // NUM_ENVS
    return {*zip(*(code.tolist() for code in codes), strict=True)}


def test_the_streams_of_a_folder_end_when_it_is_opened_again(tmp_path):
    tier, state = opened(tmp_path / "rows")
    state = fed(tier, state, 0, 4)
    for continue_streams, joined in ((True, True), (False, False)):
        shutil.copytree(tmp_path / "rows", tmp_path / f"{joined}")
        other, found = opened(tmp_path / f"{joined}", continue_streams=continue_streams)
        for _ in range(2):  # also where it is closed before the next add
            other.close()
            other, found = opened(tmp_path / f"{joined}", continue_streams=True)
        found = fed(other, found, 15, 18)
        own = {(0, 1), (1, 2), (2, 3), (15, 16), (16, 17)}
        assert pairs(other, found) == own | ({(3, 15)} if joined else set())
        other.close()


def doubled(item):
    """Return twice the values of an item."""
    return jax.tree.map(lambda leaf: leaf * 2, item)


def test_a_call_that_writes_no_row_of_a_page_changes_nothing_else(tmp_path, monkeypatch):
    """Also where the system writes a part of a row at once."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:4000], at))
    options = {"capacity": 8, "batch_size": 2, "allow_mask": True, "allow_write": True}
    tier = jr.tiered(jr.items(**options), rows=tmp_path)
    page = lambda number: {"a": np.full((1, 1500), number, np.int32), "b": np.int32([number])}
    state = tier.init(nth(page(0), 0))
    for number in (1, 2):
        state = tier.add(state, page(number), np.ones(1, bool))
    index = tier.sample(state, jax.random.key(0)).index
    state = tier.add(state, page(3), np.zeros(1, bool))
    state = tier.add(state, page(4), np.ones(1, bool), envs=[1])  # padding
    state = tier.map_rows(state, doubled, block=2)  # of which three blocks are empty
    for number in range(3, 11):
        state = tier.add(state, page(number), np.ones(1, bool))
    state = tier.write(state, index, {"a": np.zeros((2, 1500), np.int32)})  # all are overwritten
    state = tier.add(state, page(11), np.ones(1, bool))
    for name, rows in tier._store._files.arrays.items():
        assert (rows.reshape(8, -1).T == [9, 10, 11, 4, 5, 6, 7, 8]).all(), name


def test_a_folder_of_another_name_is_not_removed(tmp_path):
    tier, state = opened(tmp_path)
    state = fed(tier, state, 0, 3)
    tier.close()
    for name in ("rows-1-copy", "rows-backup", "rows-7"):  # the last one is of a killed process
        shutil.copytree(tmp_path / "rows-1", tmp_path / name)
    check_rows(*opened(tmp_path), 0, 3)
    left = sorted(path.name for path in tmp_path.glob("rows-*"))
    assert left == ["rows-1", "rows-1-copy", "rows-backup"]


def test_a_folder_is_open_once(tmp_path):
    tier, _ = opened(tmp_path)
    with refused("in use by another process, or by another buffer", BlockingIOError):
        opened(tmp_path)
    tier.close()
    opened(tmp_path)  # it is closed when it is collected, too
    opened(tmp_path)


def test_a_fork_neither_keeps_the_folder_locked_nor_changes_it(tmp_path):
    """Also where it closes the rows, or ends as any process does."""
    tier, state = opened(tmp_path)
    state = fed(tier, state, 0, 3)
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, of forks
        child = os.fork()
    if not child:
        os.close(theirs)
        with refused("cannot be changed by a fork", RuntimeError):
            tier._store.end(np.full(3, 9), None)
        tier.close()
        gc.collect()
        os.write(2, os.read(ours, 1))  # until the test ends
        os._exit(0)
    try:
        time.sleep(0.2)
        state = fed(tier, state, 3, 5)
        with refused("in use by another process", BlockingIOError):
            opened(tmp_path)
        tier.close()
        check_rows(*opened(tmp_path), 0, 5)
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)


def test_names_that_no_file_can_have_and_a_path_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer, names = jr.items(capacity=8, batch_size=4), ("a/b", "a b", "é" * 150, "x" * 300)
    item = {name: np.full(1, nth, np.float32) for nth, name in enumerate(names)}
    tier = jr.tiered(buffer, rows="./rows")
    state = tier.add(tier.init({name: np.float32(0) for name in names}), item)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    tier.close()
    state = tier.init({name: np.float32(0) for name in names})
    found = tier.sample(state, jax.random.key(0)).experience
    assert [found[name].tolist() for name in names] == [[nth] * 4 for nth in range(4)]
    (tmp_path / "file").touch()
    with refused("rows need a folder, and this is a file", NotADirectoryError):
        jr.tiered(buffer, rows=tmp_path / "file").init(np.float32(0))


def files_of(folder):
    return sorted(folder.glob("rows-*/*.npy"))


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def told(line, *values):
    """Return a function that tells the database of a folder a line, given its files."""

    def tell(files):
        with contextlib.closing(
            sqlite3.connect(files[0].parents[1] / "journal.sqlite")
        ) as database:
            database.execute(line, values)
            database.commit()

    return tell


def about(**changed):
    """Return as `told`, to change what the rows are."""
    return told("UPDATE journal SET about = json_patch(about, ?)", json.dumps(changed))


def progress(*rows):
    return told("UPDATE journal SET progress = ?", np.array([[row] * 3 for row in rows]).tobytes())


def pipe(name):
    def damage(files):
        path = files[0].parent / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return damage


def swap(files):
    """Give rewards the file of actions, which has the same shape and size in another buffer."""
    tier, _ = opened(files[0].parents[1] / "twin")
    tier.close()
    shutil.copy(files_of(files[0].parents[1] / "twin")[1], files[1])


def overwrite(files):
    (files[0].parents[1] / "journal.sqlite").write_bytes(b"x" * 10_000)


DAMAGE = {
    "is cut or damaged": lambda files: cut(files[1]),
    r"is no array file of int32\[150\]": lambda files: files[1].write_bytes(b"x" * 1000),
    "is missing, so that the rows are damaged": lambda files: files[2].unlink(),
    r"0-rows.obs.image.npy is no array file of int32\[150, 1500\]": lambda files: shutil.copy(
        files[1], files[0]
    ),
    "journal.sqlite has the format 99; this version reads 1": told("PRAGMA user_version = 99"),
    "journal.sqlite is damaged: file is not a database": overwrite,
    "journal.sqlite is damaged: no such table": told("DROP TABLE journal"),
    "journal.sqlite is damaged: Type.*NoneType": told("DELETE FROM journal"),
    "journal.sqlite is damaged: Type": told("UPDATE journal SET about = '[]'"),
    "journal.sqlite is damaged: Rec": told("UPDATE journal SET about = ?", "[" * 100_000),
    "journal.sqlite is damaged: Attr": about(leaves=[1]),
    "journal.sqlite is damaged: .*'list'": about(leaves={"x": []}),
    "journal.sqlite is damaged: .*no dtype": about(leaves={"x": "int32"}),
    "journal.sqlite is damaged: .*hex": about(id="x"),
    "journal.sqlite is damaged: .*no folder": told("UPDATE journal SET files = '../rows-1'"),
    "journal.sqlite is damaged: .*bytes": told("UPDATE journal SET progress = 'x'"),
    "journal.sqlite is no regular file": pipe("../journal.sqlite"),
    "journal.sqlite-wal is no regular file": pipe("../journal.sqlite-wal"),
    "1-rows.obs.x.npy is no regular file": pipe("1-rows.obs.x.npy"),
    "1-rows.obs.x.npy is the file of another folder": swap,
    "journal.sqlite is damaged: Key": told("INSERT INTO waiting VALUES ('rows', 'y', 1, 2)"),
    "journal.sqlite is damaged: Index": told(
        "INSERT INTO waiting VALUES ('rows', 'action', ?, ?)", np.array([150]).tobytes(), bytes(4)
    ),
    # the oldest rows are newer than the newest, and more rows than a ring has
    "it has numbers of rows that cannot be": progress(9, 0, 0),
    "it has numbers of rows .*be": progress(0, LENGTH + 1, 0),
    "it has numbers of rows that .*be": progress(0, 9, 256),
    "it has numbers of rows that can.*be": progress(0, 9, -1),
}


def test_a_folder_that_is_renamed_or_deleted_while_it_is_open(tmp_path):
    tier, state = opened(tmp_path / "rows")
    state = fed(tier, state, 0, 10)
    saver = Checkpointer(tmp_path / "index", tier)
    saver.save(state)
    (tmp_path / "rows").rename(tmp_path / "renamed")
    state = fed(tier, saver.restore(example()), 10, 12)
    saver.save(state)
    tier.close()
    tier, state = opened(tmp_path / "renamed")
    saver = Checkpointer(tmp_path / "index", tier)
    check_rows(tier, saver.restore(example()), 0, 12)
    image = np.load(files_of(tmp_path / "renamed")[0], mmap_mode="r")
    assert image[:12, 0].tolist() == [number * NUM_ENVS for number in range(12)]
    shutil.rmtree(tmp_path / "renamed")
    with refused("the folder was deleted while its rows were in use.*renamed", FileNotFoundError):
        saver.restore(example())


@pytest.mark.parametrize("said", DAMAGE)
def test_a_damaged_folder_is_refused_and_unlocked(said, tmp_path):
    tier, _ = opened(tmp_path)
    tier.close()
    DAMAGE[said](files_of(tmp_path))
    for _ in range(2):
        with refused(said):
            opened(tmp_path)


def test_a_folder_of_another_buffer_is_refused(tmp_path):
    tier, state = opened(tmp_path)
    fed(tier, state, 0, 20)
    tier.close()
    shared = {"num_envs": NUM_ENVS, "batch_size": 4}

    def init(capacity=150, **options):
        own = {**shared, "autoreset": "next_step", **options}
        jr.tiered(jr.uniform(capacity=capacity, **own), rows=tmp_path).init(example())

    table = {
        "init(300)": "length: the folder has 50, this buffer 100",
        "init(num_envs=5)": "num_envs: the folder has 3, this buffer 5",
        "init(autoreset='same_step_no_final_obs')": """
            autoreset: the folder has 'next_step', this buffer 'same_step_no_final_obs'""",
    }
    check_table(table, {"init": init})
    tier = jr.tiered(row_writer.buffer(), rows=tmp_path)
    wrong = example().replace(action=np.float64(0))
    with refused(r"action: the folder has int32\[\], this buffer float32\[\]"):
        tier.init(wrong)
    # another view and another sampler go on with the rows
    other = jr.sequences(capacity=150, **shared, autoreset="next_step", length=3)
    tier, state = opened(tmp_path, other)
    assert counts_of(tier.index, state)[-1] == jr.jit(other).size(tier.whole(state)) > 20


def test_masked_rows_need_a_buffer_with_a_mask(tmp_path):
    shared = {"capacity": 150, "num_envs": 3, "batch_size": 4, "autoreset": "next_step"}
    tier, state = opened(tmp_path, jr.uniform(**shared, allow_mask=True))
    state = tier.extend(state, steps(range(2)), np.array([[1, 1, 1], [1, 0, 1]], bool))
    tier.close()
    with refused("have different numbers of rows, so that the buffer needs allow_mask=True"):
        opened(tmp_path, jr.uniform(**shared))
    opened(tmp_path, jr.uniform(**shared, allow_mask=True))


def test_a_full_disk_is_an_error_of_init(tmp_path, monkeypatch):
    space = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: space._replace(free=1000))
    with refused(r"the rows take 9\d\d,\d\d\d bytes, but the disk has 1,000 free", OSError):
        opened(tmp_path)
    monkeypatch.undo()
    reserve, fails = os.posix_fallocate, iter([False, False, True])
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *given: full() if next(fails, False) else reserve(*given)
    )
    with refused("No space left", OSError):
        opened(tmp_path)
    assert not [*tmp_path.glob("rows*")]
    tier, state = opened(tmp_path)
    check_rows(tier, fed(tier, state, 0, 3), 0, 3)
    # every byte is there before the first row is
    for path in files_of(tmp_path):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_checkpoint_of_the_index_has_the_rows_that_were_not_overwritten_since(tmp_path):
    tier, state = opened(tmp_path / "rows")
    state = fed(tier, state, 0, 60)
    batch = tier.sample(state, jax.random.key(0))
    update = jax.jit(tier.update_priorities)
    state = update(state, batch.index, np.full(8, 0.25, np.float32))
    saver = Checkpointer(tmp_path / "index", tier)
    saver.save(state, step=1)
    size = sum(path.stat().st_size for path in (tmp_path / "index").rglob("*.*"))
    assert size < 30_000 < tier._store.whole("obs.image").nbytes
    wanted = jax.tree.map(np.array, tier.whole(state))
    # nothing was overwritten: the state is the same, with its priorities
    found = saver.restore(example())
    assert_same(jax.device_get(tier.whole(found)), wanted)
    # after 25 more steps of an agent that is killed, 25 rows of each env are left
    state = fed(tier, found, 60, 85)
    tier.close()
    tier, state = opened(tmp_path / "rows")
    check_rows(tier, state, 35, 85)
    saver = Checkpointer(tmp_path / "index", tier)
    state = saver.restore(example())
    check_rows(tier, state, 35, 60)
    kept = np.asarray(batch.index.row)
    kept = kept[(kept % LENGTH >= 35) | (kept % LENGTH < 10)]  # the steps from 35 on
    assert len(kept)
    again = tier.sample(state, jax.random.key(1), batch_size=512)
    is_low = np.isin(np.asarray(again.index.row), kept)
    low, others = (np.asarray(again.probability)[where] for where in (is_low, ~is_low))
    assert others.min() / low.max() == pytest.approx((1 / 0.25) ** 0.6, rel=1e-5)
    # what follows takes the place of the rows after the save
    state = fed(tier, state, 60, 70)
    check_rows(tier, state, 35, 70)
    tier.close()
    tier, state = opened(tmp_path / "rows")
    check_rows(tier, state, 35, 70)


def test_a_checkpoint_whose_rows_were_replaced_is_refused(tmp_path):
    tier, state = opened(tmp_path / "rows")
    saver = Checkpointer(tmp_path / "index", tier, max_to_keep=9)
    for step, (first, end) in enumerate(((0, 20), (20, 40), (40, 45))):
        state = fed(tier, state, first, end)
        saver.save(state, step=step)
    check_rows(tier, saver.restore(example(), step=1), 0, 40)
    check_rows(tier, saver.restore(example(), step=0), 0, 20)
    for step in (1, 2):
        with refused("they were replaced after an earlier checkpoint was restored"):
            saver.restore(example(), step=step)
    state = fed(tier, saver.restore(example(), step=0), 20, 30)
    saver.save(state, step=9)
    check_rows(tier, saver.restore(example(), step=9), 0, 30)
    check_rows(tier, saver.restore(example(), step=0), 0, 20)
    tier.close()
    other, _ = opened(tmp_path / "other")
    with refused("the rows of this checkpoint are not in .*other"):
        Checkpointer(tmp_path / "index", other).restore(example())
    for buffer in (row_writer.buffer(), jr.tiered(row_writer.buffer())):
        with refused("its rows are in files|rows of this checkpoint are in files"):
            Checkpointer(tmp_path / "index", buffer).restore(example())


def test_an_index_of_rows_that_a_copy_of_the_folder_has_not_is_refused(tmp_path):
    tier, state = opened(tmp_path / "rows")
    state = fed(tier, state, 0, 10)
    saver = Checkpointer(tmp_path / "early", tier)
    saver.save(state)
    tier.flush()
    for name in ("older", "other"):
        shutil.copytree(tmp_path / "rows", tmp_path / name)
    state = fed(tier, state, 10, 20)
    Checkpointer(tmp_path / "index", tier).save(state)
    tier.close()
    for name in ("older", "other"):
        tier, state = opened(tmp_path / name)
        if name == "other":  # it goes on otherwise
            state = fed(tier, state, 0, 20)
        with refused(f"the rows of this checkpoint are not in .*{name}: .* older copy"):
            Checkpointer(tmp_path / "index", tier).restore(example())
        check_rows(tier, Checkpointer(tmp_path / "early", tier).restore(example()), 0, 10)
        tier.close()
    tier, state = opened(tmp_path / "rows")
    check_rows(tier, Checkpointer(tmp_path / "index", tier).restore(example()), 0, 20)


ITEM = {"x": np.float32(0), "y": np.float32(0)}


def of_items(folder):
    """Return a tiered buffer with four rows of ones that can be written again, and its state."""
    tier = jr.tiered(jr.items(capacity=8, batch_size=2, allow_write=True), rows=folder)
    return tier, tier.extend(tier.init(ITEM), dict.fromkeys(ITEM, np.ones((4, 1), np.float32)))


def written(tier, state):
    """Return the state after a write of some rows."""
    index = tier.sample(state, jax.random.key(0)).index
    return tier.write(state, index, dict.fromkeys(ITEM, np.float32([2, 2])))


def test_an_index_of_rows_that_were_rewritten_is_refused(tmp_path):
    (tier, state), index = of_items(tmp_path / "rows"), tmp_path / "index"
    Checkpointer(index, tier).save(state)
    tier.close()
    state = Checkpointer(index, tier).restore(ITEM)  # in the next process
    for change in (
        lambda state: tier.map_rows(state, doubled, block=8),
        lambda state: written(tier, state),
    ):
        state = change(state)
        for _ in range(2):
            with refused("changed by write or map_rows. A checkpoint that .*: save with copy=True"):
                Checkpointer(index, tier).restore(ITEM)
            tier.close()
            state = tier.init(ITEM)
        Checkpointer(index, tier, overwrite=True).save(state)
        state = Checkpointer(index, tier).restore(ITEM)


def test_the_folder_keeps_few_earlier_tokens(tmp_path):
    tier, state = opened(tmp_path)
    fed(tier, state, 0, 3)
    store, end = tier._store, np.full(NUM_ENVS, 3)
    tokens = []
    for _ in range(file_rows._MOST_TOKENS + 10):
        tokens.append(store.token)
        store.end(end, None, until=end)
    assert [store.since(token, end) is None for token in tokens] == [True] * 11 + [False] * 99


def test_a_full_disk_changes_nothing_and_can_be_read(tmp_path, monkeypatch):
    tier, state = opened(tmp_path / "rows")
    state = fed(tier, state, 0, 10)
    saver = Checkpointer(tmp_path / "index", tier)
    saver.save(state)
    database = tier._store._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    numbers = np.arange(3000)
    with refused("the journal of the rows: database or disk is full", OSError):
        tier._store.rewrite({"reward": np.zeros(3000, np.float32)}, numbers)
    database.execute("PRAGMA max_page_count = 1000000")
    with pytest.MonkeyPatch.context() as patch, refused("No space left", OSError):
        patch.setattr(file_rows.FileRows, "_take_token", full)
        saver.restore(example())
    state = fed(tier, state, 10, 12)
    saver.save(state)
    tier.close()
    tier, state = opened(tmp_path / "rows")
    check_rows(tier, Checkpointer(tmp_path / "index", tier).restore(example()), 0, 12)
    tier.close()
    monkeypatch.setattr(file_rows.FileRows, "_take_token", full)
    check_rows(*opened(tmp_path / "rows"), 0, 12)


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_index_and_a_copy_are_saved_to_one_path(tmp_path):
    """Also by another `Checkpointer` that goes on; each is restored as what it is."""
    tier, state = opened(tmp_path / "rows")
    make = lambda tier: Checkpointer(tmp_path / "saved", tier, max_to_keep=9)
    saver = make(tier)
    for number, has_copy in enumerate((False, True, False, True, True, False)):
        if number == 3:
            saver = make(tier)
            state = saver.restore(example())
        state = fed(tier, state, 3 * number, 3 * number + 3)
        saver.save(state, copy=has_copy)
    other = jr.tiered(row_writer.buffer(), rows=tmp_path / "other")
    for place, numbers in ((other, (1, 3, 4)), (tier, (5, 2, 0))):
        for number in numbers:
            found = make(place).restore(example(), number)
            check_rows(place, found, 0, 3 * number + 3)
    items = jr.items(capacity=150, num_envs=3, batch_size=8), {"x": 0.0}
    for buffer, one in (items, (row_writer.buffer(), example())):
        with refused("has checkpoints of another buffer, or of steps with other leaves"):
            Checkpointer(tmp_path / "saved", buffer, overwrite=True).save(buffer.init(one))


def test_a_part_of_a_damaged_copy_is_restored_and_a_sharding_is_refused(tmp_path):
    buffer = row_writer.buffer()
    plain = jr.jit(buffer)
    saver = Checkpointer(tmp_path / "copy", buffer, compression_level=None, chunk_bytes=200_000)
    state = fed(plain, plain.init(example()), 0, 10)
    saver.save(state, step=0)
    old = {*(tmp_path / "copy" / "rows").iterdir()}
    saver.save(fed(plain, state, 10, 40), step=0)
    file = min(old & {*(tmp_path / "copy" / "rows").iterdir()})
    file.write_bytes(file.read_bytes()[:-1])
    tier = jr.tiered(buffer, rows=tmp_path / "rows")
    saver = Checkpointer(tmp_path / "copy", tier)
    with warned("rows are lost"):
        state = saver.restore(example(), allow_partial=True)
    first = max(one.last for one in saver.missing_rows) + 1
    assert 0 < first < 40
    check_rows(tier, state, first, 40)
    with refused("restore: the index of a tiered buffer lies on the default device"):
        saver.restore(example(), sharding=jax.tree.leaves(state)[0].sharding)


def test_a_copy_is_restored_anywhere_and_a_damaged_one_replaces_nothing(tmp_path):
    tier, state = opened(tmp_path / "rows")
    state = fed(tier, state, 0, 60)
    saver = Checkpointer(tmp_path / "copy", tier)
    saver.save(state, step=1, copy=True)
    whole = jax.device_get(tier.whole(state))
    plain = Checkpointer(tmp_path / "copy", row_writer.buffer()).restore(example())
    for place in (tmp_path / "other", "host"):
        other = jr.tiered(row_writer.buffer(), rows=place)
        found = Checkpointer(tmp_path / "copy", other).restore(example())
        for one in (other.whole(found), plain):
            assert_same(jax.device_get(one), whole)
        other.close()
    tier.close()
    other, found = opened(tmp_path / "other")
    check_rows(other, found, 10, 60)
    found = fed(other, found, 60, 61)
    file = next((tmp_path / "copy" / "rows").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with refused("is not as it was written", CorruptCheckpointError):
        Checkpointer(tmp_path / "copy", other).restore(example())
    check_rows(other, found, 11, 61)


def add(replay, numbers):
    for number in numbers:
        replay.add(nth(steps([number]), 0))


BEFORE = {
    "end_streams": (lambda replay: replay.end_streams(), {(0, 1), (1, 2), (2, 3)}),
    "drop": (lambda replay: replay.drop(np.ones(3, bool)), set()),
    "clear": (lambda replay: replay.clear(), set()),
    "nothing": (len, {(0, 1), (1, 2), (2, 3), (3, 15)}),
}


@pytest.mark.parametrize(
    "call",
    ["end_streams", "drop", thorough("clear"), thorough("nothing")],
)
def test_a_call_before_the_first_add_changes_the_rows_of_the_folder(call, tmp_path):
    """Where the shapes of a step are not known yet."""
    made = functools.partial(
        jr.Replay, row_writer.buffer(), rows=tmp_path, continue_streams=True, framework="numpy"
    )
    function, left = BEFORE[call]
    with made() as replay:
        function(replay)  # there are no rows
        add(replay, range(4))
    with made() as replay:
        function(replay)
        add(replay, range(15, 18))
        found = pairs(replay._owner.place.tier, replay._owner.state)
    assert found == left | {(15, 16), (16, 17)}


def test_a_replay_goes_on_with_the_rows_of_its_folder(tmp_path):
    made = functools.partial(jr.Replay, row_writer.buffer(), rows=tmp_path / "rows")
    with made() as replay:
        add(replay, range(30))
        replay.save(tmp_path / "index", extras={"step": 30})
        add(replay, range(30, 40))
        size = len(replay)
    with refused("its rows are in their folder", RuntimeError):
        replay.save(tmp_path / "late")
    with made(example=example()) as replay:
        assert len(replay) == size
        assert replay.load(tmp_path / "index", extras={"step": 0}) == {"step": 30}
        check_rows(replay._owner.place.tier, replay._owner.state, 0, 30)
    with made(continue_streams=True) as replay:  # the shapes are those of the first step
        add(replay, range(30, 31))
        check_rows(replay._owner.place.tier, replay._owner.state, 0, 31)


def test_flags_of_agents_are_the_devices_after_blocks_as_long_as_the_ring(tmp_path):
    """Such a block leaves no earlier row, but who has ended before it is known."""
    buffer = jr.uniform(capacity=8, batch_size=4, autoreset="next_step", num_agents=2)
    values, both = np.zeros(2, np.float32), np.zeros(2, bool)
    example = jr.Step(np.float32(0), values, values, terminated=both, truncated=both)
    tier = jr.tiered(buffer, rows=tmp_path / "rows")
    state, rng = tier.init(example), np.random.default_rng(2)
    for length in (2, 8, 2, 9, 2, 8, 2, 9, 8, 8):
        block = jax.tree.map(lambda x, n=length: np.zeros((n, 1, *np.shape(x)), x.dtype), example)
        block = block.replace(terminated=rng.random((length, 1, 2)) < 0.25)
        state = tier.extend(state, block)
        kept = tier._store.journal
        np.testing.assert_array_equal(kept["agents"], state.rows.steps.terminated)
        np.testing.assert_array_equal(kept["flags"], state.rows.flags)
    tier.close()

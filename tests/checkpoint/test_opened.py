"""Rows of a checkpoint that are sampled where they lie: batches are those of a replay that loaded
them."""

import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from jaxreplay.checkpoint.contents import at_checkpoint
from jaxreplay.checkpoint.fits import check_fits
from jaxreplay.checkpoint.folder import Folder
from jaxreplay.checkpoint.reader import Reader
from tests.buffers.test_tiered import check_equal
from tests.conftest import ALL
from tests.support.buffers import CATALOG, each
from tests.support.steps import plain_step

CASES = [case for case in CATALOG if ALL or case.name == "prioritized final_obs, masked"]


@pytest.mark.parametrize("level", [None, 1], ids=["mapped", "compressed"])
@each(CASES)
def test_batches_are_those_of_a_replay_that_loaded_the_rows(case, level, tmp_path):
    """Over several saves and wraps, with the priorities that were saved, and without an example. A
    cache of one file is slow, and changes nothing."""
    buffer = case.replay()
    program = jr.jit(buffer)
    state = program.init(case.example())
    options = {"chunk_bytes": 300 if level else 5000, "compression_level": level, "progress": False}
    checkpointer = Checkpointer(tmp_path, buffer, **options)
    for turn in range(12):  # then the oldest group of 5,000 bytes has lost some of its rows
        state = program.extend(state, case.step(turn, time=3), *case.mask(buffer, turn, 3))
        if turn > 8 or turn % 3 == 0:
            checkpointer.save(state, turn)
    loaded = jr.Replay(buffer, seed=3, framework="numpy")
    loaded.load(tmp_path)
    with jr.open(tmp_path, buffer, seed=3, framework="numpy", cache_bytes=1) as opened:
        opened._owner.draws.num = loaded._owner.draws.num
        assert len(opened) == len(loaded) > 0
        for turn in range(3):
            batches = opened.sample(), loaded.sample()
            check_equal(*batches)
            check_equal(opened.get(batches[0].index), loaded.get(batches[1].index))
            if "priorit" in case.name:
                priority = np.linspace(1, 2 + turn, buffer.batch_size, dtype=np.float32)
                for replay, batch in zip((opened, loaded), batches, strict=True):
                    replay.update_priorities(batch.index, priority)


def steps_of(num_steps, scale=1):
    """Return steps of two envs of two agents each, whose observations are a dict and bfloat16. An
    episode ends after time 9."""
    number = scale * np.arange(num_steps * 2, dtype=np.float32).reshape(num_steps, 2)
    obs = {"x": number, "deep": {"y": number.astype(ml_dtypes.bfloat16)}}
    per_agent = lambda values: np.stack([values] * 2, axis=-1)
    is_end = per_agent(np.repeat(np.arange(num_steps)[:, None] == 9, 2, axis=1))
    flags = {"terminated": is_end, "truncated": is_end & False}
    return jr.Step(obs, number, per_agent(number), **flags, extras={"z": number})


def made(path, level=None, member=None, scale=1, **more):
    """Save such steps, and return their buffer."""
    options = {"capacity": 64, "num_envs": 2, "batch_size": 16, "num_agents": 2}
    buffer = jr.uniform(**options, autoreset="next_step", gamma=0.5)
    steps = steps_of(40, scale)
    example = jax.tree.map(lambda leaf: leaf[0, 0], steps)
    state = jr.jit(buffer).extend(jr.jit(buffer).init(example), steps)
    saved, whole = (state, buffer)
    if member:
        saved, whole = {member: state}, jr.mix(**{member: (buffer, 16)})
    options = {"compression_level": level, "max_to_keep": 1, "overwrite": True, "progress": False}
    options |= more
    Checkpointer(path, whole, **options).save(saved, 7)
    return buffer


def test_the_example_is_that_of_the_checkpoint_and_the_view_may_be_another(tmp_path):
    made(tmp_path / "a", member="demos")
    view = jr.prioritized(
        capacity=8,
        batch_size=32,
        autoreset="same_step",
        n_step=3,
        gamma=1.0,
        num_agents=2,
        alpha=0.5,
    )
    with jr.open(tmp_path / "a", view, member="demos", framework="numpy", seed=0) as replay:
        assert replay.buffer.num_envs == 2
        batch = replay.sample()
    found, x = batch.experience, batch.experience.obs["x"]
    assert batch.is_valid.all()
    np.testing.assert_array_equal(x, found.extras["z"])
    assert found.obs["deep"]["y"].dtype == ml_dtypes.bfloat16
    ends = np.isin(x // 2, (8, 9))  # the ring begins at time 8, and time 10 has the final rows
    assert not (x // 2 == 10).any()
    assert 0 < ends.sum() < len(ends)
    np.testing.assert_array_equal(found.discount == 0, np.stack([ends, ends], axis=1))
    np.testing.assert_array_equal(found.next_obs["x"][~ends], x[~ends] + 6)
    np.testing.assert_array_equal(found.reward[~ends, 1], 3 * x[~ends] + 6)
    with pytest.raises(
        ValueError, match=r"open: .*checkpoint of a Mixture: pass member= one of demos"
    ):
        jr.open(tmp_path / "a", view)


def test_few_files_that_are_not_mapped_are_kept(tmp_path, monkeypatch):
    buffer, read, names = made(tmp_path, level=1, chunk_bytes=2000), Folder.read, []
    noted = lambda self, name, *given: (names.append(name), read(self, name, *given))[1]
    monkeypatch.setattr(Folder, "read", noted)
    for cache_bytes, is_kept in ((1, False), (2**20, True)):
        with jr.open(tmp_path, buffer, framework="numpy", cache_bytes=cache_bytes) as replay:
            names.clear()
            for row in 4 * [0, 20]:  # of two files
                assert replay.get(np.int32([row])).is_valid.all()
            assert len(names) == (len({*names}) if is_kept else 8), names


def test_what_would_change_rows_is_refused(tmp_path):
    buffer = made(tmp_path)
    with jr.open(tmp_path, buffer, framework="numpy") as replay:
        index = replay.sample().index
        step = jax.tree.map(lambda leaf: leaf[0], steps_of(1))
        for call in (
            lambda: replay.add(step),
            lambda: replay.write(index, {"reward": np.zeros((16, 2), np.float32)}),
            replay.clear,
            lambda: replay.merge(buffer.init(jax.tree.map(lambda leaf: leaf[0], step))),
            lambda: replay.save(tmp_path / "other"),
        ):
            with pytest.raises(ValueError, match=r"the rows of .* are opened to be read"):
                call()
        assert replay.sample().is_valid.all()
    items = jr.items(capacity=64, batch_size=4)
    with pytest.raises(ValueError, match="open: takes a ReplayBuffer"):
        jr.open(tmp_path, jr.mix(a=(items, 4)))
    with pytest.raises(ValueError, match=r"open: the buffer is one of items, but .* has steps"):
        jr.open(tmp_path, items)
    other = jax.tree.map(lambda leaf: leaf[0], step).replace(obs=np.float32(0))
    with pytest.raises(ValueError, match="obs"):
        jr.open(tmp_path, buffer, example=other)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
        jr.open(tmp_path, buffer, step=3)


@pytest.mark.parametrize("level", [None, 1])
def test_damage_is_told(level, tmp_path):
    """A file that is cut, gone, that of another run, or has another byte."""
    buffer = made(tmp_path, level)
    (file,) = (tmp_path / "rows").iterdir()
    whole = file.read_bytes()
    made(tmp_path / "other", level, scale=2)
    (other,) = (tmp_path / "other" / "rows").iterdir()
    byte = bytes([whole[-1] ^ 1])
    for content in (whole[:-1], b"", other.read_bytes(), whole[:-1] + byte):
        file.write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=file.name):
            jr.open(tmp_path, buffer)
    file.unlink()
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match=file.name):
            jr.open(tmp_path, buffer)
        if not file.exists():
            os.mkfifo(file)  # nor is a pipe waited for
    file = min((tmp_path / "manifests").iterdir())
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CorruptCheckpointError, match=f"{file.name} is no regular file"):
        jr.open(tmp_path, buffer)


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_looked_for_again(
    tmp_path, monkeypatch
):
    buffer, calls = made(tmp_path), []

    def replaced(*given):
        calls.append(given)
        if len(calls) == 1:  # all of its rows are overwritten
            made(tmp_path, scale=2)
        check_fits(*given)

    monkeypatch.setattr("jaxreplay.checkpoint.opened.check_fits", replaced)
    with jr.open(tmp_path, buffer, framework="numpy", seed=0) as replay:
        assert (replay.sample().experience.obs["x"] % 2 == 0).all()
    assert len(calls) == 2


def test_an_index_of_rows_in_files_has_no_rows_to_open(tmp_path):
    buffer = jr.uniform(capacity=64, num_envs=2, batch_size=16, autoreset="next_step")
    step = plain_step(np.zeros(2, np.float32))
    with jr.Replay(buffer, rows=tmp_path / "rows") as replay:
        replay.add(step)
        replay.save(tmp_path / "index")
    with pytest.raises(ValueError, match="index of rows in files; open their folder"):
        jr.open(tmp_path / "index", buffer)


def test_rows_are_not_loaded(tmp_path):
    """Of 49 MB of rows, those that are sampled. The first time, programs are compiled."""

    def anonymous():  # bytes that no file has
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    buffer, item = jr.items(capacity=12_000, batch_size=8), np.zeros((64, 64), np.uint8)
    state = jr.jit(buffer).init(item)
    state = jr.jit(buffer).extend(state, np.full((12_000, 1, 64, 64), 7, np.uint8))
    Checkpointer(tmp_path, buffer, compression_level=None, progress=False).save(state, 1)
    for _ in range(2):
        before = anonymous()
        with jr.open(tmp_path, buffer, framework="numpy") as replay:
            for _ in range(5):
                assert replay.sample().experience.shape == (8, 64, 64)
            taken = anonymous() - before
    assert taken < 20e6


def test_rows_that_a_checkpoint_lacks_are_zeros_and_no_file_is_read(tmp_path):
    buffer = jr.items(capacity=8, num_envs=2, batch_size=2)
    program = jr.jit(buffer)
    state = program.extend(program.init({"x": np.float32(0)}), {"x": np.ones((3, 2), np.float32)})
    Checkpointer(tmp_path, buffer, progress=False).save(state, 0)

    def take(store, manifest):
        (member,) = manifest.members.values()
        reader = Reader(store, member)
        rows = reader.order_of(np.arange(8).reshape(2, 4))
        found = reader.take({"steps.x": rows})["steps.x"]
        assert found.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
        reader.groups = []  # a read of a file fails
        assert reader.take({"steps.x": rows[:, 3]})["steps.x"].tolist() == [0, 0]

    at_checkpoint("take", take, tmp_path, None, "")

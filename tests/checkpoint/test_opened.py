"""Rows of a checkpoint that are sampled where they lie: batches are those of a replay that loaded
them."""

import os

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError
from jaxreplay.checkpoint.fits import check_fits
from jaxreplay.checkpoint.folder import Folder
from tests.buffers.test_tiered import FEW, check_equal
from tests.conftest import ALL
from tests.support.buffers import CATALOG
from tests.support.replays import make, output_of, step
from tests.support.steps import plain_step

CASES = [case for case in CATALOG if ALL or case.name in FEW[:2]]


@pytest.mark.parametrize("level", [None, 1], ids=["mapped", "compressed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_are_those_of_a_replay_that_loaded_the_rows(case, level, tmp_path):
    """Over several saves and wraps, with the priorities that were saved. A cache of one file is
    slow, and changes nothing."""
    buffer = case.replay()
    program = jr.jit(buffer)
    state = program.init(case.example())
    options = {"chunk_bytes": 300 if level else 5000, "compression_level": level, "progress": False}
    checkpointer = Checkpointer(tmp_path, buffer, **options)
    for turn in range(12):  # then the oldest group of 5,000 bytes has lost some of its rows
        state = program.extend(state, case.step(turn, time=3), *case.mask(buffer, turn, 3))
        checkpointer.save(state, turn)
    loaded = jr.Replay(buffer, example=case.example(), seed=3, framework="numpy")
    loaded.load(tmp_path)
    example = case.example()
    with jr.open(
        tmp_path, buffer, example=example, seed=3, framework="numpy", cache_bytes=1
    ) as opened:
        opened._owner.draws.num = loaded._owner.draws.num
        assert len(opened) == len(loaded) > 0
        for turn in range(4):
            batches = opened.sample(), loaded.sample()
            check_equal(*batches)
            check_equal(opened.get(batches[0].index), loaded.get(batches[1].index))
            if "priorit" in case.name:
                priority = np.linspace(1, 2 + turn, buffer.batch_size, dtype=np.float32)
                for replay, batch in zip((opened, loaded), batches, strict=True):
                    replay.update_priorities(batch.index, priority)


def made(path, level=None, num_steps=40, member=None, scale=1, **more):
    """Save steps of two envs whose observations are a dict and bfloat16, and return the buffer."""
    buffer = jr.uniform(capacity=64, num_envs=2, batch_size=16, autoreset="next_step", gamma=0.5)
    number = scale * np.arange(num_steps * 2, dtype=np.float32).reshape(num_steps, 2)
    obs = {"x": number, "deep": {"y": number.astype(ml_dtypes.bfloat16)}}
    steps = plain_step(number).replace(obs=obs, extras={"z": number})
    example = jax.tree.map(lambda leaf: leaf[0, 0], steps)
    state = jr.jit(buffer).extend(buffer.init(example), steps)
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
        capacity=8, batch_size=32, n_step=3, gamma=1.0, autoreset="same_step", alpha=0.5
    )
    with jr.open(tmp_path / "a", view, member="demos", framework="numpy", seed=0) as replay:
        assert replay.buffer.num_envs == 2
        batch = replay.sample()
    found, valid = batch.experience, batch.is_valid
    assert valid.all()
    np.testing.assert_array_equal(found.obs["x"], found.extras["z"])
    assert found.obs["deep"]["y"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.next_obs["x"], found.obs["x"] + 6)
    np.testing.assert_array_equal(found.reward, 3 * found.obs["x"] + 6)
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


def test_flags_of_several_agents(tmp_path):
    """Their example is that of the checkpoint, too."""
    options = {"capacity": 32, "batch_size": 16, "autoreset": "next_step", "num_agents": 3}
    buffer = jr.uniform(**options)
    number = np.arange(20, dtype=np.float32)[:, None]
    flags = np.repeat(np.arange(20)[:, None, None] == 9, 3, axis=2)
    reward = np.repeat(number[..., None], 3, axis=2)
    steps = jr.Step(number, number, reward, terminated=flags, truncated=flags & False)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], steps))
    state = jr.jit(buffer).extend(state, steps)
    Checkpointer(tmp_path, buffer, progress=False).save(state, 1)
    with jr.open(tmp_path, buffer, framework="numpy", seed=0) as replay:
        batch = replay.sample().experience
    assert {*np.unique(batch.obs).tolist()} <= {float(x) for x in range(19) if x != 10}
    np.testing.assert_array_equal(batch.discount[:, 0] == 0, batch.obs == 9)
    with pytest.raises(ValueError, match=r"open: the buffer is one of items, but .* has steps"):
        jr.open(tmp_path, jr.items(capacity=8, batch_size=2))


def test_what_would_change_rows_is_refused(tmp_path):
    buffer = made(tmp_path)
    with jr.open(tmp_path, buffer, framework="numpy") as replay:
        index = replay.sample().index
        step = plain_step(np.zeros(2, np.float32))
        step = step.replace(obs={"x": step.obs, "deep": {"y": step.obs}}, extras={"z": step.obs})
        for call in (
            lambda: replay.add(step),
            lambda: replay.write(index, {"reward": np.zeros(16, np.float32)}),
            replay.clear,
            lambda: replay.merge(buffer.init(jax.tree.map(lambda leaf: leaf[0], step))),
            lambda: replay.save(tmp_path / "other"),
        ):
            with pytest.raises(ValueError, match=r"the rows of .* are opened to be read"):
                call()
        assert replay.sample().is_valid.all()
    items = jr.items(capacity=64, batch_size=4)
    with pytest.raises(ValueError, match="open: buffer must be a ReplayBuffer"):
        jr.open(tmp_path, jr.mix(a=(items, 4)))
    other = plain_step(np.float32(0))
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
    """160 MB of rows: a process that samples them takes little memory for it."""
    buffer, item = jr.items(capacity=40_000, batch_size=8), np.zeros((64, 64), np.uint8)
    state = jr.jit(buffer).init(item)
    for number in range(40):
        state = jr.jit(buffer).extend(state, np.full((1000, 1, 64, 64), number, np.uint8))
    for name, saved in (("few", jr.jit(buffer).init(item)), ("run", state)):
        options = {"compression_level": None, "progress": False}
        Checkpointer(tmp_path / name, buffer, **options).save(saved, 1)
    code = """
import jaxreplay as jr
for path in ("few", "run"):
    with jr.open(path, jr.items(capacity=40_000, batch_size=8), framework="numpy") as replay:
        for _ in range(5 * (path == "run")):
            assert replay.sample().experience.shape == (8, 64, 64)
    print(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
"""
    few, many = map(int, output_of(code, cwd=tmp_path).split())
    assert many - few < 60_000  # kB


def test_steps_with_a_final_observation_need_no_example(tmp_path):
    replay = make(2, 16, autoreset="same_step")
    final = {"final_obs": step(9, (2,))["obs"]}
    for t in range(3):
        replay.add(step(t, (2,)) | final)
    replay.save(tmp_path)
    loaded = jr.Replay(replay.buffer)
    loaded.load(tmp_path)
    loaded.add(step(3, (2,)) | final)
    with jr.open(tmp_path, replay.buffer) as opened:
        assert (len(replay), len(opened), len(loaded)) == (4, 4, 6)

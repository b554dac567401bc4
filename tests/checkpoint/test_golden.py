"""Files that an earlier version wrote, of each format that is read: `tests/golden` has them, and
today's steps say what is in them. `python -m tests.checkpoint.test_golden` writes those of a new
format."""

import pathlib
import runpy
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.storage.file_rows import _FORMAT as ROWS
from tests.support.sampling import assert_same
from tests.support.steps import begun, nth, stacked

checkpoint = pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")
manifest = pytest.importorskip("jaxreplay.checkpoint.manifest")

READERS = pathlib.Path(__file__).parents[2] / "examples" / "formats.py"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
BUFFER = jr.prioritized(
    capacity=24,
    num_envs=2,
    batch_size=8,
    n_step=2,
    autoreset="same_step",
    allow_mask=True,
    allow_write=True,
)
EXTRAS = {"params": np.arange(6, dtype=np.float32).reshape(2, 3), "name": np.int32(7)}
LEVELS = {"plain": None, "compressed": 1}


def step(t):
    """Return the step of time t of two envs, of which an episode ends now and then."""
    number = np.float32([t, t + 100])
    image = (np.arange(6, dtype=np.uint8).reshape(2, 3) + np.uint8(t))[None].repeat(2, axis=0)
    obs = {"image": image, "deep": {"x": number.astype(ml_dtypes.bfloat16)}}
    return jr.Step(
        obs=obs,
        action=np.int32([t, -t]),
        reward=number / 4,
        terminated=np.array([t % 5 == 4, False]),
        truncated=np.array([False, t % 7 == 6]),
        final_obs=jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), obs),
    )


def filled(stop):
    """Return the state after steps, of which one env misses a few, with new priorities."""
    times = range(stop)
    mask = np.array([[True, t % 4 != 3] for t in times])
    state = begun(BUFFER, stacked([*map(step, times)]), mask)
    batch = BUFFER.sample(state, jax.random.key(0))
    return BUFFER.update_priorities(state, batch.index, np.arange(1, 9, dtype=np.float32))


def write():
    shutil.rmtree(GOLDEN / f"checkpoint-{manifest.FORMAT}", ignore_errors=True)
    shutil.rmtree(GOLDEN / f"rows-{ROWS}", ignore_errors=True)
    for name, level in LEVELS.items():
        path = GOLDEN / f"checkpoint-{manifest.FORMAT}" / name
        saves = checkpoint.Checkpointer(path, BUFFER, compression_level=level, progress=False)
        for number, stop in enumerate((6, 20)):
            saves.save(filled(stop), number, extras=EXTRAS)
    with jr.Replay(BUFFER, rows=GOLDEN / f"rows-{ROWS}", example=nth(step(0), 0)) as replay:
        for t in range(20):
            replay.add(step(t), mask=[True, t % 4 != 3])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("number", [1])
def test_a_checkpoint_is_read(number, level):
    path = GOLDEN / f"checkpoint-{number}" / level
    for save, stop in enumerate((6, 20)):
        state, extras = checkpoint.restore(
            path, BUFFER, nth(step(0), 0), step=save, extras=jax.tree.map(np.zeros_like, EXTRAS)
        )
        assert_same(state, filled(stop))
        assert_same(extras, EXTRAS)


@pytest.mark.parametrize("number", [1])
def test_rows_in_files_are_read(number, tmp_path):
    shutil.copytree(GOLDEN / f"rows-{number}", tmp_path / "rows")
    expected = jr.Replay(BUFFER, framework="numpy", example=nth(step(0), 0))
    for t in range(20):
        expected.add(step(t), mask=[True, t % 4 != 3])
    with jr.Replay(
        BUFFER, rows=tmp_path / "rows", framework="numpy", continue_streams=True
    ) as found:
        for t in range(20, 24):
            for replay in (found, expected):
                replay.add(step(t))
        assert len(found) == len(expected) > 0
        every = np.arange(BUFFER.capacity)
        assert_same(found.get(every).experience, expected.get(every).experience)


def test_the_readers_of_the_page_of_formats_read_the_rows(tmp_path):
    """These files, and a checkpoint of many groups of several saves."""
    names = runpy.run_path(str(READERS))
    saves = checkpoint.Checkpointer(
        tmp_path, BUFFER, compression_level=None, chunk_bytes=300, progress=False
    )
    for stop in (12, 16, 20):
        saves.save(filled(stop))
    member = saves._base.members[""]
    assert len(member.saves) > 1
    assert (member.saves[0].since < member.first).any()  # it has rows that were overwritten since

    read = names["rows_of_checkpoint"]
    plain, rows = ([*read(path)] for path in (GOLDEN / "checkpoint-1" / "plain", tmp_path))
    arrays, first, end = names["rows_of_folder"](GOLDEN / "rows-1")
    state = filled(20)
    assert len(plain) == len(rows) == (end - first).sum() == BUFFER.capacity
    assert {one[:2] for one in plain} == {one[:2] for one in rows}
    for env, number, leaves in plain + rows:
        assert first[env] <= number < end[env]
        place = env * BUFFER.length + number % BUFFER.length
        for name in ("steps.action", "steps.reward", "steps.obs.image", "steps.obs.deep.x.bits"):
            in_files = arrays["rows." + name.removeprefix("steps.").removesuffix(".bits")]
            np.testing.assert_array_equal(leaves[name], in_files[place])
        assert leaves["flags"] == arrays["journal.flags"][place] == state.rows.flags[place]
        assert leaves["steps.action"] == state.rows.steps.action[place]


if __name__ == "__main__":
    write()

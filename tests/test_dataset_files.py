"""Episodes from arrays, `.npz` files, LeRobot's Parquet files and flashbax's vaults."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets import npz, vault
from tests.support.buffers import everything
from tests.support.replays import output_of
from tests.support.steps import nth

FORMS = pytest.mark.parametrize("form", ["next_step", "same_step", "same_step_no_final_obs"])


def buffer(form, capacity=256):
    return jr.uniform(capacity=capacity, batch_size=8, gamma=0.5, autoreset=form)


def transitions(buffer, state, main=lambda obs: obs):
    """Return the set of (obs, action, reward, discount, next_obs where it is read)."""
    batch = jax.device_get(everything(buffer)(state, 0))
    t = batch.experience
    columns = [
        x[batch.is_valid].ravel().tolist()
        for x in (main(t.obs), t.action, t.reward, t.discount, main(t.next_obs))
    ]
    rows = [(*row[:4], row[4] if row[3] else None) for row in zip(*columns, strict=True)]
    assert len(rows) == len(set(rows))
    return set(rows)


def made(seed=0, num_episodes=12):
    """Return random episodes whose observations all differ, as columns: obs, next_obs, action,
    reward, terminated, truncated."""
    r = np.random.default_rng(seed)
    lengths, is_terminated = r.integers(1, 9, num_episodes), r.random(num_episodes) < 0.5
    is_terminated[-1] = False
    episode = np.repeat(np.arange(num_episodes), lengths)
    number = np.arange(len(episode), dtype=np.int32)
    obs = (number + episode).astype(np.float32)  # a final observation has a number, too
    is_last = np.append(np.diff(episode) == 1, True)
    end = is_last & is_terminated[episode]
    return obs, obs + 1, number, (number % 7).astype(np.float32), end, is_last & ~end


def expected(columns, has_final=True):
    """Return what `transitions` returns; truncated ends need final observations."""
    return {
        (float(o), a, float(r), 0.0 if end else 0.5, None if end else float(n))
        for o, n, a, r, end, cut in zip(*(c.tolist() for c in columns), strict=True)
        if has_final or not cut
    }


def read(folder, replay, rows, save=np.savez, **options):
    """Return the transitions of a file of some arrays."""
    save(folder / "a.npz", **rows)
    return transitions(replay, datasets.from_npz(folder / "a.npz", replay, **options))


@FORMS
def test_a_file_of_transitions(form, tmp_path, monkeypatch):
    """With next observations. Blocks of a few rows, in which episodes lie in several, change
    nothing."""
    obs, next_obs, action, reward, end, cut = made()
    replay, wanted = buffer(form), expected(made(), form != "same_step_no_final_obs")
    rows = {"action": action, "rewards": reward, "terminals": end, "timeouts": cut}
    rows |= {"observations": obs, "next_observations": next_obs}
    # without timeouts, their ends are found where the next row has another observation
    bare = {"obs": obs, "next_obs": next_obs, "actions": action, "reward": reward, "done": end}
    for block_bytes in (1, 60, 100, 150, 250, npz._BLOCK_BYTES):
        monkeypatch.setattr(npz, "_BLOCK_BYTES", block_bytes)
        assert read(tmp_path, replay, rows) == wanted
        assert read(tmp_path, replay, bare) == wanted
    assert read(tmp_path, replay, rows, np.savez_compressed) == wanted


@FORMS
def test_a_file_without_next_observations(form, tmp_path, monkeypatch):
    """As D4RL's: the last transition of a truncated episode is left out, and no pair is false."""
    monkeypatch.setattr(npz, "_BLOCK_BYTES", 100)
    obs, _, action, reward, end, cut = made(1)
    rows = {"o": obs, "actions": action, "rewards": reward, "terminals": end, "timeouts": cut}
    got = read(tmp_path, buffer(form), rows, names={"obs": "o"})
    assert got == expected(made(1), has_final=False)


@FORMS
def test_a_file_with_rows_of_final_observations(form, tmp_path, monkeypatch):
    """As OGBench's, without rewards."""
    monkeypatch.setattr(npz, "_BLOCK_BYTES", 40)
    number = np.arange(10, dtype=np.float32)
    rows = {"observations": number, "actions": number, "terminals": np.isin(number, (2, 3, 5, 9))}
    pairs = {(0, 1), (1, 2), (4, 5), (6, 7), (7, 8), (8, 9)}
    if form == "same_step_no_final_obs":
        pairs -= {(1, 2), (4, 5), (8, 9)}
    # next observations say nothing then, since a final row has none
    for more in ({}, {"next_observations": number * 0}):
        got = read(tmp_path, buffer(form), rows | more, final_rows=True)
        assert got == {(a, a, 0, 0.5, b) for a, b in pairs}


def test_bad_files_are_refused(tmp_path):
    path, obs, plain = tmp_path / "a.npz", np.zeros(4, np.float32), buffer("next_step")
    rows = dict.fromkeys(("observations", "actions", "terminals"), obs)

    def refused(message, arrays, replay=plain, **options):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=f"from_npz: .*{message}"):
            datasets.from_npz(path, replay, **options)

    message = "there is no array actions or action for action; the file has observations"
    refused(message, {"observations": obs})
    refused("there is no array terminations or", {"observations": obs, "actions": obs})
    message = "need the same number of rows, at least 1, got observations 4, actions 3"
    refused(message, rows | {"actions": obs[:3]})
    refused("at least 1, got observations 0", dict.fromkeys(rows, obs[:0]))
    objects = np.array([None] * 4)
    refused("observations: expected an array of numbers", rows | {"observations": objects})
    message = "names has state; its keys are obs, action"
    refused(message, rows, names={"state": "observations"})
    refused("there is no array x for obs", rows, names={"obs": "x"})
    message = "capacity=3 is too small: episode 0 ends in row 4"
    refused(message, rows, buffer("next_step", 3))
    refused("a dataset has episodes", rows, jr.items(capacity=8, batch_size=1))


def test_a_large_file_is_read_in_parts(tmp_path):
    """Memory beside the state is a few blocks and an episode."""
    code = """
import resource, zipfile
import jax, numpy as np, jaxreplay as jr
from jaxreplay.datasets import from_npz

ARRAYS = {"observations": ((64, 64), np.uint8), "actions": ((), np.int32), "terminals": ((), "?")}

def most_memory(path, num_episodes):
    with zipfile.ZipFile(path, "w") as archive:
        for name, (row, kind) in ARRAYS.items():
            values = np.zeros((1023, *row), kind)
            values[-1:] = name == "terminals"
            shape = (num_episodes * 1023, *row)
            header = {"descr": values.dtype.str, "fortran_order": False, "shape": shape}
            with archive.open(name + ".npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for _ in range(num_episodes):
                    file.write(values.tobytes())
    state = from_npz(path, jr.uniform(capacity=40 * 1024, batch_size=2, autoreset="next_step"))
    assert state.counters.filled == num_episodes * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

few = most_memory("a.npz", 8)
print(most_memory("b.npz", 40) - few)
"""
    assert float(output_of(code, cwd=tmp_path)) < 100  # MiB; the file has 160


@FORMS
def test_a_lerobot_dataset(form, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    from pyarrow import parquet

    numbers, two = iter(range(13)), pyarrow.list_(pyarrow.float32(), 2)
    for index, length in enumerate([4, 1, 3, 5]):
        folder = tmp_path / "data" / f"chunk-00{index // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        frame, no = [*itertools.islice(numbers, length)], [False] * (length - 1)
        table = {
            "observation.state": pyarrow.array([[x, x + 0.5] for x in frame], two),
            "observation.grid": [[[x, 0], [0, 1], [2, 2]] for x in frame],
            "observation.text": ["a"] * length,
            "action": [[float(x)] for x in frame],
            "episode_index": [index] * length,
            "next.reward": np.float32(frame),
            "next.done": [*no, index != 3],  # the last has no flag
            "next.success": [*no, index == 2],
        }
        parquet.write_table(pyarrow.table(table), folder / f"episode_00000{index}.parquet")
    replay = buffer(form)
    state = datasets.from_lerobot(tmp_path, replay)
    obs = state.rows.steps.obs
    assert {key: leaf.shape[1:] for key, leaf in obs.items()} == {"state": (2,), "grid": (3, 2)}
    pairs = {(0, 1), (1, 2), (2, 3), (5, 6), (6, 7), (7, None), (8, 9), (9, 10), (10, 11), (11, 12)}
    assert transitions(replay, state, lambda obs: obs["state"][:, :1]) == {
        (a, a, a, 0 if b is None else 0.5, b) for a, b in pairs
    }
    if form == "same_step_no_final_obs":  # chunks are of all frames, an episode's last too
        view = jr.views.ChunkView(obs=(-1, 0), action=3)
        check_chunks(dataclasses.replace(replay, view=view), state, [4, 1, 3, 5])
    with pytest.raises(ValueError, match="there are no Parquet files in"):
        datasets.from_lerobot(tmp_path / "chunk-000", replay)
    parquet.write_table(pyarrow.table({"action": [1.0]}), tmp_path / "data" / "a.parquet")
    with pytest.raises(ValueError, match=r"no column observation\.\*, of numbers, but action"):
        datasets.from_lerobot(tmp_path, replay)


def check_chunks(buffer, state, lengths):
    """Compare with the frames that LeRobot's `delta_timestamps` of these offsets give: the nearest
    frame of the episode, and whether the offset lies outside."""
    batch = jax.device_get(everything(buffer)(jr.jit(buffer).adopt(state), 0))
    expected, start = {}, 0
    for end in np.cumsum(lengths):
        for frame in range(start, end):
            rows = {"obs": frame + np.array([-1, 0]), "action": frame + np.arange(3)}
            expected[frame] = {
                name: (at.clip(start, end - 1).tolist(), ((at < start) | (at >= end)).tolist())
                for name, at in rows.items()
            }
        start = end
    got = {}
    for which in np.flatnonzero(batch.is_valid):
        item = nth(batch.experience, which)
        values = {"obs": item.obs["state"][:, 0], "action": item.action[:, 0]}
        got[int(item.obs["state"][-1, 0])] = {
            name: (value.tolist(), getattr(item, f"{name}_is_pad").tolist())
            for name, value in values.items()
        }
    assert got == expected


def write_vault(folder, experience, length):
    """Write leaves [E, T, ...] as a vault of so many rows, as flashbax does."""
    import tensorstore

    def put(name, values, shape):
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}", "path": name}
        spec = {"driver": "zarr", "kvstore": kvstore}
        array = tensorstore.open(spec, dtype=values.dtype, shape=shape, create=True).result()
        array[tuple(map(slice, values.shape))].write(values).result()

    folder.mkdir()
    for path, leaf in jax.tree_util.tree_leaves_with_path(experience):
        name = "".join(f"{key.key}." for key in path)
        put(name, leaf[:, :length], (leaf.shape[0], 10**13, *leaf.shape[2:]))
    put("vault_index", np.array([length], np.int32), (1,))
    shapes = jax.tree.map(lambda leaf: str(leaf.shape), experience)
    (folder / "metadata.json").write_text(json.dumps({"version": 1.2, "structure_shape": shapes}))
    return folder


def write_by_flashbax(folder, experience, length):
    module = pytest.importorskip("flashbax.vault", reason="flashbax is not installed")
    from flashbax.buffers.trajectory_buffer import TrajectoryBufferState

    tree = jax.tree.map(jax.numpy.asarray, experience)
    index, no = jax.numpy.int32(length), jax.numpy.bool_(False)
    state = TrajectoryBufferState(experience=tree, current_index=index, is_full=no)
    module.Vault(folder.name, tree, rel_dir=str(folder.parent), vault_uid="a").write(state)
    return folder / "a"


@FORMS
@pytest.mark.parametrize("write", [write_vault, write_by_flashbax])
def test_a_vault(form, write, tmp_path, monkeypatch):
    """Two envs, whose last row is not in the vault."""
    columns = made(0), made(1)
    length = min(len(action) for _, _, action, *_ in columns) - 1
    obs, _, action, reward, terminated, truncated = (
        np.stack([column[: length + 1] for column in both]) for both in zip(*columns, strict=True)
    )
    obs[1] += 1000
    action[1] += 1000
    experience = {
        "observations": {"a": obs, "b": np.repeat(obs[..., None], 3, axis=2)},
        "actions": action,
        "rewards": reward,
        "terminals": np.repeat(terminated[..., None], 2, axis=2),  # two agents
        "info": {"cut": truncated},
    }
    path, replay = write(tmp_path / "v", experience, length), buffer(form)

    def refused(message, path, **options):
        with pytest.raises(ValueError, match=message):
            datasets.from_vault(path, replay, **options)

    message = "no array infos for truncated; the file has actions, inf"
    refused(message, path, names={"truncated": "infos"})
    refused("has no metadata.json, so it is no vault", path / "d")
    # the row of a truncation, and the newest, is taken for the final observation
    is_lost = truncated | (np.arange(length + 1) == length - 1) & ~terminated
    wanted = {
        (obs[at], action[at], reward[at], *((0, None) if terminated[at] else (0.5, obs[at] + 1)))
        for at in np.ndindex(2, length)
        if terminated[at] or not is_lost[at]
    }
    assert len(wanted) > 40
    for block_bytes in (1, 500, vault._BLOCK_BYTES):
        monkeypatch.setattr(vault, "_BLOCK_BYTES", block_bytes)
        state = datasets.from_vault(path, replay, names={"truncated": "info.cut"})
        assert transitions(replay, state, lambda obs: obs["a"]) == wanted
        stored = jax.device_get(state.rows.steps.obs)
        np.testing.assert_array_equal(stored["b"], np.stack([stored["a"]] * 3, axis=1))
    metadata = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps(metadata | {"version": 2.0}))
    refused("has version 2.0; known are 1.x", path)

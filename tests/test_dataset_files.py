"""Episodes from arrays, `.npz` files, LeRobot's Parquet files and flashbax's vaults."""

import itertools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets import npz, vault
from jaxreplay.datasets.episodes import Rows, episodes_of

FORMS = pytest.mark.parametrize("form", ["next_step", "same_step", "same_step_no_final_obs"])


def buffer(form, capacity=4096):
    return jr.uniform(capacity=capacity, batch_size=2048, gamma=0.5, autoreset=form)


def transitions(buffer, state):
    """Return the set of (obs, action, reward, discount, next_obs where it is read)."""
    batch = buffer.get(state, np.arange(buffer.capacity))
    t, valid = batch.experience, np.asarray(batch.is_valid)
    columns = [
        np.asarray(x)[valid].ravel().tolist()
        for x in (t.obs, t.action, t.reward, t.discount, t.next_obs)
    ]
    rows = [(*row[:4], row[4] if row[3] else None) for row in zip(*columns, strict=True)]
    assert len(rows) == len(set(rows))
    return set(rows)


def made(seed=0, num_episodes=12):
    """Return random episodes whose observations all differ, as columns: obs, next_obs, action,
    reward, terminated, truncated."""
    r = np.random.default_rng(seed)
    rows, now = [], 0
    for _ in range(num_episodes):
        length, is_terminated = int(r.integers(1, 9)), bool(r.random() < 0.5)
        for t in range(length):
            ends = t == length - 1
            rows.append(
                (
                    now,
                    now + 1,
                    len(rows),
                    float(len(rows) % 7),
                    ends and is_terminated,
                    ends and not is_terminated,
                )
            )
            now += 1
        now += 1
    kinds = (np.float32, np.float32, np.int32, np.float32, bool, bool)
    return [
        np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    ]


def expected(columns, has_final=True):
    """Return what `transitions` returns; truncated ends need final observations."""
    return {
        (float(o), a, float(r), 0.0 if end else 0.5, None if end else float(n))
        for o, n, a, r, end, cut in zip(*(c.tolist() for c in columns), strict=True)
        if has_final or not cut
    }


@pytest.mark.parametrize("is_compressed", [False, True])
@FORMS
def test_a_file_of_transitions(form, is_compressed, tmp_path, monkeypatch):
    """With next observations; blocks are of a few rows, so that episodes lie in several."""
    monkeypatch.setattr(npz, "_BLOCK_BYTES", 60)
    obs, next_obs, action, reward, terminated, truncated = made()
    path = tmp_path / "a.npz"
    (np.savez_compressed if is_compressed else np.savez)(
        path,
        observations=obs,
        next_observations=next_obs,
        actions=action,
        rewards=reward,
        terminals=terminated,
        timeouts=truncated,
    )
    replay = buffer(form)
    state = datasets.from_npz(path, replay)
    assert transitions(replay, state) == expected(made(), form != "same_step_no_final_obs")
    # without timeouts, their ends are found where the next row has another observation
    np.savez(path, obs=obs, next_obs=next_obs, action=action, reward=reward, done=terminated)
    state = datasets.from_npz(path, replay)
    assert transitions(replay, state) == expected(made(), form != "same_step_no_final_obs")


@FORMS
def test_a_file_without_next_observations(form, tmp_path, monkeypatch):
    """As D4RL's: the last transition of a truncated episode is left out, and no pair is false."""
    monkeypatch.setattr(npz, "_BLOCK_BYTES", 100)
    obs, _, action, reward, terminated, truncated = made(1)
    np.savez(
        tmp_path / "a.npz",
        o=obs,
        actions=action,
        rewards=reward,
        terminals=terminated,
        timeouts=truncated,
    )
    replay = buffer(form)
    state = datasets.from_npz(tmp_path / "a.npz", replay, names={"obs": "o"})
    got, all_of_them = transitions(replay, state), expected(made(1), has_final=False)
    assert got <= all_of_them
    if form != "same_step_no_final_obs":  # which drops a further one of each truncated episode
        assert got == all_of_them


@FORMS
def test_a_file_with_rows_of_final_observations(form, tmp_path, monkeypatch):
    """As OGBench's, without rewards."""
    monkeypatch.setattr(npz, "_BLOCK_BYTES", 40)
    ends = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1], bool)
    np.savez(
        tmp_path / "a.npz",
        observations=np.arange(10.0, dtype=np.float32),
        actions=np.arange(10),
        terminals=ends,
    )
    replay = buffer(form)
    state = datasets.from_npz(tmp_path / "a.npz", replay, final_rows=True)
    # next observations say nothing then, since a final row has none
    arrays = dict(np.load(tmp_path / "a.npz")) | {"next_observations": np.zeros(10, np.float32)}
    np.savez(tmp_path / "b.npz", **arrays)
    other = datasets.from_npz(tmp_path / "b.npz", replay, final_rows=True)
    assert transitions(replay, other) == transitions(replay, state)
    pairs = {(0, 1), (1, 2), (4, 5), (6, 7), (7, 8), (8, 9)}
    if form == "same_step_no_final_obs":
        pairs -= {(1, 2), (4, 5), (8, 9)}
    assert transitions(replay, state) == {(a, a, 0.0, 0.5, b) for a, b in pairs}


def test_blocks_do_not_matter():
    """Any division of the rows into blocks gives the same episodes; the last one is cut."""
    obs, _, action, reward, terminated, truncated = made(2)
    terminated[-1] = truncated[-1] = False
    rows = Rows(obs, action, reward, terminated, truncated)
    whole = list(episodes_of([rows]))
    assert len(whole) > 5
    r = np.random.default_rng(0)
    for _ in range(30):
        cuts = np.sort(r.integers(0, len(obs) + 1, 4))
        bounds = sorted({0, *cuts.tolist(), len(obs)})
        blocks = [
            jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], rows)
            for a, b in itertools.pairwise(bounds)
        ]
        for got, one in zip(episodes_of(blocks), whole, strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, one)


def test_bad_files_are_refused(tmp_path):
    path, obs = tmp_path / "a.npz", np.zeros(4, np.float32)
    bad = {
        "there is no array actions or action for action; the file has observations": {
            "observations": obs
        },
        "there is no array terminations or": {"observations": obs, "actions": obs},
        "arrays need the same number of rows, at least 1, got observations 4, actions 3": {
            "observations": obs,
            "actions": obs[:3],
            "terminals": obs,
        },
        "at least 1, got observations 0": {
            "observations": obs[:0],
            "actions": obs[:0],
            "terminals": obs[:0],
        },
        "observations: expected an array of numbers": {
            "observations": np.array([None] * 4),
            "actions": obs,
            "terminals": obs,
        },
    }
    for message, arrays in bad.items():
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=f"from_npz: .*{message}"):
            datasets.from_npz(path, buffer("next_step"))
    np.savez(path, observations=obs, actions=obs, terminals=obs)
    with pytest.raises(ValueError, match="names has state; its keys are obs, action"):
        datasets.from_npz(path, buffer("next_step"), names={"state": "observations"})
    with pytest.raises(ValueError, match="there is no array x for obs"):
        datasets.from_npz(path, buffer("next_step"), names={"obs": "x"})
    with pytest.raises(
        ValueError, match=r"from_npz: capacity=3 is too small: episode 0 ends in row 4"
    ):
        datasets.from_npz(path, buffer("next_step", 3))
    with pytest.raises(ValueError, match="num_envs=1"):
        datasets.from_npz(path, jr.items(capacity=8, batch_size=1))


def test_a_large_file_is_read_in_parts(tmp_path):
    """Memory beside the state is a few blocks and an episode."""
    code = """
import resource, zipfile
import jax, numpy as np, jaxreplay as jr
from jaxreplay.datasets import from_npz

buffer = jr.uniform(capacity=70_000, batch_size=2, autoreset="next_step")
few = np.zeros(8, np.float32)
np.savez("a.npz", observations=few, actions=few, terminals=np.arange(8) == 7)
from_npz("a.npz", buffer)
arrays = {"observations": ((64, 64), np.uint8), "actions": ((), np.int32), "terminals": ((), "?")}
with zipfile.ZipFile("b.npz", "w") as archive:
    for name, (row, kind) in arrays.items():
        header = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (60_000, *row)}
        with archive.open(name + ".npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in range(60):
                values = np.zeros((1000, *row), kind)
                values[::100] = name == "terminals"
                file.write(values.tobytes())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = from_npz("b.npz", buffer)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
print(int(buffer.size(state)), (after - before) / 1024 - size / 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    size, extra = done.stdout.split()
    assert int(size) == 59_999
    assert float(extra) < 150  # MiB; the file has 234


@FORMS
def test_a_lerobot_dataset(form, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    from pyarrow import parquet

    lengths, number = [4, 1, 3, 5], 0
    for index, length in enumerate(lengths):
        folder = tmp_path / "data" / f"chunk-00{index // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        frame = np.arange(number, number + length)
        number += length
        table = {
            "observation.state": pyarrow.array(
                [[x, x + 0.5] for x in frame.tolist()], pyarrow.list_(pyarrow.float32(), 2)
            ),
            "observation.grid": [[[x, 0], [0, 1], [2, 2]] for x in frame.tolist()],
            "observation.text": ["a"] * length,
            "action": [[float(x)] for x in frame.tolist()],
            "episode_index": [index] * length,
            "next.reward": frame.astype(np.float32),
            "next.done": [False] * (length - 1) + [index != 3],  # the last has no flag
            "next.success": [False] * (length - 1) + [index == 2],
        }
        parquet.write_table(pyarrow.table(table), folder / f"episode_00000{index}.parquet")
    replay = buffer(form)
    state = datasets.from_lerobot(tmp_path, replay)
    assert {key: leaf.shape[1:] for key, leaf in state.streams.steps.obs.items()} == {
        "state": (2,),
        "grid": (3, 2),
    }
    batch = replay.get(state, np.arange(replay.capacity))
    t, valid = batch.experience, np.asarray(batch.is_valid)
    got = {
        (float(o), float(n) if d else None, float(a[0]), float(r))
        for o, n, a, r, d in zip(
            *(
                np.asarray(x)[valid]
                for x in (
                    t.obs["state"][:, 0],
                    t.next_obs["state"][:, 0],
                    t.action,
                    t.reward,
                    t.discount,
                )
            ),
            strict=True,
        )
    }
    pairs = {(0, 1), (1, 2), (2, 3), (5, 6), (6, 7), (7, None), (8, 9), (9, 10), (10, 11), (11, 12)}
    if form == "same_step_no_final_obs":
        pairs -= {(2, 3), (11, 12)}
    assert got == {(a, b, a, a) for a, b in pairs}
    with pytest.raises(ValueError, match="there are no Parquet files in"):
        datasets.from_lerobot(tmp_path / "chunk-000", replay)
    parquet.write_table(pyarrow.table({"action": [1.0]}), tmp_path / "data" / "a.parquet")
    with pytest.raises(
        ValueError, match=r"there is no column observation\.\*, of numbers, but action"
    ):
        datasets.from_lerobot(tmp_path, replay)


def write_vault(writer, folder, experience):
    """Write leaves [E, T, ...] as a vault, by flashbax or as it does."""
    if writer == "flashbax":
        module = pytest.importorskip("flashbax.vault", reason="flashbax is not installed")
        from flashbax.buffers.trajectory_buffer import TrajectoryBufferState

        length = jax.tree.leaves(experience)[0].shape[1]
        tree = jax.tree.map(jax.numpy.asarray, experience)
        state = TrajectoryBufferState(
            experience=tree,
            current_index=jax.numpy.int32(length - 1),
            is_full=jax.numpy.bool_(False),
        )
        one = module.Vault(folder.name, tree, rel_dir=str(folder.parent), vault_uid="a")
        one.write(state)
        return folder / "a"
    import tensorstore

    def put(name, values, shape):
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}", "path": name}
        spec = {"driver": "zarr", "kvstore": kvstore}
        array = tensorstore.open(spec, dtype=values.dtype, shape=shape, create=True).result()
        array[tuple(slice(0, size) for size in values.shape)].write(values).result()

    folder.mkdir()
    for path, leaf in jax.tree_util.tree_leaves_with_path(experience):
        name = "".join(f"{key.key}." for key in path)
        put(name, leaf[:, :-1], (leaf.shape[0], 10**13, *leaf.shape[2:]))
    put("vault_index", np.array([jax.tree.leaves(experience)[0].shape[1] - 1], np.int32), (1,))
    shapes = jax.tree.map(lambda leaf: str(leaf.shape), experience)
    (folder / "metadata.json").write_text(json.dumps({"version": 1.2, "structure_shape": shapes}))
    return folder


@FORMS
@pytest.mark.parametrize("writer", ["tensorstore", "flashbax"])
def test_a_vault(form, writer, tmp_path, monkeypatch):
    """Two envs, whose last row is not in the vault."""
    columns = [made(seed) for seed in (0, 1)]
    length = min(len(column[0]) for column in columns)
    obs, _, action, reward, terminated, truncated = (
        np.stack([column[which][:length] for column in columns]) for which in range(6)
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
    path = write_vault(writer, tmp_path / "v", experience)
    replay, names = buffer(form), {"truncated": "info.cut"}
    with pytest.raises(ValueError, match="no array infos for truncated; the file has actions, inf"):
        datasets.from_vault(path, replay, names={"truncated": "infos"})
    with pytest.raises(ValueError, match=r"has no metadata.json, so it is no vault"):
        datasets.from_vault(path / "d", replay)

    expected = set()
    for env in range(2):
        # the row of a truncation, and the newest, is taken for the final observation
        cut = truncated[env] | (np.arange(length) == length - 2) & ~terminated[env]
        for t in range(length - 1):
            is_lost = cut[t] or (form == "same_step_no_final_obs" and cut[t + 1])
            after = None if terminated[env, t] else obs[env, t + 1]
            if terminated[env, t] or not is_lost:
                expected.add((obs[env, t], action[env, t], reward[env, t], after))
    assert len(expected) > 40
    for block_bytes in (1, 500, vault._BLOCK_BYTES):
        monkeypatch.setattr(vault, "_BLOCK_BYTES", block_bytes)
        state = datasets.from_vault(path, replay, names=names)
        batch = replay.get(state, np.arange(replay.capacity))
        t, valid = batch.experience, np.asarray(batch.is_valid)
        np.testing.assert_array_equal(t.obs["b"], np.repeat(t.obs["a"][:, None], 3, axis=1))
        found = [
            np.asarray(x)[valid].tolist()
            for x in (t.obs["a"], t.action, t.reward, t.discount, t.next_obs["a"])
        ]
        rows = [(*row[:3], row[4] if row[3] else None) for row in zip(*found, strict=True)]
        assert set(rows) == expected
        assert len(rows) == len(expected)
    metadata = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps(metadata | {"version": 2.0}))
    with pytest.raises(ValueError, match=r"has version 2.0; known are 1.x"):
        datasets.from_vault(path, replay)

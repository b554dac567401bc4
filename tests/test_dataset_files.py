"""Episodes from arrays of files and folders, LeRobot's datasets and flashbax's vaults."""

import dataclasses
import io
import itertools
import json
import struct
import zlib

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets import arrays
from jaxreplay.datasets.episodes import steps_of
from jaxreplay.storage import row_flags
from tests.conftest import ALL, SOAK
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


def npz(folder, rows):
    np.savez(folder / "a.npz", **rows)
    return datasets.open_npz(folder / "a.npz")


def compressed(folder, rows):
    np.savez_compressed(folder / "a.npz", **rows)
    return datasets.open_npz(folder / "a.npz")


def hdf5(folder, rows):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name, values in rows.items():
            file.create_dataset(name, data=values, chunks=(5, *values.shape[1:]))
    return h5py.File(folder / "a.hdf5")


def tensorstores(folder, rows):
    tensorstore = pytest.importorskip("tensorstore", reason="no checkpoint extra")
    return {name: tensorstore.array(values) for name, values in rows.items()}


def parquet(folder, rows):
    """Two files, with row groups of four rows."""
    pyarrow = pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    from pyarrow import parquet

    table = pyarrow.table({name: [*values] for name, values in rows.items()})
    for number, part in enumerate((table[:17], table[17:])):
        parquet.write_table(part, folder / f"{number}.parquet", row_group_size=4)
    return datasets.open_parquet(folder)


SOURCES = (lambda _, rows: rows), npz, compressed, hdf5, tensorstores, parquet


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("form", ["next_step", *["same_step", "same_step_no_final_obs"] * ALL])
def test_files_of_transitions(source, form, tmp_path, monkeypatch):
    """With next observations. Blocks of a few rows, in which episodes lie in several, change
    nothing."""
    obs, next_obs, action, reward, end, cut = made()
    replay, wanted = buffer(form), expected(made(), form != "same_step_no_final_obs")
    rows = {"action": action, "rewards": reward, "terminals": end, "timeouts": cut}
    rows |= {"observations": obs, "next_observations": next_obs, "step": 2 * action}
    file = source(tmp_path, rows)
    for block_bytes in (1, 60, 100, 150, 250, 2**22):
        monkeypatch.setattr(arrays, "BLOCK_BYTES", block_bytes)
        state = datasets.from_arrays(file, replay, names={"extras": ["step"]})
        assert transitions(replay, state) == wanted
        stored, flags = state.rows.steps, np.asarray(state.rows.flags) != 0
        np.testing.assert_array_equal(stored.extras[0][flags], 2 * stored.action[flags])
        # without timeouts, their ends are found where the next row has another observation
        state = datasets.from_arrays(file, replay, names={"truncated": None})
        assert transitions(replay, state) == wanted


@FORMS
def test_the_capacity_that_a_source_needs(form, tmp_path):
    """It suffices, and one row less of each env does not."""
    obs, next_obs, action, reward, end, cut = made(3)
    rows = {"action": action, "reward": reward, "done": end, "truncated": cut, "obs": obs}
    for file in (rows | {"next_obs": next_obs}, *[rows, npz(tmp_path, rows)] * ALL):
        for num_envs in (3, *[1] * ALL):
            needs = datasets.required_capacity(file, num_envs, form)
            replay = jr.uniform(
                capacity=needs, num_envs=num_envs, batch_size=8, gamma=0.5, autoreset=form
            )
            has_final = "next_obs" in file and form != "same_step_no_final_obs"
            state = datasets.from_arrays(file, replay)
            assert transitions(replay, state) == expected(made(3), has_final)
            smaller = dataclasses.replace(replay, capacity=needs - num_envs)
            with pytest.raises(ValueError, match=f"capacity={needs - num_envs} is too small"):
                datasets.from_arrays(file, smaller)


def listed(rows, form, final_rows):
    """Return the steps of each episode, [(obs, action, terminated, truncated)], and its final
    observation where it is known, by a loop over lists."""
    obs, after, total = rows["obs"], rows.get("next_obs"), len(rows["obs"])
    part = np.searchsorted(rows.get("episode_ends", [total]), np.arange(total), side="right")
    number = rows.get("episode_index", part) if "episode_ends" not in rows else part
    episodes, own = [], []
    for row in range(total):
        own.append(row)
        is_end = bool(rows["done"][row] or rows["truncated"][row]) or row == total - 1
        is_end = is_end or number[row] != number[row + 1]
        if not is_end and after is not None and not final_rows:
            is_end = after[row] != obs[row + 1]
        if not is_end:
            continue
        is_terminated = bool(rows["done"][row]) and not final_rows
        final = obs[row]
        if after is not None and not final_rows:
            final = after[row]
        elif final_rows or not (is_terminated or form == "same_step_no_final_obs"):
            own.pop()  # the row is the final observation
        steps = [(obs[one], one, False, False) for one in own]
        if steps:
            steps[-1] = (*steps[-1][:2], is_terminated, not is_terminated)
            episodes.append((steps, final))
        own = []
    return episodes


@pytest.mark.parametrize("form", ["next_step", "same_step", "same_step_no_final_obs"])
def test_random_histories_are_those_of_a_loop_over_lists(form, monkeypatch):
    """In blocks of any size, with all that may end an episode, at once."""
    r = np.random.default_rng(0)
    for _ in range(20_000 if SOAK else 300):
        total, often = int(r.integers(1, 25)), r.choice([0, 0.1, 0.5, 1])
        obs = np.cumsum(r.integers(1, 3, total)).astype(np.float32)
        rows = {"obs": obs, "action": np.arange(total), "reward": obs}
        rows |= {name: r.random(total) < often * r.random() for name in ("done", "truncated")}
        if r.random() < 0.3:
            rows["episode_ends"] = np.append(np.sort(r.integers(0, total + 1, 4)), total)
        if r.random() < 0.3:
            rows["episode_index"] = np.cumsum(r.random(total) < 0.3)
        if r.random() < 0.5:
            after = np.append(obs[1:], np.float32(99))
            is_jump = r.random(total) < 0.2
            rows["next_obs"] = np.where(is_jump, 1000 + obs, after).astype(np.float32)
        final_rows = bool(r.random() < 0.3)
        monkeypatch.setattr(arrays, "BLOCK_BYTES", int(r.choice([1, 30, 60, 100, 200, 10**6])))
        found, steps, num_rows = [], [], 0
        for _, blocks in arrays._parts("", rows, None, final_rows):
            for block, is_last in steps_of(blocks, form, final_rows):
                num_rows += len(is_last) + (form == "same_step") * int(is_last.sum())
                for at in range(len(is_last)):
                    one = nth(block, at)
                    steps.append((one.obs, one.action, bool(one.terminated), bool(one.truncated)))
                    if is_last[at]:
                        final = one.final_obs
                        if form == "next_step":
                            final, *_ = steps.pop()
                        found.append((steps, final))
                        steps = []
        assert not steps
        wanted = listed(rows, form, final_rows)
        if form == "same_step_no_final_obs":
            found, wanted = ([(own, None) for own, _ in each] for each in (found, wanted))
        either = [
            [([(*one[:3], one[2] or one[3]) for one in own], final) for own, final in each]
            for each in (found, wanted)
        ]
        assert either[0] == either[1]
        assert datasets.required_capacity(rows, 1, form, final_rows=final_rows) == num_rows


@pytest.mark.parametrize("num_envs", [3, *[1] * ALL])
def test_rows_go_to_files_too(num_envs, tmp_path):
    """Data that exceeds memory, once; then its folder is opened."""
    obs, next_obs, action, reward, end, cut = made(5)
    rows = {"action": action, "reward": reward, "done": end, "truncated": cut, "obs": obs}
    rows |= {"next_obs": next_obs}
    options = {"num_envs": num_envs, "batch_size": 8, "gamma": 0.5, "autoreset": "next_step"}
    replay = jr.uniform(capacity=300, allow_mask=num_envs > 1, **options)
    tier = jr.tiered(replay, rows=tmp_path / "rows")
    state = datasets.from_arrays(rows, tier)
    assert transitions(replay, tier.whole(state)) == expected(made(5))
    with pytest.raises(ValueError, match="capacity=300 is too small"):
        datasets.from_arrays(
            {name: np.resize(values, 600) for name, values in rows.items()}, tier, into=state
        )
    assert transitions(replay, tier.whole(tier.newest)) == expected(made(5))
    tier.close()
    example = jr.Step(np.float32(0), np.int32(0), np.float32(0), terminated=False, truncated=False)
    with jr.Replay(replay, rows=tmp_path / "rows", example=example) as opened:
        assert len(opened) == len(expected(made(5)))
    for _ in range(2):  # a second import, or one after another that was cut off
        with pytest.raises(ValueError, match=r"rows has [0-9]+ rows already, .* delete the folder"):
            datasets.from_arrays(rows, tier)
    state = datasets.from_arrays(rows, tier, into=tier.clear(tier.init(example)))
    assert transitions(replay, tier.whole(state)) == expected(made(5))
    if num_envs > 1:
        tier = jr.tiered(jr.uniform(capacity=300, **options), rows="host")
        with pytest.raises(ValueError, match="tiered buffer of several envs needs allow_mask=True"):
            datasets.from_arrays(rows, tier)


@FORMS
def test_a_file_without_next_observations(form, monkeypatch):
    """As D4RL's: the last transition of a truncated episode is left out, and no pair is false."""
    obs, _, action, reward, end, cut = made(1)
    rows = {"o": obs, "actions": action, "rewards": reward[:, None]}
    flags = {"terminals": end[:, None], "timeouts": cut.astype(np.float32)}
    wanted = expected(made(1), has_final=False)
    ends = {
        "data": rows | {"terminals": end},
        "meta": {"episode_ends": np.flatnonzero(end | cut) + 1},
    }
    numbers = {"obs": "data/o", "action": "data/actions", "reward": "data/rewards"}
    numbers |= {"terminated": "data/terminals", "episode_ends": "meta/episode_ends"}
    which = np.cumsum(np.append(False, (end | cut)[:-1]))
    for block_bytes in (1, 100, 2**22):
        monkeypatch.setattr(arrays, "BLOCK_BYTES", block_bytes)
        for file, names in (
            (rows | flags, {"obs": "o"}),
            (ends, numbers),
            (rows | {"terminals": end, "episode_index": which}, {"obs": "o"}),
        ):
            state = datasets.from_arrays(file, buffer(form), names=names)
            assert transitions(buffer(form), state) == wanted


@FORMS
def test_a_file_with_rows_of_final_observations(form, tmp_path, monkeypatch):
    """As OGBench's, without rewards."""
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 40)
    number = np.arange(10, dtype=np.float32)
    rows = {"observations": number, "actions": number, "terminals": np.isin(number, (2, 3, 5, 9))}
    pairs = {(0, 1), (1, 2), (4, 5), (6, 7), (7, 8), (8, 9)}
    if form == "same_step_no_final_obs":
        pairs -= {(1, 2), (4, 5), (8, 9)}
    # next observations say nothing then, since a final row has none
    for more in ({}, {"next_observations": number * 0}):
        file = npz(tmp_path, rows | more)
        state = datasets.from_arrays(file, buffer(form), names={"reward": None}, final_rows=True)
        assert transitions(buffer(form), state) == {(a, a, 0, 0.5, b) for a, b in pairs}


@FORMS
@pytest.mark.parametrize("num_envs", [3, *[1] * ALL])
def test_a_file_by_episode(form, num_envs, tmp_path):
    """As robomimic's, with next observations, or with a final one; some episodes have no flag, and
    one has no row."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    obs, next_obs, action, reward, end, cut = made(4)
    stops = np.flatnonzero(end | cut) + 1
    replay = jr.uniform(capacity=300, num_envs=num_envs, batch_size=8, gamma=0.5, autoreset=form)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for nth, (start, stop) in enumerate(itertools.pairwise([0, *stops.tolist(), stops[-1]])):
            own, more = file.create_group(f"data/demo_{nth}"), nth % 2
            own["obs/x"] = np.append(obs[start:stop], next_obs[stop - 1 : stop][:more])
            if not more:
                own["next_obs/x"] = next_obs[start:stop]
            own["actions"], own["rewards"] = action[start:stop], reward[start:stop]
            if end[start:stop].any():
                own["dones"] = end[start:stop]
        state = datasets.from_arrays(file["data"], replay)
        needs = datasets.required_capacity(file["data"], num_envs, form)
    assert int(np.asarray(state.counters.filled).max()) * num_envs == needs
    wanted = expected(made(4), form != "same_step_no_final_obs")
    assert transitions(replay, state, lambda obs: obs["x"]) == wanted
    with pytest.raises(ValueError, match="from_arrays: env 0: there is no array terminations or"):
        datasets.from_arrays([{"obs": obs, "actions": action, "rewards": reward}], replay)


def test_bad_files_are_refused(tmp_path):
    path, obs, plain = tmp_path / "a.npz", np.zeros(4, np.float32), buffer("next_step")
    rows = dict.fromkeys(("observations", "actions", "rewards", "terminals"), obs)

    def refused(message, arrays, replay=plain, where="from_arrays: .*a.npz.*: ", **options):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=f"{where}{message}"):
            datasets.from_arrays(datasets.open_npz(path), replay, **options)

    message = "there is no array actions or action for action; there are observations"
    refused(message, {"observations": obs})
    refused("there is no array rewards or", {"observations": obs, "actions": obs})
    flagless = {name: values for name, values in rows.items() if name != "terminals"}
    refused("there is no array terminations or", flagless)
    message = "arrays need the same number of rows, at least 1, got actions 3, observations 4"
    refused(message, rows | {"actions": obs[:3]})
    refused("arrays need .* at least 1, got .*observations 0", dict.fromkeys(rows, obs[:0]))
    refused("terminals: flags are 0 or 1, got 0.5", rows | {"terminals": obs + 0.5})
    objects = np.array([None] * 4)
    message = "observations: cannot be read: expected an array of numbers"
    refused(message, rows | {"observations": objects})
    refused(
        "observations: expected numbers .*, got <U1",
        rows | {"observations": np.array(list("abcd"))},
    )
    refused("arrays need .* observations 0", rows | {"observations": np.float32(0)})
    refused(
        "names has state; its keys are episode_ends, ",
        rows,
        where=".*",
        names={"state": "observations"},
    )
    refused("there is no array x for obs", rows, names={"obs": "x"})
    refused("there is no array .'a': 'x'.* for obs", rows, names={"obs": {"a": "x"}})
    for ends in ([1, 3], [3, 1, 4]):
        refused(
            "ends: expected numbers that rise to 4",
            rows | {"ends": np.array(ends)},
            names={"episode_ends": "ends"},
        )
    message = "capacity=3 is too small: an episode reaches row 4 of 3; datasets.required_capacity"
    refused(message, rows, buffer("next_step", 3), where="")
    refused("a dataset has episodes", rows, jr.items(capacity=8, batch_size=1), where="")
    with pytest.raises(ValueError, match="from_arrays: there is no transition"):
        datasets.from_arrays([], plain)


def test_input_that_does_not_fit_together_is_refused():
    """By an error that names the array."""
    six, ends = np.arange(6, dtype=np.float32), np.array([0, 0, 1, 0, 0, 1], bool)
    rows = dict.fromkeys(("observations", "actions", "rewards"), six) | {"terminals": ends}
    plain = buffer("next_step")
    seven = np.arange(7, dtype=np.float32)
    numbers = np.array([5, 3, 6])
    for message, source, names in (
        ("arrays need the same number of rows", rows | {"observations": seven}, None),
        (
            "next observations must be like observations, float32.6.; they are float32.6, 1.",
            rows | {"next_obs": six[:, None]},
            None,
        ),
        ("next observations must be like", rows | {"next_obs": six.astype(int)}, None),
        ("next observations", rows | {"obs": {"a": six}, "next_obs": {"c": six}}, {"obs": "obs"}),
        (
            "episode_ends: expected numbers that rise",
            rows | {"episode_ends": numbers.astype("u8")},
            None,
        ),
        ("episode_ends: expected whole numbers", rows | {"episode_ends": numbers * 1.0}, None),
        (
            "episode_ends: expected numbers that rise",
            rows | {"episode_ends": np.array([-3, 6])},
            None,
        ),
        ("episode_ends: expected one array", rows | {"episode_ends": {"a": numbers}}, None),
        ("episode_index: expected whole numbers", rows | {"episode_index": six}, None),
        ("names has 5, which is no name", rows, {"obs": 5}),
        ("there is no array .* for action", rows, {"action": None}),
        ("there is no array .* for obs", rows | {"observations": {}}, None),
        (
            "flags are of 2 and 3 agents",
            rows | {"terminals": np.zeros((6, 2)), "timeouts": np.zeros((6, 3))},
            None,
        ),
        ("actions: cannot be read", rows | {"actions": [[1], [1, 2]]}, None),
        ("expected a mapping of arrays, or an iterable", "abc", None),
        ("expected a mapping of arrays, or an iterable", None, None),
        ("expected a mapping of arrays, or an iterable", six, None),
    ):
        with pytest.raises(ValueError, match=f"from_arrays: .*{message}"):
            datasets.from_arrays(source, plain, names=names)
    for flags in (np.zeros(1, bool), np.array([0, 2]), np.zeros((2, 1), bool)):
        one = datasets.Episode(six[:3], six[:2], six[:2], np.zeros(2, bool), flags, "x")
        with pytest.raises(ValueError, match="episode x: truncations: expected 2 flags, 0 or 1"):
            datasets.from_episodes([one], plain)
    one = datasets.Episode(six[:3], six[:2], six[:2], *np.zeros((2, 2), bool), "x")
    for message, other in (
        (r"obs: got float32\[1\], expected float32\[\]", one._replace(observations=six[:3, None])),
        ("differ in action, action.a", one._replace(actions={"a": six[:2]})),
    ):
        with pytest.raises(ValueError, match=f"from_episodes: episode x: .*{message}"):
            datasets.from_episodes([one, other], plain)
    for options in ({"num_envs": 0}, {"autoreset": "other"}):
        with pytest.raises(ValueError, match="required_capacity: "):
            datasets.required_capacity(rows, **options)


def episodes_of(arrays, **options):
    """Return the observations of each episode of a source."""
    replay = buffer("next_step")
    state = datasets.from_arrays(arrays, replay, **options)
    return [one.observations.tolist() for one in datasets.to_episodes(replay, state)]


def test_extras_may_have_a_row_for_each_observation():
    """As Minari's infos. The last, of the final observation, is left out."""
    seven, six, none = np.arange(7, dtype=np.float32), np.zeros(6, np.float32), np.zeros(6, bool)
    replay, ends = buffer("next_step"), np.arange(6) == 5
    rows = {"actions": six, "rewards": six, "terminations": ends, "truncations": none}
    infos = {"position": 10 * seven, "number": np.arange(6)}
    group = {"0": rows | {"observations": seven, "infos": infos}}
    one = datasets.Episode(seven, six, six, ends, none, extras=infos)
    names = {"extras": "infos"}
    for state in (
        datasets.from_arrays(group, replay, names=names),
        datasets.from_episodes([one], replay),
    ):
        (found,) = datasets.to_episodes(replay, state)
        assert found.extras["position"].tolist() == [0, 10, 20, 30, 40, 50]
        assert found.extras["number"].tolist() == [0, 1, 2, 3, 4, 5]
    assert datasets.required_capacity(group, names=names) == 7
    longer = {"0": group["0"] | {"infos": {"position": np.arange(8)}}}
    with pytest.raises(ValueError, match=r"arrays need the .*, position 8, observations 7"):
        datasets.from_arrays(longer, replay, names=names)
    with pytest.raises(ValueError, match=r"extras.position: expected 6 numbers or arrays, got"):
        datasets.from_episodes([one._replace(extras={"position": np.arange(8)})], replay)


def test_ends_that_are_easily_missed(tmp_path):
    six, none = np.arange(6, dtype=np.float32), np.zeros(6, bool)
    rows = dict.fromkeys(("observations", "actions", "rewards"), six) | {"terminals": none}
    # one agent terminates, the other one is truncated; given as one array, or for each agent
    first, second = none.copy(), none.copy()
    first[2] = second[2] = first[5] = second[5] = True
    for flags in (
        {"terminals": np.stack([first, none], 1), "timeouts": np.stack([none, second], 1)},
        {"terminals": {"a": first, "b": none}, "timeouts": {"a": none, "b": second}},
    ):
        assert episodes_of(rows | flags) == [[0, 1, 2], [3, 4, 5]]
    # next observations tell of an end that numbers of episodes do not
    jump = np.array([0, 1, 2, 50, 51, 52], np.float32)
    both = rows | {"observations": jump, "next_observations": jump + 1, "episode_index": none + 0}
    assert episodes_of(both) == [[0, 1, 2, 3], [50, 51, 52, 53]]
    # NaN is equal to itself
    gap = np.where(six == 3, np.nan, six)
    after = np.append(gap[1:], np.float32(6))
    (whole,) = episodes_of(rows | {"observations": gap, "next_observations": after})
    np.testing.assert_array_equal(whole, [0, 1, 2, np.nan, 4, 5, 6])
    # keys may be numbers; other orders of bytes; arrays without elements; members that nobody reads
    assert episodes_of({10: rows, 9: rows | {"observations": six + 100}}) == [
        [100, 101, 102, 103, 104, 105],
        [0, 1, 2, 3, 4, 5],
    ]
    big = {name: values.astype(values.dtype.newbyteorder(">")) for name, values in rows.items()}
    big |= {"actions": np.zeros((6, 0), np.float32), "unused": np.array([None] * 6)}
    assert episodes_of(npz(tmp_path, big)) == [[0, 1, 2, 3, 4, 5]]


def test_damaged_files_are_refused(tmp_path):
    """The error names the file and the array; of a file that is cut, the file."""
    obs = np.random.default_rng(0).random((4000, 4))
    rows = {"observations": obs, "actions": obs, "rewards": obs[:, 0], "terminals": obs[:, 0] > 1}
    for source, name in ((npz, "a.npz"), (compressed, "a.npz"), (parquet, "1.parquet")):
        source(tmp_path, rows)
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        opened = datasets.open_npz if name == "a.npz" else datasets.open_parquet
        with pytest.raises(ValueError, match=f"open_.*: .*{name}: "):
            opened(path)
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes(500) + whole[middle + 500 :])
        with pytest.raises(ValueError, match=rf"from_arrays: .*{name}: \w+: cannot be read"):
            datasets.from_arrays(opened(path), buffer("next_step", 8192))
    with pytest.raises(ValueError, match=r"from_arrays: .*: cannot be read: no such file"):
        datasets.from_arrays({name: _Closed() for name in rows}, buffer("next_step", 8192))
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"open_parquet: .*none: there is no row in 0 Parquet"):
        datasets.open_parquet(tmp_path / "none")


class _Closed:
    """An array whose file is gone."""

    shape, dtype = (4,), np.dtype(np.float32)

    def __getitem__(self, part):
        raise OSError("no such file")


def test_large_episodes_are_read_in_parts(tmp_path):
    """Memory beside the state is a few blocks: 160 MiB of images that are one episode, in an HDF5
    group, or in one row group of Parquet."""
    pytest.importorskip("h5py", reason="h5py is not installed")
    pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    code = """
import resource, sys, h5py, pyarrow
from pyarrow import parquet
import jax, numpy as np, jaxreplay as jr
from jaxreplay import datasets

def write(path, num_rows):
    with h5py.File(path, "w") as file:
        for name, shape in ("obs", (64, 64)), ("action", (2,)), ("reward", ()):
            kind, chunk = "u1" if name == "obs" else "f4", (8, *shape)
            values = file.create_dataset("demo/" + name, (num_rows, *shape), kind, chunks=chunk)
            for start in range(0, num_rows, 512):
                values[start : start + 512] = np.ones((min(512, num_rows - start), *shape), kind)

def write_parquet(path, num_rows):
    image = pyarrow.FixedSizeListArray.from_arrays(np.ones(num_rows * 4096, "u1"), 4096)
    zeros = np.zeros(num_rows, "f4")
    table = {"obs": image, "action": zeros, "reward": zeros, "done": zeros > 0}
    parquet.write_table(pyarrow.table(table), path, row_group_size=num_rows)

def most_memory(source, num_rows):
    buffer = jr.uniform(capacity=40_961, batch_size=2, autoreset="next_step")
    state = datasets.from_arrays(source, buffer)
    assert int(state.counters.filled.sum()) == num_rows, state.counters
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

if sys.argv[1] == "write":
    for number, num_rows in enumerate((2048, 40_960)):
        write(f"{number}.h5", num_rows)
        write_parquet(f"{number}.parquet", num_rows)
else:
    for path, opened in (("{}.h5", h5py.File), ("{}.parquet", datasets.open_parquet)):
        few = most_memory(opened(path.format(0)), 2048)
        print(most_memory(opened(path.format(1)), 40_960) - few)
"""
    output_of(code, "write", cwd=tmp_path)  # which takes more memory
    assert max(map(float, output_of(code, "read", cwd=tmp_path).split())) < 64  # MiB


def write_lerobot(folder, lengths, version=3, kept=slice(None)):
    """Write a dataset as LeRobot does: `version` 3 has two episodes a file, version 2 one. Each
    number of a frame is in its state, its action, an image, and a frame of a video. Of the rows of
    each episode, a part is kept, but all frames of the videos."""
    pyarrow = pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    av = pytest.importorskip("av", reason="the lerobot extra is not installed")
    image = pytest.importorskip("PIL.Image", reason="the lerobot extra is not installed")
    from pyarrow import parquet

    def png(number):
        file = io.BytesIO()
        image.fromarray(np.full((5, 4, 3), number, np.uint8)).save(file, "png")
        return {"bytes": file.getvalue(), "path": "a.png"}

    def video(path, numbers):
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", 10)
            stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
            for number in numbers:
                pixels = np.full((16, 32, 3), 10 * number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
            container.mux(stream.encode())

    numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    per_file, about, num_rows = (2 if version == 3 else 1), [], 0
    each = [*enumerate(numbers)]
    for file_index, first in enumerate(range(0, len(each), per_file)):
        some = each[first : first + per_file]
        start = 0
        tables = []
        for index, own in some:
            first, num_frames, own = own[0], len(own), own[kept]
            is_last = own == own[-1]
            tables.append(
                {
                    "observation.state": [[float(x), x + 0.5] for x in own],
                    "observation.png": [png(x) for x in own],
                    "observation.text": ["a"] * len(own),
                    "action": [[float(x)] for x in own],
                    "next.reward": own.astype(np.float32),
                    "next.done": is_last,
                    "next.success": is_last & (index == 2),
                    "timestamp": (own - first) / np.float32(10),
                    "episode_index": np.full(len(own), index),
                    "task_index": np.full(len(own), index % 2),
                }
            )
            time = "videos/observation.video/from_timestamp"
            one = {"episode_index": index, "length": len(own), "tasks": [f"task {index % 2}"]}
            if version == 3:
                one |= {"data/chunk_index": 0, "data/file_index": file_index, time: start / 10}
                one |= {
                    f"videos/observation.video/{key}_index": n
                    for key, n in (("chunk", 0), ("file", file_index))
                }
                one |= {"dataset_from_index": num_rows, "stats/action/min": [0.0]}
            about.append(one)
            start, num_rows = start + num_frames, num_rows + len(own)
        name = f"file-{file_index:03d}" if version == 3 else f"episode_{file_index:06d}"
        (folder / "data" / "chunk-000").mkdir(parents=True, exist_ok=True)
        table = pyarrow.concat_tables([pyarrow.table(one) for one in tables])
        parquet.write_table(table, folder / "data" / "chunk-000" / f"{name}.parquet")
        whole = np.concatenate([own for _, own in some])
        place = (
            ("observation.video", "chunk-000")
            if version == 3
            else ("chunk-000", "observation.video")
        )
        video(folder.joinpath("videos", *place, f"{name}.mp4"), whole)
    meta = folder / "meta"
    meta.mkdir()
    tasks = [{"task_index": nth, "task": f"task {nth}"} for nth in range(2)]
    if version == 3:
        (meta / "episodes").mkdir()
        parquet.write_table(pyarrow.Table.from_pylist(about), meta / "episodes" / "a.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(tasks), meta / "tasks.parquet")
    else:
        for name, lines in (("episodes", about), ("tasks", tasks)):
            (meta / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kinds = {
        "observation.state": "float32",
        "observation.png": "image",
        "observation.text": "string",
    }
    kinds |= {"observation.video": "video", "action": "float32", "next.reward": "float32"}
    kinds |= dict.fromkeys(("next.done", "next.success"), "bool")
    kinds |= {"timestamp": "float32"} | dict.fromkeys(("episode_index", "task_index"), "int64")
    file = "file-{file_index:03d}" if version == 3 else "episode_{episode_index:06d}"
    data = "data/chunk-{chunk_index:03d}/" if version == 3 else "data/chunk-{episode_chunk:03d}/"
    videos = "videos/{video_key}/chunk-{chunk_index:03d}/"
    videos = videos if version == 3 else "videos/chunk-{episode_chunk:03d}/{video_key}/"
    info = {"codebase_version": f"v{version}.0", "fps": 10, "chunks_size": 1000}
    info |= {"data_path": f"{data}{file}.parquet", "video_path": f"{videos}{file}.mp4"}
    info |= {"features": {name: {"dtype": kind} for name, kind in kinds.items()}}
    (meta / "info.json").write_text(json.dumps(info))
    return folder


LENGTHS = [4, 1, 3, 5]


@FORMS
@pytest.mark.parametrize("version", [2, 3])
def test_a_lerobot_dataset(form, version, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 2500)
    root, replay = write_lerobot(tmp_path / "d", LENGTHS, version), buffer(form)
    source = datasets.open_lerobot(root)
    assert (source.tasks, source.total_steps) == ({0: "task 0", 1: "task 1"}, 13)
    extras = {"task": "task_index", "time": "timestamp"}
    state = datasets.from_arrays(source, replay, names={"extras": extras})
    obs = state.rows.steps.obs
    assert {key: leaf.shape[1:] for key, leaf in obs.items()} == {
        "state": (2,),
        "png": (5, 4, 3),
        "video": (16, 32, 3),
    }
    pairs = {(0, 1), (1, 2), (2, 3), (5, 6), (6, 7), (7, None), (8, 9), (9, 10), (10, 11), (11, 12)}
    assert transitions(replay, state, lambda obs: obs["state"][:, :1]) == {
        (a, a, a, 0 if b is None else 0.5, b) for a, b in pairs
    }
    flags = np.asarray(state.rows.flags)
    taken = np.flatnonzero((flags != 0) & ((flags & row_flags.FINAL) == 0))
    number = obs["state"][taken, 0]
    assert (obs["png"][taken] == number[:, None, None, None]).all()
    assert np.abs(obs["video"][taken].mean(axis=(1, 2, 3)) - 10 * number).max() < 3  # it is lossy
    first = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)
    which = number.astype(int)
    stored = jax.tree.map(lambda leaf: np.asarray(leaf)[taken], state.rows.steps.extras)
    np.testing.assert_allclose(stored["time"], (which - first[which]) / 10, atol=1e-6)
    np.testing.assert_array_equal(stored["task"], np.repeat([0, 1, 0, 1], LENGTHS)[which])
    if form == "same_step_no_final_obs":  # chunks are of all frames, an episode's last too
        view = jr.views.ChunkView(obs=(-1, 0), action=3)
        check_chunks(dataclasses.replace(replay, view=view), state, LENGTHS)
    chosen = datasets.open_lerobot(root, episodes=[3, 1])
    names = {"obs": {"top": "observation.video"}, "reward": None}
    state = datasets.from_arrays(chosen, replay, names=names)
    assert state.rows.steps.obs.keys() == {"top"}
    batch = jax.device_get(everything(replay)(state, 0))
    assert {*batch.experience.action[batch.is_valid, 0].tolist()} == {*range(8, 12)}
    # frame 4 has no next observation in the file, and frame 12 none either
    num_rows = {"next_step": 5, "same_step": 5, "same_step_no_final_obs": 6}[form]
    assert int(state.counters.filled.sum()) == num_rows


def test_lerobot_datasets_that_are_damaged(tmp_path):
    root, replay = write_lerobot(tmp_path / "d", LENGTHS), buffer("next_step")

    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            datasets.from_arrays(datasets.open_lerobot(root, **options), replay)

    def changed(path, change):
        """Damage a file, and return what mends it."""
        whole = (root / path).read_bytes()
        (root / path).write_bytes(change(whole))
        return lambda: (root / path).write_bytes(whole)

    refused("open_lerobot: .*d: there is no 7", episodes=[1, 7])
    refused("open_lerobot: .*d is no dataset: ", episodes=[1.5])
    from pyarrow import parquet

    meta = root / "meta" / "episodes" / "a.parquet"
    table = parquet.read_table(meta)
    parquet.write_table(table.take([1, 2, 3]), meta)  # the first episode of a file is not listed
    refused("rows of other episodes, .0.")
    parquet.write_table(table.take([3, 2, 1, 0]), meta)
    assert (
        datasets.required_capacity(datasets.open_lerobot(root), 1, "same_step_no_final_obs") == 13
    )
    assert datasets.open_lerobot(root, [1, 1]).total_steps == 1
    parquet.write_table(table.drop_columns("dataset_from_index"), meta)
    refused("there is no 'dataset_from_index'")
    parquet.write_table(table, meta)
    for path, change, message in (
        (
            "videos/observation.video/chunk-000/file-001.mp4",
            lambda x: x[:300],
            "video: cannot be read: .*file-001.mp4",
        ),
        ("data/chunk-000/file-001.parquet", lambda x: x[:300], "file-001.parquet"),
        ("meta/info.json", lambda x: x[:30], "open_lerobot: .*d is no dataset"),
        ("meta/info.json", lambda x: x.replace(b"v3", b"v9"), "it has version v9; known are v2"),
        ("meta/info.json", lambda x: x.replace(b'"fps"', b'"f"'), "there is no 'fps'"),
        ("meta/info.json", lambda x: x.replace(b'"action"', b'"act"'), "there is no array actions"),
    ):
        mend = changed(path, change)
        refused(message)
        mend()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kept", [slice(2, None), slice(None, None, 2), slice(3, 4)])
def test_frames_of_lerobot_are_those_at_the_timestamps(kept, version, tmp_path):
    """Of a dataset whose rows were cut at the beginning, or thinned out."""
    lengths = [6, 5, 8]
    source = datasets.open_lerobot(write_lerobot(tmp_path / "d", lengths, version, kept))
    for own, numbers in zip(
        source.values(), np.split(np.arange(19), np.cumsum(lengths)[:-1]), strict=True
    ):
        obs = own["observations"]
        state, video = (obs[name][: len(numbers[kept])] for name in ("state", "video"))
        assert state[:, 0].tolist() == numbers[kept].tolist()
        # as from_arrays does, a few rows at a time
        parts = [video, *(obs["video"][at : at + 2] for at in range(0, len(state), 2))]
        for number, frames in (
            (state[:, 0], parts[0]),
            (state[:, 0], np.concatenate(parts[1:])),
        ):
            assert np.abs(frames.mean(axis=(1, 2, 3)) - 10 * number).max() < 3  # it is lossy


def test_rows_of_lerobot_without_a_frame_are_refused(tmp_path):
    pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    import pyarrow
    from pyarrow import parquet

    root = write_lerobot(tmp_path / "d", LENGTHS)
    data = root / "data" / "chunk-000" / "file-000.parquet"
    table = parquet.read_table(data)
    column = table.column_names.index("timestamp")
    for times, time in (
        ([0, 0.1, 0.2, 9.3, 0.1], "9.300"),
        ([0, 0.1, 0.26, 0.16, 0.1], "0.160"),  # a frame before: times must not fall
        ([-0.06, 0.1, 0.2, 0.3, 0.1], "-0.060"),
    ):
        times = pyarrow.array(np.float32(times))
        parquet.write_table(table.set_column(column, "timestamp", times), data)
        with pytest.raises(ValueError, match=f"file-000.mp4 has no frame at {time} seconds"):
            datasets.open_lerobot(root)["0"]["observation.video"][:4]
    info = root / "meta" / "info.json"
    info.write_text(info.read_text().replace('"timestamp"', '"time"'))
    with pytest.raises(ValueError, match="has no column timestamp"):
        datasets.open_lerobot(root)["0"]["observation.video"][:4]


def write_video(path, form, numbers, width=70):
    """Write frames of a number each, losslessly, in a form of pixels: gray ones, or [H, W, C]."""
    av = pytest.importorskip("av", reason="the lerobot extra is not installed")
    codec, container = ("png", "mov") if form.endswith(("be", "pal8")) else ("ffv1", "matroska")
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, 10)
        stream.width, stream.height, stream.pix_fmt = width, 16, form
        for at, number in enumerate(numbers):
            frame = av.VideoFrame(width, 16, form)
            for nth_plane, plane in enumerate(frame.planes):
                kind = "u1" if form in ("gray", "pal8") else ">u2" if form[-2:] == "be" else "<u2"
                size = plane.buffer_size // np.dtype(kind).itemsize
                is_palette = form == "pal8" and nth_plane
                values = np.arange(size) if is_palette else np.full(size, number)
                plane.update(values.astype(kind).tobytes())
            frame.pts = at
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def test_depths_in_videos_of_lerobot_are_numbers(tmp_path):
    """Not colors of 8 bits. 1839 is 7 * 256 + 47."""
    root = write_lerobot(tmp_path / "d", [3, 2])
    info_file, video = root / "meta" / "info.json", "videos/observation.video/chunk-000"
    whole = json.loads(info_file.read_text())

    def frames(form, numbers, **info):
        write_video(root / video / "file-000.mp4", form, numbers)
        whole["features"]["observation.video"] |= info
        info_file.write_text(json.dumps(whole))
        for name in info:
            del whole["features"]["observation.video"][name]
        return datasets.open_lerobot(root)["0"]["observations"]["video"][:3]

    depth = {"info": {"is_depth_map": True, "video.is_depth_map": False}}
    older = {"video_info": {"video.is_depth_map": True}}
    for form, numbers, kind, info in (
        ("gray16le", [1839, 0, 65535], np.uint16, depth),
        ("gray16be", [1839, 0, 65535], np.uint16, older),
        ("gray12le", [1839, 0, 4095], np.uint16, {}),
        ("gray12le", [1839, 0, 4095], np.uint16, depth),
        ("gray10le", [839, 0, 1023], np.uint16, {}),
        ("gray", [39, 0, 255], np.uint8, depth),
    ):
        read = frames(form, numbers, **info)
        assert (read.shape, read.dtype) == ((3, 16, 70, 1), kind)
        assert (read == np.reshape(numbers, (3, 1, 1, 1))).all()
    read = frames("gray", [39, 0, 255], info={"is_depth_map": False})
    assert (read.shape, read.dtype) == ((3, 16, 70, 3), np.uint8)
    assert (read == np.reshape([39, 0, 255], (3, 1, 1, 1))).all()
    colors = np.array([[6, 5, 4], [2, 1, 0], [254, 253, 252]]).reshape(3, 1, 1, 3)
    assert (frames("pal8", [1, 0, 63]) == colors).all()  # entries of 4 bytes: 0, 1, 2, ...
    # LeRobot's quanta: from 1 m in steps of 1 mm; and from 0 m, where depth + 1 m is doubled thrice
    keys = "video.depth_min", "video.depth_max", "video.shift", "video.use_log"
    for values, numbers, depths in (
        ((1.0, 5.095, 3.5, False), [0, 839, 4095], [1000, 1839, 5095]),
        ((0.0, 7.0, 1.0, True), [1365, 2730, 4095], [1000, 3000, 7000]),
    ):
        quantized = {"info": {"is_depth_map": True} | dict(zip(keys, values, strict=True))}
        read = frames("gray12le", numbers, **quantized)
        assert (read.shape, read.dtype) == ((3, 16, 70, 1), np.uint16)
        assert (read == np.reshape(depths, (3, 1, 1, 1))).all()
    some = {"info": {"is_depth_map": True, "video.use_log": False}}
    for form, info, message in (
        ("gray16le", quantized, "observation.video: depths are quantized to 12 bits by .*gray16le"),
        ("gray12le", some, "observation.video: depths are quantized .*info.json {'is_depth_map'"),
        ("yuv420p", depth, "observation.video: .*file-000.mp4 has a depth map in the form yuv420p"),
        ("yuv420p10le", {}, "observation.video: .*file-000.mp4 has frames in the form yuv420p10le"),
        ("gbrp12le", {}, "observation.video: .* has frames in the form gbrp12le; expected gray or"),
        ("bgra", {}, "observation.video: .*has frames in the form bgra; .*-pix_fmt yuv420p, or"),
    ):
        with pytest.raises(ValueError, match=message):
            frames(form, [0, 1, 2], **info)


def test_tasks_of_lerobot_are_found_by_their_numbers(tmp_path):
    """Of version 2, in lines of JSON with other lines, and of version 3, whose texts are the index
    of a data frame."""
    pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    import pyarrow
    from pyarrow import parquet

    root = write_lerobot(tmp_path / "d", LENGTHS, 2)
    tasks = root / "meta" / "tasks.jsonl"
    lines = [{"task_index": 7, "task": "lift\u2028it"}, {"task_index": 3, "task": "lever \u00fc"}]
    first, second = (json.dumps(line, ensure_ascii=False) for line in lines)
    tasks.write_bytes(f"{first}\n \r\n\n{second}\n".encode())
    assert datasets.open_lerobot(root).tasks == {3: "lever \u00fc", 7: "lift\u2028it"}
    tasks.write_text(f"{first}\n\n{second[:-3]}\n")
    with pytest.raises(ValueError, match=r"open_lerobot: .*d is no dataset: .*tasks.jsonl: line 3"):
        datasets.open_lerobot(root)
    root = write_lerobot(tmp_path / "e", LENGTHS, 3)
    for name in ("task", "__index_level_0__", "text"):
        table = {"task_index": [4, 0], name: ["d", "a"]}
        parquet.write_table(pyarrow.table(table), root / "meta" / "tasks.parquet")
        if name != "text":
            assert datasets.open_lerobot(root).tasks == {0: "a", 4: "d"}
    with pytest.raises(ValueError, match=r"open_lerobot: .*e: there is no '__index_level_0__'"):
        datasets.open_lerobot(root)


def test_a_lerobot_dataset_names_no_file_beyond_its_folder(tmp_path):
    """A link in the folder is the user's own, as in a cache of downloads."""
    root, replay = write_lerobot(tmp_path / "d", LENGTHS), buffer("next_step")
    video, info = root / "videos" / "observation.video" / "chunk-000", root / "meta" / "info.json"
    whole = info.read_text()
    (video / "file-000.mp4").rename(tmp_path / "file-000.mp4")
    (video / "file-000.mp4").symlink_to(tmp_path / "file-000.mp4")
    assert len(datasets.open_lerobot(root)["0"]["observation.video"][:4]) == 4
    for key, path in (
        ("video_path", f"{tmp_path}/file-{{file_index:03d}}.mp4"),
        ("video_path", "../file-{file_index:03d}.mp4"),
        ("video_path", "videos/../../d2/file.mp4"),
        ("data_path", f"{tmp_path}/file-{{file_index:03d}}.parquet"),
    ):
        info.write_text(json.dumps(json.loads(whole) | {key: path}))
        with pytest.raises(ValueError, match=r"from_arrays: .* is not below .*d, whose data name"):
            datasets.from_arrays(datasets.open_lerobot(root), replay)


def test_images_of_parquet(tmp_path, monkeypatch):
    """Numbers of more than 8 bits, palettes, files that are named, and what is refused."""
    pyarrow = pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    image = pytest.importorskip("PIL.Image", reason="the lerobot extra is not installed")
    from pyarrow import parquet

    def encoded(made, form="png", **options):
        file = io.BytesIO()
        made.save(file, form, **options)
        return file.getvalue()

    def read(*cells):
        parquet.write_table(pyarrow.table({"x": [*cells]}), tmp_path / "a.parquet")
        return datasets.open_parquet(tmp_path / "a.parquet")["x"][: len(cells)]

    def cell(content, path=None):
        return {"bytes": content, "path": path}

    def chunk(kind, content):
        summed = kind + content
        return struct.pack(">I", len(content)) + summed + struct.pack(">I", zlib.crc32(summed))

    depths = np.arange(20, dtype=np.uint16).reshape(4, 5) * 300
    meters = depths.astype(np.float32) / 7
    one = image.fromarray(depths.astype(np.uint8))
    blue = image.new("RGB", (5, 4), (1, 2, 250)).quantize(2)
    is_first = {"transparency": blue.getpixel((0, 0))}
    color, two = blue.convert("RGB").getpixel((0, 0)), np.uint8(depths)
    for made, expected in (
        (encoded(image.fromarray(depths)), depths),
        (encoded(image.fromarray(depths), "tiff"), depths),
        (encoded(image.fromarray(meters), "tiff"), meters),
        (encoded(one), two),
        (encoded(one.convert("LA")), np.stack([two, two * 0 + 255], 2)),
        (encoded(blue), np.full((4, 5, 3), color, np.uint8)),
        (encoded(blue, **is_first), np.full((4, 5, 4), (*color, 0), np.uint8)),
        (encoded(image.new("CMYK", (5, 4), (255, 0, 0, 0)), "jpeg"), None),
    ):
        found = read(cell(made, "a.png"))[0]
        if expected is None:  # lossy
            assert np.abs(found - np.array([0.0, 255, 255])).max() < 3
        else:
            np.testing.assert_array_equal(found, expected.reshape(4, 5, -1), strict=True)
    (tmp_path / "images").mkdir()
    image.fromarray(depths).save(tmp_path / "images" / "0.png")
    for path in ("images/0.png", f"{tmp_path}/images/0.png"):
        np.testing.assert_array_equal(read(cell(None, path))[0, ..., 0], depths)
    sides = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)  # colors of 16 bits
    rows = zlib.compress(bytes(4 * 31))
    deep = chunk(b"IHDR", sides) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    for one, message in (
        (cell(b"\x89PNG\r\n\x1a\n" + deep), "an image of more than 8 bits a color, RGB;16B"),
        (cell(None, "images/1.png"), "No such file or directory: .*images/1.png"),
        (cell(None, "../0.png"), "0.png is not below "),
        (cell(None, "/etc/0.png"), "/etc/0.png is not below "),
        (cell(None), "it has rows without an image"),
        (None, "it has rows without an image"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            read(one, cell(encoded(blue)))
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 15)  # beyond it Pillow warns, at twice it raises
    with pytest.raises(Warning, match=r"Image size .20 pixels. exceeds limit"):
        read(cell(encoded(blue)))


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

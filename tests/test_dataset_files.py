"""Episodes from arrays of files and folders, from other episodes, and from LeRobot's datasets."""

import itertools

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay.datasets import arrays, episodes
from tests.conftest import ALL, SOAK
from tests.support.buffers import everything, jitted
from tests.support.refusals import check_table, refused
from tests.support.replays import output_of
from tests.support.steps import nth, plain_step

FORMS = "next_step", "same_step", "same_step_no_final_obs"
BLOCKS = 1, 100, 2**22  # bytes that are read at once
E = 3


def buffer(form="next_step", **options):
    sizes = {"capacity": 300, "num_envs": E, "batch_size": 8, "gamma": 0.5, "autoreset": form}
    return jr.transitions(**sizes | options)


@pytest.fixture(autouse=True)
def _steps(monkeypatch):
    monkeypatch.setattr(episodes, "_MOST_STEPS", 8)  # of each env, that are added at once


def transitions(replay, state, main=lambda obs: obs):
    """Return the set of (obs, action, reward, discount, next_obs where it is read)."""
    batch = jax.device_get(everything(replay)(state, 0))
    t = batch.experience
    columns = main(t.obs), t.action, t.reward, t.discount, main(t.next_obs)
    rows = list(zip(*(x[batch.is_valid].ravel().tolist() for x in columns), strict=True))
    assert len(rows) == len(set(rows))
    return {(*row[:4], row[4] if row[3] else None) for row in rows}


# Random episodes, written in each form, and what is lost in it.


def made(seed=0, num_episodes=12):
    """Return random episodes whose observations all differ, as columns of rows. The last one is
    truncated."""
    r = np.random.default_rng(seed)
    lengths, is_terminated = r.integers(1, 9, num_episodes), r.random(num_episodes) < 0.5
    is_terminated[-1] = False
    episode = np.repeat(np.arange(num_episodes), lengths)
    number = np.arange(len(episode), dtype=np.int32)
    obs = (number + episode).astype(np.float32)  # a final observation has a number, too
    is_last = np.append(np.diff(episode) == 1, True)
    end = is_last & is_terminated[episode]
    columns = {"observations": obs, "actions": number, "rewards": (number % 7).astype(np.float32)}
    return columns | {"terminals": end, "timeouts": is_last & ~end, "next_observations": obs + 1}


def expected(columns, form, has_final=True, has_reward=True, has_ends=True):
    """Return what `transitions` returns. Truncated ends need final observations."""
    *values, end, cut, after = columns.values()
    end, cut = end & has_ends, cut | (end & (not has_ends))
    is_kept = ~cut | (has_final and form != FORMS[2])
    rows = zip(*(x[is_kept].tolist() for x in (*values, end, after)), strict=True)
    return {(o, a, r * has_reward, 0.5 * (not e), None if e else n) for o, a, r, e, n in rows}


def pieces(columns):
    """Return the columns of each episode."""
    stops = np.flatnonzero(columns["terminals"] | columns["timeouts"]) + 1
    return [
        {name: x[start:stop] for name, x in columns.items()}
        for start, stop in itertools.pairwise([0, *stops.tolist()])
    ]


def npz(folder, rows, write=np.savez):
    write(folder / "a.npz", **rows)
    return datasets.open_npz(folder / "a.npz")


def compressed(folder, rows):
    return npz(folder, rows, np.savez_compressed)


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


def without_timeouts(_, rows):
    """Ends are found where the next row has another observation."""
    return rows, {"names": {"truncated": None}}, {}


def without_next_observations(_, rows):
    """As D4RL's: the last transition of a truncated episode is left out, and no pair is false."""
    rows = rows | {name: rows[name][:, None] for name in ("rewards", "terminals")}
    rows |= {"timeouts": rows["timeouts"].astype(np.float32)}
    del rows["next_observations"]
    return rows, {}, {"has_final": False}


def ends_of_episodes(_, rows):
    """As of a diffusion policy, by paths."""
    ends = np.flatnonzero(rows["terminals"] | rows["timeouts"]) + 1
    file = {"data": rows, "meta": {"episode_ends": ends}}
    fields = {"obs": "observations", "action": "actions", "reward": "rewards"}
    names = {key: f"data/{name}" for key, name in (fields | {"terminated": "terminals"}).items()}
    return file, {"names": names | {"episode_ends": "meta/episode_ends"}}, {"has_final": False}


def rows_of_final_observations(folder, rows):
    """As OGBench's, without rewards. Next observations say nothing then."""
    parts = []
    for own in pieces(rows):
        final, at = own["next_observations"][-1:], np.arange(len(own["actions"]) + 1)
        parts.append(
            {"observations": np.append(own["observations"], final), "terminals": at == at[-1]}
        )
        parts[-1]["actions"] = np.append(own["actions"], -1)
    file = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    file = npz(folder, file | {"next_observations": 0 * file["observations"]})
    lost = {"has_reward": False, "has_ends": False}
    return file, {"names": {"reward": None}, "final_rows": True}, lost


def by_episode(folder, rows):
    """As robomimic's, with next observations, or with a final one; some episodes have no flag, and
    one has no row."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    own = pieces(rows)
    with h5py.File(folder / "a.hdf5", "w") as file:
        for nth_one, one in enumerate([*own, {name: x[:0] for name, x in own[0].items()}]):
            group, has_final = file.create_group(f"data/demo_{nth_one}"), nth_one % 2
            final = one["next_observations"][-1:][:has_final]
            group["obs"] = np.append(one["observations"], final)
            if not has_final:
                group["next_obs"] = one["next_observations"]
            group["actions"], group["rewards"] = one["actions"], one["rewards"]
            if one["terminals"].any():
                group["dones"] = one["terminals"]
    return h5py.File(folder / "a.hdf5")["data"], {}, {}


def list_of_envs(_, rows):
    """As of a vault, with flags of two agents; the second env's last row has no end."""
    envs, num = [], len(pieces(rows)) // 2
    for some in (pieces(rows)[:num], pieces(rows)[num:]):
        env = {name: np.concatenate([one[name] for one in some]) for name in rows}
        env |= {"terminals": np.repeat(env["terminals"][:, None], 2, axis=1)}
        del env["next_observations"]
        envs.append(env)
    envs[1]["timeouts"][-1] = False
    return envs, {}, {"has_final": False}


def list_of_episodes(_, rows):
    made = [
        datasets.Episode(
            np.append(one["observations"], one["next_observations"][-1:]),
            one["actions"],
            one["rewards"],
            one["terminals"],
            one["timeouts"],
        )
        for one in pieces(rows)
    ]
    return made, {}, {}


def flat(write):
    return lambda folder, rows: (write(folder, rows), {}, {})


SOURCES = {
    "dict": flat(lambda _, rows: rows),
    **{write.__name__: flat(write) for write in (npz, compressed, hdf5, tensorstores, parquet)},
    **{
        source.__name__: source
        for source in (
            *(without_timeouts, without_next_observations, ends_of_episodes),
            *(rows_of_final_observations, by_episode, list_of_envs, list_of_episodes),
        )
    },
}


def episodes_in(source, form="next_step", names=None, final_rows=False):
    """Return the steps and the final observation of each episode of a source, as `listed` does, and
    the number of rows that they take."""
    found, steps, num_rows = [], [], 0
    for _, blocks in arrays._parts("from_arrays", source, names, final_rows):
        for block, is_last in episodes.steps_of(blocks, form, final_rows):
            num_rows += len(is_last) + (form == "same_step") * int(is_last.sum())
            for at, is_end in enumerate(is_last):
                one = nth(block, at)
                steps.append((one.obs, one.action, bool(one.terminated), bool(one.truncated)))
                if is_end:
                    final = steps.pop()[0] if form == "next_step" else one.final_obs
                    found.append((steps, final))
                    steps = []
    assert not steps
    return found, num_rows


def observations_of(source, **options):
    """Return the observations of each episode of a source."""
    found, _ = episodes_in(source, **options)
    return [[*(float(obs) for obs, *_ in steps), float(final)] for steps, final in found]


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_fills_a_buffer(name, tmp_path, monkeypatch):
    """With all that its form does not lose, in blocks of any size, in which episodes lie in
    several; and `required_capacity` is exact."""
    for seed, (form, block_bytes) in enumerate(
        itertools.product(FORMS, BLOCKS) if ALL else zip(FORMS, BLOCKS, strict=True)
    ):
        monkeypatch.setattr(arrays, "BLOCK_BYTES", block_bytes)
        (folder := tmp_path / f"{seed}").mkdir()
        file, options, lost = SOURCES[name](folder, made(seed))
        replay = buffer(form, allow_mask=form != FORMS[1])
        state = datasets.from_arrays(file, replay, **options)
        assert transitions(replay, state) == expected(made(seed), form, **lost)
        filled = np.asarray(state.counters.filled)
        if form == "next_step":  # each episode goes to the env with the fewest rows
            used = [0] * E
            for one in observations_of(file, **options):
                used[used.index(min(used))] += len(one)
            assert filled.tolist() == used
        assert datasets.required_capacity(file, E, form, **options) == E * filled.max()


def listed(rows, form, final_rows):
    """Return the steps of each episode, [(obs, action, terminated, truncated)], and its final
    observation where it is known, by a loop over lists."""
    obs, after, total = rows["obs"], rows.get("next_obs"), len(rows["obs"])
    part = np.searchsorted(rows.get("episode_ends", [total]), np.arange(total), side="right")
    number = rows.get("episode_index", part) if "episode_ends" not in rows else part
    found, own = [], []
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
        elif final_rows or not (is_terminated or form == FORMS[2]):
            own.pop()  # the row is the final observation
        steps = [(obs[one], one, False, False) for one in own]
        if steps:
            steps[-1] = (*steps[-1][:2], is_terminated, not is_terminated)
            found.append((steps, final))
        own = []
    return found


@pytest.mark.parametrize("form", FORMS)
def test_random_histories_are_those_of_a_loop_over_lists(form, monkeypatch):
    """In blocks of any size, with all that may end an episode, at once."""
    r = np.random.default_rng(0)
    for _ in range(20_000 if SOAK else 300 if ALL else 120):
        total, often = int(r.integers(1, 25)), r.choice([0, 0.1, 0.5, 1])
        obs = np.cumsum(r.integers(1, 3, total)).astype(np.float32)
        rows = {"obs": obs, "action": np.arange(total), "reward": obs}
        rows |= {name: r.random(total) < often * r.random() for name in ("done", "truncated")}
        if r.random() < 0.3:
            rows["episode_ends"] = np.append(np.sort(r.integers(0, total + 1, 4)), total)
        if r.random() < 0.3:
            rows["episode_index"] = np.cumsum(r.random(total) < 0.3)
        if r.random() < 0.5:
            after, is_jump = np.append(obs[1:], np.float32(99)), r.random(total) < 0.2
            rows["next_obs"] = np.where(is_jump, 1000 + obs, after).astype(np.float32)
        final_rows = bool(r.random() < 0.3)
        monkeypatch.setattr(arrays, "BLOCK_BYTES", int(r.choice([1, 30, 60, 100, 200, 10**6])))
        found, num_rows = episodes_in(rows, form, final_rows=final_rows)
        # of a row that is terminated and truncated, either may be said
        joined = lambda steps: [(*one[:3], one[2] or one[3]) for one in steps]
        either = [
            [(joined(own), None if form == FORMS[2] else final) for own, final in each]
            for each in (found, listed(rows, form, final_rows))
        ]
        assert either[0] == either[1]
        assert datasets.required_capacity(rows, 1, form, final_rows=final_rows) == num_rows


SIX, NONE, EYE = np.arange(6, dtype=np.float32), np.zeros(6, bool), np.eye(6)
ROWS = dict.fromkeys(("observations", "actions", "rewards"), SIX)
GOOD = ROWS | {"terminals": NONE}


def test_ends_that_are_easily_missed(tmp_path):
    # one agent terminates, the other one is truncated; given as one array, or for each agent
    rows, ends = GOOD, np.isin(SIX, (2, 5))
    for flags in (
        {"terminals": np.stack([ends, NONE], 1), "timeouts": np.stack([NONE, ends], 1)},
        {"terminals": {"a": ends, "b": NONE}, "timeouts": {"a": NONE, "b": ends}},
    ):
        assert observations_of(rows | flags) == [[0, 1, 2], [3, 4, 5]]
    # NaN is equal to itself
    gap = np.where(SIX == 3, np.nan, SIX)
    after = np.append(gap[1:], np.float32(6))
    (whole,) = observations_of(rows | {"observations": gap, "next_observations": after})
    np.testing.assert_array_equal(whole, [0, 1, 2, np.nan, 4, 5, 6])
    # keys may be numbers; other orders of bytes; arrays without elements; members that nobody reads
    other = rows | {"observations": SIX + 100}
    assert observations_of({10: rows, 9: other}) == [[*range(100, 106)], [*range(6)]]
    big = {name: values.astype(values.dtype.newbyteorder(">")) for name, values in rows.items()}
    big |= {"actions": np.zeros((6, 0), np.float32), "unused": np.array([None] * 6)}
    assert observations_of(npz(tmp_path, big)) == [[*range(6)]]


def test_extras_go_there_and_back():
    """They may have a row for each observation, as Minari's infos. The last, of the final
    observation, is left out."""
    seven, ends = np.arange(7, dtype=np.float32), SIX == 5
    infos = {"position": 10 * seven, "grid": np.arange(12).reshape(6, 2)}
    group = {"0": ROWS | {"observations": seven, "terminals": NONE, "infos": infos}}
    one = datasets.Episode(seven, SIX, SIX, NONE, NONE, extras=infos)
    names, replay = {"extras": "infos"}, buffer("same_step")
    for num, state in (
        (1, datasets.from_arrays(group, replay, names=names)),
        (4, datasets.from_episodes([one] * 4, replay)),
    ):
        found = [*datasets.to_episodes(replay, state)]
        assert [one.id for one in found] == [*range(num)]
        for back in found:
            np.testing.assert_array_equal(back.extras["position"], 10 * SIX)
            np.testing.assert_array_equal(back.extras["grid"], infos["grid"])
            assert back.truncations.tolist() == ends.tolist()
    assert datasets.required_capacity(group, names=names) == 7
    longer = {"0": group["0"] | {"infos": {"position": np.arange(8)}}}
    with refused(r"arrays need the .*, position 8, observations 7"):
        datasets.from_arrays(longer, replay, names=names)
    with refused(r"extras.position: expected 6 numbers or arrays, got"):
        datasets.from_episodes([one._replace(extras={"position": np.arange(8)})], replay)


# A run that goes on, and rows in files.


@pytest.mark.parametrize("form", FORMS if ALL else FORMS[:2])
def test_a_run_gets_demonstrations_and_goes_on(form):
    """Envs have taken four steps; their episodes end, the demonstrations follow, then steps. Of
    priorities a run keeps its own, and the demonstrations have the largest of them."""
    sampler = jr.Prioritized(alpha=1.0) if form == FORMS[0] else jr.Uniform()
    replay, envs = buffer(form, sampler=sampler), np.float32([1000, 2000, 3000])
    block = plain_step(np.arange(4, dtype=np.float32)[:, None] + envs)
    block = block.replace(action=np.zeros((4, E), np.int32))
    if form == "same_step":
        block = block.replace(final_obs=block.obs + 1)
    priority = [None, np.full((4, E), 5, np.float32)] if form == FORMS[0] else []
    extend = jitted(replay, "extend")
    state = extend(jitted(replay, "init")(nth(block, (0, 0))), block, *priority)
    state = datasets.from_episodes(list_of_episodes(None, made())[0], replay, into=state)
    own = {(env + at, 0, env + at, 0.5, env + at + 1) for env in envs.tolist() for at in range(3)}
    assert transitions(replay, state) == expected(made(), form) | own
    if priority:
        assert float(state.sampler.max_priority) == 5
        batch = jax.device_get(everything(replay)(state, 0))
        assert len({*batch.probability[batch.is_valid].tolist()}) == 1
    more = jax.tree.map(lambda leaf: leaf + 4 if leaf.dtype == np.float32 else leaf, block)
    own |= {(o + 4, a, r + 4, d, n + 4) for o, a, r, d, n in own}
    state = extend(state, more, *priority)
    assert transitions(replay, state) == expected(made(), form) | own


def test_rows_go_to_files_too(tmp_path):
    """Data that exceeds memory, once; then its folder is opened."""
    rows, place = made(5), tmp_path / "rows"
    replay = buffer(allow_mask=True)
    tier = jr.tiered(replay, rows=place)
    state = datasets.from_arrays(rows, tier)
    assert transitions(replay, tier.whole(state)) == expected(rows, "next_step")
    with refused("capacity=300 is too small"):
        datasets.from_arrays(
            {name: np.resize(x, 600) for name, x in rows.items()}, tier, into=state
        )
    assert transitions(replay, tier.whole(tier.newest)) == expected(rows, "next_step")
    tier.close()
    example = jr.Step(np.float32(0), np.int32(0), np.float32(0), terminated=False, truncated=False)
    with jr.Replay(replay, rows=place, example=example) as opened:
        assert len(opened) == len(expected(rows, "next_step"))
    for _ in range(2):  # a second import, or one after another that was cut off
        with refused(r"rows has [0-9]+ rows already, .* delete the folder"):
            datasets.from_arrays(rows, tier)
    state = datasets.from_arrays(rows, tier, into=tier.clear(tier.init(example)))
    assert transitions(replay, tier.whole(state)) == expected(rows, "next_step")
    with refused("tiered buffer of several envs needs allow_mask=True"):
        datasets.from_arrays(rows, jr.tiered(buffer(), rows="host"))


# What is refused.


def six(**columns):
    """Return an episode of five steps."""
    plain = {"observations": SIX, "actions": SIX[:5], "rewards": SIX[:5]}
    plain |= dict.fromkeys(("terminations", "truncations"), NONE[:5])
    return datasets.Episode(**plain | columns, id="x")


ALIKE = "arrays need the same number of rows, at least 1, got"
RISE = "episode_ends: expected numbers that rise to 6"
NONE_OF = "there is no array"
REFUSED = {
    "read({'observations': SIX})": f"""
        {NONE_OF} actions or action for action; there are observations""",
    "read(dict.fromkeys(('observations', 'actions'), SIX))": f"{NONE_OF} rewards or",
    "read(ROWS)": f"{NONE_OF} terminations or",
    "read([ROWS])": f"env 0: {NONE_OF} terminations or",
    "read(GOOD | {'observations': {}})": f"{NONE_OF}\nfor obs",
    "read(GOOD, action=None)": f"{NONE_OF}\nfor action",
    "read(GOOD, obs='x')": f"{NONE_OF} x for obs",
    "read(GOOD, obs={'a': 'x'})": f"{NONE_OF}\n'a': 'x'\nfor obs",
    "read(GOOD, obs=5)": "names has 5, which is no name",
    "read(GOOD, state='observations')": "names has state; its keys are episode_ends, ",
    "read(GOOD | {'actions': SIX[:3]})": f"{ALIKE}\nactions 3",
    "read(GOOD | {'observations': np.arange(7)})": f"{ALIKE}\nobservations 7",
    "read({name: x[:0] for name, x in GOOD.items()})": f"{ALIKE}\nobservations 0",
    "read(GOOD | {'observations': np.array([*'abcdef'])})": """
        observations: expected numbers
        , got <U1""",
    "read(GOOD | {'actions': [[1], [1, 2]]})": "actions: cannot be read",
    "read(GOOD | {'terminals': NONE + 0.5})": "terminals: flags are 0 or 1, got 0.5",
    "read(GOOD | {'terminals': EYE[:, :2], 'timeouts': EYE[:, 3:]})": """
        flags are of 2 and 3 agents""",
    "read(GOOD | {'episode_ends': np.array([1, 3])})": RISE,
    "read(GOOD | {'episode_ends': np.array([-3, 6])})": RISE,
    "read(GOOD | {'ends': np.array([5, 3, 6], 'u8')}, episode_ends='ends')": """
        ends: expected numbers that rise to 6""",
    "read(GOOD | {'episode_ends': SIX})": "episode_ends: expected whole numbers",
    "read(GOOD | {'episode_ends': {'a': np.array([6])}})": "episode_ends: expected one array",
    "read(GOOD | {'episode_index': SIX})": "episode_index: expected whole numbers",
    "read(GOOD | {'next_obs': SIX[:, None]})": """
        next observations must be like
        float32[6]; they
        float32[6, 1""",
    "read(GOOD | {'next_obs': SIX.astype(int)})": "next observations must be like",
    "read(GOOD | {'obs': {'a': SIX}, 'next_obs': {'c': SIX}}, obs='obs')": "next observations",
    "read('abc')": "expected a mapping of arrays, or an iterable",
    "read(None)": "expected a mapping of arrays, or an iterable",
    "read(SIX)": "expected a mapping of arrays, or an iterable",
    "read([])": "there is no transition",
    **{
        f"read([six(truncations={flags})])": """
            episode x: truncations: expected 5 flags, 0 or 1"""
        for flags in ("np.zeros(1, bool)", "np.arange(5)", "np.zeros((5, 1), bool)")
    },
    "read([six(), six(observations=SIX[:, None])])": "obs: got float32[1], expected float32[]",
    "read([six(), six(actions={'a': SIX[:5]})])": "action: missing, \naction.a: unexpected, ",
    "into(GOOD, buffer(capacity=9))": """
        capacity=9 is too small: an episode reaches row 6 of 3 in each of 3 envs; datasets.req""",
    "into([six()], buffer(capacity=4, num_envs=1))": """
        capacity=4 is too small: episode x reaches row 6 of 4; """,
    "into(GOOD, jr.items(capacity=8, batch_size=1))": """
        takes a buffer of steps, since items have no episodes""",
    "into(GOOD, 3)": "takes a ReplayBuffer, such as\ngot an int",
    "into(GOOD, buffer(num_agents=2))": "an episode has one flag for all agents",
    "npz_of(terminals=SIX)": "a.npz: terminals: flags",
    "npz_of(observations=np.array([None] * 6))": """
        a.npz: observations: cannot be read: expected an array of num""",
}


def test_many_rows_without_an_end_are_suspicious():
    rows = np.zeros(1_001, np.float32)
    data = dict.fromkeys(("obs", "action", "reward"), rows) | {"terminals": rows > 0}
    buffer = jr.uniform(capacity=2_000, batch_size=1, autoreset="next_step")
    with pytest.warns(UserWarning, match="no row of 1,001 is terminated, and no array says which"):
        datasets.from_arrays(data, buffer)


def test_what_does_not_fit_together_is_refused(tmp_path):
    """By an error that names the array, and the file if there is one."""
    into = datasets.from_arrays
    read = lambda source, **names: into(source, buffer(), names=names)
    npz_of = lambda **columns: read(npz(tmp_path, GOOD | columns))
    said = {typed: f"from_arrays:\n{text}" for typed, text in REFUSED.items()}
    check_table(said, {**globals(), "into": into, "read": read, "npz_of": npz_of})
    for options in ({"num_envs": 0}, {"autoreset": "other"}):
        with refused("required_capacity: "):
            datasets.required_capacity(GOOD, **options)


class Broken:
    """An array whose file is gone, or shorter than its header says."""

    shape, dtype = (6,), np.dtype(np.float32)

    def __init__(self, *kept):
        self._kept = kept

    def __getitem__(self, part):
        for length in self._kept:
            return SIX[:length][part]
        raise OSError("no such file")


def test_damaged_files_are_refused(tmp_path):
    """The error names the file and the array; of a file that is cut, the file."""
    obs = np.random.default_rng(0).random((4000, 4))
    rows = {"observations": obs, "actions": obs, "rewards": obs[:, 0], "terminals": obs[:, 0] > 1}
    for source, name in ((npz, "a.npz"), (compressed, "a.npz"), (parquet, "1.parquet")):
        source(tmp_path, rows)
        path = tmp_path / name
        whole, opened = path.read_bytes(), getattr(datasets, f"open_{path.suffix[1:]}")
        middle = len(whole) // 2
        path.write_bytes(whole[:middle])
        with refused(f"open_.*: .*{name}: "):
            opened(path)
        path.write_bytes(whole[:middle] + bytes(500) + whole[middle + 500 :])
        with refused(rf"from_arrays: .*{name}: \w+: cannot be read"):
            observations_of(opened(path))
    for broken, why in (
        (Broken(), "cannot be read: no such file"),
        (Broken(4), "ends at row 4 of 6"),
    ):
        for name in GOOD:
            with refused(rf"from_arrays: {name}: {why}"):
                observations_of(GOOD | {name: broken})
    (tmp_path / "none").mkdir()
    with refused(r"open_parquet: .*none: there is no row in 0 Parquet"):
        datasets.open_parquet(tmp_path / "none")


LARGE = """
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


@pytest.mark.thorough  # 11 CPU seconds; that a block has few bytes, all sources test
def test_large_episodes_are_read_in_parts(tmp_path):
    """Memory beside the state is a few blocks: 160 MiB of images that are one episode, in an HDF5
    group, or in one row group of Parquet."""
    pytest.importorskip("h5py", reason="h5py is not installed")
    pytest.importorskip("pyarrow", reason="the lerobot extra is not installed")
    output_of(LARGE, "write", cwd=tmp_path)  # which takes more memory
    assert max(map(float, output_of(LARGE, "read", cwd=tmp_path).split())) < 64  # MiB

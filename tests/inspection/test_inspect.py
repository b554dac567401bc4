"""The inspection of states and checkpoints: its figures equal those of a plain loop over the same
steps."""

import collections
import json
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import ALL, SOAK
from tests.support.buffers import KINDS, each, everything, jitted
from tests.support.refusals import refused
from tests.support.replays import output_of
from tests.support.sampling import sample
from tests.support.steps import begun, nth

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, folder
from jaxreplay.inspection.measure import COLORS

NUM_ENVS, LENGTH, TIME = 3, 40, 70
AXES, r = (TIME, NUM_ENVS), np.random.default_rng(0)
FLAT = "$\\frac{$"  # is a constant leaf; in TeX, the name would be an error
STEPS = {
    "obs": {
        "a": r.normal(size=(*AXES, 2)).astype(np.float32),
        FLAT: np.full((*AXES, 3), 7, np.uint8),
    },
    "action": r.integers(5, size=AXES, dtype=np.int32),
    "reward": r.integers(9, size=AXES).astype(np.float32),
    "terminated": r.random(AXES) < 0.1,
    "truncated": r.random(AXES) < 0.1,
}


def example_of(steps):
    return nth(steps, (0, 0))


def filled(buffer, steps, *given):
    """Return a state after a block of steps."""
    return begun(jr.jit(buffer), steps, *given)


def ramp_of(length, **fields):
    """Return steps of one env, whose values count up from 0 in an episode without end."""
    ramp = np.arange(length, dtype=np.float32)[:, None]
    steps = {"obs": ramp, "action": ramp.astype(np.int32), "reward": ramp}
    return steps | {"terminated": ramp < 0, "truncated": ramp < 0} | fields


def episodes_of(env):
    """Return (start, length, return, is_terminated) of one env's finished episodes, with next-step
    autoreset: after each episode comes its final row, whose flags do not count."""
    found, start, reward, terminated = [], 0, STEPS["reward"], STEPS["terminated"]
    for end in np.flatnonzero((terminated | STEPS["truncated"])[:, env]) + 1:
        if end > start:
            total = reward[start:end, env].sum()
            found.append((start, end - start, total, terminated[end - 1, env]))
            start = end + 1
    return found


@pytest.fixture(scope="module")
def prioritized():
    sizes = {"capacity": NUM_ENVS * LENGTH, "num_envs": NUM_ENVS, "batch_size": 8}
    replay = jr.prioritized(**sizes, autoreset="next_step", alpha=1.0, stratified=False)
    buffer, state = jr.jit(replay), filled(replay, STEPS)
    for number in range(5):
        batch = buffer.sample(state, jax.random.key(number))
        state = buffer.update_priorities(state, batch.index, np.float32([np.nan, *range(1, 8)]))
    return replay, state


@pytest.fixture(scope="module")
def folders(prioritized, tmp_path_factory):
    """A folder of good and bad checkpoints."""
    path, (replay, state) = tmp_path_factory.mktemp("folders"), prioritized
    checkpoint.save(path / "run", replay, state, step=3, metadata={"run": "a"}, chunk_bytes=512)
    for name in ("broken", "less"):
        shutil.copytree(path / "run", path / name)
    next((path / "broken" / "manifests").iterdir()).write_text("{}")
    next((path / "less" / "rows").iterdir()).unlink()
    (path / "file").write_text("")
    rollout = jr.rollout(length=5, num_envs=2, autoreset="next_step")
    checkpoint.save(path / "rollout", rollout, rollout.init(example_of(STEPS)))
    return path


def test_the_figures_are_those_that_a_loop_counts(prioritized):
    found, first, rows = jr.inspect(*prioritized), TIME - LENGTH, NUM_ENVS * LENGTH
    assert found.streams["rows"] == found.streams["capacity"] == rows
    # episodes
    episodes = [episodes_of(env) for env in range(NUM_ENVS)]
    whole = [one for own in episodes for one in own if one[0] >= first]
    _, lengths, totals, are_terminated = zip(*whole, strict=True)
    assert found.episodes["whole"] == len(whole) > 5
    assert found.episodes["terminated"] == sum(are_terminated)
    for name, values in (("lengths", lengths), ("returns", totals)):
        assert found.episodes[name]["median"] == np.median(values)
        assert found.episodes[name]["largest"] == max(values)
        assert sum(found.episodes[f"{name}, histogram"]["counts"]) == len(whole)
    # leaves
    has_action = np.ones(AXES, bool)
    for env, own in enumerate(episodes):
        final = [start + length for start, length, *_ in own if start + length < TIME]
        has_action[final, env] = False
    actions, held = STEPS["action"][first:][has_action[first:]], STEPS["obs"]["a"][first:]
    assert len(actions) < rows
    bounds = {"least": held.min(), "largest": held.max(), "mean": held.mean()}
    for leaf, expected in (
        ("action", {"rows read": len(actions), "mean": np.mean(actions)}),
        ("obs.a", {"rows read": rows, "constant elements": 0, **bounds}),
        (f"obs.{FLAT}", {"constant elements": 3}),
    ):
        figures = found.leaves[f"steps.{leaf}"]
        assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    # the rest
    counters = {"max_priority": 7.0, "num_bad_priorities": 5.0, "num_stale_updates": 0.0}
    assert found.counters == counters
    constant, shared, *others = found.suspicious
    assert constant == f"steps.obs.{FLAT} is 7 in all of 120 rows"
    assert "rows share one probability" in shared
    assert others == ["5 priorities were NaN, infinite or negative, and were ignored"]


def test_draws_are_described_as_they_fall(prioritized):
    """The ages and the effective sample size are those of many samples."""
    replay, state = prioritized
    found = jr.inspect(replay, state).draws
    batch = sample(replay, state, jax.random.key(9), 50_000)
    age = np.sort(jitted(replay, "age")(state, batch.index))
    for name, quantile in (("quarter", 0.25), ("median", 0.5), ("three quarters", 0.75)):
        low, high = (age[int((quantile + off) * len(age))] for off in (-0.02, 0.02))
        assert low <= found["age of a draw"][name] <= high
    weight = np.asarray(batch.probability, np.float64) ** -0.4
    size = weight.sum() ** 2 / (weight**2).sum() / len(weight)
    found_size = found["effective sample size"]["weights with beta 0.4"]
    assert found_size == pytest.approx(size, rel=0.02)
    probability = np.asarray(everything(replay)(state, 0).probability)
    num_rows, largest = (probability > 0).sum(), found["probability over an even one"]["largest"]
    assert found["rows that can be drawn"] == num_rows
    assert largest == pytest.approx(probability.max() * num_rows, rel=1e-5)


@each(KINDS if ALL else KINDS[1:2])
def test_a_checkpoint_says_what_the_state_says(case, tmp_path):
    """Every kind of buffer, partly filled and after it has wrapped."""
    replay = case.replay()
    run, checkpointer = jr.jit(replay), Checkpointer(tmp_path, replay, chunk_bytes=2048)
    state = run.init(case.example())
    for number in range(3):
        inside = json.loads(jr.inspect(replay, state).to_json())
        checkpointer.save(state, number)
        found = json.loads(checkpoint.inspect(tmp_path, step=number).to_json())
        drawn = inside.pop("draws"), found.pop("draws")
        if replay.sampler.has_priorities:
            told = ("rows that can be drawn", "rows that share their probability", "age of a draw")
            for name in told if drawn[1] else ():
                assert drawn[1].get(name) == drawn[0].get(name), name
        else:  # files do not say how rows are sampled
            assert drawn[1] is None
            lines = inside["suspicious"]
            inside["suspicious"] = [line for line in lines if line != "no row is sampleable"]
        for figures in inside["leaves"].values():
            if figures.get("mean") is not None:  # the sums have another order
                figures["mean"] = pytest.approx(figures["mean"], rel=1e-6, abs=1e-9)
        for name in ("streams", "episodes", "counters", "suspicious", "leaves"):
            assert found[name] == inside[name], name
        state = run.extend(state, case.step(number, time=11), *case.mask(replay, number, 11))


def test_what_is_odd_is_named(tmp_path):
    """Probabilities may be equal though priorities are not."""
    sizes = {"capacity": 8, "batch_size": 2}
    items, flat = jr.items(**sizes), jr.items(**sizes, sampler=jr.Prioritized(alpha=0.0))
    steps = jr.prioritized(capacity=40, batch_size=2, autoreset="next_step")
    odd = {
        "x": np.float32([[1.0], [np.nan], [-np.inf]]),
        "y": np.zeros((3, 1, 2, 0), np.float32),
        "z": np.array([[[1.0, 2]]] * 3, jnp.bfloat16),
    }
    said_of_odd = [
        "steps.x has 2 values that are NaN or infinite, in 3 rows",
        "steps.z is the same in all of 3 rows",
    ]
    equal = "all 8 rows are equally likely: priorities are equal, or have no effect (alpha=0)"
    ramp = ramp_of(9)
    rewards = ramp["reward"][1:]
    no_episode = "no episode is stored from its start to its end"
    for number, (replay, state, expected) in enumerate(
        (
            (items, jr.jit(items).init(0.0), ["the buffer is empty"]),
            (items, filled(items, odd), said_of_odd),
            (steps, filled(steps, ramp), [no_episode, equal]),
            (flat, filled(flat, rewards, None, rewards), [equal]),
        )
    ):
        checkpoint.save(tmp_path / str(number), replay, state)
        assert jr.inspect(replay, state).suspicious == expected
        assert checkpoint.inspect(tmp_path / str(number)).suspicious == expected


def test_what_was_overwritten_is_not_looked_at():
    """With `final_obs`, a final row has no reward of its own: the stored one is another step's."""
    replay, ones = (
        jr.uniform(capacity=20, batch_size=4, autoreset="same_step"),
        np.ones((20, 1), "f"),
    )
    state = filled(replay, ramp_of(20, reward=np.nan * ones, final_obs=ones))
    again = ramp_of(20, reward=5 * ones, final_obs=ones, terminated=ones > 0)
    for _ in range(2):
        state = jr.jit(replay).extend(state, again)
    found = jr.inspect(replay, state)
    names = ("rows read", "not finite", "least", "mean", "largest", "constant elements")
    figures = found.leaves["steps.reward"]
    assert [figures[name] for name in names] == [10, 0, 5.0, 5.0, 5.0, 1]
    assert found.suspicious == ["steps.reward is 5 in all of 10 rows"]
    assert found.episodes["whole"] == 10


def test_numbers_that_are_too_large_for_figures(tmp_path):
    with jax.enable_x64(True):
        replay = jr.items(capacity=2, batch_size=2)
        item = {"x": np.array([[1.5e308], [1.6e308]]), "t": np.array([[2**60], [2**60 + 1]])}
        state = filled(replay, item)
        found = jr.inspect(replay, state)
        checkpoint.save(tmp_path, replay, state)
    assert found.suspicious == []
    for one in (found, checkpoint.inspect(tmp_path)):
        leaves = json.loads(one.to_json())["leaves"]
        assert leaves["steps.x"]["largest"] == 1.6e308
        assert leaves["steps.t"]["largest"] == 2**60 + 1
        assert "1.6e+308" in str(one)


# Checkpoints.


def test_a_run_that_keeps_one_checkpoint_may_be_looked_at_at_any_moment(prioritized, tmp_path):
    """The checkpoint that is looked at is deleted meanwhile, and a newer one exists."""
    replay, state = prioritized
    is_over, num_saved, num_looked = threading.Event(), 0, 0

    def save():
        nonlocal num_saved
        checkpointer = Checkpointer(tmp_path, replay, max_to_keep=1, overwrite=True)
        while not is_over.is_set():
            num_saved += 1
            checkpointer.save(state, num_saved)

    checkpoint.save(tmp_path, replay, state, step=0)
    thread = threading.Thread(target=save)
    thread.start()
    try:
        while num_saved < (400 if SOAK else 30 if ALL else 10) or num_looked < 4:
            assert checkpoint.inspect(tmp_path).source
            assert not any(found.problems for found in checkpoint.verify(tmp_path))
            num_looked += 1
    finally:
        is_over.set()
        thread.join()


def test_a_look_reads_each_file_twice_at_most_and_few_bytes_if_it_may(
    prioritized, folders, monkeypatch
):
    """Once for all leaves, and once for the rows around resets."""
    counts, read = collections.Counter(), folder.Folder.read

    def noted(self, name, *given):
        counts[name] += 1
        return read(self, name, *given)

    monkeypatch.setattr(folder.Folder, "read", noted)
    whole, few = (checkpoint.inspect(folders / "run"), {"max_bytes": 19 * 10})
    rows = [count for name, count in counts.items() if name.startswith("rows")]
    assert len(rows) > 3
    assert max(rows) == 2
    for found in (jr.inspect(*prioritized, **few), checkpoint.inspect(folders / "run", **few)):
        assert found.leaves["steps.obs.a"]["rows read"] == 10
        assert found.streams["rows"] == NUM_ENVS * LENGTH
        assert found.episodes == whole.episodes


def test_the_command_runs_as_a_module_and_needs_no_device(folders):
    """A run may occupy all of the accelerator's memory while its checkpoint is inspected."""
    code = f"""
import runpy, sys, jax
sys.argv[1:] = ["inspect", {str(folders / "run")!r}]
runpy.run_module("jaxreplay", run_name="__main__", alter_sys=True)
print(jax._src.xla_bridge._backends)
"""
    assert output_of(code).endswith("were ignored\n{}")


def test_the_state_is_not_held():
    """An inspection must not make the next add copy the leaves."""
    replay = jr.items(capacity=8, batch_size=2)
    state = filled(replay, np.zeros((9, 1)))
    pointers = lambda: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.rows.steps)]
    found, before = jr.inspect(replay, state), pointers()
    state = jr.jit(replay).add(state, np.zeros(1))
    assert pointers() == before
    assert found.streams["rows"] == 8


def test_the_rings_show_each_row_and_the_next_write():
    """Six steps of one env in a ring of 8, the third of which ended an episode."""
    replay = jr.prioritized(capacity=8, batch_size=2, autoreset="next_step", alpha=1.0)
    state = filled(replay, ramp_of(6, terminated=np.arange(6)[:, None] == 2))
    index = jr.types.Index(np.int32([0]), np.uint32([0]))
    state = jr.jit(replay).update_priorities(state, index, np.float32([1e6]))
    kinds = ["often sampled", *["sampleable"] * 2, "final row", "sampleable", "not sampleable"]
    expected = [COLORS[kind] for kind in (*kinds, "next write", "not written")]
    (picture,) = jr.inspect(replay, state).rings
    np.testing.assert_allclose(picture[1:], expected[1:], atol=1e-6)
    assert (picture[0] < COLORS["sampleable"]).all()

    many = jr.items(capacity=100 * 1024, num_envs=100, batch_size=2)
    picture = jr.inspect(many, filled(many, np.zeros((512, 100)))).rings
    assert picture.shape == (64, 512, 3)
    for columns, kind in ((slice(256, 257), "next write"), (slice(256), "sampleable")):
        shown = picture[:, columns]
        np.testing.assert_allclose(shown, np.broadcast_to(COLORS[kind], shown.shape))


def test_the_page_has_the_text_and_a_plot_of_each_histogram(prioritized, folders, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the examples extra is not installed")
    path, found = str(folders / "run"), checkpoint.inspect(folders / "run")
    main(["inspect", path, "--plot", str(tmp_path / "page.png")])
    text = capsys.readouterr().out
    files = (file for kind in ("rows", "rest") for file in (folders / "run" / kind).iterdir())
    size = sum(file.stat().st_size for file in files)
    source = f'{path}, step 3, {size:,} bytes, metadata {{"run": "a"}}'
    assert text == str(jr.inspect(*prioritized)).replace("\n", f"\n{source}\n", 1) + "\n"
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    page = found.to_figure()
    assert page._repr_png_().startswith(b"\x89PNG")  # in a notebook
    assert [one.get_text() + "\n" for one in page.texts] == [text]
    rings, lengths, *others = page.axes
    titles = ["lengths", "returns", "log10 of it", "age of a draw"]
    assert [axes.get_title() for axes in (lengths, *others)] == titles
    np.testing.assert_array_equal(rings.images[0].get_array(), found.rings)
    bars = lengths.patches[0].get_data().values
    np.testing.assert_array_equal(bars, found.episodes["lengths, histogram"]["counts"])
    main(["inspect", path, "--step", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(found.to_json())
    assert printed["source"] == source


BAD = {
    "": "the following arguments are required: path",
    "{path}/nowhere": "there is no checkpoint under .*nowhere",
    "{path}/run --step 9": "there is no checkpoint of step 9 under",
    "{path}/run --step many": "argument --step: invalid int value: 'many'",
    "{path}/broken": "no checkpoint under .*; manifests/.* is not as it was written",
    "{path}/less": "rows/.* is missing",
    "{path}/run --member demos": "is a checkpoint of a ReplayBuffer, which has no member 'demos'",
    "{path}/rollout": "is a checkpoint of a Rollout, which has no rows of a replay",
    "http://": "http",
    "http://127.0.0.1:9/x --timeout 1": "127.0.0.1:9",
    "s3:/x": "is not a URL: it must begin with s3://",
    "{path}/file": "is a file, not the folder of a Checkpointer",
    "{path}/run --plot {path}/no/folder.png": "No such file or directory",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_answered_in_one_line(arguments, folders, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *arguments.format(path=folders).split()])
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert re.search(BAD[arguments], error), error


def test_a_replay_is_inspected_as_its_state():
    replay = jr.Replay(jr.items(capacity=8, batch_size=2))
    with refused("inspect: nothing was added yet"):
        jr.inspect(replay)
    for value in (1.0, np.nan):
        replay.add({"x": np.array([value])})
    found = jr.inspect(replay)
    assert str(found) == str(replay.inspect())
    assert str(found) == str(jr.inspect(replay.buffer, replay._owner.state))
    assert found.suspicious == ["steps.x has 1 values that are NaN or infinite, in 2 rows"]


def test_a_report_of_a_fault_has_versions_and_devices(capsys):
    main(["info"])
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["jax"] == jax.__version__
    assert found["numpy"] == np.__version__
    assert found["devices"] == str(jax.devices()[0])
    assert {"Python", "platform", "jaxlib", "torch", "msgspec", "ray"} <= {*found}

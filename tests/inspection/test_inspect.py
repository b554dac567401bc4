"""The inspection of states and checkpoints: its figures equal those of a plain loop over the same
steps."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import SOAK
from tests.support.buffers import KINDS

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer
from jaxreplay.samplers import PrioritySampler

NUM_ENVS, LENGTH = 3, 40
EXAMPLE = {
    "obs": {"a": np.zeros(2, np.float32), "flat": np.zeros(3, np.uint8)},
    "action": np.int32(0),
    "reward": np.float32(0),
}
EXAMPLE |= {"terminated": np.False_, "truncated": np.False_}


def stream(num_steps, seed=0):
    r = np.random.default_rng(seed)
    sizes = (num_steps, NUM_ENVS)
    return {
        "obs": {
            "a": r.normal(size=(*sizes, 2)).astype(np.float32),
            "flat": np.full((*sizes, 3), 7, np.uint8),
        },
        "action": r.integers(5, size=sizes).astype(np.int32),
        "reward": r.integers(9, size=sizes).astype(np.float32),
        "terminated": r.random(sizes) < 0.1,
        "truncated": r.random(sizes) < 0.1,
    }


def episodes_of(steps, env):
    """Return (length, return, is_terminated) of one env's finished episodes, and the rows where
    episodes begin, with next-step autoreset."""
    found, start, is_final, length, total = [], 0, False, 0, 0.0
    for t in range(len(steps["reward"])):
        if is_final:
            start, is_final, length, total = t + 1, False, 0, 0.0
            continue
        length, total = length + 1, total + float(steps["reward"][t, env])
        if steps["terminated"][t, env] or steps["truncated"][t, env]:
            found.append((start, length, total, bool(steps["terminated"][t, env])))
            is_final = True
    return found


def is_final(steps, t, env):
    ends = [start + length for start, length, *_ in episodes_of(steps, env)]
    return t in ends


@pytest.fixture(scope="module")
def prioritized():
    replay = jr.prioritized(
        capacity=NUM_ENVS * LENGTH,
        num_envs=NUM_ENVS,
        batch_size=8,
        autoreset="next_step",
        alpha=1.0,
        stratified=False,
    )
    buffer, steps = jr.jit(replay), stream(70)
    state = buffer.extend(buffer.init(EXAMPLE), steps)
    for number in range(5):
        batch = buffer.sample(state, jax.random.key(number))
        state = buffer.update_priorities(state, batch.index, jnp.arange(8.0).at[0].set(jnp.nan))
    return replay, state, steps


def test_the_figures_are_those_that_a_loop_counts(prioritized):
    replay, state, steps = prioritized
    found = jr.inspect(replay, state)
    assert found.streams["rows"] == found.streams["capacity"] == NUM_ENVS * LENGTH
    whole = [
        episode
        for env in range(NUM_ENVS)
        for episode in episodes_of(steps, env)
        if episode[0] >= 70 - LENGTH
    ]
    assert found.episodes["whole"] == len(whole) > 5
    assert found.episodes["terminated"] == sum(terminated for *_, terminated in whole)
    for name, column in (("lengths", 1), ("returns", 2)):
        values = [episode[column] for episode in whole]
        assert found.episodes[name]["median"] == np.median(values)
        assert found.episodes[name]["largest"] == max(values)
        assert sum(found.episodes[f"{name}, histogram"]["counts"]) == len(whole)
    actions = [
        steps["action"][t, env]
        for env in range(NUM_ENVS)
        for t in range(70 - LENGTH, 70)
        if not is_final(steps, t, env)
    ]
    assert found.leaves["steps.action"]["rows read"] == len(actions)  # final rows have no action
    assert found.leaves["steps.action"]["mean"] == pytest.approx(np.mean(actions))
    held = steps["obs"]["a"][-LENGTH:]
    figures = found.leaves["steps.obs.a"]
    assert figures["rows read"] == NUM_ENVS * LENGTH
    np.testing.assert_allclose(
        [figures["least"], figures["largest"], figures["mean"]],
        [held.min(), held.max(), held.mean()],
        rtol=1e-6,
    )
    assert (figures["constant elements"], found.leaves["steps.obs.flat"]["constant elements"]) == (
        0,
        3,
    )
    assert found.counters == {
        "max_priority": 7.0,
        "num_bad_priorities": 5.0,
        "num_stale_updates": 0.0,
    }
    assert found.suspicious[0] == "steps.obs.flat is 7 in all of 120 rows"
    assert "rows share one probability" in found.suspicious[1]
    assert found.suspicious[2:] == ["5 priorities were NaN, infinite or negative, and were ignored"]


def test_draws_are_described_as_they_fall(prioritized):
    """The ages and the effective sample size are those of many samples."""
    replay, state, _ = prioritized
    found = jr.inspect(replay, state).draws
    batch = replay.sample(state, jax.random.key(9), batch_size=50_000)
    age = np.sort(np.asarray(replay.age(state, batch.index)))
    for name, quantile in (("quarter", 0.25), ("median", 0.5), ("three quarters", 0.75)):
        low, high = age[int((quantile - 0.02) * len(age))], age[int((quantile + 0.02) * len(age))]
        assert low <= found["age of a draw"][name] <= high
    weight = np.asarray(1 / batch.probability, np.float64) ** 0.4
    expected = weight.sum() ** 2 / (weight**2).sum() / len(weight)
    assert found["effective sample size"]["weights with beta 0.4"] == pytest.approx(
        expected, rel=0.02
    )
    assert found["rows that can be drawn"] == int(
        ((p := replay.get(state, jnp.arange(120)).probability) > 0).sum()
    )
    assert found["probability over an even one"]["largest"] == pytest.approx(
        float(p.max()) * found["rows that can be drawn"], rel=1e-5
    )


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_a_checkpoint_says_what_the_state_says(case, tmp_path):
    """Every kind of buffer, partly filled and after it has wrapped."""
    replay = case.replay()
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=2048)
    state = replay.init(case.example())
    for number in range(3):
        inside = json.loads(jr.inspect(replay, state).to_json())
        checkpointer.save(state, number)
        found = json.loads(checkpoint.inspect(tmp_path, step=number).to_json())
        if not isinstance(replay.sampler, PrioritySampler):  # files do not say how rows are sampled
            assert found["draws"] is None
            draws = ("no row is sampleable",)
            inside |= {
                "draws": None,
                "suspicious": [line for line in inside["suspicious"] if line not in draws],
            }
        for name in ("streams", "episodes", "counters", "suspicious"):
            assert found[name] == inside[name], name
        for name, figures in found["leaves"].items():  # the sums have another order
            assert figures.pop("mean", 0) == pytest.approx(
                inside["leaves"][name].pop("mean", 0), rel=1e-6, abs=1e-9
            )
            assert figures == inside["leaves"][name]
        if found["draws"]:
            for name in (
                "rows that can be drawn",
                "rows that share their probability",
                "age of a draw",
            ):
                assert found["draws"].get(name) == inside["draws"].get(name), name
        steps = case.step(number, time=23)
        state = jr.jit(replay).extend(state, steps, *case.mask(replay, number, 23))


def test_what_is_odd_is_named(tmp_path):
    replay = jr.items(capacity=8, batch_size=2)
    state = replay.init(
        {"x": 0.0, "y": np.zeros((2, 0), np.float32), "z": jnp.zeros(2, jnp.bfloat16)}
    )
    assert jr.inspect(replay, state).suspicious == ["the buffer is empty"]
    item = {
        "x": jnp.array([[1.0], [np.nan], [-np.inf]]),
        "y": jnp.zeros((3, 1, 2, 0)),
        "z": jnp.array([[[1.0, 2]]] * 3, jnp.bfloat16),
    }
    state = replay.extend(state, item)
    found = jr.inspect(replay, state)
    assert found.suspicious == [
        "steps.x has 2 values that are NaN or infinite, in 3 rows",
        "steps.z is the same in all of 3 rows",
    ]
    checkpoint.save(tmp_path, replay, state)
    assert checkpoint.inspect(tmp_path).suspicious == found.suspicious
    one = jr.prioritized(capacity=40, num_envs=1, batch_size=2, autoreset="next_step")
    state = one.init({**EXAMPLE, "obs": 0.0})
    steps = {
        "obs": np.arange(9.0, dtype=np.float32)[:, None],
        "action": np.arange(9, dtype=np.int32)[:, None],
    }
    steps |= {
        "reward": np.arange(9.0, dtype=np.float32)[:, None],
        "terminated": np.zeros((9, 1), bool),
        "truncated": np.zeros((9, 1), bool),
    }
    found = jr.inspect(one, one.extend(state, steps))
    assert found.suspicious == [
        "no episode is stored from its start to its end",
        "all 8 rows are equally likely: priorities are equal, or have no effect (alpha=0, or no "
        "rerank yet)",
    ]
    with pytest.raises(
        ValueError, match="inspect: expected a ReplayBuffer and its state, got Uniform"
    ):
        jr.inspect(jr.Uniform(), state)


def test_what_was_overwritten_is_not_looked_at():
    """With `final_obs`, a final row has no reward of its own: the stored one is another step's."""
    replay = jr.uniform(capacity=20, num_envs=1, batch_size=4, autoreset="same_step")
    example = {**EXAMPLE, "obs": np.float32(0), "final_obs": np.float32(0)}

    def steps(count, reward, done):
        row = {
            "obs": np.arange(count),
            "action": np.arange(count),
            "reward": np.full(count, reward),
            "final_obs": np.zeros(count),
        }
        row |= {"terminated": np.full(count, done), "truncated": np.zeros(count, bool)}
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype)[:, None], row, example)

    extend = jr.jit(replay).extend
    state = extend(extend(replay.init(example), steps(20, np.nan, False)), steps(40, 5.0, True))
    found = jr.inspect(replay, state)
    assert found.leaves["steps.reward"] | {"spec": 0} == {
        "spec": 0,
        "rows read": 10,
        "not finite": 0,
        "least": 5.0,
        "mean": 5.0,
        "largest": 5.0,
        "elements": 1,
        "constant elements": 1,
    }
    assert found.suspicious == ["steps.reward is 5 in all of 10 rows"]
    assert found.episodes["whole"] == 10


def test_equal_probabilities_need_not_be_equal_priorities():
    for sampler in (jr.RankBased(), jr.Prioritized(alpha=0.0)):
        replay = jr.ReplayBuffer(
            capacity=8,
            num_envs=1,
            batch_size=2,
            sampler=sampler,
            view=jr.views.Item(),
            autoreset=None,
        )
        state = replay.extend(
            replay.init(0.0), jnp.arange(8.0)[:, None], priority=1 + jnp.arange(8.0)[:, None]
        )
        assert "all 8 rows are equally likely" in jr.inspect(replay, state).suspicious[0]


def test_a_state_of_another_buffer_is_refused():
    replay, other = (jr.items(capacity=8, num_envs=num_envs, batch_size=2) for num_envs in (1, 2))
    for state in (
        jr.items(capacity=4, batch_size=2).init(0.0),
        jr.prioritized(capacity=8, num_envs=1, batch_size=2, autoreset="next_step").init(EXAMPLE),
    ):
        with pytest.raises(
            ValueError,
            match="inspect: this state is not of this buffer: it was made with another "
            "configuration",
        ):
            jr.inspect(other, state)
    assert jr.inspect(replay, replay.init(0.0)).streams["rows"] == 0


def test_numbers_that_are_too_large_for_figures(tmp_path):
    with jax.enable_x64(True):
        replay = jr.items(capacity=2, batch_size=2)
        item = {"x": np.array([[1.5e308], [1.6e308]]), "t": np.array([[2**60], [2**60 + 1]])}
        state = replay.extend(replay.init(jax.tree.map(lambda leaf: leaf[0, 0], item)), item)
        found = jr.inspect(replay, state)
        checkpoint.save(tmp_path, replay, state)
    assert found.suspicious == []
    assert found.leaves["steps.t"]["largest"] == 2**60 + 1
    for one in (found, checkpoint.inspect(tmp_path)):
        assert json.loads(one.to_json())["leaves"]["steps.x"]["largest"] == 1.6e308
        assert "1.6e+308" in one.to_html()


def test_a_run_may_save_meanwhile(prioritized, tmp_path, monkeypatch):
    """The inspected checkpoint is deleted meanwhile, and a newer one exists."""
    replay, state, _ = prioritized
    checkpoint.save(tmp_path, replay, state, step=1)
    reader = checkpoint.contents._rows_of

    def late(store, manifest):
        if manifest.step == 1:
            checkpoint.save(tmp_path, replay, state, step=2)
        return reader(store, manifest)

    monkeypatch.setattr(checkpoint.contents, "_rows_of", late)
    assert checkpoint.inspect(tmp_path).source.endswith(", step 2")


def test_a_run_that_keeps_one_generation_may_be_looked_at_at_any_moment(prioritized, tmp_path):
    replay, state, _ = prioritized
    checkpoint.save(tmp_path, replay, state, step=0)
    is_over, num_saved, num_looked = threading.Event(), 0, 0

    def save():
        nonlocal num_saved
        with checkpoint.Checkpointer(
            tmp_path, replay, max_to_keep=1, chunk_bytes=1024, progress=False
        ) as checkpointer:
            while not is_over.is_set():
                num_saved += 1
                checkpointer.save(state, num_saved)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        while num_saved < (400 if SOAK else 30):
            assert checkpoint.inspect(tmp_path).source
            assert not any(found.problems for found in checkpoint.verify(tmp_path, progress=False))
            num_looked += 1
    finally:
        is_over.set()
        thread.join()
    assert num_looked > 3


def test_a_checkpoint_is_looked_at_without_a_device(prioritized, tmp_path):
    """A run may occupy all of the accelerator's memory while its checkpoint is inspected."""
    replay = jr.items(capacity=2, batch_size=2)
    checkpoint.save(
        tmp_path,
        replay,
        replay.add(replay.init(jnp.zeros(3, jnp.bfloat16)), jnp.ones((1, 3), jnp.bfloat16)),
    )
    code = (
        "import sys, jax; from jaxreplay.__main__ import main; main(['inspect', sys.argv[1]]); "
        "print(jax._src.xla_bridge._backends)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n{}\n")


def test_few_bytes_are_read_where_few_are_asked_for(prioritized, tmp_path):
    replay, state, _ = prioritized
    checkpoint.save(tmp_path, replay, state, chunk_bytes=512)
    for found in (
        jr.inspect(replay, state, max_bytes=19 * 10),
        checkpoint.inspect(tmp_path, max_bytes=19 * 10),
    ):
        assert found.leaves["steps.obs.a"]["rows read"] == 10
        assert found.streams["rows"] == NUM_ENVS * LENGTH
        assert found.episodes == jr.inspect(replay, state).episodes


def test_the_state_is_not_held(prioritized):
    """An inspection must not make the next add copy the leaves."""
    replay, state, _ = prioritized
    state = jax.tree.map(jnp.copy, state)
    found, buffer = jr.inspect(replay, state), jr.jit(replay)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)]
    state = buffer.add(state, jax.tree.map(lambda leaf: leaf[0], stream(1)))
    assert [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.streams.steps)
    ] == pointers
    assert found.streams["rows"] == NUM_ENVS * LENGTH


class Page(html.parser.HTMLParser):
    """Collect a page's tags, text and links, and check that each tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text, self.fetched = [], [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else(prioritized, tmp_path, capsys):
    replay, state, _ = prioritized
    checkpoint.save(tmp_path / "run", replay, state, step=3)
    main(["inspect", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
    text = capsys.readouterr().out
    # These arguments do not affect the state, and the output for a checkpoint lacks them.
    head = re.sub(
        r" batch_size=8,| min_size=1,|, platform=None| beta=0.4,| normalize_weights='batch',",
        "",
        str(jr.inspect(replay, state)),
    )
    assert text == head.replace("\n", f"\n{tmp_path}/run, step 3\n", 1) + "\n"
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(content)
    assert page.open == page.fetched == []
    assert "script" not in page.tags
    assert "url(" not in content
    assert page.tags.count("svg") == 4
    for words in (
        "A look inside",
        "steps.obs.flat is 7 in all of 120 rows",
        "returns",
        "age of a draw",
        "effective sample size",
    ):
        assert words in page.text
    main(["inspect", str(tmp_path / "run"), "--step", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == f"{tmp_path}/run, step 3"
    blank = {"buffer": "", "source": "", "draws": {}}
    assert found | blank == json.loads(jr.inspect(replay, state).to_json()) | blank
    assert found["draws"]["age of a draw"] == jr.inspect(replay, state).draws["age of a draw"]


def test_a_name_cannot_break_the_page():
    replay = jr.items(capacity=4, batch_size=2)
    state = replay.add(
        replay.init({"<script>alert(1)</script>&": 0.0}),
        {"<script>alert(1)</script>&": jnp.ones(1)},
    )
    page = Page()
    page.feed(jr.inspect(replay, state).to_html())
    assert "script" not in page.tags
    assert "steps.<script>alert(1)</script>&" in page.text


BROWSERS = [
    path
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
    if (path := shutil.which(name))
]


@pytest.mark.skipif(not BROWSERS, reason="there is no Chromium here")
def test_a_browser_shows_the_page(prioritized, tmp_path):
    replay, state, _ = prioritized
    (tmp_path / "page.html").write_text(jr.inspect(replay, state).to_html(), encoding="utf-8")
    command = [
        BROWSERS[0],
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--screenshot={tmp_path}/page.png",
        f"{tmp_path}/page.html",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "the following arguments are required: path"),
        ("{path}/nowhere", "there is no checkpoint under .*nowhere"),
        ("{path}/run --step 9", "there is no checkpoint of step 9 under"),
        ("{path}/run --step many", "argument --step: invalid int value: 'many'"),
        ("{path}/broken", "there is no checkpoint under .*; manifests/.* is not as it was written"),
        ("{path}/less", "rows/.* is missing"),
        ("{path}/rollout", "is no checkpoint of a replay buffer, but of a Rollout"),
        ("{path}/file", "is a file, not the folder of a Checkpointer"),
        ("{path}/run --html {path}/no/folder.html", "No such file or directory"),
    ],
)
def test_bad_input_is_answered_in_one_line(arguments, text, prioritized, tmp_path, capsys):
    replay, state, _ = prioritized
    for name in ("run", "broken", "less"):
        checkpoint.save(tmp_path / name, replay, state)
    next((tmp_path / "broken" / "manifests").iterdir()).write_text("{}")
    shutil.rmtree(next((tmp_path / "less" / "rows").iterdir()))
    rollout = jr.rollout(length=5, num_envs=2, autoreset="next_step")
    (tmp_path / "file").write_text("")
    checkpoint.save(tmp_path / "rollout", rollout, rollout.init({**EXAMPLE, "obs": 0.0}))
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *arguments.format(path=tmp_path).split()])
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert re.search(text, error), error


def test_it_runs_as_a_module(prioritized, tmp_path):
    replay, state, _ = prioritized
    checkpoint.save(tmp_path, replay, state)
    done = subprocess.run(
        [sys.executable, "-m", "jaxreplay", "inspect", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "suspicious:" in done.stdout


def test_a_replay_is_inspected_as_its_state():
    replay = jr.Replay(jr.items(capacity=8, batch_size=2))
    with pytest.raises(ValueError, match="inspect: nothing was added yet"):
        jr.inspect(replay)
    replay.add({"x": np.array([1.0])})
    replay.add({"x": np.array([np.nan])})
    found = jr.inspect(replay)
    assert (
        str(found) == str(jr.inspect(replay.buffer, replay._owner.state)) == str(replay.inspect())
    )
    assert found.suspicious == ["steps.x has 1 values that are NaN or infinite, in 2 rows"]
    with pytest.raises(
        ValueError,
        match="inspect: expected a ReplayBuffer and its state, got ReplayBuffer and NoneType",
    ):
        jr.inspect(replay.buffer)

"""Each example's claim holds by the figures that it prints: in a short run here, in full in
`make examples` and `make soak`."""

import importlib.util
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL, SOAK, thorough

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
needs_gymnax = pytest.mark.skipif(
    importlib.util.find_spec("gymnax") is None, reason="the examples extra is not installed"
)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Return `run(name, *short, always=())`, which runs an example and returns the figures that it
    prints. The arguments `short` make it shorter, except in a soak."""

    monkeypatch.syspath_prepend(EXAMPLES)  # for _common

    def run(name, *short, always=()):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        example = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, example)  # for processes that it starts
        spec.loader.exec_module(example)
        plot = tmp_path / f"{name}.png"
        returned = example.main([*([] if SOAK else short), *always, "--out", str(plot)])
        printed = dict(
            re.findall(r"^ *(\w[\w -]*?) {2,}(\S+)$", capsys.readouterr().out, re.MULTILINE)
        )
        assert printed.pop("plot") == str(plot)
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert returned["reached"] or not SOAK
        return {
            name: float(value.replace(",", ""))
            for name, value in printed.items()
            if re.fullmatch(r"-?[\d,.]+", value)
        }

    return run


def recipes():
    return [
        pytest.param(
            recipe,
            id=recipe.__name__,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(library) is None, reason=f"{library} is not installed"
            ),
        )
        for library, recipes in runpy.run_path(str(EXAMPLES / "steps.py"))["RECIPES"].items()
        for recipe in recipes
    ]


@pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
@pytest.mark.parametrize("recipe", recipes())
def test_the_steps_of_each_library_reset_as_declared(recipe):
    found = recipe(400)
    assert found.streams["envs"] == 4
    assert found.episodes["whole"] >= 50
    assert found.episodes["lengths"]["largest"] <= 20  # the time limit of all recipes
    assert not [line for line in found.suspicious if "looks wrong" in line]


def gymnasium_stacks():
    import gymnasium

    of_one = lambda: gymnasium.wrappers.FrameStackObservation(
        gymnasium.make("CartPole-v1", max_episode_steps=20), 4
    )
    return gymnasium.vector.SyncVectorEnv([of_one] * 4), lambda flag, info: flag


def envpool_stacks(episodic_life):
    import envpool

    options = {"stack_num": 4, "max_episode_steps": 150, "img_height": 20, "img_width": 20}
    options |= {"num_envs": 4, "seed": 3, "episodic_life": episodic_life}
    envs = envpool.make_gymnasium("Breakout-v5", **options)
    # stacks go on after a lost life, and begin anew with a game
    game_over = lambda flag, info: np.asarray(info["terminated"], bool)
    return envs, game_over if episodic_life else lambda flag, info: flag


@pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
@pytest.mark.parametrize(
    ("made", "options"),
    [(gymnasium_stacks, {}), *((envpool_stacks, {"episodic_life": x}) for x in (False, True))],
)
def test_the_stacks_of_each_library_are_those_that_are_learned_from(made, options):
    """With `pad="repeat"`, and the flags that docs/guides/frames.md says."""
    library = made.__name__.removesuffix("_stacks")
    pytest.importorskip(library, reason=f"{library} is not installed")
    envs, terminated_of = made(**options)
    buffer = jr.uniform(capacity=4096, num_envs=4, batch_size=512, autoreset="next_step")
    replay = jr.Replay(jr.frame_stack(buffer, 4, pad="repeat", axis=0), seed=0)
    random, stacks, num_ends = np.random.default_rng(0), [envs.reset()[0].copy()], 0
    for number in range(600):
        action = random.integers(0, 2, 4)
        obs, reward, terminated, truncated, info = envs.step(action)
        num_ends += (terminated | truncated).sum()
        step = jr.Step(
            stacks[-1][:, -1],
            action,
            np.float32(reward),
            terminated=terminated_of(terminated, info),
            truncated=truncated,
            extras=np.full(4, number),
        )
        replay.add(step)
        stacks.append(obs.copy())
    assert num_ends >= 10
    batch = jax.device_get(replay.sample())
    t, number, env = batch.experience, batch.experience.extras, batch.index.row // 1024
    acted = np.stack(stacks)
    assert batch.is_valid.all()
    np.testing.assert_array_equal(t.obs, acted[number, env])
    goes_on = t.discount > 0
    np.testing.assert_array_equal(t.next_obs[goes_on], acted[number + 1, env][goes_on])


# Arguments of a short run of each example, and what it must print: a figure, how it compares, and
# with what in a short run and in the soak, if they differ: a number, or another figure.
EQUAL, LEAST, MOST = np.equal, np.greater_equal, np.less_equal
NEAR_0 = lambda figure, most: abs(figure) <= most
RECALLS = ("recurrent return", LEAST, 0.95), ("feed forward return", NEAR_0, 0.2)
CLAIMS = {
    "dqn": (
        "--steps 12800 --seeds 1 --target 0",
        ("env steps", EQUAL, 12_800, 320_000),
        ("evaluation return", LEAST, 30, 475),
        ("buffer bytes", LEAST, 65_536 * 16 + 1),
    ),
    "ppo": (
        "--steps 40960 --seeds 1",
        ("env steps", EQUAL, 40_960, 327_680),
        ("evaluation return", LEAST, 100, 475),
    ),
    "rlpd": (
        "--steps 16000 --seeds 1",
        ("return with demos", LEAST, 80),
        ("return alone", NEAR_0, 10),
    ),
    "rlpd --framework torch": ("--steps 16000 --seeds 1", ("return with demos", LEAST, 80)),
    "sac": (
        "--steps 10000 --seeds 1",
        ("env steps", EQUAL, 10_000, 24_000),
        ("evaluation return", LEAST, -600, -200),
    ),
    "r2d2": ("--length 3 --steps 6000 --seeds 1", *RECALLS),
    "recurrent_ppo": ("--length 3 --steps 204800 --seeds 1", *RECALLS),
    "vdn": ("--steps 38400 --seeds 1", ("agents at their targets", LEAST, 0.7, 0.95)),
    "grpo": (
        "--steps 7680 --seeds 1",
        ("reward at last", LEAST, 0.4, 0.9),
        ("largest staleness", MOST, 4),
        ("reward at first", np.less, 0.15),
    ),
    "her": (
        "--bits 8 --steps 9600 --seeds 1",
        ("hindsight success", LEAST, 0.9),
        ("plain success", MOST, 0.1),
    ),
    "purejaxrl_dqn": ("--steps 40000 --seeds 1", ("training return", LEAST, 30, 450)),
    "laplacian": ("--steps 2000", ("smallest cosine", LEAST, 0.25, 0.98)),
    "actors_dqn": (
        "--steps 20000 --target 0",
        ("env steps", LEAST, 20_000, 300_000),
        ("evaluation return", LEAST, 15, 450),
    ),
    "batched_inference": (
        "--steps 20000 --target 0",
        ("env steps", LEAST, 20_000, 300_000),
        ("evaluation return", LEAST, 15, 450),
    ),
    "torch_dqn": (
        "--steps 4000",
        ("env steps", EQUAL, 4_000, 100_000),
        ("evaluation return", LEAST, 40, 475),
    ),
    "fast_sac_torch": (
        "--steps 400 --seeds 1 --target -400",
        ("env steps", EQUAL, 409_600, 1_843_200),
        ("worst return", LEAST, -400, -200),
    ),
    "robot": (
        "--steps 1500 --target 0",
        ("updates", EQUAL, 3_000, 12_000),
        ("arriving", LEAST, 0.4, 0.95),
    ),
    "atari_frame_stack": (
        "--steps 3200 --seeds 1",
        ("return with 4 frames", np.greater, "return with 1 frame"),
    ),
    "offline_to_online": (
        "--steps 20000 --seeds 1",
        ("return with offline data", np.greater, "return without"),
    ),
}


@needs_gymnax
@pytest.mark.parametrize(
    "name",
    [name if name == "dqn" else thorough(name) for name in CLAIMS],
)
def test_what_an_example_says_holds(run, name):
    if name == "offline_to_online":
        pytest.importorskip("minari", reason="Minari is not installed")
    arguments, *claims = CLAIMS[name]
    example, *framework = name.split()
    figures = run(example, *arguments.split(), always=framework)
    for figure, compare, *bounds in claims:
        bound = bounds[-1 if SOAK else 0]
        assert compare(figures[figure], figures.get(bound, bound)), (figure, figures)


@pytest.mark.thorough
def test_a_world_models_replay_gives_each_new_sequence_once(run):
    """Batches, their order and all latents are checked by lists within the example. An env gives a
    new sequence every 64 steps."""
    figures = run("dreamer_replay", "--steps", "16000")
    assert abs(figures["new sequences"] - figures["env steps"] / 64) <= 8
    assert figures["age of new sequences"] < 70 < 500 < figures["age of the others"]
    assert figures["age of the others"] / figures["age by the rule"] == pytest.approx(1, abs=0.05)


NOT_RUN = re.compile(r"<!-- not run: it needs .+ -->")


def blocks(page):
    """Return the line above each Python block of a page that is no cell, and the block."""
    text = (EXAMPLES.parent / page).read_text()
    return re.findall(r"([^\n]*)\n```python\n(.*?)```", text, re.DOTALL)


def test_the_programs_of_the_readme_run(tmp_path, monkeypatch):
    """The second one is a part of an example."""
    for extra in ("torch", "stable_baselines3", "tensorstore"):
        pytest.importorskip(extra, reason="an extra is not installed")
    first, part, *others = [code for above, code in blocks("README.md") if not NOT_RUN.match(above)]
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    assert names["batch"].is_valid.all()
    assert part.strip() in (EXAMPLES / "dqn_minimal.py").read_text()
    zeros, flags = np.zeros(4, np.float32), np.zeros(4, bool)
    names |= {"obs": np.zeros((4, 3)), "action": np.zeros(4, np.int32), "reward": zeros}
    names |= {"terminated": flags, "truncated": flags, "agent": {"w": zeros}}
    names["example"] = jax.tree.map(lambda leaf: leaf[0], names["step"])
    monkeypatch.chdir(tmp_path)
    assert len(others) == 3
    for program in others * 2:  # the second time, restored
        exec(compile(program, "README.md", "exec"), names)
    assert names["checkpointer"].all_steps() == [1000]


def test_figures_of_the_readme_are_those_of_the_benchmarks():
    docs = EXAMPLES.parent / "docs" / "measured.py"
    found = runpy.run_path(str(docs))["substitutions"]()
    text = (EXAMPLES.parent / "README.md").read_text()
    assert found["measured"][:10] in text
    assert f"jax {found['jax']}" in text
    said = re.search(r"takes (\d+) us, flashbax's (\d+), and without them (\d+) and (\d+)", text)
    loops = re.findall(r"fused loop[^|]*\| ([\d.]+) \| ([\d.]+)", found["gpu"])[:2]
    assert [*map(int, said.groups())] == [round(float(one)) for loop in loops for one in loop]


def test_each_python_block_of_the_documentation_runs_or_says_why_not():
    """The build of the docs runs each cell."""
    pages = [*(EXAMPLES.parent / "docs").rglob("*.md"), EXAMPLES.parent / "README.md"]
    for page in pages:
        for above, code in blocks(page):
            compile(code, page, "exec")
            ran = re.fullmatch(r"<!-- run by (tests/\S+\.py) -->", above)
            if ran:
                assert page.name in (EXAMPLES.parent / ran[1]).read_text(), page
            elif page.name != "README.md":
                assert NOT_RUN.fullmatch(above), (page, code)
    assert len(pages) > 40


def test_the_documentation_is_short():
    pages = (EXAMPLES.parent / "docs").rglob("*.md")
    assert 10_000 < sum(len(page.read_text().split()) for page in pages) <= 24_000


def test_code_of_the_documentation_fits_its_column():
    code = r"```(?:python|bash|{code-cell})\n(.*?)```"
    for page in (EXAMPLES.parent / "docs").rglob("*.md"):
        lines = "\n".join(re.findall(code, page.read_text(), re.DOTALL)).splitlines()
        assert not [line for line in lines if len(line) > 80], page


def test_the_gymnasium_loop_of_the_documentation_runs():
    pytest.importorskip("torch", reason="the torch extra is not installed")
    page = (EXAMPLES.parent / "docs" / "torch.md").read_text()
    (loop,) = re.findall(r"{code-cell}\n(import gymnasium.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(loop, "documentation", "exec"), names)
    assert names["batch"].is_valid.all()


@pytest.mark.skipif(not ALL, reason="in `make test-all`")
def test_the_same_file_runs_on_ray(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, EXAMPLES / "actors_dqn.py", "--ray", "--steps", "20000"]
    subprocess.run([*command, "--target", "0", "--out", tmp_path / "plot.png"], check=True)
    assert (tmp_path / "plot.png").exists()


@pytest.mark.thorough
def test_sac_learns_from_images_that_are_stored_once(run):
    pytest.importorskip("stable_baselines3", reason="the sb3 extra is not installed")
    figures = run("sb3_dict_sac", "--steps", "600")
    assert figures["transitions held"] == (12_000 if SOAK else 600)
    assert figures["bytes a transition"] / figures["bytes of SB3s"] < 0.51
    if SOAK:
        assert figures["return after"] >= -8 > -15 > figures["return before"]


@pytest.mark.thorough
@needs_gymnax
def test_a_killed_run_resumes_with_identical_returns(tmp_path):
    pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")
    pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    short = [] if SOAK else ["--chunks", "3", "--iterations", "20", "--kills", "1"]
    command = [sys.executable, EXAMPLES / "resume.py", "--folder", tmp_path, *short]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = dict(re.findall(r"^(\w[\w ]*?) {2,}(\S+)$", done.stdout, re.MULTILINE))
    assert int(printed["chunks"]) == (12 if SOAK else 3)
    assert int(printed["chunks of the killed run"]) >= int(printed["chunks"])
    assert float(printed["largest difference"]) == 0


@pytest.mark.thorough
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="Linux tells of children")
def test_a_robots_run_survives_a_kill_of_its_actor_and_of_its_learner(tmp_path):
    """It goes on with another actor, and then from the newest checkpoint."""
    command = [sys.executable, EXAMPLES / "robot.py", "--steps", "1000", "--target", "0"]
    command += ["--folder", tmp_path / "run", "--out", tmp_path / "robot.png"]

    def wait_for_a_save(process, before=()):
        deadline = time.monotonic() + 240
        while {*(tmp_path / "run" / "replay").rglob("*.json")} <= {*before}:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return {*(tmp_path / "run" / "replay").rglob("*.json")}

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        saves = wait_for_a_save(process)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        actors = [
            int(child)
            for child in children.split()
            if b"spawn_main" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        assert actors
        for actor in actors:
            os.kill(actor, signal.SIGKILL)
        for _ in range(2):
            saves = wait_for_a_save(process, saves)
        process.kill()
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert re.search(r"^updates +2,000$", printed.stdout, re.MULTILINE)
    started_at = re.search(r"\| (\d+)/2000 ", printed.stderr)
    assert 600 <= int(started_at[1]) < 2000

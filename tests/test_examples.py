"""Each example's claim holds by the figures that it prints: in a short run here, in full in
`make examples` and `make soak`."""

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL, SOAK

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
needs_gymnax = pytest.mark.skipif(
    importlib.util.find_spec("gymnax") is None, reason="the examples extra is not installed"
)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Return `run(name, *short)`, which runs an example and returns the figures that it prints. The
    arguments `short` make it shorter, except in a soak."""

    monkeypatch.syspath_prepend(EXAMPLES)  # for _common

    def run(name, *short):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        example = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, example)  # for processes that it starts
        spec.loader.exec_module(example)
        plot = tmp_path / f"{name}.png"
        returned = example.main([*([] if SOAK else short), "--out", str(plot)])
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
    spec = importlib.util.spec_from_file_location("steps", EXAMPLES / "steps.py")
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    return [
        pytest.param(
            recipe,
            id=recipe.__name__,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(library) is None, reason=f"{library} is not installed"
            ),
        )
        for library, recipes in steps.RECIPES.items()
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


@needs_gymnax
def test_dqn_trains(run):
    figures = run("dqn", "--steps", "1280", "--seeds", "2", "--target", "0")
    assert figures["env steps"] == (320_000 if SOAK else 1280)
    assert figures["evaluation return"] >= (475 if SOAK else 1)
    assert figures["buffer bytes"] > 65_536 * 16


@needs_gymnax
def test_ppo_trains(run):
    """An untrained policy holds the pole for 9 to 25 steps."""
    figures = run("ppo", "--steps", "40960", "--seeds", "1")
    assert figures["env steps"] == (327_680 if SOAK else 40_960)
    assert figures["evaluation return"] >= (475 if SOAK else 100)


def test_a_world_models_replay_gives_each_new_sequence_once_and_the_last_latents(run):
    """Batches, their order and all latents are checked by lists within the example. An env gives a
    new sequence every 64 steps."""
    figures = run("dreamer_replay", "--steps", "16000")
    assert abs(figures["new sequences"] - figures["env steps"] / 64) <= 8
    assert figures["age of new sequences"] < 70 < 500 < figures["age of the others"]
    assert figures["age of the others"] / figures["age by the rule"] == pytest.approx(1, abs=0.05)


@pytest.mark.thorough
@needs_gymnax
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_demonstrations_show_what_an_agent_alone_does_not_find(run, framework):
    """The car gets 100 on the hill, and pays for every push."""
    figures = run("rlpd", "--steps", "16000", "--seeds", "1", "--framework", framework)
    assert figures["return with demos"] >= 80
    assert abs(figures.get("return alone", 0)) < 10


@pytest.mark.thorough
@needs_gymnax
def test_sac_trains(run):
    """An untrained policy has a return of about -1,200."""
    figures = run("sac", "--steps", "10000", "--seeds", "1")
    assert figures["env steps"] == (24_000 if SOAK else 10_000)
    assert figures["evaluation return"] >= (-200 if SOAK else -600)


@pytest.mark.thorough
def test_a_stack_of_frames_shows_what_one_frame_does_not(run):
    figures = run("atari_frame_stack", "--steps", "3200", "--seeds", "1")
    assert figures["return with 4 frames"] > figures["return with 1 frame"]


@pytest.mark.thorough
@needs_gymnax
def test_a_recurrent_agent_recalls_what_a_feed_forward_one_cannot_know(run):
    """The mean of 1,000 coin flips of +-1 has a standard deviation of 0.03. The short run learns a
    shorter memory."""
    figures = run("r2d2", "--length", "3", "--steps", "6000", "--seeds", "1")
    assert figures["recurrent return"] >= 0.95
    assert abs(figures["feed forward return"]) <= 0.2


@pytest.mark.thorough
@needs_gymnax
def test_recurrent_ppo_recalls_what_a_feed_forward_one_cannot_know(run):
    figures = run("recurrent_ppo", "--length", "3", "--steps", "204800", "--seeds", "1")
    assert figures["recurrent return"] >= 0.95
    assert abs(figures["feed forward return"]) <= 0.2


@needs_gymnax
def test_agents_that_share_a_reward_reach_their_targets(run):
    """Untrained ones reach 0.2 of them."""
    figures = run("vdn", "--steps", "38400", "--seeds", "1")
    assert figures["agents at their targets"] >= (0.95 if SOAK else 0.7)


@pytest.mark.thorough
def test_a_learner_takes_whole_groups_that_are_not_too_old(run):
    figures = run("grpo", "--steps", "7680", "--seeds", "1")
    assert figures["reward at last"] >= (0.9 if SOAK else 0.4)
    assert figures["largest staleness"] <= 4
    assert figures["reward at first"] < 0.15


@pytest.mark.thorough
def test_goals_in_hindsight_are_reached_where_plain_ones_never_are(run):
    figures = run("her", "--bits", "8", "--steps", "9600", "--seeds", "1")
    assert figures["hindsight success"] >= 0.9
    assert figures["plain success"] <= 0.1


@pytest.mark.thorough
@needs_gymnax
def test_offline_data_speed_online_training_up(run):
    pytest.importorskip("minari", reason="the minari extra is not installed")
    figures = run("offline_to_online", "--steps", "20000", "--seeds", "1")
    assert figures["return with offline data"] > figures["return without"]


@pytest.mark.thorough
@needs_gymnax
def test_the_dqn_of_purejaxrl_trains(run):
    figures = run("purejaxrl_dqn", "--steps", "40000", "--seeds", "1")
    assert figures["training return"] >= (450 if SOAK else 30)


@pytest.mark.thorough
def test_pairs_at_a_geometric_horizon_give_the_laplacian_of_the_rooms(run):
    """Random vectors would have cosines of about 0.08."""
    figures = run("laplacian", "--steps", "2000")
    assert figures["smallest cosine"] >= (0.98 if SOAK else 0.25)


def programs(name):
    """Return the Python blocks of a page."""
    text = (EXAMPLES.parent / name).read_text()
    return re.findall(r"```(?:python|{code-cell} ipython3)\n(.*?)```", text, re.DOTALL)


def test_the_first_programs_of_the_readme_run():
    """The second one is an example."""
    first, second, *_ = programs("README.md")
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    assert names["batch"].is_valid.all()
    _, docstring, program = (EXAMPLES / "dqn_minimal.py").read_text().split('"""', 2)
    assert docstring
    assert program.strip() == second.strip()


def test_the_gymnasium_loops_of_the_documentation_run():
    pytest.importorskip("torch", reason="the torch extra is not installed")
    loops = [
        program
        for page in ("README.md", "docs/torch.md")
        for program in programs(page)
        if program.startswith("import gymnasium")
    ]
    for loop in loops:
        names = {}
        exec(compile(loop, "documentation", "exec"), names)
        assert names["batch"].is_valid.all()
    assert loops


def test_a_dqn_with_actors_trains(run):
    figures = run("actors_dqn", "--steps", "20000", "--target", "0")
    assert figures["env steps"] >= (300_000 if SOAK else 20_000)
    assert figures["evaluation return"] >= (450 if SOAK else 15)


@pytest.mark.skipif(not ALL, reason="in `make test-all`")
def test_the_same_file_runs_on_ray(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, EXAMPLES / "actors_dqn.py", "--ray", "--steps", "20000"]
    subprocess.run([*command, "--target", "0", "--out", tmp_path / "plot.png"], check=True)
    assert (tmp_path / "plot.png").exists()


def test_a_pytorch_dqn_trains(run):
    """An untrained policy holds the pole for 9 to 25 steps."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    figures = run("torch_dqn", "--steps", "4000")
    assert figures["env steps"] == (100_000 if SOAK else 4000)
    assert figures["evaluation return"] >= (475 if SOAK else 40)


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
def test_a_robot_arrives(run):
    """An untrained arm arrives in about 15 of 100 tests."""
    figures = run("robot", "--steps", "1500", "--target", "0")
    assert figures["updates"] == (12_000 if SOAK else 3_000)
    assert figures["arriving"] >= (0.95 if SOAK else 0.4)


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

"""Each example's claim holds by the figures that it prints: here in a short run, in full in
`make examples` and `make soak`."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import SOAK

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.usefixtures("optimized")
needs_gymnax = pytest.mark.skipif(
    importlib.util.find_spec("gymnax") is None, reason="the examples extra is not installed"
)


@pytest.fixture
def run(tmp_path, capsys):
    """`run(name, *short)` runs an example, with arguments that shorten it where this is no soak,
    and returns the figures it prints."""

    def run(name, *short):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        plot = tmp_path / f"{name}.png"
        returned = example.main([*([] if SOAK else short), "--out", str(plot)])
        printed = dict(
            re.findall(r"^ *(\w[\w -]*?) {2,}(\S+)$", capsys.readouterr().out, re.MULTILINE)
        )
        assert printed.pop("plot") == str(plot)
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert returned["reached"] or not SOAK  # in full, the claim is as the example states it
        return {
            name: float(value.replace(",", ""))
            for name, value in printed.items()
            if re.fullmatch(r"-?[\d,.]+", value)
        }

    return run


@needs_gymnax
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


def test_dqn_trains(run):
    figures = run("dqn", "--steps", "1280", "--target", "0")
    assert figures["env steps"] == (320_000 if SOAK else 1280)
    assert figures["evaluation return"] >= (475 if SOAK else 1)
    assert figures["buffer bytes"] > 65_536 * 16


@needs_gymnax
def test_ppo_trains(run):
    """A short run does not hold the pole for good, but far longer than the 9 to 25 steps of a
    policy that has learned nothing."""
    figures = run("ppo", "--steps", "40960")
    assert figures["env steps"] == (327_680 if SOAK else 40_960)
    assert figures["evaluation return"] >= (475 if SOAK else 100)


@needs_gymnax
def test_a_recurrent_agent_recalls_what_a_feed_forward_one_cannot_know(run):
    """The mean of 1 000 coin flips of +-1 has a deviation of 0.03. A short run learns a shorter
    memory."""
    figures = run("recall", "--length", "3", "--steps", "6000")
    assert figures["recurrent return"] >= 0.95
    assert abs(figures["feed-forward return"]) <= 0.2


def test_goals_in_hindsight_are_reached_where_plain_ones_never_are(run):
    figures = run("bit_flip", "--bits", "8", "--steps", "9600")
    assert figures["hindsight success"] >= 0.9
    assert figures["plain success"] <= 0.1


def test_pairs_at_a_geometric_horizon_give_the_laplacian_of_the_rooms(run):
    """Vectors drawn at random would have cosines of about 0.08; a short run is on its way."""
    figures = run("laplacian", "--steps", "2000")
    assert figures["smallest cosine"] >= (0.98 if SOAK else 0.25)


def test_the_program_of_the_readme_runs(capsys):
    """It prints what its comment says: the exact values of the best policy, to 0.02."""
    text = (EXAMPLES.parent / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert text[: text.index(program)].count("\n") + program.count("\n") <= 40
    exec(compile(program, "README.md", "exec"), {})
    values = [float(value) for value in re.findall(r"\d\.\d\d", capsys.readouterr().out)]
    assert values == pytest.approx([0.9 ** (9 - position) for position in range(10)], abs=0.02)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the torch extra is not installed"
)
def test_the_loops_of_the_readme_run():
    text = (EXAMPLES.parent / "README.md").read_text()
    programs = [
        program
        for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if program.startswith("import gymnasium")
    ]
    for program in programs:
        names = {}
        exec(compile(program, "README.md", "exec"), names)
        assert names["batch"].is_valid.all()
    assert len(programs) == 2


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the torch extra is not installed"
)
def test_a_pytorch_dqn_trains(run):
    """A short run does not hold the pole for good, but longer than the 9 to 25 steps of a policy
    that has learned nothing."""
    figures = run("torch_dqn", "--steps", "4000")
    assert figures["env steps"] == (100_000 if SOAK else 4000)
    assert figures["evaluation return"] >= (475 if SOAK else 40)


@pytest.mark.skipif(
    importlib.util.find_spec("stable_baselines3") is None, reason="the sb3 extra is not installed"
)
def test_sac_learns_from_images_that_are_stored_once(run):
    figures = run("sb3_dict_sac", "--steps", "600")
    assert figures["transitions held"] == (12_000 if SOAK else 600)
    assert figures["bytes a transition"] / figures["bytes of SB3s"] < 0.51
    if SOAK:
        assert figures["return after"] >= -8 > -15 > figures["return before"]


@needs_gymnax
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
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

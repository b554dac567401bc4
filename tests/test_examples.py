"""The examples run, and their figures are what they say, in a short run; `make demo` and `make soak` run them in full."""

import importlib.util
import pathlib
import re

import pytest
from conftest import SOAK

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("gymnax") is None, reason="the examples extra is not installed")
def test_dqn_trains_and_leaves_a_plot(tmp_path):
    plot = tmp_path / "dqn.png"
    short = [] if SOAK else ["--steps", "1280", "--target", "0"]
    figures = load("dqn").main([*short, "--out", str(plot)])
    assert figures["env_steps"] == (320_000 if SOAK else 1280)
    assert figures["evaluation_return"] >= (475 if SOAK else 1)
    assert figures["buffer_bytes"] > 65_536 * 16
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_program_of_the_readme_runs(capsys):
    """It prints what its comment says: the exact values of the best policy, to 0.02."""
    text = (EXAMPLES.parent / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert text[: text.index(program)].count("\n") + program.count("\n") <= 40
    exec(compile(program, "README.md", "exec"), {})
    values = [float(value) for value in re.findall(r"\d\.\d\d", capsys.readouterr().out)]
    assert values == pytest.approx([0.9 ** (9 - position) for position in range(10)], abs=0.02)

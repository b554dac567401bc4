"""PPO learns CartPole with `jr.rollout`, by the figures that it prints; `make soak` trains it in full."""

import importlib.util
import pathlib
import re

import pytest
from conftest import SOAK

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "ppo.py"


@pytest.mark.skipif(importlib.util.find_spec("gymnax") is None, reason="the examples extra is not installed")
def test_ppo_trains_and_leaves_a_plot(tmp_path, capsys):
    """A short run does not hold the pole for good, but far longer than the 9 to 25 steps of a policy that has learned nothing."""
    spec = importlib.util.spec_from_file_location("ppo", EXAMPLE)
    ppo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ppo)
    plot = tmp_path / "ppo.png"
    figures = ppo.main([*([] if SOAK else ["--steps", "40960", "--target", "100"]), "--out", str(plot)])
    printed = dict(re.findall(r"^(\w[\w ]*?) {2,}(\S+)$", capsys.readouterr().out, re.MULTILINE))
    assert int(printed["env steps"].replace(",", "")) == (327_680 if SOAK else 40_960)
    assert float(printed["evaluation return"]) >= (475 if SOAK else 100)
    assert figures["reached"]
    assert plot.read_bytes().startswith(b"\x89PNG")

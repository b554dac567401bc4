"""Neighbours, and the oldest and newest versions: each is installed beside this library at its own
pins, in an environment of its own, where the tests of what it uses run. docs/install.md has a line
for each that passed: `python -m tests.compat.matrix`, or with the names of some."""

import dataclasses
import datetime
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "install.md"
OUT = ROOT / "out" / "matrix"
TESTERS = "pytest>=9 pytest-xdist>=3.8 hypothesis>=6.155"
# Modules of extras: a test that needs one is skipped where it cannot be imported.
MODULES = {"torch": "jaxreplay.torch", "sb3": "jaxreplay.sb3", "checkpoint": "jaxreplay.checkpoint"}
MODULES |= {"lerobot": "pyarrow, PIL, av", "ray": "ray"}
SHOWN = ["jax", "numpy", "torch", "tensorstore"]
TORCH = "tests/test_torch.py"
# An object store needs a newer tensorstore than some have.
FOLDERS = "tests/checkpoint/test_checkpoint.py -k 'not store]'"


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """What is installed, and what runs.

    Attributes:
      pins: Requirements and options of uv, besides this library. The first is the neighbour.
      uses: What of this library runs there.
      extras: Extras of this library.
      tests: Arguments of pytest.
      python: Version of Python. Default: "3.12".
      instead: Requirements in place of those of the neighbour, which cannot be met. Default: none.
      is_thorough: Whether the tests of `make test-all` run, too. Default: False.
    """

    pins: str
    uses: str
    extras: str
    tests: str
    python: str = "3.12"
    instead: str = ""
    is_thorough: bool = False


ISAAC = {"uses": "tensors", "extras": "[torch,checkpoint]", "tests": TORCH}
FLASHBAX = {"uses": "`compat.flashbax`, checkpoints", "extras": "[checkpoint]"}
FLASHBAX["tests"] = f"tests/compat/test_flashbax.py {FOLDERS}"
BRAX = {"uses": "`compat.brax`", "extras": "", "tests": "tests/compat/test_brax.py"}
ALL = {"extras": "[torch,sb3,checkpoint,lerobot,ray]"}
ALL["uses"] = "tensors, buffers of SB3, checkpoints, datasets"
ALL["tests"] = f"{FOLDERS} {TORCH} tests/sb3/test_sb3.py"
ALL["tests"] += " tests/test_lerobot.py tests/test_dataset_files.py tests/test_signatures.py"
RAY = {"uses": "actors", "extras": "[ray,torch,checkpoint]", "is_thorough": True}
RAY["tests"] = "tests/actors/test_actors.py -k ray"
SB3 = {"uses": "buffers of SB3", "extras": "[sb3,checkpoint]", "tests": "tests/sb3"}

NEIGHBOURS = {
    "LeRobot": Neighbour(
        "lerobot[dataset]",
        "tensors, its datasets",
        "[torch,lerobot]",
        f"{TORCH} tests/test_dataset_peers.py -k 'torch or lerobot'",
    ),
    "Stable-Baselines3": Neighbour("stable-baselines3", **SB3, python="3.13"),
    "Stable-Baselines3 2.7": Neighbour(
        "stable-baselines3==2.7.0 torch==2.3.1 numpy<2", **SB3, python="3.11"
    ),
    "sbx": Neighbour(
        "sbx-rl", "its SAC learns", "[sb3]", "tests/compat/test_neighbours.py", python="3.13"
    ),
    "Isaac Lab": Neighbour("isaaclab", **ISAAC),
    "Isaac Lab 2": Neighbour("isaaclab==2.3.2.post1 torch==2.7.0 jax<0.6", **ISAAC, python="3.11"),
    "PyTorch 2.12": Neighbour("torch==2.12.*", **ISAAC, python="3.13"),
    "PyTorch 2.5": Neighbour("torch==2.5.*", **ISAAC, python="3.11"),
    "PyTorch 2.3": Neighbour("torch==2.3.* numpy<2", **ISAAC, python="3.11"),
    "TorchRL": Neighbour(
        "torchrl gymnasium", "its losses", "[torch]", "tests/compat/test_neighbours.py"
    ),
    "Ray": Neighbour("ray", **RAY, python="3.13"),
    "Ray 2.10": Neighbour("ray==2.10.* numpy<2", **RAY, python="3.11"),
    # The pins of https://github.com/EdanToledo/Stoix, uv.lock, March 2026.
    "Stoix": Neighbour(
        "flashbax==0.1.3 jax==0.5.3 flax==0.10.5 chex==0.1.89 distrax==0.1.5 brax==0.12.1 "
        "jumanji==1.1.1 navix==0.7.0 mujoco==3.3.0 orbax-checkpoint==0.11.10 numpy==1.26.4 "
        "tensorstore==0.1.73 tensorflow-probability==0.25.0 protobuf==3.20.3",
        **FLASHBAX,
        python="3.11",
    ),
    # Of https://github.com/instadeepai/Mava, requirements.txt, October 2024.
    "Mava": Neighbour(
        "flashbax~=0.1.0 brax==0.10.3 mujoco==3.1.3 mujoco-mjx==3.1.3 numpy==1.26.4 scipy==1.12.0 "
        "distrax flax optax hydra-core==1.3.2 jax==0.4.30",
        **FLASHBAX,
        python="3.11",
        instead="jax==0.4.35 jaxlib==0.4.35",
    ),
    "JaxGCRL": Neighbour(
        "jaxgcrl==0.2.8", **BRAX, python="3.11", instead="jax==0.4.35 jaxlib==0.4.35"
    ),
    "brax": Neighbour("brax", **BRAX),
    "MuJoCo Playground": Neighbour(
        "playground", "its steps", "", "tests/test_examples.py -k 'of_each_library and playground'"
    ),
    "tunix": Neighbour(
        "google-tunix", "targets", "", "tests/test_targets.py tests/compat/test_neighbours.py"
    ),
    "the oldest versions": Neighbour("--resolution=lowest-direct", **ALL, python="3.11"),
    "the newest versions": Neighbour("jax", **ALL, python="3.14"),
}


def main(names):
    failed = [name for name in names or NEIGHBOURS if not passes(name, NEIGHBOURS[name])]
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def passes(name, neighbour):
    """Install a neighbour, run its tests and write its line. Return whether all passed."""
    folder = OUT / re.sub(r"\W+", "-", name)
    python = folder / "bin" / "python"
    print(f"== {name}", flush=True)
    uv = [sys.executable, "-m", "uv", "--no-cache", "-q"]
    OUT.mkdir(parents=True, exist_ok=True)
    (overrides := OUT / "overrides.txt").write_text("\n".join(neighbour.instead.split()))
    ours = ["-e", f"{ROOT}{neighbour.extras}", *TESTERS.split()]
    install = [*uv, "pip", "install", "-p", python, "--override", overrides, *ours]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    imports = "".join(f"; import {MODULES[one]}" for one in re.findall(r"\w+", neighbour.extras))
    commands = (
        [*uv, "venv", "--clear", "-p", neighbour.python, folder],
        [*install, *neighbour.pins.split()],
        [python, "-c", f"import jaxreplay{imports}"],
        [python, *tests, *shlex.split(neighbour.tests)],
    )
    environ = os.environ | {"JAXREPLAY_CACHE": "off", "PYTHONPATH": str(ROOT)}
    environ |= {"JAXREPLAY_TESTS": "all"} if neighbour.is_thorough else {}
    for command in commands:
        if subprocess.run(list(map(str, command)), cwd=ROOT, env=environ).returncode:
            return False
    listed = subprocess.check_output([*uv, "pip", "list", "-p", python, "--format=json"])
    versions = {line["name"]: line["version"] for line in json.loads(listed)}
    write(name, neighbour, versions)
    shutil.rmtree(folder)
    return True


def write(name, neighbour, versions):
    """Write a line of the table."""
    project = re.match(r"[\w-]*", neighbour.pins)[0].replace("_", "-")
    shown = [project] * (project in versions) + [one for one in SHOWN if one in versions]
    with_versions = ", ".join(f"{one} {versions[one]}" for one in dict.fromkeys(shown))
    if neighbour.instead:
        with_versions += f"; its pins, but for {re.match(r'[a-z]*', neighbour.instead)[0]}"
    day = datetime.date.today()
    cells = name, neighbour.python, with_versions, neighbour.uses, day
    lines = PAGE.read_text().splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("| beside |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[head + 2 :])
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in rows}
    end = head + 2 + len(rows)
    rows[name] = f"| {' | '.join(map(str, cells))} |"
    lines[head + 2 : end] = [rows[one] for one in NEIGHBOURS if one in rows]
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

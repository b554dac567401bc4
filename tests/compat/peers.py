"""Tests of another library over our buffers: `python -m tests.compat.peers flashbax`, or `brax`, or
`sb3`.

Each library's own tests come from its source distribution, which is fetched into `out/compat`. Its
modules are replaced by ours before they are imported. What cannot pass is listed in
`expected_failures.py` with a reason; a test that is listed and passes is an error.
"""

import argparse
import importlib
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest

from tests.compat import expected_failures
from tests.support import compilations

OUT = Path(__file__).resolve().parents[2] / "out" / "compat"


def fetched(project, version):
    """Return the folder of a source distribution."""
    folder = OUT / f"{project.replace('-', '_')}-{version}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        command += ["--no-deps", "--no-binary", ":all:", "-d", str(OUT), f"{project}=={version}"]
        subprocess.run(command, check=True)
        with tarfile.open(OUT / f"{folder.name}.tar.gz") as archive:
            archive.extractall(OUT, filter="data")
    return folder


def replace(name, path=None, **members):
    """Make a module of this name, whose further modules lie in a folder."""
    module = types.ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def flashbax():
    """Replace flashbax's modules, and return the files of its tests."""
    folder = fetched("flashbax", "0.1.3") / "flashbax"
    from tests.compat import flashbax_modules

    left_out = expected_failures.FLASHBAX_NAMES
    missing, unused = flashbax_modules.missing_names(folder, left_out)
    if missing or unused:
        raise SystemExit(f"names of flashbax that are missing: {missing}; not needed: {unused}")
    for pattern, reason in left_out.items():
        print(f"left out: {pattern}: {reason}")
    replace("flashbax", folder)
    replace("flashbax.buffers", folder / "buffers")
    for name, members in flashbax_modules.modules().items():
        replace(f"flashbax.buffers.{name}", **members)
    return [str(path) for path in sorted(folder.rglob("*_test.py")) if path.stem in TESTS]


# what tests a buffer, and not a sum tree, a vault or helpers
TESTS = {
    "flat_buffer_test",
    "item_buffer_test",
    "mixer_test",
    "prioritised_flat_buffer_test",
    "prioritised_item_buffer_test",
    "prioritised_trajectory_buffer_test",
    "trajectory_buffer_test",
    "trajectory_queue_test",
}


def brax():
    """Replace Brax's module, and return the file of its tests."""
    folder = fetched("brax", "0.14.2") / "brax"
    from jaxreplay.compat import brax as ours

    replace("brax", folder)
    replace("brax.training", folder / "training")
    replace("brax.training.replay_buffers", **vars(ours))
    return [str(folder / "training" / "replay_buffers_test.py")]


def sb3():
    """Replace the buffers of Stable-Baselines3, and return the files of their tests."""
    folder = fetched("stable-baselines3", "2.9.2") / "tests"
    from stable_baselines3.common import off_policy_algorithm

    from jaxreplay import sb3 as ours

    # Their own modules go on with their own classes, which ours are derived from.
    names = ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "HerReplayBuffer")
    classes = {name: getattr(ours, name) for name in names}
    for name in ("stable_baselines3.common.buffers", "stable_baselines3.her"):
        replace(name, **vars(importlib.import_module(name)) | classes)
    for name in names[1:3]:  # it asks of a loaded buffer whether it is its own ReplayBuffer
        setattr(off_policy_algorithm, name, classes[name])
    return [str(folder / f"test_{name}.py") for name in ("buffers", "n_step_replay", "her")]


MOST_CASES = 100
LIBRARIES = {"flashbax": flashbax, "brax": brax, "sb3": sb3}


class Expectations:
    """Mark the tests that cannot pass, and count all."""

    def __init__(self, reasons):
        self.reasons, self.found = reasons, set()
        self.counts = {"passed": 0, "expected to fail": 0, "failed": 0}

    def pytest_collection_modifyitems(self, items):
        # Of a test with hundreds of cases, which would take hours, a few, spread evenly.
        cases = {}
        for item in items:
            cases.setdefault(f"{item.path}::{item.originalname}", []).append(item)
        items[:] = [
            item
            for alike in cases.values()
            for item in (alike if len(alike) <= MOST_CASES else alike[:: len(alike) // 4])
        ]
        for item in items:
            for pattern, reason in self.reasons.items():
                if f"{item.path.stem}::{item.name}".startswith(pattern):
                    self.found.add(pattern)
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "wasxfail") and report.skipped:
            self.counts["expected to fail"] += 1
        elif report.failed:
            self.counts["failed"] += 1
        elif report.when == "call" and report.passed:
            self.counts["passed"] += 1


def main():
    parser = argparse.ArgumentParser(description="Run other libraries' tests over our buffers.")
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("rest", nargs="*", help="further arguments of pytest")
    arguments, rest = parser.parse_known_args()
    compilations.use_cache()
    OUT.mkdir(parents=True, exist_ok=True)
    files = LIBRARIES[arguments.library]()
    reasons = getattr(expected_failures, arguments.library.upper())
    plugin = Expectations(reasons)
    options = ["-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short"]
    code = pytest.main([*options, *files, *arguments.rest, *rest], plugins=[plugin])
    counts = ", ".join(f"{number} {outcome}" for outcome, number in plugin.counts.items())
    print(f"{arguments.library}: {sum(plugin.counts.values())} tests run: {counts}")
    for pattern, reason in reasons.items():
        print(f"  expected to fail: {pattern}...: {reason}")
    if not rest and (missing := reasons.keys() - plugin.found):
        raise SystemExit(f"no test is named {', '.join(sorted(missing))}")
    sys.exit(code)


if __name__ == "__main__":
    main()

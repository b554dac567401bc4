"""`pytest benchmarks/conformance --replay=my_adapter.py` holds an adapter to the properties."""

import json
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from properties import ALL  # noqa: E402
from replay import adapters_of  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--replay", default=str(HERE / "adapters" / "ours.py"), help="file with adapters"
    )
    parser.addoption("--report", help="file to write what was found to, as JSON")


def pytest_generate_tests(metafunc):
    makes = adapters_of(metafunc.config.getoption("--replay"))
    metafunc.parametrize("make", makes.values(), ids=makes)
    metafunc.parametrize("has", ALL.values(), ids=ALL)


FOUND = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call":
        make, has = item.callspec.params["make"], item.callspec.params["has"]
        said = str(call.excinfo.value) if call.excinfo else ""
        kind = {"passed": "holds", "skipped": "not offered", "failed": "fails"}[report.outcome]
        if kind == "fails" and has.__name__ in make.arguable:
            kind, said = "arguable", f"{make.arguable[has.__name__]} ({said})"
        FOUND.setdefault(make.name, {})[has.__name__] = [kind, said]


def pytest_runtest_teardown():
    if "jax" in sys.modules:  # a process can't map the programs of all properties into its memory
        sys.modules["jax"].clear_caches()


def pytest_sessionfinish(session):
    path = session.config.getoption("--report")
    if path:
        pathlib.Path(path).write_text(json.dumps(FOUND, indent=1))

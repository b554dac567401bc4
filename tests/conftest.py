"""Settings shared by all tests.

`JAXREPLAY_TESTS=all` runs also the checks of more buffers and forms (`make test-all`), and `=soak`
every check at its full size (`make soak`). `JAXREPLAY_PLATFORM=gpu` or `tpu` runs the tests with
states laid out for that platform.
"""

import gc
import itertools
import os
import shutil
import signal

from tests.support import compilations, costs

SOAK = os.environ.get("JAXREPLAY_TESTS") == "soak"
ALL = SOAK or os.environ.get("JAXREPLAY_TESTS") == "all"
PLATFORM = os.environ.get("JAXREPLAY_PLATFORM")
# HLO is optimized as usual but for how it is fused, machine code is not: compiling takes a third
# of the time. The soak has the default. The programs that `support.hlo` judges have a user's HLO.
IS_QUICK = not SOAK and "JAXREPLAY_AOT" not in os.environ
compilations.use_cache()
if IS_QUICK:
    compilations.compile_quickly()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from jaxreplay.buffers.jitted import options_here  # noqa: E402
from jaxreplay.storage import platforms  # noqa: E402

if not hasattr(jax, "enable_x64"):  # an older JAX
    from jax.experimental import enable_x64 as _enable_x64

    jax.enable_x64 = _enable_x64

# These two set the compilers' environment before JAX is imported; the third needs cosmic-ray.
collect_ignore = ["aot/devices.py", "aot/programs.py", "mutants.py"]

hypothesis.settings.register_profile(
    "jaxreplay",
    deadline=None,
    derandomize=not ALL,  # each night has other histories,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("jaxreplay")

# Each save waits for the disk; in memory there is no wait. The soak writes too much for that.
if not SOAK and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**32:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# PyTorch gets one thread in each test process; with more, the processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Scripts start background processes with SIGINT ignored; the tests of Ctrl-C need the handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if PLATFORM:  # states are laid out for PLATFORM, on whatever device the tests run
    platforms.default = lambda: PLATFORM

# Of a process, before JAX's caches are cleared: each program takes memory, and some mappings, of
# which Linux allows 65,530. The limits hold at the end of a group of tests, and of a test.
_MOST_MEMORY, _MOST_MAPPINGS = (3 * 2**29, 5 * 2**29), 30_000
_EVERY, _num_tests = 8, itertools.count()
# Tracing makes many objects of which few die: collecting garbage took a tenth of the time.
gc.set_threshold(200_000, 20, 50)


def thorough(*values):
    """Return values of a test's parameters that only `make test-all` takes."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def pytest_addoption(parser):
    parser.addoption(
        "--budget", action="store_true", help="fail if the run costs more than costs.py allows"
    )


def pytest_configure(config):
    has_workers = bool(config.getoption("numprocesses", 0))
    counter = costs.Costs(config.getoption("budget"), has_workers)
    counter.listen()
    config.pluginmanager.register(counter, "costs")
    if not hasattr(config, "workerinput"):
        compilations.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what only `make test-all` runs, and have one process run all tests of a buffer of
    the catalog, and all other tests of a file, so that no program is compiled twice."""
    if not ALL:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        own = values.get("config") or getattr(values.get("case"), "name", item.location[0])
        item.add_marker(pytest.mark.xdist_group(str(own)))


@pytest.fixture(autouse=True)
def _compiles_nothing(request):
    """Check that a test with the marker `no_xla` compiled no program."""
    counter = request.config.pluginmanager.get_plugin("costs")
    if request.node.get_closest_marker("no_xla"):
        for on_one_core in (False, True):
            options_here(on_one_core)  # compiles an empty program, once
    before = counter.num_programs
    yield
    if request.node.get_closest_marker("no_xla"):
        assert counter.num_programs == before, counter.newest(counter.num_programs - before)


@pytest.fixture(autouse=True)
def _seeded():
    """Begin each test with the same state of NumPy's generator, from which Stable-Baselines3's
    buffers draw."""
    if not ALL:
        np.random.seed(0)


@pytest.fixture(autouse=True)
def _signals_stay():
    """Check that a test leaves SIGINT's handler and the blocked signals as they were."""

    def now():
        held_back = (
            signal.pthread_sigmask(signal.SIG_BLOCK, ())
            if hasattr(signal, "pthread_sigmask")
            else set()
        )
        return signal.getsignal(signal.SIGINT), held_back

    before = now()
    yield
    after = now()
    signal.signal(signal.SIGINT, before[0])
    assert after == before


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Drop the compiled programs of a process that has too many."""
    ends = nextitem is None or _group(item) != _group(nextitem)
    if not ends and next(_num_tests) % _EVERY:  # counting takes about 30 ms
        return
    if costs.memory_now() > _MOST_MEMORY[not ends] or costs.num_mappings() > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
        costs.give_back()


def _group(item):
    return item.get_closest_marker("xdist_group").args[0]

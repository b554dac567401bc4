"""Settings shared by all tests.

`JAXREPLAY_SOAK=1` runs every check at its full size (`make soak`). `JAXREPLAY_PLATFORM=gpu`
or `tpu` runs the tests with states laid out for that platform.
"""

import gc
import itertools
import os
import signal

from tests.support import compilations

compilations.use_cache()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from jaxreplay.storage import platforms  # noqa: E402

SOAK = os.environ.get("JAXREPLAY_SOAK") == "1"
PLATFORM = os.environ.get("JAXREPLAY_PLATFORM")
# In a checkpoint: the folder of an array of the counters, and the only chunk there.
COUNTERS = "streams.stored_counters" + ".0" * (PLATFORM == "gpu")
COUNTERS_CHUNK = f"{COUNTERS}/c.0" + ".0" * (PLATFORM != "gpu")
# These two set the compilers' environment before JAX is imported.
collect_ignore = ["aot/devices.py", "aot/programs.py"]
# HLO is optimized as usual, machine code is not: compiling takes a third less time. The soak and
# other processes have the default.
IS_QUICK = not SOAK and "JAXREPLAY_AOT" not in os.environ
jax.config.update("jax_disable_most_optimizations", IS_QUICK)

hypothesis.settings.register_profile(
    "jaxreplay",
    deadline=None,
    derandomize=not SOAK,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("jaxreplay")

# PyTorch gets one thread in each test process; with more, the processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Scripts start background processes with SIGINT ignored; the tests of Ctrl-C need the handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if PLATFORM:  # states are laid out for PLATFORM, on whatever device the tests run
    platforms.default = lambda: PLATFORM

_MOST_MAPPINGS = 30_000
_EVERY, _num_tests = 8, itertools.count()
# Tracing makes many objects of which few die: collecting garbage took a tenth of the time.
gc.set_threshold(200_000, 20, 50)


def pytest_configure(config):
    counter = compilations.Counter()
    counter.listen()
    config.pluginmanager.register(counter, "compilations")
    if not hasattr(config, "workerinput"):
        compilations.trim()


@pytest.fixture
def optimized():
    """Compile with all optimizations, as for users: for programs that run for long."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", IS_QUICK)


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


@pytest.fixture(autouse=True)
def _few_mappings():
    """Clear JAX's caches before the process has too many memory mappings.

    Each compiled program takes some; XLA crashes at Linux's limit of 65,530.
    """
    yield
    if next(_num_tests) % _EVERY:  # counting takes about 30 ms
        return
    try:
        with open("/proc/self/maps") as lines:
            num_mappings = sum(1 for _ in lines)
    except OSError:
        return
    if num_mappings > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()

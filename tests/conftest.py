"""Settings shared by all tests. JAXREPLAY_SOAK=1 runs every check at its full size (`make soak`);
JAXREPLAY_PLATFORM=gpu or tpu runs them over states that are laid out for it."""

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
# of rows that are saved: what lies in tiles is copied, and a file is half as large
COPIES = 2 if PLATFORM == "tpu" else 1
# they set what the compilers want before JAX is imported
collect_ignore = ["aot/devices.py", "aot/programs.py"]
# HLO is optimized as ever, machine code is not: a third less to compile. The soak has the default,
# as have other processes.
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

# torch's: one for each test process, or they wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# as of what a script starts in the background: the tests of Ctrl-C need it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if PLATFORM:  # states are laid out for it, on whatever device these tests run
    platforms.default = lambda: PLATFORM

_MOST_MAPPINGS = 30_000
_EVERY, _num_tests = 8, itertools.count()
# tracing makes many objects, and few that die: a tenth of the time went into looking for these
gc.set_threshold(200_000, 20, 50)


def pytest_configure(config):
    counter = compilations.Counter()
    counter.listen()
    config.pluginmanager.register(counter, "compilations")
    if not hasattr(config, "workerinput"):
        compilations.trim()


@pytest.fixture
def optimized():
    """Programs that run for long are compiled as users have them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", IS_QUICK)


@pytest.fixture(autouse=True)
def _signals_stay():
    """No test leaves a handler of Ctrl-C behind, or a signal that is held back."""

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
    """Forgets compiled programs before they are too many: each is some mappings of memory, and past
    65,530 Linux has XLA crash."""
    yield
    if next(_num_tests) % _EVERY:  # to count them takes some 30 ms
        return
    try:
        with open("/proc/self/maps") as lines:
            num_mappings = sum(1 for _ in lines)
    except OSError:
        return
    if num_mappings > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()

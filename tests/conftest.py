"""Settings shared by all tests. JAXREPLAY_SOAK=1 runs every check at its full size (`make soak`)."""

import os

import hypothesis

SOAK = os.environ.get("JAXREPLAY_SOAK") == "1"
if not SOAK:
    # Compiling is most of the time, and this takes a quarter off: HLO is optimized as ever, machine code less. The soak has the default.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=1"

hypothesis.settings.register_profile(
    "jaxreplay", deadline=None, derandomize=not SOAK, print_blob=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("jaxreplay")

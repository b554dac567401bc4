"""Programs of many small steps: on a CPU they run one step after another, where handing each to another core costs more than it brings.

For writes. Reads of large rows are better shared among the cores.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def small_program(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As `jax.jit`. By default XLA orders the steps for many cores to share: an add to one env took 97 us so, and 36 in order
    (two cores, jax 0.10.2)."""

    @functools.cache
    def compiled() -> Any:
        return jax.jit(function, compiler_options=options_here(), **options)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return compiled()(*arguments)

    return call


@functools.cache
def options_here() -> dict[str, str] | None:
    """For the compiler; None on other platforms, and where XLA does not know the option."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_OPTIONS).lower().compile()
    except Exception:
        return None
    return _OPTIONS

"""Transfers of this package between host and devices, which it makes also where
`jax_transfer_guard` forbids a program its own."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])

_GUARDS = [
    f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host")
]
_NONE = contextlib.nullcontext()


def allowed() -> Any:
    """Return a context in which this thread may move arrays. Where no guard is set, it takes a
    tenth of the time of `jax.transfer_guard`."""
    is_guarded = any(getattr(jax.config, guard) not in (None, "allow") for guard in _GUARDS)
    return jax.transfer_guard("allow") if is_guarded else _NONE


def allows(function: F) -> F:
    """Return a function that may move arrays."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with allowed():
            return function(*arguments, **options)

    return cast(F, call)

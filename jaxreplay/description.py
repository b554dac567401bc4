"""A configuration in words that are the same in another process: what files say of the buffer that they are of."""

import dataclasses
import functools
from typing import Any

import numpy as np


def description(config: Any) -> str:
    """As its `repr`, but each function by its name: an address is another one in each process."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = [f"{field.name}={description(getattr(config, field.name))}" for field in dataclasses.fields(config)]
        return f"{type(config).__name__}({', '.join(fields)})"
    if isinstance(config, tuple):
        return f"({', '.join(map(description, config))})"
    if isinstance(config, functools.partial):
        given = [*map(description, config.args), *(f"{name}={description(value)}" for name, value in config.keywords.items())]
        return f"partial({', '.join([description(config.func), *given])})"
    if callable(config):
        return getattr(config, "__qualname__", type(config).__qualname__)
    return repr(config.item() if isinstance(config, np.generic) else config)

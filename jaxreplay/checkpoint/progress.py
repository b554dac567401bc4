"""A bar that shows how far a save or a restore is."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


def bars(is_shown: bool | None) -> Callable[..., "tqdm[Any]"]:
    """A function of a title, a total and a unit that makes one. `is_shown`: None: if this is a
    terminal."""
    return functools.partial(_bar, None if is_shown is None else not is_shown)


def _bar(is_hidden: bool | None, title: str, total: int, unit: str = "B") -> "tqdm[Any]":
    return tqdm(
        total=total, desc=title, unit=unit, unit_scale=True, disable=is_hidden, file=sys.stderr
    )

"""Progress bars of saves and restores."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


def bars(is_shown: bool | None) -> Callable[..., "tqdm[Any]"]:
    """Return a function of a title, a total and a unit that makes a progress bar.

    Args:
      is_shown: Whether to show the bar, or None to show it only if stderr is a terminal.
    """
    return functools.partial(_bar, None if is_shown is None else not is_shown)


def _bar(is_hidden: bool | None, title: str, total: int, unit: str = "B") -> "tqdm[Any]":
    return tqdm(
        total=total, desc=title, unit=unit, unit_scale=True, disable=is_hidden, file=sys.stderr
    )

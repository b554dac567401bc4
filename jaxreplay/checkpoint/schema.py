"""Checks of fields that were read: each error names the field, and what was expected and got.

A check takes the field's name (`where`) and its value. It raises a CorruptCheckpointError if the
value is invalid.
"""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import printable
from jaxreplay.checkpoint.files import CorruptCheckpointError

_FOLDER = re.compile(r"[0-9]{10}-[0-9a-f]{8}")
_SPEC = re.compile(r"([a-z][a-z0-9_]{0,30})\[([0-9]{1,12}(?:, [0-9]{1,12}){0,60})?\]")
MOST_DEPTH = 100  # nested dicts and lists of metadata
_MOST_BYTES = 2**50  # of a row or an array
Check = Callable[[str, Any], None]


def check(where: str, value: Any, kind: type) -> None:
    """Check that a value has a type; a bool is no int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CorruptCheckpointError(f"{where}: expected {kind.__name__}, got {_shown(value)}")


def check_fields(where: str, fields: Any, checks: dict[str, Any]) -> None:
    """Check that a value is a dict with exactly these fields, each valid.

    Args:
      where: The dict's name.
      fields: The dict.
      checks: A type or a check, by field.
    """
    check(where, fields, dict)
    if fields.keys() != checks.keys():
        missing, more = (
            [printable(name) for name in sorted(names)]
            for names in (checks.keys() - fields.keys(), fields.keys() - checks.keys())
        )
        raise CorruptCheckpointError(
            f"{where}: missing {', '.join(missing) or 'nothing'}, unexpected "
            f"{', '.join(more) or 'nothing'}"
        )
    for name, wanted in checks.items():
        _run(f"{where}: {name}", fields[name], wanted)


def integer(low: int, high: int) -> Check:
    def run(where: str, value: Any) -> None:
        check(where, value, int)
        if not low <= value <= high:
            raise CorruptCheckpointError(f"{where}: expected {low} to {high}, got {_shown(value)}")

    return run


def integers(low: int, high: int) -> Check:
    """Return a check of a list of integers, which is fast for long lists."""
    one_by_one = list_of(integer(low, high))

    def run(where: str, value: Any) -> None:
        is_plain = isinstance(value, list) and all(type(one) is int for one in value)
        if not is_plain or (value and not low <= min(value) <= max(value) <= high):
            one_by_one(where, value)

    return run


def list_of(item: Any) -> Check:
    def run(where: str, value: Any) -> None:
        check(where, value, list)
        for place, one in enumerate(value):
            _run(f"{where}[{place}]", one, item)

    return run


def dict_of(item: Any) -> Check:
    def run(where: str, value: Any) -> None:
        check(where, value, dict)
        for key, one in value.items():
            name(where, key)
            _run(f"{where}[{printable(key)}]", one, item)

    return run


def name(where: str, value: Any) -> None:
    """Check the name of a leaf, which becomes part of a file's name."""
    check(where, value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CorruptCheckpointError(f"{where}: expected a name, got {_shown(value)}") from None


def folder(where: str, value: Any) -> None:
    """Check the name of a checkpoint's folder: it cannot lead to another folder."""
    _match(where, value, _FOLDER, "a name such as 0000000001-0123abcd")


def metadata(where: str, value: Any) -> None:
    """Check that JSON is not nested too deeply for Python to copy it."""
    check(where, value, dict)
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise CorruptCheckpointError(f"{where}: nested more than {MOST_DEPTH} deep")


def spec(where: str, value: Any) -> None:
    """Check the text of a dtype and a shape, such as `uint8[84, 84]`."""
    _match(where, value, _SPEC, "a dtype and a shape, such as float32[3, 2]")
    dtype_and_shape(where, value)


def dtype_and_shape(where: str, text: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of a `spec`."""
    found = _SPEC.fullmatch(text)
    assert found is not None
    shape = tuple(int(size) for size in (found[2] or "").split(", ") if size)
    try:
        dtype = np.dtype(jnp.dtype(found[1]))
    except TypeError:
        raise CorruptCheckpointError(f"{where}: there is no dtype {found[1]}") from None
    if not jnp.issubdtype(dtype, np.number) and dtype != np.bool_:
        raise CorruptCheckpointError(f"{where}: {found[1]} is no numeric dtype")
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes > _MOST_BYTES:
        raise CorruptCheckpointError(f"{where}: {text} is larger than an array can be")
    return dtype, shape


def _run(where: str, value: Any, wanted: Any) -> None:
    if isinstance(wanted, type):
        check(where, value, wanted)
    else:
        wanted(where, value)


def _match(where: str, value: Any, pattern: re.Pattern[str], expected: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise CorruptCheckpointError(f"{where}: expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Return the beginning of any value's text, for an error."""
    try:
        text = (
            repr(value)
            if isinstance(value, str | int | float | bool | type(None))
            else type(value).__name__
        )
    except ValueError:  # an integer of very many digits
        text = "an integer with too many digits to print"
    return printable(text[:60])

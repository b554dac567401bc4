"""Checks of what was read: each names the field, and says what it should be."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import printable
from jaxreplay.checkpoint.files import CorruptCheckpointError

_FOLDER = re.compile(r"[0-9]{10}-[0-9a-f]{8}")
_SPEC = re.compile(r"([a-z][a-z0-9_]{0,30})\[([0-9]{1,12}(?:, [0-9]{1,12}){0,60})?\]")
MOST_DEPTH = 100  # of the dicts and lists of metadata, one in another
_MOST_BYTES = 2**50  # of a row, or of an array
Check = Callable[[str, Any], None]


def check(where: str, value: Any, kind: type) -> None:
    """A CorruptCheckpointError, if it is not of that type."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CorruptCheckpointError(f"{where}: expected {kind.__name__}, got {_shown(value)}")


def check_fields(where: str, fields: Any, checks: dict[str, Any]) -> None:
    """A CorruptCheckpointError, if it is not a dict with these fields, and no others, or one is not
    as its check wants it: a type, or a function."""
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
    """A list of them; there may be very many."""
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
    """The name of a leaf, which is in that of a file."""
    check(where, value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CorruptCheckpointError(f"{where}: expected a name, got {_shown(value)}") from None


def folder(where: str, value: Any) -> None:
    """The name of a generation, which leads nowhere else."""
    _match(where, value, _FOLDER, "a name such as 0000000001-0123abcd")


def metadata(where: str, value: Any) -> None:
    """JSON that is not nested so deep that Python cannot copy it."""
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
    """A dtype and a shape, such as `uint8[84, 84]`."""
    _match(where, value, _SPEC, "a dtype and a shape, such as float32[3, 2]")
    dtype_and_shape(where, value)


def dtype_and_shape(where: str, text: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Of a `spec`."""
    found = _SPEC.fullmatch(text)
    assert found is not None
    shape = tuple(int(size) for size in (found[2] or "").split(", ") if size)
    try:
        dtype = np.dtype(jnp.dtype(found[1]))
    except TypeError:
        raise CorruptCheckpointError(f"{where}: there is no dtype {found[1]}") from None
    if not jnp.issubdtype(dtype, np.number) and dtype != np.bool_:
        raise CorruptCheckpointError(f"{where}: {found[1]} is no dtype of numbers")
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
    """The beginning of it, whatever it is."""
    try:
        text = (
            repr(value)
            if isinstance(value, str | int | float | bool | type(None))
            else type(value).__name__
        )
    except ValueError:  # an integer of very many digits
        text = "a number of very many digits"
    return printable(text[:60])

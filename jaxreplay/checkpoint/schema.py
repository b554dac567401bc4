"""Values from a file as their types say: each error names the field, and what was expected and got.

A type is a class, `list[...]`, `dict[str, ...]`, a dataclass, or `Annotated` with checks.
"""

import dataclasses
import re
import typing
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jaxreplay._util.names import printable
from jaxreplay.checkpoint.files import CorruptCheckpointError

_SPEC = re.compile(r"([a-z][a-z0-9_]{0,30})\[([0-9]{1,12}(?:, [0-9]{1,12}){0,60})?\]")
MOST_DEPTH = 100  # nested dicts and lists of metadata
_MOST_BYTES = 2**50  # of a row or an array


class Range(typing.NamedTuple):
    """Check of an integer, or of each one in a list, which is fast for long lists."""

    low: int
    high: int

    def __call__(self, where: str, value: Any) -> None:
        numbers = value if isinstance(value, list) else [value]
        if numbers and not self.low <= min(numbers) <= max(numbers) <= self.high:
            bad = next(one for one in numbers if not self.low <= one <= self.high)
            raise expected(where, f"{self.low} to {self.high}", bad)


def decoded(where: str, kind: Any, value: Any) -> Any:
    """Return a value that was read from JSON as a type.

    Args:
      where: Name of the value, for errors.
      kind: The type.
      value: The value.

    Raises:
      CorruptCheckpointError: The value is of another type, or does not pass a check.
    """
    if type(value) is kind:  # a bool is no int
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = decoded(where, inner[0], value)
        for check in inner[1:]:
            check(where, found)
        return found
    if dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind, include_extras=True)
        if not isinstance(value, dict):
            raise expected(where, "dict", value)
        if value.keys() != types.keys():
            missing, more = (
                ", ".join(map(printable, sorted(names))) or "nothing"
                for names in (types.keys() - value.keys(), value.keys() - types.keys())
            )
            raise CorruptCheckpointError(f"{where}: missing {missing}, unexpected {more}")
        found = {name: decoded(f"{where}: {name}", types[name], value[name]) for name in types}
        make: Any = kind
        return make(**found)
    if type(value) is not origin:
        raise expected(where, (origin or kind).__name__, value)
    if origin is dict:
        for key in value:
            name(where, key)
        return {
            key: decoded(f"{where}[{printable(key)}]", inner[1], one) for key, one in value.items()
        }
    if origin is list and not (inner[0] is int and all(type(one) is int for one in value)):
        return [decoded(f"{where}[{at}]", inner[0], one) for at, one in enumerate(value)]
    return value


def name(where: str, value: str) -> None:
    """Check the name of a leaf, which becomes part of a file's name."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise expected(where, "a name", value) from None


def folder(where: str, value: str) -> None:
    """Check the name of a checkpoint's folder: it cannot lead to another folder."""
    if not re.fullmatch(r"[0-9]{10}-[0-9a-f]{8}", value):
        raise expected(where, "a name such as 0000000001-0123abcd", value)


def metadata(where: str, value: Any) -> None:
    """Check that JSON is not nested too deeply for Python to copy it."""
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


Metadata = Annotated[dict, metadata]


def dtype_and_shape(where: str, text: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of a text such as `uint8[84, 84]`."""
    if (found := _SPEC.fullmatch(text)) is None:
        raise expected(where, "a dtype and a shape, such as float32[3, 2]", text)
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


def expected(where: str, what: str, value: Any) -> CorruptCheckpointError:
    """Return the error for a value that is not `what`, with the beginning of its text."""
    try:
        text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    except ValueError:  # an integer of very many digits
        text = "an integer with too many digits to print"
    return CorruptCheckpointError(f"{where}: expected {what}, got {printable(text[:60])}")

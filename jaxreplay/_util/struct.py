"""Base classes: `Static` for configurations and `Node` for nodes of pytrees."""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

import jax

from jaxreplay._util import checks
from jaxreplay._util.hints import unknown_arguments
from jaxreplay._util.names import kind_of, short

NODES: list[type] = []  # all classes of nodes


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Static:
    """A frozen, hashable configuration. Each subclass becomes a dataclass with keyword arguments,
    and a pytree without leaves.

    `jit` compiles once for equal configurations. Functions are equal if they are one object.
    """

    # names of the parameters that one call may give, and what it gave, which may be traced
    takes: ClassVar[tuple[str, ...]] = ()
    given: ClassVar[Mapping[str, Any]] = {}
    # of some of them the name, the smallest value and the largest
    ranges: ClassVar[tuple[tuple[str, float, float], ...]] = ()

    def all_takes(self) -> set[str]:
        """Return the names of the parameters that one call may give, also to parts."""
        return set(self.takes).union(*(part.all_takes() for part in self._static_parts()))

    def check_given(self, where: str, values: Mapping[str, Any]) -> None:
        """Raise a ValueError if a number of one call is out of range. Arrays of JAX are not looked
        at: to read one may take long.

        Args:
          where: Name of the called method, for the error.
          values: Values by name.
        """
        if not values:  # as in most calls: to walk the parts takes 36 us
            return
        for name, low, high in self.ranges:
            if name in values:
                checks.check_range(where, name, values[name], low, high)
        for part in self._static_parts():
            part.check_given(where, values)

    def with_given(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with parameters of one call, also for parts.

        The copy is for use within that call. It equals only copies with the same `values`, an
        object that may hold what is traced.

        Args:
          values: Values by name. `Static.given`: those of no call.
        """
        other = copy.copy(self)
        fields = {name: _with_given(value, values) for name, value in self._fields().items()}
        vars(other).update(fields, given=values)
        return other

    def _static_parts(self) -> list["Static"]:
        """Return the configurations in fields, and in tuples of fields."""
        return _parts_in(tuple(self._fields().values()))

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
        _compare_by_identity(cls)
        of_init = inspect.signature(cls.__init__)  # `help` would show that of `__new__`
        cls.__signature__ = of_init.replace(parameters=[*of_init.parameters.values()][1:])
        jax.tree_util.register_static(cls)

    if not TYPE_CHECKING:  # a type checker knows the arguments

        def __new__(cls, *arguments: Any, **options: Any):
            known = [field.name for field in dataclasses.fields(cls)]
            if unknown := [name for name in options if name not in known]:
                raise TypeError(unknown_arguments(cls.__name__, unknown, known))
            return super().__new__(cls)

    def __repr__(self) -> str:
        """Show the fields that differ from their defaults."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = ((field, getattr(self, field.name)) for field in fields)
        shown = (f"{field.name}={value!r}" for field, value in given if value != field.default)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            try:
                hash(getattr(self, field.name))
            except TypeError:
                got = kind_of(getattr(self, field.name))
                raise ValueError(
                    f"{type(self).__name__}: {field.name} is {got}, but a configuration holds "
                    "plain Python values, which are hashable, so that equal ones share one "
                    f"compilation; write {field.name}=float(x) or int(x)"
                ) from None
        self._check()

    def _check(self) -> None:
        """Raise a ValueError for invalid values. For subclasses to override."""


def _parts_in(value: Any) -> list[Static]:
    if isinstance(value, tuple):
        return [part for one in value for part in _parts_in(one)]
    return [value] if isinstance(value, Static) else []


def _with_given(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Static):
        return value.with_given(values)
    return tuple(_with_given(one, values) for one in value) if _parts_in(value) else value


def _compare_by_identity(cls: Any) -> None:
    """Have configurations of a class equal each other only if one call gave both their values, and
    if their functions are the same objects: equality of callables may leave out an array."""
    of_fields = cls.__eq__
    values = lambda config: [getattr(config, name) for name in cls.__dataclass_fields__]
    leaves = lambda config: jax.tree.leaves(values(config), is_leaf=callable)  # also in tuples
    functions = lambda config: [id(one) for one in leaves(config) if callable(one)]
    cls.__eq__ = lambda self, other: (
        self is other
        or (
            type(self) is type(other)
            and self.given is other.given
            and of_fields(self, other)
            and functions(self) == functions(other)
        )
    )


def static_field() -> Any:
    """Declare a static field of a node, which is no leaf of the pytree."""
    return dataclasses.field(metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
class Node:
    """Base class of states: a frozen node of a pytree with named fields, each an array or a pytree.

    Each subclass becomes a dataclass, without a decorator. `node.replace(field=value)` returns a
    copy with other values of some fields.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        by_kind: tuple[list[str], list[str]] = [], []
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            by_kind["static" in field.metadata].append(field.name)
        jax.tree_util.register_dataclass(cls, *by_kind)
        NODES.append(cls)

    def __repr__(self) -> str:
        """Show shapes and dtypes: `Index(row i32[8], lap u32[8])`."""
        return short(self)

    # with other values of some fields: node.replace(field=value)
    replace = dataclasses.replace

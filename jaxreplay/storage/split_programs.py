"""Programs over rows that lie on the host. Each is split into what runs before the rows are
gathered, and what runs with them.

A function is traced with rows that are unknown: each read is an equation of its own in the jaxpr.
The first part has the equations that depend on no row, and so the numbers of the rows to gather.
The second part has the others. What they need of the first part is handed on. So exactly the rows
are gathered that the function would read on a device.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jaxreplay._util.aligned import LARGE

_rows_p = Primitive("rows_of_the_host")


def rows_of(name: Any, row: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return rows of the host, in a function that `split` traces: [*row.shape, *shape].

    Args:
      name: As in a `HostArray`.
      row: int32[...].
      shape: Shape of a row.
      dtype: Its dtype.
    """
    return _rows_p.bind(jnp.asarray(row), name=name, shape=tuple(shape), dtype=np.dtype(dtype))


@_rows_p.def_abstract_eval
def _(row: Any, *, name: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.core.ShapedArray((*row.shape, *shape), dtype)


def _refuse(*_: Any, name: Any, **params: Any) -> Any:
    raise ValueError(
        f"the rows of {name[-1]} lie on the host, which no program reads: use draw, take and read "
        "of the tiered buffer"
    )


_rows_p.def_impl(_refuse)
mlir.register_lowering(_rows_p, _refuse)


batching.primitive_batchers[_rows_p] = lambda args, dims, **params: (
    _rows_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params),
    0,
)


@dataclasses.dataclass(frozen=True)
class Request:
    """Rows that a program reads.

    Attributes:
      name: Name of the leaf, as in a `HostArray`.
      shape: Shape of the row numbers.
      size: Number of rows.
    """

    name: Any
    shape: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A function in two parts, which equals itself alone.

    Attributes:
      requests: The rows to gather between them.
      first: Takes the function's arguments, flat. Returns the row numbers of each request, what
        `second` needs, the leaves of the result that depend on no row, and the other result.
      second: Takes the gathered rows, [*request.shape, ...], and what it needs. Returns the leaves
        of the result that are computed from rows.
      rows: The places of the large requests whose rows are leaves of the result as they are.
      joined: Takes the leaves that are computed from rows, those that depend on none, and the rows
        of `rows`. Returns the result.
    """

    requests: tuple[Request, ...]
    first: Callable[..., tuple[list[Any], list[Any], list[Any], Any]]
    second: Callable[..., list[Any]]
    rows: tuple[int, ...]
    joined: Callable[..., Any]


def split(function: Callable[..., Any], *arguments: Any) -> Split:
    """Split a function.

    Args:
      function: Pure function, which reads rows of the host by `rows_of`. It returns its result, and
        another one that depends on no row.
      arguments: Its arguments, or their shapes and dtypes.

    Raises:
      ValueError: It reads rows inside of a loop, a branch or a `jit`, or the numbers of rows depend
        on rows.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, (structure, other) = closed.jaxpr, map(jax.tree.structure, shapes)
    outvars, others = jaxpr.outvars[: structure.num_leaves], jaxpr.outvars[structure.num_leaves :]

    # Which equations depend on rows.
    live = _needed(jaxpr.eqns, _variables(jaxpr.outvars))
    requests, early, late, unknown = [], [], [], set()
    for eqn in live:
        depends = any(one in unknown for one in _variables(eqn.invars))
        if any(map(_reads, _inner(eqn))):
            raise ValueError(
                f"the view reads rows inside of {eqn.primitive}; of rows on the host it may read "
                "none in a loop, a branch or a jit"
            )
        if eqn.primitive is _rows_p:
            if depends:
                name = eqn.params["name"][-1]
                raise ValueError(
                    f"the numbers of the rows of {name} that the view reads depend on other rows, "
                    "which are not on the device"
                )
            requests.append(eqn)
        elif depends:
            late.append(eqn)
        else:
            early.append(eqn)
            continue
        unknown.update(eqn.outvars)

    # The two parts.
    numbers, gathered = [eqn.invars[0] for eqn in requests], [eqn.outvars[0] for eqn in requests]
    place_of = {
        one: place
        for place, one in enumerate(gathered)
        if one.aval.size * one.aval.dtype.itemsize >= LARGE
    }
    kinds = [
        "known" if isinstance(one, Literal) or one not in unknown
        else "row" if one in place_of else "made"
        for one in outvars
    ]  # fmt: skip
    known, rows, made = (
        [one for one, its_kind in zip(outvars, kinds, strict=True) if its_kind == kind]
        for kind in ("known", "row", "made")
    )
    used = dict.fromkeys(one for eqn in late for one in _variables(eqn.invars))
    needed = [one for one in used if one not in unknown]
    results = [*numbers, *needed, *known, *others]
    # Constants may be traced: those that the second part needs are handed on.
    first = ClosedJaxpr(
        _part(jaxpr, jaxpr.constvars, jaxpr.invars, _needed(early, _variables(results)), results),
        closed.consts,
    )
    ends = [*itertools.accumulate(map(len, (numbers, needed, known)))]

    def of_arguments(*arguments: Any) -> tuple[list[Any], list[Any], list[Any], Any]:
        found = jaxpr_as_fun(first)(*arguments)
        parts = [found[start:end] for start, end in itertools.pairwise((0, *ends))]
        return *map(list, parts), jax.tree.unflatten(other, found[ends[-1] :])  # type: ignore

    def joined(made: Iterable[Any], known: Iterable[Any], rows: Iterable[Any]) -> Any:
        left = {"made": iter(made), "known": iter(known), "row": iter(rows)}
        return jax.tree.unflatten(structure, [next(left[kind]) for kind in kinds])

    second = ClosedJaxpr(_part(jaxpr, [], [*gathered, *needed], late, made), [])
    asked = tuple(
        Request(eqn.params["name"], eqn.invars[0].aval.shape, eqn.invars[0].aval.size)
        for eqn in requests
    )
    places = tuple(place_of[one] for one in rows)
    return Split(asked, of_arguments, jaxpr_as_fun(second), places, joined)


jax.tree_util.register_static(Split)


def _part(jaxpr: Jaxpr, constvars: Any, invars: Any, eqns: Any, outvars: Any) -> Jaxpr:
    """Return some equations of a jaxpr as one of their own."""
    new = {"constvars": constvars, "invars": invars, "eqns": eqns, "outvars": outvars}
    info: Any = jaxpr.debug_info
    if info is not None and not hasattr(info, "with_unknown_names"):  # the names must fit
        names = {"arg_names": ("",) * len(invars), "result_paths": ("",) * len(outvars)}
        new["debug_info"] = info._replace(**names)
    return jaxpr.replace(**new, effects=set().union(*(eqn.effects for eqn in eqns)))


def _variables(some: Iterable[Any]) -> list[Any]:
    return [one for one in some if not isinstance(one, Literal)]


def _needed(eqns: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
    """Return the equations that variables need, and those that have effects, such as a print."""
    needed, kept = set(variables), []
    for eqn in reversed([*eqns]):
        if eqn.effects or any(one in needed for one in eqn.outvars):
            kept.append(eqn)
            needed.update(_variables(eqn.invars))
    return kept[::-1]


def _inner(eqn: Any) -> list[Any]:
    """Return the jaxprs of an equation's loops, branches and calls."""
    is_jaxpr = lambda value: isinstance(value, Jaxpr | ClosedJaxpr)
    leaves = jax.tree.leaves([*eqn.params.values()], is_leaf=is_jaxpr)
    return [getattr(one, "jaxpr", one) for one in leaves if is_jaxpr(one)]


def _reads(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr reads rows of the host."""
    return any(eqn.primitive is _rows_p or any(map(_reads, _inner(eqn))) for eqn in jaxpr.eqns)

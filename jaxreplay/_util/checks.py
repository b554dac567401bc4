"""Errors at the public edge: every bad leaf by its key path, what came and what was expected, and
how to mend it."""

import inspect
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree, Specs
from jaxreplay._util.names import name_of, named, spec_text


def check_size(where: str, name: str, value: Any) -> None:
    """A size must be an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{where}: {name} must be an int of at least 1, got {value!r}")


def checked_seconds(where: str, timeout: Any, least: float = 0.0) -> float:
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float | np.number)
        or not timeout >= least
    ):
        raise ValueError(
            f"{where}: timeout must be a number of seconds, at least {least:g}, got {timeout!r}"
        )
    return float(timeout)


def check_callable(where: str, name: str, value: Any, arguments: tuple[str, ...]) -> None:
    """A function of so many arguments; a wrong number would show deep inside of the first
    sample."""
    call = f"{name}({', '.join(arguments)})"
    if not callable(value):
        raise ValueError(f"{where}: {name} must be a function, called as {call}, got {value!r}")
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{where}: {name} is called as {call}, but cannot be: {error}") from None
    except ValueError:  # what is not written in Python may have no signature
        pass


def check_part(where: str, name: str, value: Any, kind: type, example: str) -> None:
    """An instance: a class in its place is the usual slip."""
    if not isinstance(value, kind):
        package = ".".join(kind.__module__.split(".")[:2])
        raise ValueError(
            f"{where}: {name} must be an instance of a {package}.{kind.__name__}, "
            f"such as {example}, got {value!r}"
        )


def check_capacity(where: str, capacity: int, num_envs: int, smallest_length: int) -> None:
    """The capacity must divide into streams, each long enough for one window."""
    check_size(where, "capacity", capacity)
    check_size(where, "num_envs", num_envs)
    if capacity % num_envs:
        below, above = capacity // num_envs * num_envs, (capacity // num_envs + 1) * num_envs
        nearest = f"{below} and {above}" if below else f"{above}"
        raise ValueError(
            f"{where}: capacity={capacity} rows do not divide into num_envs={num_envs} equal "
            f"streams; the nearest that do: {nearest}"
        )
    if capacity // num_envs < smallest_length:
        raise ValueError(
            f"{where}: capacity={capacity} gives each of num_envs={num_envs} streams "
            f"{capacity // num_envs} rows, but one window needs "
            f"{smallest_length}; the smallest capacity is {smallest_length * num_envs}"
        )
    if capacity > 2**30:  # positions of two rings are added before they wrap, in int32
        raise ValueError(
            f"{where}: capacity={capacity} is too large: rows are numbered by int32, so it must "
            f"be at most {2**30}"
        )


def cast(name: str, array: np.ndarray, dtype: Any, why: str) -> np.ndarray:
    """Cast numbers to a dtype that holds them: integers keep their value, also as floats, and
    finite numbers stay finite.

    Raises:
      ValueError: names the first number that the dtype does not hold, and says `why` it must be
        this one.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        new = array.astype(dtype)
        if jnp.issubdtype(array.dtype, np.integer):
            is_same = np.equal(new.astype(array.dtype), array)
            if jnp.issubdtype(dtype, jnp.floating):  # one that is too large comes back as anything
                is_same &= new.astype(np.float64) < float(int(jnp.iinfo(array.dtype).max) + 1)
        else:
            is_same = np.isfinite(new) | ~np.isfinite(array)
    if not np.all(is_same):
        raise ValueError(
            f"{name}: {array[~is_same][0].item()!r} cannot be stored as {dtype.name}, {why}"
        )
    return new


def specs(where: str, tree: PyTree) -> Any:
    """Shape and dtype of every leaf, as JAX would hold it: NumPy's 64-bit values are 32-bit ones
    unless x64 is on."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(where, path, leaf), tree)


def check_leaves(where: str, got: Any, expected: Specs, hint: str) -> None:
    """Raise a ValueError that names each leaf whose presence, shape or dtype is not as expected.

    Args:
      expected: the same tree of `jax.ShapeDtypeStruct`s, or of anything with a shape and a dtype.
    """
    (found, structure), (wanted, expected_structure) = (
        jax.tree.flatten(got),
        jax.tree.flatten(expected),
    )
    if structure == expected_structure and all(map(_is_alike, found, wanted)):
        return
    got_leaves, expected_leaves = (
        dict(named(specs(where, got))),
        dict(named(specs(where, expected))),
    )
    bad = []
    for path, spec in expected_leaves.items():
        if path not in got_leaves:
            bad.append(f"{path}: missing, expected {spec_text(spec)}")
        elif (got_leaves[path].shape, got_leaves[path].dtype) != (spec.shape, spec.dtype):
            bad.append(f"{path}: got {spec_text(got_leaves[path])}, expected {spec_text(spec)}")
    bad += [
        f"{path}: unexpected, got {spec_text(spec)}"
        for path, spec in got_leaves.items()
        if path not in expected_leaves
    ]
    if not bad and structure != expected_structure:
        bad.append(f"the tree's structure: got {structure}, expected {expected_structure}")
    if bad:
        raise ValueError("\n  ".join([f"{where}:", *bad]) + f"\n{hint}")


def _is_alike(leaf: Any, spec: Specs) -> bool:
    """Return True for an array of JAX's own that has the shape and dtype of `spec`: it needs no
    look at its name."""
    return isinstance(leaf, jax.Array) and (leaf.shape, leaf.dtype) == (
        getattr(spec, "shape", None),
        getattr(spec, "dtype", None),
    )


def check_storable(where: str, tree: PyTree) -> None:
    """A ValueError that names each leaf which is no array of numbers, or one that would lose
    something on the way."""
    reasons = (
        (name_of(path) or "the leaf", reason_against(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )
    if bad := [f"{name}: {reason}" for name, reason in reasons if reason]:
        raise ValueError("\n  ".join([f"{where}:", *bad]))


def reason_against(leaf: Any) -> str | None:
    """Why a leaf cannot be stored; None where it can."""
    if isinstance(leaf, np.ma.MaskedArray):
        return (
            "a masked array would lose its mask: write x.filled(value), and store x.mask as a "
            "leaf of its own where it matters"
        )
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return "a typed key cannot be stored; store jax.random.key_data(key)" if is_key else None
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        if isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__jax_array__"):
            return None
        dtype = np.asarray(leaf).dtype
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    if is_number and dtype.itemsize <= 8 * (1 + (dtype.kind == "c")):
        return (
            None
            if dtype.isnative
            else "its bytes are in the other order: write x.astype(x.dtype.newbyteorder('='))"
        )
    what = f"an array of {dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
    return f"{what} cannot be stored, only numbers that JAX has, and arrays of them"


def _spec(where: str, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    if reason := reason_against(leaf):
        raise ValueError(f"{where}: {name_of(path) or 'the leaf'}: {reason}")
    leaf = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))


def check_not_forked(what: str, pid: int) -> None:
    """A RuntimeError in a process that was forked off the one with this pid: JAX's threads, which
    do the work, were not."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"{what} was made in process {pid}, and this one, {os.getpid()}, was forked off it: "
            "JAX's threads are not here, and a call "
            'would never return. Start processes with multiprocessing.get_context("spawn"), and '
            "make what they need in them"
        )

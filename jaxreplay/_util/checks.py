"""Checks of arguments: errors name every bad leaf by its key path, got and expected values, and the
cure."""

import functools
import inspect
import os
import warnings
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util.aliases import PyTree, Specs
from jaxreplay._util.names import name_of, named, spec_text

_ROUNDED = np.dtype(np.float64), np.dtype(np.float32)
_WHOLE = 2.0**24  # float32 has all smaller whole numbers
UNLESS_X64 = "which is what JAX has unless jax_enable_x64 is on"
_outside: Any = None  # the state of tracing outside of `jit`
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_tracing() -> bool:
    """Return whether the call is inside of `jit` or `scan`."""
    global _outside
    now = _trace_state()(convention="flax")
    if now == _outside:  # takes 1 us; a program without work takes 10
        return False
    if isinstance(_no_work()(), Tracer):
        return True
    _outside = now
    return False


@functools.cache
def _trace_state() -> Any:
    try:  # takes 30 ms to import, as it imports Pallas
        from jax.extend.core import get_opaque_trace_state
    except ImportError:  # of JAX before 0.4.36
        from jax.core import get_opaque_trace_state
    return get_opaque_trace_state


@functools.cache
def _no_work() -> Any:
    return jax.jit(lambda: 0)


def check_size(where: str, name: str, value: Any) -> None:
    """Raise a ValueError unless a size is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{where}: {name} must be an int of at least 1, got {value!r}")


def check_range(where: str, name: str, value: Any, low: float, high: float) -> None:
    """Raise a ValueError unless a number, or each of an array of NumPy, is finite and in a range.
    Anything else is not looked at."""
    known = np.asarray(value) if isinstance(value, Real | np.ndarray) else np.empty(0)
    if not ((known >= low) & (known <= high) & (known < np.inf)).all():
        limits = f"in [{low:g}, {high:g}]" if high < np.inf else f"finite and at least {low:g}"
        raise ValueError(f"{where}: {name} must be {limits}, got {value}")


def checked_seconds(where: str, timeout: Any, least: float = 0.0, name: str = "timeout") -> float:
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float | np.number)
        or not timeout >= least
    ):
        raise ValueError(
            f"{where}: {name} must be a number of seconds, at least {least:g}, got {timeout!r}"
        )
    return float(timeout)


def check_callable(where: str, name: str, value: Any, arguments: tuple[str, ...]) -> None:
    """Raise a ValueError unless a value is a function of these arguments. The first sample would
    raise a less clear error."""
    call = f"{name}({', '.join(arguments)})"
    if not callable(value):
        raise ValueError(f"{where}: {name} must be a function, called as {call}, got {value!r}")
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{where}: {name} must accept the call {call}: {error}") from None
    except ValueError:  # functions not written in Python may have no signature
        pass


def call_traced(where: str, name: str, function: Any, *arguments: Any, cure: str = "") -> Any:
    """Call a user's function. Raise a ValueError if it needs the values of traced arrays, as
    NumPy's functions do.

    Args:
      where: Name of the caller, for the error.
      name: Name of the argument that the function was.
      function: The function.
      arguments: Its arguments.
      cure: End of the error's sentence. Default: none.
    """
    try:
        return function(*arguments)
    except _NEEDS_VALUES as error:
        raise ValueError(
            f"{where}: {name} needs the values of its arguments, which JAX does not know while it "
            f"compiles: write it with jax.numpy in place of numpy, and with jnp.where in place of "
            f"if{cure}"
        ) from error


def check_part(where: str, name: str, value: Any, kind: type, example: str) -> None:
    """Raise a ValueError unless a value is an instance of `kind`; often it is a class instead."""
    if not isinstance(value, kind):
        package = ".".join(kind.__module__.split(".")[:2])
        raise ValueError(
            f"{where}: {name} must be an instance of a {package}.{kind.__name__}, "
            f"such as {example}, got {value!r}"
        )


def check_extra(
    where: str, name: str, key: str | None, extras: Any, shape: tuple[int, ...] | None = None
) -> None:
    """Raise a ValueError if a key is given, and a step's extras do not have it, or have another
    shape."""
    if key is None or (isinstance(extras, dict) and key in extras):
        if key is not None and shape is not None and (got := extras[key].shape) != shape:
            raise ValueError(
                f"{where}: {name}={key!r} has the shape {list(got)}, expected {list(shape)}"
            )
        return
    has = f"they have {', '.join(extras)}" if isinstance(extras, dict) else "they are not a mapping"
    raise ValueError(
        f"{where}: {name}={key!r} is no key of the step's extras: {has}; store it with each step, "
        f"as extras={{{key!r}: ...}}"
    )


def check_capacity(where: str, capacity: int, num_envs: int, smallest_length: int) -> None:
    """Raise a ValueError unless the capacity divides into streams that are long enough."""
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
    if capacity > 2**30:  # int32: two positions are added before they wrap
        raise ValueError(
            f"{where}: capacity={capacity} is too large: rows are numbered by int32, so it must "
            f"be at most {2**30}"
        )


def cast(name: str, array: np.ndarray, dtype: Any, why: str) -> np.ndarray:
    """Cast numbers to a dtype. Integers must keep their value, also as floats, and finite numbers
    must stay finite. A large float64 that float32 rounds, such as a time in seconds, is warned of.

    Args:
      name: Name of the array, for the error.
      array: Array of numbers.
      dtype: The new dtype.
      why: End of the error's sentence: the reason for this dtype, and the cure.

    Raises:
      ValueError: A number does not fit the dtype. Names the first one.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if array.dtype.kind == dtype.kind and dtype.kind in "iu":  # the frequent kinds
        new = array.astype(dtype)
        if (new == array).all():
            return new
    elif (array.dtype, dtype) == _ROUNDED and np.abs(array).max(initial=0) < _WHOLE:
        return array.astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        new = array.astype(dtype)
        if jnp.issubdtype(array.dtype, np.integer):
            is_same = np.equal(new.astype(array.dtype), array) & ((new < 0) == (array < 0))
            if jnp.issubdtype(dtype, jnp.floating):  # too large ones come back as any integer
                is_same &= new.astype(np.float64) < float(int(jnp.iinfo(array.dtype).max) + 1)
        else:
            is_same = np.isfinite(new) | ~np.isfinite(array)
            if (array.dtype, dtype) == _ROUNDED:
                _warn_of_rounding(name, array, new, why)
    if not np.all(is_same):
        raise ValueError(
            f"{name}: {array[~is_same][0].item()!r} cannot be stored as {dtype.name}, {why}"
        )
    return new


def _warn_of_rounding(name: str, array: np.ndarray, new: np.ndarray, why: str) -> None:
    """Warn of float64 numbers that are too large for float32 to tell them from their neighbours."""
    if ((np.abs(array) >= _WHOLE) & np.isfinite(new) & (new != array)).any():
        # The same text for all numbers, so that Python shows it once.
        warnings.warn(
            f"{name}: float64 numbers beyond 2**24 are rounded to float32, {why}. Neighbouring "
            "times in seconds become equal: store the time since the start. If it is meant, cast "
            "them yourself: x.astype(np.float32)",
            stacklevel=3,
        )


def specs(where: str, tree: PyTree) -> Any:
    """Return shape and dtype of every leaf as a JAX array: 64-bit values have 32 bits unless x64 is
    on."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(where, path, leaf), tree)


def check_leaves(where: str, got: Any, expected: Specs, hint: str) -> None:
    """Raise a ValueError that names each leaf whose presence, shape or dtype is not as expected.

    Args:
      where: Name of the caller, for the error.
      got: Pytree of arrays.
      expected: The same tree, of leaves with a shape and a dtype.
      hint: Last line of the error.
    """
    (found, structure), (wanted, expected_structure) = (
        jax.tree.flatten(got),
        jax.tree.flatten(expected),
    )
    if structure == expected_structure and all(
        isinstance(leaf, jax.Array)
        and (leaf.shape, leaf.dtype) == (getattr(spec, "shape", None), getattr(spec, "dtype", None))
        for leaf, spec in zip(found, wanted, strict=True)
    ):  # fast, as it builds no name
        return
    got_leaves, expected_leaves = (
        dict(named(specs(where, got))),
        dict(named(specs(where, expected))),
    )
    bad = []
    for path, spec in expected_leaves.items():
        of_list = [one for one in got_leaves if one.startswith(f"{path}.")]
        if of_list and {*of_list[0].removeprefix(path)} == {".", "0"}:  # also a list of lists
            got_leaves = {one: got_leaves[one] for one in got_leaves if one not in of_list}
            bad.append(f"{path}: got {len(of_list)} leaves of a list: write np.array({path})")
        elif path not in got_leaves:
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


def check_shapes(where: str, expected: tuple[int, ...], **arrays: Any) -> None:
    """Raise a ValueError that names each array of another shape: it would be broadcast."""
    bad = [
        f"{name}: got {list(jnp.shape(array))}"
        for name, array in arrays.items()
        if jnp.shape(array) != expected
    ]
    if bad:
        raise ValueError(
            f"{where}: {'; '.join(bad)}, expected {list(expected)}, one value for each step; write "
            "x.squeeze(-1) for a critic's last axis of size 1, and use jax.vmap for further axes"
        )


def check_storable(where: str, tree: PyTree) -> None:
    """Raise a ValueError that names each leaf which is no array of numbers, or would lose data."""
    reasons = (
        (name_of(path) or "the leaf", reason_against(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )
    if bad := [f"{name}: {reason}" for name, reason in reasons if reason]:
        raise ValueError("\n  ".join([f"{where}:", *bad]))


def reason_against(leaf: Any) -> str | None:
    """Return the reason why a leaf cannot be stored, or None if it can."""
    if isinstance(leaf, np.ma.MaskedArray):
        return (
            "a masked array would lose its mask: write x.filled(value), and store x.mask as "
            "another leaf if you need it"
        )
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return "a typed key cannot be stored; store jax.random.key_data(key)" if is_key else None
    dtype = getattr(leaf, "dtype", None)
    if type(leaf).__module__ == "torch":
        return "a tensor of PyTorch: use a jaxreplay.Replay, or jaxreplay.torch.from_torch(step)"
    if isinstance(leaf, int):  # it may be too large
        leaf = np.asarray(leaf)
        dtype = leaf.dtype
    if not isinstance(dtype, np.dtype):
        if isinstance(leaf, float | complex) or hasattr(leaf, "__jax_array__"):
            return None
        dtype = np.asarray(leaf).dtype
    if isinstance(leaf, np.ndarray) and (lost := lost_integer(leaf)) is not None:
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        return f"{lost} cannot be stored as {narrow}, {UNLESS_X64}"
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    if is_number and dtype.itemsize <= 8 * (1 + (dtype.kind == "c")):
        return (
            None
            if dtype.isnative
            else "its byte order is not native: write x.astype(x.dtype.newbyteorder('='))"
        )
    what = f"an array of {dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
    return f"{what} cannot be stored, only numbers of JAX's dtypes, and arrays of them"


def lost_integer(array: np.ndarray) -> int | None:
    """Return an integer that JAX, as it is set, would cut to 32 bits; None if there is none."""
    if array.dtype not in (np.int64, np.uint64):
        return None
    is_lost = array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) != array
    return int(array[is_lost][0]) if is_lost.any() else None


def _spec(where: str, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    if reason := reason_against(leaf):
        raise ValueError(f"{where}: {name_of(path) or 'the leaf'}: {reason}")
    leaf = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))


def check_not_forked(what: str, pid: int) -> None:
    """Raise a RuntimeError unless this process has the given pid. A forked process has no JAX
    threads, which do the work."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"{what} was made in process {pid}, and this process, {os.getpid()}, was forked from "
            "it. A forked process has no JAX threads, so that a call "
            'would never return. Start processes with multiprocessing.get_context("spawn"), and '
            "create their objects in them"
        )

"""Names of leaves and configurations, for errors, files and tables.

A leaf's name is its key path, such as `rows.steps.obs.image`. A configuration's name is the same
in each process.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree, Specs


def name_of(path: Any) -> str:
    """Return a JAX key path as text; empty for a tree of a single leaf."""
    return ".".join(map(_text, path))


def _text(key: Any) -> str:
    """Return a dict's key, a place in a sequence, or a field, as text. JAX before 0.4.36 has no
    `keystr(simple=True)`."""
    return str(
        next((getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)), key)
    )


def printable(text: str) -> str:
    """Escape control and invisible characters in text from a file, for a terminal or a page."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def named(tree: PyTree, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """Return pairs of each leaf's name and the leaf, in the tree's order.

    Raises:
      ValueError: Two leaves have the same name, as in `{"a": {"b": x}, "a.b": y}`.
    """
    leaves = [
        (name_of(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]
    if len(names := [name for name, _ in leaves]) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two leaves are named {twice}: one of them has dots in its key; rename this key"
        )
    return leaves


def nested(leaves: Mapping[str, Any]) -> PyTree:
    """Return a tree of dicts of leaves by name; the leaf itself, if its name is empty."""
    tree: dict[str, Any] = {"": {}}
    for name, leaf in leaves.items():
        *path, last = ["", *name.split(".")] if name else [""]
        below = tree
        for key in path:
            below = below.setdefault(key, {})
        below[last] = leaf
    return tree[""]


def spec_text(spec: Specs, num_axes: int = 0) -> str:
    """Return dtype and shape as `float32[3, 4]`, without the first `num_axes` axes."""
    return f"{getattr(spec.dtype, 'name', spec.dtype)}{list(spec.shape[num_axes:])}"


def spec_of(text: str) -> jax.ShapeDtypeStruct:
    """Return dtype and shape of such a text. Raises a ValueError if it has none."""
    found = re.fullmatch(r"(\w+)\[((?:\d+(?:, )?)*)\]", text)
    if found is None:
        raise ValueError(f"{text[:60]!r} is no dtype and shape")
    shape = tuple(map(int, found[2].split(", "))) if found[2] else ()
    return jax.ShapeDtypeStruct(shape, jnp.dtype(found[1]))


def kind_of(value: Any) -> str:
    """Return what a wrong value is, for errors: `an array int32[8]`, or `a list of 3`."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {spec_text(value)}"
    size = f" of {len(value)}" if isinstance(value, dict | tuple | list) else ""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}{size}"


_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


def short(tree: PyTree) -> str:
    """Return a `repr` of a pytree, with each array as dtype and shape, such as `f32[3,4]`."""
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key}: {short(leaf)}' for key, leaf in tree.items())}}}"
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [
            f"{field.name} {short(value)}"
            for field in dataclasses.fields(tree)
            if (value := getattr(tree, field.name)) is not None
        ]
        return f"{type(tree).__name__}({', '.join(fields)})"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(short, tree))})"
    if isinstance(tree, type) or not hasattr(tree, "dtype"):
        return repr(tree)
    name = re.sub(
        r"^(bfloat|float|uint|int|complex)(?=\d)", lambda m: _SHORT[m[0]], str(tree.dtype)
    )
    return f"{name}[{','.join(map(str, tree.shape))}]"


def has_shapes(tree: PyTree) -> bool:
    """Return whether a tree has leaves, and each has a shape."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def short_bytes(tree: PyTree) -> str:
    """Return the total size of all leaves as text, such as `16 kB`."""
    size = float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))
    unit, *larger = ("B", "kB", "MB", "GB", "TB")
    while size >= 1000 and larger:
        size, (unit, *larger) = size / 1000, larger
    return f"{size:.3g} {unit}"


def description(config: Any) -> str:
    """Return a `repr` of a configuration with each function by its name, not by its address, which
    differs between processes."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = [
            f"{field.name}={description(getattr(config, field.name))}"
            for field in dataclasses.fields(config)
        ]
        return f"{type(config).__name__}({', '.join(fields)})"
    if isinstance(config, tuple):
        return f"({', '.join(map(description, config))})"
    if isinstance(config, functools.partial):
        given = [
            *map(description, config.args),
            *(f"{name}={description(value)}" for name, value in config.keywords.items()),
        ]
        return f"partial({', '.join([description(config.func), *given])})"
    if callable(config):
        return getattr(config, "__qualname__", type(config).__qualname__)
    return repr(config.item() if isinstance(config, np.generic) else config)

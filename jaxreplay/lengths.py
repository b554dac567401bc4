"""Lengths that change from call to call: the first few have programs of their own, and all others share those of the powers of two.

A program takes a second or more to compile, and some MiB for good. So of a block of many steps parts are added, one after another, and
what is drawn or looked up is padded, and cut again.
"""

import collections
import functools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay import sizes
from jaxreplay.types import NO_LAP, NO_ROW, Index

NONE: Any = Index(row=NO_ROW, lap=NO_LAP)  # type: ignore[arg-type]  # fills an index with entries that name no row

_OWN = 4  # lengths of a kind, beside the powers of two, that have a program of their own
_lengths: dict[Hashable, set[int]] = collections.defaultdict(set)


def has_program(kind: Hashable, length: int) -> bool:
    """Whether a call of this length has a program of its own. `kind`: of the call; what else decides the program, but the length."""
    own = _lengths[kind]
    if length in own or sizes.power_above(length) == length:
        return True
    if len(own) == _OWN:
        return False
    own.add(length)
    return True


def parts(kind: Hashable, tree: Any) -> Iterator[Any]:
    """A tree of leaves `[T, ...]`: whole, where its length has a program of its own, else in parts of powers of two, the largest first."""
    leaves = jax.tree.leaves(tree)
    found = {np.shape(leaf)[:1] for leaf in leaves}
    (length,) = (*found.pop(), 0)[:1] if len(found) == 1 else (0,)  # of different lengths: an error, for who takes it
    if not length or has_program(kind, length):
        yield tree
        return
    tree, start = jax.tree.map(_on_host, tree), 0
    while start < length:
        part = slice(start, start + sizes.power_below(length - start))
        yield jax.tree.map(lambda leaf, part=part: leaf[part], tree)
        start = part.stop


class Shared(NamedTuple):
    """A batch that is the first part of a larger one."""

    most: int  # items of the larger one
    wanted: int  # items of the batch


def shared(kind: Hashable, sampler: Any, batch_size: int | None) -> Shared | None:
    """None, where batches of this size have a program of their own."""
    if batch_size is None or not getattr(sampler, "draws_part", False) or not isinstance(batch_size, int) or batch_size < 1:
        return None
    return None if has_program(kind, batch_size) else Shared(sizes.power_above(batch_size), batch_size)


def padded(tree: Any, fill: Any = 0) -> Any:
    """Leaves `[B, ...]` with more items, up to a power of two. `fill`: numbers for these, in a tree of the same structure; else zeros."""
    size = sizes.power_above(len(jax.tree.leaves(tree)[0]))
    if jax.tree.structure(fill) != jax.tree.structure(tree):
        fill = jax.tree.map(lambda _: 0, tree)

    def pad(leaf: Any, value: Any) -> Any:
        leaf = _on_host(leaf)
        library = np if isinstance(leaf, np.ndarray) else jnp
        return library.concatenate([leaf, library.full((size - len(leaf), *leaf.shape[1:]), value, leaf.dtype)])

    return jax.tree.map(pad, tree, fill)


def first(tree: Any, count: int) -> Any:
    """The first items of leaves `[B, ...]`."""
    on_host = jax.tree.map(_on_host, tree)
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host)):
        return jax.tree.map(lambda leaf: jax.device_put(leaf[:count]), on_host)
    return _first(tree, count)


@functools.partial(jax.jit, static_argnums=1)
def _first(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:count], tree)


def _on_host(leaf: Any) -> Any:
    """As a NumPy array where that takes no copy: a part of a JAX array is a program for each length."""
    if isinstance(leaf, Tracer):
        return leaf
    if isinstance(leaf, jax.Array):
        is_here = leaf.is_fully_addressable and {device.platform for device in leaf.devices()} == {"cpu"}
        return np.asarray(leaf) if is_here else leaf
    return np.asarray(leaf)

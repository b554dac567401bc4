"""Parts of a batch: how many items each member gives, and which of those that it draws."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.storage import ring

_FOR_SHARES = 2  # the purpose of these random bits; the buffer has 0 and 1
# An item has 1,024 units. Shares of a batch are whole numbers of units, whose sums are exact.
_BITS = 10
_UNITS = 1 << _BITS


def fractions_of(where: str, fractions: Any, names: Sequence[str]) -> jax.Array:
    """Return the fractions of a call, which are 1 together: float32[M].

    Args:
      where: Name of what is called, for errors.
      fractions: A mapping of numbers by name, may be traced.
      names: The M names.

    Raises:
      ValueError: The names are others, a fraction is no number, or all that are known are 0 or one
        is negative.
    """
    if not isinstance(fractions, Mapping) or set(fractions) != set(names):
        got = ", ".join(map(str, fractions)) if isinstance(fractions, Mapping) else repr(fractions)
        raise ValueError(
            f"{where}: fractions must be a mapping with a number for each of {', '.join(names)}; "
            f"got {got}"
        )
    values = [fractions[name] for name in names]
    is_known = not any(isinstance(one, Tracer) for one in values) and np.ndim(values) == 1
    if is_known and not (min(map(float, values)) >= 0 and sum(map(float, values)) > 0):
        raise ValueError(
            f"{where}: fractions must be at least 0, and one of them positive; got {fractions}"
        )
    found = jnp.stack([jnp.asarray(one, jnp.float32) for one in values])
    if found.ndim != 1:
        raise ValueError(f"{where}: each fraction must be one number, got {found.shape[1:]}")
    total = found.sum()
    return found / jnp.where(total > 0, total, 1)


def shares(
    fractions: Any, sizes: Sequence[int], batch_size: int, key: Key
) -> tuple[jax.Array, jax.Array]:
    """Divide a batch among members, the first member's items first.

    All members' parts lie one after another on a line of B items, which is cut at a random offset
    plus whole numbers. So each gets the next smaller or larger number of items, and the mean is its
    fraction. If a member draws more items than are taken, these are spread evenly over its own, so
    that the strata of a stratified draw are taken equally often.

    Args:
      fractions: float32[M], which are 1 together.
      sizes: Number of items that each member draws, at least those that are taken.
      batch_size: B.
      key: Random key; a purpose of its own is used.

    Returns:
      int32[B], the number of each item's member; int32[B], its place among what the member draws.
    """
    high, low = random.words(key, 1, _FOR_SHARES)
    ends = jnp.cumsum(jnp.asarray(fractions))
    ends = ends / jnp.where(ends[-1] > 0, ends[-1], 1)
    edges = jnp.round(ends[:-1] * (batch_size * _UNITS)).astype(jnp.int32)
    offset = (high >> (32 - _BITS)).astype(jnp.int32)
    inner = (edges - offset + _UNITS - 1) >> _BITS
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), inner])
    count = jnp.concatenate([inner, jnp.full(1, batch_size)]) - start
    item = ring.arange(batch_size)
    source = (item[:, None] >= inner).sum(axis=1, dtype=jnp.int32)
    place = spread(item - start[source], count[source], jnp.asarray(sizes)[source], low)
    return source, place


def spread(nth: jax.Array, count: jax.Array, size: Any, word: jax.Array) -> jax.Array:
    """Return `count` different places of `size`, spread evenly, each equally often: int32[...].

    Args:
      nth: int32[...], in [0, count).
      count: int32[...], at most `size`.
      size: int32[...].
      word: uint32[...], random bits, which all places share.
    """
    part = (nth.astype(jnp.float32) + random.fraction(word)) / jnp.maximum(count, 1)
    place = jnp.where(count == size, nth, (part * size).astype(jnp.int32))
    return jnp.clip(place, 0, jnp.maximum(size - 1, 0))


def taken(parts: Sequence[PyTree], source: jax.Array, place: jax.Array) -> PyTree:
    """Take the items of a batch from what the members drew: leaves [B, ...].

    Args:
      parts: Pytrees with leaves [size, ...].
      source: As `shares` returns it, as is `place`.
    """
    sizes = [len(jax.tree.leaves(part)[0]) for part in parts]
    at = jnp.asarray(np.cumsum([0, *sizes[:-1]]), jnp.int32)[source] + place
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return jax.tree.map(lambda leaf: leaf.at[at].get(mode="promise_in_bounds"), joined)

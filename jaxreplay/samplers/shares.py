"""Parts of a batch: how many items each member gives, and which of those that it draws."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.struct import Static
from jaxreplay.storage import ring

_FOR_SHARES = 2  # the purpose of these random bits; the buffer has 0 and 1
# An item has 1,024 units. Shares of a batch are whole numbers of units, whose sums are exact.
_BITS = 10
_UNITS = 1 << _BITS


def given_to_parts(
    values: Mapping[str, Any], parts: Mapping[str, Static]
) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Divide the parameters of a call between what has parts, and each part.

    Fractions are of the parts: `{"new": 0.5, "old": 0.5}`. Those of a blend in a part have its name
    before theirs, `{"old.uniform": 0.1, "old.priority": 0.9}`. Other parameters are for all.

    Args:
      values: Values by name.
      parts: Parts by name.

    Returns:
      Its own values; those of each part, by its name.
    """
    if "fractions" not in values:
        return values, dict.fromkeys(parts, values)
    fractions, others = values["fractions"], {**values}
    del others["fractions"]
    if not isinstance(fractions, Mapping):
        return values, dict.fromkeys(parts, others)
    own, inner = {}, {name: {} for name in parts}
    for path, fraction in fractions.items():
        name, _, rest = str(path).partition(".")
        is_inner = rest and name in parts and "fractions" in parts[name].all_takes()
        (inner[name] if is_inner else own)[rest if is_inner else path] = fraction
    has_own = own or not any(inner.values())
    return (
        others | {"fractions": own} if has_own else others,
        {name: others | {"fractions": one} if one else others for name, one in inner.items()},
    )


def check_fractions(where: str, fractions: Any) -> None:
    """Raise a ValueError if known fractions of a call are all 0, or one of them is negative."""
    if not isinstance(fractions, Mapping):
        return
    values = [np.asarray(one) for one in fractions.values() if isinstance(one, Real | np.ndarray)]
    is_bad = not all(((one >= 0) & (one < np.inf)).all() for one in values)
    if is_bad or (
        values and len(values) == len(fractions) and not any(one.any() for one in values)
    ):
        raise ValueError(
            f"{where}: fractions must be at least 0, and one of them positive; got {fractions}"
        )


def fractions_of(where: str, fractions: Any, names: Sequence[str]) -> jax.Array:
    """Return the fractions of a call, which are 1 together: float32[M].

    Args:
      where: Name of what is called, for errors.
      fractions: A mapping of numbers by name, may be traced.
      names: The M names.

    Raises:
      ValueError: The names are others, or a fraction is no number.
    """
    if not isinstance(fractions, Mapping) or set(fractions) != set(names):
        got = ", ".join(map(str, fractions)) if isinstance(fractions, Mapping) else repr(fractions)
        raise ValueError(
            f"{where}: fractions must be a mapping with a number for each of {', '.join(names)}; "
            f"got {got}"
        )
    values = [fractions[name] for name in names]
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

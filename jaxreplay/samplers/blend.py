"""Samplers of samplers over one store: parts of a batch from each."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxreplay._util import random
from jaxreplay._util.aliases import Key, PyTree
from jaxreplay._util.checks import check_part
from jaxreplay.samplers.sampler import (
    ConsumingSampler,
    Draw,
    PrioritySampler,
    Sampler,
    by_last_name,
)
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.storage.writes import WriteEffect
from jaxreplay.types import Index

_FOR_SHARES = 2  # the purpose of these random bits; the buffer has 0 and 1
_UNITS = 1024  # of one item: shares of a batch are whole numbers of them, so that sums are exact


class Joined(PrioritySampler):
    """Base class of samplers that ask other samplers, `parts`. The state is a dict of the states of
    those that have one."""

    beta: float | None = None  # type: ignore[assignment]

    @property
    def parts(self) -> dict[str, Sampler]:
        """Samplers by name."""
        raise NotImplementedError

    def _stateful(self) -> dict[str, Sampler]:
        return {name: one for name, one in self.parts.items() if one.identity() is not None}

    def _ask(self, name: str, state: PyTree, *arguments: Any) -> dict[str, Any]:
        """Call a method of each part with its own state."""
        return {
            part: getattr(one, name)(own(state, part), *arguments)
            for part, one in self.parts.items()
        }

    def _kept(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return {name: states[name] for name in self._stateful()}

    def _check_parts(self) -> None:
        where = type(self).__name__
        for name, one in self.parts.items():
            check_part(where, name, one, Sampler, "jaxreplay.Uniform()")
            if "." in name:
                raise ValueError(f"{where}: {name}: a name must have no dot")
        if self.beta is None:
            known = [one.beta for one in self._with_priorities().values()]
            object.__setattr__(self, "beta", known[0] if known else 0.0)
        if not _is_fraction(self.beta):
            raise ValueError(
                f"{where}: beta must be a finite number of at least 0, got {self.beta!r}"
            )

    def window(self, window: Window) -> Window:
        """Return the window that suits every part."""
        for one in self.parts.values():
            window = one.window(window)
        return window

    def init(self, layout: Layout) -> PyTree:
        return {name: one.init(layout) for name, one in self._stateful().items()}

    def clear(self, state: PyTree) -> PyTree:
        return self._kept(self._ask("clear", state))

    def observe(
        self, state: PyTree, effect: WriteEffect | None, priority: jax.Array | None
    ) -> PyTree:
        """Return the state after a write. Priorities are for the parts that have them."""
        takers = self._takers() if priority is not None else {}
        return {
            name: one.observe(state[name], effect, priority if name in takers else None)
            for name, one in self._stateful().items()
        }

    def numbers(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the numbers of all parts, with names such as "priority.mass"."""
        each = self._ask("numbers", state, sampleable)
        return {
            f"{part}.{name}": x for part, of_part in each.items() for name, x in of_part.items()
        }

    def from_numbers(self, sampleable: Sampleable, numbers: dict[str, jax.Array]) -> PyTree:
        """Return the states of all parts, each from the numbers of a part of its name or, if the
        other sampler had none, from all.

        Args:
          sampleable: The sampleable rows of the new buffer.
          numbers: As for `Sampler.from_numbers`.
        """
        made = {}
        for part, one in self._stateful().items():
            prefix = part + "."
            of_part = {
                name.removeprefix(prefix): x
                for name, x in numbers.items()
                if name.startswith(prefix)
            }
            given = by_last_name(of_part) if of_part else numbers
            made[part] = one.from_numbers(sampleable, given)
        return made

    def size(self, state: PyTree, sampleable: Sampleable) -> jax.Array:
        """Return the number of rows that a part can sample, of the part with the most."""
        return jnp.stack([*self._ask("size", state, sampleable).values()]).max()

    def can_sample(self, state: PyTree) -> jax.Array:
        """Return whether a part can sample."""
        return jnp.stack([*self._ask("can_sample", state).values()]).any()

    def update(
        self, state: PyTree, sampleable: Sampleable, index: Index, priority: jax.Array
    ) -> PyTree:
        """Return the state with new priorities in each part that has them."""
        new = {
            name: one.update(state[name], sampleable, index, priority)
            for name, one in self._takers().items()
            if name in state
        }
        return {**state, **new}

    def _takers(self) -> dict[str, PrioritySampler]:
        found = self._with_priorities()
        if not found:
            raise ValueError(
                f"{type(self).__name__}: none of its samplers has priorities "
                f"({', '.join(self.parts)}); one must be a jaxreplay.Prioritized(...)"
            )
        return found

    def _with_priorities(self) -> dict[str, PrioritySampler]:
        return {
            name: one
            for name, one in self.parts.items()
            if isinstance(one, PrioritySampler)
            and (not isinstance(one, Joined) or one._with_priorities())
        }

    def metrics(self, state: PyTree, sampleable: Sampleable) -> dict[str, jax.Array]:
        """Return the figures of all parts; of a name that several have, the first one's."""
        found: dict[str, jax.Array] = {}
        for of_part in self._ask("metrics", state, sampleable).values():
            found = of_part | found
        return found


class Blend(Joined):
    """Sample parts of each batch by several samplers over the same rows.

    Sampler m gives the fraction f_m of a batch. Where f_m B is no whole number, the batch has the
    next smaller or larger number of its items, so that the mean is f_m B, in 1,024ths. The
    probability of row i is P(i) = sum_m f_m P_m(i), whichever sampler gave it, so that weights
    (n P(i))^-beta, divided by the largest of the batch, correct what the blend prefers.

    An item of a sampler that has no row is not valid. New priorities reach each sampler that has
    priorities. Buffers with a blend cannot be sharded: its parts weigh shards differently.

    Args:
      members: A tuple of (name, sampler, fraction), one for each sampler. Fractions are divided by
        their sum; `sample(fractions=...)` overrides them.
      beta: Exponent of importance weights, at least 0. Default: that of the first sampler with
        priorities, else 0, so that all weights are 1.

    Raises:
      ValueError: There is no member, a sampler is none or consumes rows, or a fraction is negative
        or not finite.

    References:
      Hafner et al., "Mastering Diverse Domains through World Models" (2023),
      https://arxiv.org/abs/2301.04104; its replay has parts of this kind.
    """

    members: tuple[tuple[str, Sampler, float], ...]
    takes = ("fractions",)

    def _check(self) -> None:
        fractions = [fraction for _, _, fraction in self.members]
        if not (all(map(_is_fraction, fractions)) and sum(fractions) > 0):
            raise ValueError(
                f"Blend: fractions must be numbers of at least 0, one of them positive; got "
                f"{fractions}; write jaxreplay.blend(uniform=(jaxreplay.Uniform(), 0.5), ...)"
            )
        if len(self.parts) < len(self.members):
            raise ValueError(f"Blend: two samplers have one name: {[*self.parts]}")
        self._check_parts()
        for name, one, _ in self.members:
            if isinstance(one, ConsumingSampler):
                raise ValueError(
                    f"Blend: {name}: {type(one).__name__} consumes rows, which a part of a batch "
                    "cannot; to sample each new row once, use jaxreplay.OnlineQueue"
                )

    @property
    def parts(self) -> dict[str, Sampler]:
        """Samplers by name."""
        return {name: one for name, one, _ in self.members}

    def identity(self) -> "Blend | None":
        """Return the parts that have a state."""
        kept = tuple((name, one.identity() or one, 1.0) for name, one in self._stateful().items())
        return Blend(members=kept, beta=0.0) if kept else None

    def sample(self, state: PyTree, sampleable: Sampleable, key: Key, batch_size: int) -> Draw:
        fractions, sizes = self._fractions(), [batch_size] * len(self.members)
        if "fractions" not in self.given:  # as many as can be taken
            sizes = [int(np.ceil(float(f) * batch_size - 1e-4)) for f in fractions]
        source, place = shares(fractions, sizes, batch_size, key)
        keys = jax.random.split(key, len(self.members))
        draws = [
            one.sample(own(state, name), sampleable, key, max(size, 1))
            for (name, one, _), key, size in zip(self.members, keys, sizes, strict=True)
        ]
        of = lambda name: taken([getattr(draw, name) for draw in draws], source, place)
        row, is_valid = of("row"), of("probability") > 0
        probability = self.probability(state, sampleable, row)
        return Draw(state, row, jnp.where(is_valid, probability, 0))

    def probability(self, state: PyTree, sampleable: Sampleable, row: jax.Array) -> jax.Array:
        each = self._ask("probability", state, sampleable, row).values()
        parts = [f * one for f, one in zip(self._fractions(), each, strict=True)]
        return jnp.stack(parts).sum(axis=0)

    def _fractions(self) -> Any:
        """Return the fractions of the batch, which are 1 together: float32[M]."""
        if "fractions" not in self.given:
            fractions = np.array([fraction for _, _, fraction in self.members])
            return np.float32(fractions / fractions.sum())
        return fractions_of("Blend", self.given["fractions"], list(self.parts))


def blend(*, beta: float | None = None, **members: tuple[Sampler, float]) -> Blend:
    """Blend several samplers over one store: each gives a part of every batch.

    Args:
      beta: As for `jaxreplay.samplers.Blend`. Default: None, that of the first sampler with
        priorities.
      members: `name=(sampler, fraction)`, one for each sampler. Fractions are divided by their sum.

    Returns:
      A `jaxreplay.samplers.Blend`, to be the `sampler` of a buffer.

    Raises:
      ValueError: A member is not a pair of a sampler and a number, or consumes rows.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> sampler = jr.blend(uniform=(jr.Uniform(), 0.75), newest=(jr.Newest(num_rows=1), 0.25))
      >>> buffer = jr.items(capacity=8, batch_size=8, sampler=sampler)
      >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(4)[:, None])
      >>> batch = buffer.sample(state, jax.random.key(0))
      >>> batch.experience[6:].tolist()  # 2 of 8 items
      [3, 3]
      >>> buffer.get(state, jnp.arange(4)).probability.tolist()
      [0.1875, 0.1875, 0.1875, 0.4375]
      >>> batch = buffer.sample(state, jax.random.key(0), fractions={"uniform": 0, "newest": 1})
      >>> batch.experience.tolist()
      [3, 3, 3, 3, 3, 3, 3, 3]
      >>> import numpy as np
      >>> def oracle(laws, fractions, B, rng):  # laws: the probability of each row by each sampler
      ...     ends = (
      ...         np.cumsum(fractions) * B
      ...     )  # item b is the member's whose ends b + u lies between
      ...     member = np.searchsorted(ends, np.arange(B) + rng.random(), side="right")
      ...     row = [rng.choice(len(laws[m]), p=laws[m]) for m in member]
      ...     return row, (np.asarray(fractions) @ laws)[row]
    """
    for name, member in members.items():
        if not isinstance(member, tuple) or len(member) != 2:
            raise ValueError(
                f"blend: {name} must be (sampler, fraction), such as (jaxreplay.Uniform(), 0.5), "
                f"got {member!r}"
            )
    return Blend(members=tuple((name, *member) for name, member in members.items()), beta=beta)


def own(state: PyTree, name: str) -> PyTree:
    """Return the state of a part, `()` if it has none.

    Args:
      state: A dict of states by name, or `()`.
      name: Name of the part.
    """
    return dict(state).get(name, ())


def _is_fraction(number: Any) -> bool:
    return isinstance(number, Real) and 0 <= float(number) < float("inf")


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
    offset = (high >> 22).astype(jnp.int32)  # of 1,024 units
    inner = (edges - offset + _UNITS - 1) >> 10
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

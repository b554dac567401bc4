"""Sampler of samplers over one store: each gives a part of every batch."""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import Key, PyTree
from jaxreplay.samplers.joined import Joined, is_at_least_0, own
from jaxreplay.samplers.sampler import Draw, Sampler
from jaxreplay.samplers.shares import check_fractions, fractions_of, given_to_parts, shares, taken
from jaxreplay.storage.sampleable import Sampleable


class Blend(Joined):
    """Sample parts of each batch by several samplers over the same rows.

    Sampler m gives the fraction f_m of a batch. Where f_m B is no whole number, the batch has the
    next smaller or larger number of its items, and their mean is f_m B, rounded to 1/1,024 of an
    item. The probability of row i is P(i) = sum_m f_m P_m(i), whichever sampler gave it, so that
    weights (n P(i))^-beta, divided by the largest of the batch, correct what the blend prefers.

    An item of a sampler that has no row is not valid. New priorities reach each sampler that has
    priorities. Buffers with a blend cannot be sharded: its parts weigh shards differently.

    Args:
      members: A tuple of (name, sampler, fraction), one for each sampler. Fractions are divided by
        their sum; `sample(fractions={...})` overrides them. If a sampler is a blend itself, its own
        are named after it: `{"old.uniform": 1, "old.priority": 3}`.
      beta: Exponent of importance weights, at least 0. Default: that of the first sampler with
        priorities, else 0, so that all weights are 1.

    Raises:
      ValueError: There is no member, or two have one name; a member is no sampler, or consumes
        rows; a fraction or `beta` is negative or not finite.

    References:
      https://github.com/danijar/dreamerv3, whose replay can divide a batch among uniform,
      prioritized and recent sequences.
    """

    members: tuple[tuple[str, Sampler, float], ...]
    takes = ("fractions",)

    def _check(self) -> None:
        fractions = [fraction for _, _, fraction in self.members]
        if not (all(map(is_at_least_0, fractions)) and sum(fractions) > 0):
            raise ValueError(
                "Blend: fractions must be numbers of at least 0, one of them positive; got "
                f"{fractions}; write jaxreplay.blend(uniform=(jaxreplay.Uniform(), 0.5), ...)"
            )
        if len(self.parts) < len(self.members):
            raise ValueError(f"Blend: two samplers have one name: {[*self.parts]}")
        self._check_parts()
        for name, one, _ in self.members:
            if one.consumes:
                raise ValueError(
                    f"Blend: {name}: {type(one).__name__} consumes rows, which a part of a batch "
                    "cannot; to sample each new row once, use jaxreplay.OnlineQueue"
                )

    @property
    def parts(self) -> dict[str, Sampler]:
        """Samplers by name."""
        return {name: one for name, one, _ in self.members}

    def check_given(self, where: str, values: Mapping[str, Any]) -> None:
        own, of_part = given_to_parts(values, self.parts)
        check_fractions(where, own.get("fractions"))
        for name, one in self.parts.items():
            one.check_given(where, of_part[name])

    def with_given(self, values: Mapping[str, Any]) -> "Blend":
        own, of_part = given_to_parts(values, self.parts)
        members = tuple(
            (name, one.with_given(of_part[name]), part) for name, one, part in self.members
        )
        other = copy.copy(self)
        vars(other).update(members=members, given=own)
        return other

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

    def _gives(self) -> Any:
        return self._fractions() > 0

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
      >>> def oracle(P, fractions, B, rng):  # P[m]: the probability of each row by sampler m
      ...     ends = np.cumsum(fractions) * B  # of each sampler's part, on a line of B items
      ...     member = np.searchsorted(ends, np.arange(B) + rng.random(), side="right")
      ...     row = [rng.choice(len(P[m]), p=P[m]) for m in member]
      ...     return row, (np.asarray(fractions) @ P)[row]
    """
    for name, member in members.items():
        if not isinstance(member, tuple) or len(member) != 2:
            raise ValueError(
                f"blend: {name} must be (sampler, fraction), such as (jaxreplay.Uniform(), 0.5), "
                f"got {member!r}"
            )
    return Blend(members=tuple((name, *member) for name, member in members.items()), beta=beta)

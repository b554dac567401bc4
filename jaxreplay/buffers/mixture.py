"""Batches with parts from several buffers: offline and online data, or one buffer a task."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key
from jaxreplay._util.hints import unknown_attribute
from jaxreplay._util.names import kind_of
from jaxreplay._util.struct import Static
from jaxreplay.buffers.jitted import buffer_of
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.step_checks import as_priority
from jaxreplay.samplers.shares import (
    check_fractions,
    fractions_of,
    given_to_parts,
    shares,
    taken,
)
from jaxreplay.types import Index, Sample, SampleOptions


class Mixture(Static):
    """Several buffers, each of which gives a part of a batch's items. B is the batch size.

    A mixture has no state of its own: its methods take `states`, a dict of each member's state by
    name. Call `init`, `add` and all other methods on the members. Their own `batch_size` is unused.

    Args:
      members: A tuple of (name, buffer, number of items in a batch), one for each member.

    Raises:
      ValueError: There is no member, a member is not a `ReplayBuffer`, its number of items is less
        than 1, or its sampler consumes rows.

    Example:
      >>> import jaxreplay as jr
      >>> items = jr.items(capacity=10, batch_size=1)
      >>> buffer = jr.Mixture(members=(("offline", items, 2), ("online", items, 1)))
      >>> states = {"offline": items.init(0.0), "online": items.init(0.0)}
      >>> bool(buffer.can_sample(states))
      False

    References:
      Ball et al., "Efficient Online Reinforcement Learning with Offline Data" (2023),
      https://arxiv.org/abs/2302.02948, section 4.1 (symmetric sampling).
    """

    members: tuple[tuple[str, ReplayBuffer, int], ...]

    if not TYPE_CHECKING:  # a type checker knows the methods

        def __getattr__(self, name: str) -> Any:
            what = unknown_attribute(self, name)
            of_member = "states[name] = buffer.add(states[name], step)"
            raise AttributeError(f"{what}; a member is filled by its own buffer: {of_member}")

    def _check(self) -> None:
        if not self.members:
            raise ValueError(
                "Mixture: no member was given; write jaxreplay.mix(offline=(offline, 128), "
                "online=(online, 128))"
            )
        members = tuple(
            (name, buffer_of(f"Mixture: {name}", buffer), size)
            for name, buffer, size in self.members
        )
        object.__setattr__(self, "members", members)
        for name, buffer, size in members:
            checks.check_size("Mixture", name, size)
            if buffer.sampler.consumes:
                raise ValueError(
                    f"Mixture: {name}: {type(buffer.sampler).__name__} consumes rows, which a "
                    "mixture cannot; call buffer.pop(state, key) on that buffer itself"
                )

    def sample(self, states: dict[str, Any], key: Key, **options: Unpack[SampleOptions]) -> Sample:
        """Sample a batch: the first member's items, then the second's, and so on.

        If a member cannot be sampled yet, its items have `is_valid=False` and weight 0. Each member
        normalizes the weights of its own items.

        Args:
          states: A dict of each member's state by name.
          key: Random key, consumed.
          options: Parameters of this call, as `jaxreplay.types.SampleOptions` says. `fractions` are
            those of the members, as of a `jaxreplay.blend`: B stays, and each member reads B items,
            of which its part is taken. Those of a member's own blend are named after it:
            `{"offline.uniform": 1, "offline.priority": 3}`. The others are for every member.

        Returns:
          A batch with leaves [B, ...]. Its `source` is the number of each item's member.

        Raises:
          ValueError: A leaf of the items differs between members in shape or dtype, or `states` has
            other names.
        """
        check_names(states, self._names)
        known = {name: one for name, one in options.items() if one is not None}
        self.check_given("sample", known)
        own, of_member = given_to_parts(known, self._buffers)
        given = own.get("fractions")
        keys = jax.random.split(key, len(self.members))
        batches = [
            buffer.sample(
                states[name], key, size if given is None else self.batch_size, **of_member[name]
            )
            for (name, buffer, size), key in zip(self.members, keys, strict=True)
        ]
        for (name, _, _), batch in zip(self.members, batches, strict=True):
            one, first = (
                jax.tree.map(lambda leaf: leaf[0], b.experience) for b in (batch, batches[0])
            )
            checks.check_leaves(
                f"sample: {name}",
                one,
                first,
                f"All members' items must have the shapes and dtypes of {self._names[0]}'s.",
            )
        if given is not None:
            fractions = fractions_of("sample", given, self._names)
            sizes = [self.batch_size] * len(batches)
            source, place = shares(fractions, sizes, self.batch_size, key)
            batch = taken(batches, source, place)
            return batch.replace(source=source, index=batch.index.replace(source=source))
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
        sizes = [size for _, _, size in self.members]
        source = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return joined.replace(source=jnp.asarray(source))

    def update_priorities(
        self, states: dict[str, Any], index: Index, priority: jax.Array
    ) -> dict[str, Any]:
        """Set the priorities of a batch's rows, each in its own member.

        Members without priorities stay unchanged. Stale indices and invalid priorities are ignored
        and counted in the members' states. If the sample was given `fractions`, each member also
        counts the items of others as stale.

        Args:
          states: A dict of each member's state by name. Donated: jit with `donate_argnums=0`, else
            each member with priorities is copied.
          index: `batch.index` of the mixture's sample, leaves [B].
          priority: float[B], at least 0. A row with priority 0 is never sampled again; add a small
            constant to TD errors.

        Returns:
          The new states, a dict.

        Raises:
          ValueError: `index` is not of a whole batch, `priority` is not one number for each item,
            or `states` has other names.
        """
        check_names(states, self._names)
        if not isinstance(index, Index) or jnp.shape(index.row) != (self.batch_size,):
            shape = f" of {list(jnp.shape(index.row))}" if isinstance(index, Index) else ""
            raise ValueError(
                "update_priorities: index must be the batch.index of a mixture's sample, of "
                f"[{self.batch_size}], got {kind_of(index)}{shape}"
            )
        priority = as_priority("update_priorities", priority, (self.batch_size,))
        states, start = dict(states), 0
        for number, (name, buffer, size) in enumerate(self.members):
            if buffer.sampler.has_priorities:
                part, row = slice(start, start + size), index.row
                if index.source is not None:
                    part, row = slice(None), jnp.where(index.source == number, row, -1)
                own = Index(row[part], index.lap[part])
                states[name] = buffer.update_priorities(states[name], own, priority[part])
            start += size
        return states

    def end_streams(self, states: dict[str, Any]) -> dict[str, Any]:
        """End the unfinished episodes of every member, after a reset that no step tells.

        For some envs of one member, call `end_streams(state, mask)` of that member. Members of
        items stay unchanged.

        Args:
          states: A dict of each member's state by name. Donated: jit with `donate_argnums=0`.

        Returns:
          The new states, a dict.

        Raises:
          ValueError: `states` has other names.
        """
        check_names(states, self._names)
        return {
            name: states[name] if buffer.autoreset is None else buffer.end_streams(states[name])
            for name, buffer, _ in self.members
        }

    def can_sample(self, states: dict[str, Any]) -> jax.Array:
        """Return whether every member can be sampled: bool[].

        Args:
          states: A dict of each member's state by name.
        """
        check_names(states, self._names)
        return jnp.all(
            jnp.stack([buffer.can_sample(states[name]) for name, buffer, _ in self.members])
        )

    @property
    def batch_size(self) -> int:
        """B, the number of items of all members in a batch."""
        return sum(size for _, _, size in self.members)

    def check_given(self, where: str, values: Mapping[str, Any]) -> None:
        """Raise a ValueError if a number of one call is out of range, for any member."""
        own, of_member = given_to_parts(values, self._buffers)
        check_fractions(where, own.get("fractions"))
        for name, buffer in self._buffers.items():
            buffer.check_given(where, of_member[name])

    @property
    def _buffers(self) -> dict[str, ReplayBuffer]:
        return {name: buffer for name, buffer, _ in self.members}

    @property
    def _names(self) -> list[str]:
        return [name for name, _, _ in self.members]


def check_names(states: Any, names: list[str]) -> None:
    """Raise a ValueError if states have other names than a mixture's members."""
    if not isinstance(states, dict) or set(states) != set(names):
        got = ", ".join(states) if isinstance(states, dict) else type(states).__name__
        raise ValueError(
            f"Mixture: states must be a dict with the members' names, {', '.join(names)}; got {got}"
        )


def mix(**members: tuple[ReplayBuffer, int]) -> Mixture:
    """Mix several buffers: each batch has a number of items from each of them.

    Args:
      members: `name=(buffer, number of items in a batch)`, one for each member. The items of all
        members have the same shapes and dtypes.

    Returns:
      A `Mixture`, whose methods take a dict of each member's state by name.

    Raises:
      ValueError: A member is not a pair of a `ReplayBuffer` and a positive number, or its sampler
        consumes rows.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> offline, online = (
      ...     jr.items(capacity=100, batch_size=1),
      ...     jr.items(capacity=10, batch_size=1),
      ... )
      >>> buffer = jr.mix(offline=(offline, 2), online=(online, 1))
      >>> states = {"offline": offline.init(jnp.zeros(())), "online": online.init(jnp.zeros(()))}
      >>> states["offline"] = offline.add(states["offline"], jnp.ones(1))
      >>> states["online"] = online.add(states["online"], jnp.full(1, 2.0))
      >>> batch = buffer.sample(states, jax.random.key(0))
      >>> batch.experience.tolist(), batch.source.tolist()
      ([1.0, 1.0, 2.0], [0, 0, 1])
    """
    for name, member in members.items():
        if not isinstance(member, tuple) or len(member) != 2:
            raise ValueError(
                f"mix: {name} must be (buffer, number of items), such as (buffer, 128), got "
                f"{member!r}"
            )
    return Mixture(members=tuple((name, buffer, size) for name, (buffer, size) in members.items()))

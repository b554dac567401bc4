"""Batches from several buffers, in fixed parts: offline and online data, or a buffer for each
task."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util import checks
from jaxreplay._util.aliases import Key
from jaxreplay._util.struct import Static
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.step_checks import as_priority
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from jaxreplay.types import Sample


class Mixture(Static):
    """Several buffers, of which each gives a fixed number of a batch's items.

    It has no state of its own: `states` is a dict of the members', by name. Initialize each member,
    add to it and look into it as ever. The members' own `batch_size` is not used.

    Source: symmetric sampling, as in Ball et al., "Efficient Online Reinforcement Learning with
    Offline Data" (2023), section 4.1.

    Args:
      members: (name, buffer, items of a batch) of each.
    """

    members: tuple[tuple[str, ReplayBuffer, int], ...]

    def _check(self) -> None:
        if not self.members:
            raise ValueError(
                "Mixture: no member was given; write jaxreplay.mix(offline=(offline, 128), "
                "online=(online, 128))"
            )
        for name, buffer, size in self.members:
            if not isinstance(buffer, ReplayBuffer):
                raise ValueError(
                    f"Mixture: {name} must be (buffer, items of a batch), got a "
                    f"{type(buffer).__name__} for the buffer"
                )
            checks.check_size("Mixture", name, size)
            if isinstance(buffer.sampler, ConsumingSampler):
                raise ValueError(
                    f"Mixture: {name}: {type(buffer.sampler).__name__} hands out each row once; "
                    "take from that buffer itself"
                )

    def sample(
        self, states: dict[str, Any], key: Key, *, beta: jax.Array | float | None = None
    ) -> Sample:
        """Draw from every member, one after another. Where one cannot be sampled yet, its items
        alone are not valid.

        Args:
          states: name -> the member's state.
          key: consumed.
          beta: as for `ReplayBuffer.sample`, of every member. Each normalizes the weights of its
            own items.

        Raises:
          ValueError: the members' items differ in a leaf.
        """
        self._check_names(states)
        keys = jax.random.split(key, len(self.members))
        batches = [
            buffer.sample(states[name], key, size, beta=beta)
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
                f"All members' items must be alike; compare {self._names[0]}'s.",
            )
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
        return joined.replace(source=self._source())

    def update_priorities(
        self, states: dict[str, Any], batch: Sample, priority: jax.Array
    ) -> dict[str, Any]:
        """New priorities for a batch's rows, each in its own member; members without priorities
        stay as they are. Takes `states` over.

        Args:
          batch: what `sample` gave. priority: float[B], at least 0.

        Raises:
          ValueError: `priority` is not one number for each item.
        """
        self._check_names(states)
        if not isinstance(batch, Sample) or batch.source is None:
            got = (
                "a batch of one buffer"
                if isinstance(batch, Sample)
                else f"a {type(batch).__name__}"
            )
            raise ValueError(
                "update_priorities: batch must be what the mixture's sample returned, whole, got "
                f"{got}"
            )
        priority = as_priority("update_priorities", priority, batch.source.shape)
        states, start = dict(states), 0
        for name, buffer, size in self.members:
            if isinstance(buffer.sampler, PrioritySampler):
                index, own = jax.tree.map(
                    lambda leaf, start=start, size=size: leaf[start : start + size],
                    (batch.index, priority),
                )
                states[name] = buffer.update_priorities(states[name], index, own)
            start += size
        return states

    def can_sample(self, states: dict[str, Any]) -> jax.Array:
        """Whether every member can be sampled: bool[]."""
        self._check_names(states)
        return jnp.all(
            jnp.stack([buffer.can_sample(states[name]) for name, buffer, _ in self.members])
        )

    @property
    def _names(self) -> list[str]:
        return [name for name, _, _ in self.members]

    def _source(self) -> jax.Array:
        return jnp.concatenate(
            [
                jnp.full((size,), number, jnp.int32)
                for number, (_, _, size) in enumerate(self.members)
            ]
        )

    def _check_names(self, states: dict[str, Any]) -> None:
        if not isinstance(states, dict) or set(states) != set(self._names):
            got = ", ".join(states) if isinstance(states, dict) else type(states).__name__
            raise ValueError(
                "Mixture: states must be a dict with the members' names, "
                f"{', '.join(self._names)}; got {got}"
            )


def mix(**members: tuple[ReplayBuffer, int]) -> Mixture:
    """Batches with a fixed number of items from each of several buffers.

    Args:
      members: name=(buffer, items of a batch).

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
            raise ValueError(f"mix: {name} must be (buffer, items of a batch), got {member!r}")
    return Mixture(members=tuple((name, buffer, size) for name, (buffer, size) in members.items()))

"""Flags of several agents, as a view reads them, and what each agent's steps give."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay.storage import row_flags
from jaxreplay.storage.agents import GONE


class Agents(NamedTuple):
    """Flags of several agents in some rows.

    Attributes:
      terminated: bool[..., A], True from the step that terminated the agent's episode to the end of
        the env's.
      truncated: bool[..., A], likewise.
      alive: bool[..., A], True where the agent acted.
    """

    terminated: jax.Array
    truncated: jax.Array
    alive: jax.Array

    @classmethod
    def of(cls, stored: jax.Array) -> "Agents":
        """Return the flags in stored bytes, uint8[..., A]."""
        has = lambda flag: (stored & flag) != 0
        return cls(has(row_flags.TERMINATED), has(row_flags.TRUNCATED), ~has(GONE))

    def is_cut(self) -> jax.Array:
        """Return where an agent is truncated, so that its value is bootstrapped: bool[...]."""
        return (self.truncated & ~self.terminated & self.alive).any(axis=-1)

    def acting(self) -> jax.Array:
        """Return the steps of each agent from the first row on, up to its own end: bool[n, A]."""
        done = self.terminated | self.truncated
        goes_on = jnp.concatenate([self.alive[:1], self.alive[1:] & ~done[:-1]])
        return jnp.cumprod(goes_on, axis=0, dtype=bool)


def summed(total: Any, acts: jax.Array, reward: jax.Array) -> jax.Array:
    """Sum a reward over the steps of each agent.

    Args:
      total: Function of rewards [n, ...] and `is_inside`, bool[n], the steps of the env by default.
      acts: bool[n, A].
      reward: [n, A, ...], or without the axis of agents, which all steps of the env give.
    """
    if reward.shape[1:2] != acts.shape[1:]:
        return total(reward)
    each = lambda reward, acts: total(reward, is_inside=acts)
    return jax.vmap(each, in_axes=1)(reward, acts)

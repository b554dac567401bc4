"""The layout of a state: static facts that decide where each row lies, what it means, and which
rows around it are read, its window."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util.aliases import Autoreset
from jaxreplay._util.struct import Static
from jaxreplay.storage import ring, row_flags
from jaxreplay.storage.platforms import Traits, traits_of


class Window(Static):
    """The rows around a candidate, in time. A look-back never crosses the start of the candidate's
    episode; where it stops there, it is whole.

    Args:
      before: rows before the candidate, or None: from its episode's start.
      after: rows after the candidate, or None: to its episode's end. Fewer are enough where the
        episode ends sooner, unless `crosses_episodes`.
      crosses_episodes: whether the rows after it go on into later episodes.
      period: candidates are every `period`-th transition: of each episode or, with
        `crosses_episodes`, of the stream.
      needs_final_obs: whether the observation after a terminated step is read, so that its final
        row must be written first.
      needs_episodes: whether ends of episodes are looked up, though the window is bounded.
    """

    before: int | None = 0
    after: int | None = 0
    crosses_episodes: bool = False
    period: int = 1
    needs_final_obs: bool = False
    needs_episodes: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether it reads a number of rows that is known beforehand, and so needs no episode
        table."""
        return self.before is not None and self.after is not None

    @property
    def length(self) -> int:
        """Rows that the shortest stream must hold for one window."""
        return (self.before or 0) + (1 if self.after is None else self.after) + 1

    def widened(self, before: int | None = 0, after: int | None = 0) -> "Window":
        """At least so many rows before and after."""
        return dataclasses.replace(
            self, before=_larger(self.before, before), after=_larger(self.after, after)
        )


def _larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


class Layout(Static):
    """The layout that a state was made for, and carries: `num_envs` streams, each a ring of
    `length` rows; row = env * length + position.

    Args:
      num_envs: streams. length: rows of each.
      autoreset: what the env does when an episode ends, or None where rows are items without an
        order.
      allow_mask: whether some envs may take no step.
      window: what must be known around a row before it can be drawn.
      platform: "cpu", "gpu" or "tpu": what the arrays are laid out for.
      alpha: of the priorities in the sampler's tree, each of which is stored as priority ** alpha;
        None: it has none.
    """

    num_envs: int
    length: int
    autoreset: Autoreset | None
    allow_mask: bool
    window: Window
    platform: str
    alpha: float | None

    @functools.cached_property
    def traits(self) -> Traits:
        """Traits of the platform."""
        return traits_of(self.platform)

    @functools.cached_property
    def capacity(self) -> int:
        """Rows of all streams."""
        return self.num_envs * self.length

    @functools.cached_property
    def rows_per_step(self) -> int:
        """The most rows that a step writes."""
        return row_flags.rows_per_step(self.autoreset)

    @functools.cached_property
    def lockstep(self) -> bool:
        """True if all streams always step together: no mask leaves one out, and no episode's end
        takes a second row."""
        return not self.allow_mask and self.rows_per_step == 1

    @functools.cached_property
    def may_take_back(self) -> bool:
        """True if each stream's newest row, a final row, may be taken back
        (`storage/provisional.py`)."""
        return self.rows_per_step == 2 and not self.allow_mask

    @functools.cached_property
    def termination_has_final_row(self) -> bool:
        """True if a terminated row is followed by a final row, as every truncated one is (or is
        itself)."""
        return self.autoreset is not None and row_flags.termination_has_final_row(self.autoreset)

    def closes_episode(self, flags: jax.Array) -> jax.Array:
        """Tell which rows are the last ones of their episodes: bool[...]. `flags`: uint8[...]."""
        assert self.autoreset is not None
        return row_flags.closes_episode(flags, self.autoreset)

    def envs(self) -> jax.Array:
        """Return the number of each stream: int32[E]."""
        return ring.arange(self.num_envs)

    def row(self, env: jax.Array, position: jax.Array) -> jax.Array:
        """Return the row at a position of a stream: int32[...]."""
        return env * self.length + position

    def split(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the stream and the position of each row: int32[...] both."""
        return ring.split(row, self.length)

    def wrap(self, position: jax.Array) -> jax.Array:
        """Put a position from `[-length, 2 * length)` back on the ring."""
        return ring.wrap(position, self.length)

    def number(self, lap: jax.Array, position: jax.Array) -> jax.Array:
        """Number a row in its stream, overwritten rows counted, modulo 2^32: uint32[...]."""
        return lap * jnp.uint32(self.length) + position.astype(jnp.uint32)

    def ahead(self, row: jax.Array, offset: ArrayLike) -> jax.Array:
        """Return the rows `offset` rows forward in their stream: int32[...]. `offset`: from
        `-length` to `length - 1`."""
        env, position = self.split(row)
        return self.row(env, self.wrap(position + offset))

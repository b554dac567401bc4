"""Pairs of an observation and a later one of its episode, at a geometric horizon."""

import jax
import jax.numpy as jnp

from jaxreplay._util import random
from jaxreplay._util.checks import check_size
from jaxreplay.storage.layout import Window
from jaxreplay.types import Pair
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View

BEYOND = ("truncate", "clip")


class FutureView(View[Pair]):
    """A step and the observation k rows later, P(k) in proportion to `gamma ** (k - 1)` for k = 1
    .. n.

    n is the number of rows to the end of the episode, its final observation included. Where a
    terminated row has no final observation (`autoreset="same_step_no_final_obs"`), nothing
    is later than it, and k is 0.

    Source: the truncated law is that of Gomez et al., "Proper Laplacian Representation Learning"
    (2024); the clipped one that of Park et al., "OGBench: Benchmarking Offline Goal-Conditioned RL"
    (2025).

    Args:
      gamma: in [0, 1]: at 0 always the next observation, at 1 any later one alike.
      beyond: what becomes of horizons beyond n: "truncate" leaves them out, so that P(k) = g^(k-1)
        (1-g) / (1-g^n); "clip" gives them n.
      max_terminals: None: n is bounded by the episode's end, which must be known. m: by the m-th
        end strictly ahead or, where there are fewer, by the last of them, or by the newest row
        where there is none. Horizons then reach into later episodes of the stream, and an
        unfinished episode may be drawn.
    """

    gamma: float = 0.99
    beyond: str = "truncate"
    max_terminals: int | None = None

    def _check(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"FutureView: gamma must be in [0, 1], got {self.gamma}")
        if self.beyond not in BEYOND:
            raise ValueError(f"FutureView: beyond must be one of {BEYOND}, got {self.beyond!r}")
        if self.max_terminals is not None:
            check_size("FutureView", "max_terminals", self.max_terminals)

    @property
    def window(self) -> Window:
        return (
            Window(after=None)
            if self.max_terminals is None
            else Window(after=1, crosses_episodes=True, needs_episodes=True)
        )

    @property
    def is_random(self) -> bool:
        return True

    def read(self, reader: RowReader) -> Pair:
        num_steps = random.geometric(
            self.gamma, self._bound(reader), *reader.random_words(0), clip=self.beyond == "clip"
        )
        return Pair(
            obs=reader.obs(0),
            action=reader.action(0),
            future_obs=reader.obs(num_steps),
            num_steps=num_steps,
            extras=reader.extras(0),
        )

    def _bound(self, reader: RowReader) -> jax.Array:
        """n: int32[]."""
        to_end = reader.episodes.steps_to_end(reader.row)
        if self.max_terminals is None:
            return to_end
        # a row that is an end itself has it behind, not ahead
        at_end = (to_end == 0).astype(jnp.int32)
        last = jnp.minimum(self.max_terminals + at_end, reader.episodes.ends_ahead(reader.row))
        bound, _ = reader.episodes.kth_end(reader.row, jnp.where(last > at_end, last, 0))
        return bound

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
    """Make pairs of a step and the observation k rows later, where k in 1 .. n is random.

    P(k) is in proportion to `gamma ** (k - 1)`. n is the number of rows to the end of the episode,
    its final row included. A terminated row without a final row
    (`autoreset="same_step_no_final_obs"`) is the last one of its episode: there k is 0.

    Args:
      gamma: Parameter of the geometric distribution, in [0, 1]. With 0, k is always 1. With 1, all
        k are equally probable, or k is always n with `beyond="clip"`. Default: 0.99.
      beyond: Treatment of horizons beyond n. "truncate" leaves them out:
        P(k) = gamma^(k-1) (1-gamma) / (1-gamma^n). "clip" replaces them by n. Default: "truncate".
      max_terminals: Number m of episode ends, at least 1, up to which horizons may reach. They then
        reach into later episodes of the env, and unfinished episodes may be sampled. n ends at the
        m-th end strictly ahead, or at the last of fewer ends, or without any at the newest row.
        Default: n ends with the row's own episode, which must have ended.
      unfinished: Also sample rows of episodes that go on, as soon as a later row is there. n then
        ends at the newest row, so that a row gets farther horizons later. Default: False, a row
        waits for the end of its episode; `max_terminals` samples such rows in any case.

    Example:
      >>> import numpy as np
      >>> def oracle(n, gamma, beyond, rng):
      ...     if beyond == "clip":
      ...         return min(rng.geometric(1 - gamma), n)
      ...     mass = gamma ** np.arange(n)
      ...     return 1 + rng.choice(n, p=mass / mass.sum())

    References:
      Gomez et al., "Proper Laplacian Representation Learning"
      (2024), https://arxiv.org/abs/2310.10833, for the truncated distribution.
      Park et al., "OGBench: Benchmarking Offline Goal-Conditioned RL"
      (2025), https://arxiv.org/abs/2410.20092, for the clipped one.
    """

    gamma: float = 0.99
    beyond: str = "truncate"
    max_terminals: int | None = None
    unfinished: bool = False

    def _check(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"FutureView: gamma must be in [0, 1], got {self.gamma}")
        if self.beyond not in BEYOND:
            raise ValueError(f"FutureView: beyond must be one of {BEYOND}, got {self.beyond!r}")
        if self.max_terminals is not None:
            check_size("FutureView", "max_terminals", self.max_terminals)

    @property
    def window(self) -> Window:
        if self.max_terminals is not None:
            return Window(after=1, crosses_episodes=True, needs_episodes=True)
        if self.unfinished:
            return Window(after=1, needs_final_obs=True, needs_episodes=True)
        return Window(after=None)

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
        """Return n, the largest horizon: int32[]."""
        to_end = reader.episodes.steps_to_end(reader.row)
        if self.max_terminals is None:
            return to_end
        # the end of a row that is an end itself is not strictly ahead
        at_end = (to_end == 0).astype(jnp.int32)
        last = jnp.minimum(self.max_terminals + at_end, reader.episodes.ends_ahead(reader.row))
        bound, _ = reader.episodes.kth_end(reader.row, jnp.where(last > at_end, last, 0))
        return bound

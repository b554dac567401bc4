"""Chunks of actions and a history of observations, for policies that are cloned from robots."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.checks import check_size
from jaxreplay.storage.layout import Window
from jaxreplay.types import Chunk
from jaxreplay.views.frame_stack import PADS
from jaxreplay.views.row_reader import RowReader
from jaxreplay.views.view import View, zeroed


class ChunkView(View[Chunk]):
    """Make chunks: observations and actions at fixed offsets from each sampled row.

    Only the rows at these offsets are gathered. Offsets beyond the episode's first or last step are
    padding. Every row with an action is sampleable, an episode's last one too, since no observation
    after it is read.

    Args:
      obs: Offsets of the observations, rows forward in time; 0 is the sampled row. Default: (0,).
      action: Offsets of the actions, or a number H for 0 .. H - 1. Default: 16.
      pad: Values beyond the episode: "repeat" for those of its first or last step, "zero" for
        zeros. Default: "repeat".

    Example:
      >>> import numpy as np
      >>> def oracle(values, start, end, t, offsets, pad):  # of an episode with steps start .. end
      ...     rows = t + np.asarray(offsets)
      ...     near, is_pad = rows.clip(start, end), (rows < start) | (rows > end)
      ...     return np.where(is_pad & (pad == "zero"), 0, values[near]), is_pad
      >>> values, is_pad = oracle(np.arange(10, 16), 0, 5, t=4, offsets=range(4), pad="repeat")
      >>> print(values, is_pad)
      [14 15 15 15] [False False  True  True]

    References:
      Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (2023),
      https://arxiv.org/abs/2304.13705, for chunks of actions.
      Chi et al., "Diffusion Policy: Visuomotor Policy Learning via Action Diffusion" (2023),
      https://arxiv.org/abs/2303.04137, for the history of observations.
    """

    obs: tuple[int, ...] = (0,)
    action: int | tuple[int, ...] = 16
    pad: str = "repeat"

    def _check(self) -> None:
        if isinstance(self.action, int):
            check_size("ChunkView", "action", self.action)
            object.__setattr__(self, "action", tuple(range(self.action)))
        for name in ("obs", "action"):
            offsets = getattr(self, name)
            is_list = isinstance(offsets, tuple | range) and len(offsets) > 0
            if not is_list or any(isinstance(x, bool) or not isinstance(x, int) for x in offsets):
                raise ValueError(
                    f"ChunkView: {name} must be offsets of rows, such as (-1, 0), got {offsets!r}"
                )
            object.__setattr__(self, name, tuple(offsets))
        if self.pad not in PADS:
            raise ValueError(f"ChunkView: pad must be one of {PADS}, got {self.pad!r}")

    @property
    def window(self) -> Window:
        """Rows from the first offset to the last one. No next observation is needed."""
        offsets = 0, *self.obs, *self.offsets
        return Window(before=-min(offsets), after=max(offsets), needs_next_obs=False)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the actions."""
        assert isinstance(self.action, tuple)
        return self.action

    def read(self, reader: RowReader) -> Chunk:
        window = self.window
        assert window.before is not None
        assert window.after is not None
        later = jnp.arange(1, window.after + 1, dtype=jnp.int32)
        # After the episode's last step lies its final observation, the first row of the next
        # episode, or a row that is not written yet.
        has_action = ~reader.is_final(later) | reader.is_truncated(later)
        goes_on = has_action & ~reader.is_first(later) & (reader.rows_after() >= later)
        last = jnp.cumprod(goes_on, dtype=jnp.int32).sum(dtype=jnp.int32)
        first = -reader.rows_before(0, window.before)

        def at(offsets: tuple[int, ...], read: Any) -> tuple[Any, jax.Array]:
            near = jnp.clip(np.array(offsets, np.int32), first, last)
            is_pad = near != np.array(offsets)
            values = read(near)
            return (zeroed(values, ~is_pad) if self.pad == "zero" else values), is_pad

        obs, obs_is_pad = at(self.obs, reader.obs)
        action, action_is_pad = at(self.offsets, reader.action)
        agents, _ = at(self.offsets, reader.agents)
        action_is_pad |= ~jnp.asarray(reader.is_valid)
        return Chunk(
            obs=obs,
            action=action,
            obs_is_pad=obs_is_pad,
            action_is_pad=action_is_pad,
            extras=reader.extras(0),
            alive=None if agents is None else agents.alive & ~action_is_pad[:, None],
        )

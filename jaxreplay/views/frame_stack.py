"""Stacks of the newest frames. Each frame is stored once; samples rebuild the stacks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import check_size
from jaxreplay._util.names import named
from jaxreplay.storage import ring
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.views.row_reader import RowReader, WrappedReader
from jaxreplay.views.view import WrappedView, zeroed

PADS = ("zero", "repeat")


class FrameStack(WrappedView[Any]):
    """Replace every observation that a view reads by a stack of the newest frames, oldest first.

    A stack never contains frames from before its episode's start. A row whose stack would need
    overwritten frames is not sampled.

    Args:
      num_frames: Number of frames k in a stack, at least 1.
      inner: The view that reads the stacks, such as a `TransitionView`.
      pad: Frames before the episode's start: "zero" for zeros, "repeat" for copies of the first
        frame. Default: "zero".
      key: Name of the one leaf of the observation to stack, such as "image", or "camera.left" for a
        nested leaf. Default: all leaves are stacked.
      axis: Position of the axis of k frames in a stacked leaf. -1 puts it after the frame's axes,
        as flax's convolutions take them; 0 puts it before these, as torch's do. Default: -1.

    Example:
      >>> import numpy as np
      >>> def oracle(frames, start, t, k, pad):  # of an episode that begins at `start`
      ...     place = np.arange(t - k + 1, t + 1)
      ...     stack = frames[place.clip(start)]
      ...     return stack if pad == "repeat" else np.where(place >= start, stack, 0)
      >>> oracle(np.arange(10, 16), start=2, t=3, k=4, pad="zero").tolist()
      [0, 0, 12, 13]

    References:
      Mnih et al., "Human-level control through deep reinforcement learning"
      (2015), methods, "Preprocessing", https://doi.org/10.1038/nature14236
    """

    num_frames: int
    pad: str = "zero"
    key: str | None = None
    axis: int = -1

    def _check(self) -> None:
        check_size("FrameStack", "num_frames", self.num_frames)
        if self.pad not in PADS:
            raise ValueError(f"FrameStack: pad must be one of {PADS}, got {self.pad!r}")
        if not self.inner.needs_steps:
            raise ValueError(
                f"FrameStack: inner={type(self.inner).__name__} has no observations; "
                "give a view of steps, such as jaxreplay.views.TransitionView()"
            )
        if self.inner.reads_any_row:
            raise ValueError(
                "FrameStack: inner reads random rows, whose earlier frames may be overwritten; "
                "put the stack inside: "
                "jaxreplay.hindsight(jaxreplay.frame_stack(buffer, k), ...)"
            )

    @property
    def window(self) -> Window:
        """Window of `inner`, with `num_frames - 1` more rows before it."""
        window = self.inner.window
        before = None if window.before is None else window.before + self.num_frames - 1
        return dataclasses.replace(window, before=before)

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        names = dict(named(example.obs))
        if self.key is not None and self.key not in names:
            has = "is one array: leave out key" if "" in names else f"has {', '.join(names)}"
            raise ValueError(f"{where}: FrameStack: obs has no leaf {self.key!r}; it {has}")
        for name, leaf in names.items():
            if self.key in (None, name) and not -len(leaf.shape) - 1 <= self.axis <= len(
                leaf.shape
            ):
                obs, ndim = f"obs.{name}".removesuffix("."), len(leaf.shape)
                raise ValueError(
                    f"{where}: FrameStack: axis={self.axis} is not in the stacks of {obs}, whose "
                    f"frames are {leaf.shape}: "
                    f"it must be in {-ndim - 1} .. {ndim}"
                )
        super().check(where, layout, example)

    def read(self, reader: RowReader) -> Any:
        return self.inner.read(_Stacks.around(reader, view=self))


@dataclasses.dataclass(frozen=True)
class _Stacks(WrappedReader):
    """A reader whose observations are stacks."""

    view: FrameStack | None = None

    def read(self, name: str, offset: ArrayLike) -> PyTree:
        if name != "obs":
            return super().read(name, offset)
        view, inner = self.view, self._inner
        assert view is not None
        offset = jnp.asarray(offset, jnp.int32)
        depth = inner.rows_before(offset, view.num_frames - 1)[..., None]
        wanted = ring.arange(view.num_frames)[::-1]  # frames back from the newest
        stacked, plain = (
            inner.obs(offset[..., None] - jnp.minimum(wanted, depth)),
            inner.obs(offset),
        )
        if view.pad == "zero":
            stacked = zeroed(stacked, wanted <= depth)
        chosen = [
            _moved(stack, offset.ndim, view.axis) if view.key in (None, name) else frame
            for (name, stack), (_, frame) in zip(named(stacked), named(plain), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(plain), chosen)


def _moved(stack: jax.Array, start: int, axis: int) -> jax.Array:
    """Move the axis of frames from `start`, before the frame's own axes, to `axis` among them."""
    return jnp.moveaxis(stack, start, axis if axis < 0 else start + axis)

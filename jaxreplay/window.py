"""What must be known around a row before it can be drawn: the rows that its view reads."""

import dataclasses

from jaxreplay.struct import Static


class Window(Static):
    """The rows around an anchor, in time. A look-back never crosses the start of the anchor's episode; where it stops there, it is whole.

    Args:
      before: rows before the anchor, or None: from its episode's start.
      after: rows after the anchor, or None: to its episode's end. Fewer are enough where the episode ends sooner, unless `crosses`.
      crosses: whether the rows after it go on into later episodes.
      stride: anchors are every `stride`-th transition: of each episode or, with `crosses`, of the stream.
      needs_tail: whether the observation after a terminated step is read, so that its tail must be written first.
      looks_up: whether ends of episodes are looked up, though the window is bounded.
    """

    before: int | None = 0
    after: int | None = 0
    crosses: bool = False
    stride: int = 1
    needs_tail: bool = False
    looks_up: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether it reads a number of rows that is known beforehand, and so needs no episode table."""
        return self.before is not None and self.after is not None

    @property
    def length(self) -> int:
        """Rows that the shortest stream must hold for one window."""
        return (self.before or 0) + (1 if self.after is None else self.after) + 1

    def widened(self, before: int | None = 0, after: int | None = 0) -> "Window":
        """At least so many rows before and after."""
        return dataclasses.replace(self, before=_larger(self.before, before), after=_larger(self.after, after))


def _larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)

"""When an actor that was lost is started again."""

_FIRST, _LONGEST = 0.25, 60.0  # seconds of a pause: the second restart's, and the most
_LONG = 600.0  # seconds after which an actor has run well


class Restarts:
    """Restarts of an actor, with pauses that grow, so that it outlasts what is away for a while.

    Args:
      most: Number of restarts in a row. An actor that has run for ten minutes begins another row.
    """

    def __init__(self, most: int):
        self._most, self._num = most, 0

    def pause_after(self, seconds: float) -> float | None:
        """Return the pause before the next restart in seconds; None if there is none.

        Args:
          seconds: Seconds that the actor has run.
        """
        self._num = 1 if seconds >= _LONG else self._num + 1
        if self._num > self._most:
            return None
        return 0.0 if self._num == 1 else min(_FIRST * 2.0 ** (self._num - 2), _LONGEST)

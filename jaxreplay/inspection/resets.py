"""Detect a wrong `autoreset` from stored rows: the env then resets one row early or late.

At a reset the observation jumps: it changes more than from step to step. The jump belongs between
an episode's last row (the final row, if there is one) and the first row of the next episode. If it
comes before the last row, or after the first row, `autoreset` is wrong:

    declared          the env resets                the largest change
    "same_step..."    in the next step              after the first row, whose reward is 0
    "next_step"       within the step               before the last row, which has a reward
    "same_step"       within the step, final_obs    before the last row, which equals the first one
                      is taken after the reset
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxreplay.storage import row_flags
from jaxreplay.types import Step

LEAST_RESETS = 20  # fewer resets are not enough evidence
MOST_RESETS = 200  # rows are read around at most this many resets
_MOST_BYTES = 2**24  # of observations that are read
_MOST_ELEMENTS = 4096  # of an observation's leaf that are compared
_FEW_ELEMENTS = 64  # the same for each step
_MOST_ROWS = 2**14  # steps that `FinalObsWatch` looks at
_BEFORE_LAST, _LAST, _FIRST, _AFTER_FIRST = range(4)  # the rows around a reset
# At least this fraction of resets must jump at a wrong place. On CartPole with a random policy (4
# envs, 400 steps, 100 seeds, episodes of at most 5, 12 and 500 steps) the fraction is at least 0.9
# if `autoreset` is wrong, and at most 0.11 if it is right.
_CLEAR = 0.75
_RARE = 0.05  # a smaller fraction counts as none


@dataclasses.dataclass(frozen=True)
class Resets:
    """The four rows around K resets."""

    autoreset: str  # the buffer's
    flags: np.ndarray  # uint8[K, 4]
    reward: np.ndarray | None  # float64[K, 4]; None if rewards are not scalar
    obs: list[np.ndarray]  # [K, 4, ...] for each leaf


def rows_around_resets(flags: np.ndarray, env: np.ndarray, row_bytes: int) -> np.ndarray:
    """Return the indices of the four rows around each reset, evenly spread: int64[K, 4].

    Args:
      flags: uint8[R]; flags of rows in order, stream after stream.
      env: int[R]; the stream of each row.
      row_bytes: Bytes of a row's observation.
    """
    first = np.flatnonzero(flags & row_flags.FIRST)
    first = first[(first >= _FIRST) & (first < len(flags) - 1)]
    rows = first[:, None] + np.arange(-_FIRST, 2)
    rows = rows[env[rows[:, _BEFORE_LAST]] == env[rows[:, _AFTER_FIRST]]]
    most = min(max(_MOST_BYTES // (4 * max(row_bytes, 1)), LEAST_RESETS), MOST_RESETS)
    return rows[np.linspace(0, len(rows) - 1, most).astype(int)] if len(rows) > most else rows


def wrong_autoreset(resets: Resets) -> str | None:
    """Return the evidence for a wrong `autoreset` in one line, or None without evidence."""
    # Around an episode of one row, the change before or after it is another reset, not a step.
    is_first = (resets.flags & row_flags.FIRST) != 0
    chosen = ~is_first[:, _LAST] & ~is_first[:, _AFTER_FIRST]
    count, form = int(chosen.sum()), resets.autoreset
    if count < LEAST_RESETS or not resets.obs:
        return None
    before, between, after = _changes([leaf[chosen] for leaf in resets.obs]).T
    early = (before > np.maximum(between, after)).mean()
    late = (after > np.maximum(before, between)).mean()
    rewarded, of_rewards = np.zeros(4), ""  # fraction of resets whose row has a reward
    if resets.reward is not None:
        rewarded = (resets.reward[chosen] != 0).mean(axis=0)
        of_rewards = "; {:.0%} of these rows have a reward"
    if late >= _CLEAR and form != "next_step" and rewarded[_FIRST] <= _RARE:
        return (
            f'autoreset="{form}" looks wrong: at {late:.0%} of {count} resets the observation '
            f"jumps after the first row of the episode{of_rewards.format(rewarded[_FIRST])}. The "
            'env seems to reset in the step after a done: autoreset="next_step"'
        )
    if early >= _CLEAR and form == "next_step" and rewarded[_LAST] >= rewarded[_AFTER_FIRST] / 2:
        return (
            f'autoreset="next_step" looks wrong: at {early:.0%} of {count} resets the observation '
            f"jumps before the final row{of_rewards.format(rewarded[_LAST])}. The env seems to "
            'reset within the step, autoreset="same_step", or the step after a done was masked or '
            "left out"
        )
    if early >= _CLEAR and form == "same_step":
        same = _is_same(resets.obs).mean()
        if same >= 1 - _RARE:
            return (
                f"final_obs looks wrong: {same:.0%} of {len(resets.flags)} are the first "
                "observation of the next episode. It must be the observation after the last "
                "action, before the reset"
            )
    return None


def _changes(obs: list[np.ndarray]) -> np.ndarray:
    """Return the change of the observation from row to row: float64[K, 3]. It is a sum over
    elements, each divided by its mean change."""
    total = np.zeros((len(obs[0]), 3))
    for leaf in obs:
        values = leaf.reshape(*leaf.shape[:2], -1)
        values = values[..., :: max(values.shape[2] // _MOST_ELEMENTS, 1)]
        values = (np.abs(values) if leaf.dtype.kind == "c" else values).astype(np.float64)
        change = np.abs(np.diff(np.nan_to_num(values, posinf=0, neginf=0), axis=1))
        scale = change.mean(axis=(0, 1))
        total += (change / np.where(scale > 0, scale, 1)).sum(axis=2)
    return total


def _is_same(obs: list[np.ndarray]) -> np.ndarray:
    """Return True for resets whose last and first row have the same observation: bool[K]."""
    same = np.ones(len(obs[0]), bool)
    for leaf in obs:
        same &= (leaf[:, _LAST] == leaf[:, _FIRST]).reshape(len(leaf), -1).all(axis=1)
    return same


class ResetWatch:
    """Report a wrong `autoreset` to the owner of a state, once.

    It examines the rows after 256 steps, and again after twice as many, until it has seen
    `MOST_RESETS` resets. At other times an `add` costs one comparison. The owner lets it look when
    no steps wait on the host: to add them for a look would compile a program for their number.
    """

    def __init__(self) -> None:
        self._num_steps, self._next_look = 0, 256.0

    @property
    def is_due(self) -> bool:
        """Return whether it is time for a look."""
        return self._num_steps >= self._next_look

    def count(self, num_steps: int) -> None:
        """Count steps that were added, over all envs."""
        self._num_steps += num_steps

    def look(self, rows: Callable[[], Resets | None]) -> str | None:
        """Return the evidence for a wrong `autoreset` if a look is due and finds some, or None.

        Args:
          rows: Returns the rows around resets, or None for items.
        """
        if not self.is_due:
            return None
        resets = rows()
        problem = None if resets is None else wrong_autoreset(resets)
        is_over = problem is not None or resets is None or len(resets.flags) >= MOST_RESETS
        self._next_look = float("inf") if is_over else 2.0 * self._num_steps
        return problem


class FinalObsWatch:
    """Report resets by hand that no flag tells, once: while an episode goes on, the given
    `final_obs` is the next step's observation.

    A `final_obs` that is filled only where episodes end is no evidence. It looks at host arrays.
    """

    def __init__(self) -> None:
        self._num_same = self._num_others = self._num_rows = 0
        self._is_over = False
        self.restart()

    def restart(self) -> None:
        """Begin anew: the next step follows none before it."""
        self._after: list[np.ndarray] = []  # [1, E, N] for each leaf, of the newest step
        self._goes_on = np.zeros((0, 0), bool)  # [1, E]

    def look(self, steps: Step, mask: np.ndarray | None) -> str | None:
        """Return the evidence in one line, or None.

        Args:
          steps: Leaves [T, E, ...].
          mask: bool[T, E], False where an env took no step, or None.
        """
        leaves = jax.tree.leaves((steps, mask))
        if self._is_over or steps.final_obs is None or not leaves[0].shape[0]:
            return None
        if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
            return self.restart()
        done = steps.terminated | steps.truncated
        done = done.all(axis=-1) if done.ndim > 2 else done
        taken = np.ones(done.shape, bool) if mask is None else mask
        goes_on = taken & ~done
        obs, after = (
            [_few(leaf) for leaf in jax.tree.leaves(tree)] for tree in (steps.obs, steps.final_obs)
        )
        start = 1 - len(self._goes_on)  # the first step has one before it, or none
        is_pair = np.concatenate([self._goes_on, goes_on[:-1]]) if start == 0 else goes_on[:-1]
        is_pair = is_pair & taken[start:]
        is_same = np.ones(is_pair.shape, bool)
        for place, leaf in enumerate(obs):
            before = after[place][:-1]
            before = before if start else np.concatenate([self._after[place], before])
            now = leaf[start:]
            is_same &= ((now == before) | ((now != now) & (before != before))).all(axis=2)
        self._after, self._goes_on = [leaf[-1:].copy() for leaf in after], goes_on[-1:]
        self._num_same += int((is_pair & is_same).sum())
        self._num_others += int((is_pair & ~is_same).sum())
        self._num_rows += len(goes_on)
        is_wrong = self._num_others and self._num_same >= max(LEAST_RESETS, 2 * self._num_others)
        self._is_over = bool(is_wrong) or self._num_rows >= _MOST_ROWS
        if not is_wrong:
            return None
        return (
            f"final_obs differs from the next observation at {self._num_others} of "
            f"{self._num_others + self._num_same} steps that end no episode. The envs seem to be "
            "reset by hand: flag the last step as truncated, or call end_streams after the reset"
        )


def _few(leaf: np.ndarray) -> np.ndarray:
    """Return some elements of each observation: [T, E, N]."""
    values = leaf.reshape(*leaf.shape[:2], -1)
    return values[..., :: max(values.shape[2] // _FEW_ELEMENTS, 1)]

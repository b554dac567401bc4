"""Hindsight experience replay: an achieved goal replaces the desired one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util import random
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import call_traced, check_callable, check_leaves
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.types import Step
from jaxreplay.views.relabelled import of_each
from jaxreplay.views.row_reader import RowReader, WrappedReader
from jaxreplay.views.view import WrappedView

STRATEGIES = ("future", "final", "episode", "random")
_CURE = "; or use jaxreplay.sb3.HerReplayBuffer, which calls the env's compute_reward in NumPy"


class Hindsight(WrappedView[Any]):
    """Relabel a fraction of a view's items with goals that were achieved.

    Observations are mappings like those of Gymnasium's goal envs. Each sample chooses a new goal
    for each relabelled item. The goal replaces the desired one in all observations that `inner`
    reads, and all rewards that it reads are computed anew.

    Args:
      inner: The view that reads the relabelled steps, such as a `TransitionView`. It must not cross
        episodes.
      reward_fn: Pure function `reward_fn(achieved, goal, step)` that returns the reward of one step
        for a new goal. `achieved` is the achieved goal after the step, `goal` the new goal, and
        `step` the stored `Step` with its old goal. The stored reward's shape and dtype must be able
        to hold the result.
      terminated_fn: Pure function `terminated_fn(achieved, goal, step)` that returns a bool[]: True
        if the step terminates the episode for a new goal. n-step targets and sequences then stop
        there. Default: flags stay as stored, so a step that achieves its new goal is bootstrapped
        from.
      strategy: Rows that a new goal is taken from, each with the same probability. "future": later
        rows of the episode. "final": the last row of the episode. "episode": all rows of the
        episode. "random": all stored rows. Final rows are among them. Default: "future".
      unfinished: Also sample rows of episodes that go on, and of those whose first rows are
        overwritten. Goals are then taken from the rows that are stored, so that a row of an episode
        that goes on gets other goals later. Any sampler works then. Default: False, a row waits for
        the end of its episode, and with "episode" its first row must be stored.
      relabel_fraction: Probability that an item is relabelled, in [0, 1]; k / (k + 1) in the
        paper's terms. Default: 0.8.
      achieved_key: Key in the observation of the achieved goal. Default: "achieved_goal".
      desired_key: Key in the observation of the desired goal. Default: "desired_goal".

    Example:
      >>> def oracle(achieved, desired, t, start, end, strategy, fraction, rng):
      ...     if rng.random() >= fraction:  # of an episode with the rows start .. end
      ...         return desired[t]
      ...     rows = {"future": range(t + 1, end + 1), "final": [end]}
      ...     rows |= {"episode": range(start, end + 1), "random": range(len(achieved))}
      ...     return achieved[rng.choice(rows[strategy])]  # reward: reward_fn(achieved[t + 1], it)

    References:
      Andrychowicz et al., "Hindsight Experience Replay"
      (2017), sections 3.2 and 4.5, https://arxiv.org/abs/1707.01495. There, relabelled copies are
      stored.
    """

    reward_fn: Callable[[Any, Any, Step], Any]
    terminated_fn: Callable[[Any, Any, Step], Any] | None = None
    strategy: str = "future"
    unfinished: bool = False
    relabel_fraction: float = 0.8
    achieved_key: str = "achieved_goal"
    desired_key: str = "desired_goal"

    def _check(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"Hindsight: strategy must be one of {STRATEGIES}, got {self.strategy!r}"
            )
        if not 0 <= self.relabel_fraction <= 1:
            raise ValueError(
                f"Hindsight: relabel_fraction must be in [0, 1], got {self.relabel_fraction}"
            )
        for name in (
            ("reward_fn",) if self.terminated_fn is None else ("reward_fn", "terminated_fn")
        ):
            check_callable("Hindsight", name, getattr(self, name), ("achieved", "goal", "step"))
        if self.achieved_key == self.desired_key:
            raise ValueError(
                f"Hindsight: achieved_key and desired_key are both {self.achieved_key!r}, but must "
                "name two parts of the observation: the achieved goal and the desired one"
            )
        if not self.inner.needs_steps or self.inner.window.crosses_episodes:
            raise ValueError(
                "Hindsight: inner must be a view of steps that does not cross episodes, such as "
                f"jaxreplay.views.TransitionView(), got {self.inner}"
            )

    @property
    def window(self) -> Window:
        """Window of `inner`, widened to the rows that goals are taken from."""
        inner = dataclasses.replace(self.inner.window, needs_next_obs=True)
        if self.strategy == "random":
            return dataclasses.replace(inner, needs_final_obs=True)
        if self.unfinished:  # a goal needs a later row
            inner = inner.widened(after=1)
            return dataclasses.replace(inner, needs_final_obs=True, needs_episodes=True)
        return inner.widened(before=None if self.strategy == "episode" else 0, after=None)

    @property
    def is_random(self) -> bool:
        """True: goals are chosen at random."""
        return True

    @property
    def reads_any_row(self) -> bool:
        return self.strategy == "random" or self.inner.reads_any_row

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        if not isinstance(example.obs, Mapping) or not {self.achieved_key, self.desired_key} <= set(
            example.obs
        ):
            raise ValueError(
                f"{where}: Hindsight needs observations that are mappings with the keys "
                f"{self.achieved_key!r} and {self.desired_key!r}, "
                "got "
                + (
                    f"the keys {', '.join(map(str, example.obs))}"
                    if isinstance(example.obs, Mapping)
                    else "no mapping"
                )
            )
        hint = "Hindsight replaces the desired goal by an achieved one: both need the same leaves."
        check_leaves(
            where,
            {self.desired_key: example.obs[self.desired_key]},
            {self.desired_key: example.obs[self.achieved_key]},
            hint,
        )
        if not layout.termination_has_final_row:
            raise ValueError(
                f"{where}: Hindsight needs the final observation of each episode, which "
                'autoreset="same_step_no_final_obs" does not store; use autoreset="same_step" and '
                "give each step its final_obs"
            )
        if example.terminated.shape and self.terminated_fn is not None:
            raise ValueError(f"{where}: Hindsight: terminated_fn is for envs without num_agents")
        super().check(where, layout, example)

    def read(self, reader: RowReader) -> Any:
        high, _ = reader.random_words(0)
        is_relabelled = random.fraction(high) < self.relabel_fraction
        # Random choices of `inner`, such as a horizon or a goal of its own, must be independent of
        # whether this item is relabelled.
        inner = reader.at(bits=jnp.stack(reader.random_words(2)))
        return self.inner.read(
            _Relabelled.around(
                inner, view=self, is_relabelled=is_relabelled, goal=self._goal(reader)
            )
        )

    def _goal(self, reader: RowReader) -> Any:
        if self.strategy == "random":
            return reader.random_row(1).obs(0)[self.achieved_key]
        to_end = reader.episodes.steps_to_end(reader.row)
        if self.strategy == "future":
            offset = random.below(*reader.random_words(1), to_end) + 1
        elif self.strategy == "final":
            offset = to_end
        else:
            from_start = reader.episodes.steps_from_start(reader.row)
            offset = random.below(*reader.random_words(1), from_start + to_end + 1) - from_start
        return reader.obs(offset)[self.achieved_key]


@dataclasses.dataclass(frozen=True)
class _Relabelled(WrappedReader):
    """A reader of steps with a new goal."""

    view: Any = None  # Hindsight
    is_relabelled: Any = None  # bool[]
    goal: Any = None  # pytree

    def read(self, name: str, offset: ArrayLike) -> PyTree:
        stored, view = super().read(name, offset), self.view
        if name == "obs":
            return {**stored, view.desired_key: self._new(self.goal, stored[view.desired_key])}
        function = getattr(view, f"{name}_fn", None)  # of "reward" and "terminated"
        if function is None:
            return stored

        def one(offset: jax.Array) -> PyTree:
            achieved = self._inner.obs(offset + 1)[view.achieved_key]
            given = achieved, self.goal, self._inner.step(offset)
            return call_traced("Hindsight", f"{name}_fn", function, *given, cure=_CURE)

        return self._new(of_each("Hindsight", function, one, offset, stored), stored)

    def _new(self, new: PyTree, stored: PyTree) -> Any:
        """Return what is new, or what is stored if the goal stays as it is."""
        return jax.tree.map(lambda new, old: jnp.where(self.is_relabelled, new, old), new, stored)
